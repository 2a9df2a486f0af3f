"""a + b, element by element: what goes on past a layer, added to what the layer gives."""

from typing import Any

from llvmlite.ir import Value
from torch import Tensor

from quire.kernels.formats import KIND_BYTES
from quire.kernels.language import Code, Int
from quire.kernels.machine import Kernels
from quire.kernels.tensors import KINDS
from quire.kernels.threads import Threads
from quire.layers.cpu.rows import ROW_KINDS, RowKernel, Words, each_piece, load_piece, store_piece


class Sums:
    """Of two tensors that lie alike, rounded once."""

    def __init__(self, kernels: Kernels, threads: Threads) -> None:
        self._kernels = kernels
        self._threads = threads
        self._found: dict[tuple[int, str], RowKernel] = {}

    def fit(self, a: Any, b: Any) -> bool:
        """Whether there is a kernel for them."""
        tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
        return (
            tensors
            and a.shape == b.shape
            and a.dim() > 0
            and a.numel() > 0
            and a.dtype == b.dtype
            and KINDS.get(a.dtype) in ROW_KINDS
            and a.is_cpu
            and b.is_cpu
            and a.is_contiguous()
            and b.is_contiguous()
        )

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """``out`` lies as they do."""
        width, kind = a.shape[-1], KINDS[a.dtype]
        run = self._found.get((width, kind))
        if run is None:
            run = self._found[width, kind] = RowKernel(
                f"sum {width} {kind}",
                ("a", "b", "out"),
                width * KIND_BYTES[kind],
                lambda code, call, r: _write_row(code, width, kind, call, r),
                kernels=self._kernels,
                threads=self._threads,
            )
        run(a.numel() // width, a.data_ptr(), b.data_ptr(), out.data_ptr())


def _write_row(code: Code, width: int, kind: str, call: Words, r: Int) -> None:
    offset = r * (width * KIND_BYTES[kind])
    a, b, out = (call[name] + offset for name in ("a", "b", "out"))

    def piece(first: Int, count: int, _: list[Value]) -> list[Value]:
        pairs = zip(*(load_piece(code, x, first, count, kind) for x in (a, b)), strict=True)
        store_piece(code, [code.b.fadd(x, y) for x, y in pairs], out, first, count, kind)
        return []

    each_piece(code, width, [], piece)
