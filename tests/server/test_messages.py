"""/v1/messages: Anthropic's own client reads the answers, whole and in pieces."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from typing import Any

import pytest

from engine.test_llm import demo
from quire import LLM, AsyncLLM, SamplingParams
from quire.config import ServerConfig
from quire.server.endpoints.anthropic_messages import so_far
from server.asking import (
    Answer,
    leave_while_it_runs,
    nothing_runs,
    run,
    saying,
    serving,
)
from server.listening import listening

anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

TEMPLATE = (
    "{% if enable_thinking is defined and enable_thinking %}# think{{ '\\n' }}{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)
CONFIG = ServerConfig(
    chat_template=TEMPLATE, tool_call_parser="hermes", api_key=("alice-key", "bob-key")
)
MESSAGES = [{"role": "user", "content": "def fibonacci(n):"}]
PROMPT = "# system: Write Python.\n# user: def fibonacci(n):\n# assistant: "
BODY: dict[str, Any] = {
    "model": "demo",
    "system": "Write Python.",
    "messages": MESSAGES,
    "max_tokens": 12,
    "temperature": 0,
}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


def clients(**fields: Any) -> dict[str, Any]:
    """What its client has no argument for goes beside them."""
    known = {**BODY, **fields}
    beside = {name: known.pop(name) for name in ("temperature",)}
    return {**known, "extra_body": beside}


def num_tokens(text: str) -> int:
    return len(demo().tokenizer(text, add_special_tokens=False)["input_ids"])


@cache
def text_of(max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(demo(), max_model_len=256, kv_cache_memory_bytes="64MB", max_num_seqs=8) as llm:
        return llm.generate([PROMPT], params)[0].text


def names(answer: Answer) -> list[str]:
    """Of a stream's events; each one's line and its JSON say the same."""
    lines = answer.body.decode().split("\n")
    found = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert found == [event["type"] for event in answer.events]
    return found


def test_the_events_come_in_order_and_hold_what_the_whole_answer_holds(llm: AsyncLLM) -> None:
    expected = text_of(12)

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            whole = (await client.post("/v1/messages", BODY)).json
            assert whole["content"] == [{"type": "text", "text": expected}]
            assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
            assert (whole["type"], whole["role"], whole["model"]) == (
                "message",
                "assistant",
                "demo",
            )
            assert whole["usage"] == {
                "input_tokens": num_tokens(PROMPT),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "output_tokens": 12,
            }
            answer = await client.post("/v1/messages", {**BODY, "stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = names(answer)
            assert found[:2] == ["message_start", "content_block_start"]
            assert found[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            assert set(found[2:-3]) == {"content_block_delta"}
            start, deltas, end = answer.events[0], answer.events[2:-3], answer.events[-2]
            assert start["message"]["content"] == []
            assert start["message"]["usage"]["cache_read_input_tokens"] == num_tokens(PROMPT) - 1
            assert start["message"]["usage"]["input_tokens"] == 1
            assert "".join(event["delta"]["text"] for event in deltas) == expected
            assert {tuple(event["delta"]) for event in deltas} == {("type", "text")}
            assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
            assert end["usage"]["output_tokens"] == 12
            assert b"[DONE]" not in answer.body

    run(ask())


def test_anthropics_own_client_reads_them(llm: AsyncLLM) -> None:
    expected = text_of(12)

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            client = anthropic.AsyncAnthropic(base_url=address, api_key="bob-key", max_retries=0)
            async with client:
                message = await client.messages.create(**clients())
                assert message.content[0].text == expected
                anthropic.types.Message.model_validate(message.model_dump(warnings=False))
                async with client.messages.stream(**clients()) as stream:
                    texts = [text async for text in stream.text_stream]
                    final = await stream.get_final_message()
                assert "".join(texts) == final.content[0].text == expected
                assert final.usage.output_tokens == 12
                assert final.usage.cache_read_input_tokens == num_tokens(PROMPT) - 1
                counted = await client.messages.count_tokens(
                    model="demo", system=BODY["system"], messages=MESSAGES
                )
                assert counted.input_tokens == num_tokens(PROMPT)
                stranger = client.with_options(api_key="a-strange-key")
                with pytest.raises(anthropic.AuthenticationError):
                    await stranger.messages.create(**clients())
                with pytest.raises(anthropic.NotFoundError, match="not served"):
                    await client.messages.create(**clients(model="claude"))

    run(ask())


def test_the_stop_sequence_is_named(llm: AsyncLLM) -> None:
    expected = text_of(12)
    stop = expected[5:7]

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            fields = {**BODY, "stop_sequences": ["\u2603", stop]}
            whole = (await client.post("/v1/messages", fields)).json
            assert whole["content"][0]["text"] == expected.split(stop)[0]
            assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
            answer = await client.post("/v1/messages", {**fields, "stream": True})
            said = {"stop_reason": "stop_sequence", "stop_sequence": stop}
            assert answer.events[-2]["delta"] == said

    run(ask())


def test_a_stop_string_of_the_models_own_is_the_end_of_its_turn(llm: AsyncLLM) -> None:
    expected = text_of(12)
    stop = expected[5:7]

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            anonymous.service.chat._stop = (stop,)
            named: dict[str, Any] = {"stop_sequences": [stop]}
            for fields, said in (({}, ("end_turn", None)), (named, ("stop_sequence", stop))):
                whole = (await client.post("/v1/messages", {**BODY, **fields})).json
                assert whole["content"][0]["text"] == expected.split(stop)[0]
                assert (whole["stop_reason"], whole["stop_sequence"]) == said

    run(ask())


def test_an_answer_ends_with_the_context_and_says_so() -> None:
    async def ask() -> None:
        async with serving(CONFIG, max_model_len=num_tokens(PROMPT) + 9) as anonymous:
            client = anonymous.with_key("alice-key")
            answer = await client.post("/v1/messages", {**BODY, "max_tokens": 32_000})
            assert answer.json["stop_reason"] == "model_context_window_exceeded"
            assert answer.json["usage"]["output_tokens"] == 9

    run(ask())


def test_a_required_tool_is_called_and_its_result_read(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            client = anthropic.AsyncAnthropic(base_url=address, api_key="bob-key", max_retries=0)
            async with client:
                fields = clients(max_tokens=100, tools=[ADD])
                for choice in ({"type": "any", "disable_parallel_tool_use": True},
                               {"type": "tool", "name": "add"}):  # fmt: skip
                    whole = await client.messages.create(**fields, tool_choice=choice)
                    (block,) = whole.content
                    assert (block.type, block.name) == ("tool_use", "add")
                    assert whole.stop_reason == "tool_use"
                    assert isinstance(block.input["a"], bool)
                    assert block.input["b"] in ("x", "y")
                    async with client.messages.stream(**fields, tool_choice=choice) as stream:
                        final = await stream.get_final_message()
                    assert final.content[0].input == block.input
                    assert final.stop_reason == "tool_use"
                back = [
                    *MESSAGES,
                    {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": block.id, "content": "3"},
                            {"type": "text", "text": "And?"},
                        ],
                    },
                ]
                answer = await client.messages.create(
                    **clients(messages=back, tools=[ADD], tool_choice={"type": "none"})
                )
                assert answer.content[0].type == "text"
                call = json.dumps({"name": "add", "arguments": block.input})
                written = PROMPT.removesuffix("# assistant: ") + (
                    f"# assistant: <tool_call>{call}\n# tool: 3\n# user: And?\n# assistant: "
                )
                usage = answer.usage
                assert usage.input_tokens + usage.cache_read_input_tokens == num_tokens(written)

    run(ask())


def test_thoughts_text_and_calls_are_blocks_of_their_own(llm: AsyncLLM) -> None:
    said = (
        '<think>Two numbers.</think>I add.\n<tool_call>{"name": "add", "arguments": '
        '{"a": true, "b": "x"}}</tool_call>'
    )
    config = ServerConfig(
        chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    blocks = [
        {"type": "thinking", "thinking": "Two numbers.", "signature": ""},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "name": "add", "input": {"a": True, "b": "x"}},
    ]

    async def ask() -> None:
        async with serving(config, llm=llm) as client, listening(client) as address:
            saying(client, said)
            asking = anthropic.AsyncAnthropic(base_url=address, api_key="any", max_retries=0)
            async with asking:
                fields = clients(max_tokens=60, tools=[ADD])
                whole = await asking.messages.create(**fields)
                async with asking.messages.stream(**fields) as stream:
                    final = await stream.get_final_message()
                for message in (whole, final):
                    assert message.stop_reason == "tool_use"
                    found = [block.model_dump(exclude_none=True) for block in message.content]
                    for block in found:
                        block.pop("id", None)
                        block.pop("parsed_output", None)
                    assert found == blocks
            streamed = await client.post(
                "/v1/messages", {**BODY, "max_tokens": 60, "tools": [ADD], "stream": True}
            )
            are = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
            for event in streamed.events:
                are.validate_python(event)
            omitted = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
            fields = {**BODY, "max_tokens": 60, "tools": [ADD], "thinking": omitted}
            answer = await client.post("/v1/messages", {**fields, "stream": True})
            assert names(answer)[:4] == [
                "message_start",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
            ]
            assert answer.events[2]["delta"] == {"type": "signature_delta", "signature": ""}
            assert b"Two" not in answer.body
            assert answer.headers["x-ignored-fields"] == "thinking.budget_tokens"

    run(ask())


def test_a_call_that_breaks_off_is_text(llm: AsyncLLM) -> None:
    said = 'I add. <tool_call>{"name": "add", "arguments": {"a": tr'

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            saying(anonymous, said)
            fields = {**BODY, "max_tokens": 60, "tools": [ADD]}
            whole = (await client.post("/v1/messages", fields)).json
            assert {block["type"] for block in whole["content"]} == {"text"}
            assert "".join(block["text"] for block in whole["content"]) == said
            assert whole["stop_reason"] == "end_turn"
            answer = await client.post("/v1/messages", {**fields, "stream": True})
            found = names(answer)
            assert found.count("content_block_start") == found.count("content_block_stop")
            assert answer.events[-2]["delta"]["stop_reason"] == "end_turn"

    run(ask())


def test_a_call_that_the_limit_cuts_keeps_what_has_come(llm: AsyncLLM) -> None:
    said = '<tool_call>{"name": "add", "arguments": {"a": true, "b": "x'

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            saying(anonymous, said, reason="length")
            asking = anthropic.AsyncAnthropic(base_url=address, api_key="bob-key", max_retries=0)
            async with asking:
                fields = clients(max_tokens=20, tools=[ADD])
                whole = await asking.messages.create(**fields)
                async with asking.messages.stream(**fields) as stream:
                    final = await stream.get_final_message()
            for message in (whole, final):
                assert message.stop_reason == "max_tokens"
                (block,) = message.content
                assert (block.type, block.name, block.input) == ("tool_use", "add", {"a": True})

    run(ask())


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("", {}), ("{", {}), ('{"a', {}), ('{"a": tr', {}), ('{"a": 1', {}), ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": [2, {"c": "},[\\"', {"a": 1, "b": [2, {}]}),
        ('{"a": "\\\\", "b": ', {"a": "\\"}), ('{"a": [[], ', {"a": [[]]}),
    ],
)  # fmt: skip
def test_an_object_that_breaks_off_has_its_whole_members(arguments: str, found: Any) -> None:
    assert json.loads(so_far(arguments)) == found


def test_an_answer_has_the_form_that_is_asked_for(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            form = {"type": "json_schema", "schema": ADD["input_schema"]}
            answer = await client.post(
                "/v1/messages", {**BODY, "max_tokens": 100, "output_config": {"format": form}}
            )
            assert set(json.loads(answer.json["content"][0]["text"])) == {"a", "b"}

    run(ask())


def test_thinking_is_the_templates_business(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            fields = {"messages": MESSAGES, "system": "Write Python."}
            counts = [
                (await client.post("/v1/messages/count_tokens", {**fields, **more})).json
                for more in ({}, {"thinking": {"type": "disabled"}},
                             {"thinking": {"type": "adaptive"}})
            ]  # fmt: skip
            assert counts[0] == counts[1] == {"input_tokens": num_tokens(PROMPT)}
            assert counts[2] == {"input_tokens": num_tokens("# think\n" + PROMPT)}

    run(ask())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tool_choice": {"type": "most"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "nothing"}, "tools": [ADD]}, "nothing"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"n": 2}, "n=2"),
        ({"system": [{"type": "image", "source": {}}]}, "image"),
    ],
)
def test_what_is_wrong_is_said_in_anthropics_form(
    llm: AsyncLLM, fields: dict[str, Any], said: str
) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            answer = await anonymous.with_key("alice-key").post("/v1/messages", {**BODY, **fields})
            assert answer.status == 400
            assert answer.json["type"] == "error"
            assert answer.error["type"] == "invalid_request_error"
            assert said in answer.error["message"]

    run(ask())


def test_an_error_in_a_stream_has_anthropics_form_too(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            own = anonymous.service.engine.generate

            async def generate(request: Any) -> AsyncGenerator[Any, None]:
                async with aclosing(own(request)) as deltas:
                    async for delta in deltas:
                        yield delta
                        raise ValueError("a secret of the engine")

            anonymous.service.engine.generate = generate
            client = anonymous.with_key("alice-key")
            answer = await client.post("/v1/messages", {**BODY, "stream": True})
            assert names(answer)[-1] == "error"
            assert answer.events[-1]["error"]["type"] == "api_error"
            assert b"secret" not in answer.body
            asking = anthropic.AsyncAnthropic(base_url=address, api_key="bob-key", max_retries=0)
            async with asking:
                with pytest.raises(anthropic.APIStatusError, match="log says why"):
                    async with asking.messages.stream(**clients()) as stream:
                        await stream.get_final_message()
            await nothing_runs(client)

    run(ask())


def test_leaving_ends_it(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            fields = {**BODY, "max_tokens": 180, "ignore_eos": True}
            for stream in (True, False):
                body = {**fields, "stream": stream}
                await leave_while_it_runs(client, "/v1/messages", body, events=3)

    run(ask())
