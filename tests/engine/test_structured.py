"""Structured outputs: what may come next against plain string work, and texts that keep to it."""

import copy
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.sampling import LogitsSampler
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Draw, Sampled, StepPlan
from quire.engine.structured import Grammars
from quire.errors import RequestError
from quire.models.loader import LoadedModel, load
from quire.sampling_params import Reasoning

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
EOS = 0


@cache
def demo() -> LoadedModel:
    return load(dtype="float32")  # in fewer bits, what is computed again rounds otherwise


@cache
def grammars() -> Grammars:
    return Grammars(demo().tokenizer, vocab_size(), [EOS])


@cache
def vocab_size() -> int:
    return int(demo().model.get_input_embeddings().weight.shape[0])


@cache
def spellings() -> list[bytes]:
    """What each token writes; nothing for special ones."""
    tokenizer = demo().tokenizer
    special = set(tokenizer.all_special_ids)
    letters = {letter: byte for byte, letter in enumerate_bytes()}
    return [
        b"" if i in special else bytes(letters[c] for c in token)
        for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(vocab_size())))
    ]


def enumerate_bytes() -> list[tuple[int, str]]:
    """GPT-2's way to write each byte as a letter."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [(b, chr(b)) for b in plain] + [(b, chr(256 + i)) for i, b in enumerate(others)]


def sequence(form: StructuredOutputsParams, *, seq_id: int = 1, **params: Any) -> Sequence:
    request = Request(
        request_id=seq_id,
        prompt_token_ids=(5,),
        params=SamplingParams(max_tokens=500, structured_outputs=form, **params),
        grammar=grammars().compile(form),
    )
    return Sequence(request, seq_id=seq_id)


def plan_of(own: Sequence, drafts: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(chunks=(), draws=(Draw(sequence=own, row=0, drafts=drafts),), prompt_rows=())


def model(token_ids: list[int]) -> Tensor:
    """Logits that depend on all that came, and like brackets, quotes and the end."""
    numbers = np.random.default_rng(token_ids)
    logits = numbers.normal(size=vocab_size()) * 2
    logits[[EOS, *[spellings().index(bytes([byte])) for byte in b'"{}[],:1a']]] += 6
    return torch.from_numpy(logits).float()


def text_of(own: Sequence, *, guess: Any = lambda token_ids: (), anew: bool = False) -> bytes:
    """What a sequence becomes until its grammar ends."""
    sampler = LogitsSampler(0, frozenset([EOS]))
    for _ in range(300):
        drafts = guess(own.token_ids)
        logits = torch.stack(
            [model(own.token_ids + list(drafts[:place])) for place in range(len(drafts) + 1)]
        )
        (result,) = sampler.sample(logits, plan_of(own, drafts))
        assert not result.error, result.error
        assert repr(sampler.sample(logits, plan_of(own, drafts))) == repr([result])
        own.token_ids += result.token_ids
        if anew:
            sampler.forget(own)
        if result.ends or own.token_ids[-1] == EOS:
            return b"".join(spellings()[token] for token in own.output_token_ids)
    raise AssertionError("it never ends")


# -- which tokens may come ------------------------------------------------------------------------


@given(
    choices=st.lists(st.text('ab é👍"\n', min_size=1, max_size=6), min_size=1, max_size=5),
    picks=st.lists(st.integers(0, 2**32), max_size=8),
)
@settings(max_examples=40)
def test_a_token_may_come_if_some_choice_goes_on_so(choices: list[str], picks: list[int]) -> None:
    """Where only one text can follow, llguidance wants it in the tokenizer's own tokens."""
    whole = [choice.encode() for choice in choices]
    matcher = grammars().compile(StructuredOutputsParams(choice=tuple(choices))).matcher()
    written = b""
    for pick in [*picks, 0]:
        left = [each[len(written) :] for each in whole if each.startswith(written)]
        (bits,) = matcher.masks(())
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        following = [i for i in allowed if i != EOS]
        assert (EOS in allowed) == (b"" in left)
        assert all(
            spellings()[i] and any(rest.startswith(spellings()[i]) for rest in left)
            for i in following
        )
        for rest in filter(None, left):
            assert any(rest.startswith(spellings()[i]) for i in following), "out of reach"
        if not following:
            break
        token = following[pick % len(following)]
        written += spellings()[token]
        at_end = written in whole and not any(
            each.startswith(written) and each != written for each in whole
        )
        assert matcher.taken([token]) == (1, at_end)
        ends_here = written in whole
        assert matcher.taken([token, EOS]) == (1 + (ends_here and not at_end), ends_here)
        matcher.consume([token])


FORMS = [
    StructuredOutputsParams(json=PERSON),
    StructuredOutputsParams(json=json.dumps(PERSON), disable_any_whitespace=True),
    StructuredOutputsParams(regex=r"[a-f]{3,5}-\d{2}(, (yes|no))*"),
    StructuredOutputsParams(choice=("yes", "no", "é👍")),
    StructuredOutputsParams(grammar='root ::= "x" | "(" root ")"'),
    StructuredOutputsParams(grammar='start: "x" | "(" start ")"'),
]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.source[0])


def assert_fits(form: StructuredOutputsParams, written: bytes) -> None:
    text = written.decode()
    match form.source:
        case "json", _:
            person = json.loads(text)
            assert list(person) == ["name", "age", "tags"]
            assert len(person["name"]) <= 8
            assert person["age"] in range(151)
            assert set(person["tags"]) <= {"a", "b"}
            if form.disable_any_whitespace:
                assert not re.search(r"\s", re.sub(r'"[^"]*"', "", text))
        case "regex", pattern:
            assert re.fullmatch(pattern, text)
        case "choice", choices:
            assert text in json.loads(choices)
        case _:
            assert re.fullmatch(r"(\(*)x(\)*)", text)
            assert text.count("(") == text.count(")")


@forms
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_p": 0.9}])
def test_every_text_fits_and_nothing_around_it_matters(
    form: StructuredOutputsParams, kind: dict[str, Any]
) -> None:
    own = sequence(form, **kind)
    written = text_of(own)
    assert_fits(form, written)
    assert text_of(sequence(form, **kind), anew=True) == written
    tokens = own.token_ids

    def guess(token_ids: list[int]) -> tuple[int, ...]:
        """What comes next, and more after the end; sometimes with a wrong token within."""
        right = [*tokens[len(token_ids) : len(token_ids) + 4], 9]
        if len(token_ids) % 3 == 1:
            right[len(token_ids) % len(right)] = 7
        return tuple(right)

    drafted = sequence(form, **kind)
    assert text_of(drafted, guess=guess) == written
    assert drafted.token_ids == tokens


def test_grammars_are_followed_beside_rows_that_have_none() -> None:
    own = sequence(FORMS[3], seed=1)
    greedy = Request(request_id=2, prompt_token_ids=(1,), params=SamplingParams(temperature=0))
    free = Sequence(greedy, seq_id=2)
    logits = torch.stack([model([1]), model([2])])
    draws = (Draw(sequence=free, row=0), Draw(sequence=own, row=1))
    found = LogitsSampler().sample(logits, StepPlan(chunks=(), draws=draws, prompt_rows=()))
    assert found[0].token_ids == (int(logits[0].argmax()),)
    assert found[1:] == LogitsSampler().sample(logits[1:], plan_of(own))


@pytest.mark.parametrize("form", [{"regex": "a{0,0}"}, {"grammar": 'start: ""'}])
def test_a_text_that_may_be_empty_ends_with_eos(form: dict[str, Any]) -> None:
    own = sequence(StructuredOutputsParams(**form), ignore_eos=True)
    (result,) = LogitsSampler().sample(model([1])[None], plan_of(own))
    assert result == Sampled(token_ids=(EOS,), ends=True)


def test_where_the_grammar_does_not_follow_the_sequence_fails_alone() -> None:
    own = sequence(FORMS[3])
    own.token_ids += [spellings().index(b"x")]
    for _ in range(2):
        (result,) = LogitsSampler().sample(model([1])[None], plan_of(own))
        assert result.token_ids == ()
        assert result.error.startswith("structured_outputs: ")
    nothing = sequence(StructuredOutputsParams(choice=("yes",)), logit_bias={5: 1.0})
    logits = torch.full((1, vocab_size()), -torch.inf)
    logits[0, EOS] = 1.0
    (result,) = LogitsSampler().sample(logits, plan_of(nothing))
    assert "no token is allowed here" in result.error


# -- reasoning before the text --------------------------------------------------------------------

# As token that is no text, as token that is (it has no brackets), and as text of several tokens.
MARKS = [("<think>", "</think>"), ("THINK", "ENDED"), ("Here I think:", "Here I say:")]


@cache
def marked() -> tuple[Any, Grammars]:
    """The demo model's tokenizer with four tokens more, and its grammars."""
    tokenizer = copy.deepcopy(demo().tokenizer)
    tokenizer.add_tokens([mark for pair in MARKS[:2] for mark in pair])
    tokenizer.add_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>"])
    return tokenizer, Grammars(tokenizer, vocab_size() + 8, [EOS])


def taken_of(form: StructuredOutputsParams, text: str) -> tuple[bool, bool]:
    """Whether the grammar takes all of a text, and whether the text may end there."""
    tokenizer, own = marked()
    matcher = own.compile(form).matcher()
    token_ids = tokenizer(text)["input_ids"]
    if matcher.taken(token_ids)[0] < len(token_ids):
        return False, False
    is_over = matcher.taken(token_ids)[1]
    return True, is_over or matcher.taken([*token_ids, EOS])[0] > len(token_ids)


@forms
@pytest.mark.parametrize("marks", MARKS, ids=["token", "text token", "text"])
def test_a_form_begins_behind_the_reasoning(
    form: StructuredOutputsParams, marks: tuple[str, str]
) -> None:
    opens, closes = marks
    right = {"json": '{"name":"a","age":3,"tags":[]}', "regex": "abc-12", "choice": "yes"}
    text = right.get(form.source[0], "(x)")
    begun = replace(form, reasoning=Reasoning(opens=opens, closes=closes, is_open=True))
    free = replace(form, reasoning=Reasoning(opens=opens, closes=closes, is_open=False))
    thought = f" hm é👍 \n\n {text} < / {closes[:3]} so"
    for behind in ("", "\n\n"):
        assert taken_of(begun, f"{thought}{closes}{behind}{text}") == (True, True)
        assert taken_of(begun, f"{opens}{thought}{closes}{behind}{text}") == (True, True)
        assert taken_of(free, f"{opens}{thought}{closes}{behind}{text}") == (True, True)
        assert taken_of(free, f"\n{opens}{closes}{behind}{text}") == (True, True)
    assert taken_of(free, text) == (True, True)
    assert taken_of(form, text) == (True, True)
    assert taken_of(begun, thought) == (True, False)
    assert taken_of(begun, f"{thought}{closes}") == (True, False)
    assert taken_of(free, thought) == (False, False)
    assert taken_of(begun, f"{thought}{closes}?")[0] is False
    assert taken_of(form, f"{opens}{thought}{closes}{text}")[0] is False


def test_a_mark_is_not_spelled_in_other_tokens() -> None:
    """A reader takes it for the mark, in whatever tokens it comes."""
    tokenizer, own = marked()
    form = replace(FORMS[3], reasoning=Reasoning(opens="<think>", closes="</think>", is_open=True))
    spelled = demo().tokenizer("</think>")["input_ids"]
    assert len(spelled) > 1
    matcher = own.compile(form).matcher()
    assert matcher.taken(spelled)[0] == len(spelled) - 1
    matcher.consume(spelled[:-1])
    rest = tokenizer("</think>yes")["input_ids"]
    assert matcher.taken(rest) == (len(rest), True)


def test_marks_of_several_tokens_and_a_lead() -> None:
    """As gpt-oss has them: messages with headers, in which tokens stand beside words."""
    opens, closes = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    lead = "<|channel|>final<|message|>"
    begun = replace(
        FORMS[3], reasoning=Reasoning(opens=opens, closes=closes, lead=lead, is_open=True)
    )
    free = replace(
        FORMS[3], reasoning=Reasoning(opens=opens, closes=closes, lead=lead, is_open=False)
    )
    for thought in ("", "hm <|end|"):
        assert taken_of(free, f"{opens}{thought}{closes}{lead}yes") == (True, True)
        assert taken_of(begun, f"{thought}{closes}{lead}yes") == (True, True)
    assert taken_of(free, f"{lead}yes") == (True, True)
    for wrong in ("yes", f"{opens}hm{closes}yes", f"{opens}hm{closes}\n{lead}yes", f"{lead}\nyes"):
        assert taken_of(free, wrong)[0] is False
    assert taken_of(free, f"{opens}hm<|end|><|start|>user")[0] is False


def test_what_is_wrong_with_a_form_is_said_with_reasoning_too() -> None:
    before = Reasoning(opens="<think>", closes="</think>", is_open=True)
    for form, message in (
        ({"json": {"$ref": "#"}}, "no text can follow"),
        ({"regex": "("}, "wrong"),
    ):
        with pytest.raises(RequestError, match=message):
            marked()[1].compile(StructuredOutputsParams(**form, reasoning=before))
    with pytest.raises(RequestError, match="closes='' must be"):
        Reasoning(opens="a", closes="", is_open=True)
    with pytest.raises(RequestError, match="must be Reasoning, or None"):
        StructuredOutputsParams(regex="a", reasoning=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1}', True), ('{ "a" : 1 }', True), ('{\n"a":\n1}', True),
        ('{"a":  1}', False), ('{"a":\n 1}', False), ('{\t\t"a":1}', False),
    ],
)  # fmt: skip
def test_there_is_at_most_one_blank_between_jsons_tokens(text: str, fits: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert taken_of(StructuredOutputsParams(json=schema), text)[0] == fits


def test_no_key_that_a_schema_names_comes_twice() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = StructuredOutputsParams(json=schema)
    assert taken_of(form, '{"a":1,"b":2}') == (True, True)
    assert taken_of(form, '{"a":1,"a":2}')[0] is False
    assert taken_of(form, '{"b":1,"a":2}')[0] is False


# -- what is refused, and what is kept ------------------------------------------------------------

# Six to the power of eight combinations.
TOO_LARGE = {
    "allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(6)]} for i in range(8)],
    "type": "object",
}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "nonsense"}}, "the json is wrong: Invalid type: nonsense"),
        ({"json": {"$ref": "http://example.com/x"}}, "the json is wrong: .*example.com"),
        ({"regex": "a("}, "the regex is wrong: .*regex"),
        ({"regex": "a(?=b)"}, "the regex is wrong"),
        ({"grammar": "start: x"}, 'the grammar is wrong: .*unknown name: "x"'),
        ({"grammar": "root ::= ("}, "the grammar is wrong: .*GBNF"),
        ({"grammar": "root ::= " + "(" * 5000}, "the grammar is wrong"),
        ({"choice": ["a\ud800"]}, "the choice is wrong"),
        ({"regex": "a" * 70_000}, "the regex is longer than 64"),
        ({"grammar": 'start: "' + "a" * 20_000 + '"'}, "the grammar is longer than 16"),
        ({"json": TOO_LARGE}, "the json is wrong: schema too large"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_reason(
    form: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs: {message}"):
        grammars().compile(StructuredOutputsParams(**form))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one of .* not none"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of .* not regex and choice"),
        ({"json_object": True, "json": {}}, "exactly one of .* not json and json_object"),
        ({"regex": ""}, "regex='' must be"),
        ({"grammar": 3}, "grammar=3 must be"),
        ({"choice": []}, r"choice=\[\] must be"),
        ({"choice": "yes"}, "choice='yes' must be"),
        ({"choice": ["a", ""]}, "choice=.* must be"),
        ({"json": "{"}, "json='{' must be a JSON schema"),
        ({"json": "[1]"}, "json=.* must be a JSON schema: an object"),
        ({"json": {"a": {1, 2}}}, "json=.* must be a JSON schema"),
        ({"json": {"a": float("nan")}}, "json=.* must be a JSON schema"),
        ({"json_object": 1}, "json_object=1 must be"),
        ({"regex": "a", "disable_any_whitespace": None}, "disable_any_whitespace=None must be"),
    ],
)
def test_a_form_out_of_its_limits_is_refused_by_name(form: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**form)


def test_a_schemas_properties_keep_their_order() -> None:
    given = {"type": "object", "properties": {"z": {}, "a": {}}}
    assert StructuredOutputsParams(json=given).source == ("json", json.dumps(given))
    assert StructuredOutputsParams(json=given) == StructuredOutputsParams(json=json.dumps(given))


def test_grammars_are_compiled_once_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.structured._MOST_GRAMMARS", 2)
    own = Grammars(demo().tokenizer, vocab_size(), [EOS])
    a, b, c = (StructuredOutputsParams(regex=letter) for letter in "abc")
    first = own.compile(a)
    second = own.compile(b)
    assert own.compile(StructuredOutputsParams(regex="a")) is first
    own.compile(c)
    assert own.compile(a) is first
    assert own.compile(b) is not second


def test_any_thread_may_compile() -> None:
    own = Grammars(demo().tokenizer, vocab_size(), [EOS])
    several = [StructuredOutputsParams(regex=f"a{{{i % 5}}}b") for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(own.compile, several))
    assert len(found) == 40
    assert len({id(own.compile(form)) for form in several}) == 5


def test_a_long_way_from_rule_to_rule_does_no_harm() -> None:
    """On a stack of the usual size it ended the process."""
    rules = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1400)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**rules, "a1400": {"type": "string"}}}
    matcher = grammars().compile(StructuredOutputsParams(json=schema)).matcher()
    (bits,) = matcher.masks(())
    assert bits.any()
    assert not matcher.error


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="no tokenizer"):
        Grammars(None, 10, []).compile(form)
    with pytest.raises(RequestError, match="needs a fast tokenizer, and object is none"):
        Grammars(object(), 10, []).compile(form)
    with pytest.raises(RequestError, match="cannot use this model's tokenizer"):
        Grammars(demo().tokenizer, 10, []).compile(form)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'quire-kv\[structured\]'"):
        Grammars(demo().tokenizer, 10, []).compile(form)


# -- on the demo model ----------------------------------------------------------------------------


def test_the_demo_model_writes_what_the_schema_says() -> None:
    """With others beside it, in a cache so small that sequences make room for each other."""
    prompt = 'person = json.loads("""'
    params = [
        SamplingParams(max_tokens=150, n=2, seed=3, structured_outputs=FORMS[0]),
        SamplingParams(max_tokens=150, temperature=0, structured_outputs=FORMS[1]),
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True, min_tokens=39, structured_outputs=FORMS[3]),
    ]
    texts = []
    for num_bytes in ("8MB", "820KB"):
        with LLM(
            demo(), max_model_len=256, kv_cache_memory_bytes=num_bytes, max_num_seqs=5, seed=1
        ) as llm:
            found = llm.generate([prompt] * 4, params)
            texts.append([choice.token_ids for each in found for choice in each.choices])
            assert (llm.engine.scheduler.num_preemptions > 0) == (num_bytes == "820KB")
    assert texts[0] == texts[1]
    people = [choice.text for each in found[:2] for choice in each.choices]
    for text, form in zip(people, [FORMS[0], FORMS[0], FORMS[1]], strict=True):
        assert_fits(form, text.encode())
    assert [each.finish_reason for each in found] == ["stop", "stop", "length", "stop"]
    assert_fits(FORMS[3], found[3].text.encode())
    with LLM(demo(), max_model_len=256, kv_cache_memory_bytes="8MB") as llm:
        assert llm.generate(prompt, params[2])[0].token_ids == found[2].token_ids
        wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
        with pytest.raises(RequestError, match="the regex is wrong"):
            llm.generate(prompt, wrong)
