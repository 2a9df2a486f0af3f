"""Root mean square norm: a row divided by the root of its mean square, times a weight.

Models differ in two things: whether the quotient is rounded to the row's own dtype before the
weight is applied, and whether the weight is counted from one.
"""

from dataclasses import dataclass

import torch
from llvmlite import ir
from llvmlite.ir import Value
from torch import Tensor

from quire.kernels.formats import KIND_BYTES, rounded
from quire.kernels.language import F32, Code, Int
from quire.kernels.machine import Kernels
from quire.kernels.threads import Threads
from quire.layers.cpu.rows import RowKernel, Words, each_piece, load_piece, store_piece


@dataclass(frozen=True, slots=True, kw_only=True)
class NormForm:
    """Which of the ways to write it a model has."""

    rounds_first: bool  # to the row's dtype, before the weight
    from_one: bool  # the weight is what is added to one


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    """All that one compiled norm depends on."""

    width: int
    kind: str  # of rows and weights
    eps: float
    form: NormForm


class Norm:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension."""

    def __init__(self, shape: NormShape, kernels: Kernels, threads: Threads) -> None:
        self._width = shape.width
        self._run = RowKernel(
            f"norm {shape}",
            ("x", "weight", "out"),
            shape.width * KIND_BYTES[shape.kind],
            lambda code, call, r: _write_row(code, shape, call, r),
            kernels=kernels,
            threads=threads,
        )

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of the shape's kinds: x [..., W], weight [W]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(x.numel() // self._width, x.data_ptr(), weight.data_ptr(), out.data_ptr())
        return out


def _write_row(code: Code, shape: NormShape, call: Words, r: Int) -> None:
    width, kind = shape.width, shape.kind
    offset = r * (width * KIND_BYTES[kind])
    x, out = call["x"] + offset, call["out"] + offset

    def add_squares(first: Int, count: int, sums: list[Value]) -> list[Value]:
        values = load_piece(code, x, first, count, kind)
        squares = [code.fma(v, v, total) for v, total in zip(values, sums, strict=False)]
        return [*squares, *sums[len(squares) :]]

    sums = each_piece(code, width, [code.floats(0.0)] * 2, add_squares)
    mean = code.b.fdiv(code.sum(code.total(sums)), ir.Constant(F32, float(width)))
    root = code.call("llvm.sqrt.f32", F32, code.b.fadd(mean, ir.Constant(F32, shape.eps)))
    by = code.splat(code.b.fdiv(ir.Constant(F32, 1.0), root))

    def scale(first: Int, count: int, _: list[Value]) -> list[Value]:
        values = [code.times(v, by) for v in load_piece(code, x, first, count, kind)]
        if shape.form.rounds_first:
            values = [rounded(code, v, kind) for v in values]
        weights = load_piece(code, call["weight"], first, count, kind)
        if shape.form.from_one:
            weights = [code.plus(w, code.floats(1.0)) for w in weights]
        values = [code.times(v, w) for v, w in zip(values, weights, strict=True)]
        store_piece(code, values, out, first, count, kind)
        return []

    each_piece(code, width, [], scale)
