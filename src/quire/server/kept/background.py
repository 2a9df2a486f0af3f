"""Answers that are made while no client waits for them, a bounded number of them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from typing import final

from quire.server.logs import place_of
from quire.server.wire.errors import Refused

log = logging.getLogger(__name__)


@final
class Run:
    """One of them. Its events are taken as they come, and kept if ``keeps_events``.

    ``before`` is what it answers; ``now`` gives its JSON at any moment. When it is over
    ``stack`` is left, and then ``end`` is called.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        stack: ExitStack,
        *,
        before: tuple[bytes, ...],
        now: Callable[[], bytes],
        end: Callable[["Run"], None],
        keeps_events: bool,
    ) -> None:
        self.before, self.now, self.keeps_events = before, now, keeps_events
        self.events: list[bytes] = []
        self.was_cancelled = False
        self._source, self._stack, self._end = events, stack, end
        self._is_over, self._changed = False, asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._go())
        self._task.add_done_callback(self._over)  # also of a task that never came to its first line

    def stop(self) -> None:
        """Let it end at once."""
        if self._task is not None and not self._task.done():
            self.was_cancelled = True
            self._task.cancel()

    async def cancel(self) -> None:
        """End it; when this returns, the engine has been told."""
        self.stop()
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Its events from the one behind ``after``, up to its end. Leaving it ends nothing."""
        place = after + 1
        while True:
            changed = self._changed
            while place < len(self.events):
                yield self.events[place]
                place += 1
            if self._is_over:
                return
            await changed.wait()

    async def _go(self) -> None:
        try:
            async with aclosing(self._source) as events:
                async for event in events:
                    if self.keeps_events:
                        self.events.append(event)
                        self._tell()
        except Exception as error:
            log.error("a response in the background failed: %s", place_of(error))

    def _over(self, _: "asyncio.Task[None]") -> None:
        self._is_over = True
        self._stack.close()
        self._end(self)
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@final
class Background:
    """Those under way, by caller and name. ``most``: at once, of all callers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._runs: dict[tuple[int, str], Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def refuse_if_full(self) -> None:
        """Raises: Refused."""
        if len(self._runs) >= self._most:
            raise Refused(
                429,
                f"{len(self._runs)} responses are under way in the background, as many as there "
                f"may be (max_background_responses): wait for one of them, or stay connected",
                code="background_limit",
                retry_after_s=5,
            )

    def start(self, caller: int, name: str, run: Run) -> None:
        """Raises: Refused; then nothing has been started."""
        self.refuse_if_full()
        self._runs[caller, name] = run
        run.start()

    def get(self, caller: int, name: str) -> Run | None:
        return self._runs.get((caller, name))

    def forget(self, caller: int, name: str) -> None:
        """It is over."""
        self._runs.pop((caller, name), None)

    def close(self) -> None:
        for run in self._runs.values():
            run.stop()
