"""The pools of all groups under one budget of bytes, and what happens to their pages.

Each group has blocks of its own size and its own address space; bytes go to whichever needs them.
So no group's block is padded to another's, and none keeps memory that another could use. Room is
made by evicting what is only cached, the least recently used of all groups first; bytes that stay
in their group are handed on with their pages, without a word to the system.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from quire.kv.block_pool import BlockPool
from quire.kv.eviction import MakePolicy, Prints, Priority, lru
from quire.kv.eviction_queue import NO_IDS, Ids
from quire.kv.prefix_index import PrefixIndex
from quire.kv.storage_ops import Change, Commit, Copy, Release

# -- ceiling ---------------------------------------------------------------------------------------

# How much may be committed: what sequences can count on, and what there is for now.


@dataclass(slots=True)
class Ceiling:
    """``now_bytes`` ≤ ``capacity_bytes``: below it only while the machine is short of memory.

    What can ever fit is judged by the capacity, and what fits at present by the ceiling.
    """

    capacity_bytes: int
    now_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.now_bytes = self.capacity_bytes

    def move(self, num_bytes: int, held_bytes: int, *, for_now: bool) -> int:
        """Set the ceiling, or the capacity with it; where it is then, never below what is held."""
        num_bytes = max(num_bytes, held_bytes)
        if not for_now:
            self.capacity_bytes = num_bytes
        self.now_bytes = min(num_bytes, self.capacity_bytes)
        return self.now_bytes


# -- pools -----------------------------------------------------------------------------------------


_LATEST = 1 << 31  # policies keep times in 31 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """A group's blocks, as the layout has them."""

    block_bytes: int  # in all layers of the group
    num_blocks: int  # that can be used at once: a multiple of granule_blocks
    spare_blocks: int = 0  # address space beyond that, in which neighbours find room: another one
    granule_blocks: int = 1  # the fewest blocks that fill whole pages
    slots: int = 1  # of one block, as changes count them: its tokens; 1 for a state
    forgets: bool = False  # the group loses blocks while a sequence runs: windows, states

    @property
    def num_ids(self) -> int:
        """Address space, in blocks."""
        return self.num_blocks + self.spare_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What a step does to a pool: the question that ``held_bytes_after`` answers."""

    released: Ids  # once for each holder that a block loses
    held: Ids  # distinct blocks that gain a holder, none of them among the released
    num_new: int


class Pools:
    """Blocks of every group; ``changes`` is what storage has to be told, in order."""

    def __init__(
        self,
        sizes: Sequence[PoolSize],
        capacity_bytes: int,
        index: PrefixIndex,
        make_policy: MakePolicy,
    ) -> None:
        self.sizes = tuple(sizes)
        self.ceiling = Ceiling(capacity_bytes)
        self.changes: list[Change] = []
        self.num_evicted_blocks = 0
        self._index = index
        self._pools = [
            BlockPool(
                size.num_ids,
                # Where blocks go one by one, a prompt that comes back to them teaches nothing.
                (lru if size.forgets else make_policy)(
                    size.num_blocks, partial(self._prints, n), size.spare_blocks
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
        """What would stay committed if all that is only cached were evicted."""
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
        """``held_bytes`` after a step. It fits if that is within the ceiling."""
        total = 0
        for pool, move, size in zip(self._pools, moves, self._granule_bytes, strict=True):
            total += pool.held_granules_after(move.released, move.held, move.num_new) * size
        return total

    def evicts(self, num_new: Sequence[int]) -> bool:
        """Whether taking so many blocks of each group needs what is only cached."""
        return self._lacking_bytes(num_new) > 0

    def is_only_cached(self, group: int, block: Ids) -> bool:
        """Whether this is a block, and no sequence holds it."""
        return len(block) > 0 and not self._pools[group].refs[block[0]]

    # -- verbs -----------------------------------------------------------------------------------

    def allocate(
        self, num_new: Sequence[int], after: Sequence[Ids | int | None] | None = None
    ) -> list[Ids]:
        """Take so many blocks of each group, one holder each, evicting as needed.

        The caller knows that they fit, and may say which blocks they should lie behind, as
        ``BlockPool.take`` has it. Granules that go from one block to another keep their pages.
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
        """One more holder for each of these distinct blocks."""
        self._pools[group].hold(blocks)

    def release(self, group: int, blocks: Ids, priority: Priority = 0) -> None:
        """One holder less for each, deepest first. What the index knows stays as cached."""
        if len(blocks):
            self._clock += 1
            while self._clock >= _LATEST:
                self._clock -= _LATEST // 2
                for pool in self._pools:
                    pool.evictable.rewind(_LATEST // 2)
            granules = self._pools[group].release(blocks, self._clock, priority)
            self._note(Release, group, granules)

    def copy(self, group: int, sources: Ids, targets: Ids, num_slots: Sequence[int]) -> None:
        """The first slots of some blocks are to be copied into others."""
        size = self.sizes[group].slots
        pairs = zip(sources.tolist(), targets.tolist(), num_slots, strict=True)
        self.changes.extend(Copy(group, a * size, b * size, n) for a, b, n in pairs if n)

    def forget(self, group: int, blocks: Ids) -> None:
        """The index is to know these blocks no more, held or not."""
        if len(blocks):
            pool = self._pools[group]
            self._index.detach(group, pool.nodes[blocks].astype(np.intp))
            self._note(Release, group, pool.forget(blocks))

    def take_over(self, group: int, blocks: Ids) -> None:
        """Hold cached blocks alone: the index is to know them no more, their content stays."""
        self._index.detach(group, self._pools[group].nodes[blocks].astype(np.intp))
        self._pools[group].take_over(blocks)

    def evict(self, num_bytes: int) -> None:
        """Evict until at most ``num_bytes`` are committed, or a block of each page is held.

        Pages go whole: what is cached beside a block that is held is evicted for nothing.
        """
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
        for group, pool in enumerate(self._pools):
            pool.check()
            known = np.flatnonzero(pool.nodes >= 0)
            found = self._index.blocks[group][pool.nodes[known]]
            assert (found == known).all(), "a block's node holds another block"
            num_found = np.count_nonzero(self._index.blocks[group] >= 0)
            assert num_found == len(known), "a node holds a block that does not know it"

    # -- eviction --------------------------------------------------------------------------------

    def _lacking_bytes(self, num_new: Sequence[int]) -> int:
        lacking = self.committed_bytes - self.ceiling.now_bytes
        for pool, count, size in zip(self._pools, num_new, self._granule_bytes, strict=True):
            lacking += pool.num_granules_for(count) * size
        return lacking

    def _make_room(self, num_new: Sequence[int]) -> dict[int, Ids]:
        """Evict until so many blocks can be taken. Returns: the granules of each group that closed.

        At worst all that is only cached goes; what is then open is held, as the plan counted.
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
        """The group whose next victim was used longest ago."""
        best: tuple[int, int] | None = None
        for group, pool in enumerate(self._pools):
            if pool.num_cached:
                if len(self._pools) == 1:
                    return group
                time = pool.evictable.next_time()
                best = min(best or (time, group), (time, group))
        return None if best is None else best[1]

    def _evict(self, group: int, num_bytes: int) -> Ids:
        """Evict about so many bytes, in one go as far as the order of all groups allows.

        Returns: granules whose pages may go.
        """
        count = -(-num_bytes // self.sizes[group].block_bytes)
        evicted = self._pools[group].evict(count, alike=len(self._pools) > 1)
        return self._dropped(group, *evicted)

    def _dropped(self, group: int, blocks: Ids, nodes: Ids) -> Ids:
        """What has left the cache is to be found no more. Returns: granules whose pages may go."""
        self._index.detach(group, nodes)
        self.num_evicted_blocks += len(blocks)
        return self._pools[group].empty(blocks)

    def _prints(self, group: int, blocks: Ids) -> Prints:
        """Fingerprints of the prefixes that end in these blocks."""
        prints: Prints = self._index.prints[self._pools[group].nodes[blocks]]
        return prints

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
