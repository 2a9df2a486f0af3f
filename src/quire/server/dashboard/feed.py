"""The page's feed: frames of the cache, taken once for all who watch and only while somebody does.

Server-sent events: ``about`` once, then a ``frame`` whenever something has changed; the id of an
event is when it was taken, in milliseconds. A viewer who is behind gets the newest frame: none
waits for him.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import final

import msgspec

from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM
from quire.engine.sequence import Sequence
from quire.server.dashboard.frames import About, Frame
from quire.server.dashboard.snapshot import about, frame

INTERVAL_S = 1 / 3
_SHARE = 200  # a frame takes at most one in so many parts of the time
_SILENCE_S = 10.0  # after which a viewer hears that the server is still there


@final
class Feed:
    """Of one engine, in one event loop. ``chats``: its model takes messages."""

    def __init__(
        self, llm: AsyncLLM, *, chats: bool = True, interval_s: float = INTERVAL_S
    ) -> None:
        self._llm, self._chats, self._interval_s = llm, chats, interval_s
        self.num_viewers = 0
        self.num_taken = 0  # frames, changed or not
        self._number = 0  # of the newest frame
        self._newest = b""
        self._content = b""  # of it, without when it was taken
        self._changed = asyncio.Event()
        self._taking: asyncio.Task[None] | None = None

    async def open(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, until he leaves or the engine ends.

        Raises: RequestError, or what the engine failed with, if it has ended.
        """
        first = await self._llm.inspect(lambda llm, _: about(llm, chats=self._chats))
        return self._events(first)

    async def _events(self, first: About) -> AsyncGenerator[bytes, None]:
        self.num_viewers += 1
        try:
            yield _event("about", msgspec.json.encode(first), _now_ms())
            if self._taking is None or self._taking.done():
                self._content = b""
                self._taking = asyncio.create_task(self._take(), name="quire-page")
            seen = 0
            while not self._taking.done() or seen < self._number:
                if seen < self._number and self._content:
                    seen = self._number
                    yield self._newest
                elif not await self._wait():
                    yield b": nothing has changed\n\n"
            yield _event("over", b"{}", _now_ms())
        finally:
            self.num_viewers -= 1
            if not self.num_viewers and self._taking is not None:
                self._taking.cancel()
                with suppress(asyncio.CancelledError):
                    await self._taking
                self._taking = None

    async def _wait(self) -> bool:
        """For another frame, or the end of all; False: nothing came for long."""
        assert self._taking is not None
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            done, _ = await asyncio.wait(
                (waiting, self._taking), timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED
            )
            return bool(done)
        finally:
            waiting.cancel()

    async def _take(self) -> None:
        """Frames while anybody watches, further apart where one takes long."""
        while True:
            try:
                taken, cost_s = await self._llm.inspect(self._frame)
            except Exception:  # the engine has ended, for whatever reason
                self._changed.set()
                return
            began_s = time.perf_counter()
            content = msgspec.json.encode(taken)
            self.num_taken += 1
            if content != self._content:
                self._content = content
                self._newest = _event("frame", content, _now_ms())
                self._number += 1
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            cost_s += time.perf_counter() - began_s
            await asyncio.sleep(max(self._interval_s, cost_s * _SHARE))

    def _frame(self, llm: LLM, sequences: list[Sequence]) -> tuple[Frame, float]:
        """In the stepping thread: a frame, and how long it took."""
        began_s = time.perf_counter()
        taken = frame(llm, sequences)
        return taken, time.perf_counter() - began_s


def _event(name: str, data: bytes, at_ms: int) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (name.encode(), at_ms, data)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
