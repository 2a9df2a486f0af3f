"""The block tables of all sequences: a row a sequence, one int32 array a group, grown by doubling.

So a step of a thousand sequences costs a few numpy expressions over their rows. A sequence gets a
row when it is added and leaves it when it is removed; its id is the caller's.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from quire.kv.eviction_queue import Ids

_Int = TypeVar("_Int", np.int8, np.int32, np.int64)
MaySwap: TypeAlias = Callable[[int, int, int, int], bool]  # of group, row, column and block

PASSED = -1  # in a table: a window has passed this block, or the table has ended
_FIRST_ROWS = 16
_FIRST_BLOCKS = 8


class BlockTables:
    """A row's columns are a sequence's blocks, in order; columns [starts, ends) exist."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.block_size = block_size
        shape = (_FIRST_ROWS, _FIRST_BLOCKS)
        self.ids = [np.full(shape, PASSED, np.int32) for _ in range(num_groups)]
        self.starts = np.zeros((num_groups, _FIRST_ROWS), np.int64)
        self.ends = np.zeros((num_groups, _FIRST_ROWS), np.int64)
        # From this column on the sequence writes its blocks whole, so that others may read them.
        self.shareable_from = np.zeros((num_groups, _FIRST_ROWS), np.int64)
        self.num_tokens = np.zeros(_FIRST_ROWS, np.int64)  # that there is room for
        self.num_computed = np.zeros(_FIRST_ROWS, np.int64)  # whose token ids are known
        self.priorities = np.zeros(_FIRST_ROWS, np.int8)
        self.last_token_ids = np.zeros((_FIRST_ROWS, block_size), np.int32)  # of the last block
        self.rows: dict[int, int] = {}  # sequence → row
        self.changed: set[int] | None = None  # rows with other blocks, if a strategy asks
        # Whether a row may list another block of the same content in a column.
        self.may_swap: MaySwap = _may_always
        self._free = list(range(_FIRST_ROWS))[::-1]

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, seq_id: int) -> int:
        """Give a sequence a row. Raises: KeyError if the id is in use."""
        if seq_id in self.rows:
            raise KeyError(f"sequence {seq_id} is already here")
        if not self._free:
            self._double_rows()
        row = self.rows[seq_id] = self._free.pop()
        return row

    def remove(self, seq_id: int) -> None:
        """Take a sequence's row back. Its blocks are the caller's to release."""
        row = self.rows.pop(seq_id)
        self.note((row,))
        for group, table in enumerate(self.ids):
            table[row, : self.ends[group, row]] = PASSED
        self.starts[:, row] = self.ends[:, row] = 0
        self.num_tokens[row] = self.num_computed[row] = 0
        self._free.append(row)

    def copy(self, source: int, target: int) -> None:
        """Copy a row into another."""
        self.note((target,))
        for table in self.ids:
            table[target] = table[source]
        for state in (self.starts, self.ends, self.shareable_from):
            state[:, target] = state[:, source]
        for each in (self.num_tokens, self.num_computed, self.priorities, self.last_token_ids):
            each[target] = each[source]

    def note(self, rows: Iterable[int]) -> None:
        """Note that blocks of these rows have changed, for a strategy that asks."""
        if self.changed is not None:
            self.changed.update(rows)

    def rows_of(self, seq_ids: Iterable[int]) -> Ids:
        """Return the rows of sequences: i64[S]. Raises: KeyError for an unknown sequence."""
        return np.fromiter(map(self.rows.__getitem__, seq_ids), np.intp)

    def holders(self) -> tuple[int, ...]:
        """List the sequences that hold blocks."""
        rows = self.rows_of(self.rows)
        num_blocks = (self.ends[:, rows] - self.starts[:, rows]).sum(axis=0).tolist()
        pairs = zip(self.rows, num_blocks, strict=True)
        return tuple(seq_id for seq_id, count in pairs if count)

    def held(self, group: int, row: int) -> Ids:
        """Return a row's blocks in a group, shallowest first: i64[n]."""
        span = slice(self.starts[group, row], self.ends[group, row])
        return self.ids[group][row, span].astype(np.intp)

    def place(self, group: int, row: int, column: int, blocks: Ids) -> None:
        """Put blocks (i64[n]) into a row, from a column on."""
        self.have_columns(group, column + len(blocks))
        self.note((row,))
        self.ids[group][row, column : column + len(blocks)] = blocks

    def cut(self, group: int, row: int, end: int) -> Ids:
        """End a row's table at a column. Returns: the blocks it loses, shallowest first."""
        self.note((row,))
        begin = max(end, int(self.starts[group, row]))
        lost = slice(begin, max(begin, int(self.ends[group, row])))
        blocks = self.ids[group][row, lost].astype(np.intp)
        self.ids[group][row, lost] = PASSED
        self.ends[group, row] = begin
        return blocks

    def have_columns(self, group: int, count: int) -> None:
        """Make the group's tables at least this wide."""
        table = self.ids[group]
        if count > table.shape[1]:
            wider = np.full((table.shape[0], max(count, 2 * table.shape[1])), PASSED, np.int32)
            wider[:, : table.shape[1]] = table
            self.ids[group] = wider

    def _double_rows(self) -> None:
        count = len(self.num_tokens)
        self._free = list(range(count, 2 * count))[::-1]
        self.ids = [np.concatenate([table, np.full_like(table, PASSED)]) for table in self.ids]
        self.starts, self.ends = _twice_as_wide(self.starts), _twice_as_wide(self.ends)
        self.shareable_from = _twice_as_wide(self.shareable_from)
        self.num_tokens = _twice_as_long(self.num_tokens)
        self.num_computed = _twice_as_long(self.num_computed)
        self.priorities = _twice_as_long(self.priorities)
        self.last_token_ids = _twice_as_long(self.last_token_ids)


def spans(rows: Ids, first: Ids, counts: npt.NDArray[np.int64]) -> tuple[Ids, Ids]:
    """Return rows and columns of ``counts[i]`` places from ``first[i]`` on in row ``rows[i]``.

    Shapes: rows, first and counts [n]; the result [counts.sum()] each.
    """
    some = counts.nonzero()[0]
    rows, first, counts = rows[some], first[some], counts[some]
    # Methods: numpy's functions of the same names take twice as long for so few.
    ends = counts.cumsum()
    total = int(ends[-1]) if len(some) else 0
    if total == len(some):
        return rows, first
    return rows.repeat(counts), np.arange(total) + (first - ends + counts).repeat(counts)


def _may_always(*_: int) -> bool:
    return True


def _twice_as_long(array: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
    return np.concatenate([array, np.zeros_like(array)])


def _twice_as_wide(array: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
    return np.concatenate([array, np.zeros_like(array)], axis=1)
