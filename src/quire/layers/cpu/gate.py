"""The middle of a gated feed-forward layer: ``act(gate) * up``, each rounded as torch rounds it."""

from dataclasses import dataclass

import torch
from llvmlite.ir import Value
from torch import Tensor

from quire.kernels.formats import KIND_BYTES, rounded
from quire.kernels.language import Code, Int
from quire.kernels.machine import Kernels
from quire.kernels.threads import Threads
from quire.layers.cpu.activation import activate
from quire.layers.cpu.rows import RowKernel, Words, each_piece, load_piece, store_piece


@dataclass(frozen=True, slots=True, kw_only=True)
class GateShape:
    """All that one compiled gate depends on."""

    width: int
    activation: str  # of ``activation.ACTIVATIONS``
    kind: str


class Gate:
    """``act(gate) * up``, in one pass."""

    def __init__(self, shape: GateShape, kernels: Kernels, threads: Threads) -> None:
        self._width = shape.width
        self._run = RowKernel(
            f"gate {shape}",
            ("gate", "up", "out"),
            shape.width * KIND_BYTES[shape.kind],
            lambda code, call, r: _write_row(code, shape, call, r),
            kernels=kernels,
            threads=threads,
        )

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Of the shape's kind: gate [..., W], up [..., W]."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        num_rows = gate.numel() // self._width
        self._run(num_rows, gate.data_ptr(), up.data_ptr(), out.data_ptr())
        return out


def _write_row(code: Code, shape: GateShape, call: Words, r: Int) -> None:
    kind = shape.kind
    offset = r * (shape.width * KIND_BYTES[kind])
    gate, up, out = (call[name] + offset for name in ("gate", "up", "out"))

    def piece(first: Int, count: int, _: list[Value]) -> list[Value]:
        values = [
            code.b.fmul(rounded(code, activate(code, g, shape.activation), kind), u)
            for g, u in zip(
                load_piece(code, gate, first, count, kind),
                load_piece(code, up, first, count, kind),
                strict=True,
            )
        ]
        store_piece(code, values, out, first, count, kind)
        return []

    each_piece(code, shape.width, [], piece)
