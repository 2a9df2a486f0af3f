"""The windows through which sequences see blocks: ``virtual``'s page tables beside block tables.

A window is a row of addresses as long as the longest sequence. It shows the blocks of a block
table, step by step. When a sequence ends, its row is *parked* as it is: a sequence that begins with
the same blocks adopts it, and need not map them again. A parked row costs no memory, only mappings,
which the operating system limits for each process. This module counts them, so that accounting
refuses a step before the system would.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.kv.storage_ops import Map, StorageOp, Unmap

Table: TypeAlias = npt.NDArray[np.integer[Any]]  # block ids; negative where there is none
_NOTHING = -1
_FIRST_BLOCKS = 8
NUM_GAPS = 2  # mappings beside the blocks of a row: before and behind them


class Windows:
    """Rows 0 … num_rows - 1, in each of several groups.

    ``row_blocks``: a row's length, in blocks of ``block_size`` tokens. Neighbours are one mapping
    unless a heap of ``heap_blocks`` (of each group) ends between them. ``max_mappings``: the
    limit of all rows; None for no limit.
    """

    def __init__(
        self,
        num_rows: int,
        row_blocks: int,
        *,
        block_size: int,
        heap_blocks: Sequence[int],
        max_mappings: int | None,
    ) -> None:
        self.block_size = block_size
        self.max_mappings = max_mappings
        self.num_mappings = 0  # of all rows, at most
        self.num_promised = 0  # … that this step may add
        self._row_blocks = row_blocks
        self._heap_blocks = heap_blocks
        shape = (num_rows, _FIRST_BLOCKS)
        self._shown = [np.full(shape, _NOTHING, np.int32) for _ in heap_blocks]
        self._ends = np.zeros(
            (len(heap_blocks), num_rows), np.int64
        )  # one past the last column that shows a block
        self._runs = np.zeros((len(heap_blocks), num_rows), np.int64)
        self._free = list(range(num_rows))[::-1]
        self._parked: dict[int, None] = {}  # in the order of parking
        self._hidden: list[StorageOp] = []  # of parked rows that no longer show anything

    @property
    def num_vacant(self) -> int:
        """Rows without a sequence."""
        return len(self._free) + len(self._parked)

    def first_slot(self, row: int) -> int:
        """Return the first slot of a row."""
        return row * self._row_blocks * self.block_size

    def shown(self, group: int) -> npt.NDArray[np.int64]:
        """List the places (i64[n]) that show a block, counted over all rows in order."""
        rows, columns = (self._shown[group] >= 0).nonzero()
        return rows * self._row_blocks + columns

    def num_runs(self, group: int, blocks: Table) -> int:
        """Count the mappings that show these blocks (i[n]), one behind the other."""
        return len(self._run_starts(group, blocks))

    def mappings_for(self, tables: Sequence[Table]) -> int:
        """Count the mappings that it takes to show these tables (i[n] each) in an empty row."""
        return sum(_with_gaps(self.num_runs(group, table)) for group, table in enumerate(tables))

    def num_cuts(self, group: int, table: Table, column: int, block: int) -> int:
        """Count the most mappings that showing another block in a column of a table (i[n]) adds.

        A new boundary counts in full: it may exist before an old one goes.
        """
        beside = table[max(0, column - 1) : column + 2].copy()
        before = self._run_starts(group, beside)
        beside[min(1, column)] = block
        return len(np.setdiff1d(self._run_starts(group, beside), before))

    def num_blank(self, rows: Table) -> npt.NDArray[np.int64]:
        """Count the groups in which each row (i[n]) shows nothing: i64[n]; -1 is no row yet."""
        blank = np.count_nonzero(self._runs[:, rows] == 0, axis=0)
        return np.where(rows < 0, len(self._shown), blank)

    def have_mappings(self, count: int) -> bool:
        """Tell whether ``count`` more mappings can be made, clearing parked rows if need be."""
        if self.max_mappings is None:
            return True
        count += self.num_promised
        while self._parked and self.num_mappings + count > self.max_mappings:
            self._give_up(next(iter(self._parked)))
        return self.num_mappings + count <= self.max_mappings

    def take(self, tables: Sequence[Table]) -> int:
        """Take a row for these block tables (i[n] each): the parked one that shows most of them."""
        row = self._alike(tables)
        if row is None:
            row = self._free.pop() if self._free else next(iter(self._parked))
        self._parked.pop(row, None)
        return row

    def park(self, row: int) -> None:
        """Park the row of a sequence that has ended."""
        if self._runs[:, row].any():
            self._parked[row] = None
        else:
            self._free.append(row)

    def show(self, row: int, tables: Sequence[Table]) -> tuple[list[StorageOp], list[StorageOp]]:
        """Make a row show these tables (i[n] each). Returns: what to unmap first, what to map."""
        hidden: list[StorageOp] = []
        shown: list[StorageOp] = []
        for group, table in enumerate(tables):
            end = max(len(table), int(self._ends[group, row]))
            held = self._columns(group, end)[row, :end]
            is_one_more = len(table) == self._ends[group, row] + 1 and table[-1] >= 0
            if is_one_more and (held[:-1] == table[:-1]).all():
                shown.append(self._append(group, row, end - 1, int(table[-1])))
                continue
            after = np.full(end, _NOTHING, np.int32)
            after[: len(table)] = table
            different = np.flatnonzero(held != after)
            if len(different):
                first, stop = int(different[0]), int(different[-1]) + 1
                before, after = held[first:stop], after[first:stop]
                changed = before != after
                hidden += self._unmaps(group, row, first, changed & (before >= 0))
                shown += self._maps(group, row, first, np.where(changed, after, _NOTHING))
                self._set(group, row, first, after)
                self._ends[group, row] = len(table)
        return hidden, shown

    def release(self, group: int, start: int, stop: int, rows: Iterable[int]) -> list[StorageOp]:
        """Release blocks [start, stop) from parked rows and from ``rows``: they lose their pages.

        A parked row also loses the blocks behind such a block, which are of no use there.
        """
        asked = np.fromiter((*self._parked, *rows), np.intp)
        table = self._shown[group][asked]
        gone = (start <= table) & (table < stop)
        changes: list[StorageOp] = []
        for index in np.flatnonzero(gone.any(axis=1)).tolist():
            row = int(asked[index])
            if row not in self._parked:
                changes += self._hide(group, row, gone[index])
                continue
            changes += self._cut(group, row, int(gone[index].argmax()))
            if not self._runs[:, row].any():
                del self._parked[row]
                self._free.append(row)
        return changes

    def give_up_parked(self) -> None:
        """Clear all parked rows."""
        while self._parked:
            self._give_up(next(iter(self._parked)))

    def drain(self) -> list[StorageOp]:
        """Return the operations of cleared parked rows, once."""
        changes, self._hidden = self._hidden, []
        return changes

    def check(self, taken: Mapping[int, Sequence[Table]]) -> None:
        """Raise AssertionError unless rows show their sequences' tables and mappings are counted.

        ``taken``: the tables (i[n] each) of each row with a sequence, all changes drained.
        """
        rows = [*taken, *self._free, *self._parked]
        assert sorted(rows) == list(range(self._runs.shape[1])), "a row is lost or held twice"
        for row in self._free:
            assert not self._runs[:, row].any(), "a free row shows something"
        for row, tables in taken.items():
            for group, table in enumerate(tables):
                shown = self._columns(group, len(table))[row]
                assert (shown[: len(table)] == table).all(), "a window shows another block"
                assert (shown[len(table) :] == _NOTHING).all(), "a window shows too much"
        total = sum(
            _with_gaps(self.num_runs(group, shown[row]))
            for group, shown in enumerate(self._shown)
            for row in range(len(shown))
        )
        assert total == self.num_mappings, "the mappings are miscounted"

    # -- rows ------------------------------------------------------------------------------------

    def _alike(self, tables: Sequence[Table]) -> int | None:
        """Find the parked row that shows most of these tables."""
        parked = np.fromiter(self._parked, np.intp)
        table = tables[0]
        held = np.flatnonzero(table >= 0)
        if not len(parked) or not len(held):
            return None
        shown = self._columns(0, len(table))[parked, : len(table)]
        same = np.count_nonzero(shown[:, held] == table[held], axis=1)
        best = int(same.argmax())
        return int(parked[best]) if same[best] else None

    def _give_up(self, row: int) -> None:
        for group in range(len(self._shown)):
            self._hidden += self._cut(group, row, 0)
        del self._parked[row]
        self._free.append(row)

    def _cut(self, group: int, row: int, end: int) -> list[StorageOp]:
        """Show nothing from a column on."""
        gone = self._shown[group][row] >= 0
        gone[:end] = False
        self._ends[group, row] = min(end, int(self._ends[group, row]))
        return self._hide(group, row, gone)

    def _hide(self, group: int, row: int, gone: npt.NDArray[np.bool_]) -> list[StorageOp]:
        """Show nothing in these columns, in which something is shown."""
        shown = self._shown[group][row]
        self._set(group, row, 0, np.where(gone, np.int32(_NOTHING), shown))
        return self._unmaps(group, row, 0, gone)

    def _columns(self, group: int, count: int) -> npt.NDArray[np.int32]:
        """The group's tables, at least so wide."""
        table = self._shown[group]
        if count > table.shape[1]:
            width = min(max(count, 2 * table.shape[1]), max(count, self._row_blocks))
            wider = np.full((table.shape[0], width), _NOTHING, np.int32)
            wider[:, : table.shape[1]] = table
            self._shown[group] = wider
        return self._shown[group]

    # -- runs ------------------------------------------------------------------------------------

    def _append(self, group: int, row: int, column: int, block: int) -> StorageOp:
        """Show one block more, as a step of decoding does: ``show`` and ``_set`` in a few moves."""
        shown, runs, size = self._shown[group][row], int(self._runs[group, row]), self.block_size
        left = int(shown[column - 1]) if column else _NOTHING
        goes_on = left >= 0 and block == left + 1 and block % self._heap_blocks[group] != 0
        shown[column] = block
        self._ends[group, row] = column + 1
        if not goes_on:
            self._runs[group, row] = runs + 1
            self.num_mappings += _with_gaps(runs + 1) - _with_gaps(runs)
        target = self.first_slot(row) + column * size
        return Map(group, block * size, target, size)

    def _set(self, group: int, row: int, first: int, blocks: npt.NDArray[np.int32]) -> None:
        """Note what a row shows from a column on, and how many mappings that makes."""
        shown = self._shown[group][row]
        left = int(shown[first - 1]) if first else _NOTHING
        beside = slice(first, first + len(blocks) + 1)  # what follows may go on from it, or not
        before = len(self._run_starts(group, shown[beside], left))
        shown[first : first + len(blocks)] = blocks
        runs = int(self._runs[group, row])
        after = runs - before + len(self._run_starts(group, shown[beside], left))
        self._runs[group, row] = after
        self.num_mappings += _with_gaps(after) - _with_gaps(runs)

    def _run_starts(self, group: int, blocks: Table, left: int = _NOTHING) -> npt.NDArray[np.intp]:
        """Where in a part of a table the pieces begin that one mapping shows each.

        ``left`` is the block before the part.
        """
        before = np.empty_like(blocks)
        before[:1], before[1:] = left, blocks[:-1]
        goes_on = (before >= 0) & (blocks == before + 1) & (blocks % self._heap_blocks[group] != 0)
        starts: npt.NDArray[np.intp] = np.flatnonzero((blocks >= 0) & ~goes_on)
        return starts

    def _unmaps(
        self, group: int, row: int, first: int, gone: npt.NDArray[np.bool_]
    ) -> list[StorageOp]:
        """Hide these columns, counted from ``first``, neighbours together."""
        if not gone.any():
            return []
        edges = np.flatnonzero(np.diff(gone, prepend=False, append=False)).tolist()
        slot, size = self.first_slot(row) + first * self.block_size, self.block_size
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [Unmap(group, slot + a * size, slot + b * size) for a, b in pairs]

    def _maps(self, group: int, row: int, first: int, blocks: Table) -> list[StorageOp]:
        """Show blocks from column ``first`` on, in as few pieces as their places allow."""
        changes: list[StorageOp] = []
        starts = self._run_starts(group, blocks).tolist()
        slot, size = self.first_slot(row) + first * self.block_size, self.block_size
        for start, stop in pairwise([*starts, len(blocks)]):
            count = int(np.count_nonzero(blocks[start:stop] >= 0))
            source, target = int(blocks[start]) * size, slot + start * size
            changes.append(Map(group, source, target, count * size))
        return changes


def _with_gaps(num_runs: int) -> int:
    """Count the mappings of a row: one for each run, and the gaps beside them."""
    return num_runs + NUM_GAPS if num_runs else 0
