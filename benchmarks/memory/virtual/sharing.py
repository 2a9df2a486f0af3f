"""What sharing saves and what mappings it takes, by our counters and by the system's."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.memory.virtual.caches import (
    ONE_HEAD,
    QWEN3_4B,
    Cache,
    fill,
    heap_bytes,
    make_cache,
    prompt,
)
from quire.kv import BlockCoordinator, Extension, Map, NotNow
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.memory.machine.probe import mapping_limit, num_mappings

COMMON, OWN = 4_096, 100  # tokens of a prompt
FORKED, NUM_FORKS = 1_000, 32
NUM_SEQS, LENGTH, STEP = 1_000, 1_024, 16
_LAYERS = 4
_BLOCK = 16

# -- one copy ------------------------------------------------------------------------------------


def prefix() -> dict[str, Any]:
    """Two sequences that begin with the same 4,096 tokens; the second one writes only its own."""
    longest, tokens = COMMON + OWN, 2 * COMMON
    cache = make_cache(
        "virtual, shared", QWEN3_4B, _LAYERS, tokens=tokens, longest=longest, num_seqs=2
    )
    accounting, before = cache.accounting, heap_bytes()
    ids = prompt(COMMON + OWN)
    cache.add(0, COMMON)
    fill(cache, 0, COMMON, seed=0)
    accounting.mark_computed([0], [COMMON], ids[:COMMON])
    accounting.add(1)
    hit = accounting.match_prefix(1, ids)
    accounting.try_extend(1, longest, Extension(hit=hit))
    cache.step()
    usage, held = accounting.usage(), heap_bytes() - before
    one, two = (_entries(cache, seq_id) for seq_id in (0, 1))
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, QWEN3_4B.num_kv_heads, 4, QWEN3_4B.head_dim, generator=generator)
    outputs = [
        [scaled_dot_product_attention(q.to(k.dtype), k[None], v[None]) for k, v in layers]
        for layers in (one, two)
    ]
    found = {
        "hit_tokens": hit.num_tokens,
        "equal_entries": all(
            torch.equal(a, b)
            for x, y in zip(one, two, strict=True)
            for a, b in zip(x, y, strict=True)
        ),
        "equal_outputs": all(torch.equal(a, b) for a, b in zip(*outputs, strict=True)),
        "heap_bytes": held,
        "committed_bytes": usage.committed_bytes,
        "one_copy_bytes": -(-longest // _BLOCK) * _BLOCK * cache.token_bytes,
        "two_copies_bytes": (COMMON + longest) // _BLOCK * _BLOCK * cache.token_bytes,
    }
    cache.storage.close()
    return found


def _entries(cache: Cache, seq_id: int) -> list[tuple[Tensor, Tensor]]:
    """The common tokens as an unmodified kernel is given them: [K, COMMON, D]."""
    (row,) = cache.accounting.table(0, seq_id)
    views = [cache.storage.view(layer) for layer in range(cache.layers)]
    return [(view.k[row][:, :COMMON], view.v[row][:, :COMMON]) for view in views]


def forks() -> dict[str, Any]:
    """One sequence, 32 forks of it, and one token more in each."""
    cache = make_cache(
        "virtual, shared", QWEN3_4B, _LAYERS,
        tokens=2 * FORKED, longest=2 * FORKED, num_seqs=1 + NUM_FORKS,
    )  # fmt: skip
    accounting, empty = cache.accounting, heap_bytes()
    cache.add(0, FORKED)
    fill(cache, 0, FORKED, seed=0)
    one = heap_bytes() - empty
    begun = time.perf_counter()
    for seq_id in range(1, 1 + NUM_FORKS):
        accounting.fork(0, seq_id)
    cache.step()
    fork_s = (time.perf_counter() - begun) / NUM_FORKS
    forked = heap_bytes() - empty
    begun = time.perf_counter()
    for seq_id in range(1 + NUM_FORKS):
        cache.extend(seq_id, FORKED + 1)
    cache.step()
    diverge_s = (time.perf_counter() - begun) / NUM_FORKS
    diverged = heap_bytes() - empty
    equal = all(
        torch.equal(x[:, :FORKED], y[:, :FORKED])
        for seq_id in range(1, 1 + NUM_FORKS)
        for one_, two in zip(_entries(cache, 0), _entries(cache, seq_id), strict=True)
        for x, y in zip(one_, two, strict=True)
    )
    found = {
        "one_bytes": one,
        "forked_bytes": forked,
        "more_each_bytes": (diverged - forked) / NUM_FORKS,
        "block_bytes": _BLOCK * cache.token_bytes,
        "equal_entries": equal,
        "fork_s": fork_s,
        "diverge_s": diverge_s,
        "counted": accounting.usage().committed_bytes == diverged,
    }
    cache.storage.close()
    return found


# -- mappings ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Mappings:
    """Sequences of ``LENGTH`` tokens that live at once, and their mappings by two counts."""

    how: str
    num_seqs: int
    num_living: int = 0
    counted: int = 0  # by ours
    by_system: int = 0  # more than before
    num_maps: int = 0  # calls
    account_s: float = 0.0
    apply_s: float = 0.0
    left: int = 0  # by the system, when all have ended
    refused_for: str = ""  # option
    limit: int | None = field(default_factory=mapping_limit)


def round_robin(num_seqs: int) -> Mappings:
    """As decoding grows them: each 16 tokens at a time, in turn."""
    found = Mappings(how="16 tokens each in turn", num_seqs=num_seqs)
    return _run(found, _in_turn(num_seqs))


def prefilled(num_seqs: int) -> Mappings:
    """As prefill does: one after the other, whole."""
    found = Mappings(how="whole, one after the other", num_seqs=num_seqs)
    return _run(found, [[(i, LENGTH)] for i in range(num_seqs)])


def in_pieces(num_seqs: int, seed: int, *, max_mappings: int | None = None) -> Mappings:
    """In a pool of which every fourth block, here and there, is held."""
    found = Mappings(how="in turn, in a pool in pieces", num_seqs=num_seqs)
    options = {}
    if max_mappings is not None:
        found.limit = max_mappings
        found.how += f", {max_mappings:,} allowed"
        options = {"max_mappings": max_mappings}
    return _run(found, _in_turn(num_seqs), pieces_seed=seed, **options)


def _in_turn(num_seqs: int) -> list[list[tuple[int, int]]]:
    return [[(i, n) for i in range(num_seqs)] for n in range(STEP, LENGTH + 1, STEP)]


def _run(
    found: Mappings,
    steps: Sequence[Sequence[tuple[int, int]]],
    *,
    pieces_seed: int | None = None,
    **options: Any,
) -> Mappings:
    """``steps``: of each, the sequences that grow and how far."""
    tokens = found.num_seqs * LENGTH * (1 if pieces_seed is None else 2)
    cache = make_cache(
        "virtual, shared", ONE_HEAD, 1,
        tokens=tokens, longest=LENGTH, num_seqs=found.num_seqs, **options,
    )  # fmt: skip
    accounting = cache.accounting
    assert isinstance(accounting, SharedVirtualAccounting)
    if pieces_seed is not None:
        _break_up(cache, tokens // _BLOCK, pieces_seed)
    before = num_mappings()
    for seq_id in range(found.num_seqs):
        accounting.add(seq_id)
    refused: set[int] = set()
    for step in steps:
        begun = time.perf_counter()
        for seq_id, num_tokens in step:
            if seq_id not in refused:
                verdict = accounting.try_extend(seq_id, num_tokens)
                if isinstance(verdict, NotNow):
                    refused.add(seq_id)
                    found.refused_for = verdict.option
        changes = accounting.drain()
        drained = time.perf_counter()
        cache.storage.apply(changes)
        found.apply_s += time.perf_counter() - drained
        found.account_s += drained - begun
        found.num_maps += sum(isinstance(change, Map) for change in changes)
    found.num_living = sum(
        accounting.num_tokens(seq_id) == LENGTH for seq_id in range(found.num_seqs)
    )
    found.by_system = num_mappings() - before
    found.counted = accounting._windows.num_mappings
    cache.free(range(found.num_seqs))
    found.left = num_mappings() - before
    cache.storage.close()
    return found


def _break_up(cache: Cache, num_blocks: int, seed: int) -> None:
    """Fill the pool with single blocks, then free half of them, chosen at random."""
    assert isinstance(cache.accounting, SharedVirtualAccounting)
    pool = cache.accounting
    for seq_id in range(-num_blocks, 0):  # they need no window, for they are not read
        BlockCoordinator.add(pool, seq_id)
        BlockCoordinator.allocate(pool, seq_id, 1)
    cache.step()
    for seq_id in Random(seed).sample(range(-num_blocks, 0), num_blocks // 2):
        pool.free(seq_id)
    cache.step()
