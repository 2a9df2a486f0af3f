"""Which cached block goes first when room is needed: policies behind one seam.

A policy sees the blocks of one group. It is told when a sequence has done with blocks, and when no
sequence holds them any more; it is asked for victims. Times are counted in blocks computed. Blocks
of one sequence are let go deepest first, and no policy lets a block go before what depends on it:
its ancestors were used whenever it was.

Blocks of a more important sequence (a smaller ``priority``, as in vLLM) go later than all others.

Which policy keeps what real traffic comes back for is measured in
``benchmarks/accounting/bench_eviction.py``.
"""

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.kv.eviction_queue import NO_IDS, EvictionQueue, Ids

# -- ghost entries ---------------------------------------------------------------------------------

# When blocks that are gone were last used: a small table that may forget.
#
# One slot of four bytes holds a 16-bit tag and a 16-bit time; a newcomer overwrites. Of a large
# cache only a sample of the blocks is remembered, chosen by content, since blocks of one prefix
# are used together: the time of a deep block says that its ancestors were used no earlier.


Prints = npt.NDArray[np.uint32]  # 32-bit fingerprints of whole prefixes
GhostTimes = npt.NDArray[np.int64]
_SLOTS_A_BLOCK = 2
_LEAST_SLOTS = 1 << 14
_GHOST_REACH = 8  # how far back a time is believed: so many times the number of blocks
_TICKS = 1024  # of the coarse clock, in the time that as many blocks are computed as there are
NEVER = -1
_LOW = np.uint32(0xFFFF)  # of a slot: the time
_LEAST_TAG = np.uint32(1 << 16)  # … above it the tag: the upper half of a print, and never zero
_SPREAD, _SHIFT = np.uint32(0x9E3779B1), np.uint32(4)


class Ghosts:
    """GhostTimes are counted in blocks computed."""

    def __init__(self, num_blocks: int) -> None:
        slots = max(_LEAST_SLOTS, 1 << (_SLOTS_A_BLOCK * num_blocks - 1).bit_length())
        self._slots = np.zeros(slots, np.uint32)
        self._last = np.uint32(slots - 1)  # there are a power of two of them
        # A power of two, so that the clock can be set back by one without moving the ticks.
        self._tick = 1 << max(0, min(14, (num_blocks // _TICKS).bit_length()))
        self._reach = _GHOST_REACH * num_blocks
        one_in = 1 << max(0, (self._reach // slots).bit_length() - 1)
        self._mask = np.uint32(one_in - 1)  # prints with none of these bits are remembered

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def remember(self, prints: Prints, times: GhostTimes) -> None:
        """Blocks of these contents are evicted; they were last used then."""
        if self._mask:
            sampled = prints & self._mask == 0
            prints, times = prints[sampled], times[sampled]
        ticks = (times // self._tick).astype(np.uint32) & _LOW
        self._slots[self._place(prints)] = (prints | _LEAST_TAG) & ~_LOW | ticks

    def recall(self, prints: Prints, now: int) -> GhostTimes:
        """When each was last used, roughly; ``NEVER`` where that is not known."""
        found = self._slots[self._place(prints)]
        known = (found ^ (prints | _LEAST_TAG)) <= _LOW  # no tag is zero
        known &= prints & self._mask == 0
        ages = ((now // self._tick - found.astype(np.int64)) & 0xFFFF) * self._tick
        known &= ages <= self._reach
        return np.where(known, np.maximum(now - ages, 0), NEVER)

    def _place(self, prints: Prints) -> npt.NDArray[np.uint32]:
        places: npt.NDArray[np.uint32] = prints * _SPREAD >> _SHIFT & self._last
        return places


# -- policy duel -----------------------------------------------------------------------------------

# Which order of eviction would have found more lately: tried on miniature caches of a sample.
#
# A shadow holds no blocks, only the fingerprints of one prefix in so many, and as many fewer of
# them as it sees fewer. Its hits estimate those of the whole cache (Waldspurger et al. 2017,
# miniature simulations). The first order keeps its seat in doubt.


_SAMPLES = 128  # blocks of a shadow
_HALF_LIFE = 16  # of a won hit, in shadow sizes of use
_MARGIN, _HEAD_START = 1.02, 8.0  # by which the challenger must be ahead
_SHADOW_REACH = 8  # shadow sizes back that a last use is remembered


class PolicyDuel:
    """Least recently used against least recently used but one, for a cache of ``num_blocks``."""

    def __init__(self, num_blocks: int) -> None:
        one_in = 1 << max(0, (num_blocks // _SAMPLES).bit_length() - 1)
        self.mask = one_in - 1  # fingerprints with none of these bits are the sample
        self._size = max(1, num_blocks // one_in)
        self._champion = _ByLast(self._size)
        self._challenger = _ByLastButOne(self._size)
        self._won = [0.0, 0.0]
        self._by_last = True

    def watch(self, prints: list[int]) -> bool:
        """A sequence has used the prefixes of these sampled fingerprints, shallowest first.

        Returns: the verdict, whether a block should be judged by its last use.
        """
        if len(prints) > self._size:
            return self._by_last
        decay = 0.5 ** (len(prints) / (_HALF_LIFE * self._size))
        hits = self._champion.request(prints), self._challenger.request(prints)
        self._won = [(won + new) * decay for won, new in zip(self._won, hits, strict=True)]
        champion, challenger = self._won
        if self._by_last:
            self._by_last = challenger <= _MARGIN * champion + _HEAD_START
        else:
            self._by_last = champion > challenger
        return self._by_last


class _ByLast:
    """A cache of fingerprints that evicts the least recently used."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._cached: dict[int, None] = {}  # in order of use

    def request(self, prints: list[int]) -> int:
        """Use these, shallowest first, and cache them all; how many hit."""
        cached = self._cached
        hits = next((i for i, each in enumerate(prints) if each not in cached), len(prints))
        for each in reversed(prints):
            cached.pop(each, None)
            cached[each] = None
        for _ in range(len(cached) - self._size):
            del cached[next(iter(cached))]
        return hits


class _ByLastButOne:
    """A cache of fingerprints that evicts by the use before the last, and remembers the evicted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._clock = self._serial = 0
        self._last: dict[int, int] = {}  # also of what has been evicted, for a while
        self._entry: dict[int, int] = {}  # what is cached → serial of its valid entry
        self._heap: list[tuple[int, int, int]] = []  # score, serial, fingerprint

    def request(self, prints: list[int]) -> int:
        """Use these, shallowest first, and cache them all; how many hit."""
        entry, last_use = self._entry, self._last
        hits = next((i for i, each in enumerate(prints) if each not in entry), len(prints))
        cached = [each for each in prints if each in entry]
        for each in cached:
            entry[each] = 0  # not to be evicted for the rest
        self._evict(len(entry) + len(prints) - len(cached) - self._size)
        self._clock += max(1, len(prints) - hits)
        clock, oldest, before = self._clock, self._clock - _SHADOW_REACH * self._size, NEVER
        for each in reversed(prints):
            last = last_use.get(each, NEVER)
            if last > before and (last >= oldest or each in entry):
                before = last
            last_use[each] = clock
            self._serial += 1
            entry[each] = self._serial
            heapq.heappush(self._heap, (before, self._serial, each))
        if len(self._heap) > 4 * self._size + 64:
            self._heap = [item for item in self._heap if entry.get(item[2]) == item[1]]
            heapq.heapify(self._heap)
        if len(last_use) > 2 * _SHADOW_REACH * self._size:
            kept = (item for item in last_use.items() if item[1] >= oldest or item[0] in entry)
            self._last = dict(kept)
        return hits

    def _evict(self, count: int) -> None:
        while count > 0:
            _, serial, each = heapq.heappop(self._heap)
            if self._entry.get(each) == serial:
                del self._entry[each]
                count -= 1


# -- eviction --------------------------------------------------------------------------------------


Priority: TypeAlias = int | npt.NDArray[np.int8]  # of all blocks of a batch, or of each
Times: TypeAlias = npt.NDArray[np.int32]
PrintsOf: TypeAlias = Callable[[Ids], Prints]  # fingerprints of the prefixes that end in blocks
_PRIORITY = 1 << 48  # one step of priority outweighs any time
_LEAST_IMPORTANT = 127


class EvictionPolicy(Protocol):
    """An order of the cached blocks that no sequence holds."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def use(self, blocks: Ids, now: int, priority: Priority) -> None:
        """A sequence has done with these cached blocks, deepest first."""
        ...

    def free(self, blocks: Ids) -> None:
        """No sequence holds these any more, deepest first: they may be evicted."""
        ...

    def hold(self, blocks: Ids) -> None:
        """These may not be evicted any more."""
        ...

    def drop(self, blocks: Ids) -> None:
        """What these contained is cached no longer; they may not be evicted."""
        ...

    def next_time(self) -> int:
        """When the one that would be evicted next was used last. There is one."""
        ...

    def evict(self, count: int, *, alike: bool = False) -> Ids:
        """Take out the ``count`` that will be missed least; fewer if there are fewer.

        ``alike``: only such as were let go together with the first.
        """
        ...

    def order(self) -> tuple[Ids, Times]:
        """All of them, the first to go first, and when each was used last."""
        ...

    def take_out(self, blocks: Ids) -> None:
        """These are evicted, wherever they are in the order."""
        ...

    def rewind(self, ticks: int) -> None:
        """The clock is set back by so many blocks, a multiple of 2³⁰."""
        ...

    def check(self, cached: Ids) -> None:
        """Raises: AssertionError unless exactly the ``cached`` blocks may be evicted."""
        ...


class Recency:
    """Blocks in the order of a past use: the last one (LRU), or the one before it (LRU-2).

    LRU is right where what was used just now comes back soon. LRU-2 is right where much comes once
    and never again: a block that was used once is worth less than any that came back, so a flood of
    new prompts washes itself away. To tell the two apart it must know when a block that is gone was
    last used (``ghosts``). Which of them is right changes with the traffic and the size of the
    cache; with a ``contest`` both are tried on a sample all the time, and the better one decides.

    Source: LRU-2, O'Neil, O'Neil and Weikum 1993; trying policies on a sample, Waldspurger 2017.
    """

    def __init__(
        self,
        num_blocks: int,
        prints_of: PrintsOf,
        spare_blocks: int = 0,
        *,
        by_last: bool = True,
        contest: PolicyDuel | None = None,
    ) -> None:
        self._by_last = by_last
        self._contest = contest
        self._prints_of = prints_of
        self._ghosts = Ghosts(num_blocks) if contest or not by_last else None
        num_ids = num_blocks + spare_blocks
        self._runs = EvictionQueue(num_ids)
        self._last = np.full(num_ids, NEVER, np.int32)
        self._before = self._last if self._ghosts is None else self._last.copy()
        self._priority = np.zeros(num_ids, np.int8)
        self._has_priorities = False

    def __len__(self) -> int:
        return len(self._runs)

    def use(self, blocks: Ids, now: int, priority: Priority) -> None:
        last = self._last[blocks]
        self._last[blocks] = now
        fresh = (last == NEVER).nonzero()[0]
        if self._has_priorities or not isinstance(priority, int) or priority:
            self._has_priorities = True
            self._priority[blocks[fresh]] = _LEAST_IMPORTANT
            wanted = np.broadcast_to(np.int8(priority), blocks.shape)
            np.minimum.at(self._priority, blocks, wanted)
        if self._ghosts is None:
            return
        prints = self._prints_of(blocks)
        if len(fresh):
            last[fresh] = self._ghosts.recall(prints[fresh], now)
        # An ancestor was used whenever its descendant was, even if its ghost has been forgotten.
        self._before[blocks] = np.maximum.accumulate(last)
        if self._contest is not None:
            sampled = prints[prints & self._contest.mask == 0]
            if len(sampled) and self._contest.watch(sampled[::-1].tolist()) != self._by_last:
                self._by_last = not self._by_last
                self._reorder()

    def free(self, blocks: Ids) -> None:
        scores = (self._last if self._by_last else self._before)[blocks]
        if self._has_priorities:
            scores = scores - self._priority[blocks].astype(np.int64) * _PRIORITY
        if not self._has_priorities and scores[0] == scores[-1]:  # along a path they only rise
            self._runs.put(int(scores[0]), blocks)
            return
        ends = (np.diff(scores) != 0).nonzero()[0] + 1
        begin = 0
        for end in (*ends.tolist(), len(blocks)):
            self._runs.put(int(scores[begin]), blocks[begin:end])
            begin = end

    def hold(self, blocks: Ids) -> None:
        self._runs.remove(blocks)

    def drop(self, blocks: Ids) -> None:
        self._last[blocks] = NEVER

    def next_time(self) -> int:
        return int(self._last[self._runs.first()])

    def evict(self, count: int, *, alike: bool = False) -> Ids:
        blocks = self._runs.pop(count, one_run=alike)
        self._forget(blocks)
        return blocks

    def order(self) -> tuple[Ids, Times]:
        blocks = np.concatenate([NO_IDS, *self._runs.runs()])
        return blocks, self._last[blocks]

    def take_out(self, blocks: Ids) -> None:
        self._runs.remove(blocks)
        self._forget(blocks)

    def rewind(self, ticks: int) -> None:
        """The clock is set back, before it outgrows 32 bits; what is older becomes 0."""
        for times in (self._last, self._before) if self._ghosts is not None else (self._last,):
            known = times != NEVER
            times[known] = np.maximum(times[known] - ticks, 0)
        self._reorder()

    def check(self, cached: Ids) -> None:
        self._runs.check(cached)

    def _forget(self, blocks: Ids) -> None:
        """What is evicted leaves at most a ghost."""
        if self._ghosts is not None:
            times = self._last[blocks].astype(np.int64)
            self._ghosts.remember(self._prints_of(blocks), times)
        self._last[blocks] = NEVER

    def _reorder(self) -> None:
        """Put what is free in anew: by another use, or at other times."""
        runs, self._runs = self._runs.runs(), EvictionQueue(len(self._last))
        for blocks in runs:
            self.free(blocks)


def lru(num_blocks: int, prints_of: PrintsOf, spare_blocks: int = 0) -> Recency:
    """Least recently used."""
    return Recency(num_blocks, prints_of, spare_blocks)


def lru2(num_blocks: int, prints_of: PrintsOf, spare_blocks: int = 0) -> Recency:
    """Least recently used but one."""
    return Recency(num_blocks, prints_of, spare_blocks, by_last=False)


def choice(num_blocks: int, prints_of: PrintsOf, spare_blocks: int = 0) -> Recency:
    """Whichever of the two would have found more lately."""
    return Recency(num_blocks, prints_of, spare_blocks, contest=PolicyDuel(num_blocks))


# From the number of blocks that can be in use at once, and that of ids beyond it.
MakePolicy: TypeAlias = Callable[[int, PrintsOf, int], EvictionPolicy]

DEFAULT_POLICY = "choice"
POLICIES: Mapping[str, MakePolicy] = MappingProxyType({"lru": lru, "lru-2": lru2, "choice": choice})
