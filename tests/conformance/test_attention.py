"""What every AttentionBackend promises, over each of them.

The oracle is ReferenceAttention, and the oracle itself is held against a formula over plain tensors
that never saw a block table. An error is max |Δ| over max |reference|.
"""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.attention import (
    AttentionBackend,
    AttentionBatch,
    ReferenceAttention,
    SdpaAttention,
    make_batch,
)
from quire.attention.base import read_sequence, readable
from quire.memory import HostMemory
from quire.spec import AttentionSpec, ChunkedAttention, FullAttention, Group, SlidingWindow
from quire.strategies import STRATEGIES, CacheConfig, Fits, LayerView, build_storage

BACKENDS: dict[str, AttentionBackend] = {"sdpa": SdpaAttention()}
# Rounding of the inputs is no error here: both read the same ones. What is left is the rounding of
# weights and of the result: one or two units of the last of 11 bits in float16, of 8 in bfloat16.
TOLERANCE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 6e-3}
KINDS = ["full", "sliding", "chunked"]
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    value_dim: int


SHAPES = [
    Shape(heads=2, kv_heads=2, dim=16, value_dim=16),
    Shape(heads=6, kv_heads=2, dim=16, value_dim=16),
    Shape(heads=4, kv_heads=1, dim=8, value_dim=8),
    Shape(heads=4, kv_heads=2, dim=24, value_dim=16),
]
# (softcap, sinks), as Llama, Gemma 2 and GPT-OSS have them, and both.
EXTRAS = [(None, False), (2.0, False), (None, True), (1.5, True)]

# (tokens computed before, tokens of this step): prefill from nothing, its later chunks, decodes.
CHUNKS = [(0, 13), (31, 1), (5, 7), (0, 1), (40, 12), (8, 1), (17, 3), (59, 1)]


def make_spec(kind: str, shape: Shape, dtype: str) -> AttentionSpec:
    common = dict(
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        value_head_dim=None if shape.value_dim == shape.dim else shape.value_dim,
        dtype=dtype,
    )
    match kind:
        case "full":
            return FullAttention(**common)
        case "sliding":
            return SlidingWindow(**common, window=9)
        case _:
            return ChunkedAttention(**common, chunk=6)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step over sequences that are half-way, and their keys and values as plain tensors."""

    spec: AttentionSpec
    q: Tensor
    view: LayerView
    batch: AttentionBatch
    keys: list[Tensor]  # a sequence: [L, K, D]
    values: list[Tensor]


def make_case(strategy: str, kind: str, shape: Shape, dtype: str, seed: int = 0) -> Case:
    """Sequences grow in turns, with others ending between them, so that tables are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    torch_dtype = getattr(torch, dtype)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(torch_dtype)

    spec = make_spec(kind, shape, dtype)
    config = CacheConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2 * len(CHUNKS),
        capacity_bytes=2**26,
        block_size=BLOCK_SIZE,
        growth_tokens=8,
        page_bytes=HostMemory().page_bytes,
    )
    accounting = STRATEGIES[strategy][0]((Group(spec=spec, layers=(0,)),), config)
    storage = build_storage(strategy, accounting, HostMemory())
    keys = [random(sum(chunk), shape.kv_heads, shape.dim) for chunk in CHUNKS]
    values = [random(sum(chunk), shape.kv_heads, shape.value_dim) for chunk in CHUNKS]

    def compute(index: int, start: int, stop: int) -> None:
        assert isinstance(accounting.try_extend(index, stop), Fits)
        storage.apply(accounting.drain())
        slots = torch.from_numpy(accounting.slots(0, index, start, stop))
        storage.write(0, slots, keys[index][start:stop], values[index][start:stop])

    passing = range(100, 100 + len(CHUNKS) // 2)
    for seq_id in [*range(len(CHUNKS)), *passing]:
        accounting.add(seq_id)
    for begin in range(0, MAX_MODEL_LEN, 5):
        for index, (history, _) in enumerate(CHUNKS):
            if begin < history:
                compute(index, begin, min(begin + 5, history))
        for seq_id in passing:
            if begin < 10:
                assert isinstance(accounting.try_extend(seq_id, begin + 5), Fits)
            elif begin == 10:
                accounting.free(seq_id)
    for index, (history, length) in enumerate(CHUNKS):
        compute(index, history, history + length)
    chunks = [(i, history, history + length) for i, (history, length) in enumerate(CHUNKS)]
    accounting.check()
    return Case(
        spec=spec,
        q=random(sum(length for _, length in CHUNKS), shape.heads, shape.dim),
        view=storage.view(0),
        batch=make_batch(accounting, 0, chunks),
        keys=keys,
        values=values,
    )


def formula(case: Case, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Attention as it is written on paper, one sequence at a time, in float64: [T, H, Dv]."""
    outs = []
    packed = case.q.double()
    for (history, length), k, v in zip(CHUNKS, case.keys, case.values, strict=True):
        q, packed = packed[:length], packed[length:]
        group_size = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group_size, 1) for x in (k, v))  # [L, H, D]
        scores = torch.einsum("qhd,lhd->hql", q, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        for row in range(length):
            position = history + row
            for token in range(history + length):
                if token > position or not reads(case.spec, position, token):
                    scores[:, row, token] = -torch.inf
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp()[:, None, None]
        outs.append(torch.einsum("hql,lhd->qhd", weights / total, v))
    return torch.cat(outs)


def reads(spec: AttentionSpec, position: int, token: int) -> bool:
    match spec:
        case SlidingWindow(window=window):
            return token > position - window
        case ChunkedAttention(chunk=chunk):
            return token // chunk == position // chunk
        case _:
            return True


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def sinks_for(shape: Shape, dtype: str, *, used: bool) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    sinks = torch.randn(shape.heads, generator=generator).to(getattr(torch, dtype))
    return sinks if used else None


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_is_the_formula(strategy: str, kind: str) -> None:
    for shape, (softcap, has_sinks) in zip(SHAPES, EXTRAS, strict=True):
        case = make_case(strategy, kind, shape, "float32")
        sinks = sinks_for(shape, "float32", used=has_sinks)
        got = ReferenceAttention().attend(
            case.q, case.view, case.batch, spec=case.spec, scale=0.3, softcap=softcap, sinks=sinks
        )
        assert error(got, formula(case, 0.3, softcap, sinks)) < 1e-6, (shape, softcap, has_sinks)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_gives_what_the_oracle_gives(
    backend: str, strategy: str, kind: str, dtype: str
) -> None:
    for shape in SHAPES:
        case = make_case(strategy, kind, shape, dtype)
        scale = shape.dim**-0.5
        for softcap, has_sinks in EXTRAS:
            sinks = sinks_for(shape, dtype, used=has_sinks)
            inputs = (case.q, case.view, case.batch)
            options = dict(spec=case.spec, scale=scale, softcap=softcap, sinks=sinks)
            want = ReferenceAttention().attend(*inputs, **options)
            got = BACKENDS[backend].attend(*inputs, **options)
            assert got.shape == (len(case.q), shape.heads, shape.value_dim)
            assert got.dtype == case.q.dtype
            assert error(got, want) <= TOLERANCE[dtype], (shape, softcap, has_sinks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_scores_stay_within_the_tolerance(backend: str, dtype: str) -> None:
    """Scores in the tens, as a trained model has them: products must not be rounded early."""
    shape = SHAPES[1]
    for seed in range(3):
        case = make_case("paged", "full", shape, dtype, seed)
        for softcap, has_sinks in EXTRAS:
            sinks = sinks_for(shape, dtype, used=has_sinks)
            cap = None if softcap is None else 20 * softcap
            want = formula(case, 2.0, cap, sinks)
            got = BACKENDS[backend].attend(
                case.q, case.view, case.batch, spec=case.spec, scale=2.0, softcap=cap, sinks=sinks
            )
            assert error(got, want) <= TOLERANCE[dtype], (seed, softcap, has_sinks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sequence_is_not_disturbed_by_its_neighbours(backend: str, strategy: str) -> None:
    """The chunks of the packed batch, each given alone, bring the same."""
    shape = SHAPES[1]
    case = make_case(strategy, "sliding", shape, "float32")
    together = BACKENDS[backend].attend(case.q, case.view, case.batch, spec=case.spec, scale=0.25)
    starts = case.batch.query_starts
    for index, (begin, end) in enumerate(pairwise(starts)):
        alone = AttentionBatch(
            query_starts=(0, end - begin),
            context_lens=(case.batch.context_lens[index],),
            tables=case.batch.tables[index : index + 1],
            slots=case.batch.slots[begin:end],
            block_size=case.batch.block_size,
        )
        got = BACKENDS[backend].attend(
            case.q[begin:end], case.view, alone, spec=case.spec, scale=0.25
        )
        assert error(got, together[begin:end]) <= TOLERANCE["float32"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_reads_back_what_was_written(strategy: str, kind: str) -> None:
    case = make_case(strategy, kind, SHAPES[3], "float32")
    for index, (history, _) in enumerate(CHUNKS):
        start = case.spec.live_range(history).start
        k, v = read_sequence(case.view, case.batch, index, start)
        assert torch.equal(k.transpose(0, 1), case.keys[index][start:])
        assert torch.equal(v.transpose(0, 1), case.values[index][start:])


@pytest.mark.parametrize("strategy", ["contiguous", "growing", "virtual"])
def test_a_range_is_read_where_it_lies(strategy: str) -> None:
    case = make_case(strategy, "full", SHAPES[0], "float32")
    k, v = read_sequence(case.view, case.batch, 1, 0)
    assert k.untyped_storage().data_ptr() == case.view.k.untyped_storage().data_ptr()
    assert v.untyped_storage().data_ptr() == case.view.v.untyped_storage().data_ptr()


def test_paged_tables_of_this_suite_are_shuffled() -> None:
    case = make_case("paged", "full", SHAPES[0], "float32")
    steps = [int(b - a) for a, b in pairwise(case.batch.tables[4].tolist()) if b >= 0]
    assert len(set(steps)) > 1
    assert any(step < 0 for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_absent_only_where_it_would_hide_nothing(kind: str) -> None:
    spec = make_spec(kind, SHAPES[0], "float32")
    for context_len in range(1, 30):
        for num_queries in range(1, context_len + 1):
            first = context_len - num_queries
            for start in (0, spec.live_range(first).start):
                mask = readable(spec, num_queries, context_len, start, torch.device("cpu"))
                want = [
                    [token <= i and reads(spec, i, token) for token in range(start, context_len)]
                    for i in range(first, context_len)
                ]
                if mask is None:
                    assert all(all(row) for row in want)
                else:
                    assert mask.tolist() == want
