"""What kernels that go over rows have in common: threads take runs of rows until none is left.

A call is a frame of 64-bit words: the next run to be taken, the number of rows, and then what the
kernel itself names.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from llvmlite import ir
from llvmlite.ir import Value
from torch import Tensor

from quire.kernels.compile import KINDS, Kernels
from quire.kernels.language import F32, LANES, Code, Int, Isa
from quire.kernels.number_formats import KIND_BYTES, load_as, narrow, rounded, store_as
from quire.kernels.threads import Threads
from quire.layers.cpu.activation import activate
from quire.units import ceil_div

# -- kernels over rows -----------------------------------------------------------------------------


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
    """Run ``body(first element, count, carried)`` over a row, at most two vectors at a time."""
    whole = width - width % (2 * LANES)
    if whole:
        carried = code.loop(
            whole, carried, lambda n, values: body(n, 2 * LANES, values), step=2 * LANES
        )
    for first in range(whole, width, LANES):
        carried = body(code.whole(first), min(LANES, width - first), carried)
    return carried


def load_piece(code: Code, address: Int, first: Int, count: int, kind: str) -> list[Value]:
    """Load elements [first, first + count) of a row as vectors of floats; zeros behind them."""
    size = KIND_BYTES[kind]
    at = address + first * size
    return [
        load_as(code, at + n * size, kind, min(LANES, count - n)) for n in range(0, count, LANES)
    ]


def store_piece(
    code: Code, values: list[Value], address: Int, first: Int, count: int, kind: str
) -> None:
    """Store each float as the nearest element of a kind."""
    size = KIND_BYTES[kind]
    at = address + first * size
    if kind == "bf16" and code.isa.bf16_convert and count == 2 * LANES:
        code.write(narrow(code, *values), at)
        return
    for n, value in zip(range(0, count, LANES), values, strict=True):
        store_as(code, value, at + n * size, kind, min(LANES, count - n))


# -- gated activation ------------------------------------------------------------------------------

# The middle of a gated feed-forward layer: ``act(gate) * up``, each rounded as torch rounds it. Or
# an activation alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class GateShape:
    """All that one compiled gate depends on."""

    width: int
    activation: str  # of ``activation.ACTIVATIONS``
    kind: str
    alone: bool = False  # nothing is gated: up is not read


class GateKernel:
    """``act(gate) * up``, in one pass."""

    def __init__(self, shape: GateShape, kernels: Kernels, threads: Threads) -> None:
        self._width = shape.width
        self._run = RowKernel(
            f"gate {shape}",
            ("gate", "up", "out"),
            shape.width * KIND_BYTES[shape.kind],
            lambda code, call, r: _write_gate_row(code, shape, call, r),
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


def _write_gate_row(code: Code, shape: GateShape, call: Words, r: Int) -> None:
    kind = shape.kind
    offset = r * (shape.width * KIND_BYTES[kind])
    gate, up, out = (call[name] + offset for name in ("gate", "up", "out"))

    def piece(first: Int, count: int, _: list[Value]) -> list[Value]:
        gates = load_piece(code, gate, first, count, kind)
        values = [rounded(code, activate(code, g, shape.activation), kind) for g in gates]
        if not shape.alone:
            ups = load_piece(code, up, first, count, kind)
            values = [code.b.fmul(v, u) for v, u in zip(values, ups, strict=True)]
        store_piece(code, values, out, first, count, kind)
        return []

    each_piece(code, shape.width, [], piece)


# -- root mean square norm -------------------------------------------------------------------------

# Root mean square norm: a row divided by the root of its mean square, times a weight.
#
# Models differ in two things: whether the quotient is rounded to the row's own dtype before the
# weight is applied, and whether the weight is counted from one.


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
            lambda code, call, r: _write_norm_row(code, shape, call, r),
            kernels=kernels,
            threads=threads,
        )

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of the shape's kinds: x [..., W], weight [W]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(x.numel() // self._width, x.data_ptr(), weight.data_ptr(), out.data_ptr())
        return out


def _write_norm_row(code: Code, shape: NormShape, call: Words, r: Int) -> None:
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


# -- rotary positions ------------------------------------------------------------------------------

# Rotary positions: the first elements of each head turned, pair by pair, by its token's angles.
#
# An element's partner lies half the turned width away. Every product and sum is rounded to the
# tensors' own dtype, as separate operations on them round.


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


# -- residual sums ---------------------------------------------------------------------------------

# a + b, element by element: what goes on past a layer, added to what the layer gives.


class Sums:
    """Of two tensors that lie alike, rounded once."""

    def __init__(self, kernels: Kernels, threads: Threads) -> None:
        self._kernels = kernels
        self._threads = threads
        self._found: dict[tuple[int, str], RowKernel] = {}

    def fit(self, a: Any, b: Any) -> bool:
        """Tell whether there is a kernel for them, each [..., width]."""
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
                lambda code, call, r: _write_sum_row(code, width, kind, call, r),
                kernels=self._kernels,
                threads=self._threads,
            )
        run(a.numel() // width, a.data_ptr(), b.data_ptr(), out.data_ptr())


def _write_sum_row(code: Code, width: int, kind: str, call: Words, r: Int) -> None:
    offset = r * (width * KIND_BYTES[kind])
    a, b, out = (call[name] + offset for name in ("a", "b", "out"))

    def piece(first: Int, count: int, _: list[Value]) -> list[Value]:
        pairs = zip(*(load_piece(code, x, first, count, kind) for x in (a, b)), strict=True)
        store_piece(code, [code.b.fadd(x, y) for x, y in pairs], out, first, count, kind)
        return []

    each_piece(code, width, [], piece)
