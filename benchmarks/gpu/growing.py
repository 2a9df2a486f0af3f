"""A part: a step in which buffers of `growing` are copied into larger ones.

Beside the step the copies run on a stream of their own and each layer waits for its own, as the
engine has it; in line they run before the step. The step's work is a product of matrices a layer.
The new buffers' pages are there and have to be mapped: that is the host's work, in both.
"""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.setting import GIB, MIB, Setting, claim, median_ratio, show
from quire.kv import Accounting, CacheConfig, Fits, StackedStorage, build_accounting, build_storage
from quire.units import format_bytes


def growing(setting: Setting) -> None:
    """Measure a step in milliseconds: without copies, with them beside it, with them before it."""
    geometry = setting.geometry
    num_seqs, held = (2, 32) if setting.emulated else (16, 2048)
    memory, _ = setting.memory()
    capacity_bytes = 256 * MIB if setting.emulated else 32 * GIB
    memory.hold_bytes = capacity_bytes  # pages are created once
    sizes = CacheConfig(
        max_model_len=2 * held,
        max_num_seqs=num_seqs,
        capacity_bytes=capacity_bytes,
        page_bytes=memory.page_bytes,
        layers_per_page="auto",
        growth_tokens=held,
    )
    accounting = build_accounting("growing", geometry.model(2 * held), sizes)
    storage = build_storage("growing", accounting, memory)
    assert isinstance(storage, StackedStorage)
    layer = _layer(setting)

    def step() -> None:
        for number in range(geometry.num_layers):
            storage.view(number)
            layer()

    beside = storage._beside
    timed: dict[str, list[tuple[float, float]]] = {"no copies": [], "beside": [], "in line": []}
    for _ in range(setting.rounds + 1):
        for name, samples in timed.items():
            storage._beside = None if name == "in line" else beside
            num_tokens = held if name == "no copies" else held + 1
            samples.append(_timed(setting, accounting, storage, num_seqs, held, num_tokens, step))
    peak = storage.memory.peak_committed_bytes
    storage._beside = beside  # whose stream is not used any more
    storage.close()
    memory.hold_bytes = 0
    timed = {name: samples[1:] for name, samples in timed.items()}  # the first one warms up
    seconds = {name: [took for took, _ in samples] for name, samples in timed.items()}
    moved = num_seqs * held * geometry.token_bytes
    base = statistics.median(seconds["no copies"])
    rows = [
        [
            name,
            f"{statistics.median(each) * 1e3:,.2f}",
            f"{min(each) * 1e3:,.2f}",
            f"{(statistics.median(each) - base) * 1e3:+,.2f}",
            f"{statistics.median(applied for _, applied in timed[name]) * 1e3:,.2f}",
        ]
        for name, each in seconds.items()
    ]
    show(
        f"{format_bytes(moved)} of {num_seqs} sequences move into larger buffers; at most "
        f"{format_bytes(peak)} were committed",
        "copies | ms a step, median | least | ms added | ms to map and launch",
        rows,
    )
    claim(
        "a step with copies beside it, against copies in line",
        statistics.median(seconds["beside"]) * 1e3,
        statistics.median(seconds["in line"]) * 1e3,
        "ms (ratio: of speeds)",
        ">= 1",
        (ratio := median_ratio(seconds["beside"], seconds["in line"])) >= 1,
        ratio,
        timed=True,
    )


def _layer(setting: Setting) -> Callable[[], object]:
    """About what one layer of Qwen3-4B computes for 512 tokens."""
    tokens, width, inner = (4, 64, 64) if setting.emulated else (512, 2560, 38_912)
    x, weight = (
        torch.randn(*shape, device=setting.device).bfloat16()
        for shape in ((tokens, width), (width, inner))
    )
    return lambda: x @ weight


def _timed(
    setting: Setting,
    accounting: Accounting,
    storage: StackedStorage,
    num_seqs: int,
    held: int,
    num_tokens: int,
    step: Callable[[], None],
) -> tuple[float, float]:
    """Seconds of a step in which sequences of ``held`` tokens get more, and until it computes."""
    for seq_id in range(num_seqs):
        accounting.add(seq_id)
        assert isinstance(accounting.try_extend(seq_id, held), Fits)
    storage.apply(accounting.drain())
    step()
    setting.wait()
    for seq_id in range(num_seqs):
        assert isinstance(accounting.try_extend(seq_id, num_tokens), Fits)
    changes = accounting.drain()
    begun = time.perf_counter()
    storage.apply(changes)
    applied = time.perf_counter() - begun
    step()
    setting.wait()
    took = time.perf_counter() - begun
    for seq_id in range(num_seqs):
        accounting.free(seq_id)
    storage.apply(accounting.drain())
    setting.wait()
    return took, applied
