"""What a call of a product tells its threads, and where a thread keeps what.

Everything here is a 64-bit integer for them: an address, a count, or a stride in bytes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.language import LANES, LINE_BYTES, Isa
from quire.kernels.number_formats import KIND_BYTES
from quire.units import align_up, ceil_div

FRAME = (
    "next_item", "next_thread",  # counters, shared by the threads
    "scratch", "scratch_bytes",  # of all threads; of one
    "items", "num_items",
    "x", "x_row", "num_rows", "num_inputs",
)  # fmt: skip
# Of each weight, behind the frame. A gated product has two of them and writes to the first's out.
MATRIX = ("weight", "weight_row", "num_outputs", "bias", "out", "out_row")
ITEM = ("matrix", "start", "stop")  # some outputs of a matrix
Numbers = npt.NDArray[np.int64]
WORD_BYTES = 8
BLOCK = 2 * LANES  # outputs that are computed together: their weights are one piece of memory
OUTPUTS = 4  # of a block, that share a load of inputs where there are no tiles
KEPT_STEPS = 64  # of their weights, that are floats for many rows
KEPT_BYTES = OUTPUTS * KEPT_STEPS * LINE_BYTES
KEPT_ROWS = 12  # at least, for which it is worth it
MOST_PANELS = 3  # of sixteen rows, that share a load of weights
# Outputs of a block whose sums are in registers at a time. A sum waits for the one before it: eight
# hide that for floats, and of pairs it takes more, which a single panel needs more outputs for.
PANEL_OUTPUTS = (8, 8, 8, 8)
ONE_PANEL_OUTPUTS = (16, 16)
# Rows of weights that are multiples of so many bytes apart fall on the same lines of the nearest
# cache, which are twelve on Zen 5: more rows drive each other out.
ALIAS_BYTES = 4096
ALIASED_OUTPUTS = (11, 11, 10)
_PANEL_ROWS = 6  # at least, for which they are worth it
PARTS_BYTES = OUTPUTS * LINE_BYTES  # of a row's sums, while steps are left
_ITEM_BYTES = 2**16  # of weights, at most: threads end at about the same time
_ITEMS_A_THREAD = 4  # at least, if there are so many blocks
_LEAST_AT_ONCE, _MOST_AT_ONCE = 2 * LANES, 8 * LANES  # rows of many
_INPUT_BYTES = 2**20  # theirs
_PAGE_BYTES = 4096
ROOM_BYTES = BLOCK * LINE_BYTES  # for the last inputs of a block
PANEL_BYTES = BLOCK * LINE_BYTES  # of the sums of a block, for sixteen rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """Everything that a product's machine code depends on."""

    kind: str  # of weights, inputs and outputs
    tiles: bool  # AMX multiplies
    activation: str | None = None  # of the first matrix's outputs, times the second's
    one_order: bool = False  # of sums, for any number of rows, where there would be two

    def pairs(self, isa: Isa) -> bool:
        """Tell whether inputs are bfloat16 pairs; else they become float32."""
        return self.tiles or (isa.bf16_dot and self.kind == "bf16")

    def keeps(self, isa: Isa) -> bool:
        """Tell whether weights become floats first, which many rows can share."""
        return self.kind != "f32" and not self.pairs(isa)

    def panel_rows(self, isa: Isa) -> int | None:
        """Return from how many rows on they are the lanes; None: never, or tiles multiply.

        Measured on Zen 5: it takes as long for one row so as for sixteen, and by vectors less for
        fewer than six.
        """
        by_panels = self.pairs(isa) or (self.kind == "f32" and isa.float_panels)
        if self.tiles or not by_panels:
            return None
        return 1 if self.one_order else _PANEL_ROWS

    def step(self, isa: Isa) -> int:
        """Count the inputs that are multiplied at once, by one instruction a row."""
        return 2 * LANES if self.pairs(isa) else LANES

    def most_rows(self, isa: Isa) -> int:
        """Return the most rows that are faster here than by torch, which packs weights first.

        Measured on two cores with AMX, torch held back to what an older CPU has, and on two of
        Zen 5, where torch is not faster with any number of rows of pairs or of floats. Where a CPU
        does not know bfloat16 or float16, torch is a few times slower from two rows on.
        """
        if self.tiles:
            return 128
        if self.panel_rows(isa) is not None:
            return sys.maxsize
        wide = isa.registers >= 32
        known = {
            "f32": True,
            "bf16": isa.bf16_convert,
            "f16": wide and "+avx512fp16" in isa.features,
        }[self.kind]
        return sys.maxsize if not known else 16 if wide else 8

    def rows_at_once(self, isa: Isa, num_inputs: int) -> int:
        """Return how many of many rows are multiplied in one pass over the weights.

        Their inputs stay in a core's second cache, and the weights are read few times.
        """
        row_bytes = num_inputs * (2 if self.pairs(isa) else 4)
        return max(_LEAST_AT_ONCE, min(_MOST_AT_ONCE, _INPUT_BYTES // row_bytes // LANES * LANES))

    def scratch_bytes(self, isa: Isa, num_rows: int, num_inputs: int) -> int:
        """Count the bytes of a thread: a tile, the sums of two blocks, all inputs, what is kept."""
        panels = ceil_div(num_rows, LANES)
        inputs = panels * LANES * ceil_div(num_inputs, self.step(isa)) * LINE_BYTES
        kept = KEPT_BYTES + panels * LANES * PARTS_BYTES if self.keeps(isa) else 0
        return align_up(ROOM_BYTES + PANEL_BYTES * 2 * panels + inputs + kept, _PAGE_BYTES)

    @property
    def element_bytes(self) -> int:
        return KIND_BYTES[self.kind]


def items_of(widths: Sequence[int], row_bytes: int, threads: int) -> Numbers:
    """Cut the outputs of each matrix into items: i64[items, len(ITEM)]."""
    blocks = sum(ceil_div(width, BLOCK) for width in widths)
    most = min(_ITEM_BYTES // (BLOCK * row_bytes), blocks // (threads * _ITEMS_A_THREAD))
    step = BLOCK * max(1, most)
    return cut(widths, step)


def cut(sizes: Sequence[int], step: int) -> Numbers:
    """Cut each matrix into items of ``step`` at most: i64[items, len(ITEM)]."""
    items = [
        (matrix, start, min(start + step, size))
        for matrix, size in enumerate(sizes)
        for start in range(0, size, step)
    ]
    return np.array(items, np.int64)
