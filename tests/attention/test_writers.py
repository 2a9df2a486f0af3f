"""A compiled writer leaves what torch leaves, in every bit of the region, NaN's own bits aside."""

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.machines import cpu_backend, isa_or_skip
from quire.attention.cpu import CpuAttention
from quire.kv import STRATEGIES, Accounting, CacheConfig, Fits, Storage, build_storage
from quire.memory import HostMemory
from quire.spec import AttentionSpec, FullAttention, Group, LatentAttention

SOURCES = ("float32", "float16", "bfloat16")
KEPT = (*SOURCES, "int8", "float8_e4m3fn")
ISAS = ("native", "avx2", "sse")  # a writer has no products, so no more than these differ
DIMS = (40, 23)  # of key and value: two vectors and a half, one and a bit


@cache
def backend(isa: str) -> CpuAttention:
    isa_or_skip(isa)
    return cpu_backend(isa)


def make_spec(kept: str, *, latent: bool = False) -> AttentionSpec:
    if latent:
        return LatentAttention(latent_dim=DIMS[0], rope_dim=DIMS[1] + 1, dtype=kept)
    # int8's scales behind a block want it a multiple of four bytes: see granule_blocks.
    value = DIMS[1] + (kept == "int8")
    return FullAttention(num_kv_heads=2, head_dim=DIMS[0], value_head_dim=value, dtype=kept)


def make_accounting(strategy: str, spec: AttentionSpec, num_tokens: int) -> Accounting:
    config = CacheConfig(
        max_model_len=num_tokens,
        max_num_seqs=3,
        capacity_bytes=2**26
        if strategy != "paged"
        else 2**21 + 4 * num_tokens * spec.bytes_per_token,
        block_size=8,
        growth_tokens=8,
        page_bytes=HostMemory().page_bytes,
    )
    accounting = STRATEGIES[strategy].make_accounting((Group(spec=spec, layers=(0,)),), config)
    accounting.add(0)
    accounting.add(1)
    for stop in range(num_tokens // 4, num_tokens + 1, num_tokens // 4):  # in turns
        for seq_id in (0, 1):
            assert isinstance(accounting.try_extend(seq_id, stop), Fits)
    return accounting


def region(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage.view(0).k.untyped_storage())


def both(
    isa: str, strategy: str, spec: AttentionSpec, k: Tensor, v: Tensor
) -> tuple[Storage, Storage, Tensor]:
    """The same entries in shuffled slots, written by torch and by a kernel."""
    num_tokens = len(k)
    accounting = make_accounting(strategy, spec, max(8, -(-num_tokens // 8) * 8))
    changes = accounting.drain()
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(3))
    slots = torch.from_numpy(accounting.slots(0, 1, 0, num_tokens))[order]
    storages = []
    for make_writer in (None, backend(isa).make_writer):
        storage = build_storage(strategy, accounting, HostMemory(), make_writer)
        storage.apply(changes)
        region(storage).fill_(0x55)  # what is not written stays
        storage.write(0, slots, k, v)
        storages.append(storage)
    return *storages, slots


def special(dtype: torch.dtype, width: int) -> Tensor:
    """[T, 1, width]: entries at the edges of the formats; none of NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 1, width, generator=generator)
    x[1] = 0.0
    x[2] = -0.0
    x[3] *= 1e-39  # 127 / amax overflows
    x[4] *= 2.0**-20  # small in float16
    x[5, 0, 3] = torch.inf
    x[6, 0, width - 1] = -torch.inf
    x[7] *= 1000  # beyond float8
    x[8] *= 1e30
    x[9] = torch.arange(width) / 2 - 3  # ties, once the largest is 127
    x[9, 0, 0] = 127.0
    x[10] = torch.arange(width) / 16 + 16.0  # ties of float8
    x[11] = torch.tensor([1.0, -1.0]).repeat(width)[:width]
    x[12] = 0.0
    x[12, 0, width // 2] = 1e-45
    x[13] = 448.0 + torch.arange(width)
    x[14] = 2.0 ** -(torch.arange(width) % 24).float()
    x[15] = x[14] * 1.5
    return x.to(dtype)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("isa", ISAS)
def test_a_writer_leaves_torch_s_bits(isa: str, kept: str) -> None:
    spec = make_spec(kept)
    (heads, key_dim), (_, value_dim) = spec.entry_shapes
    for number, source in enumerate(SOURCES):
        dtype = getattr(torch, source)
        k = special(dtype, key_dim).repeat(1, heads, 1)
        v = special(dtype, value_dim).flip(0).repeat(1, heads, 1)
        k[:, 1] = k[:, 1].flip(0)
        strategy = ("paged", "virtual", "growing")[number]
        by_torch, by_kernel, _ = both(isa, strategy, spec, k, v)
        assert torch.equal(region(by_torch), region(by_kernel)), source


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", ["int8", "bfloat16"])
def test_in_every_strategy_and_for_latents(strategy: str, kept: str) -> None:
    for latent in (False, True):
        spec = make_spec(kept, latent=latent)
        (heads, key_dim), (_, value_dim) = spec.entry_shapes
        k = special(torch.float32, key_dim).repeat(1, heads, 1)
        v = special(torch.float32, value_dim).repeat(1, heads, 1)
        by_torch, by_kernel, _ = both("native", strategy, spec, k, v)
        assert torch.equal(region(by_torch), region(by_kernel)), latent


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("isa", ISAS)
def test_an_entry_with_a_nan_reads_back_as_torch_s_does(isa: str, kept: str) -> None:
    spec = make_spec(kept)
    (heads, key_dim), (_, value_dim) = spec.entry_shapes
    for source in SOURCES[::2]:
        k, v = (
            torch.randn(4, heads, width).to(getattr(torch, source))
            for width in (key_dim, value_dim)
        )
        k[1, 0, 5] = torch.nan
        k[2] = torch.nan
        v[3, 1, value_dim - 1] = -torch.nan
        v[0, 0, 2], v[0, 0, 4] = torch.nan, torch.inf
        by_torch, by_kernel, slots = both(isa, "paged", spec, k, v)
        for want, got in zip(by_torch.gather(0, slots), by_kernel.gather(0, slots), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        if kept == "int8":
            for part in ("k", "v"):
                want, got = (getattr(s.view(0), part) for s in (by_torch, by_kernel))
                assert torch.equal(got, want)


@pytest.mark.parametrize("kept", ["bfloat16", "float8_e4m3fn"])
def test_entries_may_lie_anywhere_and_be_many(
    kept: str, use_threads: Callable[[int], None]
) -> None:
    """Cut out of a wider tensor, turned, and enough of them for several threads."""
    spec = make_spec(kept)
    (heads, key_dim), (_, value_dim) = spec.entry_shapes
    generator = torch.Generator().manual_seed(0)
    use_threads(2)
    for num_tokens in (0, 1, 63, 65, 3000):
        wide = torch.randn(num_tokens, heads, 3 * key_dim, generator=generator).bfloat16()
        k = wide[..., key_dim : 2 * key_dim]
        v = wide[..., :value_dim].permute(2, 0, 1).contiguous().permute(1, 2, 0)
        by_torch, by_kernel, _ = both("native", "paged", spec, k, v)
        assert torch.equal(region(by_torch), region(by_kernel)), num_tokens


def test_slots_may_be_every_other_one_of_a_tensor() -> None:
    spec = make_spec("float32")
    accounting = make_accounting("paged", spec, 64)
    storage = build_storage("paged", accounting, HostMemory(), backend("native").make_writer)
    storage.apply(accounting.drain())
    slots = torch.from_numpy(np.repeat(accounting.slots(0, 0, 0, 20), 2))[::2]
    (heads, key_dim), (_, value_dim) = spec.entry_shapes
    k, v = torch.randn(20, heads, key_dim), torch.randn(20, heads, value_dim)
    storage.write(0, slots, k, v)
    got_k, got_v = storage.gather(0, slots)
    assert torch.equal(got_k.transpose(0, 1), k)
    assert torch.equal(got_v.transpose(0, 1), v)


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    spec = make_spec("int8")
    (heads, key_dim), (_, value_dim) = spec.entry_shapes
    accounting = make_accounting("paged", spec, 64)
    storage = build_storage("paged", accounting, HostMemory(), backend("native").make_writer)
    storage.apply(accounting.drain())
    region(storage).fill_(0x55)
    slots = torch.from_numpy(accounting.slots(0, 0, 0, 4))
    k, v = torch.randn(4, heads, key_dim), torch.randn(4, heads, value_dim)
    for broken in (
        (slots[:3], k, v),
        (slots.int(), k, v),
        (slots, k[..., :-1], v),
        (slots, k, v[:, :1]),
        (slots, k, v.half()),
        (slots, k.double(), v.double()),
    ):
        with pytest.raises(ValueError):
            storage.write(0, *broken)
    assert (region(storage) == 0x55).all()


def test_every_pair_of_dtypes_is_here() -> None:
    from quire.kernels.compile import KINDS

    assert {getattr(torch, name) for name, _ in product(KEPT, SOURCES)} == set(KINDS)
