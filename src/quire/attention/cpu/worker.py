"""What each thread does during a call: take items of a plan until none is left.

An item is one query over all heads (``single``) or several queries of one key-value head
(``several``), over a range of one sequence's tokens. A sequence that is split into several ranges
leaves parts, and the thread that finishes the last part merges them, in order, so that results do
not depend on chance.
"""

from llvmlite import ir

from quire.attention.cpu import panels, rows
from quire.attention.cpu.frame import AttendShape
from quire.attention.cpu.results import write_finish_row, write_merge
from quire.attention.cpu.several import write_several
from quire.attention.cpu.single import write_single
from quire.attention.cpu.thread import Thread
from quire.kernels import amx
from quire.kernels.isa import Isa
from quire.kernels.language import Code


def write_worker(module: ir.Module, shape: AttendShape, isa: Isa) -> None:
    """Add "work" and all that it needs to a module. Its parameter is a frame's address."""
    panel, row = shape.panel_shape(isa), shape.row_shape(isa)
    panels.write_panels(module, panel, isa)
    if not shape.latent:
        rows.write_rows(module, row, isa)
        padded = row.query_row_bytes // (2 if row.pairs else 4)
        copied = panels.RowCopy(width=shape.key_dim, padded=padded, offset=0, pairs=row.pairs)
        panels.copy_rows(Code(module, "copy_row_query", 6, isa), shape.query_kind, copied)
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
