"""A block of outputs at a time by ordinary vectors: each sum runs along a row of weights.

    c[o][r] = Σ_i weight[o][i] · x[r][i]

A few outputs' rows of weights stay in the nearest cache while all rows of inputs pass by. Every
sum is added up in the same order, however many rows there are.
"""

from collections.abc import Iterator

from llvmlite import ir
from llvmlite.ir import Value

from quire.kernels.formats import load_as
from quire.kernels.isa import Isa
from quire.kernels.language import FLOATS, I32, INTS, LANES, LINE_BYTES, Code, Int
from quire.layers.cpu.frame import BLOCK, PANEL_BYTES, ProductShape
from quire.layers.cpu.rest import copy_rest

_OUTPUTS = 4  # that share a load of inputs


def write_vectors(module: ir.Module, shape: ProductShape, isa: Isa) -> None:
    """Add "pack" and "multiply" to a module."""
    _pack(Code(module, "pack", 6, isa), shape)
    for name, rows, first in _forms(isa):
        _some_rows(Code(module, name, 8, isa), shape, rows, first)
    _multiply(Code(module, "multiply", 8, isa), shape)


def _rows(isa: Isa) -> int:
    """That share a load of weights."""
    return 4 if isa.registers >= 32 else 1


def _forms(isa: Isa) -> Iterator[tuple[str, int, bool]]:
    for rows in sorted({1, _rows(isa)}):
        for first in (True, False):
            yield _name(rows, first), rows, first


def _name(rows: int, first: bool) -> str:
    return f"multiply_{rows}" + "_first" * first


def _pack(code: Code, shape: ProductShape) -> None:
    """(x, its row bytes, rows, inputs, target, room for a line): rows of whole steps."""
    x, row_bytes, num_rows, num_inputs, target, room = code.params
    step, size = shape.step(code.isa), shape.element_bytes
    whole = num_inputs // step
    rest = num_inputs - whole * step
    target_row = (num_inputs + (step - 1)) // step * LINE_BYTES

    def row(r: Int) -> None:
        source, to = x + r * row_bytes, target + r * target_row

        def some(n: Int, place: Int) -> None:
            code.write(_read_step(code, shape, place), to + n * LINE_BYTES)

        code.each(whole, lambda n: some(n, source + n * (step * size)))

        def last() -> None:
            copy_rest(code, size, source + whole * (step * size), rest, room)
            some(whole, room)

        code.when(rest >= 1, last)

    code.each(num_rows, row)
    code.end()


def _read_step(code: Code, shape: ProductShape, place: Int) -> Value:
    """As many inputs or weights as are multiplied at once: floats, or words of two bfloat16."""
    if shape.pairs(code.isa):
        return code.read(place, INTS)
    return load_as(code, place, shape.kind)


def _multiply(code: Code, shape: ProductShape) -> None:
    """(weights, their row bytes, inputs, x, rows, c, next, room): the sums of a block.

    They lie in panels of sixteen rows. Meanwhile memory is asked for the weights of ``next``.
    """
    weights, row_bytes, num_inputs, x, num_rows, sums, ahead, room = code.params
    step, size = shape.step(code.isa), shape.element_bytes
    x_row = (num_inputs + (step - 1)) // step * LINE_BYTES
    whole = num_inputs // step
    rest = num_inputs - whole * step
    at_once = _rows(code.isa)

    def last_inputs() -> None:
        for o in range(BLOCK):
            source = weights + row_bytes * o + whole * (step * size)
            copy_rest(code, size, source, rest, room + o * LINE_BYTES)

    code.when(rest >= 1, last_inputs)

    def some_outputs(o: Int) -> None:
        here, line = weights + o * row_bytes, room + o * LINE_BYTES
        following = code.choose(o + _OUTPUTS < BLOCK, weights + (o + _OUTPUTS) * row_bytes, ahead)

        def run(rows: int, r: Int, first: bool) -> None:
            to = sums + r // LANES * PANEL_BYTES + o * LINE_BYTES + r % LANES * 4
            code.run(
                _name(rows, first), here, row_bytes, num_inputs, x + r * x_row, x_row, to,
                following, line,
            )  # fmt: skip

        def several(r: Int, rows: int) -> None:
            code.either(r.equals(0), lambda: run(rows, r, True), lambda: run(rows, r, False))

        full = num_rows // at_once * at_once
        if at_once > 1:
            code.each(full, lambda r: several(r, at_once), step=at_once)
        code.each(num_rows, lambda r: several(r, 1), start=full if at_once > 1 else 0)

    code.each(BLOCK, some_outputs, step=_OUTPUTS)
    code.end()


def _some_rows(code: Code, shape: ProductShape, rows: int, first: bool) -> None:
    """(weights, their row bytes, inputs, x, its row bytes, c, next, the outputs' last inputs)."""
    weights, row_bytes, num_inputs, x, x_row, sums, ahead, last = code.params
    step, size = shape.step(code.isa), shape.element_bytes
    whole = num_inputs // step
    some_bytes = _OUTPUTS * step * size  # of weights
    places = [weights + row_bytes * o for o in range(_OUTPUTS)]

    def add(totals: list[Value], n: Int, places: list[Int]) -> list[Value]:
        typ = INTS if shape.pairs(code.isa) else FLOATS
        inputs = [code.read(x + x_row * r + n * LINE_BYTES, typ) for r in range(rows)]
        found = []
        for o, place in enumerate(places):
            weight = _read_step(code, shape, place)
            for r in range(rows):
                total = totals[o * rows + r]
                found.append(
                    code.dot_pairs(total, weight, inputs[r])
                    if shape.pairs(code.isa)
                    else code.fma(weight, inputs[r], total)
                )
        return found

    def whole_step(n: Int, totals: list[Value]) -> list[Value]:
        if first:
            code.prefetch(ahead + n * some_bytes, some_bytes)
        return add(totals, n, [place + n * (step * size) for place in places])

    totals = code.loop(whole, [code.floats(0.0)] * (_OUTPUTS * rows), whole_step)

    def rest(_: Int, totals: list[Value]) -> list[Value]:
        return add(totals, whole, [last + o * LINE_BYTES for o in range(_OUTPUTS)])

    has_rest = num_inputs - whole * step
    totals = code.loop(has_rest.at_most(1), totals, rest)
    for o in range(_OUTPUTS):
        for r in range(rows):
            place = sums + o * LINE_BYTES + r * 4
            code.write(_sum(code, totals[o * rows + r]), place)
    code.end()


def _sum(code: Code, value: Value) -> Value:
    """Of all lanes, in an order that no compiler may change."""
    width = LANES
    while width > 1:
        width //= 2
        picks = [width + i for i in range(width)] + [0] * (LANES - width)
        value = code.b.fadd(value, code.shuffle(value, value, picks))
    return code.b.extract_element(value, ir.Constant(I32, 0))
