"""The writer leaves what torch leaves, in every bit of the region, NaN's own bits aside."""

import pytest
import torch

from attention.test_writers import SOURCES, make_accounting, make_spec, region, special
from attention.triton.interpreter import backend
from quire.kv import STRATEGIES, build_storage
from quire.memory import HostMemory


def both(strategy: str, kept: str, source: str, *, latent: bool = False) -> None:
    spec = make_spec(kept, latent=latent)
    (heads, key), (_, value) = spec.entry_shapes
    dtype = getattr(torch, source)
    k = special(dtype, key).repeat(1, heads, 1)
    v = special(dtype, value).flip(0).repeat(1, heads, 1)
    k[:, -1] = k[:, -1].flip(0)
    accounting = make_accounting(strategy, spec, len(k))
    changes = accounting.drain()
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(3))
    slots = torch.from_numpy(accounting.slots(0, 1, 0, len(k)))[order]
    found = []
    for make_writer in (None, backend().make_writer):
        storage = build_storage(strategy, accounting, HostMemory(), make_writer)
        storage.apply(changes)
        if strategy == "paged":
            region(storage).fill_(0x55)  # what is not written stays
        storage.write(0, slots, k, v)
        found.append(storage)
    assert torch.equal(*map(region, found))
    for storage in found:
        storage.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kept", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_writer_leaves_torch_s_bits(source: str, kept: str) -> None:
    both("paged", kept, source)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "paged"])
def test_in_every_strategy(strategy: str) -> None:
    both(strategy, "int8", "bfloat16")


@pytest.mark.parametrize("kept", ["int8", "bfloat16"])
def test_latents(kept: str) -> None:
    both("paged", kept, "float32", latent=True)


@pytest.mark.parametrize("kept", ["int8", "float8_e4m3fn", "bfloat16"])
def test_an_entry_with_a_nan_reads_back_as_torch_s_does(kept: str) -> None:
    spec = make_spec(kept)
    accounting = make_accounting("paged", spec, 8)
    changes = accounting.drain()
    slots = torch.from_numpy(accounting.slots(0, 1, 0, 8))
    (heads, key), (_, value) = spec.entry_shapes
    k, v = torch.randn(8, heads, key), torch.randn(8, heads, value)
    k[2, 0, 5], v[3, 1, 0] = torch.nan, -torch.nan
    found = []
    for make_writer in (None, backend().make_writer):
        storage = build_storage("paged", accounting, HostMemory(), make_writer)
        storage.apply(changes)
        storage.write(0, slots, k, v)
        found.append(storage.gather(0, slots))
        storage.close()
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    spec = make_spec("bfloat16")
    accounting = make_accounting("paged", spec, 8)
    storage = build_storage("paged", accounting, HostMemory(), backend().make_writer)
    storage.apply(accounting.drain())
    (heads, key), (_, value) = spec.entry_shapes
    slots, k, v = torch.arange(2), torch.ones(2, heads, key), torch.ones(2, heads, value)
    for bad, why in (
        ((slots[:1], k, v), "1 slots for keys"),
        ((slots, k[:, :1], v), "this layer keeps"),
        ((slots.int(), k, v), "slots are torch.int32"),
        ((slots, k, v.half()), r"values torch\.float16"),
        ((slots.to("meta"), k, v), "slots are on meta"),
    ):
        with pytest.raises(ValueError, match=why):
            storage.write(0, *bad)
    assert not region(storage).any()
    storage.write(0, slots[:0], k[:0], v[:0])  # a step without sequences
