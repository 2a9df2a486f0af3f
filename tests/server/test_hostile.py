"""Requests made to cost more than they may: each is refused in words, and leaves nothing."""

import asyncio
import gc
import gzip
import json
import os
import threading
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from forks import run_fork
from quire import AsyncLLM
from quire.config import ServerConfig
from quire.server.api_keys import Caller
from quire.server.fair_shares import Bodies, TextThreads
from quire.server.wire import body as body_module
from quire.server.wire.body import parse
from quire.server.wire.error_responses import Refused
from server.asking import Client, nothing_runs, run, serving
from server.random_requests import TEMPLATE
from server.sockets import listening, posting, until

AT = "/v1/completions"
BRIEF: dict[str, Any] = {"prompt": "def f(", "max_tokens": 2}
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
HALF = "\ud800"


def form(**fields: Any) -> dict[str, Any]:
    return {**BRIEF, "structured_outputs": fields}


REFUSED: list[Any] = [
    # More values than any client means.
    b'{"prompt":[' + b"[]," * 300_000 + b"1]}",
    b"{" + b",".join(b'"%d":1' % number for number in range(300_000)) + b"}",
    {"prompt": [7] * 300_000},
    {"prompt": "word " * 100_000},
    {**BRIEF, "prompt": ["a"] * 1025},
    {**BRIEF, "prompt": ["a"] * 1024, "n": 2},
    {**BRIEF, "prompt": ["a"] * 10, "n": 128},
    {**BRIEF, "prompt": ["a"] * 500, "max_tokens": 200, "logprobs": 20},
    {**BRIEF, "prompt": [[7] * 250] * 250, "max_tokens": 0, "echo": True, "logprobs": 20},
    # Numbers.
    *({**BRIEF, name: value} for name in ("n", "best_of", "logprobs", "prompt_logprobs")
      for value in (10**6, -(10**6), 2**70, 1e300, "1", True, [1], {"a": 1})),
    *({**BRIEF, name: value} for name in ("max_tokens", "min_tokens", "seed", "top_k", "priority")
      for value in (2**70, 1e300, "1", True, [1])),
    *({**BRIEF, name: value}
      for name in ("temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty")
      for value in (-1e300, 1e300, 10**400, "1", True)),
    {**BRIEF, "stop": ["a"] * 10**5},
    {**BRIEF, "bad_words": ["a"] * 10**5},
    {**BRIEF, "logit_bias": {str(number): 1 for number in range(2000)}},
    {**BRIEF, "logit_bias": {"4096": 1}},
    {**BRIEF, "logit_bias": {"-1": 1}},
    {**BRIEF, "allowed_token_ids": [7] * 300_000},
    {**BRIEF, "use_beam_search": True, "best_of": 10**6},
    {**BRIEF, "use_beam_search": True, "prompt": ["a"] * 10, "best_of": 128},
    {**BRIEF, "use_beam_search": True, "length_penalty": 1e300},
    # Texts that are none.
    *({**BRIEF, name: HALF} for name in ("prompt", "stop", "cache_salt", "user", "model", HALF)),
    *({**BRIEF, name: [HALF]} for name in ("prompt", "stop", "bad_words")),
    *(form(**{name: HALF}) for name in ("regex", "grammar", "json")),
    form(choice=[HALF]),
    form(json={"const": HALF}),
    b'{"prompt": "\xed\xa0\x80"}',
    json.dumps(BRIEF).encode("utf-16"),
    json.dumps(BRIEF).encode("utf-32-le"),
    # Grammars.
    form(json=DEEP),
    form(json={"$ref": "#"}),
    form(json={"$ref": "http://127.0.0.1:9/x"}),
    form(json={"$ref": "file:///etc/passwd"}),
    form(json={"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]}
                         for i in range(8)]}),
    form(regex="a" * 100_000),
    form(regex="(?=a)b"),
    form(grammar="start: " + " | ".join(f'"t{number}"' for number in range(10_000))),
    form(choice=["x" * 1000 + str(number) for number in range(1000)]),
]  # fmt: skip

ANSWERED: list[Any] = [
    form(regex="((a{1,100}){1,100}){1,100}"),
    form(regex="(a|aa)*" * 200),
    form(regex=".*a.{1000}"),
    form(json={"type": "array", "items": {"type": "string"}, "minItems": 10**6}),
    form(json={"type": "string", "minLength": 10**9}),
    form(grammar='start: start start | "a"'),
    {**BRIEF, "stop": ["é" * 1024] * 64},
    # A stop that is no token never comes; it must not be forbidden in any logits either.
    {**BRIEF, "stop_token_ids": [4096, 2**31 - 1], "min_tokens": 1},
    {**BRIEF, "use_beam_search": True, "best_of": 128, "length_penalty": -10},
    {**BRIEF, "allowed_token_ids": [0] * 100_000},
    {**BRIEF, "cache_salt": "\0"},
    {**BRIEF, "cache_salt": "👩‍💻" * 100},
    {**BRIEF, "prompt": "\0" * 10},
    {**BRIEF, "prompt": "\ufeff\u202e\u0000👩‍💻"},
    {**BRIEF, "user": "a\r\nx-injected: 1", "request_id": "a\r\nx-injected: 1"},
    {**BRIEF, "prompt": ["a"] * 300, "max_tokens": 1},
]


async def ask_all(client: Client) -> None:
    for number, body in enumerate(REFUSED):
        answer = await client.post(AT, body)
        assert 400 <= answer.status < 500, (number, str(body)[:80], answer.body[:300])
        assert len(answer.error["message"]) < 500, (number, answer.error)
    for body in ANSWERED:
        answer = await client.post(AT, body)
        assert answer.status == 200, (str(body)[:80], answer.body[:300])
        assert "x-injected" not in answer.headers
    await nothing_runs(client)


def test_hostile_requests_are_refused_and_nothing_grows() -> None:
    async def ask() -> None:
        async with serving() as client:
            await ask_all(client)  # what is kept once, grammars and tokens' texts, is there now
            before = _kept()
            await ask_all(client)
            grown = _kept() - before
            for _ in range(50):  # a call that another thread has just scheduled is still to run
                if grown:
                    await asyncio.sleep(0.02)
                    grown = _kept() - before
            assert not grown, grown
            assert client.service.bodies.num_bytes == 0
            assert await client.service.engine.reset_prefix_cache()
            assert (await client.service.engine.usage()).committed_bytes == 0

    run(ask())


def _kept() -> Counter[str]:
    """Objects of what a request goes through, by type. What a model has recorded is its own."""
    gc.collect()
    # Of timers that were cancelled a loop keeps up to a hundred.
    there = (
        each
        for each in gc.get_objects()
        if not (issubclass(type(each), asyncio.TimerHandle) and each.cancelled())
    )
    names = (f"{type(each).__module__}.{type(each).__name__}" for each in there)
    rooms = ("quire.server", "quire.engine", "asyncio", "starlette", "_asyncio")
    return Counter(name for name in names if name.startswith(rooms))


@pytest.mark.full
def test_two_thousand_hostile_requests_leave_the_process_as_large_as_it_was() -> None:
    # In a process of its own: the allocator of one that has run other tests settles much later.
    script = "import sys; sys.path[:0] = sys.argv[1:]; from server.test_hostile import grow; grow()"
    done = run_fork(script, str(Path(__file__).parents[1]), timeout=600)
    assert done.returncode == 0, done.stderr
    num_requests, grown = map(int, done.stdout.split())
    print(f"{num_requests} requests: {grown / 2**20:+.1f} MiB")
    assert grown < 16 * 2**20


def grow() -> None:
    """Print a number of hostile requests, and by how many bytes they made this process grow."""

    async def ask() -> None:
        async with serving() as client:
            rounds = -(-2000 // (len(REFUSED) + len(ANSWERED)))
            for _ in range(rounds // 4):
                await ask_all(client)
            before = _resident_bytes()
            for _ in range(rounds):
                await ask_all(client)
            print(rounds * (len(REFUSED) + len(ANSWERED)), _resident_bytes() - before)

    run(ask(), at_most_s=600)


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_a_body_of_too_many_values_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(Refused, match="commas and brackets"):
        parse(b"[],[]," * 2**20)


ALICE, BOB = Caller(number=0, salt="a"), Caller(number=1, salt="b")


def test_bodies_in_memory_are_bounded_together_and_no_key_takes_all() -> None:
    bodies = Bodies(100)
    with bodies.one(ALICE) as first, bodies.one(ALICE) as second, bodies.one(BOB) as other:
        first(30)
        second(20)
        for more in (first, second):
            with pytest.raises(Refused) as refused:
                more(1)
            assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        other(25)
        with pytest.raises(Refused):
            other(1)
        assert bodies.num_bytes == 75
    assert bodies.num_bytes == 0


UNFINISHED = (
    ("/tokenize", {"prompt": "a b c d e f g h"}),
    ("/detokenize", {"tokens": [5] * 9}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/completions", BRIEF),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("path", "body"), UNFINISHED)
def test_unfinished_bodies_of_one_key_refuse_no_other(path: str, body: Any) -> None:
    async def ask() -> None:
        config = ServerConfig(
            max_request_bytes=1024, api_key=("alice", "bob"), chat_template=TEMPLATE
        )
        async with listening(config) as server:
            own = server.client.service.bodies
            data = posting(b"x" * 1024, path, x_api_key="alice")
            peers = [await server.connect() for _ in range(16)]
            for peer in peers:
                await peer.send(data[:-1])
            await until(lambda: own.num_bytes > 7 * 1024)
            bob = await server.connect()
            await bob.send(posting(body, path, x_api_key="bob"))
            status, answer = await bob.answer()
            assert status == 200, answer
            for peer in peers:
                peer.close()
            await until(lambda: not own.num_bytes)

    run(ask())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("path", "body"), UNFINISHED)
def test_headers_alone_of_one_key_take_no_place_of_anothers(path: str, body: Any) -> None:
    """Nor more of its own than it may have under way."""

    async def ask() -> None:
        config = ServerConfig(
            max_num_queued_reqs=2,
            max_num_reqs_per_key=3,
            api_key=("alice", "bob"),
            chat_template=TEMPLATE,
        )
        async with listening(config) as server:
            alice = posting(body, path, x_api_key="alice").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            peers = [await server.connect() for _ in range(4)]
            for peer in peers:
                await peer.send(alice)
            assert (await peers[-1].answer())[0] == 429
            bob = await server.connect()
            await bob.send(posting(body, path, x_api_key="bob"))
            status, answer = await bob.answer()
            assert status == 200, answer
            for peer in peers:
                peer.close()
            await until(lambda: server.num_connections == 1, "the others have gone")
            for _ in range(4):
                await bob.send(posting(body, path, x_api_key="alice"))
                assert (await bob.answer())[0] == 200

    run(ask())


def test_a_body_has_to_come_as_a_whole_in_time() -> None:
    async def ask() -> None:
        async with listening(ServerConfig(body_timeout=0.2)) as server:
            peer = await server.connect()
            data = posting(BRIEF)
            await peer.send(data[:-1])
            answer = await peer.rest()
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408")
            assert b"connection: close" in head.lower()
            assert b"0.2 s (body_timeout)" in body
            assert server.client.service.bodies.num_bytes == 0

    run(ask())


@pytest.mark.parametrize("packing", ["gzip", "br", "identity, gzip", "x" * 100])
def test_a_packed_body_is_refused_by_its_header(llm: AsyncLLM, packing: str) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            body = gzip.compress(json.dumps(BRIEF).encode())
            answer = await client.post(AT, body, content_encoding=packing)
            assert answer.status == 415
            assert f"content-encoding: {packing[:60]!r}" in answer.error["message"]
            assert (await client.post(AT, BRIEF, content_encoding="Identity")).status == 200

    run(ask())


TOO_LONG = "word " * 200_000
CHAT = [{"role": "user", "content": TOO_LONG}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (AT, {"prompt": TOO_LONG}),
        (AT, {"prompt": TOO_LONG, "truncate_prompt_tokens": 5}),
        (AT, {"prompt": ["a", TOO_LONG]}),
        ("/tokenize", {"prompt": TOO_LONG}),
        ("/tokenize", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/v1/responses", {"input": TOO_LONG}),
        ("/v1/responses", {"input": TOO_LONG, "truncation": "auto"}),
    ],
)
def test_what_cannot_fit_is_not_tokenized_first(
    llm: AsyncLLM, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async with serving(ServerConfig(chat_template=TEMPLATE), llm=llm) as client:
            tokenizer = client.service.engine.llm.tokenizer
            lengths: list[int] = []

            def counted(own: Any, text: str, *args: Any, **kwargs: Any) -> Any:
                lengths.append(len(text))
                return before(own, text, *args, **kwargs)

            before = type(tokenizer).__call__
            monkeypatch.setattr(type(tokenizer), "__call__", counted)
            answer = await client.post(path, body)
            assert answer.status == 400, answer.body
            assert "max_model_len" in answer.error["message"]
            assert max(lengths, default=0) < 100

    run(ask())


def test_texts_of_one_key_do_not_hold_up_anothers() -> None:
    """However many of them there are: a key has half of the threads, and its others wait."""

    async def ask() -> None:
        threads = TextThreads()
        for num_bytes in (10, 2**20):
            go_on = Event()
            held = [
                asyncio.ensure_future(threads.run(go_on.wait, ALICE, num_bytes=num_bytes))
                for _ in range(20)
            ]
            left = asyncio.ensure_future(threads.run(go_on.wait, ALICE, num_bytes=num_bytes))
            await asyncio.sleep(0)
            left.cancel()  # gives no turn away before its thread has ended
            async with asyncio.timeout(20):
                assert await threads.run(lambda: "b", BOB, num_bytes=num_bytes) == "b"
                assert not any(each.done() for each in held)
                go_on.set()
                assert await asyncio.gather(*held) == [True] * 20
        threads.close()

    run(ask())


def test_long_texts_give_way_to_the_engine() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def ask() -> None:
        threads, own = TextThreads(), niceness()
        assert await threads.run(niceness, ALICE, num_bytes=2**14) == own
        assert await threads.run(niceness, ALICE, num_bytes=2**16) == max(own, 10)
        assert niceness() == own
        threads.close()

    run(ask())


def test_ids_that_clients_choose_mean_nothing() -> None:
    """Two at once with the same one are two requests; what could be a header is never one."""

    async def ask() -> None:
        async with serving() as client:
            body = {**BRIEF, "request_id": "same", "stream": True, "max_tokens": 20}
            calls = [client.call(AT, body, x_request_id="same") for _ in range(4)]
            ids = set()
            for call in calls:
                answer = await call.whole()
                assert answer.headers["x-request-id"] == "same"
                assert answer.events[-1] == "[DONE]"
                ids.add(answer.events[0]["id"])
            assert len(ids) == 4
            for odd in ("a\r\nx-injected: 1", "a" * 1000, "é", "\0", " ", "a b"):
                answer = await client.post(AT, BRIEF, x_request_id=odd)
                assert answer.headers["x-request-id"] not in ("", odd)
                assert "x-injected" not in answer.headers
            answer = await client.post(AT, {**BRIEF, "a\r\nx-injected": 1, "b": 2})
            assert answer.headers["x-ignored-fields"] == "b"

    run(ask())


def test_rules_that_leave_no_token_are_the_clients_fault() -> None:
    async def ask() -> None:
        async with serving() as client:
            own = {"structured_outputs": {"choice": ["zzz"]}, "bad_words": ["z", "zz", "zzz"]}
            answer = await client.post("/v1/completions", {"prompt": [5], "max_tokens": 3, **own})
            assert (answer.status, answer.error["code"]) == (400, "no_token_allowed")

    run(ask())
