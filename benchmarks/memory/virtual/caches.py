"""Caches of the strategies, built as the engine builds them, and what the system says of them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from quire.attention import AttentionBackend
from quire.kv import (
    Accounting,
    CacheConfig,
    Fits,
    Storage,
    StorageOp,
    build_accounting,
    build_storage,
)
from quire.memory import HostMemory
from quire.memory.machine.probe import spare_mappings
from quire.spec import FullAttention, Layer, ModelSpec

QWEN3_4B = FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16")  # 36 layers of these
ONE_HEAD = FullAttention(num_kv_heads=1, head_dim=64, dtype="bfloat16")  # 16 tokens are a page

# name → strategy, and what differs from CacheConfig's defaults
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "contiguous": ("contiguous", {"reserve": "request"}),
    "virtual, private": ("virtual", {}),
    "virtual, shared": ("virtual", {"shares_pages": True}),
    "virtual, shared, stacks of 4": ("virtual", {"shares_pages": True, "layers_per_page": 4}),
    "virtual, shared, stacks of 1": ("virtual", {"shares_pages": True, "layers_per_page": 1}),
    "paged": ("paged", {}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A strategy's two halves."""

    accounting: Accounting
    storage: Storage
    layers: int
    spec: FullAttention

    @property
    def token_bytes(self) -> int:
        return self.layers * self.spec.bytes_per_token

    def step(self) -> list[StorageOp]:
        """End a step of accounting, and carry it out."""
        changes = self.accounting.drain()
        self.storage.apply(changes)
        return changes

    def add(self, seq_id: int, num_tokens: int, *, chunk: int = 512) -> None:
        """A sequence that is filled in chunks, as prefill does."""
        self.accounting.add(seq_id, max_tokens=num_tokens)
        for end in range(chunk, num_tokens + chunk, chunk):
            self.extend(seq_id, min(end, num_tokens))
            self.step()

    def extend(self, seq_id: int, num_tokens: int) -> None:
        verdict = self.accounting.try_extend(seq_id, num_tokens)
        assert isinstance(verdict, Fits), f"sequence {seq_id}, {num_tokens} tokens: {verdict}"

    def free(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.accounting.free(seq_id)
        self.step()


def make_cache(
    form: str,
    spec: FullAttention,
    layers: int,
    *,
    tokens: int,
    longest: int,
    num_seqs: int = 1,
    backend: AttentionBackend | None = None,
    **options: Any,
) -> Cache:
    """A cache for ``tokens`` in ``num_seqs`` sequences of at most ``longest``."""
    strategy, own = FORMS[form]
    model = ModelSpec(
        model_type="benchmark",
        layers=(Layer(specs=(spec,)),) * layers,
        max_model_len=longest,
        dtype=spec.dtype,
    )
    memory = HostMemory()
    given = own | options
    if "shares_pages" in own:
        given = {"max_mappings": spare_mappings()} | given
    config = CacheConfig(
        max_model_len=longest,
        max_num_seqs=num_seqs,
        capacity_bytes=tokens * model.bytes_per_token,
        page_bytes=memory.page_bytes,
        **given,
    )
    accounting = build_accounting(strategy, model, config)
    storage = build_storage(strategy, accounting, memory, backend.make_writer if backend else None)
    return Cache(accounting=accounting, storage=storage, layers=layers, spec=spec)


def fill(cache: Cache, seq_id: int, num_tokens: int, *, seed: int, chunk: int = 2048) -> None:
    """Random entries for all tokens of a sequence, the same ones in every form."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.bfloat16)
    shape = cache.spec.num_kv_heads, cache.spec.head_dim
    k, v = draw(chunk, *shape), draw(chunk, *shape)
    for turn, start in enumerate(range(0, num_tokens, chunk)):
        stop = min(start + chunk, num_tokens)
        slots = torch.from_numpy(cache.accounting.slots(0, seq_id, start, stop))
        for layer in range(cache.layers):
            moved = [x.roll(turn + layer, 0)[: stop - start] for x in (k, v)]
            cache.storage.write(layer, slots, *moved)


def heap_bytes() -> int:
    """Pages in the files that hold this process's heaps, however often they are seen."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:quire"):
                total += os.fstat(int(name)).st_blocks * 512
        except FileNotFoundError:  # the listing's own
            continue
    return total


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32_000, num_tokens, dtype=np.int32)
