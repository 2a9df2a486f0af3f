"""Bytes that a stranger may send, and how long a server's event loop is held by each of them.

The server runs in a thread with an event loop of its own. What is measured is the processor time of
that thread between two waits for events, so that neither a busy machine nor the client counts.
"""

import asyncio
import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quire.config import ServerConfig
from server.sockets import listening

_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/health",
    "/",
    "/none",
    "/v1/models",
)
_NAMES = (
    *("host", "origin", "cookie", "authorization", "x-api-key", "x-request-id", "content-encoding"),
    *("connection", "upgrade", "expect", "te", "accept", "content-type", "traceparent", "a", ":"),
    *("content-length", "transfer-encoding", "access-control-request-method", "é", "a b"),
)
_UNITS = (
    *(b" ", b"\t", b" \t", b"a", b"a ", b"a,", b",", b";", b"=", b":", b'"', b"%", b"%41", b"%zz"),
    *(b"/", b"../", b"?", b"&a=b", b"[", b"\xff", b"\0", b"\r", b"\x0b", b"-", b"9", b"bearer "),
)
_LENGTHS = (0, 1, 3, 30, 300, 3_000, 15_000, 30_000, 65_000, 250_000)
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n"
_BLANKS = b" " * 60_000
# Each held an event loop for a second or more, or for ever, or might.
KNOWN: tuple[bytes, ...] = (
    _HEAD + b"a: b c d\r\n" * 22 + b"\0\r\n\r\n",
    _HEAD + b"cookie: " + b"a=b; " * 800 + b"\xff\r\n\r\n",
    _HEAD + b"a:" + _BLANKS + b"\0\r\n\r\n",
    _HEAD + b"a:" + _BLANKS[:15_000] + b"\0\r\n\r\n",
    _HEAD + b"a:" + _BLANKS[:15_000] + b"\x0b\r\n\r\n",
    _HEAD + b"a:" + b"b " * 7_000 + b"\r \r\n\r\n",
    b"GET /" + b"%" * 7_900 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    _HEAD + b"a:" + b" b" * 7_000 + b"\r\n\r\n",
    _HEAD + b"a:\r\n" * 60_000 + b"\r\n",
    _HEAD + b"a: b\r\n" + b" c\r\n" * 60_000 + b"\r\n",
    _CHUNKED + b"1\r\na\r\n" * 40_000,
    _CHUNKED + b"1;" + _BLANKS + b"\nx\r\n",
    _CHUNKED + b"0\r\n" + b"a:" + _BLANKS + b"\0\r\n\r\n",
    _CHUNKED + b"0\r\n" + b"a:\r\n" * 60_000 + b"\r\n",
    _HEAD + b"content-length: 250000\r\n\r\n" + b"\n" * 250_000,
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 5_000,
)


def hostile(rng: random.Random) -> bytes:
    """A head, and perhaps a body, or what is neither."""
    if not rng.randrange(20):
        return rng.randbytes(rng.choice(_LENGTHS))
    target = rng.choice(_PATHS).encode() + (_run(rng) if not rng.randrange(4) else b"")
    version = rng.choice((b"1.1",) * 8 + (b"1.0", b"2.0"))
    lines = [rng.choice((b"GET", b"POST", b"OPTIONS")) + b" " + target + b" HTTP/" + version]
    for _ in range(rng.choice((0, 1, 2, 5, 20, 90, 2_000))):
        name, value = rng.choice(_NAMES).encode(), _run(rng, 6)
        lines += [name + rng.choice((b":", b": ")) + value] * rng.choice((1, 1, 1, 5))
    if rng.randrange(3):
        lines.append(b"host: localhost")
    end = rng.choice((b"\r\n",) * 8 + (b"\n", b"\r"))
    framing = rng.choice((b"", b"content-length: 9000", b"transfer-encoding: chunked"))
    head = end.join([*lines, framing, b""]) + (b"" if not framing else end)
    return head[:260_000] + _body(rng, framing)


def _body(rng: random.Random, framing: bytes) -> bytes:
    if not framing.endswith(b"chunked"):
        return _run(rng)
    size = rng.choice((1, 1, 2, 100, 5_000))
    chunk = b"%x" % size + rng.choice((b"", b";" + _run(rng, 6))) + b"\r\n" + b"a" * size + b"\r\n"
    return chunk * (rng.choice(_LENGTHS) // len(chunk)) + b"0\r\n" + _run(rng)


def _run(rng: random.Random, most: int = len(_LENGTHS)) -> bytes:
    """One unit again and again, and something else behind it."""
    unit = rng.choice(_UNITS)
    return unit * (rng.choice(_LENGTHS[:most]) // len(unit)) + rng.choice(
        (b"", b"\0", b"z", b"\r\n")
    )


class Holds(selectors.DefaultSelector):
    """Notes the longest that its loop was busy between two waits, in seconds of the processor."""

    longest_s = 0.0
    _since_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, time.thread_time() - self._since_s)
        found = super().select(timeout)
        self._since_s = time.thread_time()
        return found


@dataclass(slots=True)
class Watched:
    """A server in a thread. ``draining`` lets no request into its queue."""

    port: int
    service: Any
    holds: Holds
    loop: asyncio.AbstractEventLoop

    def hold_s(self, data: bytes, *, pieces: int = 1, draining: bool = False) -> float:
        """The longest that its loop is held by a connection that sends this."""
        self.service.admission.draining = draining
        self._settle()
        self.holds.longest_s = 0.0
        with socket.create_connection(("127.0.0.1", self.port)) as own, suppress(OSError):
            own.settimeout(2)
            for place in range(pieces):
                step = -(-len(data) // pieces)
                own.sendall(data[place * step : (place + 1) * step])
            own.shutdown(socket.SHUT_WR)
            while own.recv(65_536):
                pass
        self._settle()
        return self.holds.longest_s

    def _settle(self) -> None:
        """Until all that has come is dealt with."""
        for _ in range(3):
            done = threading.Event()
            self.loop.call_soon_threadsafe(done.set)
            if not done.wait(60):
                raise TimeoutError("the event loop was held for a minute")


@contextmanager
def watched() -> Iterator[Watched]:
    """A server whose key no caller here has."""
    holds, ready, end = Holds(), threading.Event(), threading.Event()
    found: list[Watched] = []

    async def serve() -> None:
        config = ServerConfig(api_key=("unknown",), uvicorn_log_level="critical")
        async with listening(config) as server:
            loop, service = asyncio.get_running_loop(), server.client.service
            found.append(Watched(server.port, service, holds, loop))
            ready.set()
            await loop.run_in_executor(None, end.wait)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(holds)) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not ready.wait(60):
        raise TimeoutError("the server has not begun")
    try:
        yield found[0]
    finally:
        end.set()
        thread.join(30)
