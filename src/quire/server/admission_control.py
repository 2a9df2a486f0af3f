"""Admission control: which requests may join the queue, and when it is worth asking again.

    429  this key has as many requests under way as one may have
    503  the queue is full, or requests that are under way hold as many pixels as they may, or the
         server is going down, or sleeps

The engine never refuses a request for lack of memory; it lets requests wait. So a wait that is
longer than a client would accept is refused here at once, with that time as ``Retry-After``.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, final

from quire.server.api_keys import Caller
from quire.server.metrics.family import Rejection
from quire.server.wire.error_responses import Refused
from quire.units import format_count

Clock: TypeAlias = Callable[[], float]
Size: TypeAlias = tuple[int, int]  # (sequences, tokens) of a prompt

_MOST_WAIT_S = 600
_NUM_REMEMBERED = 256  # the pace is that of the last sequences that began or ended
_MEMORY_S = 120.0
# Of all images. A processor makes up to 24 bytes of each, which stay until the request ends.
MOST_PIXELS_UNDER_WAY = 2**26
BYTES_OF_PIXEL = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of the queue. None is no bound."""

    num_queued_reqs: int | None  # continuations that wait: n=4 is four of them
    num_queued_tokens: int | None  # of their prompts
    num_reqs_per_key: int | None  # under way at once


@dataclass(slots=True, eq=False)
class Permit:
    """One prompt of a request between its admission and its end."""

    num_sequences: int
    num_tokens: int
    begun: set[int] = field(default_factory=set)  # choices that have generated something


@final
class AdmissionControl:
    """Counts the requests that were let in. It belongs to one event loop; ``clock``
    gives seconds.
    """

    def __init__(self, bounds: Bounds, clock: Clock = time.monotonic) -> None:
        self.draining = self.sleeping = False
        self.num_under_way = 0  # requests
        self._bounds, self._clock = bounds, clock
        self._num_prepared = 0  # requests that have been read and are being prepared
        self._num_queued = 0  # sequences
        self._num_queued_tokens = 0
        self._num_pixels = 0
        self._by_key: Counter[int] = Counter()  # being read or prepared, or under way
        self._begun_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._ended_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def num_queued(self) -> int:
        """Return how many sequences have generated nothing yet."""
        return self._num_queued

    @contextmanager
    def arrive(self, caller: Caller) -> Iterator[None]:
        """Count a request for its key while it is read and prepared.

        It takes no place of another key, since its body has not come. Raises: Refused.
        """
        self._check(caller)
        self._by_key[caller.number] += 1
        try:
            yield
        finally:
            self._leave(caller)

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Count a request that has been read and is being prepared among those that wait. Raises:
        Refused.
        """
        self._check(None)
        self._num_prepared += 1
        try:
            yield
        finally:
            self._num_prepared -= 1

    @contextmanager
    def admit(self, caller: Caller, prompts: Sequence[Size]) -> Iterator[list[Permit]]:
        """Admit a request with all of its prompts, or none, until the block is left. Raises:
        Refused.
        """
        num_sequences, num_tokens = (sum(sizes) for sizes in zip(*prompts, strict=True))
        reason = self._refuse(caller, self._num_queued) or self._no_room(num_sequences, num_tokens)
        if reason is not None:
            raise self.refused(reason)
        passes = [Permit(num_sequences=size[0], num_tokens=size[1]) for size in prompts]
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

    @contextmanager
    def hold_pixels(self, number: int) -> Iterator[None]:
        """Count the pixels of a request's images until the block is left. Raises: Refused."""
        if self._num_pixels and self._num_pixels + number > MOST_PIXELS_UNDER_WAY:
            raise self.refused("pixels")
        self._num_pixels += number
        try:
            yield
        finally:
            self._num_pixels -= number

    def note_piece(self, own: Permit, choice: int) -> None:
        """Note that the engine has begun a continuation: it waits no longer."""
        if choice not in own.begun:
            self._begun_s.append(self._clock())
            self._leave_queue(own, choice)

    def refused(self, reason: Rejection) -> Refused:
        """Return what the client is told for a reason."""
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
        if reason == "pixels":
            return Refused(
                503,
                "requests that are under way have as many pixels in their images as the server "
                f"allows ({format_count(MOST_PIXELS_UNDER_WAY)}): send smaller images, or later",
                code=reason,
                retry_after_s=_whole(self._pace_s(self._ended_s)),
            )
        if reason == "max_num_queued_reqs":
            what = f"{format_count(self._num_queued + self._num_prepared)} requests wait"
            limit = f"max_num_queued_reqs={bounds.num_queued_reqs}"
        else:
            # How many they are would tell of other keys.
            what = "as many prompt tokens wait as may wait"
            limit = f"max_num_queued_tokens={bounds.num_queued_tokens}"
        return Refused(
            503,
            f"the queue is full: {what} ({limit}); it will be empty in about {wait_s} s",
            code=reason,
            retry_after_s=wait_s,
        )

    def drain_s(self) -> int:
        """Return the seconds until all that wait now have begun, at the pace of the last ones."""
        return _whole((self._num_queued + self._num_prepared) * self._pace_s(self._begun_s))

    def _pace_s(self, times: deque[float]) -> float:
        """Return the seconds from one to the next, up to now: a standstill makes them longer."""
        now_s = self._clock()
        while times and times[0] < now_s - _MEMORY_S and len(times) > 1:
            times.popleft()
        return (now_s - times[0]) / max(1, len(times) - 1) if times else 1.0

    def _check(self, caller: Caller | None) -> None:
        """Refuse if no request could join the queue now, or none of this key. Raises: Refused."""
        reason = self._refuse(caller, self._num_queued + self._num_prepared)
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
        """Return which bound is passed. An empty queue takes a request of any size."""
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

    def _leave_queue(self, own: Permit, choice: int) -> None:
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
