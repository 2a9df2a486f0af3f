"""How much a program does: one small table, and nothing that is tried out while somebody waits.

Reasons, rather than measurements, stand behind it: decision 38.
"""

from dataclasses import dataclass, replace

from quire.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The shape of a program."""

    rows: int  # queries × the heads that share a key-value head
    tokens: int  # of a step
    num_warps: int
    num_stages: int  # steps whose entries are on their way at once, the current one included

    def heads(self, sharing: int) -> int:
        """Of those that share one, in a tile: all of them, or an equal part."""
        return ceil_div(sharing, ceil_div(sharing, self.rows))

    def queries(self, sharing: int) -> int:
        return self.rows // self.heads(sharing)


# By the wider of an entry's two parts, in elements: it decides what lies in registers.
_FEW = (
    (128, Tile(rows=16, tokens=64, num_warps=4, num_stages=3)),
    (256, Tile(rows=16, tokens=32, num_warps=4, num_stages=3)),
    (512, Tile(rows=16, tokens=32, num_warps=4, num_stages=2)),
)
_MANY = (
    (128, Tile(rows=128, tokens=64, num_warps=8, num_stages=3)),
    (256, Tile(rows=64, tokens=32, num_warps=8, num_stages=2)),
    (512, Tile(rows=64, tokens=32, num_warps=8, num_stages=2)),
)
# Products of float32 are no tensor core's work: every factor passes through registers.
_PLAIN_FEW = (
    (128, Tile(rows=16, tokens=32, num_warps=4, num_stages=2)),
    (512, Tile(rows=16, tokens=16, num_warps=4, num_stages=1)),
)
_PLAIN_MANY = (
    (128, Tile(rows=32, tokens=32, num_warps=8, num_stages=2)),
    (512, Tile(rows=16, tokens=16, num_warps=8, num_stages=1)),
)
MOST_WIDTH = 512
LEAST_STEPS = 4  # of a split: joining costs about as much as a step or two
MOST_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 8  # that a call should have, for the last ones not to be waited for


def room(width: int) -> int:
    """The next power of two, which is what Triton has vectors of; 16 at least, for products."""
    return max(16, 1 << (width - 1).bit_length())


def few_queries(*, key: int, value: int, entry_bytes: int, plain: bool, sharing: int,
                shared_bytes: int) -> Tile:  # fmt: skip
    """For sequences with a tile of queries at most, as in decoding: the memory decides."""
    width = max(room(key), room(value))
    tile = _first(_PLAIN_FEW if plain else _FEW, width)
    rows = min(room(sharing), 64 if not plain else 16)
    if rows * width > 16 * 512:  # the result's registers
        tile = replace(tile, num_warps=8)
    return _fitting(replace(tile, rows=rows), room(key) + room(value), entry_bytes, shared_bytes)


def many_queries(*, key: int, value: int, entry_bytes: int, plain: bool, shared_bytes: int) -> Tile:
    """For longer chunks: arithmetic decides."""
    tile = _first(_PLAIN_MANY if plain else _MANY, max(room(key), room(value)))
    return _fitting(tile, room(key) + room(value), entry_bytes, shared_bytes)


def num_splits(num_programs: int, num_tokens: int, tile: Tile, num_processors: int) -> int:
    """Parts of each walk over ``num_tokens`` at most: as many as keep the processors busy."""
    wanted = ceil_div(_PROGRAMS_PER_PROCESSOR * num_processors, max(1, num_programs))
    possible = ceil_div(num_tokens, LEAST_STEPS * tile.tokens)
    return max(1, min(wanted, possible, MOST_SPLITS))


def _first(table: tuple[tuple[int, Tile], ...], width: int) -> Tile:
    return next(tile for most, tile in table if width <= most)


def _fitting(tile: Tile, width: int, entry_bytes: int, shared_bytes: int) -> Tile:
    """With fewer steps on their way where they would not fit beside the queries."""
    own = tile.rows * width * max(entry_bytes, 2)
    step = tile.tokens * width * entry_bytes
    fits = max(1, (shared_bytes - own) // step)
    return replace(tile, num_stages=min(tile.num_stages, fits))
