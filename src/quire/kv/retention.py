"""What clients ask the prefix cache to keep for a while: a policy around the pool's own.

A client may ask that the beginning of its prompt be kept for some seconds: Anthropic's
``cache_control``, OpenAI's ``prompt_cache_retention``. That is a hint and no promise. What is
*retained* is not put to the eviction policy until its time is over, so that the rest goes first. It
goes earlier where a pool has nothing else to give, and where clients ask for more than a share of
the pool: then the client that has most there gives way, what it asked for longest ago first. So the
rest of the pool is as it would be without any client that asks.

A pool gets such a policy with the first request that asks (``BlockPool.retain``).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from quire.kv.eviction import EvictionPolicy, HeedsEnds, Priority, Times
from quire.kv.eviction_queue import NO_IDS, Ids
from quire.kv.evidence import Evidence, SharesEvidence

Clock: TypeAlias = Callable[[], float]  # seconds
Seconds: TypeAlias = npt.NDArray[np.float64]
_NOT_RETAINED = 0
# For a last use of what is retained: other groups of the pool give what they have before it.
_AFTER_ALL = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a client asks to be kept of a sequence's prompt."""

    owner: str  # who asks: a tenant, whose blocks no other tenant finds
    marks: tuple[tuple[int, float], ...]  # the first so many tokens, for so many seconds each
    clock: Clock

    def seconds(self, num_blocks: int, block_size: int) -> Seconds:
        """Return for how long each of the prompt's first whole blocks is asked for: 0 if not."""
        found = np.zeros(num_blocks)
        for num_tokens, seconds in self.marks:
            columns = slice(0, num_tokens // block_size)
            np.maximum(found[columns], seconds, out=found[columns])
        return found


@runtime_checkable
class HeedsRetention(Protocol):
    """What an eviction policy may have besides: it is told which blocks clients ask to keep."""

    def retain(self, blocks: Ids, seconds: Seconds) -> None:
        """Note for how many seconds from now on clients want these kept, which were used just now.

        Deepest first, between ``use`` and ``free``, which comes when that time is over.
        """
        ...


@dataclass(slots=True, eq=False)
class _Grant:
    """Blocks that one request asked for. They leave it for a later one, or when they give way."""

    serial: int
    owner: str
    blocks: Ids  # deepest first
    num_left: int


@dataclass(slots=True, eq=False)
class _Owner:
    num_blocks: int = 0
    grants: dict[int, _Grant] = field(default_factory=dict)  # by serial: the oldest comes first


class RetainedBlocks(EvictionPolicy):
    """An eviction policy that holds back what clients ask for, up to a ``limit``: none at first.

    A block is retained as long as its ancestors are, or less long: a client that asks for it asks
    for them.
    """

    def __init__(self, policy: EvictionPolicy, *, num_ids: int, clock: Clock) -> None:
        """``policy``: it knows all cached blocks already."""
        self._policy, self._clock = policy, clock
        # Told once: to ask whether a policy keeps a protocol takes nearly as long as a use.
        self._heeds_ends = policy if isinstance(policy, HeedsEnds) else None
        self._heeds_retention = policy if isinstance(policy, HeedsRetention) else None
        self._shares = policy if isinstance(policy, SharesEvidence) else None
        self._most = self.num_retained = 0  # with those that sequences hold
        self._serial = _NOT_RETAINED
        self._grant_of = np.full(num_ids, _NOT_RETAINED, np.int64)  # serials
        self._until_s = np.zeros(num_ids)  # by the clock; of retained ones
        self._are_free = np.zeros(num_ids, bool)  # retained, and no sequence holds them
        self._num_free = 0
        self._grants: dict[int, _Grant] = {}  # by serial: the oldest comes first
        self._owners: dict[str, _Owner] = {}
        self._ends: list[tuple[float, int]] = []  # a heap: when a block of a grant may lapse

    def limit(self, most: int) -> None:
        """Hold back at most so many blocks from now on."""
        self._most = most
        while (excess := self.num_retained - most) > 0:
            largest = max(self._owners.values(), key=lambda each: each.num_blocks)
            self._give_way(next(iter(largest.grants.values())), excess)

    def retain(
        self, blocks: Ids, are_free: npt.NDArray[np.bool_], seconds: Seconds, owner: str
    ) -> int:
        """Hold back cached blocks (i64[n], distinct, deepest first) for ``seconds`` (f64[n]) each.

        ``are_free`` (bool[n]) tells which of them no sequence holds. Returns: how many of the last
        ones are retained now.
        """
        self._lapse()
        if not len(blocks):
            return 0
        now_s = self._clock()
        before = self._grant_of[blocks] != _NOT_RETAINED
        self._until_s[blocks] = np.maximum(
            np.where(before, self._until_s[blocks], 0), now_s + seconds
        )
        self._leave_grants(blocks[before])
        fresh = blocks[are_free & ~before]
        if len(fresh):
            self._policy.hold(fresh)
            self._are_free[fresh] = True
            self._num_free += len(fresh)
        self._serial += 1
        grant = _Grant(self._serial, owner, blocks, len(blocks))
        self._grant_of[blocks] = grant.serial
        self._grants[grant.serial] = grant
        of_owner = self._owners.setdefault(owner, _Owner())
        of_owner.grants[grant.serial] = grant
        of_owner.num_blocks += len(blocks)
        self.num_retained += len(blocks)
        heapq.heappush(self._ends, (float(self._until_s[blocks].min()), grant.serial))
        self.limit(self._most)
        return grant.num_left

    # -- the interface of a policy -----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._policy) + self._num_free

    def use(self, blocks: Ids, now: int, priority: Priority) -> None:
        self._policy.use(blocks, now, priority)
        if self._grants and self._heeds_retention is not None:
            retained = blocks[self._grant_of[blocks] != _NOT_RETAINED]
            if len(retained):
                self._heeds_retention.retain(retained, self._until_s[retained] - self._clock())

    def end(self, blocks: Ids) -> None:
        """Note that a conversation has ended, if the policy heeds that."""
        if self._heeds_ends is not None:
            self._heeds_ends.end(blocks)

    def free(self, blocks: Ids) -> None:
        if self._grants:
            are_retained = self._grant_of[blocks] != _NOT_RETAINED
            retained, blocks = blocks[are_retained], blocks[~are_retained]
            self._are_free[retained] = True
            self._num_free += len(retained)
        if len(blocks):
            self._policy.free(blocks)

    def hold(self, blocks: Ids) -> None:
        if self._num_free:
            are_retained = self._are_free[blocks]
            retained, blocks = blocks[are_retained], blocks[~are_retained]
            self._are_free[retained] = False
            self._num_free -= len(retained)
        if len(blocks):
            self._policy.hold(blocks)

    def drop(self, blocks: Ids) -> None:
        self._release(blocks[self._grant_of[blocks] != _NOT_RETAINED])
        self._policy.drop(blocks)

    def next_time(self) -> int:
        self._lapse()
        if len(self._policy):
            return self._policy.next_time()
        return _AFTER_ALL

    def evidence(self) -> Evidence | None:
        return None if self._shares is None else self._shares.evidence()

    def hear(self, others: Evidence | None) -> None:
        if self._shares is not None:
            self._shares.hear(others)

    def evict(self, count: int, *, alike: bool = False) -> Ids:
        self._lapse()
        found = list[Ids]()
        while count:
            if not len(self._policy):
                if not self._num_free:
                    break
                self._give_up_oldest()
            found.append(self._policy.evict(count, alike=alike))
            count -= len(found[-1])
            if alike or not len(found[-1]):
                break
        return found[0] if len(found) == 1 else np.concatenate([NO_IDS, *found])

    def order(self) -> tuple[Ids, Times]:
        self._lapse()
        blocks, times = self._policy.order()
        if not self._num_free:
            return blocks, times
        retained = self._retained_in_order()
        last = np.full(len(retained), _AFTER_ALL, np.int32)
        return np.concatenate([blocks, retained]), np.concatenate([times, last])

    def take_out(self, blocks: Ids) -> None:
        self._release(blocks[self._are_free[blocks]])
        self._policy.take_out(blocks)

    def rewind(self, ticks: int) -> None:
        self._policy.rewind(ticks)

    def check(self, cached: Ids) -> None:
        free = self._are_free.nonzero()[0]
        assert len(free) == self._num_free, "the free retained blocks are miscounted"
        assert (self._grant_of[free] != _NOT_RETAINED).all(), "a free block has no grant"
        assert np.isin(free, cached).all(), "a retained block is not cached"
        self._policy.check(np.setdiff1d(cached, free, assume_unique=True))
        serials, counts = np.unique(
            self._grant_of[self._grant_of != _NOT_RETAINED], return_counts=True
        )
        found = dict(zip(serials.tolist(), counts.tolist(), strict=True))
        assert found == {each.serial: each.num_left for each in self._grants.values()}
        for name, owner in self._owners.items():
            assert owner.grants == {k: v for k, v in self._grants.items() if v.owner == name}
            assert owner.num_blocks == sum(each.num_left for each in owner.grants.values())
            assert owner.num_blocks, "an owner has nothing"
        assert self.num_retained == sum(each.num_left for each in self._grants.values())
        assert self.num_retained <= self._most, "more is retained than the share of the pool"

    # -- what is retained no longer ----------------------------------------------------------------

    def _lapse(self) -> None:
        """Put to the policy what has been retained for as long as it was asked for."""
        if not self._ends:
            return
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            _, serial = heapq.heappop(self._ends)
            grant = self._grants.get(serial)
            if grant is None:
                continue
            blocks = self._left_of(grant)
            until_s = self._until_s[blocks]
            rest = until_s[until_s > now_s]
            if len(rest):
                heapq.heappush(self._ends, (float(rest.min()), serial))
            self._release(blocks[until_s <= now_s])

    def _give_way(self, grant: _Grant, count: int) -> None:
        """Put the deepest blocks of a grant to the policy, up to a count."""
        self._release(self._left_of(grant)[:count])

    def _give_up_oldest(self) -> None:
        """Put the free blocks of the oldest grant that has any to the policy. There are some."""
        for grant in self._grants.values():
            blocks = self._left_of(grant)
            free = blocks[self._are_free[blocks]]
            if len(free):
                self._release(free)
                return

    def _left_of(self, grant: _Grant) -> Ids:
        left: Ids = grant.blocks[self._grant_of[grant.blocks] == grant.serial]
        return left

    def _retained_in_order(self) -> Ids:
        """List the free retained blocks, those that would be given up first first."""
        every = np.concatenate([NO_IDS, *map(self._left_of, self._grants.values())])
        free: Ids = every[self._are_free[every]]
        return free

    def _release(self, blocks: Ids) -> None:
        """Retain blocks (deepest first) no longer; the free ones are the policy's."""
        if not len(blocks):
            return
        self._leave_grants(blocks)
        self._grant_of[blocks] = _NOT_RETAINED
        free = blocks[self._are_free[blocks]]
        if len(free):
            self._are_free[free] = False
            self._num_free -= len(free)
            self._policy.free(free)

    def _leave_grants(self, blocks: Ids) -> None:
        serials, counts = np.unique(self._grant_of[blocks], return_counts=True)
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            grant = self._grants[serial]
            owner = self._owners[grant.owner]
            grant.num_left -= count
            owner.num_blocks -= count
            self.num_retained -= count
            if not grant.num_left:
                del self._grants[serial], owner.grants[serial]
                if not owner.num_blocks:
                    del self._owners[grant.owner]
