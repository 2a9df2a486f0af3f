"""Answers that end when their client leaves, and server-sent events.

An ASGI server says once, in ``receive``, that a client has left. So every answer that takes long is
made while a task listens there.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import msgspec
from starlette.types import Message, Receive, Scope, Send

from quire.server.wire.error_responses import Dialect, Refused

# -- streams ---------------------------------------------------------------------------------------


T = TypeVar("T")

PING_S = 15.0  # twice as long is less than what proxies wait for
_LOOKS = 4  # within a timeout


class ClientGone(Exception):
    """The client has left, and can be told nothing."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` gives; cancel it if the client leaves.

    The request's body must have been read. Raises: ClientGone, once ``work`` has ended; what
    ``work`` raises.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def all_of(receive: Receive, items: AsyncGenerator[T, None]) -> list[T]:
    """Return all items that come. Raises: as ``while_connected``."""

    async def collect() -> list[T]:
        async with aclosing(items) as each:
            return [item async for item in each]

    return await while_connected(receive, collect())


@final
class EventStream(Generic[T]):
    """Server-sent events, each sent as soon as it is there; the data of each is a ``T``.

    A client that takes nothing for ``send_timeout_s`` seconds is cut off, a quarter of them later
    at most. While it takes nothing no event is asked for: what waits for it is one event, and what
    the transport has (64 KiB in uvicorn).

    ``ping`` is sent after ``ping_s`` seconds without an event, or nearly twice as many, so that no
    proxy takes the stream for dead.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        send_timeout_s: float,
        headers: Mapping[str, str],
        ping: bytes = b"",
        ping_s: float = PING_S,
    ) -> None:
        self._events, self._send_timeout_s = events, send_timeout_s
        self._ping, self._ping_s = ping, ping_s
        self._num_sent, self._sending = 0, asyncio.Lock()
        self._since_s: float | None = None  # the client is to take an event
        self._next_look: asyncio.TimerHandle | None = None
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # otherwise nginx buffers events
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises: ClientGone."""
        await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            pinging = asyncio.ensure_future(self._send_pings(send)) if self._ping else None
            patience = asyncio.timeout(None)
            try:
                async with patience:
                    self._look(patience)
                    async for event in events:
                        await self._send(send, event, more=True)
                    await self._send(send, b"", more=False)
            except TimeoutError:
                if patience.expired():
                    raise ClientGone from None
                raise
            finally:
                if self._next_look is not None:
                    self._next_look.cancel()
                if pinging is not None:
                    pinging.cancel()
                    await asyncio.gather(pinging, return_exceptions=True)

    async def _send_pings(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(self._ping_s)
            if self._num_sent == num_sent:
                await self._send(send, self._ping, more=True)

    def _look(self, patience: asyncio.Timeout) -> None:
        """End ``patience`` with a client that takes nothing. A timer for each event costs more."""
        loop = asyncio.get_running_loop()
        since_s, now_s = self._since_s, loop.time()
        if since_s is not None and now_s - since_s >= self._send_timeout_s:
            patience.reschedule(now_s)
        else:
            again_s = self._send_timeout_s / _LOOKS
            self._next_look = loop.call_later(again_s, self._look, patience)

    async def _send(self, send: Send, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        async with self._sending:
            self._since_s = asyncio.get_running_loop().time()
            await send(message)
            self._since_s = None
            self._num_sent += 1


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- server-sent events ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EventForm:
    """How an interface writes events. ``named``: an event has a line with its JSON's ``type``."""

    dialect: Dialect
    named: bool
    ping: bytes = b""  # keeps a silent stream alive
    end: bytes = b""  # sent last, where no event marks the end

    def event(self, chunk: Any) -> bytes:
        """Return one event as bytes."""
        data = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        return b"event: %b\n%b" % (chunk.type.encode(), data) if self.named else data

    def error(self, refused: Refused) -> bytes:
        """Return a refusal as an event."""
        data = b"data: " + msgspec.json.encode(refused.body(self.dialect)) + b"\n\n"
        return b"event: error\n" + data if self.named else data


COMPLETIONS = EventForm(dialect="openai", named=False, end=b"data: [DONE]\n\n")
RESPONSES = EventForm(dialect="openai", named=True)
MESSAGES = EventForm(
    dialect="anthropic", named=True, ping=b'event: ping\ndata: {"type":"ping"}\n\n'
)
