"""The queue's bounds: who may join it, and when it is worth asking again.

    429  this key has as many requests under way as one may have
    503  as many sequences wait as may, or as many tokens, or the server is going down, or sleeps

The engine never refuses for want of memory, it lets requests wait; so a wait that is longer than a
client would sit out is refused here at once, with the time that it would take as ``Retry-After``.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, final

from quire.server.guard.keys import Caller
from quire.server.metrics.counts import Rejection
from quire.server.wire.errors import Refused
from quire.units import format_count

Clock: TypeAlias = Callable[[], float]
Size: TypeAlias = tuple[int, int]  # (sequences, tokens) of a prompt

_MOST_WAIT_S = 600
_NUM_REMEMBERED = 256  # sequences that began, from whose times the pace is taken
_MEMORY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """None: no bound."""

    num_queued_reqs: int | None  # continuations that wait: n=4 is four of them
    num_queued_tokens: int | None  # of their prompts
    num_reqs_per_key: int | None  # under way at once


@dataclass(slots=True, eq=False)
class Pass:
    """One prompt of a request between the gate and its end."""

    num_sequences: int
    num_tokens: int
    begun: set[int] = field(default_factory=set)  # choices that have given a piece


@final
class Gate:
    """Counts what has been let in. One event loop's own; ``clock`` gives seconds."""

    def __init__(self, bounds: Bounds, clock: Clock = time.monotonic) -> None:
        self.draining = self.sleeping = False
        self.num_under_way = 0  # requests
        self._bounds, self._clock = bounds, clock
        self._num_at_door = 0  # requests that are prepared, and have been read
        self._num_queued = 0  # sequences
        self._num_queued_tokens = 0
        self._by_key: Counter[int] = Counter()  # at the door, or under way
        self._begun_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._ended_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def num_queued(self) -> int:
        """Sequences of which nothing has come yet."""
        return self._num_queued

    @contextmanager
    def arrive(self, caller: Caller) -> Iterator[None]:
        """Inside the block a request is read and prepared. It counts for its key alone: what has
        not come yet takes no place of another key.

        Raises: Refused.
        """
        self._check(caller)
        self._by_key[caller.number] += 1
        try:
            yield
        finally:
            self._leave(caller)

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Inside the block a request that has been read is prepared, for a place in the queue.

        Raises: Refused.
        """
        self._check(None)
        self._num_at_door += 1
        try:
            yield
        finally:
            self._num_at_door -= 1

    @contextmanager
    def admit(self, caller: Caller, prompts: Sequence[Size]) -> Iterator[list[Pass]]:
        """A request is under way inside the block, with all of its prompts or not at all.

        Raises: Refused.
        """
        num_sequences, num_tokens = (sum(sizes) for sizes in zip(*prompts, strict=True))
        reason = self._refuse(caller, self._num_queued) or self._no_room(num_sequences, num_tokens)
        if reason is not None:
            raise self.refused(reason)
        passes = [Pass(num_sequences=size[0], num_tokens=size[1]) for size in prompts]
        self.num_under_way += 1
        self._num_queued += num_sequences
        self._num_queued_tokens += num_tokens
        self._by_key[caller.number] += 1
        try:
            yield passes
        finally:
            self.num_under_way -= 1
            for own in passes:
                for choice in range(own.num_sequences):
                    self._leave_queue(own, choice)
            self._ended_s.append(self._clock())
            self._leave(caller)

    def note_piece(self, own: Pass, choice: int) -> None:
        """Something of a continuation has come: it waits no longer."""
        if choice not in own.begun:
            self._begun_s.append(self._clock())
            self._leave_queue(own, choice)

    def refused(self, reason: Rejection) -> Refused:
        """What the client is told."""
        bounds, wait_s = self._bounds, self.drain_s()
        if reason == "draining":
            return Refused(503, "the server is going down", code=reason, retry_after_s=5)
        if reason == "sleeping":
            return Refused(
                503,
                "the server sleeps, or is about to: POST /wake_up lets requests in again",
                code=reason,
                retry_after_s=5,
            )
        if reason == "max_num_reqs_per_key":
            return Refused(
                429,
                f"this key has {format_count(bounds.num_reqs_per_key or 0)} requests under way, as "
                f"many as one may have (max_num_reqs_per_key): wait for one of them",
                code=reason,
                retry_after_s=_whole(self._pace_s(self._ended_s)),
            )
        if reason == "max_num_queued_reqs":
            what = f"{format_count(self._num_queued + self._num_at_door)} requests wait"
            limit = f"max_num_queued_reqs={bounds.num_queued_reqs}"
        else:
            what = "as many tokens of prompts wait as may"  # how many is of other keys
            limit = f"max_num_queued_tokens={bounds.num_queued_tokens}"
        return Refused(
            503,
            f"the queue is full: {what} ({limit}); it will be empty in about {wait_s} s",
            code=reason,
            retry_after_s=wait_s,
        )

    def drain_s(self) -> int:
        """Seconds until all that wait now have begun, as fast as others lately have."""
        return _whole((self._num_queued + self._num_at_door) * self._pace_s(self._begun_s))

    def _pace_s(self, times: deque[float]) -> float:
        """Seconds from one to the next, up to now, so that a standstill makes them longer."""
        now_s = self._clock()
        while times and times[0] < now_s - _MEMORY_S and len(times) > 1:
            times.popleft()
        return (now_s - times[0]) / max(1, len(times) - 1) if times else 1.0

    def _check(self, caller: Caller | None) -> None:
        """Raises: Refused if no request could join the queue now, or none of this key."""
        reason = self._refuse(caller, self._num_queued + self._num_at_door)
        if reason is not None:
            raise self.refused(reason)

    def _refuse(self, caller: Caller | None, num_queued: int) -> Rejection | None:
        bounds = self._bounds
        if self.draining:
            return "draining"
        if self.sleeping:
            return "sleeping"
        if caller is not None and _reached(self._by_key[caller.number], bounds.num_reqs_per_key):
            return "max_num_reqs_per_key"
        if _reached(num_queued, bounds.num_queued_reqs):
            return "max_num_queued_reqs"
        if _reached(self._num_queued_tokens, bounds.num_queued_tokens):
            return "max_num_queued_tokens"
        return None

    def _no_room(self, num_sequences: int, num_tokens: int) -> Rejection | None:
        """An empty queue takes anything: what is longer than its bounds is not refused for ever."""
        bounds = self._bounds
        if not self._num_queued:
            return None
        if _over(self._num_queued + num_sequences, bounds.num_queued_reqs):
            return "max_num_queued_reqs"
        if _over(self._num_queued_tokens + num_tokens, bounds.num_queued_tokens):
            return "max_num_queued_tokens"
        return None

    def _leave(self, caller: Caller) -> None:
        self._by_key[caller.number] -= 1
        if not self._by_key[caller.number]:
            del self._by_key[caller.number]

    def _leave_queue(self, own: Pass, choice: int) -> None:
        if choice in own.begun:
            return
        if not own.begun:
            self._num_queued_tokens -= own.num_tokens
        own.begun.add(choice)
        self._num_queued -= 1


def _reached(number: int, bound: int | None) -> bool:
    return bound is not None and number >= bound


def _over(number: int, bound: int | None) -> bool:
    return bound is not None and number > bound


def _whole(seconds: float) -> int:
    return min(max(1, math.floor(seconds + 0.5)), _MOST_WAIT_S)
