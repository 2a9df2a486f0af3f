"""The block pools of all groups under one budget of bytes, and what happens to their pages.

Each group has blocks of its own size and its own address space; all groups share the bytes. So no
group's block is padded to another's, and no group keeps memory that another could use. The pools
make room by evicting cached blocks, the least recently used of all groups first. Pages that stay
in their group go from an evicted block to a new one without a system call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError
from quire.kv.eviction import (
    EvictionPolicy,
    HeedsEnds,
    MakePolicy,
    PolicyPool,
    Prints,
    Priority,
    Times,
    lru,
)
from quire.kv.eviction_queue import NO_IDS, Ids
from quire.kv.prefix_index import PrefixIndex
from quire.kv.retention import Clock, RetainedBlocks, Seconds
from quire.kv.storage_ops import Commit, Copy, Release, StorageOp
from quire.units import ceil_div

# -- one group -------------------------------------------------------------------------------------

# The blocks of one group: who holds them, which are only cached, and which are empty.
#
# A block is *held* by sequences (``refs`` counts them), *cached* when none does but the prefix
# index still finds its content, or *empty*. A free block, cached or empty, is not the same as an
# unused page: pages are committed for a *granule* (the fewest blocks that fill whole pages) and
# given back when all blocks of the granule are empty.
#
# Every method takes a batch of ids and costs a few numpy operations at any size of the pool.


# -- free list -------------------------------------------------------------------------------------

# Which ids of a pool are vacant, and which of them to take so that neighbours stay together.
#
# A table's blocks are read one after the other, and faster where they lie side by side: a sequence
# that grows is given the id after its last one if that is vacant. So that it often is, a new run
# begins at an *extent* (32 ids from a multiple of 32 on) that is vacant as a whole, and where
# there is none, in the middle of what is left of one. Such places are looked up for many runs at a
# time, and again when a share of the ids has changed hands. Where there are none, what became
# vacant last is taken first.
#
# All this is about addresses, which cost nothing: what has pages is the pool's business.


_EXTENT = 32  # of 32 blocks side by side 31 have their neighbour: 97 %
_SLACK = 64  # stale entries that are not worth a sweep
_SHARE = 32  # one in so many ids: at least as many have changed hands between two look-ups


class FreeList:
    """Ids 0 … count - 1, all vacant at first: a stack, from which any may also be taken."""

    def __init__(self, count: int) -> None:
        # An id that is taken from the middle leaves its entry behind. It counts again when the id
        # is vacant again, but then there is another one above it, which comes first.
        self._stack = np.empty(count + count // 32 + _SLACK, np.int32)
        self._vacant = np.zeros(count + 1, bool)  # of ids; never of the one after the last
        self._vacant_after = self._vacant[1:]  # of the ids after these; after -1: False
        self._len = self._top = 0
        self._share = len(self._vacant) // _SHARE
        self._starts, self._lengths = NO_IDS, NO_IDS  # where runs may begin
        self._num_changed = 0  # ids put and taken since these were looked up
        self.put(np.arange(count - 1, -1, -1))

    def __len__(self) -> int:
        return self._len

    def are_in(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Tell which ids (i64[n]) are vacant: bool[n]."""
        vacant: npt.NDArray[np.bool_] = self._vacant[ids]
        return vacant

    def put(self, ids: Ids) -> None:
        """Note that ids (i64[n]) are vacant again."""
        stop = self._top + len(ids)
        if stop > len(self._stack):
            self._sweep()
            stop = self._top + len(ids)
        self._stack[self._top : stop] = ids
        self._vacant[ids] = True
        self._top = stop
        self._len += len(ids)
        self._num_changed += len(ids)

    def pop(self, count: int) -> Ids:
        """Take what became vacant last; at first, the lowest ids. There are as many."""
        assert count <= self._len, f"{count} ids asked, {self._len} left"
        if self._top == self._len:
            self._top -= count
            ids = self._stack[self._top : self._top + count][::-1].astype(np.intp)
            return self._use(ids)
        found: list[Ids] = []
        while count:
            bottom = max(0, self._top - max(count, 16))
            places, ids = self._counting(bottom)
            found.append(self._use(ids[:count]))
            count -= len(found[-1])
            self._top = bottom if count else int(places[len(found[-1]) - 1])
        if not self._len:
            self._top = 0
        return _joined(found)

    def take(self, after: Ids) -> Ids:
        """Take one for each entry of ``after``: the next id if it is vacant. There are as many.

        A negative entry goes on where the one before it has been placed.
        """
        vacant = self._vacant_after[after]
        num_vacant = int(np.count_nonzero(vacant))
        if num_vacant < len(after) and np.count_nonzero(after < 0):
            return self._take_runs(after, num_vacant)
        ids = after + 1
        if num_vacant and len(set(after.tolist())) < len(after):
            # Those that share a block want the same one: the first of them gets it.
            first = np.zeros(len(after), bool)
            first[np.unique(after, return_index=True)[1]] = True
            vacant &= first
            num_vacant = int(np.count_nonzero(vacant))
        if num_vacant == len(ids):
            return self._use(ids)
        if num_vacant:
            self._use(ids[vacant])
        ids[~vacant] = self._begin(len(ids) - num_vacant)
        return ids

    def take_run(self, after: int, count: int) -> Ids:
        """Take so many for one sequence, in as few runs as can be had.

        The first is the id ``after`` this one if that is vacant; it may be negative. There are as
        many.
        """
        found: list[Ids] = []
        if after >= 0:
            used = (~self._vacant_after[after : after + count]).nonzero()[0]
            stop = after + 1 + (int(used[0]) if len(used) else count)
            found.append(self._use(np.arange(after + 1, stop)))
            count -= len(found[-1])
        while count and self._can_begin():
            enough, longest = 1, int(self._lengths[0])
            if longest >= count:
                ids = int(self._starts[0]) + np.arange(longest)
            else:
                ends = np.cumsum(self._lengths[:count])
                enough = int(np.searchsorted(ends, count)) + 1
                ends, lengths = ends[:enough], self._lengths[:enough]
                starts = self._starts[:enough] - ends + lengths
                ids = np.repeat(starts, lengths) + np.arange(ends[-1])
            self._starts, self._lengths = self._starts[enough:], self._lengths[enough:]
            found.append(self._use(ids[self.are_in(ids)][:count]))
            count -= len(found[-1])
        return _joined([*found, self.pop(count)] if count else found)

    def check(self) -> None:
        vacant = self._vacant.nonzero()[0]
        assert len(vacant) == self._len, "the vacant ids are miscounted"
        assert not self._vacant[-1], "there is no such id"
        assert np.isin(vacant, self._stack[: self._top]).all(), "a vacant id has no entry"

    # -- runs ------------------------------------------------------------------------------------

    def _begin(self, count: int) -> Ids:
        """Take one id each for so many new runs."""
        found: list[Ids] = []
        while count and self._can_begin():
            starts = self._starts[:count]
            self._starts, self._lengths = self._starts[count:], self._lengths[count:]
            found.append(self._use(starts[self.are_in(starts)]))
            count -= len(found[-1])
        return _joined([*found, self.pop(count)])

    def _take_runs(self, after: Ids, num_vacant: int) -> Ids:
        """Where some take several: one run after the other, behind those that take one."""
        begins = (after >= 0).nonzero()[0]
        if after[0] < 0:
            begins = np.concatenate(([0], begins))
        counts = np.concatenate((begins[1:], [len(after)])) - begins
        ids, single = np.empty_like(after), (counts == 1) & (after[begins] >= 0)
        if not num_vacant and self._len < self._share:  # there is no place behind or to begin at
            alone = single.repeat(counts)
            taken, num_alone = self.pop(len(after)), int(np.count_nonzero(alone))
            ids[alone], ids[~alone] = taken[:num_alone], taken[num_alone:]
            return ids
        if len(alone := begins[single]):
            ids[alone] = self.take(after[alone])
        runs = zip(begins[~single].tolist(), counts[~single].tolist(), strict=True)
        for begin, count in runs:
            ids[begin : begin + count] = self.take_run(int(after[begin]), count)
        return ids

    def _can_begin(self) -> bool:
        """Whether there are places for new runs. They are looked up if that is due."""
        if self._len < self._share:  # they would be too small to be worth it
            return False
        if not len(self._starts) and self._num_changed >= self._share:
            self._look_up()
        return len(self._starts) > 0

    def _look_up(self) -> None:
        """Whole extents by address, then what is left of others, the longest first."""
        ids = self._vacant.nonzero()[0]
        begins = ((np.diff(ids, prepend=-2) != 1) | (ids % _EXTENT == 0)).nonzero()[0]
        starts, lengths = ids[begins], np.diff(begins, append=len(ids))
        # Right before the rest of an extent a sequence may be growing.
        shift = np.where(starts % _EXTENT, lengths // 2, 0)
        order = np.argsort(shift - lengths, kind="stable")
        order = order[lengths[order] - shift[order] > 1]
        self._starts, self._lengths = (starts + shift)[order], (lengths - shift)[order]
        self._num_changed = 0

    # -- entries ---------------------------------------------------------------------------------

    def _use(self, ids: Ids) -> Ids:
        self._vacant[ids] = False
        self._len -= len(ids)
        self._num_changed += len(ids)
        if not self._len:  # no entry that is left counts
            self._top = 0
        return ids

    def _counting(self, bottom: int) -> tuple[Ids, Ids]:
        """Entries that count from the place ``bottom`` on, the last one first: places and ids."""
        entries = self._stack[bottom : self._top][::-1]
        places = self._vacant[entries].nonzero()[0]
        places = places[np.sort(np.unique(entries[places], return_index=True)[1])]
        return self._top - 1 - places, entries[places].astype(np.intp)

    def _sweep(self) -> None:
        """Keep the entries that count, in their order."""
        _, ids = self._counting(0)
        self._top = len(ids)
        self._stack[: self._top] = ids[::-1]


def _joined(some: list[Ids]) -> Ids:
    some = [ids for ids in some if len(ids)]
    return some[0] if len(some) == 1 else np.concatenate([NO_IDS, *some])


# -- one pool --------------------------------------------------------------------------------------


NO_NODE = -1


class BlockPool:
    """Blocks 0 … num_blocks - 1. The coordinator decides how many may be used at once."""

    def __init__(
        self, num_blocks: int, evictable: EvictionPolicy, *, granule_blocks: int = 1
    ) -> None:
        assert num_blocks % granule_blocks == 0, "the pool ends within a granule"
        self.num_blocks = num_blocks
        self.granule_blocks = granule_blocks
        self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.nodes: npt.NDArray[np.int32] = np.full(num_blocks, NO_NODE, np.int32)  # index rows
        self.evictable = evictable
        # Tests hold our own policies to what another package's is checked for.
        self._is_own_policy = type(evictable).__module__.startswith("quire.")
        self.num_held = 0  # blocks with a holder
        num_granules = num_blocks // granule_blocks
        self.closed = FreeList(num_granules)  # granules without pages
        # With one block a granule, these are not needed.
        count = num_granules if granule_blocks > 1 else 0
        self._used_in = np.zeros(count, np.int32)  # blocks of a granule that are not empty
        self._held_in = np.zeros(count, np.int32)
        self._gaps: dict[int, None] = {}  # granules with pages and an empty block, as a stack
        self._num_gaps = 0  # empty blocks in them
        self._num_held_granules = 0

    @property
    def num_cached(self) -> int:
        return len(self.evictable)

    @property
    def num_open_granules(self) -> int:
        """Granules that have pages."""
        return self.num_blocks // self.granule_blocks - len(self.closed)

    @property
    def num_held_granules(self) -> int:
        """Granules that would keep their pages if all cached blocks were evicted."""
        return self.num_held if self.granule_blocks == 1 else self._num_held_granules

    # -- questions -------------------------------------------------------------------------------

    def held_granules_after(self, released: Ids, held: Ids, num_new: int) -> int:
        """Return ``num_held_granules`` after blocks lost and gained a holder, and new ones came.

        A block is in ``released`` (i64[n]) once for each holder that it loses; those in ``held``
        (i64[m]) are distinct, and not in ``released``. With several blocks a granule this is the
        least: while there is room, the pool takes blocks for which it evicts nothing.
        """
        lost = released
        if len(released):
            lost, counts = np.unique(released, return_counts=True)
            lost = lost[self.refs[lost] == counts]
        gained = held[self.refs[held] == 0] if len(held) else held
        num_held = self.num_held - len(lost) + len(gained)
        if self.granule_blocks == 1:
            return num_held + num_new
        changed = np.concatenate([lost, gained]) // self.granule_blocks
        sign = np.repeat([-1, 1], [len(lost), len(gained)])
        granules, where = np.unique(changed, return_inverse=True)
        before = self._held_in[granules]
        after = before + np.bincount(where, sign, len(granules))
        rise = int(np.count_nonzero(after)) - int(np.count_nonzero(before))
        num_granules = self._num_held_granules + rise
        gaps = num_granules * self.granule_blocks - num_held
        return num_granules + ceil_div(max(0, num_new - gaps), self.granule_blocks)

    def num_granules_for(self, count: int) -> int:
        """Count the granules that the pool would open to take ``count`` empty blocks."""
        return ceil_div(max(0, count - self._num_gaps), self.granule_blocks)

    def cached_granules(self) -> tuple[Ids, Times]:
        """List the granules with pages of which no block is held, in the order of eviction.

        Returns: the granules (i64[n]), and when the last block of each was used (i32[n]).
        """
        blocks, times = self.evictable.order()
        if self.granule_blocks == 1:
            return blocks, times
        granules = blocks // self.granule_blocks
        free = self._held_in[granules] == 0
        granules, times = granules[free], times[free]
        last = len(granules) - 1 - np.unique(granules[::-1], return_index=True)[1]
        last.sort()
        return granules[last], times[last]

    # -- verbs -----------------------------------------------------------------------------------

    def take(self, count: int, after: Ids | int | None = None) -> tuple[Ids, Ids]:
        """Take empty blocks, one holder each. Returns: the blocks, and the granules to commit.

        ``after`` (i64[count]): the block behind which each should lie; see ``FreeList.take``. A
        number: all of them behind this block, side by side; -1 for any place. If a granule has
        several blocks, the pool fills granules first and ignores ``after``.
        """
        if self.granule_blocks == 1:
            if after is None:
                blocks = self.closed.pop(count)
            elif isinstance(after, int):
                blocks = self.closed.take_run(after, count)
            else:
                blocks = self.closed.take(after)
            opened = blocks
        else:
            in_gaps = self._take_gaps(min(count, self._num_gaps))
            missing = count - len(in_gaps)
            opened = self.closed.pop(ceil_div(missing, self.granule_blocks))
            fresh = (opened[:, None] * self.granule_blocks + np.arange(self.granule_blocks)).ravel()
            blocks = np.concatenate([in_gaps, fresh[:missing]])
            np.add.at(self._used_in, blocks // self.granule_blocks, 1)
            if len(fresh) > missing:
                self._gaps[int(opened[-1])] = None
                self._num_gaps += len(fresh) - missing
        self.refs[blocks] = 1
        self._count_held(blocks, 1)
        return blocks, opened

    def hold(self, blocks: Ids) -> None:
        """Count one more holder for each of these distinct blocks (i64[n]), which have content."""
        if not len(blocks):
            return
        refs = self.refs[blocks]
        free = blocks[refs == 0]
        if len(free):
            self.evictable.hold(free)
            self._count_held(free, 1)
        self.refs[blocks] = refs + 1

    def release(self, blocks: Ids, now: int, priority: Priority, *, ended: bool = False) -> Ids:
        """Count one holder less for blocks (i64[n]), deepest first.

        Blocks that the index knows stay cached; the others are empty. ``ended``: the conversation
        ends with the sequence that held them. Returns: granules whose pages may go (i64[m]).
        """
        # Asking for indices costs a third of asking whether there are any.
        known = (self.nodes[blocks] != NO_NODE).nonzero()[0]
        if len(known) == len(blocks):
            self.evictable.use(blocks, now, priority)
        elif len(known):
            own = priority if isinstance(priority, int) else priority[known]
            self.evictable.use(blocks[known], now, own)
        if ended and len(known) and isinstance(self.evictable, HeedsEnds):
            self.evictable.end(blocks if len(known) == len(blocks) else blocks[known])
        refs = self.refs[blocks] - 1
        if len(refs.nonzero()[0]):  # only then can one block be in the batch twice
            np.subtract.at(self.refs, blocks, 1)
            blocks = blocks[self.refs[blocks] == 0]
            blocks = blocks[np.sort(np.unique(blocks, return_index=True)[1])]
            known = (self.nodes[blocks] != NO_NODE).nonzero()[0]
        else:
            self.refs[blocks] = 0
        if not len(blocks):
            return NO_IDS
        self._count_held(blocks, -1)
        if len(known) == len(blocks):
            self.evictable.free(blocks)
            return NO_IDS
        if len(known):
            self.evictable.free(blocks[known])
            blocks = blocks[self.nodes[blocks] == NO_NODE]
        return self.empty(blocks)

    def retain(self, blocks: Ids, seconds: Seconds, owner: str, *, most: int, clock: Clock) -> int:
        """Keep what the index knows (blocks i64[n], deepest first) for so many seconds, if it can.

        ``most``: blocks that may be kept so for all clients together. Returns: how many of the last
        ones are.
        """
        if not isinstance(self.evictable, RetainedBlocks):
            self.evictable = RetainedBlocks(self.evictable, num_ids=self.num_blocks, clock=clock)
        self.evictable.limit(most)
        return self.evictable.retain(blocks, self.refs[blocks] == 0, seconds, owner)

    def limit_retention(self, most: int) -> None:
        """Keep at most so many blocks because clients ask for them."""
        if isinstance(self.evictable, RetainedBlocks):
            self.evictable.limit(most)

    def evict(self, count: int, *, alike: bool) -> tuple[Ids, Ids]:
        """Choose ``count`` cached blocks, or all, and take them out of the cache.

        Returns: the blocks and their nodes (i64[n] each). The caller hands the blocks to ``empty``.

        Raises: ConfigError for a policy that names none, or others than cached and free blocks.
        """
        some = min(1, count, self.num_cached)
        blocks = self.evictable.evict(count, alike=alike)
        if not self._is_own_policy:
            self._check_victims(blocks, some, count)
        return blocks, self._out_of_cache(blocks)

    def evict_granules(self, granules: Ids) -> tuple[Ids, Ids]:
        """Take all blocks of granules (i64[n]) that are not held out of the cache, as ``evict``."""
        blocks = granules
        if self.granule_blocks > 1:
            blocks, _ = self.evictable.order()
            blocks = blocks[np.isin(blocks // self.granule_blocks, granules)]
        self.evictable.take_out(blocks)
        return blocks, self._out_of_cache(blocks)

    def empty(self, blocks: Ids) -> Ids:
        """Drop evicted blocks (i64[n]). Returns: granules whose pages may go (i64[m]).

        The last of them will be opened first.
        """
        if self.granule_blocks == 1:
            self.closed.put(blocks)
            return blocks
        touched, counts = np.unique(blocks // self.granule_blocks, return_counts=True)
        self._used_in[touched] -= counts.astype(np.int32)
        self._num_gaps += len(blocks)
        closed: Ids = touched[self._used_in[touched] == 0][::-1]
        for granule in touched.tolist():
            if self._used_in[granule]:
                self._gaps[granule] = None
            else:
                self._gaps.pop(granule, None)
        self._num_gaps -= len(closed) * self.granule_blocks
        self.closed.put(closed)
        return closed

    def take_over(self, blocks: Ids) -> None:
        """Hold cached blocks (i64[n]) that the index has forgotten."""
        self.nodes[blocks] = NO_NODE
        self.evictable.hold(blocks)
        self.evictable.drop(blocks)
        self.refs[blocks] = 1
        self._count_held(blocks, 1)

    def forget(self, blocks: Ids) -> Ids:
        """Note that the index has forgotten blocks (i64[n]).

        Returns: granules whose pages may go (i64[m]).
        """
        self.nodes[blocks] = NO_NODE
        free = blocks[self.refs[blocks] == 0]
        self.evictable.hold(free)
        self.evictable.drop(blocks)
        return self.empty(free)

    def check(self) -> None:
        """Raise AssertionError if counts and lists contradict each other."""
        assert (self.refs >= 0).all(), "a reference count is negative"
        held = np.flatnonzero(self.refs)
        assert len(held) == self.num_held, "the held blocks are miscounted"
        cached = np.flatnonzero((self.nodes != NO_NODE) & (self.refs == 0))
        self.evictable.check(cached)
        used = np.concatenate([held, cached])
        granules = np.unique(used // self.granule_blocks)
        self.closed.check()
        assert not self.closed.are_in(granules).any(), "a used block has no pages"
        assert len(granules) == self.num_open_granules, "pages are kept for empty blocks"
        if self.granule_blocks > 1:
            num_granules = self.num_blocks // self.granule_blocks
            used_in = np.bincount(used // self.granule_blocks, minlength=num_granules)
            assert (used_in == self._used_in).all(), "used blocks are miscounted in a granule"
            held_in = np.bincount(held // self.granule_blocks, minlength=num_granules)
            assert (held_in == self._held_in).all(), "held blocks are miscounted in a granule"
            assert np.count_nonzero(held_in) == self._num_held_granules, "held granules miscounted"
            num_gaps = self.num_open_granules * self.granule_blocks - len(used)
            assert num_gaps == self._num_gaps, "the empty blocks of open granules are miscounted"
            gaps = np.flatnonzero((used_in > 0) & (used_in < self.granule_blocks))
            assert sorted(self._gaps) == gaps.tolist(), "the gaps are not where they are noted"

    def _check_victims(self, blocks: Ids, least: int, most: int) -> None:
        """Check what another package's policy evicts: a block in use must not be given away.

        Raises: ConfigError.
        """
        if (
            not least <= len(blocks) <= most
            or np.count_nonzero(self.refs[blocks])
            or np.count_nonzero(self.nodes[blocks] == NO_NODE)
            or len(set(blocks.tolist())) < len(blocks)
        ):
            raise ConfigError(
                f"eviction policy {type(self.evictable).__name__} evicts blocks {blocks.tolist()} "
                f"where at most {most} have to go: it must name one or more, each once, that are "
                f"cached and that no sequence holds; choose another prefix_caching_policy"
            )

    def _out_of_cache(self, blocks: Ids) -> Ids:
        """Note that blocks have left the cache. Returns: their nodes."""
        nodes = self.nodes[blocks].astype(np.intp)
        self.nodes[blocks] = NO_NODE
        return nodes

    # -- granules --------------------------------------------------------------------------------

    def _count_held(self, blocks: Ids, sign: int) -> None:
        self.num_held += sign * len(blocks)
        if self.granule_blocks > 1:
            granules, counts = np.unique(blocks // self.granule_blocks, return_counts=True)
            before = self._held_in[granules]
            after = before + sign * counts
            self._held_in[granules] = after
            self._num_held_granules += int(np.count_nonzero(after))
            self._num_held_granules -= int(np.count_nonzero(before))

    def _take_gaps(self, count: int) -> Ids:
        found: list[int] = []
        # A granule with a held block keeps its pages anyway: its gaps come first.
        for granule in sorted(reversed(self._gaps), key=lambda granule: not self._held_in[granule]):
            first = granule * self.granule_blocks
            inside = slice(first, first + self.granule_blocks)
            empty = (self.refs[inside] == 0) & (self.nodes[inside] == NO_NODE)
            blocks = (first + np.flatnonzero(empty)).tolist()
            if len(blocks) <= count - len(found):
                del self._gaps[granule]
            found += blocks[: count - len(found)]
            if len(found) == count:
                break
        self._num_gaps -= count
        return np.array(found, np.intp)


# -- the ceiling -----------------------------------------------------------------------------------

# How much may be committed: the capacity that sequences can count on, and what there is at present.


@dataclass(slots=True)
class Ceiling:
    """``now_bytes`` ≤ ``capacity_bytes``: below it only while the machine is short of memory.

    The capacity decides what can ever fit, the ceiling what fits at present.
    """

    capacity_bytes: int
    now_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.now_bytes = self.capacity_bytes

    def move(self, num_bytes: int, held_bytes: int, *, for_now: bool) -> int:
        """Set the ceiling, or the capacity with it, but never below ``held_bytes``.

        Returns: the ceiling in bytes.
        """
        num_bytes = max(num_bytes, held_bytes)
        if not for_now:
            self.capacity_bytes = num_bytes
        self.now_bytes = min(num_bytes, self.capacity_bytes)
        return self.now_bytes


# -- all groups ------------------------------------------------------------------------------------


_LATEST = 1 << 31  # policies keep times in 31 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """A group's blocks, as the layout has them."""

    block_bytes: int  # in all layers of the group
    num_blocks: int  # that can be used at once: a multiple of granule_blocks
    spare_blocks: int = 0  # more address space, so that neighbours find room
    granule_blocks: int = 1  # the fewest blocks that fill whole pages
    slots: int = 1  # of one block, as changes count them: its tokens; 1 for a state
    forgets: bool = False  # whether the group loses blocks while a sequence runs: windows, states

    @property
    def num_ids(self) -> int:
        """Address space, in blocks."""
        return self.num_blocks + self.spare_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What a step does to a pool; ``held_bytes_after`` tells what it costs."""

    released: Ids  # once for each holder that a block loses
    held: Ids  # distinct blocks that gain a holder, none of them among the released
    num_new: int


class Pools:
    """Blocks of every group; ``changes`` lists the operations for storage, in order."""

    def __init__(
        self,
        sizes: Sequence[PoolSize],
        capacity_bytes: int,
        index: PrefixIndex,
        make_policy: MakePolicy,
        retention_share: float = 0.0,
    ) -> None:
        """``retention_share``: of the bytes, what clients can have kept for a while."""
        self.sizes = tuple(sizes)
        self._retention_share = retention_share
        self.ceiling = Ceiling(capacity_bytes)
        self.changes: list[StorageOp] = []
        self.num_evicted_blocks = 0
        self._index = index
        self._pools = [
            BlockPool(
                size.num_ids,
                # A group that loses blocks one by one learns nothing from a prompt's return.
                (lru if size.forgets else make_policy)(
                    PolicyPool(
                        num_blocks=size.num_blocks,
                        spare_blocks=size.spare_blocks,
                        block_tokens=size.slots,
                        prints_of=partial(self._prints, n),
                        places_of=partial(self._places, n),
                    )
                ),
                granule_blocks=size.granule_blocks,
            )
            for n, size in enumerate(sizes)
        ]
        self._granule_bytes = [size.block_bytes * size.granule_blocks for size in sizes]
        self._clock = 0  # counts blocks taken, and releases

    def __getitem__(self, group: int) -> BlockPool:
        return self._pools[group]

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def committed_bytes(self) -> int:
        total = 0
        for pool, size in zip(self._pools, self._granule_bytes, strict=True):
            total += pool.num_open_granules * size
        return total

    @property
    def held_bytes(self) -> int:
        """Bytes that would stay committed if all cached blocks were evicted."""
        total = 0
        for pool, size in zip(self._pools, self._granule_bytes, strict=True):
            total += pool.num_held_granules * size
        return total

    @property
    def cached_bytes(self) -> int:
        """Bytes of blocks that no sequence holds and the index still finds."""
        sizes = zip(self._pools, self.sizes, strict=True)
        return sum(pool.num_cached * size.block_bytes for pool, size in sizes)

    def held_bytes_after(self, moves: Sequence[Moves]) -> int:
        """Return ``held_bytes`` after a step. The step fits if that is within the ceiling."""
        total = 0
        for pool, move, size in zip(self._pools, moves, self._granule_bytes, strict=True):
            total += pool.held_granules_after(move.released, move.held, move.num_new) * size
        return total

    def evicts(self, num_new: Sequence[int]) -> bool:
        """Tell whether taking ``num_new`` blocks of each group evicts cached ones."""
        return self._lacking_bytes(num_new) > 0

    def is_only_cached(self, group: int, block: Ids) -> bool:
        """Tell whether ``block`` (i64[0] or i64[1]) is a block that no sequence holds."""
        return len(block) > 0 and not self._pools[group].refs[block[0]]

    # -- verbs -----------------------------------------------------------------------------------

    def allocate(
        self, num_new: Sequence[int], after: Sequence[Ids | int | None] | None = None
    ) -> list[Ids]:
        """Take ``num_new`` blocks of each group, one holder each, evicting as needed.

        The caller knows that they fit, and may say behind which blocks they should lie, as for
        ``BlockPool.take``. Granules that go from one block to another keep their pages. Returns:
        the blocks of each group (i64[num_new[group]]).
        """
        self._clock += sum(num_new)
        closed = self._make_room(num_new)
        taken, opened = [], []
        for group, (pool, count) in enumerate(zip(self._pools, num_new, strict=True)):
            behind = None if after is None else after[group]
            blocks, granules = pool.take(count, behind) if count else (NO_IDS, NO_IDS)
            taken.append(blocks)
            opened.append(granules)
        for group, granules in closed.items():
            unused = granules[self._pools[group].closed.are_in(granules)]
            self._note(Release, group, unused)
            if len(opened[group]) == len(granules) - len(unused):  # all of them are used again
                opened[group] = NO_IDS
            else:
                fresh = set(opened[group].tolist()).difference(granules.tolist())
                opened[group] = np.fromiter(fresh, np.intp, len(fresh))
        for group, granules in enumerate(opened):
            self._note(Commit, group, granules)
        return taken

    def hold(self, group: int, blocks: Ids) -> None:
        """Count one more holder for each of these distinct blocks (i64[n])."""
        self._pools[group].hold(blocks)

    def release(
        self, group: int, blocks: Ids, priority: Priority = 0, *, ended: bool = False
    ) -> None:
        """Count one holder less for blocks (i64[n]), deepest first; known content stays cached.

        ``ended``: the conversation ends with the sequence that held them.
        """
        if len(blocks):
            self._clock += 1
            while self._clock >= _LATEST:
                self._clock -= _LATEST // 2
                for pool in self._pools:
                    pool.evictable.rewind(_LATEST // 2)
            granules = self._pools[group].release(blocks, self._clock, priority, ended=ended)
            self._note(Release, group, granules)

    def retain(self, group: int, blocks: Ids, seconds: Seconds, owner: str, clock: Clock) -> int:
        """Keep known blocks (i64[n], deepest first) for so many seconds each, within the share.

        Returns: how many of the last ones are kept.
        """
        most = self._most_retained(group, self.ceiling.now_bytes)
        return self._pools[group].retain(blocks, seconds, owner, most=most, clock=clock)

    def copy(self, group: int, sources: Ids, targets: Ids, num_slots: Sequence[int]) -> None:
        """Note a copy of the first ``num_slots[i]`` slots of block ``sources[i]`` (i64[n])."""
        size = self.sizes[group].slots
        pairs = zip(sources.tolist(), targets.tolist(), num_slots, strict=True)
        self.changes.extend(Copy(group, a * size, b * size, n) for a, b, n in pairs if n)

    def forget(self, group: int, blocks: Ids) -> None:
        """Take blocks (i64[n]), held or not, out of the index."""
        if len(blocks):
            pool = self._pools[group]
            self._index.detach(group, pool.nodes[blocks].astype(np.intp))
            self._note(Release, group, pool.forget(blocks))

    def take_over(self, group: int, blocks: Ids) -> None:
        """Hold cached blocks (i64[n]) alone: the index forgets them, their content stays."""
        self._index.detach(group, self._pools[group].nodes[blocks].astype(np.intp))
        self._pools[group].take_over(blocks)

    def evict(self, num_bytes: int) -> None:
        """Evict until at most ``num_bytes`` are committed, or a block of each page is held.

        Pages go whole: evicting a cached block beside a held one would free nothing.
        """
        for group, pool in enumerate(self._pools):
            pool.limit_retention(self._most_retained(group, num_bytes))
        excess = self.committed_bytes - num_bytes
        if excess <= 0:
            return
        granules, times = zip(*(pool.cached_granules() for pool in self._pools), strict=True)
        # No group's order is changed by another's.
        order = np.argsort(np.concatenate([np.maximum.accumulate(t) for t in times]), kind="stable")
        counts = [len(each) for each in granules]
        groups = np.repeat(np.arange(len(granules)), counts)[order]
        freed = np.cumsum(np.array(self._granule_bytes)[groups])
        groups = groups[: int(np.searchsorted(freed, excess)) + 1]
        for group, count in enumerate(np.bincount(groups, minlength=len(granules)).tolist()):
            evicted = self._pools[group].evict_granules(granules[group][:count])
            self._note(Release, group, self._dropped(group, *evicted))

    def check(self) -> None:
        """Raise AssertionError if pools and index contradict each other."""
        for group, pool in enumerate(self._pools):
            pool.check()
            known = np.flatnonzero(pool.nodes >= 0)
            found = self._index.blocks[group][pool.nodes[known]]
            assert (found == known).all(), "a block's node holds another block"
            num_found = np.count_nonzero(self._index.blocks[group] >= 0)
            assert num_found == len(known), "a node holds a block that does not know it"

    # -- eviction --------------------------------------------------------------------------------

    def _most_retained(self, group: int, num_bytes: int) -> int:
        """Return how many of a group's blocks clients can have kept, of so many bytes of all.

        Each group gets as much as any other.
        """
        share = self._retention_share * num_bytes / len(self._pools)
        return int(share / self.sizes[group].block_bytes)

    def _lacking_bytes(self, num_new: Sequence[int]) -> int:
        lacking = self.committed_bytes - self.ceiling.now_bytes
        for pool, count, size in zip(self._pools, num_new, self._granule_bytes, strict=True):
            lacking += pool.num_granules_for(count) * size
        return lacking

    def _make_room(self, num_new: Sequence[int]) -> dict[int, Ids]:
        """Evict until ``num_new`` blocks can be taken. Returns: each group's closed granules.

        At worst all cached blocks go; then every open granule is held, as the plan counted.
        """
        closed: dict[int, list[Ids]] = {}
        while (lacking := self._lacking_bytes(num_new)) > 0:
            group = self._stalest()
            assert group is not None, "a step was planned that does not fit"
            closed.setdefault(group, []).append(self._evict(group, lacking))
        return {
            group: granules[0] if len(granules) == 1 else np.concatenate(granules)
            for group, granules in closed.items()
        }

    def _stalest(self) -> int | None:
        """Return the group whose next victim was used longest ago; None if nothing is cached."""
        best: tuple[int, int] | None = None
        for group, pool in enumerate(self._pools):
            if pool.num_cached:
                if len(self._pools) == 1:
                    return group
                time = pool.evictable.next_time()
                best = min(best or (time, group), (time, group))
        return None if best is None else best[1]

    def _evict(self, group: int, num_bytes: int) -> Ids:
        """Evict about ``num_bytes``, at once as far as the order of all groups allows.

        Returns: granules whose pages may go.
        """
        count = -(-num_bytes // self.sizes[group].block_bytes)
        evicted = self._pools[group].evict(count, alike=len(self._pools) > 1)
        return self._dropped(group, *evicted)

    def _dropped(self, group: int, blocks: Ids, nodes: Ids) -> Ids:
        """Take evicted blocks out of the index. Returns: granules whose pages may go."""
        self._index.detach(group, nodes)
        self.num_evicted_blocks += len(blocks)
        return self._pools[group].empty(blocks)

    def _prints(self, group: int, blocks: Ids) -> Prints:
        """Return the fingerprints of the prefixes that end in these blocks."""
        prints: Prints = self._index.prints[self._pools[group].nodes[blocks]]
        return prints

    def _places(self, group: int, blocks: Ids) -> tuple[list[int], list[int], list[int]]:
        """Return where these blocks are in the tree of prefixes, as ``PlacesOf`` says."""
        rows = self._pools[group].nodes[blocks].tolist()
        depths, parents = self._index.places(rows)
        return depths, rows, parents

    def _note(self, change: type[Commit] | type[Release], group: int, granules: Ids) -> None:
        """Note what happens to the pages of granules, neighbours together."""
        if not len(granules):
            return
        slots = self.sizes[group].granule_blocks * self.sizes[group].slots
        first = end = -1
        for granule in sorted(granules.tolist()):
            if granule != end:
                if end >= 0:
                    self.changes.append(change(group, first * slots, end * slots))
                first = granule
            end = granule + 1
        self.changes.append(change(group, first * slots, end * slots))
