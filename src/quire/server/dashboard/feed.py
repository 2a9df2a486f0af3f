"""The memory page's feed: frames of the cache, taken once for all viewers and only while there are
any.

Server-sent events: ``about`` once, then a ``frame`` whenever something has changed that the viewer
may see. An event's id is when it was taken, in milliseconds. A viewer that is behind gets the
newest frame, and no other waits for it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import final

import msgspec

from quire.engine.llm import LLM
from quire.engine.sequence import Sequence
from quire.errors import QuireError
from quire.server.dashboard.frames import About, Frame
from quire.server.dashboard.snapshot import Tenant, about, frames
from quire.server.logs import place_of
from quire.server.served_engine import Administration, ServedEngine
from quire.server.wire.error_responses import elsewhere

log = logging.getLogger(__name__)

INTERVAL_S = 1 / 3
_SHARE = 200  # frames take at most a two hundredth of the time
_SILENCE_S = 10.0  # then a viewer is told that the server is still there


@dataclass(slots=True, eq=False)
class _Channel:
    """The frames for all viewers that may see the same."""

    num_viewers: int = 0
    number: int = 0  # of the newest frame
    newest: bytes = b""
    content: bytes = b""  # the newest frame without its time
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, content: bytes) -> None:
        if content != self.content:
            self.content, self.newest = content, _event("frame", content, _now_ms())
            self.number += 1
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()


@final
class Feed:
    """The frames of one engine, in one event loop. ``chats``: its model takes messages.

    ``interval_s``: seconds between two frames, at least.
    """

    def __init__(
        self, engine: ServedEngine, *, chats: bool = True, interval_s: float = INTERVAL_S
    ) -> None:
        self._engine, self._chats, self._interval_s = engine, chats, interval_s
        self.num_taken = 0  # frames, changed or not
        self._channels: dict[Tenant, _Channel] = {}
        self._taking: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        """Return how many viewers there are."""
        return sum(channel.num_viewers for channel in self._channels.values())

    async def open(self, tenant: Tenant = None) -> AsyncGenerator[bytes, None]:
        """Return events for one viewer, until it leaves or the engine ends. Raises: RequestError,
        or what the engine failed with, if it has ended; Refused (501) where it is elsewhere.
        """
        looked_at = self._engine.administration
        if looked_at is None:
            raise elsewhere("the memory page shows an engine's cache")
        first = await looked_at.inspect(lambda llm, _: about(llm, chats=self._chats))
        return self._events(looked_at, first, tenant)

    async def _events(
        self, looked_at: Administration, first: About, tenant: Tenant
    ) -> AsyncGenerator[bytes, None]:
        channel = self._channels.setdefault(tenant, _Channel())
        channel.num_viewers += 1
        try:
            yield _event("about", msgspec.json.encode(first), _now_ms())
            if self._taking is None or self._taking.done():
                self._taking = asyncio.create_task(self._take(looked_at), name="quire-page")
            seen, taking = 0, self._taking
            while not taking.done() or seen < channel.number:
                if seen < channel.number:
                    seen = channel.number
                    yield channel.newest
                elif not await _wait(channel.changed, taking):
                    yield b": nothing has changed\n\n"
            yield _event("over", b"{}", _now_ms())
        finally:
            channel.num_viewers -= 1
            if not channel.num_viewers:
                del self._channels[tenant]
            if not self._channels and self._taking is not None:
                # Cleared first: the next viewer may come while this one awaits the end.
                taking, self._taking = self._taking, None
                taking.cancel()
                with suppress(asyncio.CancelledError):
                    await taking

    async def _take(self, looked_at: Administration) -> None:
        """Take frames while there are viewers, further apart where one takes long."""
        while True:
            try:
                taken, cost_s = await looked_at.inspect(partial(_frames, tuple(self._channels)))
            except Exception as error:
                # An engine that has ended says so itself.
                if not isinstance(error, QuireError) and self._engine.failure is None:
                    log.error("the memory feed has ended: %s", place_of(error))
                return
            began_s = time.thread_time()
            self.num_taken += 1
            for tenant, frame in taken.items():
                if channel := self._channels.get(tenant):
                    channel.put(msgspec.json.encode(frame))
            cost_s += time.thread_time() - began_s
            await asyncio.sleep(max(self._interval_s, cost_s * _SHARE))


def _frames(
    tenants: tuple[Tenant, ...], llm: LLM, sequences: list[Sequence]
) -> tuple[dict[Tenant, Frame], float]:
    """Return a frame for each tenant and the seconds that it took, in the engine's thread."""
    began_s = time.thread_time()
    taken = frames(llm, sequences, tenants)
    return taken, time.thread_time() - began_s


async def _wait(changed: asyncio.Event, taking: "asyncio.Task[None]") -> bool:
    """Return whether a frame or the end has come; False after ten silent seconds."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        done, _ = await asyncio.wait(
            (waiting, taking), timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)
    finally:
        waiting.cancel()


def _event(name: str, data: bytes, at_ms: int) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (name.encode(), at_ms, data)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
