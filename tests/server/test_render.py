"""/v1/…/render: the token ids that a request would run on, and its refusals, without running it."""

from typing import Any

import pytest

from quire.config import ServerConfig
from server.asking import run, serving

TEXT = "def fibonacci(n):"
MESSAGES = [{"role": "user", "content": "name a city"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SHORT: dict[str, Any] = {"max_tokens": 1, "return_token_ids": True}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": [TEXT, "class Stack:", [5, 6, 7]]},
        {"prompt": [5, 6, 7]},
        {"truncate_prompt_tokens": 3},
        {"add_special_tokens": False},
        {"cache_salt": "mine", "priority": 3, "stream": True, "n": 2},
        {"use_beam_search": True, "n": 2},
    ],
)
def test_texts_have_the_tokens_they_run_on(fields: dict[str, Any]) -> None:
    body = {"prompt": TEXT, **fields}

    async def ask() -> None:
        async with serving() as client:
            rendered = (await client.post(f"{COMPLETIONS}/render", body)).json
            done = await client.post(COMPLETIONS, {**body, **SHORT, "stream": False})
            assert done.status == 200, done.body
            choices = done.json["choices"][:: fields.get("n", 1)]
            assert [own["token_ids"] for own in rendered] == [
                choice["prompt_token_ids"] for choice in choices
            ]
            for at, own in enumerate(rendered):
                assert own["request_id"].startswith("cmpl-")
                assert own["request_id"].endswith(f"-{at}") == (len(rendered) > 1)
                assert own["model"] == "demo"
                assert own["stream"] == fields.get("stream", False)
                assert own["cache_salt"] == fields.get("cache_salt")
                assert own["priority"] == fields.get("priority", 0)

    run(ask())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "Pa"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        {"truncate_prompt_tokens": 4},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_conversations_have_the_tokens_they_run_on(fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **fields}

    async def ask() -> None:
        async with serving() as client:
            rendered = await client.post(f"{CHATS}/render", body)
            assert rendered.status == 200, rendered.body
            done = await client.post(CHATS, {**body, **SHORT})
            assert rendered.json["token_ids"] == done.json["prompt_token_ids"]
            assert rendered.json["request_id"].startswith("chatcmpl-")
            assert ("structured_outputs" in rendered.json["sampling_params"]) == (
                "response_format" in fields or "tool_choice" in fields
            )

    run(ask())


def test_parameters_are_the_engines_without_its_defaults() -> None:
    async def ask() -> None:
        async with serving() as client:
            body = {"prompt": TEXT, "temperature": 0.5, "stop": "x", "logit_bias": {"7": -1}}
            (own,) = (await client.post(f"{COMPLETIONS}/render", body)).json
            assert own["sampling_params"] == {
                "temperature": 0.5,
                "stop": ["x"],
                "logit_bias": {"7": -1.0},
            }
            (own,) = (await client.post(f"{COMPLETIONS}/render", {"prompt": [5] * 250})).json
            assert own["sampling_params"]["max_tokens"] == 6  # what the context leaves

    run(ask())


WRONG: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": TEXT, "model": "another"}),
    (COMPLETIONS, {"prompt": TEXT, "max_tokens": 10_000}),
    (COMPLETIONS, {"prompt": TEXT, "logprobs": 99}),
    (COMPLETIONS, {"prompt": [5] * 1000}),
    (COMPLETIONS, {"prompt": [10**7]}),
    (COMPLETIONS, {"prompt": TEXT, "lora_request": {}}),
    (COMPLETIONS, {"prompt": [TEXT] * 20, "n": 128}),
    (COMPLETIONS, {}),
    (CHATS, {"messages": MESSAGES, "model": "another"}),
    (CHATS, {"messages": []}),
    (CHATS, {"messages": MESSAGES, "max_tokens": 10_000}),
    (CHATS, {"messages": MESSAGES, "n": 128, "logprobs": True, "top_logprobs": 200}),
    (CHATS, {"messages": MESSAGES, "tool_choice": "required"}),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
]


def test_what_its_sibling_refuses_is_refused_alike() -> None:
    async def ask() -> None:
        async with serving() as client:
            for path, body in WRONG:
                sibling = await client.post(path, body)
                own = await client.post(f"{path}/render", body)
                assert sibling.status >= 400, (path, body)
                assert (own.status, own.json) == (sibling.status, sibling.json), (path, body)
            await client.post("/sleep", {})
            for path, body in ((COMPLETIONS, {"prompt": TEXT}), (CHATS, {"messages": MESSAGES})):
                assert (await client.post(f"{path}/render", body)).status == 503

    run(ask())


def test_nothing_runs_and_no_place_in_the_queue_is_taken() -> None:
    async def ask() -> None:
        async with serving() as client:
            service = client.app.state.service
            for _ in range(3):
                await client.post(f"{COMPLETIONS}/render", {"prompt": TEXT})
                await client.post(f"{CHATS}/render", {"messages": MESSAGES})
            statistics = service.engine.llm.statistics
            assert statistics.prefix_query_tokens == statistics.num_prompt_tokens == 0
            assert (await client.get("/load")).json == {"server_load": 0}

    run(ask())


def test_a_key_is_needed_as_by_its_sibling() -> None:
    async def ask() -> None:
        async with serving(config=ServerConfig(api_key=("alice",))) as client:
            for path, body in ((COMPLETIONS, {"prompt": TEXT}), (CHATS, {"messages": MESSAGES})):
                assert (await client.post(f"{path}/render", body)).status == 401
                alice = client.with_key("alice")
                assert (await alice.post(f"{path}/render", body)).status == 200

    run(ask())
