"""Eviction by a score: the base class of policies that judge one block at a time, in plain Python.

A subclass says what a block is worth, and the block that is worth least goes first. The rest is
done here: a heap of the blocks without cached descendants (so no block goes before one that
depends on it, whatever the scores are), what is known of each block, priorities, and the clock.

A block is scored when the last sequence that holds it releases it.
"""

import heapq
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias, final

import numpy as np

from quire.kv.eviction import EvictionPolicy, PolicyPool, Priority, Times
from quire.kv.eviction_queue import Ids
from quire.kv.retention import Seconds

Score: TypeAlias = float | tuple[float, ...]  # whatever a policy returns, all of one kind
_SLACK = 64  # stale entries of the heap that are not worth a sweep


@dataclass(slots=True, kw_only=True, eq=False)
class CachedBlock:
    """What a policy knows of a block. A policy only reads it; new hints become fields here.

    Times count blocks that the pool has handed out, and releases; they never go back.
    """

    block: int  # its id: the same id has other content after an eviction
    depth: int  # blocks before it in its prompt
    num_tokens: int
    first_used: int  # when the first sequence that used it released it
    last_used: int
    used_before: int | None = None  # the use before the last one
    hits: int = 0  # uses after the first: by later sequences, and by forks and beams
    priority: int  # the smallest of the requests that used it, -128 to 127: of the most important
    ended: bool = False  # whether a client says that the last conversation that used it has ended
    retained_s: float = 0.0  # for how long after its last use clients wanted it kept; 0: not

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prompt up to the block's end."""
        return (self.depth + 1) * self.num_tokens

    @property
    def tokens_saved(self) -> int:
        """Tokens that sequences found here and did not compute."""
        return self.hits * self.num_tokens


@dataclass(slots=True, kw_only=True, eq=False)
class _TrackedBlock(CachedBlock):
    """A cached block, and where it is in the tree of prefixes and in the heap."""

    prefix: int  # that ends in it
    parent: int  # the prefix right before it
    is_free: bool = False
    score: Score = 0.0  # while it is free
    serial: int = 0  # of its valid entry in the heap


_Entry: TypeAlias = tuple[int, Score, int, _TrackedBlock]  # least important first; then the score


class ScoredPolicy(EvictionPolicy):
    """Evicts the block with the lowest score, among the least important ones without descendants.

    A subclass implements ``score``, and may implement ``evicted``.
    """

    def __init__(self, pool: PolicyPool) -> None:
        self._pool = pool
        self._known: dict[int, _TrackedBlock] = {}  # by id: used before, and still cached
        self._at: dict[int, _TrackedBlock] = {}  # the same by prefix
        self._num_children: dict[int, int] = {}  # of a prefix: known blocks right after it
        self._heap: list[_Entry] = []
        self._serial = self._num_free = 0
        self._now = self._rewound = 0  # the clock without what it was set back by

    @abstractmethod
    def score(self, block: CachedBlock, now: int) -> Score:
        """Return what the block is worth: the lowest goes first, of equal ones the oldest entry.

        All scores are numbers, or all are tuples of numbers. ``free`` raises ValueError for NaN and
        for what is neither, such as None. The score holds until a sequence uses the block again.
        """
        ...

    def evicted(self, block: CachedBlock, score: Score) -> None:
        """Note that a block is gone, with the score that it had. By default this does nothing."""

    # -- the interface of the pool ---------------------------------------------------------------

    @final
    def __len__(self) -> int:
        return self._num_free

    @final
    def use(self, blocks: Ids, now: int, priority: Priority) -> None:
        self._now = now = now + self._rewound
        priorities = np.broadcast_to(priority, blocks.shape).tolist()
        ids = blocks.tolist()
        fresh = [block for block in dict.fromkeys(ids) if block not in self._known]
        places: dict[int, tuple[int, int, int]] = {}
        if fresh:
            depths, prefixes, parents = self._pool.places_of(np.array(fresh, np.intp))
            columns = zip(depths, prefixes, parents, strict=True)
            places = dict(zip(fresh, columns, strict=True))
        for block, important in zip(reversed(ids), reversed(priorities), strict=True):
            found = self._known.get(block)
            if found is None:
                self._enter(block, *places[block], important)
                continue
            found.hits += 1
            found.ended, found.retained_s = False, 0.0
            found.used_before, found.last_used = found.last_used, now
            found.priority = min(found.priority, important)

    @final
    def end(self, blocks: Ids) -> None:
        for block in blocks.tolist():
            self._known[block].ended = True

    @final
    def retain(self, blocks: Ids, seconds: Seconds) -> None:
        for block, each in zip(blocks.tolist(), seconds.tolist(), strict=True):
            self._known[block].retained_s = each

    @final
    def free(self, blocks: Ids) -> None:
        self._num_free += len(blocks)
        for block in blocks.tolist():
            found = self._known[block]
            found.is_free, found.score = True, self.score(found, self._now)
            if not _is_score(found.score):
                raise ValueError(
                    f"{type(self).__name__}.score gives {found.score!r} for {found}: a score is a "
                    "number or a tuple of numbers, and NaN is none"
                )
            if found.prefix not in self._num_children:
                self._push(found)

    @final
    def hold(self, blocks: Ids) -> None:
        self._num_free -= len(blocks)
        for block in blocks.tolist():
            found = self._known[block]
            found.is_free, found.serial = False, 0

    @final
    def drop(self, blocks: Ids) -> None:
        for block in blocks.tolist():
            if block in self._known:  # a sequence may hold it for the first time
                self._remove(self._known[block])

    @final
    def next_time(self) -> int:
        return self._time(self._first())

    @final
    def evict(self, count: int, *, alike: bool = False) -> Ids:
        taken: list[int] = []
        time = None
        while self._num_free and len(taken) < count:
            found = self._first()
            if alike and time not in (None, found.last_used):
                break
            heapq.heappop(self._heap)
            time = found.last_used
            taken.append(found.block)
            self._take_out(found)
        return np.array(taken, np.intp)

    @final
    def order(self) -> tuple[Ids, Times]:
        heap = [entry for entry in self._heap if _is_valid(entry)]
        heapq.heapify(heap)
        left: dict[int, int] = {}  # children of a prefix that the order has not come to
        found: dict[int, _TrackedBlock] = {}
        while heap:
            each = heapq.heappop(heap)[-1]
            found[each.block] = each
            above = self._at.get(each.parent)
            left[each.parent] = left.get(each.parent, self._num_children[each.parent]) - 1
            if not left[each.parent] and above is not None and above.is_free and not above.serial:
                heapq.heappush(heap, _entry(above, self._serial + len(found)))
        rest = [each for each in self._known.values() if each.is_free and each.block not in found]
        blocks = [*found.values(), *rest]
        ids = np.array([each.block for each in blocks], np.intp)
        return ids, np.array([self._time(each) for each in blocks], np.int32)

    @final
    def take_out(self, blocks: Ids) -> None:
        for block in blocks.tolist():
            self._take_out(self._known[block])

    @final
    def rewind(self, ticks: int) -> None:
        self._rewound += ticks

    @final
    def check(self, cached: Ids) -> None:
        free = sorted(each.block for each in self._known.values() if each.is_free)
        assert free == cached.tolist(), "the free blocks are not those that are cached"
        assert len(free) == self._num_free, "the free blocks are miscounted"
        assert self._num_children == Counter(each.parent for each in self._known.values())
        assert self._at == {each.prefix: each for each in self._known.values()}

    # -- the heap --------------------------------------------------------------------------------

    def _time(self, block: CachedBlock) -> int:
        """Return its last use on the pool's clock."""
        return max(0, block.last_used - self._rewound)

    def _push(self, block: _TrackedBlock) -> None:
        if len(self._heap) > 2 * self._num_free + _SLACK:
            self._heap = [entry for entry in self._heap if _is_valid(entry)]
            heapq.heapify(self._heap)
        self._serial += 1
        block.serial = self._serial
        heapq.heappush(self._heap, _entry(block, self._serial))

    def _first(self) -> _TrackedBlock:
        """Find the block that goes next, the first in the heap. There is one."""
        while self._heap and not _is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:  # what is free has descendants that sequences hold, beside copies of it
            for block in self._known.values():
                if block.is_free:
                    self._push(block)
        return self._heap[0][-1]

    def _take_out(self, block: _TrackedBlock) -> None:
        self._num_free -= 1
        self._remove(block)
        self.evicted(block, block.score)

    def _enter(self, block: int, depth: int, prefix: int, parent: int, priority: int) -> None:
        """Track a block that a sequence has used for the first time."""
        found = _TrackedBlock(
            block=block,
            depth=depth,
            num_tokens=self._pool.block_tokens,
            first_used=self._now,
            last_used=self._now,
            priority=priority,
            prefix=prefix,
            parent=parent,
        )
        self._known[block] = self._at[prefix] = found
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        if (above := self._at.get(parent)) is not None:
            above.serial = 0  # it waits for this one, should it be free

    def _remove(self, block: _TrackedBlock) -> None:
        """Forget a block; the one right before it may be the next to go."""
        del self._known[block.block], self._at[block.prefix]
        block.is_free, block.serial = False, 0
        self._num_children[block.parent] -= 1
        if not self._num_children[block.parent]:
            del self._num_children[block.parent]
            above = self._at.get(block.parent)
            if above is not None and above.is_free and not above.serial:
                self._push(above)


def _is_score(score: object) -> bool:
    """Tell whether scores like this one have an order."""
    parts = score if isinstance(score, tuple) else (score,)
    return all(isinstance(part, Real) and part == part for part in parts)  # NaN is not itself


def _entry(block: _TrackedBlock, serial: int) -> _Entry:
    return -block.priority, block.score, serial, block


def _is_valid(entry: _Entry) -> bool:
    """Tell whether a sequence has not used the block since, and the block is still cached."""
    return entry[3].serial == entry[2]
