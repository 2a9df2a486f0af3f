"""Prompts are what Transformers would write, and no template takes more than its share."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, TemplateSyntaxError

from chat.families import CHATML, DEEPSEEK, FAMILIES, PARTS, tokenizer
from quire.chat.template_sandbox import Sandbox, TemplateLimits
from quire.chat.templates import ChatTemplate
from quire.errors import ConfigError, RequestError

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
# Each goes on for ever, or takes more than there is; the part of the message says what stopped it.
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
    "doubling": "{% set ns = namespace(x='a') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "width": "{{ 'x' | center(2000000000) }}",
    "format": "{{ '%999999999d' % 3 }}",
    "format as a filter": "{{ '%*d' | format(999999999, 3) }}",
    "format as a method": "{{ '{:999999999}'.format(3) }}",
    "format with a width of its own": "{{ '{:{}}'.format(3, 999999999) }}",
    "places": "{{ ('%s' * 9999) % (('a' * 9999,) * 9999) }}",
    "padding": "{{ 'x'.ljust(2000000000) }}",
    "replace": "{% set a = 'a' * 9999 %}{{ a.replace('a', a) }}",
    "replace as a filter": "{% set a = 'a' * 9999 %}{{ a | replace('a', a) }}",
    "join": "{{ 'x'.join(['a' * 9999] * 9999) }}",
    "join of what is made on the way": "{{ range(99999) | map('center', 99999) | join | length }}",
    "indent": "{{ ('\n' * 9999) | indent(9999) }}",
    "json": "{{ range(9999) | list | tojson(indent=9999) }}",
    "lists in lists": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a | tojson }}",
    "lists in lists as a text": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "blocks": "{% set a = 'a' * 999 %}"
    + ("{% set a %}" + "{{ a }}" * 9 + "{% endset %}") * 60
    + "{{ a | length }}",
    "texts in loops": "{% set a %}{% for i in range(99999) %}"
    + "raw text " * 99
    + "{% endfor %}{% endset %}{{ a | length }}",
    "sort": "{% set a = range(99999) | map('string') | list %}"
    + "{% set a = a | sort | reverse | unique | list %}" * 400,
}


def calls_with(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"function": function}]}


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
        ({"continue_final_message": True}, "cannot be combined"),
        ({"kwargs": {"tokenize": True}}, "cannot set 'tokenize'"),
        ({"kwargs": {"chat_template": "x"}}, "cannot set 'chat_template'"),
        ({"kwargs": {"messages": []}}, "cannot set 'messages'"),
        ({"kwargs": {"bos_token": "x"}}, "cannot set 'bos_token'"),
        ({"kwargs": {" odd": 1e99}}, "cannot set ' odd'"),
        ({"kwargs": {"x": "y" * 70_000}}, "68.37 KiB as JSON"),
        ({"kwargs": {"x": object()}}, "has a object"),
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
            r"messages\[0\].content\[0\] is of type 'image_url': only text is read here",
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
        tokenizer(), HOSTILE[name], limits=TemplateLimits(seconds=0.05, max_chars=100_000)
    )
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="was stopped"):
            template.render(HELLO)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**26, "it was stopped when it had made what it was not to make"


def test_a_template_sees_no_environment() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ messages.append(1) }}",
        "{{ 'a'.expandtabs(9) }}",
        "{{ (1).to_bytes(9) }}",
    ):
        with pytest.raises(RequestError, match="refuses the messages"):
            ChatTemplate(tokenizer(), source).render(HELLO)


def test_what_templates_do_with_texts_is_what_jinja_does() -> None:
    """The limits are looked at and nothing else is done."""
    source = (
        "{{ '%5.2f|%s|%%' % (1.5, 'ü') }}{{ '%s-%d' | format('a', 7) }}{{ '{:>4}'.format('x') }}"
        "{{ 'a' ~ 1 ~ none ~ ['b'] }}{{ 'aXbX'.replace('X', '--') }}"
        "{{ 'aXbX' | replace('X', '-') }}{{ {'a': [1]} | tojson(indent=2) }}"
        "{{ ', '.join(['a', 'b']) }}{{ [1, 2] | join('; ') }}"
        "{{ [{'n': 'v'}] | join(attribute='n') }}"
        "{{ 'a\nb' | indent(2) }}{{ 'x' | center(5) }}{{ 'x'.ljust(3) }}"
        "{% set a %}{{ 'b' }}c{% endset %}{{ a | upper }}{{ [3, 1] | sort | map('string') | list }}"
    )
    assert ChatTemplate(tokenizer(), source).render(HELLO) == Environment().from_string(
        source.replace("tojson(indent=2)", "string")
    ).render().replace("{'a': [1]}", '{\n  "a": [\n    1\n  ]\n}')


def test_one_rendering_knows_nothing_of_another() -> None:
    sandbox = Sandbox(TemplateLimits())
    template = sandbox.template("{{ x }}")
    assert sandbox.render(template, {"x": 1}) == "1"
    assert sandbox.render(template, {}) == ""
    with pytest.raises(TemplateSyntaxError):
        sandbox.template("{{ x")
