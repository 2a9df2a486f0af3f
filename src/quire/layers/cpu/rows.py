"""What kernels that go over rows have in common: threads take runs of rows until none is left.

A call is a frame of 64-bit words: the next run to be taken, the number of rows, and then what the
kernel itself names.
"""

import struct
from collections.abc import Callable, Mapping
from typing import TypeAlias

from llvmlite import ir
from llvmlite.ir import Value

from quire.kernels.formats import KIND_BYTES, load_as, narrow, store_as
from quire.kernels.isa import Isa
from quire.kernels.language import LANES, Code, Int
from quire.kernels.machine import Kernels
from quire.kernels.threads import Threads
from quire.units import ceil_div

ROW_KINDS = ("f32", "bf16", "f16")

Words: TypeAlias = Mapping[str, Int]
WriteRow: TypeAlias = Callable[[Code, Words, Int], None]

_WORD_BYTES = 8
_ITEM_BYTES = 2**15  # of rows that a thread takes at once
_WORTH_THREADS = 2**17  # bytes of a call


class RowKernel:
    """One kernel, ready to be called with the words that it names."""

    def __init__(
        self,
        name: str,
        words: tuple[str, ...],
        row_bytes: int,
        write_row: WriteRow,
        *,
        kernels: Kernels,
        threads: Threads,
    ) -> None:
        self._item_rows = max(1, _ITEM_BYTES // row_bytes)
        self._row_bytes = row_bytes
        self._threads = threads
        self._kernels = kernels  # whose code is good as long as it lives
        self._frame = struct.Struct(f"{2 + len(words)}q")
        self._work = kernels.address(
            name, lambda m: _write_work(m, kernels.isa, words, self._item_rows, write_row)
        )

    def __call__(self, num_rows: int, *words: int) -> None:
        num_threads = 1
        if num_rows * self._row_bytes > _WORTH_THREADS:
            num_threads = min(self._threads.most, ceil_div(num_rows, self._item_rows))
        self._threads.run(self._work, self._frame.pack(0, num_rows, *words), num_threads)


def _write_work(
    module: ir.Module, isa: Isa, words: tuple[str, ...], item_rows: int, write_row: WriteRow
) -> None:
    """Add "work" to a module."""
    code = Code(module, "work", 1, isa)
    frame = code.params[0]
    num_rows = code.number(frame + _WORD_BYTES)
    call = {name: code.number(frame + n * _WORD_BYTES) for n, name in enumerate(words, start=2)}

    def item() -> None:
        first = code.take(frame) * item_rows
        code.leave_when(first >= num_rows)
        last = (first + item_rows).at_most(num_rows)
        code.each(last, lambda r: write_row(code, call, r), start=first)

    code.forever(item)
    code.end()


def each_piece(
    code: Code,
    width: int,
    carried: list[Value],
    body: Callable[[Int, int, list[Value]], list[Value]],
) -> list[Value]:
    """``body(first element, count, carried)`` over a row, at most two vectors at a time."""
    whole = width - width % (2 * LANES)
    if whole:
        carried = code.loop(
            whole, carried, lambda n, values: body(n, 2 * LANES, values), step=2 * LANES
        )
    for first in range(whole, width, LANES):
        carried = body(code.whole(first), min(LANES, width - first), carried)
    return carried


def load_piece(code: Code, address: Int, first: Int, count: int, kind: str) -> list[Value]:
    """Elements [first, first + count) of a row, as vectors of floats; zeros behind them."""
    size = KIND_BYTES[kind]
    at = address + first * size
    return [
        load_as(code, at + n * size, kind, min(LANES, count - n)) for n in range(0, count, LANES)
    ]


def store_piece(
    code: Code, values: list[Value], address: Int, first: Int, count: int, kind: str
) -> None:
    """The other way: each float as the nearest element of a kind."""
    size = KIND_BYTES[kind]
    at = address + first * size
    if kind == "bf16" and code.isa.bf16_convert and count == 2 * LANES:
        code.write(narrow(code, *values), at)
        return
    for n, value in zip(range(0, count, LANES), values, strict=True):
        store_as(code, value, at + n * size, kind, min(LANES, count - n))
