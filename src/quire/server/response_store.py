"""Responses that can be asked for again, and those that run without a client, in bounded memory.

Each caller finds its own alone. When there is no room, the caller with the most bytes loses its
least recently used response, so that one caller pushes out no other's. Nothing is written to a disk
or a log.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import final

from quire.server.logs import place_of
from quire.server.wire.error_responses import Refused

# -- stored responses ------------------------------------------------------------------------------


_ENTRY_BYTES = 1024  # about the size of an entry besides its texts


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response, and the conversation that it answers."""

    response: bytes = field(repr=False)  # its JSON
    before: tuple[bytes, ...] = field(
        default=(), repr=False
    )  # JSON lists of all items, old and new
    events: tuple[bytes, ...] = field(default=(), repr=False)  # if they may be asked for again
    in_background: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its texts. A text that several share counts for each."""
        return len(self.response) + sum(map(len, self.before)) + sum(map(len, self.events))


@final
class Store:
    """The stored responses of one server. ``most_bytes`` bounds those of all callers together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_caller: dict[int, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all of them."""
        return sum(self._num_bytes.values())

    def __len__(self) -> int:
        return sum(map(len, self._by_caller.values()))

    def put(self, caller: int, name: str, kept: StoredResponse) -> None:
        """Store a response, unless it alone is larger than the bound."""
        self.drop(caller, name)
        if _cost(kept) > self._most_bytes:
            return
        self._by_caller.setdefault(caller, OrderedDict())[name] = kept
        self._num_bytes[caller] = self._num_bytes.get(caller, 0) + _cost(kept)
        while self.num_bytes > self._most_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self.drop(largest, next(iter(self._by_caller[largest])))

    def get(self, caller: int, name: str) -> StoredResponse | None:
        """Return a response, which becomes the most recently used; None if there is none."""
        own = self._by_caller.get(caller)
        if own is None or name not in own:
            return None
        own.move_to_end(name)
        return own[name]

    def drop(self, caller: int, name: str) -> bool:
        """Forget a response; return whether there was one."""
        own = self._by_caller.get(caller)
        if own is None or name not in own:
            return False
        self._num_bytes[caller] -= _cost(own.pop(name))
        if not own:
            del self._by_caller[caller], self._num_bytes[caller]
        return True


def _cost(kept: StoredResponse) -> int:
    return _ENTRY_BYTES + kept.num_bytes


# -- background responses --------------------------------------------------------------------------


log = logging.getLogger(__name__)


@final
class BackgroundRun:
    """One response that is made while no client waits.

    ``before`` is the conversation that it answers; ``now`` gives its JSON at any moment.
    ``keeps_events``: its events can be read again. At its end ``stack`` is left, and then ``end``
    is called.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        stack: ExitStack,
        *,
        before: tuple[bytes, ...],
        now: Callable[[], bytes],
        end: Callable[["BackgroundRun"], None],
        keeps_events: bool,
    ) -> None:
        self.before, self.now, self.keeps_events = before, now, keeps_events
        self.events: list[bytes] = []
        self.was_cancelled = False
        self._source, self._stack, self._end = events, stack, end
        self._is_over, self._changed = False, asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run it in a task."""
        self._task = asyncio.create_task(self._go())
        self._task.add_done_callback(self._over)  # also called for a task that never ran

    def stop(self) -> None:
        """Cancel it and wait for nothing."""
        if self._task is not None and not self._task.done():
            self.was_cancelled = True
            self._task.cancel()

    async def cancel(self) -> None:
        """Cancel it; when this returns, the engine has been told."""
        self.stop()
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield its events from the one behind ``after``, up to its end. Leaving it
        ends nothing.
        """
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
    """The responses under way, by caller and name: at most ``most`` at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._runs: dict[tuple[int, str], BackgroundRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def refuse_if_full(self) -> None:
        """Refuse one response more than there may be. Raises: Refused."""
        if len(self._runs) >= self._most:
            raise Refused(
                429,
                f"{len(self._runs)} responses run in the background, and more are not allowed "
                f"(max_background_responses): wait until one ends, or stay connected",
                code="background_limit",
                retry_after_s=5,
            )

    def start(self, caller: int, name: str, run: BackgroundRun) -> None:
        """Start a run. Raises: Refused; then nothing has been started."""
        self.refuse_if_full()
        self._runs[caller, name] = run
        run.start()

    def get(self, caller: int, name: str) -> BackgroundRun | None:
        """Return a run, or None."""
        return self._runs.get((caller, name))

    def forget(self, caller: int, name: str) -> None:
        """Remove a run that is over."""
        self._runs.pop((caller, name), None)

    def close(self) -> None:
        """Cancel all runs."""
        for run in self._runs.values():
            run.stop()
