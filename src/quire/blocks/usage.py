"""What of the held blocks can still be read: the tokens that memory is for."""

import numpy as np
import numpy.typing as npt

from quire.blocks.tables import BlockTables, spans
from quire.spec import Group, KeptWhole

_Counts = npt.NDArray[np.int64]


def used_tokens(tables: BlockTables, number: int, group: Group, num_held: int) -> int:
    """Tokens of a group that some holder can still read, each counted once.

    ``num_held``: distinct blocks that the group's tables hold.
    """
    # Rows without a sequence are all zero: to add them too costs less than to leave them out.
    if tables.ends[number].sum() - tables.starts[number].sum() == num_held:  # nothing is shared
        num_tokens = tables.num_tokens
        return int((num_tokens - group.live_start(num_tokens)).sum())
    blocks, _, low, high = _readable(tables, number, group)
    return int(_joined_lengths(blocks, low, high).sum())


def contents(
    tables: BlockTables, number: int, group: Group, refs: npt.NDArray[np.int32]
) -> tuple[_Counts, _Counts]:
    """Of each block, the tokens that some holder can still read, and the first to come of those.

    A state counts as one token. A block without holders has the holder -1. ``refs``: how many
    hold each.

    Shapes: refs i32[N] → i64[N], i64[N].
    """
    fills, holders = np.zeros(len(refs), np.int64), np.full(len(refs), -1, np.int64)
    blocks, owners, low, high = _readable(tables, number, group)
    holders[blocks[::-1]] = owners[::-1]  # of an id that is there twice, the last one stays
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
    """Each entry of the tables: its block, its sequence, and which tokens [low, high) it can read.

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
    """What each interval adds to those before it on the same block; their sum is their union."""
    order = np.lexsort((low, blocks))
    blocks, begins, ends = blocks[order], low[order], high[order]
    # Each block on a stretch of its own, so that one running maximum serves all of them.
    stretch = int(high.max(initial=0)) + 1
    offset = np.cumsum(np.diff(blocks, prepend=-1) != 0) * stretch
    reached = np.maximum.accumulate(np.append(0, ends + offset))[:-1]
    added = np.empty_like(high)
    added[order] = (ends + offset - np.maximum(begins + offset, reached)).clip(0)
    return added
