"""What every AttentionBackend promises, over each of them, and what they read with.

The reference is held against the formula here, and so it can be an oracle elsewhere. The kernels of
the CPU meet the formula in ``test_attention_grid`` too, over far more kinds of layers.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import target
from attention.machines import cpu_backend
from attention.pretend_flashinfer import pretended_backend
from conformance.attention_cases import (
    CHUNKS,
    STORED,
    TOLERANCE,
    Case,
    error,
    formula,
    make_case,
    make_sinks,
    make_spec,
    read_by,
)
from conformance.covering import in_turn
from quire.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionBatch,
    LayersToServe,
    ReferenceAttention,
    SdpaAttention,
)
from quire.attention.gather import read_sequence, readable
from quire.errors import ConfigError

pytestmark = pytest.mark.device
OWN = ("reference", "sdpa", "cpu", "flashinfer", "triton")
EXAMPLE = "einsum"  # of another package: examples/attention_backend.py
KINDS = ("full", "sliding", "chunked", "latent")
# (heads that share a key-value head, key-value heads, widths)
SHAPES = ((1, 2, (16, 16)), (3, 2, (16, 16)), (4, 1, (8, 8)), (2, 2, (24, 16)))
# (softcap, sinks), as Llama, Gemma 2 and GPT-OSS have them, and both.
EXTRAS = ((None, False), (2.0, False), (None, True), (1.5, True))


def make_backend(name: str, case: Case) -> AttentionBackend:
    """Make the backend that ``BACKENDS`` has under the name, or skip what it does not serve.

    Raises: ConfigError for an unknown name.
    """
    match name:
        case "flashinfer" if target.on_gpu():
            pytest.skip("its kernels know other widths: test_attention_gpu asks for those")
        case "flashinfer":
            # Pretended, and without its limits on widths and dtypes.
            return pretended_backend(real=False)
        case "triton" if not target.on_gpu():
            pytest.skip("needs a GPU; in Triton's interpreter: tests/attention/triton")
        case "cpu" if not target.on_gpu():
            return cpu_backend("native")
    layers = LayersToServe(specs=(case.spec,), device=target.device())
    backend = BACKENDS.find(name, "--attention-backend")(layers)
    if (reason := backend.unsupported(case.spec, layers.device)) is not None:
        pytest.skip(reason)
    return backend


def dtype_for(name: str) -> str:
    """float32, but for those who know 16 bits only."""
    return "bfloat16" if name == "flashinfer" else "float32"


def shaped_case(strategy: str, kind: str, shape: int, dtype: str, seed: int = 0) -> Case:
    sharing, kv_heads, dims = SHAPES[shape]
    spec = make_spec(kind, kv_heads=kv_heads, dims=dims, dtype=dtype)
    return make_case(spec, sharing=sharing, strategy=strategy, seed=seed)


@pytest.mark.parametrize("strategy", STORED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_formula(strategy: str, kind: str) -> None:
    for shape, (softcap, has_sinks) in enumerate(EXTRAS):
        case = shaped_case(strategy, kind, shape, "float32")
        case = replace(case, q=case.q.double())  # so that nothing is rounded
        sinks = make_sinks(case.q.shape[1]) if has_sinks else None
        options = dict(scale=0.3, softcap=softcap, sinks=sinks)
        got = case.attend(ReferenceAttention(), **options)
        assert error(got, formula(case, **options)) < 1e-12, (shape, softcap, has_sinks)


@pytest.mark.sampled(20)
@pytest.mark.backends("sdpa", EXAMPLE)  # the CPU's, which has more kernels: test_attention_grid
@pytest.mark.parametrize(("strategy", "dtype"), in_turn(STORED, [*TOLERANCE]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_gives_what_the_formula_gives(
    name: str, strategy: str, kind: str, dtype: torch.dtype
) -> None:
    """And reads nothing that no query may read: all of that is NaN."""
    for shape in range(len(SHAPES)):
        case = shaped_case(strategy, kind, shape, str(dtype).removeprefix("torch."))
        backend = make_backend(name, case)
        case.poison()
        for softcap, has_sinks in EXTRAS:
            sinks = make_sinks(case.q.shape[1], dtype) if has_sinks else None
            options = dict(scale=0.25, softcap=softcap, sinks=sinks)
            want = formula(case, **options)
            got = case.attend(backend, **options)
            assert got.shape == want.shape
            assert got.dtype == dtype
            assert error(got, want) <= TOLERANCE[dtype], (shape, softcap, has_sinks)


def test_the_suite_runs_the_backend_that_is_named_and_no_other() -> None:
    """A wrong one fails, by its own code; an unknown name is an error."""

    class Wrong(SdpaAttention):
        def attend(self, q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            return super().attend(q, *args, **options) * 1.05

    BACKENDS.register("wrong", lambda layers: Wrong())
    try:
        with pytest.raises(AssertionError):
            test_a_backend_gives_what_the_formula_gives("wrong", "paged", "full", torch.float32)
    finally:
        BACKENDS.unregister("wrong")
    case = shaped_case("paged", "full", 0, "float32")
    for name in (*OWN, EXAMPLE):
        if name not in ("flashinfer", "triton"):
            assert make_backend(name, case).name == name
    assert make_backend(EXAMPLE, case).attend.__code__.co_filename.endswith(
        "examples/attention_backend.py"
    )
    with pytest.raises(ConfigError, match=r"--attention-backend='wrong' is no attention backend"):
        make_backend("wrong", case)


@pytest.mark.backends("sdpa", "cpu", "triton", EXAMPLE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_scores_stay_within_the_tolerance(name: str, dtype: str) -> None:
    """Scores in the tens, as a trained model has them: products must not be rounded early."""
    for seed in range(3):
        case = shaped_case("paged", "full", 1, dtype, seed)
        backend = make_backend(name, case)
        for softcap, has_sinks in EXTRAS[:1] if name in ("cpu", "triton") else EXTRAS:
            sinks = make_sinks(case.q.shape[1], case.q.dtype) if has_sinks else None
            cap = None if softcap is None else 20 * softcap
            options = dict(scale=2.0, softcap=cap, sinks=sinks)
            found = error(case.attend(backend, **options), formula(case, **options))
            assert found <= TOLERANCE[case.q.dtype], (seed, softcap, has_sinks)


@pytest.mark.parametrize("strategy", STORED)
@pytest.mark.backends(*OWN, EXAMPLE)
def test_a_sequence_is_not_disturbed_by_its_neighbours(name: str, strategy: str) -> None:
    """The chunks of the packed batch, each given alone, bring the same."""
    case = shaped_case(strategy, "sliding", 1, dtype_for(name))
    backend = make_backend(name, case)
    together = case.attend(backend, scale=2.0)
    starts = case.batch.query_starts.tolist()
    for index, (begin, end) in enumerate(pairwise(starts)):
        alone = AttentionBatch(
            query_starts=np.array([0, end - begin]),
            context_lens=case.batch.context_lens[index : index + 1],
            tables=case.batch.tables[index : index + 1],
            slots=case.batch.slots[begin:end],
            block_size=case.batch.block_size,
        )
        got = backend.attend(case.q[begin:end], case.view, alone, spec=case.spec, scale=2.0)
        assert error(got, together[begin:end]) <= TOLERANCE[case.q.dtype]


@pytest.mark.parametrize(
    "name", ["reference", "cpu", "flashinfer"]
)  # torch refuses it; the engine gives none
def test_a_sequence_with_no_query_of_this_step_gives_no_output(name: str) -> None:
    case = shaped_case("paged", "full", 1, dtype_for(name))
    backend = make_backend(name, case)
    want = case.attend(backend, scale=2.0)
    starts = case.batch.query_starts
    idle = replace(
        case.fresh_batch(),
        query_starts=np.concatenate([starts[:3], starts[2:]]),
        context_lens=np.insert(case.batch.context_lens, 2, case.batch.context_lens[2]),
        tables=torch.cat([case.batch.tables[:3], case.batch.tables[2:]]),
    )
    got = backend.attend(case.q, case.view, idle, spec=case.spec, scale=2.0)
    assert error(got, want) <= TOLERANCE[case.q.dtype]


@pytest.mark.backends("sdpa", "cpu", "triton", EXAMPLE)
def test_a_query_may_lie_anywhere(name: str) -> None:
    """Queries cut out of a wider tensor, as a fused projection leaves them; any sinks."""
    case = shaped_case("paged", "full", 1, "float32")
    backend = make_backend(name, case)
    tokens, heads, width = case.q.shape
    wide = case.q.new_full((tokens, 3 * heads + 1, width + 5), torch.nan)
    cut = wide[:, heads : 2 * heads, 2 : 2 + width]
    cut.copy_(case.q)
    turned = case.q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    heads_first = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    want = case.attend(backend, scale=2.0)
    tolerance = TOLERANCE[case.q.dtype]  # torch goes by alignment
    for q in (cut, turned, heads_first):
        assert error(replace(case, q=q).attend(backend, scale=2.0), want) <= tolerance
    sinks = make_sinks(heads, torch.bfloat16)
    options = dict(scale=2.0, softcap=30.0)
    with_sinks = case.attend(backend, **options, sinks=sinks.float())
    for other in (sinks, sinks.repeat_interleave(2)[::2], sinks.double()):
        assert torch.equal(case.attend(backend, **options, sinks=other), with_sinks)


@pytest.mark.backends(*OWN, EXAMPLE)
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_nan_is_seen_by_those_who_read_it(name: str, kind: str) -> None:
    """A broken entry must not look like a good one, and stays in its sequence and head."""
    case = shaped_case("paged", kind, 1, dtype_for(name))
    backend = make_backend(name, case)
    clean = case.attend(backend, scale=2.0)
    broken = 0  # the first of sequence 4's tokens that this step reads, in head 0
    history, length = CHUNKS[4]
    begin = int(case.batch.query_starts[4])
    readers = read_by(case.spec, history, length)[:, case.firsts[4] + broken]
    slot, size = int(case.slots[4][broken]), case.view.slots_per_row
    for part in (case.view.k, case.view.v):
        entry = part[slot // size, 0, slot % size]
        before = entry.clone()
        entry[:] = torch.nan
        got = case.attend(backend, scale=2.0)
        entry.copy_(before)
        assert got[begin : begin + length, :3][readers].isnan().all()
        got[begin : begin + length, :3] = clean[begin : begin + length, :3]
        assert error(got, clean) <= TOLERANCE[case.q.dtype]


@pytest.mark.parametrize("strategy", STORED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_reads_back_what_was_written(strategy: str, kind: str) -> None:
    case = shaped_case(strategy, kind, 3, "float32")
    for index, first in enumerate(case.firsts):
        k, v = read_sequence(case.view, case.batch, index, first)
        assert torch.equal(k.transpose(0, 1), case.keys[index][first:])
        assert torch.equal(v.transpose(0, 1), case.values[index][first:])


@pytest.mark.parametrize("strategy", ["contiguous", "growing", "virtual", "virtual-shared"])
def test_a_range_is_read_where_it_lies(strategy: str) -> None:
    case = shaped_case(strategy, "full", 0, "float32")
    k, v = read_sequence(case.view, case.batch, 1, 0)
    assert k.untyped_storage().data_ptr() == case.view.k.untyped_storage().data_ptr()
    assert v.untyped_storage().data_ptr() == case.view.v.untyped_storage().data_ptr()


def test_paged_tables_of_this_suite_are_shuffled() -> None:
    case = shaped_case("paged", "full", 0, "float32")
    steps = [int(b - a) for a, b in pairwise(case.batch.tables[4].tolist()) if b >= 0]
    assert len(set(steps)) > 1
    assert any(step < 0 for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_absent_only_where_it_would_hide_nothing(kind: str) -> None:
    spec = make_spec(kind, kv_heads=1, dims=(16, 16), dtype="float32")
    for context_len in range(1, 30):
        for num_queries in range(1, context_len + 1):
            first = context_len - num_queries
            for start in (0, spec.live_range(first).start):
                mask = readable(spec, num_queries, context_len, start, torch.device("cpu"))
                want = read_by(spec, first, num_queries)[:, start:]
                assert want.all() if mask is None else torch.equal(mask, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.backends("reference", "sdpa", "cpu", EXAMPLE)
def test_padding_is_read_by_no_query(name: str, kind: str) -> None:
    """A padded sequence says what it says without its padding, which may be anything."""
    if target.on_gpu():
        pytest.skip("padded sequences are read on a CPU")
    case, scale = shaped_case("paged", kind, 0, "float32"), 0.25
    padding = [before * 3 // 4 for before, _ in case.chunks]
    wanted = formula(case, scale=scale, padding=padding)
    for seq, count in enumerate(padding):
        case.keys[seq][:count] = torch.nan
        case.values[seq][:count] = torch.nan
    case.poison()
    padded = replace(case.fresh_batch(), padding=np.array(padding))
    got = make_backend(name, case).attend(case.q, case.view, padded, spec=case.spec, scale=scale)
    assert error(got, wanted) < TOLERANCE[torch.float32]


def test_padding_is_not_for_devices() -> None:
    batch = replace(shaped_case("paged", "full", 0, "float32").fresh_batch(), padding=np.ones(8))
    with pytest.raises(ValueError, match="read only on the CPU"):
        batch.on(torch.device("meta"))
