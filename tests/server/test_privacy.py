"""What clients send is in no log, no metric, and no other client's answer."""

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.config import ServerConfig
from quire.engine.core import Engine
from quire.engine.llm import LLM
from quire.server.endpoints import completions
from quire.server.endpoints.generation import Generation
from quire.server.logs import PlaceFormatter
from server.asking import Client, nothing_runs, run
from server.sockets import Listening, listening, posting

WORD = "canary"
KEY = f"{WORD}-key"
SAID = f"{WORD} in a prompt"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SAID}], "max_tokens": 3}
BRIEF: dict[str, Any] = {"prompt": SAID, "max_tokens": 3}

ASKED: list[tuple[str, Any]] = [
    ("/v1/completions", BRIEF),
    ("/v1/completions", {**BRIEF, "stream": True, "logprobs": 2, "echo": True}),
    ("/v1/completions", {**BRIEF, "stop": [WORD], "user": WORD, "bad_words": [WORD]}),
    ("/v1/completions", {**BRIEF, "cache_salt": WORD, "request_id": WORD, WORD: WORD}),
    ("/v1/completions", {**BRIEF, "model": WORD}),
    ("/v1/completions", {**BRIEF, "max_tokens": 10**6}),
    ("/v1/completions", {**BRIEF, "max_tokens": WORD}),
    ("/v1/completions", {**BRIEF, "prompt": [WORD, 1]}),
    ("/v1/completions", {**BRIEF, "prompt": f"{WORD} " * 1000}),
    ("/v1/completions", {**BRIEF, "prompt": f"{WORD}\ud800"}),
    ("/v1/completions", {**BRIEF, "logit_bias": {WORD: 1}}),
    ("/v1/completions", {**BRIEF, "bad_words": [f"{WORD}\ud800"]}),
    ("/v1/completions", {**BRIEF, "structured_outputs": {"regex": f"({WORD}"}}),
    ("/v1/completions", {**BRIEF, "structured_outputs": {"choice": [WORD]}}),
    ("/v1/completions", {**BRIEF, "structured_outputs": {"grammar": WORD}}),
    ("/v1/completions", {**BRIEF, "structured_outputs": {"json": {"pattern": f"({WORD}"}}}),
    ("/v1/completions", f'{{"prompt": "{WORD}'.encode()),
    ("/v1/completions", f'{{"{WORD}": 1, "{WORD}": 2}}'.encode()),
    ("/v1/completions", WORD.encode()),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": WORD, "content": WORD}]}),
    ("/v1/chat/completions", {**CHAT, "messages": [{WORD: WORD}]}),
    *(
        ("/v1/chat/completions", {**CHAT, **fields})
        for fields in (
            {"chat_template": "{{ messages[0].content.x() }}"},
            {"chat_template": "{{ raise_exception(messages[0].content) }}"},
            {"tools": [{"type": "function", "function": {"name": WORD}}]},
            {"tools": [{"type": "function", "function": {"name": f" {WORD}"}}]},
            {"tool_choice": {"type": "function", "function": {"name": WORD}}},
        )
    ),
    ("/v1/completions/render", {"prompt": SAID, "cache_salt": WORD}),
    ("/v1/chat/completions/render", {**CHAT, "messages": [{WORD: WORD}]}),
    ("/tokenize", {"prompt": SAID}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [WORD]}),
    (f"/v1/models/{WORD}?{WORD}", {}),
    (f"/{WORD}?{WORD}", {}),
]  # fmt: skip


@contextmanager
def everything_logged() -> Iterator[io.StringIO]:
    """All that any logger says from DEBUG on, with exceptions as ``quire serve`` writes them."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(PlaceFormatter("%(name)s %(message)s %(args)s"))
    root = logging.getLogger()
    names = ["quire", "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "transformers"]
    before = [(each, each.level) for each in (root, *map(logging.getLogger, names))]
    root.addHandler(handler)
    for each, _ in before:
        each.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        root.removeHandler(handler)
        for each, level in before:
            each.setLevel(level)


async def ask_all(server: Listening) -> list[bytes]:
    answers = []
    for path, body in ASKED:
        for key in (KEY, f"{KEY}-wrong"):
            peer = await server.connect()
            headers = {"authorization": f"Bearer {key}", "x_canary": WORD, "connection": "close"}
            method = {} if "models" not in path else {"x_request_id": WORD}
            await peer.send(posting(body, path, **headers, **method))
            answers.append(await peer.rest())
    return answers


def lines_with_canary(said: io.StringIO) -> list[str]:
    """But for access lines: the path is the operator's to see, its query is cut by a filter."""
    lines = said.getvalue().split("\n")
    return [x for x in lines if WORD in x and not x.startswith("uvicorn.access")]


def test_no_log_and_no_metric_says_what_was_sent() -> None:
    config = ServerConfig(api_key=(KEY,))

    async def ask() -> None:
        with everything_logged() as said:
            async with listening(config) as server:
                answers = await ask_all(server)
                assert any(b" 200 " in answer for answer in answers)
                await nothing_runs(server.client)
                metrics = await server.client.with_key(KEY).get("/metrics")
                assert WORD.encode() not in metrics.body
        assert "ASGI" not in said.getvalue()
        assert lines_with_canary(said) == []

    run(ask())


def test_what_fails_is_logged_without_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of libraries quote what they were given."""

    async def ask() -> None:
        with everything_logged() as said:
            async with listening(ServerConfig(api_key=(KEY,))) as server:

                async def fails(*_: Any, **__: Any) -> Any:
                    try:
                        raise KeyError(SAID)
                    except KeyError as error:
                        raise ValueError(SAID) from error

                async def fails_later(*_: Any, **__: Any) -> AsyncIterator[Any]:
                    await fails()
                    yield

                monkeypatch.setattr(completions, "prompt_ids", fails)
                monkeypatch.setattr(Generation, "deltas", fails_later)
                client = server.client.with_key(KEY)
                for body in (BRIEF, {**BRIEF, "prompt": [5]}):
                    answer = await client.post("/v1/completions", body)
                    assert answer.status == 500
                    assert WORD not in answer.error["message"]
                stream = {**BRIEF, "prompt": [5], "stream": True}
                answer = await client.post("/v1/completions", stream)
                assert WORD.encode() not in answer.body
                kept = await client.post("/v1/responses", {"input": "a", "background": True})
                assert kept.status == 200
                await until_ended(client, kept.json["id"])
        assert "a response ended early: ValueError" in said.getvalue()
        assert "ValueError" in said.getvalue()
        assert lines_with_canary(said) == []

    run(ask())


async def until_ended(client: Client, name: str) -> None:
    async with asyncio.timeout(20):
        while (await client.get(f"/v1/responses/{name}")).json["status"] != "failed":
            await asyncio.sleep(0.01)


def test_an_error_quotes_no_more_than_a_few_words() -> None:
    async def ask() -> None:
        long = f"{WORD} " * 2000
        async with listening(ServerConfig()) as server:
            for path, body in ASKED:
                if isinstance(body, bytes):
                    continue
                swollen = _with(body, long)
                answer = await server.client.post(path.partition("?")[0], swollen)
                if answer.status >= 400:
                    assert len(answer.body) < 1500, (path, str(body)[:200], answer.body[:3000])

    run(ask())


def _with(value: Any, long: str) -> Any:
    """The same, with a long text wherever there was the word."""
    if isinstance(value, str):
        return value.replace(WORD, long)
    if isinstance(value, list):
        return [_with(each, long) for each in value]
    if isinstance(value, dict):
        return {_with(name, long): _with(each, long) for name, each in value.items()}
    return value


def test_an_engine_that_fails_does_not_say_on_what(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        with everything_logged() as said:
            async with listening() as server:

                def fails_in_a_step(*_: Any) -> Any:
                    raise RuntimeError(SAID)

                def fails(_: LLM) -> bool:
                    raise RuntimeError(SAID)

                with monkeypatch.context() as patch:
                    patch.setattr(Engine, "_compute", fails_in_a_step)
                    answer = await server.client.post("/v1/completions", BRIEF)
                    assert answer.status == 500
                assert "in fails_in_a_step" in said.getvalue()
                monkeypatch.setattr(LLM, "step", fails)
                client: Client = server.client
                answer = await client.post("/v1/completions", BRIEF)
                assert answer.status >= 500
        assert "RuntimeError" in said.getvalue()
        assert "in fails\n" in said.getvalue()
        assert lines_with_canary(said) == []

    run(ask())
