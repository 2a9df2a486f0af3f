"""A part: bytes, by the driver's own count, and what a call of the driver costs.

What 100 tokens take where many more may come, in several layouts and under each strategy; what is
free before, during and after sequences; and that a page is seen at two addresses.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.packing import Packing
from benchmarks.gpu.setting import GIB, MIB, Geometry, Setting, claim, show
from quire.kv import STRATEGIES, CacheConfig, Fits, build_accounting, build_storage
from quire.memory.cuda import CudaMemory
from quire.memory.cuda.driver import Driver
from quire.units import format_bytes

BLOCK_SIZE = 16
MOST_BYTES_OF_100_TOKENS = 18 * MIB
_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "virtual": ("virtual", {}),
    "virtual, shared": ("virtual", {"shares_pages": True}),
    "growing by 128": ("growing", {"growth_tokens": 128}),
}


def bytes(setting: Setting) -> None:
    """Measure what a session takes of the device, and what it gives back."""
    _take_what_stays(setting)
    _session(setting)
    _release(setting)


def _take_what_stays(setting: Setting) -> None:
    """Do each thing once: what torch and the driver take for good is taken before it is counted."""
    memory, driver = setting.memory()
    for _ in _sessions(memory, driver, setting.geometry, (1,), 1024):
        setting.wait()
    memory.trim()
    for name in _FORMS:
        _taken(setting, name, 1024)


def _session(setting: Setting) -> None:
    """What 100 tokens take where 40,960 may come; what each call of the driver costs."""
    geometry, whole = setting.geometry, 1024 if setting.emulated else 40_960
    memory, driver = setting.memory()
    page = memory.page_bytes
    counts, pages = ((1, 2), 16) if setting.emulated else ((1, 2, 8, 32), 128)
    costs = [_call_costs(driver, page * n, pages, setting.wait) for n in counts]
    columns = "page | pages | create | map | access, each | access, one call | map again"
    columns += " | zero all | unmap, each | unmap, one call | release | left after release"
    show("Microseconds a call", columns, costs)
    rows = []
    for layers, taken, computed, left in _sessions(
        memory, driver, geometry, (1, 4, 6, geometry.num_layers), whole
    ):
        rows.append([str(layers), *map(format_bytes, (taken, computed, left))])
        if layers in (4, geometry.num_layers):
            claim(
                f"100 tokens at {whole} maximum, {layers} layers a page",
                taken / MIB,
                whole * geometry.token_bytes / MIB,
                "MiB",
                "<= 18",
                taken <= MOST_BYTES_OF_100_TOKENS,
            )
        claim(
            f"left at the driver's after release, {layers} layers a page",
            left,
            None,
            "bytes",
            "== 0",
            left == 0,
        )
    _a_hundred_tokens(setting, whole)
    seen = _is_seen_twice(memory, setting.device.type)
    claim("a page is seen at two addresses", float(seen), None, "true", "== 1", seen)
    columns = "layers a page | taken | computed | left after release"
    show("100 tokens of one sequence, by the driver's count", columns, rows)


def _a_hundred_tokens(setting: Setting, whole: int) -> None:
    """What the strategies' own storages take of the driver for them, in the engine's layout."""
    rows = []
    for name in _FORMS:
        taken, counted = _taken(setting, name, whole)
        rows.append([name, format_bytes(taken), format_bytes(counted)])
        claim(
            f"100 tokens at {whole} maximum, {name}",
            taken / MIB,
            counted / MIB,
            "MiB (beside: the accounting's)",
            "<= 18",
            taken <= MOST_BYTES_OF_100_TOKENS,
        )
    columns = "strategy | taken of the driver | by the accounting"
    show("100 tokens under a strategy", columns, rows)


def _taken(setting: Setting, form: str, whole: int) -> tuple[int, int]:
    """Return what 100 tokens take of the driver in bytes, and what the accounting says."""
    strategy, options = _FORMS[form]
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
    accounting = build_accounting(strategy, setting.geometry.model(whole), sizes)
    storage = build_storage(strategy, accounting, memory)
    accounting.add(0)
    assert isinstance(accounting.try_extend(0, 100), Fits)
    storage.apply(accounting.drain())
    taken, counted = before - driver.free_and_total()[0], accounting.usage().committed_bytes
    storage.close()
    memory.trim()
    return taken, counted


def _release(setting: Setting) -> None:
    """Bytes of the device that are free before, during and after sequences of each strategy."""
    geometry = setting.geometry
    tokens, num_seqs = (64, 2) if setting.emulated else (4096, 8)
    spec, rows = geometry.model(tokens), []
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
        claim(
            f"{strategy}: left at the driver's when closed", left, None, "bytes", "== 0", left == 0
        )
    title = f"{num_seqs} sequences of {tokens} tokens, by the driver's count"
    show(title, "strategy | taken by sequences | when they have ended | when closed", rows)


def _call_costs(
    driver: Driver, page_bytes: int, count: int, wait: Callable[[], object]
) -> list[str]:
    """Microseconds a call with pages of this size, and what came back at the end."""
    span, half = page_bytes * count, count // 2
    free_before, _ = driver.free_and_total()

    def timed(calls: int, run: Callable[[], object]) -> str:
        wait()
        begun = time.perf_counter()
        run()
        return f"{(time.perf_counter() - begun) * 1e6 / calls:.1f}"

    handles: list[object] = []
    own, other = (driver.reserve(span, page_bytes) for _ in range(2))

    def each(call: Callable[[int], object], numbers: range) -> None:
        for number in numbers:
            call(number * page_bytes)

    def mapped(start: int) -> None:
        for number, handle in enumerate(handles):
            driver.map(start + number * page_bytes, page_bytes, handle)

    row = [format_bytes(page_bytes), str(count)]
    row.append(
        timed(count, lambda: handles.extend(driver.create(page_bytes) for _ in range(count)))
    )
    row.append(timed(count, lambda: mapped(own)))
    row.append(
        timed(half, lambda: each(lambda at: driver.allow(own + at, page_bytes), range(half)))
    )
    row.append(timed(1, lambda: driver.allow(own + half * page_bytes, (count - half) * page_bytes)))
    row.append(timed(count, lambda: mapped(other)))
    driver.allow(other, span)
    row.append(timed(1, lambda: (driver.zero(own, span), wait())))
    wait()
    row.append(
        timed(half, lambda: each(lambda at: driver.unmap(other + at, page_bytes), range(half)))
    )
    row.append(timed(1, lambda: driver.unmap(other + half * page_bytes, span - half * page_bytes)))
    driver.unmap(own, span)
    row.append(timed(count, lambda: [driver.release(handle) for handle in handles]))
    for start in (own, other):
        driver.free(start, span)
    row.append(format_bytes(free_before - driver.free_and_total()[0]))
    return row


def _sessions(
    memory: CudaMemory, driver: Driver, geometry: Geometry, layouts: tuple[int, ...], whole: int
) -> Iterator[tuple[int, int, int, int]]:
    """(layers a page, bytes taken from the device by 100 tokens, computed, not given back)."""
    for layers in layouts:
        packing = Packing(
            num_layers=geometry.num_layers,
            layers_per_page=layers,
            entry_bytes=geometry.entry_bytes,
            page_bytes=memory.page_bytes,
        )
        before, _ = driver.free_and_total()
        stream_bytes = packing.stream_bytes * whole
        stride = -(-stream_bytes // memory.page_bytes) * memory.page_bytes
        region = memory.reserve(stride * packing.num_streams)
        pages = packing.committed_bytes(100) // packing.num_streams
        region.commit(0, pages, stride=stride, count=packing.num_streams)
        taken = before - driver.free_and_total()[0]
        region.close()
        memory.trim()
        left = before - driver.free_and_total()[0]
        yield layers, taken, packing.committed_bytes(100), left


def _is_seen_twice(memory: CudaMemory, device: str) -> bool:
    """What is written at one address is read at another by later work."""
    page = memory.page_bytes
    region = memory.reserve(2 * page, heap_bytes=2 * page)
    region.commit(0, 2 * page)
    window = region.window(page)
    window.map(0, page, page)
    region.tensor(torch.uint8)[page:].fill_(7)
    if device == "cuda":
        torch.cuda.synchronize()
    seen = bool(window.tensor(torch.uint8).eq(7).all().item())
    region.close()
    return seen
