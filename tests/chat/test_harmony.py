"""Harmony, which gpt-oss speaks: channels become reasoning, content and calls, and never text."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.answers import TOOLS, pieces
from chat.families import GPT_OSS, LLAMA3, tokenizer
from conformance.covering import examples
from quire.chat.conversation import Chat, ChatInput, ChatPrompt
from quire.chat.harmony import HARMONY
from quire.chat.output_events import Reply, reply
from quire.errors import ConfigError

HELLO = [{"role": "user", "content": "Hello"}]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY, NEXT = "<|channel|>commentary<|message|>", "<|end|><|start|>assistant"
SEARCH = "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
ARGUMENTS = '{"path": "x"}'


@cache
def chat(**options: Any) -> Chat:
    return Chat(tokenizer(GPT_OSS, HARMONY.marks), **options)


def asked(kind: Any = None, **fields: Any) -> ChatPrompt:
    tools = None if kind is None else TOOLS
    request = ChatInput(messages=HELLO, tools=tools, tool_choice=kind, **fields)
    return chat().prompt(request)


def read(text: str, prompt: ChatPrompt, *, cut: bool = False) -> Reply:
    """Whole, which is the same as letter by letter."""
    found = chat().reader(prompt).read(text, cut=cut)
    one_by_one = chat().reader(prompt)
    events = [event for letter in text for event in one_by_one.feed(letter)]
    again = reply([*events, *one_by_one.finish(cut=cut)])
    assert (again.content, again.reasoning) == (found.content, found.reasoning)
    assert [(c.name, c.arguments) for c in again.calls] == said(found)
    return found


def said(found: Reply) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in found.calls]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", "Hm.", "Yes."),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.<|return|>", "Hm.", "Yes."),
        (f"{ANALYSIS} a\n{NEXT}{FINAL} b \n", " a\n", " b \n"),
        (f"{FINAL}Yes.", None, "Yes."),
        (f"{FINAL}Yes.{NEXT}{ANALYSIS}Hm.", "Hm.", "Yes."),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\nb", "c"),
        (f"{ANALYSIS}a{NEXT}{COMMENTARY}b{NEXT}{FINAL}c", "a", "b\nc"),
        (f"{ANALYSIS}a{FINAL}b", "a", "b"),  # an end is missing
        (f"{ANALYSIS}Hm.", "Hm.", None),
        ("Yes.", None, "Yes."),
        ("<|message|>Yes.", None, "Yes."),
        ("<|end|>\n<|end|>Yes.", None, "Yes."),
        ("<|channel|>final <|constrain|>json<|message|>{}", None, "{}"),
        ("<|channel|>analysis to=browser.search code<|message|>{}", "{}", None),
        ("<|channel|>thoughts<|message|>Hm.", "Hm.", None),
        ("<|start|>assistant<|channel|>fin", None, None),
        ("<|channel|>final", None, None),
        ("<|channel|>" + "a" * 600, None, "a" * 600),
        ("", None, None),
    ],
)
def test_channels(text: str, reasoning: str | None, content: str | None) -> None:
    for kind in (None, "auto", "none"):
        assert read(text, asked(kind)) == Reply(reasoning=reasoning, content=content)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.search <|constrain|>json",
        "<|channel|>commentary to=functions.search<|constrain|>json",
        "<|channel|>commentary to=functions.search json",
        "<|channel|>commentary to=functions.search",
        " to=functions.search<|channel|>commentary json",
        " to=search<|channel|>analysis code",
        "<|start|>assistant to=functions.search<|channel|>commentary <|constrain|>json",
    ],
)
def test_a_call_is_told_by_its_recipient(header: str) -> None:
    for end in ("", "<|call|>", NEXT + FINAL):
        found = read(f"{ANALYSIS}Hm.{NEXT}{header}<|message|>{ARGUMENTS}{end}", asked("auto"))
        assert found.reasoning == "Hm."
        assert said(found) == [("search", ARGUMENTS)]
        assert found.content is None


def test_calls_in_the_midst_of_messages() -> None:
    text = f"{COMMENTARY}So:{NEXT}{SEARCH}{ARGUMENTS}{NEXT}{ANALYSIS}Hm.{NEXT}{FINAL}Yes."
    found = read(text, asked("auto"))
    assert (found.content, found.reasoning) == ("So:\nYes.", "Hm.")
    assert said(found) == [("search", ARGUMENTS)]


def test_a_call_that_is_none_is_content_without_marks() -> None:
    for body in ('{"path": }', "path=x", '{"path": "', "{} and more"):
        found = read(f"{SEARCH}{body}<|call|>{FINAL}Yes.", asked("auto"))
        assert "<|" not in str(found.content)
        assert bool(found.calls) == (body == "{} and more")
        if not found.calls:
            assert str(found.content).startswith(body)
    assert said(read(f"{SEARCH}<|call|>", asked("auto"))) == [("search", "{}")]


def test_without_tools_a_call_is_reasoning() -> None:
    for kind in (None, "none"):
        assert read(f"{SEARCH}{ARGUMENTS}<|call|>", asked(kind)) == Reply(reasoning=ARGUMENTS)


def test_what_is_cut_keeps_what_has_come() -> None:
    text = f"{ANALYSIS}Hm.{NEXT}{SEARCH}{ARGUMENTS}"
    for end in range(len(text)):
        found = read(text[:end], asked("auto"), cut=True)
        assert any(mark.startswith(found.content or "") for mark in HARMONY.marks)
        assert "Hm.".startswith((found.reasoning or "").partition("<")[0])
        assert all(ARGUMENTS.startswith(arguments) for _, arguments in said(found))
    assert len(found.calls) == 1


PARTS = st.lists(
    st.sampled_from(
        [
            *(*HARMONY.marks, "analysis", "final", "commentary", " to=functions.search", SEARCH),
            *("assistant", "json", "a", " ", "\n", ARGUMENTS, '{"path": "', '"}', "<", "to="),
        ]
    ),
    max_size=14,
)


@settings(max_examples=examples(100, of=300), deadline=None)
@given(parts=PARTS, cuts=st.lists(st.integers(0, 10**6), max_size=8))
def test_no_mark_is_text_in_whatever_order_they_come(parts: list[str], cuts: list[int]) -> None:
    text, made = "".join(parts), chat().reader(asked("auto"))
    found = reply([e for piece in pieces(text, cuts) for e in made.feed(piece)] + made.finish())
    whole = chat().reader(asked("auto")).read(text)
    assert (found.content, found.reasoning, said(found)) == (
        whole.content,
        whole.reasoning,
        said(whole),
    )
    shown = f"{found.content} {found.reasoning} {said(found)}"
    assert not [mark for mark in HARMONY.marks if mark in shown]
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in said(found))


def test_a_text_of_many_marks_takes_linear_time() -> None:
    """What is quadratic takes minutes at this length."""
    for parts in ("<|end|>", "<|start|>a", "<|channel|>a", "<|", SEARCH + "{", f"{SEARCH}{{}}{{}}"):
        text, made = parts * (60_000 // len(parts)), chat().reader(asked("auto"))
        for at in range(0, len(text), 100):
            made.feed(text[at : at + 100])
        made.finish()


def test_a_turn_with_reasoning_and_a_preamble_can_be_sent_back() -> None:
    """Its template takes no text beside reasoning, in a message with a call."""
    function = {"name": "search", "arguments": ARGUMENTS}
    turn = {"role": "assistant", "content": "So:", "reasoning": "Hm.", "tool_calls": [
        {"id": "call_0", "type": "function", "function": function}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": "found"}
    prompt = chat().prompt(ChatInput(messages=[*HELLO, turn, result], tools=TOOLS))
    header = " to=functions.search<|channel|>commentary json<|message|>"
    assert f"{FINAL}So:{NEXT}{ANALYSIS}Hm.{NEXT}{header}{ARGUMENTS}<|call|>" in prompt.text


# -- prompts, forms, names -------------------------------------------------------------------------


def test_what_the_prompt_has_begun_is_not_said_again() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "So <|end|> or"}]
    fields: Any = {"add_generation_prompt": False, "continue_final_message": True}
    for content in ("So", "So <|channel|> or"):
        begun[-1]["content"] = content
        prompt = chat().prompt(ChatInput(messages=begun, **fields))
        assert prompt.text.endswith(f"{FINAL}{content}")
        assert read(" be it.", prompt) == Reply(content=" be it.")
        assert prompt.reasoning is None
    opened = Chat(tokenizer(GPT_OSS + ANALYSIS, HARMONY.marks))
    prompt = opened.prompt(ChatInput(messages=HELLO))
    assert read(f"Hm.{NEXT}{FINAL}Yes.", prompt) == Reply(reasoning="Hm.", content="Yes.")
    assert prompt.reasoning is not None
    assert prompt.reasoning.is_open


@pytest.mark.parametrize("thoughts", ["", f"{ANALYSIS}Hm.{NEXT}", f"{ANALYSIS}{NEXT}"])
def test_a_form_stands_behind_a_header(thoughts: str) -> None:
    named: Any = {"type": "function", "function": {"name": "search"}}
    several = json.dumps([{"name": "search", "parameters": {"path": "x"}}])
    for kind, header, body in ((named, SEARCH, ARGUMENTS), ("required", FINAL, several)):
        prompt = asked(kind)
        assert prompt.reasoning is not None
        assert prompt.reasoning.lead == header
        found = read(f"{thoughts}{header}{body}", prompt)
        assert said(found) == [("search", ARGUMENTS)]
        assert (found.content, found.reasoning) == (None, "Hm." if "Hm." in thoughts else None)


def test_special_tokens_are_asked_for_and_end_an_answer() -> None:
    named: Any = {"type": "function", "function": {"name": "search"}}
    for kind in (None, "auto", "none", "required", named):
        prompt = asked(kind)
        assert not prompt.skip_special_tokens
        assert prompt.stop == (() if kind in ("required", named) else ("<|call|>", "<|return|>"))


def test_one_of_the_two_names_is_enough() -> None:
    """And none where the template tells."""
    text = f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes."
    for options in (
        {"tool_call_parser": "openai"},
        {"reasoning_parser": "openai_gptoss"},
        {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"},
        {"model_type": "gpt_oss"},
    ):
        made = Chat(tokenizer("Hello"), **options)  # type: ignore[arg-type]
        prompt = made.prompt(ChatInput(messages=HELLO))
        reader = made.reader(prompt)
        assert reader.reads_reasoning
        assert reader.read(text) == Reply(reasoning="Hm.", content="Yes.")
    with pytest.raises(ConfigError, match="hermes and --reasoning-parser openai_gptoss are for"):
        chat(tool_call_parser="hermes", reasoning_parser="openai_gptoss")
    with pytest.raises(ConfigError, match="openai and --reasoning-parser qwen3 are for"):
        Chat(tokenizer(LLAMA3), tool_call_parser="openai", reasoning_parser="qwen3")
