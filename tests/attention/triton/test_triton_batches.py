"""Batches as the engine makes them, at random; padded ones; and steps that are played again."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.triton.interpreter import backend, checking_overflow, shrink_tiles, tiles
from conformance.attention_cases import (
    TOLERANCE,
    error,
    formula,
    make_case,
    make_spec,
)
from quire.attention import AttentionBatch, ReferenceAttention
from quire.attention.attention_backend import PlacedBatch
from quire.attention.triton import backend as backend_module
from quire.kv import LayerView
from quire.memory import HostMemory
from quire.spec import AttentionSpec

EDGES = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100])


@pytest.fixture(scope="module", autouse=True)
def _small() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink_tiles(monkeypatch)
        yield


@settings(max_examples=10)
@given(
    chunks=st.lists(
        st.tuples(EDGES, st.sampled_from([1, 1, 1, 2, 5, 16, 20])), min_size=1, max_size=5
    ),
    kind=st.sampled_from(["full", "sliding", "chunked", "latent"]),
    reach=st.sampled_from([1, 8, 16, 33]),
    sharing=st.sampled_from([1, 2, 5]),
    block_size=st.sampled_from([4, 16, 32]),
    strategy=st.sampled_from(["paged", "virtual"]),
)
def test_random_batches(
    chunks: list[tuple[int, int]],
    kind: str,
    reach: int,
    sharing: int,
    block_size: int,
    strategy: str,
) -> None:
    """With NaN wherever no query may read."""
    spec = make_spec(kind, kv_heads=1, dims=(16, 16), dtype="float32", reach=reach)
    case = make_case(
        spec, sharing=sharing, strategy=strategy, block_size=block_size, chunks=tuple(chunks)
    )
    case.poison()
    got = case.attend(backend(), scale=0.5)
    assert error(got, formula(case, scale=0.5)) <= TOLERANCE[torch.float32]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Sequences in blocks of 8, in a pool of their own."""

    q: Tensor
    view: LayerView
    batch: AttentionBatch


def make_step(
    lengths: list[tuple[int, int]],  # (queries, context) of each
    *,
    num_seqs: int,
    num_tokens: int,
    spec: AttentionSpec,
    pool: int = 64,
    seed: int = 0,
) -> Step:
    """Padded: sequences beyond the last have no context, tokens none that they belong to."""
    generator = torch.Generator().manual_seed(seed)
    (heads, key), (_, value) = spec.entry_shapes
    k = torch.randn(pool, heads, 8, key, generator=generator)
    v = torch.randn(pool, heads, 8, value, generator=generator)
    blocks = torch.randperm(pool, generator=generator)
    tables = torch.full((num_seqs, 16), -1)
    used = 0
    for row, (_, context) in enumerate(lengths):
        count = -(-context // 8)
        tables[row, :count] = blocks[used : used + count]
        used += count
    counts = [n for n, _ in lengths] + [0] * (num_seqs - len(lengths))
    return Step(
        q=torch.randn(num_tokens, 2 * heads, key, generator=generator),
        view=LayerView(k=k, v=v, slots_per_row=8),
        batch=AttentionBatch(
            query_starts=np.array([0, *accumulate(counts)]),
            context_lens=np.array(
                [n for _, n in lengths] + [0] * (num_seqs - len(lengths)), np.int64
            ),
            tables=tables,
            slots=torch.full((num_tokens,), -1),
            block_size=8,
        ),
    )


FULL = make_spec("full", kv_heads=1, dims=(16, 16), dtype="float32")


def real_part(step: Step, num_seqs: int) -> Tensor:
    """What the reference gives for the sequences that are there."""
    batch = step.batch
    num_tokens = int(batch.query_starts[num_seqs])
    return ReferenceAttention().attend(
        step.q[:num_tokens],
        step.view,
        replace(
            batch,
            query_starts=batch.query_starts[: num_seqs + 1],
            context_lens=batch.context_lens[:num_seqs],
            tables=batch.tables[:num_seqs],
            memo={},
        ),
        spec=FULL,
        scale=0.3,
    )


@pytest.mark.parametrize("sinks", [False, True])
def test_padding_is_zeros_and_disturbs_no_sequence(sinks: bool) -> None:
    """Sequences of no tokens with one query each, as a recorded decode step has them."""
    step = make_step([(1, 30), (1, 1), (1, 100)], num_seqs=3, num_tokens=3, spec=FULL)
    given_sinks = torch.tensor([0.3, -0.2]) if sinks else None
    want = backend().attend(step.q, step.view, step.batch, spec=FULL, scale=0.3, sinks=given_sinks)
    q = torch.cat([step.q, torch.full((2, 2, 16), torch.nan)])
    padded = replace(
        step.batch,
        query_starts=np.array([0, 1, 2, 3, 4, 5]),
        context_lens=np.array([30, 1, 100, 0, 0]),
        tables=torch.cat([step.batch.tables, torch.full((2, 16), -1)]),
        memo={},
    )
    got = backend().attend(q, step.view, padded, spec=FULL, scale=0.3, sinks=given_sinks)
    assert error(got[:3], want) <= TOLERANCE[torch.float32]
    assert torch.equal(got[3:], torch.zeros(2, 2, 16))


def test_tokens_and_sequences_beyond_the_last_are_zeros() -> None:
    step = make_step([(20, 30), (1, 64)], num_seqs=4, num_tokens=24, spec=FULL)
    got = backend().attend(step.q, step.view, step.batch, spec=FULL, scale=0.3)
    assert error(got[:21], real_part(step, 2)) <= TOLERANCE[torch.float32]
    assert torch.equal(got[21:], torch.zeros(3, 2, 16))


def test_a_step_without_sequences_gives_nothing() -> None:
    step = make_step([], num_seqs=0, num_tokens=0, spec=FULL)
    assert backend().attend(step.q, step.view, step.batch, spec=FULL, scale=1.0).shape == (0, 2, 16)


class Tape:
    """Stands in for a kernel: makes its calls, and makes them again, as a CUDA graph does."""

    def __init__(self, kernel: Any, calls: list[Any]) -> None:
        self._kernel, self._calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self._calls.append(lambda: self._kernel[grid](*args, **options))
            self._calls[-1]()

        return call


@pytest.mark.parametrize(
    ("recorded", "played"),
    [
        # One query each, then other lengths, and fewer sequences.
        ([(1, 128)] * 4, [[(1, 3), (1, 77), (1, 64), (1, 128)], [(1, 40), (1, 9)]]),
        # Chunks, then others of as many tokens at most, one of them now a decode.
        ([(12, 100), (12, 100)], [[(20, 33), (1, 90)], [(1, 1), (5, 64)]]),
    ],
)
def test_a_recorded_step_may_be_played_with_other_sequences(
    recorded: list[tuple[int, int]],
    played: list[list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No figure of the host but the sizes: grids, splits and strides are as they were recorded."""
    calls: list[Any] = []
    for name in ("attend", "join"):
        monkeypatch.setattr(backend_module, name, Tape(getattr(backend_module, name), calls))
    num_seqs, num_tokens = len(recorded), sum(n for n, _ in recorded)
    step = make_step(recorded, num_seqs=num_seqs, num_tokens=num_tokens, spec=FULL)
    # What it is recorded for: any chunk of these tokens, any context that a table has room for.
    placed: PlacedBatch = replace(
        step.batch.on(step.q.device),
        max_query_len=1 if num_tokens == num_seqs else num_tokens,
        max_context_len=128,
    )
    step.batch.memo[step.q.device] = placed
    out = backend().attend(step.q, step.view, step.batch, spec=FULL, scale=0.3)
    assert error(out, real_part(step, num_seqs)) <= TOLERANCE[torch.float32]
    for lengths in played:
        other = make_step(lengths, num_seqs=num_seqs, num_tokens=num_tokens, spec=FULL, seed=1)
        fresh = other.batch.on(other.q.device)
        placed.query_starts.copy_(fresh.query_starts)
        placed.context_lens.copy_(fresh.context_lens)
        placed.tables.copy_(fresh.tables)
        step.q.copy_(other.q)
        step.view.k.copy_(other.view.k)
        step.view.v.copy_(other.view.v)
        for call in calls:
            call()
        want = real_part(other, len(lengths))
        assert error(out[: len(want)], want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("as_shipped", [False, True])
def test_parts_take_room_for_programs_and_not_for_tokens(
    as_shipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long sequence beside a long chunk is split, and no parts are kept for the chunk."""
    sizes: list[tuple[Any, ...]] = []

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda out, part_out, *args, **options: sizes.append((grid, part_out))

    for name in ("attend", "join"):
        monkeypatch.setattr(backend_module, name, Counting())
    if as_shipped:
        monkeypatch.setattr(tiles, "LEAST_STEPS", 4)
    step = make_step([(1, 128)] * 3 + [(2000, 0)], num_seqs=4, num_tokens=2003, spec=FULL, pool=64)
    placed = replace(step.batch.on(step.q.device), max_context_len=100_000)
    step.batch.memo[step.q.device] = placed
    backend().attend(step.q, step.view, step.batch, spec=FULL, scale=1.0)
    assert max(grid[1] for grid, _ in sizes) > 1
    for grid, part in sizes:
        if part is not None:
            assert part.numel() <= 2 * grid[0] * grid[1] * 64 * 16


def test_addresses_are_computed_in_64_bits() -> None:
    """Rows, heads and tokens further apart than 32 bits count; indices are no wider than those."""
    far = 2**31 + 64
    region = HostMemory().reserve(2 * 4 * (3 * far))  # address space: almost none of it is used
    flat = region.tensor(torch.float16)
    spec = make_spec("full", kv_heads=2, dims=(16, 16), dtype="float16")
    case = make_case(spec, sharing=1, chunks=((9, 1),), block_size=4)
    near_k, near_v = (x[case.batch.tables[0].clamp(min=0)] for x in (case.view.k, case.view.v))
    # Blocks side by side and heads far apart, and the other way round.
    for row, head in ((64, far), (far, 64)):
        strides = (row, head, 16, 1)
        k = flat.as_strided(near_k.shape, strides)
        v = flat.as_strided(near_v.shape, strides, 2048)
        tables = torch.arange(len(near_k))[None]
        slots = torch.arange(10)
        batch = replace(case.batch, tables=tables, slots=slots[9:], memo={})
        view = LayerView(k=k, v=v, slots_per_row=4)
        with checking_overflow():
            backend().make_writer(view)(slots, case.keys[0], case.values[0])
            got = backend().attend(case.q, view, batch, spec=spec, scale=0.3)
        assert error(got, formula(case, scale=0.3)) <= TOLERANCE[torch.float16]
    region.close()
