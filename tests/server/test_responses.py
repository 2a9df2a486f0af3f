"""/v1/responses, read by OpenAI's own client: whole, in pieces and without a connection."""

import asyncio
import json
import logging
from dataclasses import replace
from itertools import count
from typing import Any, Literal

import pytest

from quire import AsyncLLM
from quire.config import ServerConfig
from server.asking import (
    Answer,
    Client,
    leave_while_it_runs,
    nothing_runs,
    run,
    saying,
    serving,
)
from server.listening import listening
from server.test_messages import num_tokens, text_of

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)
CONFIG = ServerConfig(
    chat_template=TEMPLATE, tool_call_parser="hermes", api_key=("alice-key", "bob-key")
)
PROMPT = "# system: Write Python.\n# user: def fibonacci(n):\n# assistant: "
BODY: dict[str, Any] = {
    "model": "demo",
    "instructions": "Write Python.",
    "input": "def fibonacci(n):",
    "max_output_tokens": 12,
    "temperature": 0,
}
LONG = {**BODY, "max_output_tokens": 200, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}


def names(answer: Answer) -> list[str]:
    """Of a stream's events, which are numbered through."""
    lines = answer.body.decode().split("\n")
    found = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert found == [event["type"] for event in answer.events]
    assert [event["sequence_number"] for event in answer.events] == list(range(len(found)))
    return found


def is_as_openai_says(answer: Any) -> None:
    """Every field of the right type, as their own models check it."""
    openai.types.responses.Response.model_validate(answer)


async def until_it_is_over(client: Client, name: str) -> Any:
    async with asyncio.timeout(60):
        for _ in count():
            answer = (await client.get(f"/v1/responses/{name}")).json
            if answer["status"] not in ("queued", "in_progress"):
                return answer
            await asyncio.sleep(0.005)


def test_a_response_has_all_its_fields(llm: AsyncLLM) -> None:
    expected = text_of(12)

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            fields = {"metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k"}
            answer = (await client.post("/v1/responses", {**BODY, **fields})).json
            is_as_openai_says(answer)
            (item,) = answer["output"]
            assert item["content"] == [
                {"type": "output_text", "text": expected, "annotations": [], "logprobs": []}
            ]
            assert (item["type"], item["role"], item["status"]) == (
                "message", "assistant", "incomplete",
            )  # fmt: skip
            assert answer["status"] == "incomplete"
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert answer["usage"] == {
                "input_tokens": num_tokens(PROMPT),
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 12,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_tokens(PROMPT) + 12,
            }
            assert answer["object"] == "response"
            assert answer["text"] == {"format": {"type": "text"}, "verbosity": None}
            assert (answer["temperature"], answer["top_p"]) == (0.0, 1.0)
            assert {name: answer[name] for name in fields} == fields
            assert answer["completed_at"] >= answer["created_at"]

    run(ask())


def test_the_events_come_in_order(llm: AsyncLLM) -> None:
    expected = text_of(12)

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            answer = await client.post("/v1/responses", {**BODY, "stream": True})
            found = names(answer)
            assert found[:4] == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
            ]
            assert set(found[4:-4]) == {"response.output_text.delta"}
            assert found[-4:] == [
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.incomplete",
            ]
            assert b"[DONE]" not in answer.body
            events = answer.events
            assert "".join(event["delta"] for event in events[4:-4]) == expected
            assert events[-4]["text"] == expected
            assert events[0]["response"]["output"] == []
            last = events[-1]["response"]
            is_as_openai_says(last)
            assert last["output"] == [events[-2]["item"]]
            assert {event["item_id"] for event in events[3:-2]} == {events[2]["item"]["id"]}

    run(ask())


def test_openais_own_client_reads_them(llm: AsyncLLM) -> None:
    expected = text_of(12)

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            asking = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="bob-key", max_retries=0)
            async with asking as client:
                whole = await client.responses.create(**BODY)
                assert whole.output_text == expected
                stops = {"extra_body": {"stop": expected[5:7]}}
                async with client.responses.stream(**BODY, **stops) as stream:
                    final = await stream.get_final_response()
                assert final.output_text == expected.split(expected[5:7])[0]
                assert final.status == "completed"
                again = await client.responses.retrieve(final.id)
                assert again.output_text == final.output_text
                items = [item async for item in client.responses.input_items.list(final.id)]
                assert [item.content[0].text for item in items] == [BODY["input"]]
                await client.responses.delete(final.id)
                alice = client.with_options(api_key="alice-key")
                for stranger, name in ((client, final.id), (alice, whole.id)):
                    with pytest.raises(openai.NotFoundError):
                        await stranger.responses.retrieve(name)
                with pytest.raises(openai.BadRequestError, match="background=true"):
                    await client.responses.cancel(whole.id)

    run(ask())


def test_a_kept_response_is_continued_from_the_cache(llm: AsyncLLM) -> None:
    # A mark after the role, as models have: no token is of both the template and what is said.
    marked = (
        "{% for m in messages %}# {{ m.role }}:<|endoftext|>{{ m.content }}{{ '\n' }}{% endfor %}"
    )
    config = replace(CONFIG, chat_template=marked + "# assistant:<|endoftext|>")
    prompt = (
        "# system:<|endoftext|>Write Python.\n# user:<|endoftext|>def fibonacci(n):\n"
        "# assistant:<|endoftext|>"
    )

    async def ask() -> None:
        async with serving(config, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            first = (await client.post("/v1/responses", BODY)).json
            fields = {**BODY, "input": "And?", "previous_response_id": first["id"]}
            second = (await client.post("/v1/responses", fields)).json
            said = first["output"][0]["content"][0]["text"]
            whole = prompt + said + "\n# user:<|endoftext|>And?\n# assistant:<|endoftext|>"
            assert second["usage"]["input_tokens"] == num_tokens(whole)
            assert second["previous_response_id"] == first["id"]
            cached = second["usage"]["input_tokens_details"]["cached_tokens"]
            # All of the first prompt, and of what was said what reads as the same tokens again.
            assert cached > first["usage"]["input_tokens"]
            salted = (await client.post("/v1/responses", {**fields, "cache_salt": "x"})).json
            assert salted["usage"]["input_tokens_details"]["cached_tokens"] == 0
            third = (
                await client.post("/v1/responses", {**fields, "previous_response_id": second["id"]})
            ).json
            url = f"/v1/responses/{third['id']}/input_items"
            page = (await anonymous.with_key("alice-key").get(url)).json
            roles = [item["role"] for item in page["data"]]
            assert roles == ["user", "assistant", "user", "assistant", "user"]
            assert [page["data"][-1]["content"], page["data"][1]] == [
                [{"type": "input_text", "text": BODY["input"]}],
                second["output"][0],
            ]
            assert page["has_more"] is False
            bob = anonymous.with_key("bob-key")
            other = await bob.post("/v1/responses", fields)
            assert (other.status, other.error["code"]) == (404, "previous_response_not_found")
            unknown = await client.post(
                "/v1/responses", {**fields, "previous_response_id": "resp_0"}
            )
            assert other.error["message"].replace(first["id"], "") == unknown.error[
                "message"
            ].replace("resp_0", "")

    run(ask())


def test_what_is_kept_is_in_no_log(caplog: pytest.LogCaptureFixture, llm: AsyncLLM) -> None:
    caplog.set_level(logging.DEBUG)

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            secret = {**BODY, "input": "my name is Rumpelstiltskin", "background": True}
            made = (await client.post("/v1/responses", secret)).json
            await until_it_is_over(client, made["id"])
            for path in ("", "/input_items"):
                assert (await client.get(f"/v1/responses/{made['id']}{path}")).status == 200
            kept = client.service.responses.get(1, made["id"])  # of the first key
            assert b"Rumpelstiltskin" in kept.before[0]
            assert "Rumpelstiltskin" not in repr(kept) + caplog.text

    run(ask())


def test_input_items_come_in_pages(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            given = [{"role": "user", "content": str(number)} for number in range(7)]
            asking = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="bob-key")
            async with asking as client:
                made = await client.responses.create(**{**BODY, "input": given})
                for order, expected in (("asc", range(7)), ("desc", range(6, -1, -1))):
                    pages = client.responses.input_items.list(made.id, limit=3, order=order)
                    found = [item.content[0].text async for item in pages]
                    assert found == [str(number) for number in expected]
            client = anonymous.with_key("bob-key")
            url = f"/v1/responses/{made.id}/input_items"
            for query, said in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
                call = client.call(url, method="GET", query=query)
                answer = await call.whole()
                assert (answer.status, answer.error["param"]) == (400, said)

    run(ask())


def test_nothing_is_kept_where_that_is_not_wanted(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            answer = (await client.post("/v1/responses", {**BODY, "store": False})).json
            assert (await client.get(f"/v1/responses/{answer['id']}")).status == 404
            assert len(client.service.responses) == 0
            refused = await client.post(
                "/v1/responses", {**BODY, "store": False, "background": True}
            )
            assert (refused.status, refused.error["param"]) == (400, "store")

    run(ask())


def test_thoughts_text_and_calls_are_items_of_their_own(llm: AsyncLLM) -> None:
    said = (
        '<think>Two numbers.</think>I add.\n<tool_call>{"name": "add", "arguments": '
        '{"a": true, "b": "x"}}</tool_call>'
    )
    config = ServerConfig(
        chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="qwen3"
    )

    async def ask() -> None:
        async with serving(config, llm=llm) as client, listening(client) as address:
            saying(client, said)
            fields = {**BODY, "max_output_tokens": 60, "tools": [ADD]}
            answer = await client.post("/v1/responses", {**fields, "stream": True})
            found = [name.removeprefix("response.") for name in names(answer)]
            order = [name for place, name in enumerate(found) if name != found[place - 1]]
            assert order == [
                "created", "in_progress",
                "output_item.added", "content_part.added", "reasoning_text.delta",
                "reasoning_text.done", "content_part.done", "output_item.done",
                "output_item.added", "content_part.added", "output_text.delta",
                "output_text.done", "content_part.done", "output_item.done",
                "output_item.added", "function_call_arguments.delta",
                "function_call_arguments.done", "output_item.done", "completed",
            ]  # fmt: skip
            are = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
            for event in answer.events:
                are.validate_python(event)
            last = answer.events[-1]["response"]
            thought, text, call = last["output"]
            assert thought["content"] == [{"type": "reasoning_text", "text": "Two numbers."}]
            assert text["content"][0]["text"] == "I add."
            assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": True, "b": "x"})
            reasoned = last["usage"]["output_tokens_details"]["reasoning_tokens"]
            assert reasoned == num_tokens("Two numbers.")
            asking = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
            async with asking:
                async with asking.responses.stream(**fields) as stream:
                    final = await stream.get_final_response()
                assert [item.type for item in final.output] == [
                    "reasoning", "message", "function_call",
                ]  # fmt: skip
                assert final.output[2].parsed_arguments == {"a": True, "b": "x"}
                items = [item.model_dump(exclude_none=True) for item in final.output]
                for item in items:
                    item.pop("parsed_arguments", None)
                    for part in item.get("content", ()):
                        part.pop("parsed", None)
                result = {"type": "function_call_output", "call_id": items[2]["call_id"],
                          "output": "3"}  # fmt: skip
                back = [{"role": "user", "content": BODY["input"]}, *items, result]
                by_items = await asking.responses.create(**{**fields, "input": back})
                by_name = await asking.responses.create(
                    **{**fields, "input": [result], "previous_response_id": final.id}
                )
                assert by_items.usage.input_tokens == by_name.usage.input_tokens
                assert by_name.usage.input_tokens_details.cached_tokens > num_tokens(PROMPT)

    run(ask())


def test_a_required_tool_is_called(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            asking = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="bob-key", max_retries=0)
            async with asking as client:
                fields = {**BODY, "max_output_tokens": 100, "tools": [ADD]}
                allowed = {"type": "allowed_tools", "mode": "required",
                           "tools": [{"type": "function", "name": "add"}]}  # fmt: skip
                for choice in ("required", {"type": "function", "name": "add"}, allowed):
                    more: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False}
                    whole = await client.responses.create(**fields, **more)
                    (call,) = whole.output
                    assert (call.type, call.name, call.status) == (
                        "function_call", "add", "completed",
                    )  # fmt: skip
                    assert set(json.loads(call.arguments)) == {"a", "b"}
                    assert whole.status == "completed"
                    async with client.responses.stream(**fields, **more) as stream:
                        final = await stream.get_final_response()
                    assert final.output[0].arguments == call.arguments

    run(ask())


def test_a_call_that_breaks_off_is_no_call_to_go_on_with(llm: AsyncLLM) -> None:
    said = 'I add. <tool_call>{"name": "add", "arguments": {"a": tr'

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            saying(anonymous, said)
            fields = {**BODY, "max_output_tokens": 60, "tools": [ADD]}
            whole = (await client.post("/v1/responses", fields)).json
            texts = [part["text"] for item in whole["output"] for part in item["content"]]
            assert "".join(texts) == said
            streamed = (await client.post("/v1/responses", {**fields, "stream": True})).events
            last = streamed[-1]["response"]
            statuses = [(item["type"], item["status"]) for item in last["output"]]
            assert ("function_call", "incomplete") in statuses
            again = {**fields, "input": "Go on.", "previous_response_id": last["id"]}
            assert (await client.post("/v1/responses", again)).status == 200

    run(ask())


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_the_limit_cuts_is_an_incomplete_item(streams: bool, llm: AsyncLLM) -> None:
    said = '<tool_call>{"name": "add", "arguments": {"a": tr'

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            saying(anonymous, said, reason="length")
            fields = {**BODY, "max_output_tokens": 60, "tools": [ADD], "stream": streams}
            answer = await client.post("/v1/responses", fields)
            found = answer.events[-1]["response"] if streams else answer.json
            assert (found["status"], found["incomplete_details"]) == (
                "incomplete", {"reason": "max_output_tokens"},
            )  # fmt: skip
            (item,) = found["output"]
            assert (item["type"], item["status"]) == ("function_call", "incomplete")
            assert item["arguments"] == '{"a": '
            again = {**BODY, "input": "Go on.", "previous_response_id": found["id"]}
            assert (await client.post("/v1/responses", again)).status == 200

    run(ask())


def test_the_form_of_the_text(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            client = anonymous.with_key("alice-key")
            form: dict[str, Any] = {"type": "json_schema", "name": "sum", "schema": SCHEMA}
            fields = {**BODY, "max_output_tokens": 100, "text": {"format": form}}
            answer = (await client.post("/v1/responses", fields)).json
            is_as_openai_says(answer)
            assert set(json.loads(answer["output"][0]["content"][0]["text"])) == {"a", "b"}
            assert answer["text"]["format"] == form

            class Sum(pydantic.BaseModel):
                a: bool
                b: Literal["x", "y"]

            asking = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="bob-key", max_retries=0)
            async with asking:
                fields = {**BODY, "max_output_tokens": 100}
                parsed = await asking.responses.parse(**fields, text_format=Sum)
            assert isinstance(parsed.output_parsed, Sum)
            either = {**BODY, "structured_outputs": {"choice": ["yes", "no"]}}
            answer = (await client.post("/v1/responses", either)).json
            assert answer["output"][0]["content"][0]["text"] in ("yes", "no")

    run(ask())


def test_logprobs_are_those_of_the_text(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            for fields, num_top in (({"include": ["message.output_text.logprobs"]}, 0),
                                    ({"top_logprobs": 2}, 2)):  # fmt: skip
                asked = {**BODY, **fields}
                answer = await client.post("/v1/responses", {**asked, "stream": True})
                done = next(e for e in answer.events if e["type"] == "response.output_text.done")
                assert "".join(token["token"] for token in done["logprobs"]) == done["text"]
                assert {len(token["top_logprobs"]) for token in done["logprobs"]} == {num_top}
                deltas = [e for e in answer.events if e["type"] == "response.output_text.delta"]
                assert [one for e in deltas for one in e["logprobs"]] == done["logprobs"]
                whole = (await client.post("/v1/responses", asked)).json
                said = whole["output"][0]["content"][0]["logprobs"]
                assert [token["token"] for token in said] == [
                    token["token"] for token in done["logprobs"]
                ]

    run(ask())


def test_a_conversation_that_is_too_long_loses_its_beginning(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            given = [
                {"role": role, "content": f"{number} " + "def f(): pass\n" * 5}
                for number in range(20)
                for role in ("user", "assistant")
            ]
            given.append({"role": "user", "content": "last"})
            fields = {**BODY, "input": given}
            refused = await client.post("/v1/responses", fields)
            assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
            answer = (await client.post("/v1/responses", {**fields, "truncation": "auto"})).json
            assert 128 < answer["usage"]["input_tokens"] <= 256 - 12
            assert answer["truncation"] == "auto"
            short = {**BODY, "truncation": "auto"}
            whole = (await client.post("/v1/responses", short)).json
            assert whole["usage"]["input_tokens"] == num_tokens(PROMPT)

    run(ask())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "image_generation_call"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1000}, "1,000"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "allowed_tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"text": {"format": {"type": "xml"}}}, "xml"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"include": ["everything"]}, "include"),
        ({"top_logprobs": 21}, "max_logprobs"),
        ({"n": 3}, "n=3"),
        ({"truncation": "middle"}, "truncation"),
    ],
)
def test_what_is_wrong_is_said(llm: AsyncLLM, fields: dict[str, Any], said: str) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            answer = await anonymous.with_key("alice-key").post("/v1/responses", {**BODY, **fields})
            assert answer.status == 400, answer.body
            assert said in answer.error["message"]
            assert anonymous.service.admission.num_under_way == 0

    run(ask())


def test_what_does_nothing_is_named(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            fields = {"include": ["reasoning.encrypted_content"], "made_up": 1,
                      "reasoning": {"effort": "low", "summary": "auto"}}  # fmt: skip
            answer = await anonymous.with_key("bob-key").post("/v1/responses", {**BODY, **fields})
            assert answer.status == 200
            assert set(answer.headers["x-ignored-fields"].split(",")) == {
                "made_up", "include.reasoning.encrypted_content", "reasoning.summary",
            }  # fmt: skip

    run(ask())


def test_an_engine_that_fails_is_an_event_and_an_answer(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")

            def generate(_: Any) -> Any:
                raise ValueError("a secret of the engine")

            anonymous.service.engine.generate = generate
            answer = await client.post("/v1/responses", {**BODY, "stream": True})
            assert names(answer)[-1] == "response.failed"
            last = answer.events[-1]["response"]
            is_as_openai_says(last)
            assert last["error"]["code"] == "server_error"
            whole = await client.post("/v1/responses", BODY)
            assert whole.status == 500
            assert b"secret" not in answer.body + whole.body
            assert client.service.admission.num_under_way == 0

    run(ask())


def test_leaving_ends_it_and_keeps_nothing(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            for stream in (True, False):
                body = {**LONG, "stream": stream}
                await leave_while_it_runs(client, "/v1/responses", body, events=6)
                assert len(client.service.responses) == 0

    run(ask())


# -- in the background -----------------------------------------------------------------------------

BEHIND = {**BODY, "background": True}


def test_it_goes_on_without_a_connection(llm: AsyncLLM) -> None:
    expected = text_of(12)

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            begun = (await client.post("/v1/responses", BEHIND)).json
            is_as_openai_says(begun)
            assert (begun["status"], begun["output"]) == ("queued", [])
            over = await until_it_is_over(client, begun["id"])
            assert over["status"] == "incomplete"
            assert over["output"][0]["content"][0]["text"] == expected
            assert over["background"] is True
            assert client.service.admission.num_under_way == len(client.service.background) == 0
            stays = await client.post(f"/v1/responses/{begun['id']}/cancel")
            assert stays.json == over

    run(ask())


def test_cancelling_frees_its_memory_at_once(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            client, bob = anonymous.with_key("alice-key"), anonymous.with_key("bob-key")
            for what in ("cancel", "delete"):
                fields = {**LONG, "background": True}
                name = (await client.post("/v1/responses", fields)).json["id"]
                async with asyncio.timeout(20):
                    while not (await client.service.engine.usage()).num_sequences:
                        await asyncio.sleep(0.001)
                for theirs in (f"/v1/responses/{name}/cancel", f"/v1/responses/{name}"):
                    assert (await bob.post(theirs)).status in (404, 405)
                assert (await bob.get(f"/v1/responses/{name}")).status == 404
                asking = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="alice-key")
                async with asking:
                    if what == "cancel":
                        ended = await asking.responses.cancel(name)
                        assert ended.status == "cancelled"
                        kept = await asking.responses.retrieve(name)
                        assert kept.model_dump() == ended.model_dump()
                    else:
                        await asking.responses.delete(name)
                # What is asked for between two steps comes after the end of what was cancelled.
                assert (await client.service.engine.usage()).num_sequences == 0
                assert client.service.admission.num_under_way == len(client.service.background) == 0
                status = (await client.get(f"/v1/responses/{name}")).status
                assert status == (200 if what == "cancel" else 404)

    run(ask())


def test_so_many_and_no_more(llm: AsyncLLM) -> None:
    config = ServerConfig(chat_template=TEMPLATE, max_background_responses=2)

    async def ask() -> None:
        async with serving(config, llm=llm) as client:
            begun = [
                (await client.post("/v1/responses", {**LONG, "background": True})).json
                for _ in range(2)
            ]
            refused = await client.post("/v1/responses", {**LONG, "background": True})
            assert (refused.status, refused.error["code"]) == (429, "background_limit")
            assert "retry-after" in refused.headers
            assert client.service.admission.num_under_way == 2
            for each in begun:  # the second perhaps before its first step
                await client.post(f"/v1/responses/{each['id']}/cancel")
            again = await client.post("/v1/responses", BEHIND)
            assert again.status == 200
            await until_it_is_over(client, again.json["id"])

    run(ask())


def test_one_that_is_cancelled_before_it_begins_holds_nothing(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            own = anonymous.service.background.start

            def start(caller: int, name: str, started: Any) -> None:
                own(caller, name, started)
                started.stop()

            anonymous.service.background.start = start
            begun = (await client.post("/v1/responses", BEHIND)).json
            over = await until_it_is_over(client, begun["id"])
            assert over["status"] == "cancelled"
            await nothing_runs(client)

    run(ask())


def test_its_events_can_be_read_again_from_anywhere(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous, listening(anonymous) as address:
            client = anonymous.with_key("alice-key")
            call = client.call("/v1/responses", {**BEHIND, "stream": True})
            await call.until(4)
            call.leave()
            await call.task
            name = call.answer.events[0]["response"]["id"]
            over = await until_it_is_over(client, name)
            assert over["status"] == "incomplete"
            url = f"/v1/responses/{name}"
            whole = await client.call(url, method="GET", query="stream=true").whole()
            found = names(whole)
            assert found[:3] == ["response.created", "response.queued", "response.in_progress"]
            assert found[-1] == "response.incomplete"
            assert whole.body.startswith(call.answer.body)
            asking = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="alice-key")
            async with asking:
                rest = await asking.responses.retrieve(name, stream=True, starting_after=4)
                numbers = [event.sequence_number async for event in rest]
            assert numbers == list(range(5, len(found)))
            plain = (await client.post("/v1/responses", BODY)).json["id"]
            refused = await client.call(
                f"/v1/responses/{plain}", method="GET", query="stream=true"
            ).whole()
            assert (refused.status, refused.error["param"]) == (400, "stream")

    run(ask())


def test_a_server_that_stops_stops_them(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            await client.post("/v1/responses", {**LONG, "background": True})
            assert not await client.service.drain(0.0)
            client.service.close()
            await nothing_runs(client)

    run(ask())
