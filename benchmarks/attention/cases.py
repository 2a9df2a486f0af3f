"""Memory to attend over, as the product lays it out, and batches that never find it in a cache.

One pool serves all batch sizes: its blocks are dealt out, in random or in consecutive order, to as
many batches as they are enough for, and a candidate goes through every batch of every layer in
turn. So the bytes between two readings of the same block are those of the whole pool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.quiet import Call, in_turn
from quire.attention import AttentionBackend, AttentionBatch, ReferenceAttention, make_batch
from quire.kv import Accounting, CacheConfig, MakeWriter, Storage, build_accounting, build_storage
from quire.memory import HostMemory
from quire.spec import AttentionSpec, FullAttention, LatentAttention, Layer, ModelSpec
from quire.units import ceil_div

KV_HEADS, HEAD_DIM = 8, 128
LATENT_DIM, ROPE_DIM = 512, 64
SHORTEST, MEAN, LONGEST = 128, 2048, 8192  # tokens of a sequence
MOST_SEQS = 64
# Room for MOST_SEQS sequences of any lengths with that mean, in blocks of up to 32.
POOL_TOKENS = MOST_SEQS * (MEAN + 32)
_FILL_TOKENS = 4096

Order = Literal["random", "consecutive"]
Write = Callable[[int, Tensor, Tensor, Tensor], None]  # layer, slots, k, v


def full_attention(dtype: str) -> FullAttention:
    return FullAttention(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)


def latent_attention(dtype: str) -> LatentAttention:
    return LatentAttention(latent_dim=LATENT_DIM, rope_dim=ROPE_DIM, dtype=dtype)


def scale_of(spec: AttentionSpec) -> float:
    """Of scores; a latent's keys have the heads' own width before they are absorbed."""
    return float((128 + ROPE_DIM if isinstance(spec, LatentAttention) else HEAD_DIM) ** -0.5)


def query_width(spec: AttentionSpec) -> int:
    return LATENT_DIM + ROPE_DIM if isinstance(spec, LatentAttention) else HEAD_DIM


def ragged_lengths(num_seqs: int, seed: int) -> list[int]:
    """Lognormal lengths within the bounds, scaled until their mean is MEAN; one is MEAN itself."""
    lengths = np.exp(np.random.default_rng(seed).normal(0, 0.9, num_seqs))
    for _ in range(50):
        lengths = np.clip(lengths * (MEAN / lengths.mean()), SHORTEST, LONGEST)
    return [int(length) for length in lengths]


# -- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A strategy's accounting and storage with equal layers, each slot of every sequence written.

    ``seq_ids`` are its sequences; a paged pool has one, which holds every block.
    """

    spec: AttentionSpec
    accounting: Accounting
    storage: Storage
    num_layers: int
    seq_ids: range
    slots: Tensor  # i64: those that are written, in the order in which they were

    @property
    def total_bytes(self) -> int:
        return self.num_layers * len(self.slots) * self.spec.bytes_per_token

    @property
    def block_size(self) -> int:
        return self.accounting.block_size(0)


def make_pool(
    strategy: str,
    spec: AttentionSpec,
    lengths: Sequence[int] = (POOL_TOKENS,),
    *,
    least_bytes: int,
    block_size: int = 16,
    make_writer: MakeWriter | None = None,
) -> Pool:
    """Sequences of these lengths, in as many layers as make ``least_bytes``."""
    num_tokens, longest = sum(lengths), max(lengths)
    num_layers = max(1, ceil_div(least_bytes, num_tokens * spec.bytes_per_token))
    model = ModelSpec(
        model_type="benchmark",
        layers=(Layer(specs=(spec,)),) * num_layers,
        max_model_len=longest,
        dtype=spec.dtype,
    )
    memory = HostMemory()
    config = CacheConfig(
        max_model_len=longest,
        max_num_seqs=len(lengths),
        capacity_bytes=2 * num_layers * num_tokens * spec.bytes_per_token,
        block_size=block_size,
        page_bytes=memory.page_bytes,
        reserve="request",
        enable_prefix_caching=False,
    )
    accounting = build_accounting(strategy, model, config)
    storage = build_storage(strategy, accounting, memory, make_writer)
    seq_ids = range(len(lengths))
    for seq_id, length in zip(seq_ids, lengths, strict=True):
        accounting.add(seq_id, max_tokens=length)
        verdict = accounting.try_extend(seq_id, length)
        assert accounting.num_tokens(seq_id) >= length, f"{strategy}: {verdict}"
    storage.apply(accounting.drain())
    written = [accounting.slots(0, i, 0, lengths[i]) for i in seq_ids]
    pool = Pool(
        spec=spec,
        accounting=accounting,
        storage=storage,
        num_layers=num_layers,
        seq_ids=seq_ids,
        slots=torch.from_numpy(np.concatenate(written)),
    )
    fill(pool, storage.write)
    return pool


def fill(pool: Pool, write: Write) -> None:
    """Random entries for every slot of a pool; the same ones, whatever writes them."""
    dtype = getattr(torch, pool.spec.dtype)
    given = dtype if dtype.itemsize > 1 else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(_FILL_TOKENS, *shape, generator=generator).to(given)
        for shape in pool.spec.entry_shapes
    )
    for turn, slots in enumerate(torch.split(pool.slots, _FILL_TOKENS)):
        moved = [x.roll(turn, 0)[: len(slots)] for x in (k, v)]
        for layer in range(pool.num_layers):
            write(layer, slots, *moved)


# -- batches -------------------------------------------------------------------------------------


def paged_batches(
    pool: Pool,
    lengths: Sequence[int],
    *,
    order: Order = "random",
    num_queries: int = 1,
    seed: int = 0,
) -> list[AttentionBatch]:
    """Batches of sequences so long, each of blocks that no other has, until the pool is used up."""
    blocks = pool.accounting.table(0, 0)
    if order == "random":
        blocks = np.random.default_rng(seed).permutation(blocks)
    size = pool.block_size
    counts = [ceil_div(length, size) for length in lengths]
    return [
        _paged_batch(np.split(blocks[first : first + sum(counts)], np.cumsum(counts)[:-1]),
                     lengths, size, num_queries)
        for first in range(0, len(blocks) - sum(counts) + 1, sum(counts))
    ]  # fmt: skip


def _paged_batch(
    tables: list[np.ndarray], lengths: Sequence[int], size: int, num_queries: int
) -> AttentionBatch:
    padded = np.full((len(tables), max(map(len, tables))), -1, np.int64)
    slots = []
    for row, table, length in zip(padded, tables, lengths, strict=True):
        row[: len(table)] = table
        positions = np.arange(length - num_queries, length)
        slots.append(table[positions // size] * size + positions % size)
    return AttentionBatch(
        query_starts=np.arange(len(lengths) + 1, dtype=np.int64) * num_queries,
        context_lens=np.array(lengths, np.int64),
        tables=torch.from_numpy(padded),
        slots=torch.from_numpy(np.concatenate(slots)),
        block_size=size,
    )


def range_batches(pool: Pool, lengths: Sequence[int]) -> list[AttentionBatch]:
    """The pool's own sequences, as many a batch as there are lengths."""
    count = len(lengths)
    return [
        make_batch(
            pool.accounting,
            0,
            [(first + i, length - 1, length) for i, length in enumerate(lengths)],
        )
        for first in range(0, len(pool.seq_ids), count)
    ]


def readable_tokens(batch: AttentionBatch, window: int | None = None) -> int:
    """Pairs of a query and a token that it reads."""
    total = 0
    for begin, end, context_len in batch.chunks():
        reach = np.arange(context_len - (end - begin), context_len) + 1
        total += int(np.minimum(reach, window or LONGEST * 2).sum())
    return total


# -- calls ---------------------------------------------------------------------------------------


def queries(batch: AttentionBatch, heads: int, spec: AttentionSpec, seed: int) -> Tensor:
    """[T, H, D], as a model in that dtype makes them; in bf16 for codes of eight bits."""
    given = getattr(torch, spec.dtype)
    given = given if given.itemsize > 1 else torch.bfloat16
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        int(batch.query_starts[-1]), heads, query_width(spec), generator=generator
    ).to(given)


def attending(
    backend: AttentionBackend,
    pool: Pool,
    batches: Sequence[AttentionBatch],
    q: Tensor,
    spec: AttentionSpec,
) -> Call:
    """Attend over each batch of each layer, one after the other. Raises: NotImplementedError."""
    if why := backend.unsupported(spec, torch.device("cpu")):
        raise NotImplementedError(f"{backend.name}: {why}")
    views = [pool.storage.view(layer) for layer in range(pool.num_layers)]
    return in_turn(
        partial(backend.attend, q, view, batch, spec=spec, scale=scale_of(spec))
        for view in views
        for batch in batches
    )


def part_of(batch: AttentionBatch, num_queries: int, context_len: int) -> AttentionBatch:
    """The first sequence alone and cut short: little enough for the reference."""
    return AttentionBatch(
        query_starts=np.array([0, num_queries]),
        context_lens=np.array([context_len]),
        tables=batch.tables[:1],
        slots=batch.slots[:num_queries],
        block_size=batch.block_size,
    )


def reference(pool: Pool, batch: AttentionBatch, q: Tensor, spec: AttentionSpec) -> Tensor:
    """What the oracle finds in the pool's first layer."""
    view = pool.storage.view(0)
    return ReferenceAttention().attend(q, view, batch, spec=spec, scale=scale_of(spec))
