"""What a pool would find if it evicted in another order, counted from the last uses of blocks.

LRU holds the blocks that were used last, as many as there is room for. So it is enough to know when
each block was used before, and how many blocks were used last at which time. The same holds where
blocks of conversations that are said to have ended go earlier. That needs no sample
(``shadow_caches``) and no fingerprints: a few operations a prompt for all of its blocks.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bools: TypeAlias = npt.NDArray[np.bool_]
LastUses: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Run: TypeAlias = tuple[int, bool, int]  # a time of use in ticks, whether it ended then, blocks


def runs_of(last_uses: LastUses, have_ended: Bools | None, tick: int) -> list[Run]:
    """Split blocks whose last uses rise, deepest first, into those that are counted together."""
    uses: list[int] = last_uses.tolist()
    length = len(uses)
    runs = list[Run]()
    begin = 0
    while begin < length:
        when, end = uses[begin], begin + 1
        if when == uses[-1]:
            end = length
        else:
            while uses[end] == when:
                end += 1
        num_ended = 0
        if have_ended is not None and (num_ended := int(have_ended[begin:end].sum())):
            runs.append((when // tick, True, num_ended))
        if num_ended < end - begin:
            runs.append((when // tick, False, end - begin - num_ended))
        begin = end
    return runs


class LruHits:
    """Count what a pool of ``num_blocks`` would find if it evicted the least recently used.

    Such a pool holds the blocks that were used last, as many as it has room for. So it is enough to
    know when a block was used before, and how many blocks were used last at which time.
    """

    def __init__(self, num_blocks: int, tick: int = 1) -> None:
        self.num_blocks, self.tick = num_blocks, tick
        self._num_last_used: dict[int, int] = {}  # blocks that it holds, by tick, in order
        self._num_held = 0

    def use(self, runs: list[Run], now: int) -> int:
        """Use a sequence's blocks, whose last uses before this one rise from the deepest on.

        Returns: how many blocks it finds.
        """
        held, found, length = self._num_last_used, 0, 0
        for when, _, count in runs:
            length += count
            if num_there := held.get(when, 0):
                # Of those that one sequence used last together, the deepest have gone first.
                count = min(count, num_there)
                held[when] = num_there - count
                found += count
        held[now // self.tick] = held.get(now // self.tick, 0) + length
        self._num_held += length - found
        while (excess := self._num_held - self.num_blocks) > 0:
            self._num_held -= _take_oldest(held, excess)
        return found

    def by_tick(self) -> dict[int, int]:
        """Return how many of the blocks that it holds were used last in each tick, in order."""
        return dict(self._num_last_used)

    def rewind(self, ticks: int) -> None:
        """Set the clock back by ``ticks``, a multiple of the tick; older times become 0."""
        self._num_last_used = _rewound(self._num_last_used, ticks // self.tick)


class EndedHits:
    """Count what a pool would find if blocks that are said to have ended went ``earlier``.

    ``earlier``: as if they had been used last so many sizes of the pool before; infinity for before
    all others. It begins with what LRU holds.
    """

    def __init__(self, lru: LruHits, earlier: float) -> None:
        self._num_blocks, self._tick = lru.num_blocks, lru.tick
        self._earlier = earlier * lru.num_blocks / lru.tick
        self._live = lru.by_tick()
        self._ended: dict[int, int] = {}
        self._num_held = sum(self._live.values())

    def use(self, runs: list[Run], now: int) -> int:
        """Use a sequence's blocks, whose last uses before this one rise from the deepest on.

        Returns: how many blocks it finds.
        """
        live, ended, found, length = self._live, self._ended, 0, 0
        for when, has_ended, count in runs:
            length += count
            held = ended if has_ended else live
            if num_there := held.get(when, 0):
                count = min(count, num_there)
                held[when] = num_there - count
                found += count
        tick = now // self._tick
        live[tick] = live.get(tick, 0) + length
        self._num_held += length - found
        while (excess := self._num_held - self._num_blocks) > 0:
            queue = live
            if ended and next(iter(ended)) - self._earlier <= next(iter(live)):
                queue = ended
            self._num_held -= _take_oldest(queue, excess)
        return found

    def end(self, num_blocks: int, now: int) -> None:
        """Note that so many of the blocks that were used just now have ended."""
        tick = now // self._tick
        num_blocks = min(num_blocks, self._live.get(tick, 0))
        if num_blocks:
            self._live[tick] -= num_blocks
            self._ended[tick] = self._ended.get(tick, 0) + num_blocks

    def rewind(self, ticks: int) -> None:
        """Set the clock back by ``ticks``, a multiple of the tick; older times become 0."""
        self._live = _rewound(self._live, ticks // self._tick)
        self._ended = _rewound(self._ended, ticks // self._tick)


def _take_oldest(held: dict[int, int], most: int) -> int:
    """Take blocks of the oldest tick out, and return how many."""
    oldest = next(iter(held))
    gone = min(most, held[oldest])
    if gone == held[oldest]:
        del held[oldest]
    else:
        held[oldest] -= gone
    return gone


def _rewound(held: dict[int, int], ticks: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for tick, count in held.items():
        at = max(0, tick - ticks)
        found[at] = found.get(at, 0) + count
    return found
