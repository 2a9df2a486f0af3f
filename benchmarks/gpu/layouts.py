"""A part: layers a page for `virtual`, beside `paged`.

A sequence's range holds [streams, T, layers of the stream, 2, K, D]: the layers of a stream share
its pages. All layouts hold the same random entries' worth and take turns.
"""

import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.setting import Geometry, Setting, claim, in_turns, median_ratio, note, show
from quire.attention import AttentionBackend, AttentionBatch
from quire.kv import LayerView
from quire.memory import Region
from quire.memory.cuda import CudaMemory
from quire.spec import FullAttention
from quire.units import format_bytes

SIZES = ((16, 4096), (64, 1024), (1, 32_768))  # (sequences, tokens of each)
TINY_SIZES = ((1, 32),)
BLOCK_SIZE = 16


def layouts(setting: Setting) -> None:
    """Measure a decode step through all layers: 1, 4, 6 and all layers a page, and paged."""
    geometry = setting.geometry
    memory, _ = setting.memory()
    for name, backend in setting.backends().items() or [setting.ours()]:
        for size in TINY_SIZES if setting.emulated else SIZES:
            of, rows = f"{size[0]} x {size[1]}, {name}", []
            for layout, seconds, ratio in _compared(setting, memory, geometry, backend, size):
                ms = statistics.median(seconds) * 1e3
                gbs = size[0] * size[1] * geometry.token_bytes / min(seconds) / 1e9
                rows.append([layout, f"{ms:,.2f}", f"{gbs:,.0f}", f"{ratio:.2f}"])
                if layout.endswith("a page"):
                    claim(
                        f"virtual, {layout}, {of}, beside paged",
                        ms,
                        None,
                        "ms (ratio: of speeds)",
                        "none: the table decides",
                        True,
                        ratio,
                        timed=True,
                    )
            title = f"Decode in {geometry.num_layers} layers, {of}"
            show(title, "layout | ms a step | GB/s | speed beside paged", rows)


def _compared(
    setting: Setting,
    memory: CudaMemory,
    geometry: Geometry,
    backend: AttentionBackend,
    size: tuple[int, int],
) -> list[tuple[str, list[float], float]]:
    """(layout, seconds of a step, speed beside paged)."""
    heads = geometry.num_kv_heads * geometry.num_groups
    q = torch.randn(size[0], heads, geometry.head_dim, device=setting.device).bfloat16()
    regions: list[Region] = []
    makers: dict[str, Callable[[], tuple[list[LayerView], AttentionBatch]]] = {
        "paged": lambda: _in_blocks(memory, regions, geometry, size)
    }
    for layers in (1, 4, 6, geometry.num_layers):
        makers[f"{layers} layers a page"] = lambda layers=layers: _in_ranges(
            memory, regions, geometry, layers, size
        )
    calls = {}
    for name, make in makers.items():
        needed = size[0] * size[1] * geometry.token_bytes
        if needed * 1.2 > setting.free_bytes():
            note(f"{name}, {size}: skipped, it needs {format_bytes(needed)}")
            continue
        views, batch = make()
        calls[name] = _a_step(backend, q, views, batch, geometry.spec)
    try:
        seconds = in_turns(setting, calls, inner=1)
    finally:
        calls.clear()
        setting.wait()
        for region in regions:
            region.close()
        memory.trim()
    return [(name, each, median_ratio(each, seconds["paged"])) for name, each in seconds.items()]


def _a_step(
    backend: AttentionBackend,
    q: Tensor,
    views: list[LayerView],
    batch: AttentionBatch,
    spec: FullAttention,
) -> Callable[[], object]:
    def run() -> None:
        for view in views:
            backend.attend(q, view, batch, spec=spec, scale=spec.head_dim**-0.5)

    return run


def _committed(memory: CudaMemory, regions: list[Region], nbytes: int) -> Tensor:
    """bfloat16, random."""
    region = memory.reserve(nbytes)
    regions.append(region)
    region.commit(0, region.nbytes)
    return region.tensor(torch.bfloat16)[: nbytes // 2].normal_()


def _in_blocks(
    memory: CudaMemory, regions: list[Region], geometry: Geometry, size: tuple[int, int]
) -> tuple[list[LayerView], AttentionBatch]:
    """Each layer's pool [N, K, 2, B, D], blocks in a shuffled order."""
    num_seqs, num_tokens = size
    blocks_each = -(-num_tokens // BLOCK_SIZE)
    shape = (num_seqs * blocks_each, geometry.num_kv_heads, 2, BLOCK_SIZE, geometry.head_dim)
    pools = [
        _committed(memory, regions, int(np.prod(shape)) * 2).view(shape)
        for _ in range(geometry.num_layers)
    ]
    views = [LayerView(k=p[:, :, 0], v=p[:, :, 1], slots_per_row=BLOCK_SIZE) for p in pools]
    order = np.random.default_rng(0).permutation(shape[0]).reshape(num_seqs, blocks_each)
    return views, _batch(size, torch.from_numpy(order), BLOCK_SIZE)


def _in_ranges(
    memory: CudaMemory,
    regions: list[Region],
    geometry: Geometry,
    layers: int,
    size: tuple[int, int],
) -> tuple[list[LayerView], AttentionBatch]:
    """A range a sequence; row i of a view begins at its slot i, as everywhere in Quire."""
    num_seqs, num_tokens = size
    streams = geometry.num_layers // layers
    heads, width = geometry.num_kv_heads, geometry.head_dim
    flat = _committed(memory, regions, num_seqs * num_tokens * geometry.token_bytes)
    slot = layers * 2 * heads * width  # elements between two tokens of a stream
    slots = num_seqs * streams * num_tokens

    def entries(stream: int, layer: int, value: int) -> Tensor:
        start = stream * num_tokens * slot + (2 * layer + value) * heads * width
        rows = slots - (stream + 1) * num_tokens + 1
        return flat.as_strided((rows, heads, num_tokens, width), (slot, width, slot, 1), start)

    views = [
        LayerView(
            k=entries(number // layers, number % layers, 0),
            v=entries(number // layers, number % layers, 1),
            slots_per_row=1,
        )
        for number in range(geometry.num_layers)
    ]
    tables = torch.arange(num_seqs)[:, None] * (streams * num_tokens)
    return views, _batch(size, tables, num_tokens)


def _batch(size: tuple[int, int], tables: Tensor, block_size: int) -> AttentionBatch:
    num_seqs, num_tokens = size
    return AttentionBatch(
        query_starts=np.arange(num_seqs + 1),
        context_lens=np.full(num_seqs, num_tokens),
        tables=tables,
        slots=torch.zeros(num_seqs, dtype=torch.int64),
        block_size=block_size,
    )
