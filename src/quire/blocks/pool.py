"""The blocks of one group: who holds them, which are only cached, and which are empty.

A block is *held* by sequences (``refs`` counts them), *cached* when none does but the prefix
index still finds its content, or *empty*. A free block, cached or empty, is not the same as an
unused page: pages are committed for a *granule* (the fewest blocks that fill whole pages) and given
back when all blocks of the granule are empty.

Every verb takes a batch of ids and costs a few numpy operations whatever the size of the pool.
"""

import numpy as np
import numpy.typing as npt

from quire.blocks.eviction import EvictionPolicy, Priority, Times
from quire.blocks.runs import NO_IDS, Ids
from quire.blocks.vacancies import Vacancies
from quire.units import ceil_div

NO_NODE = -1


class BlockPool:
    """Blocks 0 … num_blocks - 1. How many of them may be used at once, the coordinator decides."""

    def __init__(
        self, num_blocks: int, evictable: EvictionPolicy, *, granule_blocks: int = 1
    ) -> None:
        assert num_blocks % granule_blocks == 0, "the pool ends within a granule"
        self.num_blocks = num_blocks
        self.granule_blocks = granule_blocks
        self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.nodes: npt.NDArray[np.int32] = np.full(num_blocks, NO_NODE, np.int32)  # index rows
        self.evictable = evictable
        self.num_held = 0  # blocks with a holder
        num_granules = num_blocks // granule_blocks
        self.closed = Vacancies(num_granules)  # granules without pages
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
        """Granules that would keep their pages if all that is only cached were evicted."""
        return self.num_held if self.granule_blocks == 1 else self._num_held_granules

    # -- questions -------------------------------------------------------------------------------

    def held_granules_after(self, released: Ids, held: Ids, num_new: int) -> int:
        """``num_held_granules`` if these lost and gained a holder, and new blocks were taken.

        A block may stand in ``released`` once for each holder that it loses; those in ``held`` are
        distinct, and not in ``released``. With several blocks a granule this is the least: as long
        as there is room, blocks are taken where nothing has to be evicted for them.
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
        """Granules that would be opened to take so many empty blocks."""
        return ceil_div(max(0, count - self._num_gaps), self.granule_blocks)

    def cached_granules(self) -> tuple[Ids, Times]:
        """Granules with pages of which no block is held, the first to go first.

        Returns: them, and when the last of its blocks to go was used last.
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

        ``after``: of each, which block it should lie behind; see ``Vacancies.take``. A number: all
        of them behind this block, side by side; -1 for any place. If a granule has several blocks,
        filling granules comes first and decides alone.
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
        """One more holder for each of these distinct blocks, which have content."""
        if not len(blocks):
            return
        refs = self.refs[blocks]
        free = blocks[refs == 0]
        if len(free):
            self.evictable.hold(free)
            self._count_held(free, 1)
        self.refs[blocks] = refs + 1

    def release(self, blocks: Ids, now: int, priority: Priority) -> Ids:
        """One holder less for each, deepest first. Returns: granules whose pages may go.

        What the index knows stays, as cached; the rest is empty.
        """
        # Asking for indices costs a third of asking whether there are any.
        known = (self.nodes[blocks] != NO_NODE).nonzero()[0]
        if len(known) == len(blocks):
            self.evictable.use(blocks, now, priority)
        elif len(known):
            own = priority if isinstance(priority, int) else priority[known]
            self.evictable.use(blocks[known], now, own)
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

    def evict(self, count: int, *, alike: bool) -> tuple[Ids, Ids]:
        """Choose cached blocks (as many, or all) and take them out of the cache.

        Returns: them, and their nodes. The caller hands them to ``empty``.
        """
        blocks = self.evictable.evict(count, alike=alike)
        return blocks, self._out_of_cache(blocks)

    def evict_granules(self, granules: Ids) -> tuple[Ids, Ids]:
        """Take what is in these, which are not held, out of the cache. Returns: as ``evict``."""
        blocks = granules
        if self.granule_blocks > 1:
            blocks, _ = self.evictable.order()
            blocks = blocks[np.isin(blocks // self.granule_blocks, granules)]
        self.evictable.take_out(blocks)
        return blocks, self._out_of_cache(blocks)

    def empty(self, blocks: Ids) -> Ids:
        """Drop evicted blocks. Returns: granules whose pages may go; the last is opened first."""
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
        """Hold cached blocks, which the index knows no more."""
        self.nodes[blocks] = NO_NODE
        self.evictable.hold(blocks)
        self.evictable.drop(blocks)
        self.refs[blocks] = 1
        self._count_held(blocks, 1)

    def forget(self, blocks: Ids) -> Ids:
        """The index knows these no more. Returns: granules whose pages may go."""
        self.nodes[blocks] = NO_NODE
        free = blocks[self.refs[blocks] == 0]
        self.evictable.hold(free)
        self.evictable.drop(blocks)
        return self.empty(free)

    def check(self) -> None:
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

    def _out_of_cache(self, blocks: Ids) -> Ids:
        """These have left the cache. Returns: their nodes."""
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
        # Where a block is held the page stays anyway: those gaps first.
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
