"""Steps for attention backends: sequences half-way in a storage, and what came into it.

``formula`` is the oracle: attention as it is written on paper, in float64, over plain tensors that
never saw a block table. An error is max |Δ| over max |formula|.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import target
from quire.attention import AttentionBackend, AttentionBatch, make_batch
from quire.kv import STRATEGIES, Accounting, CacheConfig, Fits, Storage, build_storage
from quire.kv.storage.entries import dequantize, quantize
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.memory import CheckedMemory, MemoryProvider
from quire.memory.provider_wrappers import CheckedRegion
from quire.spec import (
    AttentionSpec,
    ChunkedAttention,
    FullAttention,
    Group,
    LatentAttention,
    SlidingWindow,
)

# Rounding of the inputs is no error here: both read the same ones. What is left is the rounding of
# weights and of the result: one or two units of the last of 11 bits in float16, of 8 in bfloat16.
# It goes by the queries' dtype: codes are read as what they stand for.
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
)

SHARED = "virtual-shared"
STORED = (*STRATEGIES, SHARED)  # where keys and values can lie

Chunks = tuple[tuple[int, int], ...]  # a sequence: (tokens computed before, tokens of this step)

# Prefill from nothing, its later chunks, decodes; all of them in one batch.
CHUNKS: Chunks = ((0, 13), (31, 1), (5, 7), (0, 1), (40, 12), (8, 1), (17, 3), (59, 1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step over sequences that are half-way, and their keys and values as plain tensors."""

    spec: AttentionSpec
    q: Tensor
    storage: Storage
    pages: list[Tensor]  # u8: the region; through windows, the blocks that they show
    batch: AttentionBatch
    chunks: Chunks
    slots: list[Tensor]  # a sequence: i64[L - first], of the tokens from ``firsts`` on
    firsts: list[int]  # the first token that this step reads
    keys: list[Tensor]  # a sequence: [L, K, D], as they were before any rounding to codes
    values: list[Tensor]

    @property
    def view(self) -> Any:
        return self.storage.view(0)

    def attend(self, backend: AttentionBackend, **options: Any) -> Tensor:
        return backend.attend(self.q, self.view, self.fresh_batch(), spec=self.spec, **options)

    def fresh_batch(self) -> AttentionBatch:
        """As a step finds it: nothing is remembered from an earlier call."""
        return replace(self.batch, memo={})

    def poison(self, *, with_byte: int = 0xFF) -> None:
        """All bits of what no query of this step may read become ones: NaN in every format.

        That is the rest of the region: tails of blocks, blocks of others and without holders, what
        is behind a window. (An int8 is -1 then, its scale NaN.)
        """
        for each in self.pages:
            each.fill_(with_byte)
        self.write_live()

    def write_live(self) -> None:
        for slots, first, k, v in zip(self.slots, self.firsts, self.keys, self.values, strict=True):
            self.storage.write(0, slots, k[first:], v[first:])


def make_spec(
    kind: str, *, kv_heads: int, dims: tuple[int, int], dtype: str, reach: int = 0
) -> AttentionSpec:
    """``reach``: of a window or a chunk; ``dims``: of key and value, of latent and rotary key."""
    if kind == "latent":
        return LatentAttention(latent_dim=dims[0], rope_dim=dims[1], dtype=dtype)
    common = dict(
        num_kv_heads=kv_heads,
        head_dim=dims[0],
        value_head_dim=None if dims[1] == dims[0] else dims[1],
        dtype=dtype,
    )
    if kind == "sliding":
        return SlidingWindow(**common, window=reach or 9)
    if kind == "chunked":
        return ChunkedAttention(**common, chunk=reach or 6)
    assert kind == "full"
    return FullAttention(**common)


def make_case(
    spec: AttentionSpec,
    *,
    sharing: int,
    q_dtype: torch.dtype | None = None,
    strategy: str = "paged",
    block_size: int = 4,
    chunks: Chunks = CHUNKS,
    seed: int = 0,
) -> Case:
    """Sequences grow in turns, with others ending between them, so that tables are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    kept_as = getattr(torch, spec.dtype)
    q_dtype = q_dtype or kept_as

    memory = _InView(target.memory())

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(target.device(), q_dtype)

    longest = max(map(sum, chunks))
    max_model_len = max(64, -(-longest // 64) * 64)
    num_tokens = sum(map(sum, chunks)) + (10 + 2 * block_size) * 2 * len(chunks)
    piece = max(5, longest // 12)
    config = CacheConfig(
        max_model_len=max_model_len,
        max_num_seqs=2 * len(chunks),
        capacity_bytes=_capacity_bytes(strategy, num_tokens * spec.bytes_per_token),
        block_size=block_size,
        growth_tokens=8,
        page_bytes=memory.page_bytes,
        shares_pages=strategy == SHARED,
    )
    strategy = "virtual" if strategy == SHARED else strategy
    accounting = STRATEGIES[strategy].make_accounting((Group(spec=spec, layers=(0,)),), config)
    storage = build_storage(strategy, accounting, memory)
    key_shape, value_shape = spec.entry_shapes
    keys = [random(sum(chunk), *key_shape) for chunk in chunks]
    values = [random(sum(chunk), *value_shape) for chunk in chunks]

    def compute(index: int, start: int, stop: int) -> None:
        assert isinstance(accounting.try_extend(index, stop), Fits)
        storage.apply(accounting.drain())
        slots = placed_slots(accounting, index, start, stop)
        storage.write(0, slots, keys[index][start:stop], values[index][start:stop])

    passing = range(100, 100 + len(chunks) // 2)
    for seq_id in [*range(len(chunks)), *passing]:
        accounting.add(seq_id)
    for begin in range(0, longest, piece):
        for index, (history, _) in enumerate(chunks):
            if begin < history:
                compute(index, begin, min(begin + piece, history))
        for seq_id in passing:
            if begin < 2 * piece:
                fits = accounting.try_extend(seq_id, 5 + 5 * (begin // piece))
                assert isinstance(fits, Fits)
            elif begin == 2 * piece:
                accounting.free(seq_id)
    for index, (history, length) in enumerate(chunks):
        compute(index, history, history + length)
    accounting.check()
    firsts = [spec.live_range(history).start for history, _ in chunks]
    step = [(i, history, history + length) for i, (history, length) in enumerate(chunks)]
    width = key_shape[1] + (value_shape[1] if isinstance(spec, LatentAttention) else 0)
    return Case(
        spec=spec,
        q=random(sum(length for _, length in chunks), key_shape[0] * sharing, width),
        storage=storage,
        pages=_pages(accounting, storage, memory, len(chunks)),
        batch=make_batch(accounting, 0, step),
        chunks=chunks,
        slots=[
            placed_slots(accounting, i, first, stop)
            for first, (i, _, stop) in zip(firsts, step, strict=True)
        ],
        firsts=firsts,
        keys=keys,
        values=values,
    )


def placed_slots(accounting: Accounting, seq_id: int, start: int, stop: int) -> Tensor:
    return torch.from_numpy(accounting.slots(0, seq_id, start, stop)).to(target.device())


def _capacity_bytes(strategy: str, used_bytes: int) -> int:
    if target.has_cuda_memory():
        return 2**31 if strategy == "paged" else 2**33  # of address space, in large pages
    match strategy:
        case "paged":
            return 2**21 + 4 * used_bytes
        case "virtual-shared":
            return 2**28
        case _:
            return 2**33


class _InView:
    """A provider whose regions are remembered, and which of their pages are committed."""

    def __init__(self, upstream: MemoryProvider) -> None:
        self._upstream = CheckedMemory(upstream)
        self.page_bytes, self.cannot_share = upstream.page_bytes, upstream.cannot_share
        self.regions: list[CheckedRegion] = []

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> CheckedRegion:
        self.regions.append(self._upstream.reserve(nbytes, heap_bytes=heap_bytes))
        return self.regions[-1]

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        self._upstream.used_on(stream, ends=ends)

    def committed(self) -> list[Tensor]:
        """u8: each page."""
        return [
            page
            for region in self.regions
            for number, page in enumerate(region.tensor(torch.uint8).split(self.page_bytes))
            if number in region._committed
        ]


def _pages(
    accounting: Accounting, storage: Storage, memory: _InView, num_sequences: int
) -> list[Tensor]:
    view = storage.view(0)
    if not isinstance(accounting, SharedVirtualAccounting):
        if target.has_cuda_memory():
            return memory.committed()
        return [region.tensor(torch.uint8) for region in memory.regions]
    region = view.k.new_empty(0, dtype=torch.uint8).set_(view.k.untyped_storage())
    # Addresses at which nothing is shown read as zeros, and cannot be written.
    slot_bytes = view.k.stride(0) * view.k.element_size()
    size = accounting.tables.block_size
    pages = []
    for seq_id in range(num_sequences):
        (first,) = accounting.table(0, seq_id)
        for place in np.flatnonzero(accounting.block_ids(0, seq_id) >= 0):
            start = int(first + place * size) * slot_bytes
            pages.append(region[start : start + size * slot_bytes])
    return pages


def make_sinks(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(1))
    return sinks.to(target.device(), dtype)


def formula(
    case: Case,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    padding: Sequence[int] | None = None,
) -> Tensor:
    """[T, H, Dv] in float64, one sequence at a time."""
    padding = padding or [0] * len(case.chunks)
    outs = []
    packed = case.q.cpu().double()
    sinks = None if sinks is None else sinks.cpu()
    for (history, length), padded, *entry in zip(
        case.chunks, padding, case.keys, case.values, strict=True
    ):
        kept_as = getattr(torch, case.spec.dtype)
        k, v = (dequantize(*quantize(x.cpu(), kept_as)).double() for x in entry)
        if isinstance(case.spec, LatentAttention):
            k, v = torch.cat([k, v], -1), k
        q, packed = packed[:length], packed[length:]
        group_size = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))  # [L, H, D]
        scores = torch.einsum("qhd,lhd->hql", q, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores[:, ~read_by(case.spec, history, length)] = -torch.inf
        scores[..., :padded] = -torch.inf
        top = scores.amax(-1, keepdim=True)  # that exp does not overflow
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks.double()[:, None, None] - top).exp()
        outs.append(torch.einsum("hql,lhd->qhd", weights / total, v))
    return torch.cat(outs)


def read_by(spec: AttentionSpec, history: int, length: int) -> Tensor:
    """bool[length, history + length]: which tokens each query reads."""
    return torch.tensor(
        [
            [reads(spec, position, token) for token in range(history + length)]
            for position in range(history, history + length)
        ]
    )


def reads(spec: AttentionSpec, position: int, token: int) -> bool:
    match spec:
        case SlidingWindow(window=window):
            return position - window < token <= position
        case ChunkedAttention(chunk=chunk):
            return token <= position and token // chunk == position // chunk
        case _:
            return token <= position


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.cpu(), want.cpu()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where they are NaN."""
    return a.dtype == b.dtype and bool(np.array_equal(as_bytes(a), as_bytes(b)))


def as_bytes(x: Tensor) -> Any:
    return x.cpu().contiguous().view(torch.uint8).numpy()
