"""Shapes and layouts: what a call tells its threads, and where they keep what they work on.

To the threads everything here is a 64-bit integer: an address, a count, or a stride in bytes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from quire.kernels.language import LANES, LINE_BYTES, Int, Isa
from quire.kernels.number_formats import KIND_BYTES
from quire.units import align_up, ceil_div

TILE = 64  # tokens of a tile of one query: the width of a row of scores
KEYS = 64  # tokens of a tile of many queries
MAX_PANELS = 32  # of an item
_MOST_ROWS = 8  # queries that ``rows`` takes at once

# One call, as its threads see it: 64-bit integers, but the last three are floats. The others are
# addresses, counts, or strides in bytes.
FRAME = (
    "next_item", "next_thread",  # counters, shared by the threads
    "scratch", "scratch_bytes",  # of all threads; of one
    "items", "num_items", "groups", "areas", "lows", "highs",
    "table", "table_row", "block_size",
    "out", "out_token", "out_head", "q", "q_token", "q_head",
    "k", "k_block", "k_head", "k_token", "v", "v_block", "v_head", "v_token",
    "k_scale", "v_scale", "scale_block", "scale_head", "scale_token",
    "sinks", "factor", "cap_in", "cap_out",
)  # fmt: skip
# rows is 0 where one query goes through ``rows``; first_row counts queries x G from first_query on.
ITEM = ("rows", "seq", "first_query", "head", "first_row", "start", "stop", "area", "group")
GROUP = ("remaining", "num_parts", "first_area")
WORD_BYTES = 8
_PAGE_BYTES = 4096

Rows = TypeVar("Rows", int, npt.NDArray[np.int64], Int)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The shape of the kernels for one query a sequence."""

    queries: int  # that share a key-value head, at most 8 at once
    key_dim: int
    value_dim: int
    kind: str  # of keys and values in memory
    pairs: bool  # queries are bfloat16, multiplied in pairs; else float32

    @property
    def width(self) -> int:
        """Elements of a vector of a key."""
        return 2 * LANES if self.pairs else LANES

    @property
    def key_bytes(self) -> int:
        return self.key_dim * KIND_BYTES[self.kind]

    @property
    def value_bytes(self) -> int:
        return self.value_dim * KIND_BYTES[self.kind]

    @property
    def query_row_bytes(self) -> int:
        """Bytes of one query as ``dot_rows`` reads it: padded with zeros."""
        return align_up(self.key_dim, 2 * LANES) * (2 if self.pairs else 4)

    @property
    def out_row_bytes(self) -> int:
        """Bytes of one row of ``o``."""
        return align_up(self.value_dim, LANES) * 4

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores, and of what ``dot_rows`` needs behind them."""
        return self.queries * (TILE * 4 + LANES * LINE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelShape:
    """The shape of the kernels for many queries."""

    key_parts: tuple[int, ...]  # widths of what lies side by side in a tile's row of keys
    value_dim: int
    kind: str  # of keys and values in memory
    query_kind: str
    pairs: bool  # multiplied as pairs of bfloat16; else as float32
    tiles: bool = False  # and those by AMX

    @property
    def scaled_rows(self) -> bool:
        """Whether int8 becomes values while it is copied: parts of a key have their own scales.

        Else scores and weights are scaled, which are fewer.
        """
        return self.kind == "i8" and len(self.key_parts) > 1

    @property
    def scaled_scores(self) -> bool:
        return self.kind == "i8" and not self.scaled_rows

    @property
    def at_once(self) -> int:
        """Panels that go through a tile of tokens together: what they share and leave fits L1."""
        return 1 if self.tiles else 4

    @property
    def word_elements(self) -> int:
        return 2 if self.pairs else 1

    @property
    def key_words(self) -> int:
        """Words of a row of keys or queries: padded with zeros to whole vectors."""
        return align_up(sum(self.key_parts), LANES * self.word_elements) // self.word_elements

    @property
    def value_rows(self) -> int:
        """Rows of Oᵀ: the width of a value, padded."""
        return align_up(self.value_dim, LANES)

    @property
    def weight_words(self) -> int:
        """Words of a column of Pᵀ."""
        return KEYS // self.word_elements

    @property
    def value_row_bytes(self) -> int:
        """Bytes of a row of values before it is paired with the next one."""
        return align_up(self.value_dim, 2 * LANES) * (2 if self.pairs else 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendShape:
    """One kind of layer: everything that its machine code depends on."""

    kv_heads: int
    sharing: int  # query heads that share a key-value head
    key_dim: int
    value_dim: int
    kind: str  # of keys and values in memory
    query_kind: str
    latent: bool = False  # keys and values are one latent; the view's "value" is a rotary key
    sinks: bool = False
    softcap: bool = False

    @property
    def view_dims(self) -> tuple[int, int]:
        """Widths of the view's keys and values, as it calls them."""
        dims = self.key_dim, self.value_dim
        return (dims[1], dims[0]) if self.latent else dims

    @property
    def at_once(self) -> int:
        """Queries of one key-value head that ``rows`` takes at once."""
        return ceil_div(self.sharing, ceil_div(self.sharing, _MOST_ROWS))

    @property
    def rounds(self) -> int:
        return ceil_div(self.sharing, self.at_once)

    @property
    def num_rows(self) -> int:
        """Rows of an area that ``rows`` fills; some may stand for no query."""
        return self.kv_heads * self.rounds * self.at_once

    def row_shape(self, isa: Isa) -> RowShape:
        """Return the shape of the kernels for one query."""
        return RowShape(
            queries=self.at_once,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            kind=self.kind,
            pairs=isa.bf16_dot and self.kind == self.query_kind == "bf16",
        )

    def panel_shape(self, isa: Isa) -> PanelShape:
        # A float8 or int8 is a bfloat16, exactly; a float16 is not, nor an int8 with its scale.
        """Return the shape of the kernels for many queries."""
        kinds = ("bf16", "f8") if self.latent else ("bf16", "f8", "i8")
        fits = self.query_kind == "bf16" and self.kind in kinds
        return PanelShape(
            key_parts=(self.value_dim, self.key_dim) if self.latent else (self.key_dim,),
            value_dim=self.value_dim,
            kind=self.kind,
            query_kind=self.query_kind,
            pairs=fits and (isa.amx or isa.bf16_dot),
            tiles=fits and isa.amx,
        )


@dataclass(frozen=True)
class Layout:
    """Where a thread keeps what: byte offsets into its scratch memory."""

    shape: AttendShape
    isa: Isa

    @cached_property
    def panel(self) -> PanelShape:
        return self.shape.panel_shape(self.isa)

    @cached_property
    def row(self) -> RowShape:
        return self.shape.row_shape(self.isa)

    @cached_property
    def offsets(self) -> dict[str, int]:
        panel, row = self.panel, self.row
        sizes = {
            "area": self.area_bytes(max(self.shape.num_rows, MAX_PANELS * LANES)),
            "scales": 2 * KEYS * 4,
            "queries": MAX_PANELS * LANES * panel.key_words * 4,
            "query_rows": max(
                LANES * panel.key_words * 4, self.shape.num_rows * row.query_row_bytes
            ),
            "keys": KEYS * panel.key_words * 4,
            "values": KEYS * panel.value_row_bytes,
            "paired": panel.weight_words * panel.value_rows * 4,
            "scores": max(panel.at_once * KEYS * LINE_BYTES, row.score_bytes),
            "weights": panel.at_once * panel.weight_words * LINE_BYTES,
            "out": MAX_PANELS * panel.value_rows * LINE_BYTES,
            "state": MAX_PANELS * 2 * LINE_BYTES,
            "reach": MAX_PANELS * 2 * LINE_BYTES,
        }
        offsets, total = {}, 0
        for name, size in sizes.items():
            offsets[name] = total
            total += align_up(size, LINE_BYTES)
        return {**offsets, "end": align_up(total, _PAGE_BYTES)}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of an area's output."""
        return self.row.out_row_bytes

    def area_bytes(self, num_rows: Rows) -> Rows:
        """Return the bytes of an area, or of many at once, or as the kernels work them out."""
        lines = (num_rows * (8 + self.row_bytes) + LINE_BYTES - 1) // LINE_BYTES
        return lines * LINE_BYTES
