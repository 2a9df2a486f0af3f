"""What one hostile key costs nine others: their requests, and their pace.

As a program it is the hostile client of a server that runs, until it is ended:

    python -m benchmarks.server.hostile PORT KEY
"""

import asyncio
import os
import random
import statistics
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any

from benchmarks.harness.server import apart, post, server, wire
from benchmarks.server.times import PROMPT_TOKENS, completion, drawn

MOST = 4  # requests of a key at once
_NUM_HONEST, _MAX_TOKENS = 9, 32
_BETWEEN_S = 0.05  # of each hostile way: it is malice that is measured, and not a flood
_LEAVES_S = 2.0  # what is left open is opened anew
_NUM_OPEN = 16
_FLAGS = ("--max-num-seqs", "32", "--kv-cache-memory-bytes", "128MB", "--disable-log-stats",
          "--uvicorn-log-level", "critical", "--max-num-reqs-per-key", str(MOST))  # fmt: skip
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


async def hostile_key(scale: float) -> list[dict[str, Any]]:
    """Nine keys alone, beside a tenth that asks as much as it may, and beside a hostile one."""
    seconds, rounds = max(2.0, 8 * scale), max(3, round(8 * scale))
    keys = [f"key-{number}" for number in range(_NUM_HONEST + 1)]
    flags = [word for key in keys for word in ("--api-key", key)]
    paces: dict[str, list[float]] = {"alone": [], "a tenth": [], "hostile": [], "again": []}
    lost: dict[str, int] = dict.fromkeys(paces, 0)
    with apart() as processors, server(*_FLAGS, *flags, processors=processors) as own:
        for number in range(-1, rounds):  # the first to warm up
            for turn in paces:
                async with _beside(turn, own.port, keys[-1]):
                    done, refused = await _honest(own.port, keys[:-1], seconds)
                if number >= 0:
                    paces[turn].append(done / seconds)
                    lost[turn] += refused
    medians = {turn: statistics.median(pace) for turn, pace in paces.items()}

    def ratio(turn: str, other: str) -> float:
        pairs = zip(paces[turn], paces[other], strict=True)
        return statistics.median(one / two for one, two in pairs)

    notes = {f"{turn}, requests/s": pace for turn, pace in medians.items()}
    return [
        {
            "claim": "server: pace of nine keys beside a hostile one",
            "ours": medians["hostile"],
            "peer": medians["a tenth"],
            "unit": "requests/s",
            "ratio": ratio("hostile", "a tenth"),
            "goal": "≥ 0.8 of what it is beside an honest one",
            "holds": ratio("hostile", "a tenth") >= 0.8,
            "notes": {
                **notes,
                "hostile/alone": ratio("hostile", "alone"),
                "A/A": ratio("again", "alone"),
                "rounds": rounds,
            },
        },
        {
            "claim": "server: requests that nine keys lose beside a hostile one",
            "ours": lost["hostile"],
            "peer": lost["a tenth"],
            "unit": "requests",
            "ratio": None,
            "goal": "0",
            "holds": lost["hostile"] == 0,
            "notes": {"done": round(seconds * sum(paces["hostile"]))},
        },
    ]


async def _honest(port: int, keys: list[str], seconds: float) -> tuple[int, int]:
    """(requests done, requests refused or broken off); each key asks again when it is answered."""
    done = refused = 0
    until_s = perf_counter() + seconds

    async def one(number: int, key: str) -> None:
        nonlocal done, refused
        rng = random.Random(f"{number} {until_s}")
        async with wire(port) as connection:
            while perf_counter() < until_s:
                asked = completion(drawn(rng, PROMPT_TOKENS), _MAX_TOKENS)
                answer = await connection.ask(post("/v1/completions", asked, key))
                good = answer.status == 200 and answer.num_events > _MAX_TOKENS // 2
                done += good and perf_counter() < until_s
                refused += not good

    await asyncio.gather(*(one(number, key) for number, key in enumerate(keys)))
    return done, refused


@asynccontextmanager
async def _beside(turn: str, port: int, key: str) -> AsyncIterator[None]:
    """A tenth key that asks as often as it may, or one that is hostile, in the block."""
    if turn == "a tenth":
        asking = asyncio.create_task(_honest(port, [key] * MOST, 10**6))
        yield
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        return
    child: Process | None = None
    if turn == "hostile":
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, str(port), key), stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        await child.stdout.readline()  # what it says when it begins
        await asyncio.sleep(1)
    yield
    if child is not None:
        child.terminate()
        await child.wait()


class Hostile:
    """A client with a key, and with every intention. Each way goes on until it is ended."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key

    async def work(self) -> None:
        """One kind of ways after the other, for what one has open refuses the others."""
        print("begins", flush=True)
        while True:
            for kind in (
                [(self._sent, data) for data in self._strange_heads()],
                [(self._left_open, data) for data in self._unfinished()],
                [(self._sent, data) for data in self._large_requests()],
                [(self._trickled,)] * _NUM_OPEN + [(self._not_read,)] * 2 * MOST,
            ):
                with suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(_LEAVES_S), asyncio.TaskGroup() as group:
                        for way in kind:
                            group.create_task(self._again(*way))

    async def _again(self, way: Callable[..., Awaitable[None]], *given: Any) -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                await way(*given)
            await asyncio.sleep(_BETWEEN_S)

    async def _sent(self, data: bytes) -> None:
        """And whatever comes is read."""
        async with wire(self._port) as own:
            own.writer.write(data)
            await own.writer.drain()
            own.writer.write_eof()
            async with asyncio.timeout(_LEAVES_S):
                await own.reader.read()

    async def _left_open(self, data: bytes) -> None:
        async with wire(self._port) as own:
            own.writer.write(data)
            await asyncio.sleep(_LEAVES_S)

    async def _trickled(self) -> None:
        async with wire(self._port) as own:
            own.writer.write(self._head("/v1/completions", 1000))
            for _ in range(40):
                own.writer.write(b" ")
                await asyncio.sleep(_LEAVES_S / 40)

    async def _not_read(self) -> None:
        """A stream, asked for and left where it is."""
        async with wire(self._port, receive_bytes=4096, limit=1024) as own:
            fields = completion(drawn(random.Random(), PROMPT_TOKENS), 900, logprobs=5)
            own.writer.write(post("/v1/completions", fields, self._key))
            await asyncio.sleep(_LEAVES_S)

    def _head(self, path: str, length: int) -> bytes:
        lines = (f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {length}",
                 f"authorization: Bearer {self._key}", "", "")  # fmt: skip
        return "\r\n".join(lines).encode()

    def _strange_heads(self) -> list[bytes]:
        """Without the key: what once held parsers for seconds or for ever."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        chunked = head + b"transfer-encoding: chunked\r\n\r\n"
        return [
            head + b"a: b c d\r\n" * 22 + b"\0\r\n\r\n",
            head + b"cookie: " + b"a=b; " * 800 + b"\xff\r\n\r\n",
            head + b"a:" + b" " * 60_000 + b"\0\r\n\r\n",
            head + b"a:" + b" b" * 1_900 + b"\r\n\r\n",
            head + b"a:\r\n" * 60_000 + b"\r\n",
            chunked + b"1\r\na\r\n" * 10_000,
            chunked + b"1;" + b" " * 60_000 + b"\nx\r\n",
            b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * 10,
        ]

    def _unfinished(self) -> list[bytes]:
        """Heads alone, and bodies of which most has come."""
        paths = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
        texts = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
        part = b'{"prompt": "' + b"a" * 900_000
        heads = [self._head(path, 1000) for path in paths]
        bodies = [self._head(path, 1_000_000) + part for path in texts]
        return heads * (_NUM_OPEN // len(heads)) + bodies * 5

    def _large_requests(self) -> list[bytes]:
        """Whole, and dear to read: long texts, many values, templates, forms."""
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(60):
            schema = {"type": "object", "properties": {"a": schema, "b": schema}}
        text = {"model": "demo", "prompt": "ab cd " * 30_000}
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/tokenize", text),
            ("/tokenize", {**text, "prompt": "\u00e9 " * 1_000}),
            ("/v1/completions", {**text, "max_tokens": 1}),
            ("/v1/completions", {"model": "demo", "prompt": [[7]] * 20_000, "max_tokens": 1}),
            ("/v1/completions", {"model": "demo", "prompt": "x", "n": 10**9}),
            ("/v1/chat/completions", {**_CHAT, "chat_template": "{{ 'x' * 10**9 }}"}),
            ("/v1/chat/completions", {**_CHAT, "structured_outputs": {"regex": "(a{900}){900}"}}),
            ("/v1/chat/completions", {**_CHAT, "messages": [_CHAT["messages"][0]] * 9_000}),
            ("/v1/completions", {"model": "demo", "prompt": "x", "logit_bias":
                                 {str(token): 1 for token in range(3_000)}}),
        ]  # fmt: skip
        return [post(path, fields, self._key) for path, fields in asked] + [
            self._head("/v1/completions", 200_000) + b'{"a": ' + b"[" * 199_994,
            self._head("/v1/completions", 900_000) + b'{"prompt": [' + b"7," * 449_994,
        ]


if __name__ == "__main__":
    os.nice(10)  # the honest clients come first, where they share a processor
    with suppress(KeyboardInterrupt):
        asyncio.run(Hostile(int(sys.argv[1]), sys.argv[2]).work())
