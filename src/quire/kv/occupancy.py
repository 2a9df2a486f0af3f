"""Take a census of a group's memory: each cell is held, shared, cached, empty or spare.

A *cell* is the smallest piece of one kind: a block, a state, or as many tokens of a range as leave
no page's end within them. A census lists only cells with pages, so its cost depends on what is
committed, not on the address space.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.kv.block_pool import NO_NODE, BlockPool
from quire.kv.block_tables import BlockTables, spans
from quire.spec import Group, KeptWhole

# -- what can be read ------------------------------------------------------------------------------

# The tokens of held blocks that a sequence can still read.


_Counts = npt.NDArray[np.int64]


def used_tokens(tables: BlockTables, number: int, group: Group, num_held: int) -> int:
    """Count the tokens of a group that a holder can still read, each once.

    ``num_held``: distinct blocks that the group's tables hold.
    """
    # Rows without a sequence are all zero: adding them costs less than leaving them out.
    if tables.ends[number].sum() - tables.starts[number].sum() == num_held:  # nothing is shared
        num_tokens = tables.num_tokens
        return int((num_tokens - group.live_start(num_tokens)).sum())
    blocks, _, low, high = _readable(tables, number, group)
    return int(_joined_lengths(blocks, low, high).sum())


def contents(
    tables: BlockTables, number: int, group: Group, refs: npt.NDArray[np.int32]
) -> tuple[_Counts, _Counts]:
    """Return, for each block, the tokens that a holder can still read, and its first holder.

    A state counts as one token. A block without holders has the holder -1. ``refs``: how many
    sequences hold each block.

    Shapes: refs i32[N] → i64[N], i64[N].
    """
    fills, holders = np.zeros(len(refs), np.int64), np.full(len(refs), -1, np.int64)
    blocks, owners, low, high = _readable(tables, number, group)
    holders[blocks[::-1]] = owners[::-1]  # numpy keeps the last value of an id that occurs twice
    if isinstance(group.spec, KeptWhole):
        fills[blocks] = 1
        return fills, holders
    fills[blocks] = high - low
    if len(shared := (refs[blocks] > 1).nonzero()[0]):
        fills[blocks[shared]] = 0
        np.add.at(fills, blocks[shared], _joined_lengths(blocks[shared], low[shared], high[shared]))
    return fills, holders


def _readable(
    tables: BlockTables, number: int, group: Group
) -> tuple[_Counts, _Counts, _Counts, _Counts]:
    """Return each table entry's block, its sequence, and the tokens [low, high) that it reads.

    Sequences are in the order of their ids.
    """
    size, seq_ids = tables.block_size, np.array(sorted(tables.rows), np.int64)
    rows = tables.rows_of(seq_ids.tolist())
    starts, num_tokens = tables.starts[number, rows], tables.num_tokens[rows]
    first = group.live_start(num_tokens)
    at, columns = spans(np.arange(len(rows)), starts, tables.ends[number, rows] - starts)
    blocks = tables.ids[number][rows[at], columns].astype(np.int64)
    low = (first[at] - columns * size).clip(0, size)
    high = (num_tokens[at] - columns * size).clip(0, size)
    return blocks, seq_ids[at], low, high


def _joined_lengths(blocks: _Counts, low: _Counts, high: _Counts) -> _Counts:
    """Return what each interval adds to the earlier ones on its block; the sum is the union."""
    order = np.lexsort((low, blocks))
    blocks, begins, ends = blocks[order], low[order], high[order]
    # Each block on a stretch of its own, so that one running maximum serves all of them.
    stretch = int(high.max(initial=0)) + 1
    offset = np.cumsum(np.diff(blocks, prepend=-1) != 0) * stretch
    reached = np.maximum.accumulate(np.append(0, ends + offset))[:-1]
    added = np.empty_like(high)
    added[order] = (ends + offset - np.maximum(begins + offset, reached)).clip(0)
    return added


# -- cells -----------------------------------------------------------------------------------------


Ids: TypeAlias = npt.NDArray[np.int64]
NO_HOLDER = -1


class CellState(IntEnum):
    """The kinds of cells with pages."""

    EMPTY = 0  # no sequence holds it, and it has no content
    CACHED = 1  # no sequence holds it, and the prefix index finds it
    SPARE = 2  # a sequence holds it, and reads no token in it: not yet, or no more
    HELD = 3  # one sequence holds it
    SHARED = 4  # several sequences hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """The cells of one group that have pages, in the order of their addresses.

    Shapes: ids, states, holders, fills [M], for M of ``num_cells`` cells.
    """

    num_cells: int  # of address space
    cell_tokens: int  # 1 for a state
    cell_bytes: int  # of pages, in all the group's layers
    entry_bytes: int  # of a token, or of a state without the rest of its pages
    row_cells: int  # of a sequence's own addresses; 0: sequences have none of their own
    ids: Ids  # ascending
    states: npt.NDArray[np.uint8]  # CellState
    holders: Ids  # the first sequence that holds the cell, or NO_HOLDER
    fills: Ids  # tokens that a holder can still read, each counted once; all tokens if cached

    @property
    def committed_bytes(self) -> int:
        return len(self.ids) * self.cell_bytes

    @property
    def used_bytes(self) -> int:
        held = self.states >= CellState.HELD
        return int(self.fills[held].sum()) * self.entry_bytes

    @property
    def cached_bytes(self) -> int:
        return int(np.count_nonzero(self.states == CellState.CACHED)) * self.cell_bytes


@dataclass(frozen=True, slots=True)
class HeldRange:
    """Slots of a sequence's range that have pages, counted from where the range begins."""

    seq_id: int
    first_slot: int  # where the range begins
    backed: range
    num_tokens: int  # that it has room for


def block_census(
    group: Group, number: int, pool: BlockPool, tables: BlockTables, block_bytes: int, slots: int
) -> Occupancy:
    """Take the census of a pool of blocks. ``slots``: of one block."""
    has_pages = ~pool.closed.are_in(np.arange(len(pool.refs) // pool.granule_blocks))
    if pool.granule_blocks > 1:
        has_pages = np.repeat(has_pages, pool.granule_blocks)
    ids = has_pages.nonzero()[0]
    all_fills, all_holders = contents(tables, number, group, pool.refs)
    refs, fills = pool.refs[ids], all_fills[ids]
    states = np.full(len(ids), CellState.EMPTY, np.uint8)
    states[refs > 0] = CellState.SPARE
    states[(refs == 1) & (fills > 0)] = CellState.HELD
    states[(refs > 1) & (fills > 0)] = CellState.SHARED
    cached = (refs == 0) & (pool.nodes[ids] != NO_NODE)
    states[cached], fills[cached] = CellState.CACHED, slots
    return Occupancy(
        num_cells=len(pool.refs),
        cell_tokens=slots,
        cell_bytes=block_bytes,
        entry_bytes=_entry_bytes(group),
        row_cells=0,
        ids=ids,
        states=states,
        holders=all_holders[ids],
        fills=fills,
    )


@dataclass(frozen=True, slots=True)
class RangeCells:
    """The cells of a group's ranges: about a block each, and whole pages."""

    group: Group
    slot_bytes: int
    page_tokens: int  # every piece begins and ends with a page
    block_size: int

    @property
    def slots(self) -> int:
        """Slots of one cell."""
        return 1 if self._is_state else gcd(self.block_size, self.page_tokens)

    def census(
        self, pieces: Iterable[HeldRange], *, num_slots: int, row_slots: int = 0
    ) -> Occupancy:
        """Take the census of ranges. ``row_slots``: of a sequence's own addresses, if any."""
        cell = self.slots
        figures = np.array([self._figures(piece) for piece in pieces], np.int64).reshape(-1, 6)
        figures = figures[np.argsort(figures[:, 1] + figures[:, 2])]
        counts = (figures[:, 3] - figures[:, 2]) // cell
        before = np.cumsum(counts) - counts
        seq_ids, firsts, starts, _, live_starts, live_stops = np.repeat(figures, counts, axis=0).T
        starts = starts + (np.arange(len(starts)) - np.repeat(before, counts)) * cell
        fills = np.minimum(live_stops, starts + cell) - np.maximum(live_starts, starts)
        return Occupancy(
            num_cells=num_slots // cell,
            cell_tokens=cell,
            cell_bytes=cell * self.slot_bytes,
            entry_bytes=_entry_bytes(self.group),
            row_cells=0 if self._is_state else row_slots // cell,
            ids=(firsts + starts) // cell,
            states=np.where(fills > 0, CellState.HELD, CellState.SPARE).astype(np.uint8),
            holders=seq_ids,
            fills=fills.clip(0),
        )

    def of(self, first_slot: int, num_tokens: int) -> Ids:
        """Return the cells (i64[n]) that hold the readable part of a range's ``num_tokens``."""
        live = self._live(num_tokens)
        if not live:
            return np.zeros(0, np.int64)
        first, last = first_slot + live.start, first_slot + live.stop - 1
        return np.arange(first // self.slots, last // self.slots + 1)

    @property
    def _is_state(self) -> bool:
        return isinstance(self.group.spec, KeptWhole)

    def _live(self, num_tokens: int) -> range:
        return range(min(1, num_tokens)) if self._is_state else self.group.live_range(num_tokens)

    def _figures(self, piece: HeldRange) -> tuple[int, ...]:
        backed, live = piece.backed, self._live(piece.num_tokens)
        stops = backed.stop, live.start, live.stop
        return piece.seq_id, piece.first_slot, backed.start, *stops


def _entry_bytes(group: Group) -> int:
    if isinstance(group.spec, KeptWhole):
        return group.num_layers * group.spec.state_bytes
    return group.bytes_per_token
