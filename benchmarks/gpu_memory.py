"""Parts of the GPU's benchmark: layers a page for `virtual` beside `paged`; what a session takes;
whether memory goes back to the driver.

A sequence's range holds [streams, T, layers of the stream, 2, K, D], as in ``cuda_layouts``: the
layers of a stream share its pages. All layouts hold the same random entries' worth and take turns.
"""

import statistics
from collections.abc import Callable

import numpy as np
import torch
from bench_cuda_memory import call_costs, is_seen_twice, sessions
from cuda_layouts import Geometry
from gpu_setting import GIB, MIB, Found, Setting, in_turns, median_ratio
from harness.report import Table
from torch import Tensor

from quire.attention import AttentionBackend, AttentionBatch
from quire.memory import Region
from quire.memory.cuda import CudaMemory
from quire.spec import FullAttention, Layer, ModelSpec
from quire.strategies import (
    STRATEGIES,
    CacheConfig,
    Fits,
    LayerView,
    build_accounting,
    build_storage,
)
from quire.units import format_bytes

QWEN3_4B = Geometry()
TINY = Geometry(num_layers=12, num_kv_heads=2, num_groups=2, head_dim=64)
SIZES = ((16, 4096), (64, 1024), (1, 32_768))  # (sequences, tokens of each)
TINY_SIZES = ((2, 64),)
BLOCK_SIZE = 16
MOST_BYTES_OF_100_TOKENS = 18 * MIB


def layouts(setting: Setting) -> Found:
    """A decode step through all layers: 1, 4, 6 and all layers a page, beside blocks of a pool."""
    geometry = TINY if setting.emulated else QWEN3_4B
    found, rows = Found(), []
    memory, _ = setting.memory()
    for name, backend in setting.backends().items() or [setting.ours()]:
        for size in TINY_SIZES if setting.emulated else SIZES:
            for layout, seconds, ratio in _compared(setting, memory, geometry, backend, size):
                read = size[0] * size[1] * geometry.token_bytes
                rows.append(
                    [
                        name,
                        f"{size[0]} x {size[1]}",
                        layout,
                        f"{statistics.median(seconds) * 1e3:,.2f}",
                        f"{read / min(seconds) / 1e9:,.0f}",
                        f"{ratio:.2f}",
                    ]
                )
                if layout.endswith("a page"):
                    found.claim(
                        f"virtual, {layout}, {size[0]} x {size[1]}, {name}, beside paged",
                        statistics.median(seconds) * 1e3,
                        None,
                        "ms (ratio: of speeds)",
                        "none: the table decides",
                        True,
                        ratio,
                        timed=True,
                    )
    columns = ("kernel", "sequences", "layout", "ms a step", "GB/s", "speed beside paged")
    found.tables.append(
        Table(title=f"Decode in {geometry.num_layers} layers", columns=columns, rows=rows)
    )
    return found


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
    spec = FullAttention(
        num_kv_heads=geometry.num_kv_heads, head_dim=geometry.head_dim, dtype="bfloat16"
    )
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
            print(f"{name}, {size}: skipped, it needs {format_bytes(needed)}")
            continue
        views, batch = make()
        calls[name] = _a_step(backend, q, views, batch, spec)
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


def session(setting: Setting) -> Found:
    """What 100 tokens take where 40,960 may come; what each call of the driver costs."""
    geometry, whole = (TINY, 1024) if setting.emulated else (QWEN3_4B, 40_960)
    memory, driver = setting.memory()
    found, page = Found(), memory.page_bytes
    counts, pages = ((1, 2), 16) if setting.emulated else ((1, 2, 8, 32), 128)
    costs = [call_costs(driver, page * n, pages, setting.wait) for n in counts]
    columns = "page | pages | create | map | access, each | access, one call | map again"
    columns += " | zero all | unmap, each | unmap, one call | release | left after release"
    found.tables.append(
        Table(title="Microseconds a call", columns=tuple(columns.split(" | ")), rows=costs)
    )
    rows = []
    for layers, taken, computed, left in sessions(
        memory, driver, geometry, (1, 4, 6, geometry.num_layers), whole
    ):
        rows.append([str(layers), *map(format_bytes, (taken, computed, left))])
        if layers in (4, geometry.num_layers):
            found.claim(
                f"100 tokens at {whole} maximum, {layers} layers a page",
                taken / MIB,
                whole * geometry.token_bytes / MIB,
                "MiB",
                "<= 18",
                taken <= MOST_BYTES_OF_100_TOKENS,
            )
        found.claim(
            f"left at the driver's after release, {layers} layers a page",
            left,
            None,
            "bytes",
            "== 0",
            left == 0,
        )
    found.tables.append(_a_hundred_tokens(setting, geometry, whole, found))
    seen = is_seen_twice(memory, setting.device.type)
    found.claim("a page is seen at two addresses", float(seen), None, "true", "== 1", seen)
    columns = "layers a page | taken | computed | left after release"
    found.tables.append(
        Table(
            title="100 tokens of one sequence, by the driver's count",
            columns=tuple(columns.split(" | ")),
            rows=rows,
        )
    )
    return found


def _a_hundred_tokens(setting: Setting, geometry: Geometry, whole: int, found: Found) -> Table:
    """What the strategies' own storages take of the driver for them, in the engine's layout."""
    forms = {
        "virtual": ("virtual", {}),
        "virtual, shared": ("virtual", {"shares_pages": True}),
        "growing by 128": ("growing", {"growth_tokens": 128}),
    }
    rows = []
    for name, (strategy, options) in forms.items():
        memory, driver = setting.memory()
        before = driver.free_and_total()[0]
        sizes = CacheConfig(
            max_model_len=whole,
            max_num_seqs=4,
            capacity_bytes=16 * GIB,
            block_size=BLOCK_SIZE,
            page_bytes=memory.page_bytes,
            layers_per_page="auto",
            **options,
        )
        accounting = build_accounting(strategy, spec_of(geometry, whole), sizes)
        storage = build_storage(strategy, accounting, memory)
        accounting.add(0)
        assert isinstance(accounting.try_extend(0, 100), Fits)
        storage.apply(accounting.drain())
        taken, counted = before - driver.free_and_total()[0], accounting.usage().committed_bytes
        storage.close()
        memory.trim()
        rows.append([name, format_bytes(taken), format_bytes(counted)])
        found.claim(
            f"100 tokens at {whole} maximum, {name}",
            taken / MIB,
            counted / MIB,
            "MiB (beside: the accounting's)",
            "<= 18",
            taken <= MOST_BYTES_OF_100_TOKENS,
        )
    columns = ("strategy", "taken of the driver", "by the accounting")
    return Table(title="100 tokens under a strategy", columns=columns, rows=rows)


def spec_of(geometry: Geometry, max_model_len: int) -> ModelSpec:
    attention = FullAttention(
        num_kv_heads=geometry.num_kv_heads, head_dim=geometry.head_dim, dtype="bfloat16"
    )
    return ModelSpec(
        model_type="random",
        layers=tuple(Layer(specs=(attention,)) for _ in range(geometry.num_layers)),
        max_model_len=max_model_len,
        dtype="bfloat16",
    )


def release(setting: Setting) -> Found:
    """Bytes of the device that are free before, during and after sequences of each strategy."""
    geometry = TINY if setting.emulated else QWEN3_4B
    tokens, num_seqs = (64, 2) if setting.emulated else (4096, 8)
    spec = spec_of(geometry, tokens)
    found, rows = Found(), []
    for strategy in STRATEGIES:
        memory, driver = setting.memory()
        before = driver.free_and_total()[0]
        sizes = CacheConfig(
            max_model_len=tokens,
            max_num_seqs=num_seqs,
            capacity_bytes=256 * MIB if setting.emulated else 16 * GIB,
            block_size=BLOCK_SIZE,
            page_bytes=memory.page_bytes,
            layers_per_page="auto",
        )
        accounting = build_accounting(strategy, spec, sizes)
        storage = build_storage(strategy, accounting, memory)
        for seq_id in range(num_seqs):
            accounting.add(seq_id)
            assert isinstance(accounting.try_extend(seq_id, tokens), Fits)
        storage.apply(accounting.drain())
        during = before - driver.free_and_total()[0]
        for seq_id in range(num_seqs):
            accounting.free(seq_id)
        storage.apply(accounting.drain())
        memory.poll(wait=True)
        memory.trim()
        idle = before - driver.free_and_total()[0]
        storage.close()
        memory.trim()
        left = before - driver.free_and_total()[0]
        rows.append([strategy, *map(format_bytes, (during, idle, left))])
        found.claim(
            f"{strategy}: left at the driver's when closed", left, None, "bytes", "== 0", left == 0
        )
    columns = ("strategy", "taken by sequences", "when they have ended", "when closed")
    title = f"{num_seqs} sequences of {tokens} tokens, by the driver's count"
    found.tables.append(Table(title=title, columns=columns, rows=rows))
    return found
