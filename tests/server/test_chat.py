"""/v1/chat/completions: a template's prompt, the engine's tokens, and what they are read as."""

import itertools
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engine.test_llm import demo
from quire import LLM, AsyncLLM, SamplingParams
from quire.config import ServerConfig
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from server.asking import Answer, Client, nothing_runs, run, saying, serving

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}# tools: <tool_call>\n{% endif %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)
CONFIG = ServerConfig(chat_template=TEMPLATE, tool_call_parser="hermes")
MESSAGES = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "def fibonacci(n):"},
]
PROMPT = "# system: Write Python.\n# user: def fibonacci(n):\n# assistant: "
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


async def both(client: Client, **fields: Any) -> tuple[Any, Answer]:
    body = {"messages": MESSAGES, **GREEDY, **fields}
    whole = await client.post("/v1/chat/completions", body)
    assert whole.status == 200, whole.body
    streamed = await client.post("/v1/chat/completions", {**body, "stream": True})
    assert streamed.status == 200
    assert streamed.events[-1] == "[DONE]"
    return whole.json, streamed


def put_together(answer: Answer) -> dict[int, dict[str, Any]]:
    """The messages of a stream, as clients put them together."""
    found: dict[int, dict[str, Any]] = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {"content": "", "tool_calls": {}})
            delta = choice["delta"]
            assert ("role" in delta) == ("role" not in own), "the role comes first, and once"
            own["role"] = "assistant"
            own["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] not in own["tool_calls"]
                    own["tool_calls"][call["index"]] = {
                        "name": call["function"]["name"],
                        "args": "",
                    }
                own["tool_calls"][call["index"]]["args"] += call["function"].get("arguments", "")
            own["finish_reason"] = choice["finish_reason"]
    return found


def test_the_answer_is_what_the_engine_makes_of_the_templates_prompt(llm: AsyncLLM) -> None:
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12)
    with LLM(demo(), max_model_len=256, kv_cache_memory_bytes="64MB", max_num_seqs=8) as own:
        expected = own.generate([PROMPT], sampling)[0]

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            whole, streamed = await both(client, n=2)
            for choice in whole["choices"]:
                assert choice["message"] == {
                    "role": "assistant",
                    "content": expected.text,
                    "refusal": None,
                }
                assert choice["finish_reason"] == "length"
            assert whole["object"] == "chat.completion"
            assert whole["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
            assert whole["usage"]["completion_tokens"] == 24
            assert streamed.events[0]["object"] == "chat.completion.chunk"
            assert {
                index: (own["content"], own["finish_reason"])
                for index, own in put_together(streamed).items()
            } == dict.fromkeys(range(2), (expected.text, "length"))

    run(ask())


def test_without_a_limit_the_answer_may_fill_the_context(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", body)
            assert answer.json["usage"]["total_tokens"] == 256
            assert answer.json["choices"][0]["finish_reason"] == "length"
            over = await client.post("/v1/chat/completions", {**body, "max_completion_tokens": 256})
            assert over.status == 400
            assert over.error["code"] == "context_length_exceeded"

    run(ask())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_asked_for_comes(choice: Any, llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            fields = {"tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
            whole, streamed = await both(client, **fields, max_tokens=200, ignore_eos=False)
            message = whole["choices"][0]["message"]
            (call,) = message["tool_calls"]
            assert message["content"] is None
            assert call["type"] == "function"
            assert call["id"]
            assert call["function"]["name"] == "add"
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments["a"], bool)
            assert arguments["b"] in ("x", "y")
            reason = "tool_calls" if choice == "required" else "stop"
            assert whole["choices"][0]["finish_reason"] == reason
            own = put_together(streamed)[0]
            assert own["finish_reason"] == reason
            contents = {
                c["delta"].get("content") for e in streamed.events[:-1] for c in e["choices"]
            }
            assert contents == {None}, "a call begins with a text"
            assert own["tool_calls"][0]["name"] == "add"
            assert json.loads(own["tool_calls"][0]["args"]) == arguments
            await nothing_runs(client)

    run(ask())


def test_a_call_in_the_text_is_found_and_the_rest_is_content(llm: AsyncLLM) -> None:
    """The model is made to write one, by a grammar; that it is a call is the reader's finding."""
    text = r'sure <tool_call>\n\{"name": "add", "arguments": \{"a": true\}\}\n</tool_call>'

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            whole, streamed = await both(
                client,
                tools=[ADD],
                structured_outputs={"regex": text},
                max_tokens=100,
                ignore_eos=False,
            )
            message = whole["choices"][0]["message"]
            assert message["content"].strip() == "sure"
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": True}
            assert whole["choices"][0]["finish_reason"] == "tool_calls"
            own = put_together(streamed)[0]
            assert own["content"].strip() == "sure"
            assert json.loads(own["tool_calls"][0]["args"]) == {"a": True}
            unread, _ = await both(
                client,
                tools=[ADD],
                tool_choice="none",
                structured_outputs={"regex": text},
                max_tokens=100,
                ignore_eos=False,
            )
            assert "<tool_call>" in unread["choices"][0]["message"]["content"]

    run(ask())


CUT = '<tool_call>{"name": "add", "arguments": {"a": true, "b": "x'


def test_a_call_that_the_limit_cuts_is_a_call_and_no_content(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            saying(client, CUT, reason="length")
            whole, streamed = await both(client, tools=[ADD], max_tokens=60)
            (choice,) = whole["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": '{"a": true, "b": "x'}
            own = put_together(streamed)[0]
            assert (own["content"], own["finish_reason"]) == ("", "length")
            assert own["tool_calls"][0] == {"name": "add", "args": '{"a": true, "b": "x'}

    run(ask())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_text_under_a_tools_grammar_is_never_content(choice: Any, llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            for fields in ({"max_tokens": 3}, {"max_tokens": 9}, {"stop": ['"b"']}):
                asked = {"max_tokens": 200, "ignore_eos": False, "tool_choice": choice, **fields}
                whole, streamed = await both(client, tools=[ADD], **asked)
                (found,) = whole["choices"]
                assert found["finish_reason"] == ("stop" if "stop" in fields else "length")
                assert not found["message"]["content"]
                own = put_together(streamed)[0]
                assert own["content"] == ""
                calls = found["message"].get("tool_calls", [])
                assert [call["function"]["arguments"] for call in calls] == [
                    call["args"] for call in own["tool_calls"].values()
                ]
                # In an array of calls the name comes first.
                assert (len(calls) == 1) == (choice != "required" or fields != {"max_tokens": 3})

    run(ask())


@pytest.mark.parametrize(
    ("parallel", "most"), [(None, 1), pytest.param(False, 1, marks=pytest.mark.full), (True, 9)]
)
def test_one_call_is_required_unless_several_are_asked_for(
    parallel: bool | None, most: int, llm: AsyncLLM
) -> None:
    """The model likes commas, so it goes on if it may."""
    comma = demo().tokenizer(",")["input_ids"][0]

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            whole, streamed = await both(
                client,
                tools=[ADD],
                tool_choice="required",
                parallel_tool_calls=parallel,
                logit_bias={str(comma): 100},
                max_tokens=120,
                ignore_eos=False,
            )
            (choice,) = whole["choices"]
            num_calls = len(choice["message"]["tool_calls"])
            assert num_calls == len(put_together(streamed)[0]["tool_calls"])
            assert num_calls == 1 if most == 1 else num_calls > 1
            assert choice["finish_reason"] == ("tool_calls" if most == 1 else "length")

    run(ask())


def test_a_choice_that_has_its_one_call_ends_once_while_others_go_on(llm: AsyncLLM) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": true, "b": "x"}}</tool_call>'
    seen: list[SamplingParams] = []

    async def generate(request: Request) -> AsyncGenerator[TextDelta, None]:
        seen.append(request.params)
        for choice, text, reason in (
            (0, call, None),
            (1, "no", None),
            (0, "more", None),
            (0, "", "stop"),
            (1, " call", "capacity"),
        ):
            yield TextDelta(index=0, choice=choice, text=text, token_ids=(9,), finish_reason=reason)

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            client.service.engine.generate = generate
            several = {"n": 2, "temperature": 1, "tools": [ADD], "parallel_tool_calls": False}
            whole, streamed = await both(client, **several, skip_special_tokens=False)
            ends = [
                (choice["index"], choice["finish_reason"])
                for event in streamed.events[:-1]
                for choice in event["choices"]
                if choice["finish_reason"] is not None
            ]
            # No word of OpenAI's says that KV memory ran out.
            assert ends == [(0, "tool_calls"), (1, "length")]
            assert [each["finish_reason"] for each in whole["choices"]] == ["tool_calls", "length"]
            assert whole["choices"][1]["message"]["content"] == "no call"
            assert not any(params.skip_special_tokens for params in seen)

    run(ask())


def test_reasoning_goes_apart_or_is_left_out(llm: AsyncLLM) -> None:
    config = ServerConfig(chat_template=TEMPLATE, reasoning_parser="qwen3")
    fields = {"max_tokens": 60}

    async def ask() -> None:
        async with serving(config, llm=llm) as client:
            saying(client, "<think>hm</think>yes")
            whole, streamed = await both(client, **fields)
            message = whole["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == ("hm", "yes")
            assert message["reasoning_content"] == "hm"
            details = {"reasoning_tokens": len(demo().tokenizer("hm")["input_ids"])}
            assert whole["usage"]["completion_tokens_details"] == details
            deltas = [event["choices"][0]["delta"] for event in streamed.events[:-1]]
            assert "".join(delta.get("reasoning") or "" for delta in deltas) == "hm"
            assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
            body = {"messages": MESSAGES, **GREEDY, **fields, "stream": True}
            counted = await client.post(
                "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
            )
            assert counted.events[-2]["usage"]["completion_tokens_details"] == details
            assert "".join(delta.get("content") or "" for delta in deltas) == "yes"
            quiet, streamed = await both(client, **fields, include_reasoning=False)
            assert not {"reasoning", "reasoning_content"} & set(quiet["choices"][0]["message"])
            assert b"hm" not in streamed.body

    run(ask())


def test_logprobs_are_those_of_the_tokens(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            whole, streamed = await both(client, logprobs=True, top_logprobs=2)
            content = whole["choices"][0]["logprobs"]["content"]
            assert len(content) == 12
            text = b"".join(bytes(token["bytes"]) for token in content).decode()
            assert text == whole["choices"][0]["message"]["content"]
            for token in content:
                assert len(token["top_logprobs"]) == 2
                assert token["top_logprobs"][0]["logprob"] == token["logprob"]  # greedy
            pieces = [event["choices"][0]["logprobs"] for event in streamed.events[:-1]]
            tokens = [token for piece in pieces if piece for token in piece["content"]]
            assert [token["token"] for token in tokens] == [token["token"] for token in content]
            # The second time the prompt is found computed: equal up to rounding.
            assert [token["logprob"] for token in tokens] == pytest.approx(
                [token["logprob"] for token in content], abs=0.05
            )
            without, _ = await both(client)
            assert without["choices"][0]["logprobs"] is None

    run(ask())


def test_only_allowed_tools_are_called(llm: AsyncLLM) -> None:
    other = {"type": "function", "function": {"name": "other"}}

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            named = [{"type": "function", "function": {"name": "add"}}]
            for mode, reason in (("required", "tool_calls"), ("auto", "length")):
                own = {"mode": mode, "tools": named}
                choice = {"type": "allowed_tools", "allowed_tools": own}
                whole, _ = await both(
                    client,
                    tools=[other, ADD],
                    tool_choice=choice,
                    max_tokens=100,
                    ignore_eos=mode == "auto",
                )
                assert whole["choices"][0]["finish_reason"] == reason
                calls = whole["choices"][0]["message"].get("tool_calls", [])
                assert [c["function"]["name"] for c in calls] == ["add"] * (mode == "required")
            for wrong in ({"mode": "most", "tools": named}, {"mode": "auto"},
                          {"mode": "auto", "tools": [{"function": {"name": "no"}}]}):  # fmt: skip
                choice = {"type": "allowed_tools", "allowed_tools": wrong}
                fields = {"messages": MESSAGES, "tools": [ADD], "tool_choice": choice}
                answer = await client.post("/v1/chat/completions", fields)
                assert answer.status == 400
                assert "allowed_tools" in answer.error["message"]

    run(ask())


def test_tokens_are_said_as_ids_where_that_is_asked_for(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
            whole, streamed = await both(client, **fields, return_tokens_as_token_ids=True)
            (choice,) = whole["choices"]
            said = choice["logprobs"]["content"]
            assert [token["token"] for token in said] == [
                f"token_id:{token_id}" for token_id in choice["token_ids"]
            ]
            assert all(
                likely["token"].startswith("token_id:") for likely in said[0]["top_logprobs"]
            )
            text = b"".join(bytes(token["bytes"]) for token in said).decode()
            assert text == choice["message"]["content"]
            assert b'"token":"token_id:' in streamed.body
            assert "x-ignored-fields" not in streamed.headers

    run(ask())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"functions": [{"name": "add"}]}, "give tools"),
        ({"function_call": {"name": "add"}}, "tool_choice"),
        ({"echo": True}, "/v1/completions"),
        ({"guided_whitespace_pattern": " "}, "leave it out"),
        ({"structural_tag": "{}"}, "leave it out"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "cannot be combined"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "exactly one"),
    ],
)
def test_what_would_change_the_text_is_not_dropped(
    llm: AsyncLLM, fields: dict[str, Any], said: str
) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            answer = await client.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
            assert answer.status == 400
            assert said in answer.error["message"]
            harmless = {"functions": None, "function_call": None, "echo": False, "max_tokens": 1}
            fine = await client.post("/v1/chat/completions", {"messages": MESSAGES, **harmless})
            assert fine.status == 200

    run(ask())


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_json": {"type": "boolean"}}, r"true|false"),
        ({"guided_json": '{"type": "boolean"}'}, r"true|false"),
        ({"guided_regex": "[xyz]{3}"}, r"[xyz]{3}"),
        ({"guided_choice": ["yes", "no"]}, r"yes|no"),
        ({"guided_grammar": 'root ::= "up" | "down"'}, r"up|down"),
    ],
)
def test_vllms_older_names_of_forms_are_known(
    llm: AsyncLLM, fields: dict[str, Any], fits: str
) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            whole, streamed = await both(client, **fields, ignore_eos=False, max_tokens=20)
            assert re.fullmatch(fits, whole["choices"][0]["message"]["content"])
            assert "x-ignored-fields" not in streamed.headers

    run(ask())


def test_the_last_message_can_be_gone_on_with(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            asked = {"messages": [*MESSAGES, {"role": "assistant", "content": "return"}]}
            tokens = await client.post("/tokenize", {**asked, "continue_final_message": True,
                                                     "add_generation_prompt": False})  # fmt: skip
            said = await client.post("/detokenize", {"tokens": tokens.json["tokens"]})
            assert said.json["prompt"] == PROMPT + "return"
            whole, _ = await both(client, **asked, continue_final_message=True)
            assert whole["usage"]["prompt_tokens"] == tokens.json["count"]

    run(ask())


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"messages": []}, 400),
        ({"messages": "hello"}, 400),
        ({"messages": [{"role": "user"}]}, 400),
        ({"messages": [{"content": "x"}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, 200),
        ({"tools": [{"type": "function"}]}, 400),
        ({"tools": [ADD] * 300}, 400),
        ({"tool_choice": "required"}, 400),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "no"}}}, 400),
        ({"tools": [ADD], "tool_choice": "required",
          "response_format": {"type": "json_object"}}, 400),
        ({"top_logprobs": 3}, 400),
        ({"logprobs": True, "top_logprobs": 99}, 400),
        ({"chat_template": "{{ messages }}"}, 400),
        ({"chat_template_kwargs": {"chat_template": "x"}}, 400),
        ({"continue_final_message": True, "add_generation_prompt": True}, 400),
        ({"max_completion_tokens": 0}, 400),
        ({"model": "other"}, 404),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(llm: AsyncLLM, fields: dict[str, Any], status: int) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            body = {"messages": MESSAGES, "max_tokens": 1, **fields}
            answer = await client.post("/v1/chat/completions", body)
            assert answer.status == status, answer.body
            assert status == 200 or answer.error["message"]

    run(ask())


EMPTY: tuple[Any, ...] = ("", [], [{"type": "text", "text": ""}])
CHATS = (
    ("/v1/chat/completions", "messages", {"max_tokens": 1}),
    ("/v1/messages", "messages", {"max_tokens": 1}),
    ("/v1/messages/count_tokens", "messages", {}),
    ("/v1/responses", "input", {"max_output_tokens": 1}),
)


def test_a_message_may_be_empty_through_every_interface(llm: AsyncLLM) -> None:
    async def run_it() -> None:
        async with serving(CONFIG, llm=llm) as client:
            length = len(demo().tokenizer("# user: \n# assistant: ")["input_ids"])
            for (path, field, fields), content in itertools.product(CHATS, EMPTY):
                turns = [{"role": "user", "content": content}]
                said = await client.post(path, {field: turns, **fields})
                assert said.status == 200, (path, content, said.body)
                used = said.json.get("usage", said.json)
                assert used.get("prompt_tokens", used.get("input_tokens")) == length
            for path, field, fields in CHATS:
                said = await client.post(path, {field: [{"role": "user"}], **fields})
                assert said.status == 400, path
                assert b"content" in said.body

    run(run_it())


def test_where_the_template_writes_nothing_the_client_is_told_so(llm: AsyncLLM) -> None:
    async def run_it() -> None:
        bare = ServerConfig(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
        async with serving(bare, llm=llm) as client:
            for path, field, fields in CHATS:
                if path.endswith("count_tokens"):
                    continue
                body = {field: [{"role": "user", "content": ""}], **fields}
                said = await client.post(path, body)
                assert said.status == 400
                assert b"the chat template writes nothing for these messages" in said.body

    run(run_it())


def test_what_an_answer_stopped_at_is_said(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as client:
            free, _ = await both(client)
            stop = free["choices"][0]["message"]["content"][4:6]
            whole, streamed = await both(client, stop=[stop])
            assert whole["choices"][0]["stop_reason"] == stop
            assert streamed.events[-2]["choices"][0]["stop_reason"] == stop
            client.service.chat._stop = (stop,)  # the model's own: told only if the client named it
            for fields, told in (({}, None), ({"stop": [stop]}, stop)):
                whole, streamed = await both(client, **fields)
                assert whole["choices"][0]["finish_reason"] == "stop"
                assert whole["choices"][0]["stop_reason"] == told
                assert streamed.events[-2]["choices"][0]["stop_reason"] == told

    run(ask())
