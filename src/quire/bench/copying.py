"""What moving entries takes: into a larger buffer of ``growing``, and out to swap and back.

A buffer that grows commits pages, copies and gives pages back, layer by layer; that is timed as a
whole. Storages of their own do it, in the engine's own kind of memory; no step is taken here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.scheduling.swap import Clock
from quire.kv import Accounting, CacheConfig, Copy, Storage, build_accounting, build_storage
from quire.kv.layout import attention_groups
from quire.planner.simulation.fitting import nonnegative_least_squares

if TYPE_CHECKING:
    from quire.engine.llm import LLM

_MOST_BYTES = 32 * 2**20  # of a buffer, in all layers
_NUM_STEPS = 12  # in which it grows to that
_SWAPPED_TOKENS = 512
_ROUNDS = 4  # the first one warms up


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPrices:
    """Seconds. The first is of a copy in one layer, however short."""

    copy_s: float
    copy_s_per_byte: float
    save_s_per_byte: float
    load_s_per_byte: float


def price_copies(llm: "LLM", clock: Clock) -> CopyPrices:
    """What it takes on this machine, with this model's layers."""
    longest = min(llm.max_model_len, max(1, _MOST_BYTES // max(1, llm.spec.bytes_per_token)))
    copy_s, copy_s_per_byte = _growing(llm, longest, clock)
    save, load = _swapping(llm, min(longest, _SWAPPED_TOKENS), clock)
    return CopyPrices(
        copy_s=copy_s, copy_s_per_byte=copy_s_per_byte, save_s_per_byte=save, load_s_per_byte=load
    )


def _growing(llm: "LLM", longest: int, clock: Clock) -> tuple[float, float]:
    rows: list[tuple[int, int]] = []  # copies, their bytes
    seconds: list[float] = []
    step = max(1, min(llm.config.growth_tokens, longest // _NUM_STEPS))
    with _pair(llm, "growing", longest, step) as (accounting, storage):
        for number in range(_ROUNDS):
            accounting.add(number)
            for num_tokens in range(step, longest + 1, step):
                accounting.try_extend(number, num_tokens)
                changes = accounting.drain()
                begin_s = clock()
                storage.apply(changes)
                took_s = clock() - begin_s
                copies = [change for change in changes if isinstance(change, Copy)]
                if number and copies:
                    moved = sum(c.num_slots * accounting.slot_bytes(c.group) for c in copies)
                    rows.append((len(copies), moved))
                    seconds.append(took_s)
            accounting.free(number)
            storage.apply(accounting.drain())
    if not rows:  # nothing here grows
        return 0.0, 0.0
    # Of each size the quickest: a copy is short, and what disturbs one is longer.
    sizes = sorted(set(rows))
    least = np.array([min(s for r, s in zip(rows, seconds, strict=True) if r == z) for z in sizes])
    matrix, scale = np.array(sizes, float) / least[:, None], np.array([1.0, 1e6])
    copy_s, copy_s_per_byte = nonnegative_least_squares(matrix / scale, np.ones(len(sizes))) / scale
    return float(copy_s), float(copy_s_per_byte)


def _swapping(llm: "LLM", num_tokens: int, clock: Clock) -> tuple[float, float]:
    import torch

    save_s, load_s, num_bytes = list[float](), list[float](), 0
    with _pair(llm, "paged", num_tokens, 1) as (accounting, storage):
        accounting.add(0)
        accounting.try_extend(0, num_tokens)
        storage.apply(accounting.drain())
        places = [
            (layer, torch.from_numpy(accounting.slots(number, 0, 0, num_tokens)))
            for number, group in enumerate(attention_groups(accounting.groups))
            for layer in group.layers
        ]
        for _ in range(_ROUNDS):
            begin_s = clock()
            saved = [storage.save(layer, slots) for layer, slots in places]
            middle_s = clock()
            for (layer, slots), parts in zip(places, saved, strict=True):
                storage.load(layer, slots, parts)
            save_s.append(middle_s - begin_s)
            load_s.append(clock() - middle_s)
            num_bytes = sum(part.nbytes for parts in saved for part in parts)
    if not num_bytes:
        return 0.0, 0.0
    return min(save_s) / num_bytes, min(load_s) / num_bytes


@contextmanager
def _pair(
    llm: "LLM", strategy: str, longest: int, growth_tokens: int
) -> Iterator[tuple[Accounting, Storage]]:
    """Room for one sequence, besides the engine's own."""
    sizes = CacheConfig(
        max_model_len=longest,
        max_num_seqs=1,
        capacity_bytes=8 * _MOST_BYTES,
        page_bytes=llm.memory.page_bytes,
        growth_tokens=growth_tokens,
        enable_prefix_caching=False,
    )
    accounting = build_accounting(strategy, llm.spec, sizes)
    storage = build_storage(strategy, accounting, llm.memory)
    try:
        yield accounting, storage
    finally:
        storage.close()
