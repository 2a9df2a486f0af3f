"""Which cached block goes first when room is needed: policies behind one seam.

A policy sees the blocks of one group. It is told when a sequence has done with blocks, and when no
sequence holds them any more; it is asked for victims. Times are counted in blocks computed. Blocks
of one sequence are let go deepest first, and no policy lets a block go before what depends on it:
its ancestors were used whenever it was.

Blocks of a more important sequence (a smaller ``priority``, as in vLLM) go later than all others.

Which policy keeps what real traffic comes back for is measured in
``benchmarks/accounting/bench_eviction.py``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.blocks.ghosts import NEVER, Ghosts, Prints
from quire.blocks.runs import NO_IDS, Ids, Runs
from quire.blocks.shadows import Contest

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
        contest: Contest | None = None,
    ) -> None:
        self._by_last = by_last
        self._contest = contest
        self._prints_of = prints_of
        self._ghosts = Ghosts(num_blocks) if contest or not by_last else None
        num_ids = num_blocks + spare_blocks
        self._runs = Runs(num_ids)
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
        runs, self._runs = self._runs.runs(), Runs(len(self._last))
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
    return Recency(num_blocks, prints_of, spare_blocks, contest=Contest(num_blocks))


# From the number of blocks that can be in use at once, and that of ids beyond it.
MakePolicy: TypeAlias = Callable[[int, PrintsOf, int], EvictionPolicy]

DEFAULT_POLICY = "choice"
POLICIES: Mapping[str, MakePolicy] = MappingProxyType({"lru": lru, "lru-2": lru2, "choice": choice})
