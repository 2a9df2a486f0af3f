"""Which order a pool's blocks are evicted in: LRU, and others on trial that may cost it little.

An order is tried if it promises more than LRU, and what it finds is compared with what LRU would
have found: the last uses of the blocks tell it (``counted_hits``). Each order has an account in
blocks. A share of what LRU finds is paid in, and what the trial finds more; what it finds less is
paid out. An order that owes more than a stake loses its seat to LRU, until the debt is paid.

So what all trials lose against LRU is bounded by the stakes, the shares, the last prompt of each
trial, and what is lost on the way back to LRU's own blocks, which is paid out too.

Shadow caches (``shadow_caches``) promise for orders that look at past uses alone. They are a
sample, and may be wrong for good. The two orders that heed clients are counted like LRU, so they
earn their stake before a trial: the better one begins once it would have found more by as much as
the trial may owe, or twice as much where what clients say tells next to nothing. What it would have
found besides pays for lost trials. Before that, clients are believed while what they say comes
true.

Pools of the same traffic tell each other what they found (``evidence``). Their shadows are a larger
sample than one's own, and what their trials have earned stands good for this one's: by so much more
an account may be overdrawn, once. What they say is never a reason to lose more than that.
"""

import math
from enum import IntEnum
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.kv.counted_hits import EndedHits, LruHits, Run
from quire.kv.evidence import Evidence
from quire.kv.policy_duel import HALF_LIFE, sample_of
from quire.kv.shadow_caches import NEVER, ByLast, ByLastButOne, NewcomersFirst, ShadowCache

# What an account can owe while its order has the seat: so many of the prompts that are used lately,
# which are found whole or not at all, and at least so much of the pool's blocks. An order that lost
# its seat and promises more again when its debt is paid may owe twice as many prompts.
_PROMPTS, _MOST_PROMPTS, _STAKE = 4, 16, 1 / 128
_MOST = 1 / 4  # of the pool's blocks: what an account can hold
_LATELY = 1 / 64  # the weight of the last prompt in the mean of their lengths


class Order(IntEnum):
    """Which of the free blocks goes first."""

    LAST = 0  # the least recently used: LRU
    LAST_BUT_ONE = 1  # the one whose use before the last is the longest ago: LRU-2
    NEWCOMERS = 2  # one that was not hit yet, the newest first; then the least recently used
    ENDED_EARLIER = (
        3  # by the last use, and what has ended as if that were a pool's size longer ago
    )
    ENDED_FIRST = 4  # what has ended, then the rest, both by the last use


# By which factor an order must promise more than the one that has the seat: where prompts come
# round and round, LRU finds next to nothing. And of LRU's hits, what is paid into its account: what
# its trials may lose in the long run. Where most of what clients say is wrong, it is lost for good.
_TRIED: Final = (  # by order
    (Order.LAST_BUT_ONE, 1.02, 1 / 128),
    (Order.NEWCOMERS, 1.5, 1 / 128),
    (Order.ENDED_EARLIER, 1.02, 1 / 256),
    (Order.ENDED_FIRST, 1.02, 1 / 256),
)
# How many hits of a shadow an order must promise besides, and LRU to have the seat again. A shadow
# finds long prompts in clumps, so an order must promise what its trial may owe, if that is more.
_HEAD_START, _LEAD = 24.0, 8.0
# How often an order that heeds clients must be ahead of LRU by what its trial may owe, unless what
# they said came true somewhat: the last prompt and the way back are lost besides.
_EARNED = 2
# How many times as often the rest must be used again as what clients say has ended. Then they are
# believed at once: where a pool is large, it is full long before a count shows what that brings.
_ODDS: Final = MappingProxyType({Order.ENDED_FIRST: 8.0, Order.ENDED_EARLIER: 2.0})
_TELLING = 1.25  # … from which on they tell something


class OrderTrials:
    """The order for a pool of ``num_blocks``, whose last uses are known to the ``tick``.

    ``gap``: how many blocks of an evicted prefix lie between two that are remembered, about.
    """

    def __init__(self, num_blocks: int, *, tick: int, gap: int) -> None:
        one_in, self._size = sample_of(num_blocks)
        self._mask = one_in - 1  # fingerprints with none of these bits are the sample
        self._one_in = one_in
        self._shadows: list[ShadowCache] = [  # by order
            ByLast(self._size),
            ByLastButOne(self._size),
            NewcomersFirst(self._size),
        ]
        self._won = [0.0] * len(self._shadows)  # by each, lately
        self.lru = LruHits(num_blocks, tick)
        # From the first conversation that is said to end.
        self._of_ended: dict[Order, EndedHits] = {}
        self._ahead: dict[Order, float] = {}  # blocks that each finds more than LRU, lately
        self._outcomes = _Outcomes()
        self._now = 0
        self._gap = gap
        self._num_blocks = num_blocks
        self._most = num_blocks * _MOST
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

    def watch(self, prints: list[int], runs: list[Run], num_hits: int, now: int) -> Order:
        """Note that a sequence has used blocks. Returns: the order that has the seat from now on.

        ``prints``: the sampled fingerprints, shallowest first. ``runs``: of all the blocks, deepest
        first, by their last uses before this one; ``num_hits`` of them were found in the pool.
        """
        length = sum([count for _, _, count in runs])
        found = self._count(runs, length, now)
        if num_hits < found < length:  # the deepest that LRU had may not be remembered
            found = min(found + self._gap, length)
        self._mean_length += (length - self._mean_length) * _LATELY
        accounts = self._accounts
        # Later LRU's count says nothing of the trial, and it is a little too high.
        if self.seat is not Order.LAST or now < self._back_at:
            accounts[self._tried] += num_hits - found
        most = self._most
        for order, _, share in _TRIED:
            paid = accounts[order] + found * share
            accounts[order] = paid if paid < most else most
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
                if seat in self._ahead and (debt := -accounts[seat]) > 0:
                    self._ahead[seat] -= debt  # only what was counted pays for a lost trial
                    accounts[seat] = 0
            self.seat = seat
        return seat

    def end(self, num_blocks: int) -> None:
        """Note that so many of the blocks that were used just now have ended."""
        if not self._of_ended:
            for order, earlier in ((Order.ENDED_EARLIER, 1.0), (Order.ENDED_FIRST, math.inf)):
                self._of_ended[order] = EndedHits(self.lru, earlier)
                self._ahead[order] = 0.0
        self._outcomes.end(num_blocks)
        for hits in self._of_ended.values():
            hits.end(num_blocks, self._now)

    def evidence(self, policy: str, block_tokens: int) -> Evidence:
        """Return what the trials have found, for pools of such blocks. Any thread may call.

        Of the orders that shadows promise for: those that heed clients are counted in full here.
        """
        return Evidence(
            policy=policy,
            block_tokens=block_tokens,
            num_blocks=self._num_blocks,
            accounts=tuple(self._accounts[: len(self._won)]),
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
        self._backing = _by_order(accounts, self._most)
        self._others_won = [num * each for each in _by_order(promises, most)]

    def rewind(self, ticks: int) -> None:
        """Set the clock back."""
        self.lru.rewind(ticks)
        for hits in self._of_ended.values():
            hits.rewind(ticks)
        self._now -= ticks
        self._back_at -= ticks

    def _count(self, runs: list[Run], length: int, now: int) -> int:
        """Count what LRU would have found, and how far those that heed clients are ahead of it."""
        self._now = now
        found = self.lru.use(runs, now)
        if self._of_ended:
            decay = 0.5 ** (length / (HALF_LIFE * self._num_blocks))
            self._outcomes.use(
                length,
                again=sum(count for when, _, count in runs if when != NEVER),
                had_ended=sum(count for _, has_ended, count in runs if has_ended),
                decay=decay,
            )
            for order, ended in self._of_ended.items():
                self._ahead[order] = self._ahead[order] * decay + ended.use(runs, now) - found
        return found

    def _best(self) -> Order:
        won, seat = self._won, self.seat  # by order; those that heed clients come last
        believed = better = None
        if self._ahead:  # on the scale of the sample
            won = [*won, *[won[0] + ahead / self._one_in for ahead in self._ahead.values()]]
            believed = self._outcomes.believed(self._mean_length)
            better = max(reversed(self._ahead), key=self._ahead.__getitem__)
        if seat is not Order.LAST and self._has_lost(seat, is_believed=believed is not None):
            seat = Order.LAST
        for order, margin, _ in _TRIED[: len(won) - 1]:
            if order is seat:
                continue
            lead, paid = self._lead(order), self._accounts[order]
            wanted = margin * won[seat] + max(_HEAD_START, lead / self._one_in)
            if order not in self._ahead:
                paid += self._backing[order]
            else:
                if order is not better:
                    continue
                paid += max(0.0, self._ahead[order] - lead)
                if seat is Order.LAST:
                    earned = 1 if self._outcomes.bear_out(self._mean_length) else _EARNED
                    wanted = won[seat] + earned * lead / self._one_in
                elif seat in self._ahead:
                    wanted = won[seat] + lead / self._one_in
            if paid >= 0 and (won[order] >= wanted or self._others_propose(order, seat, margin)):
                seat = order
        if (
            seat is Order.LAST
            and believed is not None
            and believed not in self._have_lost
            and self._accounts[believed] >= 0
            and self._ahead[believed] >= 0
        ):
            seat = believed
        return seat

    def _has_lost(self, seat: Order, *, is_believed: bool) -> bool:
        """Tell whether the order on trial goes, and settle its account if it owes too much."""
        stake = max(self._num_blocks * _STAKE, self._lead(seat))
        if seat not in self._ahead:
            self._lent = max(self._lent, self._backing[seat])
            stake += self._lent
        if self._accounts[seat] < -stake:
            self._prompts[seat] = min(2 * self._prompts[seat], _MOST_PROMPTS)
            self._have_lost.add(seat)
            # What one long prompt took besides is not owed for ever.
            self._accounts[seat] = -stake
            return True
        if seat not in self._ahead:
            return self._won[Order.LAST] > self._won[seat] + _LEAD and not self._others_keep(seat)
        if is_believed:
            return self._ahead[seat] < -self._lead(seat)
        return self._ahead[seat] <= 0

    def _others_propose(self, order: Order, seat: Order, margin: float) -> bool:
        """Return whether the shadows of all pools together promise so much more of an order."""
        if not self._num_others or order is not Order.LAST_BUT_ONE or seat in self._ahead:
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

    def _lead(self, order: Order) -> float:
        """Return how many blocks as many prompts have as the order may owe."""
        return self._mean_length * self._prompts[order]


def _by_order(figures: tuple[float, ...], most: float) -> list[float]:
    """Return a figure of each order, from 0 to ``most``: 0 where there is none."""
    known = [max(0.0, min(each, most)) for each in figures[: len(Order)]]  # no number: 0
    return known + [0.0] * (len(Order) - len(known))


class _Outcomes:
    """How often what is said to have ended was used again, and how often the rest, in blocks."""

    def __init__(self) -> None:
        self._ended = self._ended_again = self._rest = self._rest_again = 0.0

    def use(self, count: int, *, again: int, had_ended: int, decay: float) -> None:
        """Note that blocks are used, so many of them again, and so many although they had ended."""
        self._ended *= decay
        self._ended_again = self._ended_again * decay + had_ended
        self._rest = self._rest * decay + count
        self._rest_again = self._rest_again * decay + again - had_ended

    def end(self, count: int) -> None:
        """Note that of the blocks used just now so many have ended."""
        self._ended += count
        self._rest -= count

    def believed(self, one_more: float) -> Order | None:
        """Return the order that clients have earned, were so many blocks of ended used again."""
        for order, odds in _ODDS.items():
            if self._are(odds, one_more):
                return order
        return None

    def bear_out(self, one_more: float) -> bool:
        """Return whether what clients say tells something of what is used again."""
        return self._are(_TELLING, one_more)

    def _are(self, odds: float, one_more: float) -> bool:
        """Return whether the rest is used again so many times as often as what has ended."""
        if self._ended <= 0 or self._rest <= 0:
            return False
        of_rest = self._rest_again / self._rest
        return of_rest >= odds * (self._ended_again + one_more) / self._ended
