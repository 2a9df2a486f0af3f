"""What a layout costs its readers: one token attends, one token is written, a model decodes.

A context is so many consecutive tokens of one long sequence. Those of short contexts are taken from
everywhere in it in turn, and layer after layer, so that none is found in the processor's caches.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.attending import max_error
from benchmarks.harness.quiet import Call, Timing, in_turn, take_turns
from benchmarks.memory.virtual.caches import FORMS, QWEN3_4B, Cache, fill, make_cache
from quire.attention import AttentionBackend, AttentionBatch, SdpaAttention
from quire.kv import LayerView
from quire.units import align_up, ceil_div

LAYERS, QUERY_HEADS = 12, 32  # of Qwen3-4B's 36 layers, so that six caches fit
LONGEST = 16_384
CONTEXTS = (100, 1_024, 4_096, 16_384)
GATHERED = "paged, gathered first"
# A second time, in the opposite order, so that a machine that slows down does so for both.
TWICE = ("virtual, private", "contiguous")
AGAIN = "contiguous again"
RANGES = [form for form in FORMS if form != "paged"]
_SCALE = QWEN3_4B.head_dim**-0.5

Timings = dict[str, Timing]


def build(backend: AttentionBackend, longest: int, seed: int) -> dict[str, Cache]:
    """Each form with one sequence, written by the backend as the engine writes."""
    caches = {}
    for form in FORMS:
        cache = make_cache(form, QWEN3_4B, LAYERS, tokens=longest, longest=longest, backend=backend)
        cache.add(0, longest)
        fill(cache, 0, longest, seed=seed)
        caches[form] = cache
    return caches


# -- reading -------------------------------------------------------------------------------------


def decode(
    caches: dict[str, Cache], context: int, backend: AttentionBackend | None, num_rounds: int
) -> Timings:
    """Seconds a layer for one query over ``context`` tokens; no backend: torch's own SDPA."""
    if backend is None:
        calls = {form: in_turn(_by_sdpa(caches[form], context)) for form in RANGES}
        calls[GATHERED] = in_turn(_by_backend(SdpaAttention(), caches["paged"], context))
        again = {f"{form} again": in_turn(_by_sdpa(caches[form], context)) for form in TWICE}
        budget_s = 20.0
    else:
        calls = {form: in_turn(_by_backend(backend, caches[form], context)) for form in FORMS}
        again = {AGAIN: in_turn(_by_backend(backend, caches["contiguous"], context))}
        budget_s = 15.0
    return take_turns(calls | again, num_rounds=num_rounds, budget_s=budget_s)


def _places(cache: Cache, context: int) -> range:
    """Where contexts begin: at blocks, side by side."""
    longest = cache.accounting.num_tokens(0)
    return range(0, longest - context + 1, align_up(context, 16))


def _by_sdpa(cache: Cache, context: int) -> Iterator[Call]:
    """Grouped queries as rows, the keys and values where they lie: ``[1, K, context, D]``."""
    (row,) = cache.accounting.table(0, 0)
    q = _query().view(1, QWEN3_4B.num_kv_heads, -1, QWEN3_4B.head_dim)
    for start in _places(cache, context):
        for layer in range(cache.layers):
            view = cache.storage.view(layer)
            k, v = (x[row][None, :, start : start + context] for x in (view.k, view.v))
            yield partial(scaled_dot_product_attention, q, k, v, scale=_SCALE)


def _by_backend(backend: AttentionBackend, cache: Cache, context: int) -> Iterator[Call]:
    q = _query().view(1, QUERY_HEADS, QWEN3_4B.head_dim)
    for start in _places(cache, context):
        batch = _batch(cache, start, context)
        for layer in range(cache.layers):
            view: LayerView = cache.storage.view(layer)
            yield partial(backend.attend, q, view, batch, spec=QWEN3_4B, scale=_SCALE)


def _batch(cache: Cache, start: int, context: int) -> AttentionBatch:
    """Row i of a range's view begins at slot i, so that a context is a range too."""
    table, size = cache.accounting.table(0, 0), cache.accounting.block_size(0)
    end = start + context
    rows = table + start if len(table) == 1 else table[start // size : ceil_div(end, size)]
    return AttentionBatch(
        query_starts=np.array([0, 1]),
        context_lens=np.array([context]),
        tables=torch.from_numpy(rows[None].copy()),
        slots=torch.from_numpy(cache.accounting.slots(0, 0, end - 1, end)),
        block_size=size,
    )


def _query() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = QUERY_HEADS, QWEN3_4B.head_dim
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def errors(caches: dict[str, Cache]) -> dict[str, float]:
    """max |Δ| of unmodified SDPA over 1,000 tokens from that over contiguous's equal entries."""
    found = {form: next(_by_sdpa(caches[form], 1_000))() for form in RANGES}
    expected = found["contiguous"]
    assert isinstance(expected, Tensor)
    return {form: max_error(got, expected) for form, got in found.items()}


# -- writing -------------------------------------------------------------------------------------


def write(caches: dict[str, Cache], num_rounds: int) -> Timings:
    """Seconds a layer to put one token there, into places in turn."""
    calls: dict[str, Call] = {}
    for name, cache in (*caches.items(), (AGAIN, caches["contiguous"])):
        calls[name] = in_turn(_writing(cache))
    return take_turns(calls, num_rounds=num_rounds)


def _writing(cache: Cache) -> Iterator[Callable[[], None]]:
    shape = 1, QWEN3_4B.num_kv_heads, QWEN3_4B.head_dim
    k, v = (torch.randn(shape).to(torch.bfloat16) for _ in range(2))
    for start in range(0, cache.accounting.num_tokens(0), 97):
        slots = torch.from_numpy(cache.accounting.slots(0, 0, start, start + 1))
        for layer in range(cache.layers):
            yield partial(cache.storage.write, layer, slots, k, v)
