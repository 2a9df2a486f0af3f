"""Plan what a step does to the block tables, without changing them.

A step takes sequences from ``begin`` tokens to room for ``end``. In each group, windows pass the
blocks that the first new token cannot read, a shared block that the step writes is copied, and
tables grow. The coordinator asks whether the plan fits, and then carries it out.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kv.block_pool import NO_NODE, BlockPool, Moves
from quire.kv.block_tables import BlockTables, spans
from quire.kv.eviction_queue import NO_IDS, Ids
from quire.kv.prefix_cache import Start
from quire.spec import (
    ChunkedAttention,
    CrossAttention,
    Group,
    KeptWhole,
    RecurrentState,
    SlidingWindow,
)
from quire.units import ceil_div

_NO_PLACES = (NO_IDS, NO_IDS)
Counts = npt.NDArray[np.int64]
Places = tuple[Ids, Ids]  # rows and columns of a group's tables


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """A step in one group."""

    starts: Counts  # of the rows' tables afterwards
    ends: Counts
    passed: Places  # that a window leaves behind
    passed_blocks: Ids  # … and the blocks there
    copied: Places  # whose blocks are shared, and written in the step
    copied_blocks: Ids
    copied_slots: list[int]  # of each, how many hold tokens
    rewritten: Ids  # blocks that are written in place, and that the index must forget
    grown: Places  # that get a new block

    @property
    def num_new(self) -> int:
        return len(self.grown[0]) + len(self.copied[0])

    def _released(self) -> Ids:
        if not len(self.copied_blocks):
            return self.passed_blocks
        return np.concatenate([self.passed_blocks, self.copied_blocks])

    def changed_rows(self) -> list[int]:
        """List the rows whose tables have other blocks afterwards."""
        rows: list[int] = []
        for changed, _ in (self.passed, self.copied, self.grown):
            rows += changed.tolist()
        return rows

    def after(self, table: npt.NDArray[np.int32]) -> Ids | None:
        """Return the block behind which each new one should lie, i64[num_new], or None for any.

        It is the one before it in the table ([rows, columns]), or a copy's source. The table has a
        column more than there are blocks: before the first one it says PASSED.
        """
        if not len(self.grown[0]):
            return None
        after = table[self.grown[0], self.grown[1] - 1].astype(np.intp)
        if len(self.copied_blocks):
            after = np.concatenate([self.copied_blocks, after])
        return after

    def moves(self) -> Moves:
        """Return what the step does to the pool's blocks."""
        return Moves(released=self._released(), held=NO_IDS, num_new=self.num_new)


def first_columns(group: Group, block_size: int, start: Start, begin: int, end: int) -> range:
    """Return the columns that get a new block when a sequence begins with ``start``.

    It computes from token ``begin`` on and gets room for ``end`` tokens.
    """
    first = start.first + len(start.blocks)
    if isinstance(group.spec, KeptWhole):
        return range(first, group.spec.num_places if end else first)
    first = max(first, group.live_start(begin) // block_size)
    return range(first, max(first, ceil_div(end, block_size)))


def group_step(
    table: npt.NDArray[np.int32],
    block_size: int,
    group: Group,
    pool: BlockPool,
    rows: Ids,
    tokens: tuple[Counts, Counts],
    columns: tuple[Counts, Counts],
) -> GroupStep:
    """Plan the step of distinct rows (i64[S]) of one group's table (i32[rows, columns]).

    ``tokens``: for each row, how many it has and how many it gets room for (i64[S] each);
    ``columns``: where its blocks begin and end (i64[S] each).
    """
    (begin, end), (starts, ends) = tokens, columns
    if isinstance(group.spec, KeptWhole):
        return _step_of_whole(table, group.spec, pool, rows, end, ends)
    passed, passed_blocks, grow_from = _NO_PLACES, NO_IDS, ends
    if isinstance(group.spec, SlidingWindow | ChunkedAttention):
        first = group.live_start(begin) // block_size
        passed = spans(rows, starts, np.maximum(np.minimum(first, ends) - starts, 0))
        passed_blocks = table[passed].astype(np.intp)
        starts, grow_from = np.maximum(starts, first), np.maximum(ends, first)
    new_ends = np.maximum(grow_from, -(-end // block_size))
    column = begin // block_size  # twice as fast as divmod
    offset = begin - column * block_size
    inside = ((offset != 0) & (ends > column)).nonzero()[0]
    written = (rows[inside], column[inside])
    places, slots = _NO_PLACES, list[int]()
    copied_blocks = rewritten = NO_IDS
    if len(inside):
        copied, copied_blocks, rewritten = _writes(table, pool, written, passed_blocks)
        if len(copied):
            places = written[0][copied], written[1][copied]
            slots = offset[inside[copied]].tolist()
    return GroupStep(
        starts=starts,
        ends=new_ends,
        passed=passed,
        passed_blocks=passed_blocks,
        copied=places,
        copied_blocks=copied_blocks,
        copied_slots=slots,
        rewritten=rewritten,
        grown=spans(rows, grow_from, new_ends - grow_from),
    )


def _step_of_whole(
    table: npt.NDArray[np.int32],
    spec: KeptWhole,
    pool: BlockPool,
    rows: Ids,
    end: Counts,
    ends: Counts,
) -> GroupStep:
    """Plan a step of states or sources, which have a fixed number of blocks.

    A state is one block, and one more for each token that may be undone. A source is one block
    that no step writes again: it stays shared.
    """
    new_ends = np.maximum(ends, (end > 0) * spec.num_places)
    written = spans(rows, np.zeros_like(ends), ends)
    copied = copied_blocks = NO_IDS
    if isinstance(spec, RecurrentState):
        copied, copied_blocks, _ = _writes(table, pool, written, NO_IDS)
    return GroupStep(
        starts=np.zeros_like(ends),
        ends=new_ends,
        passed=_NO_PLACES,
        passed_blocks=NO_IDS,
        copied=(written[0][copied], written[1][copied]),
        copied_blocks=copied_blocks,
        copied_slots=[1] * len(copied),
        rewritten=NO_IDS,
        grown=spans(rows, ends, new_ends - ends),
    )


def _writes(
    table: npt.NDArray[np.int32], pool: BlockPool, written: Places, passed_blocks: Ids
) -> tuple[Ids, Ids, Ids]:
    """Sort the places that the step writes.

    Returns: the indices of places whose blocks are shared and must be copied first, those blocks,
    and blocks that only their writer holds, which the index must forget.
    """
    blocks = table[written].astype(np.intp)
    known = pool.nodes[blocks] != NO_NODE
    shared = pool.refs[blocks] > 1
    if not np.count_nonzero(shared):
        return NO_IDS, NO_IDS, blocks[known.nonzero()[0]]
    # If all holders write or pass a block in one step, the last writer writes in place.
    for block in np.unique(blocks[shared]).tolist():
        writers = (blocks == block).nonzero()[0]
        if len(writers) + (passed_blocks == block).sum() == pool.refs[block]:
            shared[writers[-1]] = False
    return shared.nonzero()[0], blocks[shared], blocks[known & ~shared]


def check_trim(tables: BlockTables, number: int, group: Group, row: int, num_tokens: int) -> None:
    """Raise ValueError if the group has released blocks that the shorter sequence would read."""
    if isinstance(group.spec, CrossAttention):
        return
    if isinstance(group.spec, RecurrentState):
        computed = int(tables.num_computed[row])
        if 0 < num_tokens < computed:
            raise ValueError(
                f"cannot go back to {num_tokens} tokens: layers {group.layers} keep the state "
                f"after {computed} only"
            )
        return
    check_window(group, int(tables.starts[number, row]) * tables.block_size, num_tokens)


def check_window(group: Group, first_held: int, num_tokens: int) -> None:
    """Raise ValueError if a window would read places that have been released.

    Undoing the last extension is always possible: see ``Accounting.trim``.
    """
    first = group.live_start(num_tokens)
    if first < first_held:
        raise ValueError(
            f"cannot go back to {num_tokens} tokens: layers {group.layers} would begin at token "
            f"{first}, and their window has passed all before {first_held}"
        )
