"""Which order a pool's blocks are evicted in: LRU, and others on trial that may cost it little.

Shadow caches (``shadow_caches``) say which order promises more than LRU. They are a sample, and may
be wrong for good. So an order that promises more is tried, and what it finds is compared with what
LRU would have found: that needs no sample, because the last uses of the blocks tell it
(``LruHits``). Each order has an account in blocks. A share of what LRU finds is paid in, and what
the trial finds more; what it finds less is paid out. An order whose account is empty loses its seat
to LRU, until its share has filled it again.

So what all trials lose against LRU is bounded by what the accounts hold at the start, the shares,
and what is lost on the way back to LRU's own blocks, which is paid out too.
"""

from enum import IntEnum
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.kv.policy_duel import HALF_LIFE, sample_of
from quire.kv.shadow_caches import ByLast, ByLastButOne, NewcomersFirst, ShadowCache

_STAKE, _LEAST_STAKE = 1 / 128, 64  # of the pool's blocks, and in blocks: what a trial may cost
_SHARE = 1 / 256  # of LRU's hits, paid into each account
_MOST = 1 / 4  # of the pool's blocks: what an account can hold

Times = npt.NDArray[np.int64]


class Order(IntEnum):
    """Which of the free blocks goes first."""

    LAST = 0  # the least recently used: LRU
    LAST_BUT_ONE = 1  # the one whose use before the last is the longest ago: LRU-2
    NEWCOMERS = 2  # one that was not hit yet, the newest first; then the least recently used


# By which factor an order must promise more than the one that has the seat, and how many hits of a
# shadow besides. Where prompts come round and round, LRU finds next to nothing.
_MARGINS: Final = MappingProxyType({Order.LAST_BUT_ONE: 1.02, Order.NEWCOMERS: 1.5})
_HEAD_START = 24.0


class OrderTrials:
    """The order for a pool of ``num_blocks``, whose last uses are known to the ``tick``.

    ``gap``: how many blocks of an evicted prefix lie between two that are remembered, about.
    """

    def __init__(self, num_blocks: int, *, tick: int, gap: int) -> None:
        one_in, self._size = sample_of(num_blocks)
        self.mask = one_in - 1  # fingerprints with none of these bits are the sample
        shadows: tuple[ShadowCache, ...] = (
            ByLast(self._size),
            ByLastButOne(self._size),
            NewcomersFirst(self._size),
        )
        self._shadows = shadows
        self._won = [0.0] * len(Order)  # by each shadow, lately
        self.lru = LruHits(num_blocks, tick)
        self._gap = gap
        self._stake = max(_LEAST_STAKE, num_blocks * _STAKE)
        self._most = max(self._stake, num_blocks * _MOST)
        self._accounts = [self._stake] * len(Order)  # LRU's own means nothing
        self.seat = self._tried = Order.LAST

    def watch(self, prints: list[int], last_uses: Times, num_hits: int, now: int) -> Order:
        """Note that a sequence has used blocks. Returns: the order that has the seat from now on.

        ``prints``: the sampled fingerprints, shallowest first. ``last_uses``: of all the blocks
        before this one, deepest first, rising; ``num_hits`` of them were found in the pool.
        """
        found = self.lru.use(last_uses, now)
        if num_hits < found < len(last_uses):  # the deepest that LRU had may not be remembered
            found = min(found + self._gap, len(last_uses))
        accounts, share = self._accounts, found * _SHARE
        accounts[self._tried] += num_hits - found
        for order in _MARGINS:
            accounts[order] = min(accounts[order] + share, self._most)
        if prints and len(prints) <= self._size:
            decay = 0.5 ** (len(prints) / (HALF_LIFE * self._size))
            hits = [shadow.request(prints) for shadow in self._shadows]
            self._won = [(won + new) * decay for won, new in zip(self._won, hits, strict=True)]
        self.seat = self._best()
        if self.seat is not Order.LAST:
            self._tried = self.seat
        return self.seat

    def rewind(self, ticks: int) -> None:
        """Set the clock back."""
        self.lru.rewind(ticks)

    def _best(self) -> Order:
        won, accounts, seat = self._won, self._accounts, self.seat
        if seat is not Order.LAST and (accounts[seat] < 0 or won[Order.LAST] >= won[seat]):
            seat = Order.LAST
        for order, margin in _MARGINS.items():
            if (
                order is not seat
                and accounts[order] >= self._stake
                and won[order] > margin * won[seat] + _HEAD_START
            ):
                seat = order
        return seat


class LruHits:
    """Count what a pool of ``num_blocks`` would find if it evicted the least recently used.

    Such a pool holds the blocks that were used last, as many as it has room for. So it is enough to
    know when a block was used before, and how many blocks were used last at which time.
    """

    def __init__(self, num_blocks: int, tick: int = 1) -> None:
        self._num_blocks, self._tick = num_blocks, tick
        self._num_last_used: dict[int, int] = {}  # blocks that it holds, by tick, in order
        self._num_held = 0

    def use(self, last_uses: Times, now: int) -> int:
        """Use a sequence's blocks, whose last uses before this one rise from the deepest on.

        ``last_uses``: ``NEVER`` where none is known. Returns: how many blocks it finds.
        """
        held, tick, found = self._num_last_used, self._tick, 0
        uses: list[int] = last_uses.tolist()
        length = len(uses)
        begin = 0
        while begin < length:
            when, end = uses[begin], begin + 1
            if when == uses[-1]:
                end = length
            else:
                while uses[end] == when:
                    end += 1
            num_there = held.get(when // tick, 0)
            if num_there:
                # Of those that one sequence used last together, the deepest have gone first.
                count = min(end - begin, num_there)
                held[when // tick] = num_there - count
                found += count
            begin = end
        held[now // tick] = held.get(now // tick, 0) + length
        self._num_held += length - found
        while (excess := self._num_held - self._num_blocks) > 0:
            oldest = next(iter(held))
            gone = min(excess, held[oldest])
            self._num_held -= gone
            if gone == held[oldest]:
                del held[oldest]
            else:
                held[oldest] -= gone
        return found

    def rewind(self, ticks: int) -> None:
        """Set the clock back by ``ticks``, a multiple of the tick; older times become 0."""
        rewound: dict[int, int] = {}
        for tick, count in self._num_last_used.items():
            at = max(0, tick - ticks // self._tick)
            rewound[at] = rewound.get(at, 0) + count
        self._num_last_used = rewound
