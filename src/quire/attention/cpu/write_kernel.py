"""The write side: each token's key and value into its slot, quantized on the way.

Source of the formats: ``quire.kv.storage.entries``, whose bits these kernels reproduce.
"""

import struct
from dataclasses import dataclass

import torch
from llvmlite import ir
from llvmlite.ir import Value
from torch import Tensor

from quire.attention.cpu.call_frame import WORD_BYTES
from quire.attention.gather import check_entries
from quire.kernels.compile import KINDS, Kernels, with_dense_rows, words
from quire.kernels.language import F32, LANES, Code, Int, Isa
from quire.kernels.number_formats import KIND_BYTES, load_as, store_as
from quire.kernels.threads import KernelCall, Threads
from quire.kv import LayerView
from quire.units import ceil_div


def view_words(view: LayerView) -> tuple[int, ...]:
    """Return where a layer's keys, values and scales lie: the words from "k" to "scale_token"."""
    scales = words(view.k_scale, 3)
    return (
        *words(view.k, 3), *words(view.v, 3),
        scales[0], *words(view.v_scale, 0), *scales[1:],
    )  # fmt: skip


_FRAME = (
    "next_item", "num_tokens", "slots",
    "from_k", "from_k_token", "from_k_head", "from_v", "from_v_token", "from_v_head",
    "slots_per_row", "k", "k_row", "k_head", "k_token", "v", "v_row", "v_head", "v_token",
    "k_scale", "v_scale", "scale_row", "scale_head", "scale_token",
)  # fmt: skip
STEP_WORDS = range(_FRAME.index("num_tokens"), _FRAME.index("slots") + 1)  # that differ by step
_TOKENS_PER_ITEM = 32
_WORTH_THREADS = 2**17  # bytes of a call
SOURCES = ("f32", "f16", "bf16")  # kinds that arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShape:
    """One kind of layer and what is written into it."""

    kv_heads: int
    key_dim: int
    value_dim: int
    source: str  # kind of what arrives
    kind: str  # of what is kept


def write_writer(module: ir.Module, shape: WriteShape, isa: Isa) -> None:
    """Add "work" to a module: threads take runs of tokens until none is left."""
    code = Code(module, "work", 1, isa)
    frame = code.params[0]
    call = {name: code.number(frame + n * WORD_BYTES) for n, name in enumerate(_FRAME) if n}

    def item() -> None:
        first = code.take(frame) * _TOKENS_PER_ITEM
        code.leave_when(first >= call["num_tokens"])
        last = (first + _TOKENS_PER_ITEM).at_most(call["num_tokens"])
        code.each(last, token, start=first)

    def place(what: str, t: Int) -> Int:
        """The address of k, v, k_scale or v_scale of a token's first head."""
        slot = code.number(call["slots"] + t * WORD_BYTES)
        row, inside = slot // call["slots_per_row"], slot % call["slots_per_row"]
        stride = "scale" if what.endswith("scale") else what
        return call[what] + row * call[f"{stride}_row"] + inside * call[f"{stride}_token"]

    def token(t: Int) -> None:
        following = (t + 1).at_most(call["num_tokens"] - 1)
        for what, width in (("k", shape.key_dim), ("v", shape.value_dim)):
            source = call[f"from_{what}"] + t * call[f"from_{what}_token"]
            target, ahead = place(what, t), place(what, following)
            scale = place(f"{what}_scale", t)

            def head(
                h: Int,
                what: str = what,
                width: int = width,
                source: Int = source,
                target: Int = target,
                scale: Int = scale,
                ahead: Int = ahead,
            ) -> None:
                from_here, to = source + h * call[f"from_{what}_head"], h * call[f"{what}_head"]
                # A line that is written must first be had.
                code.prefetch_block(ahead + to, width * KIND_BYTES[shape.kind], writes=True)
                _entry(code, shape, width, from_here, target + to, scale + h * call["scale_head"])

            code.each(shape.kv_heads, head)

    code.forever(item)
    code.end()


def _entry(code: Code, shape: WriteShape, width: int, source: Int, target: Int, scale: Int) -> None:
    """Write one key or value of one token and head."""
    size = KIND_BYTES[shape.source]
    if shape.source == shape.kind:
        _copy(code, source, target, width * size)
        return
    pieces = [(n, min(LANES, width - n)) for n in range(0, width, LANES)]
    found = [load_as(code, source + n * size, shape.source, count) for n, count in pieces]
    if shape.kind == "i8":
        found = _codes(code, found, scale)
    for value, (n, count) in zip(found, pieces, strict=True):
        store_as(code, value, target + n * KIND_BYTES[shape.kind], shape.kind, count)


def _codes(code: Code, values: list[Value], scale_at: Int) -> list[Value]:
    """Quantize an entry: its codes are whole floats, and its scale is written."""
    amax = code.b.bitcast(code.largest_magnitude(values), F32)
    most = ir.Constant(F32, 127.0)
    code.write(code.b.fdiv(amax, most), scale_at)
    by = code.splat(code.b.fdiv(most, amax))
    limit = code.floats(127.0)
    found = []
    for value in values:
        product = code.b.fmul(value, by)
        number = code.b.fcmp_ordered("ord", product, product)
        product = code.b.select(number, product, code.floats(0.0))
        found.append(code.max(code.min(code.round(product), limit), code.floats(-127.0)))
    return found


def _copy(code: Code, source: Int, target: Int, nbytes: int) -> None:
    done = 0
    for size in (64, 32, 16, 8, 4, 2, 1):
        while nbytes - done >= size:
            typ = ir.VectorType(ir.IntType(8), size)
            code.write(code.read(source + done, typ), target + done)
            done += size


def token_bytes(k: Tensor, v: Tensor) -> int:
    """Return the bytes of a token's entry: k [T, K, D] and v [T, K, Dv]."""
    return (k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]) * k.itemsize


class KernelWriter:
    """Writes one layer's entries. Its view's addresses are looked up once."""

    def __init__(self, view: LayerView, kernels: Kernels, threads: Threads) -> None:
        self._view = view  # kept, for its memory is written to
        self._kernels = kernels
        self._threads = threads
        self._work: dict[torch.dtype, int] = {}  # by what arrives
        self._frame = struct.Struct(f"{len(_FRAME)}q")
        self._place = view.slots_per_row, *view_words(view)

    def __call__(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put entries into their slots: slots i64[T], k [T, K, D], v [T, K, Dv].

        Raises: ValueError for other shapes or dtypes; then nothing has been written.
        """
        work = self._work.get(k.dtype) or self._compile(k.dtype)
        check_entries(self._view, len(slots), slots.dtype, k, v)
        slots, k, v = (with_dense_rows(x) for x in (slots, k, v))
        step, num_threads = self.words(slots, token_bytes(k, v))
        frame = self._frame.pack(0, *step, *words(k, 2), *words(v, 2), *self._place)
        self._threads.run(work, frame, num_threads)

    def words(self, slots: Tensor, entry_bytes: int) -> tuple[tuple[int, ...], int]:
        """Return the frame's words of a step, for slots i64[T], and on how many threads it runs."""
        num_tokens = len(slots)
        threads = min(self._threads.most, ceil_div(num_tokens, _TOKENS_PER_ITEM))
        worth_it = num_tokens * entry_bytes > _WORTH_THREADS
        return (num_tokens, slots.data_ptr()), threads if worth_it else 1

    def call(self, k: Tensor, v: Tensor) -> KernelCall | None:
        """Make a call for entries that always come from k [T, K, D] and v [T, K, Dv].

        None if their rows do not lie side by side. Raises: ValueError as a call does.
        """
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            return None
        work = self._work.get(k.dtype) or self._compile(k.dtype)
        check_entries(self._view, len(k), torch.int64, k, v)
        frame = self._frame.pack(0, 0, 0, *words(k, 2), *words(v, 2), *self._place)
        return KernelCall(work, frame, 1)

    def _compile(self, dtype: torch.dtype) -> int:
        k, v = self._view.k, self._view.v
        if KINDS.get(dtype) not in SOURCES:
            raise ValueError(f"there is no kernel that writes {dtype}")
        shape = WriteShape(
            kv_heads=k.shape[1],
            key_dim=k.shape[-1],
            value_dim=v.shape[-1],
            source=KINDS[dtype],
            kind=KINDS[k.dtype],
        )
        isa = self._kernels.isa
        work = self._kernels.address(f"write {shape}", lambda m: write_writer(m, shape, isa))
        self._work[dtype] = work
        return work
