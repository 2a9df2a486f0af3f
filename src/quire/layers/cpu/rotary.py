"""Rotary positions: the first elements of each head turned, pair by pair, by its token's angles.

An element's partner lies half the turned width away. Every product and sum is rounded to the
tensors' own dtype, as separate operations on them round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats import KIND_BYTES, rounded
from quire.kernels.language import LANES, Code, Int
from quire.kernels.machine import Kernels
from quire.kernels.threads import Threads
from quire.layers.cpu.rows import RowKernel, Words, load_piece, store_piece

_WORDS = (
    "cos", "cos_token", "sin", "sin_token",
    "q", "q_head", "q_token", "q_out", "q_out_head", "q_out_token",
    "k", "k_head", "k_token", "k_out", "k_out_head", "k_out_token",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryShape:
    """All that one compiled rotation depends on."""

    query_heads: int
    kv_heads: int
    width: int  # of a head
    turned: int  # of these, the first so many
    kind: str


class Rotary:
    """Turns the queries and keys of a step in one pass."""

    def __init__(self, shape: RotaryShape, kernels: Kernels, threads: Threads) -> None:
        self._size = KIND_BYTES[shape.kind]
        heads = shape.query_heads + shape.kv_heads
        self._run = RowKernel(
            f"rotary {shape}",
            _WORDS,
            heads * shape.width * self._size,
            lambda code, call, t: _write_token(code, shape, call, t),
            kernels=kernels,
            threads=threads,
        )

    def __call__(
        self,
        q: Tensor,  # [1, H, T, D]
        k: Tensor,  # [1, K, T, D]
        cos: Tensor,  # [1, T, turned]
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Both turned, in the same shapes."""
        size = self._size
        q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        _, q_head, q_token, _ = q.stride()
        _, k_head, k_token, _ = k.stride()
        _, q_out_head, q_out_token, _ = q_out.stride()
        _, k_out_head, k_out_token, _ = k_out.stride()
        self._run(
            q.shape[2],
            cos.data_ptr(), cos.stride(1) * size, sin.data_ptr(), sin.stride(1) * size,
            q.data_ptr(), q_head * size, q_token * size,
            q_out.data_ptr(), q_out_head * size, q_out_token * size,
            k.data_ptr(), k_head * size, k_token * size,
            k_out.data_ptr(), k_out_head * size, k_out_token * size,
        )  # fmt: skip
        return q_out, k_out


def _write_token(code: Code, shape: RotaryShape, call: Words, t: Int) -> None:
    cos, sin = (call[name] + t * call[f"{name}_token"] for name in ("cos", "sin"))
    for name, heads in (("q", shape.query_heads), ("k", shape.kv_heads)):
        places = [
            (call[x] + t * call[f"{x}_token"], call[f"{x}_head"]) for x in (name, f"{name}_out")
        ]

        def head(h: Int, places: list[tuple[Int, Int]] = places) -> None:
            source, target = (first + h * stride for first, stride in places)
            _turn(code, shape, source, target, cos, sin)

        code.each(heads, head)


def _turn(code: Code, shape: RotaryShape, source: Int, target: Int, cos: Int, sin: Int) -> None:
    """One head: out = x * cos + partner * sin, the first half's partners taken negative."""
    half, kind = shape.turned // 2, shape.kind
    for first in range(0, half, 2 * LANES):
        count = min(2 * LANES, half - first)
        low, high = code.whole(first), code.whole(half + first)
        x = [load_piece(code, source, at, count, kind) for at in (low, high)]
        for at, own, other, join in ((low, *x, code.b.fsub), (high, *x[::-1], code.b.fadd)):
            cosines = load_piece(code, cos, at, count, kind)
            sines = load_piece(code, sin, at, count, kind)
            values = [
                join(rounded(code, code.b.fmul(a, c), kind), rounded(code, code.b.fmul(b, s), kind))
                for a, b, c, s in zip(own, other, cosines, sines, strict=True)
            ]
            store_piece(code, values, target, at, count, kind)
    for first in range(shape.turned, shape.width, 2 * LANES):
        count, at = min(2 * LANES, shape.width - first), code.whole(first)
        store_piece(code, load_piece(code, source, at, count, kind), target, at, count, kind)
