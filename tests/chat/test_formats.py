"""One suite for all formats of tool calls: what is read does not depend on how the text was cut."""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat.answers import CASES, TOOLS, Case, pieces
from conformance.covering import examples
from quire.chat.conversation import ChatPrompt, Reader
from quire.chat.output_events import (
    ArgumentsDelta,
    CallBroken,
    CallEnded,
    CallStarted,
    ContentDelta,
    Event,
    Reply,
    reply,
)
from quire.chat.tools.declared import checked_tools
from quire.chat.tools.registry import TOOL_FORMATS
from quire.chat.tools.tool_choice import ToolChoice

ANY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
MARKED_CASE = pytest.mark.parametrize(
    "case", [case for case in CASES if not case.alone], ids=lambda case: case.id
)
MARKS = sorted({mark for known in TOOL_FORMATS.values() for mark in known.opens})

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from([*MARKS, "</tool_call>", '{"a": "b"}', '"]}', "\\", '\\"', "\n\n", "  x  "]),
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "path": texts,
        "text": texts,
        "count": st.integers(-(10**12), 10**12),
        "share": st.floats(-1e9, 1e9),
        "is_new": st.booleans(),
        "tags": st.lists(texts, max_size=3),
        "options": st.dictionaries(
            texts.filter(bool), st.one_of(texts, st.none(), st.lists(st.integers())), max_size=3
        ),
    },
)
calls_of_both = st.lists(
    st.tuples(st.sampled_from(["write_file", "search"]), arguments), min_size=1, max_size=3
)
cuts = st.lists(st.integers(0, 10**6), max_size=12)


def reader(parser: str, *, kind: Any = "auto", name: str = "", parallel: bool = True) -> Reader:
    count = itertools.count()
    prompt = ChatPrompt(
        text="",
        token_ids=(),
        structured_outputs=None,
        skip_special_tokens=True,
        tools={tool.name: tool for tool in checked_tools(TOOLS)},
        choice=ToolChoice(kind=kind, name=name),
        parallel=parallel,
        reasoning=None,
    )
    return Reader(
        prompt,
        tools=TOOL_FORMATS[parser],
        reasoning=None,
        make_id=lambda: f"call_{next(count)}",
    )


def events(made: Reader, several: Iterable[str]) -> list[Event]:
    return [event for piece in several for event in made.feed(piece)] + made.finish()


def whole(parser: str, text: str) -> Reply:
    return reader(parser).read(text)


def parsed(found: Reply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def can_be_written(case: Case, calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """Formats with tags have no way to write their closing tag in a value."""
    return not case.closing or all(
        case.closing not in (value if isinstance(value, str) else json.dumps(value))
        for _, given in calls
        for value in given.values()
    )


@ANY_CASE
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=calls_of_both, cuts=cuts)
def test_calls_are_read_as_they_were_written(case: Case, calls: Any, cuts: list[int]) -> None:
    if not can_be_written(case, calls):
        return
    text = case.write(calls)
    found = events(reader(case.parser), pieces(text, cuts))
    assert parsed(reply(found)) == calls
    assert reply(found).content is None
    assert reply(found) == whole(case.parser, text)


@MARKED_CASE
@settings(max_examples=12, deadline=None)
@given(calls=calls_of_both, cuts=cuts)
def test_content_stands_beside_calls(case: Case, calls: Any, cuts: list[int]) -> None:
    if not can_be_written(case, calls):
        return
    text = f"Let me look.\n\n{case.write(calls)}\nDone < and [ said."
    found = reply(events(reader(case.parser), pieces(text, cuts)))
    assert parsed(found) == calls
    assert found.content == "Let me look.Done < and [ said."


@pytest.mark.sampled(10)
@ANY_CASE
@settings(max_examples=15, deadline=None)
@given(
    calls=calls_of_both,
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 9), texts), max_size=3),
    end=st.none() | st.integers(0, 10**6),
    cuts=cuts,
)
def test_what_is_broken_does_not_depend_on_the_cuts(
    case: Case, calls: Any, edits: Any, end: int | None, cuts: list[int]
) -> None:
    text = "So: " * (not case.alone) + case.write(calls)
    for place, length, instead in edits:
        at = place % (len(text) + 1)
        text = text[:at] + instead + text[at + length :]
    text = text[: None if end is None else end % (len(text) + 1)]
    found = events(reader(case.parser), pieces(text, cuts))
    assert reply(found) == whole(case.parser, text) == reply(events(reader(case.parser), text))
    for call in reply(found).calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not reply(found).calls and not case.drops_marks:
        assert (reply(found).content or "") == text  # nothing is lost


@ANY_CASE
def test_every_truncation_keeps_what_was_said(case: Case) -> None:
    text = case.write([("write_file", {"path": "a b", "text": 'x "y" \\ ü', "count": 3})])
    for end in range(len(text)):
        found = whole(case.parser, text[:end])
        if case.drops_marks and parsed(found) == [("write_file", {})]:
            assert text[:end].endswith("<|message|>")  # it has none
        elif found.calls:  # all that is missing is a closing mark
            assert parsed(found) == parsed(whole(case.parser, text))
        elif not case.drops_marks:
            assert (found.content or "") == text[:end]


@ANY_CASE
def test_a_call_that_is_cut_is_no_content(case: Case) -> None:
    """What has come of it stays, in pieces and as a whole; of its encoding nothing is text."""
    text = case.write([("write_file", {"path": "a b", "text": 'x "y" \\ ü', "count": 3})])
    ((_, arguments),) = [(c.name, c.arguments) for c in whole(case.parser, text).calls]
    opens = TOOL_FORMATS[case.parser].opens
    ends_with_a_mark = [mark for mark in opens if text.startswith(mark)]
    begun = len(ends_with_a_mark[0]) if ends_with_a_mark else text.index("write_file") + 12
    for end in range(begun, len(text)):
        made = reader(case.parser)
        found = made.feed(text[:end]) + made.finish(cut=True)
        assert reply(found).content is None
        assert not any(isinstance(event, ContentDelta | CallBroken) for event in found)
        for call in reply(found).calls:
            assert call.name == "write_file"
            assert arguments.startswith(call.arguments)
        if arguments[:16] in text[:end]:  # the name stands before
            assert len(reply(found).calls) == 1
        by_letter = reader(case.parser)
        several = [event for letter in text[:end] for event in by_letter.feed(letter)]
        assert reply(several + by_letter.finish(cut=True)) == reply(found)
        assert made.num_calls == sum(isinstance(event, CallEnded) for event in found)


def test_json_that_is_cut_is_an_answer_until_it_names_a_tool() -> None:
    for text in ('{"title": "A', '{"name": "writ', '{"name": "Ada", "para'):
        assert reader("llama3_json").read(text, cut=True) == Reply(content=text)
    ((call,)) = reader("llama3_json").read('{"name": "search", "parameters": {"pa', cut=True).calls
    assert (call.name, call.arguments) == ("search", '{"pa')


@ANY_CASE
def test_a_call_begins_before_its_arguments_are_complete(case: Case) -> None:
    made = reader(case.parser)
    text = case.write([("write_file", {"path": "a" * 50, "text": "b" * 500})])
    middle = text.index("b" * 500) + 250
    early = made.feed(text[:middle])
    started = [event for event in early if isinstance(event, CallStarted)]
    shown = "".join(event.text for event in early if isinstance(event, ArgumentsDelta))
    assert [event.name for event in started] == ["write_file"]
    assert shown.count("b") >= 240  # but for what may be the beginning of a mark
    late = made.feed(text[middle:]) + made.finish()
    assert any(isinstance(event, CallEnded) for event in late)
    shown += "".join(event.text for event in late if isinstance(event, ArgumentsDelta))
    assert json.loads(shown) == {"path": "a" * 50, "text": "b" * 500}


@ANY_CASE
@settings(max_examples=12, deadline=None)
@given(text=st.lists(texts, max_size=8).map("".join), cuts=cuts)
def test_any_text_is_kept(case: Case, text: str, cuts: list[int]) -> None:
    found = events(reader(case.parser), pieces(text, cuts))
    assert reply(found) == whole(case.parser, text)
    if not reply(found).calls and not case.drops_marks:
        assert (reply(found).content or "") == text


@MARKED_CASE
def test_content_is_not_held_back(case: Case) -> None:
    made = reader(case.parser)
    found = made.feed("The answer is 4.")
    assert found == [ContentDelta(text="The answer is 4.")]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"path": "x"}, "name": "search"}</tool_call>'),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": "{\\"path\\": \\"x\\"}"}</tool_call>',
        ),
        ("hermes", '<tool_call>{"id": 3, "name": "search", "arguments": {"path": "x"}}'),
        ("qwen3_coder", "<function=search>\n<parameter=path>\nx\n</parameter>\n</function>"),
        ("qwen3_coder", "<tool_call><function=search><parameter=path>x</parameter></function>"),
        ("llama3_json", '<|python_tag|>{"name": "search", "parameters": {"path": "x"}}'),
        ("kimi_k2", '<|tool_call_begin|>search<|tool_call_argument_begin|>{"path": "x"}'),
        ("granite", '<tool_call>[{"name": "search", "arguments": {"path": "x"}}]'),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"path": "x"}'),
        (
            "phi4_mini_json",
            '<|tool_call|>[{"name": "search", "arguments": {"path": "x"}}]<|/tool_call|>',
        ),
        ("pythonic", ' [ search ( path = """x""", ) , ]\n'),
        ("olmo3", "<function_calls>search(path='x')"),
        ("lfm2", '<|tool_call_start|>[search(path="x")'),
        ("gemma4", "<|tool_call>call:search{path:x}<tool_call|>"),
        ("gemma4", '<|tool_call>call:search{"path": "x"}<tool_call|>'),
        ("gemma4", '<|tool_call>call:search{{"path":<|"|>x<|"|>}}<tool_call|>'),
        ("functiongemma", "<start_function_call>call:search{path:<escape>x<escape>}"),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="search"><｜DSML｜parameter name="path">x</｜DSML｜parameter>'
            "</｜DSML｜invoke>",
        ),
        ("openai", 'to=functions.search<|message|>{"path": "x"}'),
    ],
)
def test_ways_that_models_stray(parser: str, text: str) -> None:
    assert parsed(whole(parser, text)) == [("search", {"path": "x"})]
    assert whole(parser, text).content is None


def test_a_line_end_in_a_string_is_mended() -> None:
    text = '<tool_call>{"name": "search", "arguments": {"text": "a\nb\tc"}}</tool_call>'
    assert parsed(whole("hermes", text)) == [("search", {"text": "a\nb\tc"})]


def test_values_are_of_the_type_that_the_schema_says() -> None:
    given = {"path": "12", "count": "12", "share": "1", "is_new": "True", "tags": '["a"]'}
    text = "<tool_call><function=search>" + "".join(
        f"<parameter={key}>\n{value}\n</parameter>" for key, value in given.items()
    )
    ((_, found),) = parsed(whole("qwen3_coder", text + "</function>"))
    assert found == {"path": "12", "count": 12, "share": 1, "is_new": True, "tags": ["a"]}


def test_a_value_that_is_not_of_that_type_is_a_string() -> None:
    text = "<tool_call>search<arg_key>count</arg_key><arg_value>many</arg_value></tool_call>"
    assert parsed(whole("glm45", text)) == [("search", {"count": "many"})]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("-12", -12), ("1_000", 1000), ("0x1F", 31), ("1.50", 1.5), (".5", 0.5), ("2.", 2.0),
        ("1e3", 1000.0), ("True", True), ("null", None), ("[]", []), ("[1, [2,],]", [1, [2]]),
        ("{'a': {}, \"b\": None,}", {"a": {}, "b": None}), (r"'it\'s'", "it's"), ("''", ""),
        (r'"\d+\.\n\x41\u00e9\U0001f44d\ud83d\udc4d"', "\\d+\\.\nAé👍👍"), ("'a\\\nb'", "ab"),
        ("'''a\n'b'''", "a\n'b"), ('"""a""b"""', 'a""b'), (r"'C:\users'", "C:\\users"),
    ],
)  # fmt: skip
def test_literals_of_python(written: str, value: Any) -> None:
    assert parsed(whole("pythonic", f"[search(options={written})]")) == [
        ("search", {"options": value})
    ]


@pytest.mark.parametrize(
    "written",
    [
        *("{1: 2}", "{'a'}", "(1,)", "open('x')", "a", "1 + 1", "1e", "nan", "-inf", "1_", "07"),
        *("__import__('os')", "f'{x}'", "[1 2]", "'a' 'b'", "[*x]", "lambda: 0", "9" * 300),
        *("[" * 65 + "]" * 65, "{'a':" * 65 + "1" + "}" * 65, "'a", "'\\"),
    ],
)
def test_what_is_no_literal_is_no_call(written: str) -> None:
    for text in (f"[search(options={written})]", f"[search({written})]", f"[search(**{written})]"):
        assert whole("pythonic", text) == Reply(content=text)


def test_names_of_gemmas_arguments_have_no_brackets() -> None:
    for written in ("a{b:1", "[:1", "a,b:1", "{a:1}"):
        text = f"<|tool_call>call:search{{{written}}}<tool_call|>"
        assert bool(whole("gemma4", text).calls) == (written == "{a:1}")


def test_a_list_is_an_answer_unless_a_tool_is_called() -> None:
    for text in ("[1] see (a)", "[]", "[search]", "[find(path='x')]", "Say [search(path='x')]"):
        assert whole("pythonic", text) == Reply(content=text)
    assert whole("pythonic", "[search(path='x'), search(path=y)]").content == ", search(path=y)]"


def test_long_and_deep_literals_take_linear_time() -> None:
    """What is quadratic takes minutes at this length."""
    parts = {"pythonic": "[search(options=", "gemma4": "<|tool_call>call:search{options:"}
    for parser, begun in parts.items():
        for more in ("[", "{'a':", "'", "'\\", "\\", "1", "[1,", '"', "{a:", '<|"|', ",", "x"):
            text = begun + more * (50_000 // len(more))
            made = reader(parser)
            found = [
                event for at in range(0, len(text), 100) for event in made.feed(text[at:][:100])
            ]
            assert reply(found + made.finish()) == whole(parser, text)


@pytest.mark.parametrize(
    ("parser", "unit"),
    [
        ("openai", "<|end|>a"),
        ("openai", "<|channel|>commentary to=functions.search<|message|>{}"),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"a": "' + 50_000 * r"\n"),
    ],
)
def test_a_text_that_comes_at_once_takes_linear_time(parser: str, unit: str) -> None:
    """It waits for a reader that is slow. What is quadratic takes minutes at this length."""
    reader(parser).read(unit * (100_000 // len(unit)))


def test_blanks_that_go_on_and_on_take_linear_time() -> None:
    """As of a model that writes line ends without end. What is quadratic takes minutes."""
    blanks = 200_000 * "\n"
    made = reader("hermes")
    assert not [event for blank in blanks for event in made.feed(blank)]
    assert reply(made.finish()).content == blanks


def test_llama_calls_only_tools_that_there_are() -> None:
    text = '{"name": "Ada", "parameters": {"born": 1815}}'
    assert whole("llama3_json", text) == Reply(content=text)


def test_kimi_ids_are_the_models_own() -> None:
    text = "<|tool_call_begin|>functions.search:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    (call,) = whole("kimi_k2", text).calls
    assert (call.id, call.name) == ("functions.search:7", "search")


def test_mistral_ids_have_nine_letters() -> None:
    make_id: Callable[[], str] = TOOL_FORMATS["mistral"].make_id
    assert all(len(made) == 9 and made.isalnum() for made in (make_id() for _ in range(20)))


def test_nesting_is_bounded() -> None:
    deep = '{"a": ' * 100 + "1" + "}" * 100
    text = f'<tool_call>{{"name": "search", "arguments": {deep}}}</tool_call>'
    assert whole("hermes", text) == Reply(content=text)


@ANY_CASE
def test_only_one_call_where_only_one_may_come(case: Case) -> None:
    text = case.write([("search", {"path": "a"}), ("search", {"path": "b"})])
    for several in ([text], text):
        made = reader(case.parser, parallel=False)
        assert parsed(reply(events(made, several))) == [("search", {"path": "a"})]
        assert made.is_full


@settings(max_examples=examples(25, of=60), deadline=None)
@given(calls=calls_of_both, cuts=cuts)
def test_required_calls(calls: Any, cuts: list[int]) -> None:
    text = json.dumps([{"name": name, "parameters": given} for name, given in calls])
    found = reply(events(reader("hermes", kind="required"), pieces(text, cuts)))
    assert parsed(found) == calls
    assert found.content is None


@settings(max_examples=examples(25, of=60), deadline=None)
@given(given=arguments, cuts=cuts, end=st.integers(0, 10**6))
def test_a_named_call(given: dict[str, Any], cuts: list[int], end: int) -> None:
    text = json.dumps(given)
    made = reader("hermes", kind="named", name="search")
    assert parsed(reply(events(made, pieces(text, cuts)))) == [("search", given)]
    short = text[: end % len(text)]
    for cut in (True, False):  # by a limit, or by a stop string: it is a call in any case
        made = reader("hermes", kind="named", name="search")
        several = [event for piece in pieces(short, cuts) for event in made.feed(piece)]
        found = reply(several + made.finish(cut=cut))
        assert found.content is None
        assert [call.arguments.startswith("{") for call in found.calls] == [True] * bool(short)
        assert all(text.startswith(call.arguments) for call in found.calls)
        assert made.num_calls == 0


@settings(max_examples=examples(25, of=60), deadline=None)
@given(calls=calls_of_both, cuts=cuts, end=st.integers(0, 10**6), cut=st.booleans())
def test_required_calls_that_break_off(calls: Any, cuts: list[int], end: int, cut: bool) -> None:
    text = json.dumps([{"name": name, "parameters": given} for name, given in calls])
    made = reader("hermes", kind="required")
    several = [e for piece in pieces(text[: end % len(text)], cuts) for e in made.feed(piece)]
    found = reply(several + made.finish(cut=cut))
    assert found.content is None
    assert [call.name for call in found.calls] == [name for name, _ in calls][: len(found.calls)]
    whole_ones = [json.loads(call.arguments) for call in found.calls[: made.num_calls]]
    assert whole_ones == [given for _, given in calls][: made.num_calls]
    assert len(found.calls) - made.num_calls in (0, 1)
