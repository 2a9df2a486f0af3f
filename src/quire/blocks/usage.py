"""What of the held blocks can still be read: the tokens that memory is for."""

import numpy as np

from quire.blocks.tables import BlockTables, spans
from quire.spec import Group


def used_tokens(tables: BlockTables, number: int, group: Group, num_held: int) -> int:
    """Tokens of a group that some holder can still read, each counted once.

    ``num_held``: distinct blocks that the group's tables hold.
    """
    size, rows = tables.block_size, tables.rows_of(tables.rows)
    starts, ends = tables.starts[number, rows], tables.ends[number, rows]
    num_tokens = tables.num_tokens[rows]
    first = group.live_start(num_tokens)
    if (ends - starts).sum() == num_held:
        return int((num_tokens - first).sum())  # nothing is shared
    at, columns = spans(np.arange(len(rows)), starts, ends - starts)
    readable = np.stack(
        [
            tables.ids[number][rows[at], columns],
            np.clip(first[at] - columns * size, 0, size),
            np.clip(num_tokens[at] - columns * size, 0, size),
        ]
    )
    tokens: dict[int, int] = {}  # block → a bit for each token of it that can be read
    for block, low, high in np.unique(readable, axis=1).T.tolist():
        if low < high:
            tokens[block] = tokens.get(block, 0) | (1 << high) - (1 << low)
    return sum(bits.bit_count() for bits in tokens.values())
