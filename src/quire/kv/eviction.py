"""Which cached block is evicted first when room is needed: policies behind one interface.

A policy orders the blocks of one group. The pool tells it when a sequence has ended its use of
blocks and when no sequence holds them any more, and asks it for victims. Times count blocks
computed. Blocks of one sequence come deepest first, and no policy evicts a block before a cached
block that depends on it: without its ancestors, a block is found by no prompt.

Blocks of a more important sequence (a smaller ``priority``, as in vLLM) go later than all others.

``EVICTION_POLICIES`` is open to other packages: docs/guides/write-an-eviction-policy.md.
benchmarks/accounting/bench_eviction.py measures which policy keeps what real traffic asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from quire.kv.counted_hits import Bools, runs_of
from quire.kv.eviction_queue import NO_IDS, EvictionQueue, Ids
from quire.kv.evidence import Evidence
from quire.kv.order_trials import Order, OrderTrials
from quire.kv.shadow_caches import KEEP_ONE_IN, NEVER
from quire.plugins import Registry

# -- the interface ---------------------------------------------------------------------------------

Priority: TypeAlias = int | npt.NDArray[np.int8]  # of all blocks of a batch, or of each
Times: TypeAlias = npt.NDArray[np.int32]
Prints: TypeAlias = npt.NDArray[np.uint32]  # 32-bit fingerprints of whole prefixes
PrintsOf: TypeAlias = Callable[[Ids], Prints]  # of the prefixes that end in these blocks
# Of cached blocks, deepest first: how many blocks come before each, the id of the prefix that ends
# in it, and the id of the prefix right before it. An id is used again when no block needs it.
PlacesOf: TypeAlias = Callable[[Ids], tuple[list[int], list[int], list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPool:
    """What a policy is made for: the blocks of one group."""

    num_blocks: int  # that can be in use at once
    spare_blocks: int = 0  # ids are 0 … num_blocks + spare_blocks - 1
    block_tokens: int = 1
    prints_of: PrintsOf
    places_of: PlacesOf

    @property
    def num_ids(self) -> int:
        return self.num_blocks + self.spare_blocks


class EvictionPolicy(Protocol):
    """An order of the cached blocks that no sequence holds.

    ``ScoredPolicy`` implements all of it, for a policy that can give each block a score.
    """

    def __len__(self) -> int:
        """Return how many blocks may be evicted."""
        ...

    def use(self, blocks: Ids, now: int, priority: Priority) -> None:
        """Note that a sequence has ended its use of these cached blocks, deepest first."""
        ...

    def free(self, blocks: Ids) -> None:
        """Note that no sequence holds these any more, deepest first: they may be evicted."""
        ...

    def hold(self, blocks: Ids) -> None:
        """Note that a sequence holds these again: they may not be evicted."""
        ...

    def drop(self, blocks: Ids) -> None:
        """Forget held blocks, whose content is cached no longer."""
        ...

    def next_time(self) -> int:
        """Return when the block that would be evicted next was used last. There is one."""
        ...

    def evict(self, count: int, *, alike: bool = False) -> Ids:
        """Take out the first ``count`` blocks of the order; fewer if there are fewer.

        With ``alike``, take out only such as one sequence used last together with the first.
        """
        ...

    def order(self) -> tuple[Ids, Times]:
        """List all blocks that may be evicted, the first to go first, and their last uses."""
        ...

    def take_out(self, blocks: Ids) -> None:
        """Evict these blocks, wherever they are in the order."""
        ...

    def rewind(self, ticks: int) -> None:
        """Set the clock back by ``ticks`` blocks computed, a multiple of 2³⁰."""
        ...

    def check(self, cached: Ids) -> None:
        """Raise AssertionError unless exactly the ``cached`` blocks may be evicted."""
        ...


@runtime_checkable
class HeedsEnds(Protocol):
    """What an eviction policy may have besides: it is told what clients know.

    A client may say that a conversation ends with a request, and may be wrong.
    """

    def end(self, blocks: Ids) -> None:
        """Note that the sequence which has just used these blocks was its conversation's last.

        Deepest first, between ``use`` and ``free``. Other sequences may use them as well.
        """
        ...


# -- ghost entries ---------------------------------------------------------------------------------

# When evicted blocks were last used: a small table that may forget.
#
# One slot of four bytes holds a 16-bit tag and a 16-bit time; a newcomer overwrites. Of a large
# cache only a sample of the blocks is remembered, chosen by content, since blocks of one prefix
# are used together: the time of a deep block says that its ancestors were used no earlier.


GhostTimes = npt.NDArray[np.int64]
_NO_TIMES: GhostTimes = np.empty(0, np.int64)
_SLOTS_A_BLOCK = 2
_LEAST_SLOTS = 1 << 14
_GHOST_REACH = 8  # a time is believed so many times the number of blocks back
_TICKS = 1024  # of the coarse clock, in the time that as many blocks are computed as there are
_LOW = np.uint32(0xFFFF)  # of a slot: the time
_LEAST_TAG = np.uint32(1 << 16)  # … above it the tag: the upper half of a print, and never zero
_SPREAD, _SHIFT = np.uint32(0x9E3779B1), np.uint32(4)


class Ghosts:
    """Last uses of evicted blocks, by fingerprint. Times count blocks computed."""

    def __init__(self, num_blocks: int) -> None:
        slots = max(_LEAST_SLOTS, 1 << (_SLOTS_A_BLOCK * num_blocks - 1).bit_length())
        self._slots = np.zeros(slots, np.uint32)
        self._last = np.uint32(slots - 1)  # there are a power of two of them
        # A power of two, so that the clock can be set back by one without moving the ticks.
        self.tick = 1 << max(0, min(14, (num_blocks // _TICKS).bit_length()))
        self.reach = _GHOST_REACH * num_blocks
        self.one_in = 1 << max(0, (self.reach // slots).bit_length() - 1)
        self._mask = np.uint32(self.one_in - 1)  # prints with none of these bits are remembered
        self._had_ended: Bools | None = None  # of slots, once clients say so

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + (0 if self._had_ended is None else self._had_ended.nbytes)

    def remember(self, prints: Prints, times: Times, have_ended: Bools | None = None) -> None:
        """Note when blocks of these contents, which are evicted, were used last.

        ``have_ended``: which of them belong to a conversation that is said to have ended.
        """
        if self._mask:
            sampled = (prints & self._mask == 0).nonzero()[0]
            prints, times = prints[sampled], times[sampled]
            have_ended = None if have_ended is None else have_ended[sampled]
        ticks = (times // self.tick).astype(np.uint32) & _LOW
        places = self._place(prints)
        self._slots[places] = (prints | _LEAST_TAG) & ~_LOW | ticks
        if have_ended is not None:
            if self._had_ended is None:
                self._had_ended = np.zeros(len(self._slots), bool)
            self._had_ended[places] = have_ended

    def had_ended(self, prints: Prints) -> Bools:
        """Tell which of these contents, which are known, belonged to what is said to have ended."""
        if self._had_ended is None:
            return np.zeros(len(prints), bool)
        found: Bools = self._had_ended[self._place(prints)]
        return found

    def recall(self, prints: Prints, now: int) -> tuple[Ids, GhostTimes]:
        """Return which of these contents are known, by place, and about when each was last used."""
        sampled: Ids | None = None
        if self._mask:
            sampled = (prints & self._mask == 0).nonzero()[0]
            prints = prints[sampled]
        found = self._slots[self._place(prints)]
        known = ((found ^ (prints | _LEAST_TAG)) <= _LOW).nonzero()[0]  # no tag is zero
        if not len(known):
            return NO_IDS, _NO_TIMES
        ages = ((now // self.tick - found[known].astype(np.int64)) & 0xFFFF) * self.tick
        near = (ages <= self.reach).nonzero()[0]
        known = known[near]
        times = np.maximum(now - ages[near], 0)
        return known if sampled is None else sampled[known], times

    def keys(self, prints: Prints) -> tuple[Ids, Prints, Prints]:
        """Return which of these contents are remembered at all, by place, their slots and tags."""
        sampled = (prints & self._mask == 0).nonzero()[0]
        prints = prints[sampled]
        return sampled, self._place(prints), (prints | _LEAST_TAG) & ~_LOW

    def _place(self, prints: Prints) -> npt.NDArray[np.uint32]:
        places: npt.NDArray[np.uint32] = prints * _SPREAD >> _SHIFT & self._last
        return places


# -- orders of past uses ---------------------------------------------------------------------------


_PRIORITY = 1 << 48  # one step of priority outweighs any time
_LEAST_IMPORTANT = 127
_BEFORE_ALL = 1 << 32  # more than any time


class Recency:
    """Blocks in an order of their past uses (``Order``).

    ``LAST`` (LRU) is right where what was used just now comes back soon. ``LAST_BUT_ONE`` (LRU-2)
    is right where much comes once and never again: a block that was used once is worth less than
    any that came back, so a flood of new prompts evicts itself. To tell the two apart it must know
    when a block that is gone was last used (``ghosts``). ``NEWCOMERS`` (BIP) is right where the
    same prompts come round and round, and are too many for the pool: it keeps some of them, where
    the others keep each until right before it comes again.

    ``ENDED_FIRST`` and ``ENDED_EARLIER`` are for blocks of conversations of which clients say that
    they have ended. What others use too has not: it is the blocks behind the last place at which
    prompts part.

    Which of them is right changes with the traffic and the size of the cache. With ``trials`` all
    are watched on a sample, and one that finds less than LRU loses its seat.

    Source: LRU-2, O'Neil, O'Neil and Weikum 1993; bimodal insertion, Qureshi et al. 2007.
    """

    def __init__(
        self, pool: PolicyPool, *, order: Order = Order.LAST, with_trials: bool = False
    ) -> None:
        self._order = order
        self._block_tokens = pool.block_tokens
        self._prints_of = pool.prints_of
        self._trials: OrderTrials | None = None
        self._ghosts: Ghosts | None = None
        if with_trials or order is Order.LAST_BUT_ONE:
            self._ghosts = Ghosts(pool.num_blocks)
        if with_trials:
            assert self._ghosts is not None
            self._trials = OrderTrials(
                pool.num_blocks, tick=self._ghosts.tick, gap=self._ghosts.one_in
            )
        num_ids = pool.num_ids
        self._runs = EvictionQueue(num_ids)
        self._last = np.full(num_ids, NEVER, np.int32)
        self._before = self._last if self._ghosts is None else self._last.copy()
        self._is_new = np.zeros(num_ids, bool)  # not hit yet, and not one of those that stay
        self._num_misses = 0
        self._ends: _Ends | None = None  # from the first conversation that is said to end
        self._ended_by = {
            Order.ENDED_EARLIER: pool.num_blocks,  # … on the clock, which counts blocks computed
            Order.ENDED_FIRST: _BEFORE_ALL,
        }
        self._priority = np.zeros(num_ids, np.int8)
        self._has_priorities = False

    def __len__(self) -> int:
        return len(self._runs)

    def use(self, blocks: Ids, now: int, priority: Priority) -> None:
        last = self._last[blocks]
        self._last[blocks] = now
        is_fresh = last == NEVER
        fresh = is_fresh.nonzero()[0]
        if self._has_priorities or not isinstance(priority, int) or priority:
            self._has_priorities = True
            self._priority[blocks[fresh]] = _LEAST_IMPORTANT
            wanted = np.broadcast_to(np.int8(priority), blocks.shape)
            np.minimum.at(self._priority, blocks, wanted)
        if self._trials is not None or self._order is Order.NEWCOMERS:
            self._num_misses += len(fresh) > 0
            stays = self._num_misses % KEEP_ONE_IN == 0
            self._is_new[blocks] = False if stays else is_fresh
        had_ended = None
        if self._ends is not None:
            had_ended = self._ends.have_ended[blocks] & ~is_fresh
            self._ends.use(blocks, is_fresh)
        if self._ghosts is None:
            return
        prints = self._prints_of(blocks)
        if len(fresh):
            known, times = self._ghosts.recall(prints[fresh], now)
            if len(known):
                known = fresh[known]
                last[known] = times
                # An ancestor was used whenever its descendant was, even if its ghost is forgotten.
                own, last = last, np.maximum.accumulate(last)
                if had_ended is not None:
                    had_ended[known] = self._ghosts.had_ended(prints[known])
                    own_places = np.where(own == last, np.arange(len(last)), 0)
                    had_ended = had_ended[np.maximum.accumulate(own_places)]
        self._before[blocks] = last
        if self._trials is not None:
            sampled = self._trials.sampled(prints)
            runs = runs_of(last, had_ended, self._ghosts.tick)
            order = self._trials.watch(sampled, runs, len(blocks) - len(fresh), now)
            if order is not self._order:
                self._order = order
                self._reorder()

    def end(self, blocks: Ids) -> None:
        """Note that a conversation has ended, if that may count: LRU stays LRU."""
        if self._trials is None and self._order not in self._ended_by:
            return
        if self._ends is None:
            self._ends = _Ends(self._last != NEVER)
        num_ended = self._ends.end(blocks)
        if self._trials is not None:
            self._trials.end(num_ended)

    def evidence(self) -> Evidence | None:
        """Return what trials of orders have found; None if none are tried."""
        return None if self._trials is None else self._trials.evidence("choice", self._block_tokens)

    def hear(self, others: Evidence | None) -> None:
        """Take what trials in other pools have found, if orders are tried."""
        if self._trials is not None:
            self._trials.hear(others)

    def free(self, blocks: Ids) -> None:
        past = self._before if self._order is Order.LAST_BUT_ONE else self._last
        scores = past[blocks]
        if self._order is Order.NEWCOMERS:
            scores = np.where(self._is_new[blocks], -scores, scores)
        elif self._order in self._ended_by and self._ends is not None:
            ended = self._ends.have_ended[blocks]
            scores = scores - ended * np.int64(self._ended_by[self._order])
        if self._has_priorities:
            scores = scores - self._priority[blocks].astype(np.int64) * _PRIORITY
        if not self._has_priorities and scores[0] == scores[-1]:  # along a path they only rise
            self._runs.put(int(scores[0]), blocks)
            return
        ends = (scores[1:] != scores[:-1]).nonzero()[0] + 1
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
        """Set the clock back, before it outgrows 32 bits; older times become 0."""
        for times in (self._last, self._before) if self._ghosts is not None else (self._last,):
            known = times != NEVER
            times[known] = np.maximum(times[known] - ticks, 0)
        if self._trials is not None:
            self._trials.rewind(ticks)
        self._reorder()

    def check(self, cached: Ids) -> None:
        self._runs.check(cached)

    def _forget(self, blocks: Ids) -> None:
        """Keep at most a ghost of evicted blocks."""
        if self._ghosts is not None:
            have_ended = None if self._ends is None else self._ends.have_ended[blocks]
            self._ghosts.remember(self._prints_of(blocks), self._last[blocks], have_ended)
        self._last[blocks] = NEVER

    def _reorder(self) -> None:
        """Put the free blocks in again: by another use, or at other times."""
        runs, self._runs = self._runs.runs(), EvictionQueue(len(self._last))
        for blocks in runs:
            self.free(blocks)


class _Ends:
    """Which blocks belong to one conversation alone, and which of these have ended."""

    def __init__(self, are_cached: Bools) -> None:
        """``are_cached``: what is known of whom they belong to is that it is not known."""
        self._are_shared = are_cached.copy()
        self._have_below = are_cached.copy()  # whether a prompt went on behind a block
        self.have_ended = np.zeros_like(are_cached)

    def use(self, blocks: Ids, are_fresh: Bools) -> None:
        """Note a sequence's use of blocks, deepest first: of the fresh ones it is the first."""
        self.have_ended[blocks] = False
        fresh = blocks[are_fresh]
        self._are_shared[fresh] = self._have_below[fresh] = False
        num_fresh = len(fresh)
        if num_fresh < len(blocks):
            # The deepest that was there before: prompts part behind it if another went on there.
            # If one is missing in between, it is not known who went on where.
            first = 0 if not are_fresh[:num_fresh].all() else num_fresh
            if first < num_fresh or self._have_below[blocks[first]]:
                self._are_shared[blocks[first:]] = True
        self._have_below[blocks[1:]] = True

    def end(self, blocks: Ids) -> int:
        """Note that the conversation has ended. Returns: how many blocks it alone had."""
        ended = blocks[~self._are_shared[blocks]]
        self.have_ended[ended] = True
        return len(ended)


def lru(pool: PolicyPool) -> EvictionPolicy:
    """Make the policy that evicts the least recently used block."""
    return Recency(pool)


def lru2(pool: PolicyPool) -> EvictionPolicy:
    """Make the policy that evicts by the use before the last."""
    return Recency(pool, order=Order.LAST_BUT_ONE)


def bip(pool: PolicyPool) -> EvictionPolicy:
    """Make the policy that evicts what was not hit yet, the newest first."""
    return Recency(pool, order=Order.NEWCOMERS)


def choice(pool: PolicyPool) -> EvictionPolicy:
    """Make the policy that follows whichever of these finds more, and LRU in doubt."""
    return Recency(pool, with_trials=True)


MakePolicy: TypeAlias = Callable[[PolicyPool], EvictionPolicy]

DEFAULT_POLICY = "choice"
EVICTION_POLICIES: Registry[MakePolicy] = Registry(
    "eviction policy",
    "quire.eviction_policies",
    {"choice": choice, "lru": lru, "lru-2": lru2, "bip": bip},
    lambda found: None if callable(found) else f"{found!r} makes no policy: it is not callable",
)
