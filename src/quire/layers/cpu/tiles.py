"""A block of outputs at a time by AMX: weights as they lie, inputs packed before.

    c[o][r] = Σ_w weight[o][w] · x[r][w]     words w are pairs of bfloat16; o, r: sixteen each

A tile of weights is sixteen rows of 64 bytes, as they lie; a tile of inputs is sixteen words of
sixteen rows, packed so. Two tiles of weights and two of inputs share their loads; where there are
more rows, the weights of a block come from the second cache again. Every sum is added up in the
same order, however many rows there are. Source: Intel SDM, chapter on AMX.
"""

from llvmlite import ir
from llvmlite.ir import Value

from quire.kernels import amx
from quire.kernels.isa import Isa
from quire.kernels.language import I8, I64, INTS, LANES, LINE_BYTES, Code, Int
from quire.layers.cpu.frame import BLOCK, PANEL_BYTES
from quire.layers.cpu.rest import copy_rest

STEP = 2 * LANES  # inputs of a tile
_TILE_BYTES = LANES * LINE_BYTES
_AT_ONCE = 2  # panels of sixteen rows
_TILES = BLOCK // LANES  # of weights
_SUMS, _WEIGHTS, _INPUTS = 0, 4, 6  # numbers of tiles
_STEP_BYTES = BLOCK * LINE_BYTES  # of a block's weights
_NOTHING = ir.VoidType()


def write_tiles(module: ir.Module, isa: Isa) -> None:
    """Add "pack", "multiply", "shape_tiles" and "release_tiles" to a module."""
    amx.write_shape(Code(module, "shape_tiles", 0, isa))
    amx.write_release(Code(module, "release_tiles", 0, isa))
    _pack(Code(module, "pack", 6, isa))
    for panels in range(1, _AT_ONCE + 1):
        for first in (True, False):
            _some_panels(Code(module, _name(panels, first), 7, isa), panels, first)
    _multiply(Code(module, "multiply", 8, isa))


def _name(panels: int, first: bool) -> str:
    return f"multiply_{panels}" + "_first" * first


def _pack(code: Code) -> None:
    """(x, its row bytes, rows, inputs, target, room): tiles [panels / 2][steps][2][16][16] words.

    Rows behind the last one repeat it.
    """
    x, row_bytes, num_rows, num_inputs, target, room = code.params
    whole = num_inputs // STEP * LINE_BYTES
    rest = num_inputs % STEP
    steps = (num_inputs + (STEP - 1)) // STEP
    panels = (num_rows + (LANES - 1)) // LANES

    def panel(first: Int) -> None:
        rows = [x + (first + n).at_most(num_rows - 1) * row_bytes for n in range(LANES)]
        number = first // LANES
        inside = number % _AT_ONCE
        together = (panels - number + inside).at_most(_AT_ONCE)
        here = target + ((number - inside) * steps + inside) * _TILE_BYTES

        def tile(places: list[Int], to: Int) -> None:
            lines = code.transpose([code.read(place, INTS) for place in places])
            for n, line in enumerate(lines):
                code.write(line, to + n * LINE_BYTES)

        def step(offset: Int) -> None:
            tile([row + offset for row in rows], here + offset * LANES * together)

        def last() -> None:
            lines = [room + n * LINE_BYTES for n in range(LANES)]
            for row, line in zip(rows, lines, strict=True):
                copy_rest(code, 2, row + whole, rest, line)
            tile(lines, here + whole * LANES * together)

        code.each(whole, step, step=LINE_BYTES)
        code.when(rest >= 1, last)

    code.each(num_rows, panel, step=LANES)
    code.end()


def _multiply(code: Code) -> None:
    """(weights, their row bytes, inputs, x, rows, c, next, room): the sums of a block.

    They lie in panels of sixteen rows. Meanwhile memory is asked for the weights of ``next``.
    """
    weights, row_bytes, num_inputs, x, num_rows, sums, ahead, room = code.params
    panels = (num_rows + (LANES - 1)) // LANES
    whole, rest = num_inputs // STEP, num_inputs % STEP
    steps = (num_inputs + (STEP - 1)) // STEP
    last = code.choose(rest >= 1, room, code.whole(0))

    def copy_last() -> None:
        for o in range(BLOCK):
            source = weights + row_bytes * o + whole * LINE_BYTES
            copy_rest(code, 2, source, rest, room + o * LINE_BYTES)

    def run(panel: Int, number: int, first: bool) -> None:
        code.run(
            _name(number, first), weights, row_bytes, whole, x + panel * steps * _TILE_BYTES,
            sums + panel * PANEL_BYTES, ahead, last,
        )  # fmt: skip

    def some_panels(panel: Int) -> None:
        def run_some(first: bool) -> None:
            code.either(
                panels - panel >= _AT_ONCE,
                lambda: run(panel, _AT_ONCE, first),
                lambda: run(panel, 1, first),
            )

        code.either(panel.equals(0), lambda: run_some(True), lambda: run_some(False))

    code.when(rest >= 1, copy_last)
    code.each(panels, some_panels, step=_AT_ONCE)
    code.end()


def _some_panels(code: Code, panels: int, first: bool) -> None:
    """(weights, their row bytes, whole steps, x, c, next, the last inputs' weights or nothing)."""
    weights, row_bytes, steps, x, sums, ahead, last = code.params
    line = ir.Constant(I64, LINE_BYTES)
    pairs = [(o, p) for o in range(_TILES) for p in range(panels)]
    for number in range(len(pairs)):
        code.call("llvm.x86.tilezero", _NOTHING, _tile(_SUMS + number))

    def multiply(n: Int, here: Int, stride: Value) -> None:
        for p in range(panels):
            _load(code, _INPUTS + p, x + n * (_TILE_BYTES * panels) + p * _TILE_BYTES, line)
        for o in range(_TILES):
            _load(code, _WEIGHTS + o, here + Int(code.b, stride) * (o * LANES), stride)
            for p in range(panels):
                tiles = (_SUMS + o * panels + p, _WEIGHTS + o, _INPUTS + p)
                code.call("llvm.x86.tdpbf16ps", _NOTHING, *map(_tile, tiles))

    def step(n: Int) -> None:
        if first:
            code.prefetch(ahead + n * _STEP_BYTES, _STEP_BYTES)
        multiply(n, weights + n * LINE_BYTES, row_bytes.value)

    code.each(steps, step)
    code.when(last >= 1, lambda: multiply(steps, last, line))
    for number, (o, p) in enumerate(pairs):
        place = code.pointer(sums + p * PANEL_BYTES + o * _TILE_BYTES)
        code.call("llvm.x86.tilestored64", _NOTHING, _tile(_SUMS + number), place, line)
    code.end()


def _load(code: Code, number: int, place: Int, row_bytes: Value) -> None:
    code.call("llvm.x86.tileloadd64", _NOTHING, _tile(number), code.pointer(place), row_bytes)


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)
