"""From sums to outputs: bias, activation, and one rounding where torch's separate ops round."""

from llvmlite.ir import Value

from quire.kernels.formats import load_as, store_as
from quire.kernels.language import LANES, LINE_BYTES, Code, Int
from quire.layers.cpu.activation import activate
from quire.layers.cpu.frame import ProductShape


def write_turn(code: Code) -> None:
    """(sums of a panel): [16 outputs][16 rows] become [16 rows][16 outputs], where they are."""
    sums = code.params[0]
    places = [sums + n * LINE_BYTES for n in range(LANES)]
    for place, line in zip(places, code.transpose([code.load(p) for p in places]), strict=True):
        code.store(line, place)
    code.end()


def write_finish(code: Code, shape: ProductShape) -> None:
    """(sums, the other's, count, bias, the other's, out, its row bytes, room for a line)."""
    sums, others, count, bias, other_bias, out, out_row, room = code.params

    def with_bias(place: Int, bias: Int) -> Value:
        return code.b.fadd(code.load(place), load_as(code, bias, shape.kind))

    def rounded(value: Value) -> Value:
        if shape.kind == "f32":
            return value
        store_as(code, value, room, shape.kind)
        return load_as(code, room, shape.kind)

    def row(r: Int) -> None:
        value = with_bias(sums + r * LINE_BYTES, bias)
        if shape.activation is not None:
            gate = rounded(activate(code, rounded(value), shape.activation))
            value = code.b.fmul(gate, rounded(with_bias(others + r * LINE_BYTES, other_bias)))
        store_as(code, value, out + r * out_row, shape.kind)

    code.each(count, row)
    code.end()
