"""Parts: decode beside the bandwidth of a copy, prefill beside a product of matrices.

Keys and values are random, in a pool of blocks whose order is shuffled. Each backend's result is
held against torch's before it is timed.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.setting import GIB, MIB, Setting, claim, in_turns, median_ratio, note, show
from quire.attention import AttentionBackend, AttentionBatch
from quire.attention.flashinfer.backend import cannot_serve
from quire.kv import LayerView
from quire.kv.storage.entries import quantize
from quire.spec import AttentionSpec, FullAttention, SlidingWindow
from quire.spec.layer_specs import dtype_bytes

LEAST_OF_A_COPY, LEAST_OF_FLASHINFER = 0.85, 0.95
ERROR = 2e-2  # max |Δ| over max |result|, of bfloat16 and of codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A step of one layer: ``num_seqs`` sequences of ``context`` tokens, the last ones queries."""

    num_seqs: int
    context: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None

    @property
    def name(self) -> str:
        parts = [f"{self.num_seqs} x {self.context}", f"{self.heads}/{self.kv_heads} heads"]
        parts += [f"block {self.block_size}", self.dtype]
        if self.queries > 1:
            parts.insert(1, f"{self.queries} new")
        return ", ".join(parts + ([f"window {self.window}"] if self.window else []))

    @property
    def spec(self) -> AttentionSpec:
        if self.window:
            return SlidingWindow(
                num_kv_heads=self.kv_heads,
                head_dim=self.width,
                dtype=self.dtype,
                window=self.window,
            )
        return FullAttention(num_kv_heads=self.kv_heads, head_dim=self.width, dtype=self.dtype)

    @property
    def read_bytes(self) -> int:
        """Of keys, values and scales that a decode step has to read."""
        tokens = min(self.context, self.window or self.context)
        return self.num_seqs * tokens * self.spec.bytes_per_token

    @property
    def flops(self) -> int:
        """Of a prefill: two products, over what is not masked."""
        first = self.context - self.queries
        pairs = self.num_seqs * sum(range(first + 1, self.context + 1))
        return 4 * self.heads * self.width * pairs


DECODE = (
    Shape(num_seqs=64, context=4096),
    Shape(num_seqs=64, context=4096, block_size=32),
    Shape(num_seqs=64, context=4096, heads=16),
    Shape(num_seqs=64, context=4096, dtype="float8_e4m3fn"),
    Shape(num_seqs=64, context=4096, dtype="int8"),
    Shape(num_seqs=64, context=4096, window=1024),
    Shape(num_seqs=1, context=32_768),
    Shape(num_seqs=16, context=8192),
    Shape(num_seqs=256, context=1024),
)
PREFILL = (
    Shape(num_seqs=1, context=8192, queries=8192),
    Shape(num_seqs=8, context=4608, queries=512),
    Shape(num_seqs=16, context=1024, queries=1024),
)


def small(shape: Shape) -> Shape:
    """Shrink a shape for an emulation."""
    return Shape(
        num_seqs=2,
        context=80 if shape.window is None else 100,
        queries=min(shape.queries, 20),
        heads=4,
        kv_heads=2,
        width=64,
        dtype=shape.dtype,
        window=shape.window and 40,
    )


def shapes(setting: Setting, wanted: tuple[Shape, ...]) -> list[Shape]:
    """Return the shapes; where they are emulated, each kind of them once, and small."""
    return list(dict.fromkeys(map(small, wanted))) if setting.emulated else list(wanted)


def copied(setting: Setting) -> float:
    """Measure a copy on the device in GB/s: the driver's own, and a kernel's, the faster of both.

    In a graph the driver's copy reaches two thirds of what a kernel does.
    """
    size = 8 * MIB if setting.emulated else min(4 * GIB, setting.free_bytes() // 4)
    source = torch.ones(size // 8, dtype=torch.int64, device=setting.device)
    target = torch.empty_like(source)
    calls = {
        "copy": lambda: target.copy_(source),
        "kernel": lambda: torch.bitwise_not(source, out=target),
    }
    seconds = in_turns(setting, calls, inner=5)
    return 2 * size / min(min(each) for each in seconds.values()) / 1e9


def decode(setting: Setting) -> None:
    """Measure each backend beside the copy's bandwidth, and ours beside FlashInfer's."""
    say_what_is_missing(setting)
    limit = copied(setting)
    note(f"A copy on the device: {limit:,.0f} GB/s, read and written.")
    ours = setting.ours()[0]
    for number, shape in enumerate(shapes(setting, DECODE)):
        rows, timed = [], compared(setting, shape)
        for name, seconds in timed.items():
            gbs = [shape.read_bytes / each / 1e9 for each in seconds]
            share = max(gbs) / limit
            took = f"{statistics.median(seconds) * 1e6:,.0f}"
            speeds = f"{max(gbs):,.0f}", f"{statistics.median(gbs):,.0f}"
            rows.append([name, took, *speeds, f"{share:.0%}"])
            if name == ours and number == 0:
                claim(
                    f"decode, {shape.name}, beside a copy",
                    max(gbs),
                    limit,
                    "GB/s",
                    f">= {LEAST_OF_A_COPY}",
                    share >= LEAST_OF_A_COPY,
                    timed=True,
                )
        show(f"Decode, {shape.name}", "kernel | us | GB/s, best | median | of a copy", rows)
        beside_flashinfer(f"decode, {shape.name}", ours, timed)


def prefill(setting: Setting) -> None:
    """Measure TFLOP/s of chunks, beside a product of matrices and torch's attention."""
    say_what_is_missing(setting)
    peak = product_tflops(setting)
    note(f"A product of matrices: {peak:,.0f} TFLOP/s.")
    ours = setting.ours()[0]
    for shape in shapes(setting, PREFILL):
        rows, timed = [], compared(setting, shape)
        if shape.queries == shape.context:
            timed |= in_turns(setting, {"torch, one tensor": dense(setting, shape)}, inner=3)
        for name, seconds in timed.items():
            tflops = shape.flops / min(seconds) / 1e12
            took = f"{statistics.median(seconds) * 1e6:,.0f}"
            rows.append([name, took, f"{tflops:,.1f}", f"{tflops / peak:.0%}"])
        show(f"Prefill, {shape.name}", "kernel | us | TFLOP/s | of a product", rows)
        beside_flashinfer(f"prefill, {shape.name}", ours, timed)


def say_what_is_missing(setting: Setting) -> None:
    """Note why a backend cannot run."""
    for name, why in setting.missing().items():
        note(f"{name}: {why}")


def beside_flashinfer(name: str, ours: str, timed: dict[str, list[float]]) -> None:
    """Tell our time beside FlashInfer's, in seconds, where both were measured."""
    if ours not in timed or "flashinfer" not in timed:
        return
    ratio = median_ratio(timed[ours], timed["flashinfer"])
    claim(
        f"{name}, beside FlashInfer",
        statistics.median(timed[ours]) * 1e6,
        statistics.median(timed["flashinfer"]) * 1e6,
        "us (ratio: of speeds)",
        f">= {LEAST_OF_FLASHINFER}",
        ratio >= LEAST_OF_FLASHINFER,
        ratio,
        timed=True,
    )


def compared(setting: Setting, shape: Shape) -> dict[str, list[float]]:
    """Measure the seconds of each backend that serves the shape, after its result was checked."""
    q, view, batch = step(setting, shape)
    scale = shape.width**-0.5
    backends = {**dict([setting.ours()]), **setting.backends()}
    if cannot_serve(shape.spec) is not None:
        backends.pop("flashinfer", None)
    checked = Checked(setting, shape, q, view, batch, scale)
    calls: dict[str, Callable[[], object]] = {}
    for name, backend in backends.items():
        wrong = 1.0
        try:
            wrong = checked.error(backend)
        except Exception as error:  # of a compiler, say: the others are timed all the same
            note(f"{name}, {shape.name}: {' '.join(repr(error).split())[:500]}")
        claim(
            f"{name}, {shape.name}, beside torch's result",
            wrong,
            None,
            "max |error| over max |result|",
            f"<= {ERROR}",
            wrong <= ERROR,
        )
        if wrong <= ERROR:
            calls[name] = lambda backend=backend: backend.attend(
                q, view, batch, spec=shape.spec, scale=scale
            )
        else:
            note(f"{name}, {shape.name}: WRONG, and not timed")
    return in_turns(setting, calls) if calls else {}


@dataclass(frozen=True, slots=True)
class Checked:
    """Some sequences of a step, whose results torch's attention gives too."""

    setting: Setting
    shape: Shape
    q: Tensor
    view: LayerView
    batch: AttentionBatch
    scale: float

    def error(self, backend: AttentionBackend) -> float:
        """Return the largest difference from torch's result, as a share of the largest result."""
        got = backend.attend(self.q, self.view, self.batch, spec=self.shape.spec, scale=self.scale)
        worst = 0.0
        for index in {0, self.shape.num_seqs - 1}:
            rows = slice(index * self.shape.queries, (index + 1) * self.shape.queries)
            alone = AttentionBatch(
                query_starts=np.array([0, self.shape.queries]),
                context_lens=self.batch.context_lens[index : index + 1],
                tables=self.batch.tables[index : index + 1],
                slots=self.batch.slots[rows],
                block_size=self.batch.block_size,
            )
            want = self.setting.oracle().attend(
                self.q[rows], self.view, alone, spec=self.shape.spec, scale=self.scale
            )
            difference = (got[rows].float() - want.float()).abs().max() / want.float().abs().max()
            worst = max(worst, float(difference) if difference.isfinite() else 1.0)
        return worst


def step(setting: Setting, shape: Shape) -> tuple[Tensor, LayerView, AttentionBatch]:
    """Make queries [T, H, D], a layer's pool full of random entries, and whose blocks are where."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    blocks_each = -(-shape.context // shape.block_size)
    num_blocks = shape.num_seqs * blocks_each
    order = np.random.default_rng(setting.seed).permutation(num_blocks)

    def random(*size: int) -> Tensor:
        made = torch.empty(*size, dtype=torch.bfloat16, device=setting.device)
        return made.normal_(generator=generator)

    entries = random(num_blocks, shape.kv_heads, 2, shape.block_size, shape.width)
    scales = None
    if dtype_bytes(shape.dtype) == 1:
        entries, scales = quantize(entries, getattr(torch, shape.dtype))
    view = LayerView(
        k=entries[:, :, 0],
        v=entries[:, :, 1],
        k_scale=None if scales is None else scales[:, :, 0],
        v_scale=None if scales is None else scales[:, :, 1],
        slots_per_row=shape.block_size,
    )
    tables = order.reshape(shape.num_seqs, blocks_each)
    num_tokens = shape.num_seqs * shape.queries
    batch = AttentionBatch(
        query_starts=np.arange(shape.num_seqs + 1) * shape.queries,
        context_lens=np.full(shape.num_seqs, shape.context),
        tables=torch.from_numpy(tables),
        slots=torch.zeros(num_tokens, dtype=torch.int64),
        block_size=shape.block_size,
    )
    return random(num_tokens, shape.heads, shape.width), view, batch


def dense(setting: Setting, shape: Shape) -> Callable[[], object]:
    """Make a call of torch's attention where all keys and values lie in one tensor."""
    q, k, v = (
        torch.randn(
            shape.num_seqs,
            heads,
            shape.context,
            shape.width,
            dtype=torch.bfloat16,
            device=setting.device,
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def product_tflops(setting: Setting) -> float:
    """Measure a product of two matrices in TFLOP/s."""
    size = 256 if setting.emulated else 8192
    a, b = torch.randn(2, size, size, device=setting.device).bfloat16()
    seconds = in_turns(setting, {"product": lambda: a @ b}, inner=5)
    return 2 * size**3 / min(min(each) for each in seconds.values()) / 1e12
