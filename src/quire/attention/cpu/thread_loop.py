"""What each thread does during a call: take items of a plan until none is left.

An item is one query over all heads (``decode_kernel``) or several queries of one key-value head
(``prefill_kernel``), over a range of one sequence's tokens. A sequence that is split into several
ranges leaves parts, and the thread that finishes the last part merges them, in order, so that
results do not depend on chance.
"""

from llvmlite import ir

from quire.attention.cpu.call_frame import AttendShape, Layout
from quire.attention.cpu.decode_kernel import write_rows, write_single
from quire.attention.cpu.prefill_kernel import RowCopy, copy_rows, write_panels, write_several
from quire.attention.cpu.thread_code import Thread
from quire.kernels import amx
from quire.kernels.language import F32, I32, LANES, LINE_BYTES, LOG2_E, Code, Int, Isa, exp2
from quire.kernels.number_formats import KIND_BYTES, kind_factor, store_as

# -- parts merged ----------------------------------------------------------------------------------

# From areas to outputs: merge the parts of a sequence, and divide a row by its sum.
#
# An area holds R rows of queries that are not finished: maxima m[R], sums l[R], outputs o[R][Dv].


def write_finish_row(code: Code, shape: AttendShape) -> None:
    """Write a kernel (m, l, o, target, sink): o / l, a sink in l, as the output's kind."""
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
    """Write a kernel (first area, number of areas, rows): merge all into the first, in order."""
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


# -- the worker ------------------------------------------------------------------------------------


def write_worker(module: ir.Module, shape: AttendShape, isa: Isa) -> None:
    """Add "work" and all that it needs to a module. Its parameter is a frame's address."""
    panel, row = shape.panel_shape(isa), shape.row_shape(isa)
    write_panels(module, panel, isa)
    if not shape.latent:
        write_rows(module, row, isa)
        padded = row.query_row_bytes // (2 if row.pairs else 4)
        copied = RowCopy(width=shape.key_dim, padded=padded, offset=0, pairs=row.pairs)
        copy_rows(Code(module, "copy_row_query", 6, isa), shape.query_kind, copied)
    if panel.tiles:
        amx.write_shape(Code(module, "shape_tiles", 0, isa))
        amx.write_release(Code(module, "release_tiles", 0, isa))
    write_finish_row(Code(module, "finish_row", 5, isa), shape)
    write_merge(Code(module, "merge", 3, isa), shape)
    _write_work(Code(module, "work", 1, isa), shape)


def _write_work(code: Code, shape: AttendShape) -> None:
    thread = Thread(code, shape)
    tiles = thread.layout.panel.tiles

    def item() -> None:
        thread.begin_item()
        if shape.latent:
            write_several(thread)
            return
        is_single = thread.item["rows"].equals(0)
        code.either(is_single, lambda: write_single(thread), lambda: write_several(thread))

    if tiles:
        code.run("shape_tiles")
    code.forever(item)
    if tiles:
        code.run("release_tiles")
    code.end()
