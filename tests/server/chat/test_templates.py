"""Prompts are what Transformers would write, and no template takes more than its share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateSyntaxError

from quire.errors import ConfigError, RequestError
from quire.server.chat.process import RenderingProcess
from quire.server.chat.sandbox import Limits, Sandbox
from quire.server.chat.templates import ChatTemplate
from server.chat.families import CHATML, DEEPSEEK, FAMILIES, PARTS, tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "description": "<b> & ü", "parameters": {"type": "object"}},
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "find", "arguments": {"a": 1}}}
HELLO = [{"role": "user", "content": "Hello, ü <b>!"}]
CONVERSATION = [
    *HELLO,
    {"role": "assistant", "content": "  Yes?\n"},
    {"role": "user", "content": "Find it."},
]
WITH_CALLS = [
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "There.", "tool_call_id": "abcdefghi", "name": "find"},
]
# Each goes on for ever, or takes what nobody has; the part of the message says what stopped it.
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(40) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "tree": "{% for x in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
    "repeat": "{{ 'a' * 10 ** 9 }}",
    "reversed": "{{ 10 ** 9 * 'a' }}",
    "lists": "{{ ([0] * 9999999) | length }}",
    "numbers": "{{ 9 ** 9999999 }}",
    "sums": "{% set ns = namespace(x='a' * 1000) %}"
    "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
}
# What only a process of its own can be kept from.
WORSE = {
    "doubling": "{% set ns = namespace(x='a') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "width": "{{ 'x' | center(2000000000) }}",
    "format": "{{ '%999999999d' % 3 }}",
    "filter": "{{ lipsum(n=1000000) }}",
    "sort": "{% set a = range(99999) | map('string') | list %}"
    + "{% set a = a | sort | reverse | unique | list %}" * 400,
}


def calls_with(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.fixture
def trusting() -> Iterator[ChatTemplate]:
    """With the operator's consent to templates of clients."""
    limits = Limits(seconds=0.3, max_chars=100_000)
    template = ChatTemplate(tokenizer(), CHATML, trust_request_chat_template=True, limits=limits)
    yield template
    template.close()


def expected(family: str, messages: list[dict[str, Any]], **options: Any) -> str:
    made = tokenizer(FAMILIES[family])
    return str(made.apply_chat_template(messages, tokenize=False, **options))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("generates", [True, False])
def test_it_is_what_transformers_writes(family: str, generates: bool) -> None:
    template = ChatTemplate(tokenizer(FAMILIES[family]))
    assert template.render(CONVERSATION, add_generation_prompt=generates) == expected(
        family, CONVERSATION, add_generation_prompt=generates
    )


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
def test_tools_and_calls_are_what_transformers_writes(family: str) -> None:
    template = ChatTemplate(tokenizer(FAMILIES[family]))
    text = [
        {**CALL, "function": {"name": "find", "arguments": '{"a": 1}'}},
    ]
    messages = [WITH_CALLS[0], {**WITH_CALLS[1], "content": None, "tool_calls": text}]
    for tools in (None, TOOLS):
        assert template.render(messages, tools) == expected(
            family, WITH_CALLS[:2], tools=tools, add_generation_prompt=True
        )


def test_arguments_are_text_where_a_template_wants_text() -> None:
    found = ChatTemplate(tokenizer(DEEPSEEK)).render(WITH_CALLS)
    assert '<｜tool▁sep｜>find\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>' in found
    assert found.endswith("<think>\n")


def test_content_is_parts_where_a_template_wants_parts() -> None:
    assert ChatTemplate(tokenizer(PARTS)).render(HELLO) == "user:Hello, ü <b>!\n"


def test_a_model_may_have_a_template_of_its_own_for_tools() -> None:
    both = {"default": "plain", "tool_use": "with {{ tools | length }}"}
    template = ChatTemplate(tokenizer(both))
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, TOOLS) == "with 1"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("last", ["It is a", "It is a "])
def test_the_last_message_is_continued(family: str, last: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": last}]
    template = ChatTemplate(tokenizer(FAMILIES[family]))
    found = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert found.endswith(last)
    whole = template.render(messages, add_generation_prompt=False)
    assert whole.startswith(found.rstrip())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_final_message": True}, "exclude each other"),
        ({"kwargs": {"tokenize": True}}, "cannot set 'tokenize'"),
        ({"kwargs": {"chat_template": "x"}}, "cannot set 'chat_template'"),
        ({"kwargs": {"messages": []}}, "cannot set 'messages'"),
        ({"kwargs": {"bos_token": "x"}}, "cannot set 'bos_token'"),
        ({"kwargs": {" deadline": 1e99}}, "cannot set ' deadline'"),
        ({"kwargs": {"x": "y" * 70_000}}, "68.37 KiB as JSON"),
        ({"kwargs": {"x": object()}}, "has a object"),
        ({"template": "x"}, "--trust-request-chat-template"),
    ],
)
def test_what_a_request_cannot_ask_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(tokenizer(CHATML)).render(HELLO, **options)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hello", "must be a list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], "a string, a list of parts or null, not int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\].content\[0\] is of type 'image_url': this model reads text",
        ),
        (
            [
                *HELLO,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                },
            ],
            r"messages\[1\].tool_calls\[0\].function.arguments is not JSON",
        ),
        (
            [calls_with("[]")],
            "must be a JSON object",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[" * 70 + "]" * 70}}],
                }
            ],
            "nested more than 64 deep",
        ),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], "a key that is not a string"),
    ],
)
def test_messages_that_cannot_be(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(tokenizer(CHATML)).render(messages)


def test_what_a_template_says_against_messages_is_said() -> None:
    template = ChatTemplate(tokenizer(FAMILIES["mistral"]))
    with pytest.raises(RequestError, match="refuses the messages: Only user and assistant roles"):
        template.render([{"role": "developer", "content": "x"}])


def test_parts_are_joined_as_in_vllm() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = ChatTemplate(tokenizer(CHATML)).render([{"role": "user", "content": parts}])
    assert "user\na\nb<|im_end|>" in found


def test_further_names_reach_the_template() -> None:
    template = ChatTemplate(tokenizer(CHATML))
    assert template.render(HELLO, kwargs={"enable_thinking": False}).endswith("</think>\n\n")


def test_without_a_template_the_option_is_named() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        ChatTemplate(tokenizer()).render(HELLO)


def test_the_operators_template_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    for given in (file, str(file), "mine: {{ messages[0].content }}"):
        found = ChatTemplate(tokenizer(CHATML), given).render(HELLO)
        assert found == "mine: Hello, ü <b>!"


@pytest.mark.parametrize(
    ("template", "message"),
    [("nowhere.jinja", "--chat-template nowhere.jinja"), ("a\n{% if %}", "line 2: Expected")],
)
def test_a_template_that_cannot_be_is_refused_at_once(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(tokenizer(), template)


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_is_stopped_here_too(name: str) -> None:
    template = ChatTemplate(
        tokenizer(), HOSTILE[name], limits=Limits(seconds=0.05, max_chars=100_000)
    )
    with pytest.raises(RequestError, match="was stopped"):
        template.render(HELLO)


@pytest.mark.parametrize("name", [*HOSTILE, *WORSE])
def test_a_clients_template_is_stopped(trusting: ChatTemplate, name: str) -> None:
    with pytest.raises(RequestError, match="was stopped"):
        trusting.render(HELLO, template={**HOSTILE, **WORSE}[name])
    assert trusting.render(HELLO, template="{{ messages[0].role }}") == "user"


def test_a_clients_template_is_rendered_as_the_models(trusting: ChatTemplate) -> None:
    assert trusting.render(CONVERSATION, TOOLS, template=CHATML) == trusting.render(
        CONVERSATION, TOOLS
    )
    with pytest.raises(RequestError, match=r"not a Jinja template: line 1"):
        trusting.render(HELLO, template="{% if %}")
    with pytest.raises(RequestError, match="at most 262,144 characters"):
        trusting.render(HELLO, template="x" * 300_000)


def test_lone_surrogates_come_back(trusting: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "\ud800"}]
    assert trusting.render(messages, template="{{ messages[0].content }}") == "\ud800"


def test_no_process_is_left_behind() -> None:
    process = RenderingProcess(Limits(seconds=0.2))
    assert process.render("{{ x }}", {"x": 3}) == "3"
    first = process.pid
    with pytest.raises(RequestError, match=r"took longer than 0\.2 s"):
        process.render(WORSE["sort"], {})
    assert process.pid is None
    assert process.render("{{ x }}", {"x": 4}) == "4"
    second = process.pid
    process.close()
    for pid in (first, second):
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_was_killed_is_replaced() -> None:
    process = RenderingProcess(Limits())
    process.render("x", {})
    assert process.pid is not None
    os.kill(process.pid, 9)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.render("{{ x }}", {"x": 5}) == "5"
    process.close()


def test_a_clients_template_sees_no_environment(trusting: ChatTemplate) -> None:
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(RequestError, match="refuses the messages"):
            trusting.render(HELLO, template=template)


def test_one_rendering_knows_nothing_of_another() -> None:
    sandbox = Sandbox(Limits())
    template = sandbox.from_string("{{ x }}")
    assert sandbox.render(template, {"x": 1}) == "1"
    assert sandbox.render(template, {}) == ""
    with pytest.raises(TemplateSyntaxError):
        sandbox.from_string("{{ x")
