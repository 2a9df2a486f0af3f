"""A batch-invariant step gives a token the same bits, however the tokens before it were cut.

One sequence's queries are attended to all at once, and again in chunks of one token and of several,
beside other sequences, in blocks of other sizes, on another number of threads. Each result must be
equal to the bit.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.machines import ISAS, isa_or_skip, kernel_folder
from conformance.attention_cases import make_sinks, make_spec
from conformance.covering import only
from quire.attention import AttentionBatch
from quire.attention.cpu import CpuAttention
from quire.attention.cpu.call_frame import KEYS
from quire.kv import LayerView
from quire.kv.storage.entries import quantize
from quire.spec import AttentionSpec, LatentAttention

NUM_TOKENS = 3 * KEYS + 21
SHARING = 3
CUTS = (
    [0, NUM_TOKENS],
    [*range(NUM_TOKENS - 9), NUM_TOKENS],
    [0, 1, 7, KEYS, KEYS + 1, 2 * KEYS - 3, 3 * KEYS + 5, NUM_TOKENS],
)


@dataclass(frozen=True, kw_only=True)
class World:
    """A sequence's entries [N, K, D], and queries [N, H, D]; another's behind them."""

    spec: AttentionSpec
    k: Tensor
    v: Tensor
    q: Tensor

    @classmethod
    def make(
        cls, kind: str, dtype: str, *, num_tokens: int = NUM_TOKENS, reach: int = 0, dim: int = 16
    ) -> "World":
        generator = torch.Generator().manual_seed(num_tokens + reach)
        spec = make_spec(kind, kv_heads=2, dims=(dim, dim), dtype=dtype, reach=reach)
        q_dtype = getattr(torch, dtype)
        if q_dtype.itemsize == 1:
            q_dtype = torch.bfloat16

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(q_dtype)

        (kv_heads, key_dim), (_, value_dim) = spec.entry_shapes
        latent = isinstance(spec, LatentAttention)
        return cls(
            spec=spec,
            k=random(num_tokens, kv_heads, key_dim),
            v=random(num_tokens, kv_heads, value_dim),
            q=random(num_tokens, kv_heads * SHARING, key_dim + value_dim * latent) * 3,
        )

    def attended(
        self, backend: CpuAttention, cuts: list[int], *, block_size: int, **options: Any
    ) -> Tensor:
        """[N, H, Dv], of chunks one after the other; every other one beside another sequence."""
        view, table = self.laid(block_size)
        found = []
        for number, (start, stop) in enumerate(pairwise(cuts)):
            batch = _batch(table, block_size, [(start, stop)])
            q = self.q[start:stop]
            if number % 2 == 0:  # the other one is this one again, further back
                batch = _batch(table, block_size, [(5, 40), (start, stop), (70, 71)])
                q = torch.cat([self.q[5:40], q, self.q[70:71]])
            out = backend.attend(q, view, batch, spec=self.spec, scale=0.4, **options)
            found.append(out[35:-1] if number % 2 == 0 else out)
        return torch.cat(found)

    def laid(self, block_size: int) -> tuple[LayerView, Tensor]:
        """Entries in blocks that lie in another order, with NaN in their tails."""
        num_tokens = len(self.k)
        num_blocks = -(-num_tokens // block_size)
        table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block_size))
        dtype = getattr(torch, self.spec.dtype)
        entries: dict[str, Any] = {}
        for name, tensor in (("k", self.k), ("v", self.v)):
            padded = tensor.new_full(
                (num_blocks * block_size, *tensor.shape[1:]),
                torch.nan if dtype.is_floating_point else 0.0,
            )
            padded[:num_tokens] = tensor
            blocks = padded.view(num_blocks, block_size, *tensor.shape[1:]).transpose(1, 2)
            laid = torch.empty_like(blocks, memory_format=torch.contiguous_format)
            laid[table] = blocks
            entries[name], scales = quantize(laid, dtype)
            if scales is not None:
                entries[f"{name}_scale"] = scales
        return LayerView(**entries, slots_per_row=block_size), table


def _batch(table: Tensor, block_size: int, chunks: list[tuple[int, int]]) -> AttentionBatch:
    starts, stops = (np.array(each, np.int64) for each in zip(*chunks, strict=True))
    return AttentionBatch(
        query_starts=np.concatenate([[0], np.cumsum(stops - starts)]),
        context_lens=stops,
        tables=table.repeat(len(chunks), 1),
        slots=torch.zeros(int((stops - starts).sum()), dtype=torch.int64),
        block_size=block_size,
    )


def backend_for(isa: str = "native") -> CpuAttention:
    return CpuAttention(isa_or_skip(isa), kernel_folder(), batch_invariant=True)


def check(world: World, isa: str = "native", **options: Any) -> None:
    backend = backend_for(isa)
    want = world.attended(backend, CUTS[0], block_size=16, **options)
    assert not want.isnan().any()
    for cuts, block_size in ((CUTS[1], 16), (CUTS[2], 5), (CUTS[0], 256), (CUTS[1], 64)):
        got = world.attended(backend, cuts, block_size=block_size, **options)
        assert torch.equal(got, want), (cuts[:4], block_size)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", ["full", "latent"])
def test_however_it_is_cut(kind: str, dtype: str) -> None:
    check(World.make(kind, dtype))


@pytest.mark.parametrize("isa", only(ISAS[1:], "pairs", "avx2"))
def test_on_each_instruction_set(isa: str) -> None:
    check(World.make("full", "bfloat16"), isa)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["sliding", "chunked"])
@pytest.mark.parametrize("reach", [5, KEYS, 100])
def test_windows_begin_at_any_token(kind: str, reach: int) -> None:
    check(World.make(kind, "bfloat16", reach=reach))


def test_what_is_gone_is_not_read() -> None:
    """A tile begins before the window does, where its entries may be of another sequence."""
    world = World.make("sliding", "bfloat16", reach=50)
    backend, last = backend_for(), NUM_TOKENS - 1
    batch_of = [(last, last + 1)]
    found = []
    for _ in range(2):
        view, table = world.laid(16)
        batch = _batch(table, 16, batch_of)
        q = world.q[last:]
        found.append(backend.attend(q, view, batch, spec=world.spec, scale=0.4))
        first = world.spec.live_range(last).start
        world.k[:first], world.v[:first] = torch.nan, torch.nan
    assert not found[0].isnan().any()
    assert torch.equal(found[0], found[1])


def test_sinks_and_softcap() -> None:
    check(World.make("full", "float32"), sinks=make_sinks(2 * SHARING), softcap=5.0)


def test_a_long_sequence_has_parts_at_the_same_tokens() -> None:
    """It is long enough for parts: a last token alone, and all of them beside each other."""
    world = World.make("full", "float32", num_tokens=2**14 + 40)
    backend, last = backend_for(), len(world.k)
    view, table = world.laid(512)

    def rows(*chunks: tuple[int, int]) -> Tensor:
        q = torch.cat([world.q[start:stop] for start, stop in chunks])
        batch = _batch(table, 512, list(chunks))
        return backend.attend(q, view, batch, spec=world.spec, scale=0.4)

    chunk = rows((2**14 - 30, last))
    assert torch.equal(rows((last - 1, last)), chunk[-1:])
    assert torch.equal(rows((2**14 - 1, 2**14)), chunk[29:30])
    assert torch.equal(rows((2**14, 2**14 + 1), (3, 50)), torch.cat([chunk[30:31], rows((3, 50))]))


def test_threads_do_not_matter() -> None:
    world = World.make("full", "bfloat16")
    backend, before = backend_for(), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 7):
            torch.set_num_threads(number)
            found.append(world.attended(backend, CUTS[2], block_size=16))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_usual_step_is_not_so() -> None:
    """Else the tests above would say nothing: a decode adds up in another order than a chunk."""
    world = World.make("full", "bfloat16")
    usual = CpuAttention(isa_or_skip("native"), kernel_folder())
    assert not usual.batch_invariant
    found = [world.attended(usual, cuts, block_size=16) for cuts in CUTS[:2]]
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.05)
    assert not torch.equal(found[0], found[1])
