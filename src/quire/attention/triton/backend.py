"""``TritonAttention``: a step's calls of the kernels, for layers in any storage.

Sequences with few queries have one kind of tile and those with many another (``launch``), so a step
has one call or two, and a ``join`` follows each whose walks are split. The calls and their programs
follow from sizes that a recorded step keeps (``PlacedBatch``): a CUDA graph of the step may be
played with other contexts, tables and chunks, which the kernels read on the device.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from quire.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    NoHostPart,
    PlacedBatch,
)
from quire.attention.triton import launch as tiles
from quire.attention.triton.kernels import attend, join
from quire.attention.triton.launch import (
    ELEMENTS,
    MOST_SPLITS,
    MOST_WIDTH,
    AttendLaunch,
    Gpu,
    Tile,
    address_of,
    alignment_of,
    find_gpu,
    kept_as,
    room,
    shape_of,
)
from quire.attention.triton.writers import TritonWriter
from quire.devices import on_device
from quire.kv import LayerView
from quire.spec import AttentionSpec
from quire.units import ceil_div

_LOG2_E = 1.4426950408889634
_JOINED_TOGETHER = 8  # splits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of the kernel: for which sequences, in which tiles."""

    tile: Tile
    several: bool  # tiles of a sequence
    above: int  # serves sequences with more queries than that …
    upto: int  # … and no more than that
    num_tiles: int
    num_splits: int
    num_queries: int  # of a tile, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _TritonStep:
    """A step's calls, planned once for all layers of a group."""

    spec: AttentionSpec  # kept, so that its id stays its own
    shape: AttendLaunch
    calls: list[_Call]


@final
class TritonAttention(AttentionBackend):
    """Kernels in Triton, on CUDA; in its interpreter on any machine."""

    name = "triton"
    replays = NoHostPart()

    def __init__(self) -> None:
        self._gpus: dict[torch.device, Gpu | str] = {}

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        gpu = self._gpu(device)
        if isinstance(gpu, str):
            return gpu
        try:
            kept_as(getattr(torch, spec.dtype))
        except ValueError as error:
            return str(error)
        widest = max(width for _, width in spec.entry_shapes)
        if widest > MOST_WIDTH:
            return f"it has no kernel for entries of {widest} elements, {MOST_WIDTH} at most"
        return None

    def make_writer(self, view: LayerView) -> TritonWriter:
        """Make what writes a layer's entries, for its storage.

        Raises: ValueError as ``attend`` does.
        """
        return TritonWriter(view, self._known_gpu(view.k.device))

    def attend(
        self,
        q: Tensor,  # [T, H, D]
        view: LayerView,
        batch: AttentionBatch,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [H]
    ) -> Tensor:
        gpu = self._known_gpu(q.device)
        placed = batch.on(q.device)
        key = (self.name, q.shape, q.dtype, id(spec))
        step = batch.memo.get(key)
        if step is None:
            shape = shape_of(q, view, spec)
            calls = self._calls(shape, placed, gpu, len(q))
            step = batch.memo[key] = _TritonStep(spec=spec, shape=shape, calls=calls)
        shape = step.shape
        # Tokens beyond the last sequence's are padding, whose results are zeros.
        padded = len(q) != batch.query_starts[-1]
        make = q.new_zeros if padded else q.new_empty
        out = make(len(q), shape.num_heads, shape.output_width)
        if q.stride(-1) != 1:
            q = q.contiguous()
        if sinks is not None:
            sinks = sinks.contiguous()
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks)
        with on_device(q.device):
            for call in step.calls:
                _launch(out, q, view, placed, batch.block_size, shape, gpu, call, **options)
        return out

    def _gpu(self, device: torch.device) -> Gpu | str:
        if device not in self._gpus:
            self._gpus[device] = find_gpu(device)
        return self._gpus[device]

    def _known_gpu(self, device: torch.device) -> Gpu:
        gpu = self._gpu(device)
        if isinstance(gpu, str):
            raise ValueError(f"attention by Triton is not possible here: {gpu}")
        return gpu

    def _calls(
        self, shape: AttendLaunch, placed: PlacedBatch, gpu: Gpu, num_tokens: int
    ) -> list[_Call]:
        num_seqs = len(placed.context_lens)
        if not num_tokens or not num_seqs:
            return []
        plain = shape.dtype == torch.float32
        sizes: dict[str, Any] = dict(
            key=shape.key,
            value=shape.value,
            entry_bytes=shape.kept_bytes,
            plain=plain,
            gpu=gpu,
        )
        few = tiles.few_queries(**sizes, sharing=shape.sharing)
        most = few.queries(shape.sharing)
        calls = [self._call(shape, placed, gpu, few, num_seqs, (0, most))]
        if placed.max_query_len > most:
            many = tiles.many_queries(**sizes)
            num_tiles = num_tokens // many.queries(shape.sharing) + num_seqs
            no_limit = 2**31 - 1
            calls.append(self._call(shape, placed, gpu, many, num_tiles, (most, no_limit)))
        return calls

    def _call(
        self,
        shape: AttendLaunch,
        placed: PlacedBatch,
        gpu: Gpu,
        tile: Tile,
        num_tiles: int,
        serves: tuple[int, int],
    ) -> _Call:
        queries = tile.queries(shape.sharing)
        parts = ceil_div(shape.sharing, tile.rows)
        num_tokens = placed.max_context_len
        if shape.reads != "full":
            num_tokens = min(num_tokens, shape.reach + queries + tile.tokens)
        several = serves[0] > 0
        each = tiles.MANY_PROGRAMS if several else ceil_div(tiles.FEW_WARPS, tile.num_warps)
        programs = num_tiles * shape.kv_heads * parts
        return _Call(
            tile=tile,
            several=several,
            above=serves[0],
            upto=serves[1],
            num_tiles=num_tiles,
            num_splits=tiles.num_splits(programs, num_tokens, tile, each * gpu.num_processors),
            num_queries=min(queries, placed.max_query_len),
        )


def _launch(  # noqa: PLR0913
    out: Tensor,
    q: Tensor,
    view: LayerView,
    placed: PlacedBatch,
    block_size: int,
    shape: AttendLaunch,
    gpu: Gpu,
    call: _Call,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    tile = call.tile
    looked_up = view.slots_per_row > 1 or placed.tables.shape[1] > 1
    parts = ceil_div(shape.sharing, tile.rows)
    split = call.num_splits > 1
    part_out = part_max = part_sum = None
    _, num_heads, width = out.shape
    if split:
        rows = call.num_splits, call.num_tiles * call.num_queries, num_heads
        part_out = q.new_empty(*rows, width, dtype=torch.float32)
        part_max = q.new_empty(rows, dtype=torch.float32)
        part_sum = q.new_empty(rows, dtype=torch.float32)
    factor, cap_in, cap_out = scale * _LOG2_E, 0.0, 0.0
    if softcap is not None:
        cap_in, cap_out = 2 * factor / softcap, softcap * _LOG2_E
    scale_strides = (0, 0, 0) if view.k_scale is None else view.k_scale.stride()
    k, v = view.k, view.v
    num_seqs = len(placed.context_lens)
    common: dict[str, Any] = dict(
        READS=shape.reads,
        SINKS=sinks is not None,
        SEVERAL=call.several,
        TOKENS=tile.tokens,
        LEAST=tiles.LEAST_STEPS,
        EMULATED=gpu.emulated,
        enable_fp_fusion=True,  # whatever a release of Triton thinks best
    )
    attend[(call.num_tiles * shape.kv_heads * parts, call.num_splits)](
        out, part_out, part_max, part_sum, q,
        address_of(k), address_of(v), address_of(view.k_scale), address_of(view.v_scale), sinks,
        placed.query_starts, placed.context_lens, placed.tables,
        *out.stride()[:2], *q.stride()[:2], *k.stride()[:2], *k.stride()[2:],
        *v.stride()[:2], *v.stride()[2:], *scale_strides,
        placed.tables.stride(0), num_seqs, call.num_tiles, call.num_queries, call.num_splits,
        call.above, call.upto, shape.reach, factor, cap_in, cap_out,
        BLOCK=block_size if looked_up else 0,
        KV_HEADS=shape.kv_heads,
        SHARING=shape.sharing,
        KEY=shape.key,
        VALUE=shape.value,
        KEY_ROOM=room(shape.key),
        VALUE_ROOM=room(shape.value),
        STORED=ELEMENTS[k.dtype],
        ALIGNED=alignment_of(k, v),
        LATENT=shape.latent,
        KEPT=shape.kept,
        CAPPED=softcap is not None,
        SHORT_RANGE=shape.kept == "int8" and shape.dtype == torch.float16,
        SPLIT=split,
        ROWS=tile.rows,
        DTYPE=ELEMENTS[shape.dtype],
        FP8_CONVERTS=gpu.fp8_converts,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages(looked_up=looked_up),
        **common,
    )  # fmt: skip
    if split:
        join[(call.num_tiles * call.num_queries, num_heads)](
            out, part_out, part_max, part_sum, sinks, placed.query_starts, placed.context_lens,
            *out.stride()[:2], num_seqs, call.num_tiles, call.num_queries, call.num_splits,
            call.above, call.upto, shape.reach,
            NUM_HEADS=num_heads,
            OUT=width,
            OUT_ROOM=room(width),
            QUERIES=tile.queries(shape.sharing),
            MOST=MOST_SPLITS,
            TOGETHER=_JOINED_TOGETHER,
            num_warps=4,
            **common,
        )  # fmt: skip
