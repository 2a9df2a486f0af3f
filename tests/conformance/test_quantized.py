"""What the slow backends read of keys and values in eight bits, and of latents left as they are;
and that a compiled writer stores what torch does.

The oracle is a formula in float64 over what was written, rounded as the format says. An error is
max |Δ| over max |formula|.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from conformance import named
from quire.attention import (
    AttentionBackend,
    AttentionBatch,
    ReferenceAttention,
    SdpaAttention,
    choose_backend,
    make_batch,
)
from quire.attention.gather import read_sequence
from quire.kv import STRATEGIES, CacheConfig, Commit, Fits, LayerView, build_storage
from quire.kv.storage.entries import dequantize, quantize
from quire.memory import HostMemory
from quire.spec import AttentionSpec, FullAttention, Group, LatentAttention, SlidingWindow

BACKENDS: dict[str, AttentionBackend] = {"reference": ReferenceAttention(), "sdpa": SdpaAttention()}
DTYPES = ["int8", "float8_e4m3fn", "bfloat16"]
# Nothing is rounded on the way but the result: bfloat16 has 8 bits.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-3}
HEADS, SCALE = 4, 0.2
CHUNKS = [(0, 13), (31, 1), (5, 7), (40, 6)]  # tokens computed before, tokens of this step


def specs(dtype: str) -> dict[str, AttentionSpec]:
    return {
        "full": FullAttention(num_kv_heads=2, head_dim=24, value_head_dim=16, dtype=dtype),
        "sliding": SlidingWindow(num_kv_heads=2, head_dim=16, window=9, dtype=dtype),
        "latent": LatentAttention(latent_dim=32, rope_dim=8, dtype=dtype),
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    spec: AttentionSpec
    q: Tensor  # [T, H, D], of a latent [T, H, latent + rope]
    view: LayerView
    batch: AttentionBatch
    entries: list[tuple[Tensor, Tensor]]  # a sequence: what is read of k [L, K, D], v [L, K, Dv]


def make_case(strategy: str, spec: AttentionSpec, q_dtype: torch.dtype) -> Case:
    """The sequences grow in turns, so that their blocks lie in each other's way."""
    generator = torch.Generator().manual_seed(0)
    config = CacheConfig(
        max_model_len=64,
        max_num_seqs=8,
        capacity_bytes=2**26,
        block_size=4,
        growth_tokens=8,
        page_bytes=HostMemory().page_bytes,
    )
    accounting = STRATEGIES[strategy].make_accounting((Group(spec=spec, layers=(0,)),), config)
    storage = build_storage(strategy, accounting, HostMemory())
    entries = [
        tuple(
            torch.randn(history + length, *shape, generator=generator).to(q_dtype)
            for shape in spec.entry_shapes
        )
        for history, length in CHUNKS
    ]
    for seq_id in range(len(CHUNKS)):
        accounting.add(seq_id)

    def compute(seq_id: int, start: int, stop: int) -> None:
        assert isinstance(accounting.try_extend(seq_id, stop), Fits)
        storage.apply(accounting.drain())
        k, v = (x[start:stop] for x in entries[seq_id])
        storage.write(0, torch.from_numpy(accounting.slots(0, seq_id, start, stop)), k, v)

    for begin in range(0, 64, 5):
        for seq_id, (history, _) in enumerate(CHUNKS):
            if begin < history:
                compute(seq_id, begin, min(begin + 5, history))
    chunks = []
    for seq_id, (history, length) in enumerate(CHUNKS):
        compute(seq_id, history, history + length)
        chunks.append((seq_id, history, history + length))
    (_, key_dim), (_, value_dim) = spec.entry_shapes
    width = key_dim + value_dim if isinstance(spec, LatentAttention) else key_dim
    kept_as = getattr(torch, spec.dtype)
    rounded = [tuple(dequantize(*quantize(x, kept_as)) for x in pair) for pair in entries]
    return Case(
        spec=spec,
        q=torch.randn(sum(n for _, n in CHUNKS), HEADS, width, generator=generator).to(q_dtype),
        view=storage.view(0),
        batch=make_batch(accounting, 0, chunks),
        entries=[(k, v) for k, v in rounded],
    )


def formula(case: Case, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Attention as it is written on paper, in float64: [T, H, Dv]."""
    outs = []
    packed = case.q.double()
    for (history, length), (k, v) in zip(CHUNKS, case.entries, strict=True):
        if isinstance(case.spec, LatentAttention):
            k, v = torch.cat([k, v], -1), k
        q, packed = packed[:length], packed[length:]
        k, v = (x.double().repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,lhd->hql", q, k) * SCALE
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        for row in range(length):
            live = case.spec.live_range(history + row)
            scores[:, row, : live.start] = -torch.inf
            scores[:, row, history + row + 1 :] = -torch.inf
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp()[:, None, None]
        outs.append(torch.einsum("hql,lhd->qhd", weights / total, v))
    return torch.cat(outs)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", named.strategies())
@pytest.mark.parametrize("kind", specs("int8"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backend_gives_the_formula(backend: str, strategy: str, kind: str, dtype: str) -> None:
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(1))
    for q_dtype, tolerance in TOLERANCE.items():
        case = make_case(strategy, specs(dtype)[kind], q_dtype)
        for softcap, own_sinks in ((None, None), (2.0, None), (None, sinks)):
            want = formula(case, softcap, own_sinks)
            got = BACKENDS[backend].attend(
                case.q,
                case.view,
                case.batch,
                spec=case.spec,
                scale=SCALE,
                softcap=softcap,
                sinks=own_sinks,
            )
            assert got.dtype == q_dtype
            assert got.shape == want.shape
            error = (got.double() - want).abs().max() / want.abs().max()
            assert error <= tolerance, (q_dtype, softcap, own_sinks)


@pytest.mark.parametrize("strategy", named.strategies())
@pytest.mark.parametrize("kind", specs("int8"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_reads_back_what_its_rounding_left(strategy: str, kind: str, dtype: str) -> None:
    case = make_case(strategy, specs(dtype)[kind], torch.float32)
    for index, (history, _) in enumerate(CHUNKS):
        start = case.spec.live_range(history).start
        found = read_sequence(case.view, case.batch, index, start)
        for got, want in zip(found, case.entries[index], strict=True):
            assert torch.equal(got.transpose(0, 1), want[start:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", named.strategies())
def test_an_entry_that_is_not_finite_stays_in_its_sequence_and_head(
    backend: str, strategy: str
) -> None:
    spec = specs("int8")["full"]
    case = make_case(strategy, spec, torch.float32)
    clean = BACKENDS[backend].attend(case.q, case.view, case.batch, spec=spec, scale=SCALE)
    # As a NaN in the last key of the last sequence would leave it.
    assert case.view.k_scale is not None
    slot = case.batch.slots[-1]
    row, entry = slot // case.view.slots_per_row, slot % case.view.slots_per_row
    case.view.k_scale[row, 1, entry] = torch.nan
    got = BACKENDS[backend].attend(case.q, case.view, case.batch, spec=spec, scale=SCALE)
    before, half = int(case.batch.query_starts[-2]), HEADS // 2
    assert torch.equal(got[:before], clean[:before])
    assert torch.equal(got[:, :half], clean[:, :half])  # these read head 0
    assert got[-1, half:].isnan().all()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", named.strategies())
@pytest.mark.parametrize("kind", specs("int8"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_writer_leaves_what_torch_leaves(
    source: torch.dtype, strategy: str, kind: str, dtype: str
) -> None:
    spec = specs(dtype)[kind]
    make_writer = choose_backend("auto", [spec], torch.device("cpu")).make_writer
    if make_writer is None:
        pytest.skip("the backend for this machine writes through torch")
    config = CacheConfig(
        max_model_len=64, max_num_seqs=2, capacity_bytes=2**22, page_bytes=HostMemory().page_bytes
    )
    accounting = STRATEGIES[strategy].make_accounting((Group(spec=spec, layers=(0,)),), config)
    num_slots = accounting.num_slots(0)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(num_slots, generator=generator)[:100]
    entries = []
    for heads, width in spec.entry_shapes:
        size = torch.randn(len(slots), heads, 1, generator=generator).mul(8).exp()
        x = torch.randn(len(slots), heads, width, generator=generator) * size
        odd = torch.tensor(
            [0.0, torch.nan, torch.inf, -torch.inf, 1e-40, 3e38, 449.0, 17.0, 19.0, 2.0**-10]
        )
        where = torch.rand(x.shape, generator=generator) < 0.01
        chosen = torch.randint(len(odd), (int(where.sum()),), generator=generator)
        x[where] = odd[chosen]
        x[7] = 0
        entries.append(x.to(source))
    found = []
    for make in (None, make_writer):
        storage = build_storage(strategy, accounting, HostMemory(), make)
        storage.apply([Commit(0, 0, num_slots)])
        storage.write(0, slots, *entries)
        found.append(storage.gather(0, slots))
        storage.close()
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
