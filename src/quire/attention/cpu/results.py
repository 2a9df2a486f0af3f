"""From areas to outputs: the parts of a sequence merged, a row divided by its sum.

An area holds R rows of queries that are not finished: maxima m[R], sums l[R], outputs o[R][Dv].
"""

from llvmlite import ir

from quire.attention.cpu.frame import AttendShape, Layout
from quire.kernels.exponential import exp2
from quire.kernels.formats import KIND_BYTES, kind_factor, store_as
from quire.kernels.language import F32, I32, LANES, LINE_BYTES, LOG2_E, Code, Int


def write_finish_row(code: Code, shape: AttendShape) -> None:
    """(m, l, o, target, sink): o / l, where a sink takes its share of l, as the output's kind."""
    m_at, l_at, out, target, sink_at = code.params
    total = code.splat(code.read(l_at, F32))
    by = code.floats(kind_factor(shape.kind))
    if shape.sinks:
        top = code.splat(code.read(m_at, F32))
        sink = code.times(code.splat(code.read(sink_at, F32)), code.floats(LOG2_E))
        highest = code.max(top, sink)
        own = exp2(code, code.minus(top, highest))
        total = code.fma(total, own, exp2(code, code.minus(sink, highest)))
        by = code.times(by, own)
    by = code.b.fdiv(by, total)
    size = KIND_BYTES[shape.query_kind]
    for first in range(0, shape.value_dim, LANES):
        count = min(LANES, shape.value_dim - first)
        value = code.times(code.load(out + first * 4), by)
        store_as(code, value, target + first * size, shape.query_kind, count)
    code.end()


def write_merge(code: Code, shape: AttendShape) -> None:
    """(first area, number of areas, rows): all of them into the first one, in order."""
    area, num_parts, num_rows = code.params
    layout = Layout(shape, code.isa)
    row_bytes, part_bytes = layout.row_bytes, layout.area_bytes(num_rows)

    def row(part: Int, r: Int) -> None:
        here, there = area, area + part * part_bytes
        tops = [code.splat(code.read(x + r * 4, F32)) for x in (here, there)]
        top = code.max(*tops)
        by = [exp2(code, code.minus(x, top)) for x in tops]

        def join(offset: Int) -> None:
            mine = code.times(code.load(here + offset), by[0])
            code.store(code.fma(code.load(there + offset), by[1], mine), here + offset)

        sums = num_rows * 4 + r * 4
        mine, theirs = (code.splat(code.read(x + sums, F32)) for x in (here, there))
        total = code.fma(theirs, by[1], code.times(mine, by[0]))
        lane = ir.Constant(I32, 0)
        code.write(code.b.extract_element(total, lane), here + sums)
        code.write(code.b.extract_element(top, lane), here + r * 4)
        begin = num_rows * 8 + r * row_bytes
        code.each(row_bytes, lambda n: join(begin + n), step=LINE_BYTES)

    code.each(num_parts, lambda p: code.each(num_rows, lambda r: row(p, r)), start=1)
    code.end()
