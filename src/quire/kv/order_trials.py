"""Which order a pool's blocks are evicted in: LRU, and others on trial that may cost it little.

Shadow caches (``shadow_caches``) say which order promises more than LRU. They are a sample, and may
be wrong for good. So an order that promises more is tried, and what it finds is compared with what
LRU would have found: that needs no sample, because the last uses of the blocks tell it
(``LruHits``). Each order has an account in blocks. A share of what LRU finds is paid in, and what
the trial finds more; what it finds less is paid out. An order that owes more than a stake loses its
seat to LRU, until its share has paid the debt.

So what all trials lose against LRU is bounded by the stakes, the shares, the last prompt of each
trial, and what is lost on the way back to LRU's own blocks, which is paid out too.

Pools of the same traffic tell each other what they found (``evidence``). Their shadows are a larger
sample than one's own, and what their trials have earned stands good for this one's: by so much more
an account may be overdrawn, once. What they say is never a reason to lose more than that.
"""

import math
from enum import IntEnum
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.kv.evidence import Evidence
from quire.kv.policy_duel import HALF_LIFE, sample_of
from quire.kv.shadow_caches import ByLast, ByLastButOne, EndedFirst, NewcomersFirst, ShadowCache

# What an account can owe while its order has the seat: so many of the prompts that are used lately,
# which are found whole or not at all, and at least so much of the pool's blocks. An order that lost
# its seat and promises more again when its debt is paid may owe twice as many prompts.
_PROMPTS, _MOST_PROMPTS, _STAKE = 4, 16, 1 / 128
# Of LRU's hits, paid into each account: what its trials may lose in the long run. Where most of
# what clients say is wrong, it is lost for good.
_SHARE, _SHARE_OF_HINTED = 1 / 128, 1 / 256
_MOST = 1 / 4  # of the pool's blocks: what an account can hold
_LATELY = 1 / 64  # the weight of the last prompt in the mean of their lengths

LastUses: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]


class Order(IntEnum):
    """Which of the free blocks goes first."""

    LAST = 0  # the least recently used: LRU
    LAST_BUT_ONE = 1  # the one whose use before the last is the longest ago: LRU-2
    NEWCOMERS = 2  # one that was not hit yet, the newest first; then the least recently used
    ENDED_EARLIER = (
        3  # by the last use, and what has ended as if that were a pool's size longer ago
    )
    ENDED_FIRST = 4  # what has ended, then the rest, both by the last use


# By which factor an order must promise more than the one that has the seat, and how many hits of a
# shadow besides. Where prompts come round and round, LRU finds next to nothing. What clients say is
# worth one trial against LRU without any promise: where most of it is wrong, the second would lose
# what the share pays, for good.
_MARGINS: Final = MappingProxyType(
    {
        Order.LAST_BUT_ONE: 1.02,
        Order.NEWCOMERS: 1.5,
        Order.ENDED_EARLIER: 1.02,
        Order.ENDED_FIRST: 1.02,
    }
)
_HEAD_START, _LEAD = 24.0, 8.0  # … of an order on trial, and of LRU to have the seat again


class OrderTrials:
    """The order for a pool of ``num_blocks``, whose last uses are known to the ``tick``.

    ``gap``: how many blocks of an evicted prefix lie between two that are remembered, about.
    """

    def __init__(self, num_blocks: int, *, tick: int, gap: int) -> None:
        one_in, self._size = sample_of(num_blocks)
        self._mask = one_in - 1  # fingerprints with none of these bits are the sample
        by_last = ByLast(self._size)
        self._by_last = by_last
        # By order. Those of ended conversations are there from the first that is said to end.
        self._shadows: list[ShadowCache] = [
            by_last,
            ByLastButOne(self._size),
            NewcomersFirst(self._size),
        ]
        self._of_ended: tuple[EndedFirst, ...] = ()
        self._won = [0.0] * len(self._shadows)  # by each, lately
        self.lru = LruHits(num_blocks, tick)
        self._gap = gap
        self._num_blocks = num_blocks
        self._mean_length = 0.0  # of the prompts, in blocks
        self._accounts = [0.0] * len(Order)  # LRU's own means nothing
        self._prompts = [_PROMPTS] * len(Order)  # which each may owe
        self._have_lost: set[Order] = set()  # more than the stake, in some trial
        self.seat: Order = Order.LAST
        self._tried: Order = Order.LAST
        self._back_at = 0  # when LRU's own blocks are there again
        self._others_won = [0.0] * len(Order)  # by shadows of all other pools
        self._num_others = 0
        self._backing = [0.0] * len(Order)  # blocks: what others have earned, in the mean
        self._lent = 0.0  # of that, to the trial under way: it is not called in

    def sampled(self, prints: npt.NDArray[np.uint32]) -> list[int]:
        """List those of fingerprints (u32[n], deepest first) in the sample, shallowest first."""
        found = prints[(prints & self._mask == 0).nonzero()[0]]
        listed: list[int] = found[::-1].tolist()
        return listed

    def watch(self, prints: list[int], last_uses: LastUses, num_hits: int, now: int) -> Order:
        """Note that a sequence has used blocks. Returns: the order that has the seat from now on.

        ``prints``: the sampled fingerprints, shallowest first. ``last_uses``: of all the blocks
        before this one, deepest first, rising; ``num_hits`` of them were found in the pool.
        """
        found = self.lru.use(last_uses, now)
        if num_hits < found < len(last_uses):  # the deepest that LRU had may not be remembered
            found = min(found + self._gap, len(last_uses))
        self._mean_length += (len(last_uses) - self._mean_length) * _LATELY
        accounts = self._accounts
        # Later LRU's count says nothing of the trial, and it is a little too high.
        if self.seat is not Order.LAST or now < self._back_at:
            accounts[self._tried] += num_hits - found
        for order in _MARGINS:
            share = _SHARE_OF_HINTED if order >= Order.ENDED_EARLIER else _SHARE
            accounts[order] = min(accounts[order] + found * share, self._num_blocks * _MOST)
        if prints and len(prints) <= self._size:
            decay = 0.5 ** (len(prints) / (HALF_LIFE * self._size))
            hits = [shadow.request(prints) for shadow in self._shadows]
            self._won = [(won + new) * decay for won, new in zip(self._won, hits, strict=True)]
        seat = self._best()
        if seat is not self.seat:
            if seat is Order.LAST:
                self._back_at = now + self._num_blocks
            else:
                self._tried, self._lent = seat, 0.0
            self.seat = seat
        return seat

    def end(self, prints: list[int]) -> None:
        """Note that sampled fingerprints, used just now, have ended; shallowest first."""
        if not self._of_ended:
            self._of_ended = (
                EndedFirst(self._size, 1.0, self._by_last),
                EndedFirst(self._size, math.inf, self._by_last),
            )
            self._shadows += self._of_ended
            self._won += [self._won[Order.LAST]] * len(self._of_ended)
        for shadow in self._of_ended:
            shadow.end(prints)

    def evidence(self, policy: str, block_tokens: int) -> Evidence:
        """Return what the trials have found, for pools of such blocks. Any thread may call."""
        return Evidence(
            policy=policy,
            block_tokens=block_tokens,
            num_blocks=self._num_blocks,
            accounts=tuple(self._accounts),
            promises=tuple(self._won),
        )

    def hear(self, others: Evidence | None) -> None:
        """Take what the trials of other pools have found, in the mean; None: there are none."""
        accounts, promises, num = (
            ((), (), 0)
            if others is None
            else (others.accounts, others.promises, max(0, others.num_pools))
        )
        most = self._size * HALF_LIFE / math.log(2)  # that a shadow can have found lately
        self._num_others = num
        self._backing = _by_order(accounts, self._num_blocks * _MOST)
        self._others_won = [num * each for each in _by_order(promises, most)]

    def rewind(self, ticks: int) -> None:
        """Set the clock back."""
        self.lru.rewind(ticks)
        self._back_at -= ticks

    def _best(self) -> Order:
        won, accounts, seat = self._won, self._accounts, self.seat
        if seat is not Order.LAST:
            stake = max(self._num_blocks * _STAKE, self._mean_length * self._prompts[seat])
            self._lent = max(self._lent, self._backing[seat])
            most_owed = stake + self._lent
            if accounts[seat] < -most_owed:
                self._prompts[seat] = min(2 * self._prompts[seat], _MOST_PROMPTS)
                self._have_lost.add(seat)
                accounts[seat] = -most_owed  # what one long prompt took besides is not owed forever
                seat = Order.LAST
            elif won[Order.LAST] > won[seat] + _LEAD and not self._others_keep(seat):
                seat = Order.LAST
        for order, margin in _MARGINS.items():
            if order is seat or order >= len(won) or accounts[order] + self._backing[order] < 0:
                continue
            wanted = margin * won[seat] + _HEAD_START
            is_told = order >= Order.ENDED_EARLIER and order not in self._have_lost
            if is_told and seat is Order.LAST:
                wanted = won[seat]
            if won[order] >= wanted or self._others_propose(order, seat, margin):
                seat = order
        return seat

    def _others_propose(self, order: Order, seat: Order, margin: float) -> bool:
        """Return whether the shadows of all pools together promise so much more of an order."""
        if not self._num_others or order is not Order.LAST_BUT_ONE:
            return False
        # Chance grows as the root of how many samples are added up.
        lead = _HEAD_START * math.sqrt(1 + self._num_others)
        return self._all_won(order) >= margin * self._all_won(seat) + lead

    def _others_keep(self, seat: Order) -> bool:
        """Return whether the shadows of all pools together do not promise more of LRU."""
        if not self._num_others:
            return False
        return self._all_won(Order.LAST) <= self._all_won(seat) + _LEAD

    def _all_won(self, order: Order) -> float:
        return self._won[order] + self._others_won[order]


def _by_order(figures: tuple[float, ...], most: float) -> list[float]:
    """Return a figure of each order, from 0 to ``most``: 0 where there is none."""
    known = [max(0.0, min(each, most)) for each in figures[: len(Order)]]  # no number: 0
    return known + [0.0] * (len(Order) - len(known))


class LruHits:
    """Count what a pool of ``num_blocks`` would find if it evicted the least recently used.

    Such a pool holds the blocks that were used last, as many as it has room for. So it is enough to
    know when a block was used before, and how many blocks were used last at which time.
    """

    def __init__(self, num_blocks: int, tick: int = 1) -> None:
        self._num_blocks, self._tick = num_blocks, tick
        self._num_last_used: dict[int, int] = {}  # blocks that it holds, by tick, in order
        self._num_held = 0

    def use(self, last_uses: LastUses, now: int) -> int:
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
