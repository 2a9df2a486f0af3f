"""Layers that lie together: what tokens then take on a GPU's large pages, by hand and for all."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.geometry import GIB, MIB, QWEN3_4B, config
from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from quire.kv import Fits, build_accounting, build_storage
from quire.kv.layout import Stacking, apart, stacking, stacking_of_ranges
from quire.memory.cuda import CudaMemory
from quire.spec import FullAttention, Group, LatentAttention, RecurrentState, StateTensor

PAGE = 2 * MIB


def layers(count: int, *, kv_heads: int = 8, dim: int = 128) -> Group:
    spec = FullAttention(num_kv_heads=kv_heads, head_dim=dim, dtype="bfloat16")
    return Group(spec=spec, layers=tuple(range(count)))


def latents(count: int) -> Group:
    spec = LatentAttention(latent_dim=512, rope_dim=64, dtype="bfloat16")  # 1,152 bytes
    return Group(spec=spec, layers=tuple(range(count)))


@pytest.mark.parametrize(
    ("group", "num_layers", "num_stacks", "token_bytes", "page_tokens"),
    [
        (layers(36), 4, 9, 16_384, 128),  # Qwen3-4B
        (layers(30), 4, 8, 16_384, 128),  # two layers' room is empty: 7 %
        (layers(22), 4, 6, 16_384, 128),  # Gemma 3's sliding layers, as they might be
        (layers(5), 1, 5, 4096, 512),  # an eighth of it would not do for 4, 3 or 2
        (layers(2), 2, 1, 8192, 256),
        (layers(32, kv_heads=1), 4, 8, 2048, 1024),
        (latents(61), 7, 9, 8192, 256),  # DeepSeek-V3: 7 × 1,152 is almost 8 KiB
        (layers(36, dim=80), 3, 12, 8192, 256),  # 3 × 2,560 is 7,680
    ],
)
def test_about_four_layers_fill_pages_with_few_tokens(
    group: Group, num_layers: int, num_stacks: int, token_bytes: int, page_tokens: int
) -> None:
    found = stacking(group, PAGE, "auto")
    assert found == Stacking(num_layers=num_layers, num_stacks=num_stacks, token_bytes=token_bytes)
    assert found.page_tokens(PAGE) == page_tokens


@given(
    group=st.builds(
        layers,
        st.integers(1, 80),
        kv_heads=st.integers(1, 16),
        dim=st.sampled_from([16, 64, 80, 96, 128, 192, 256]),
    ),
    together=st.sampled_from(["auto", None, 1, 3, 4, 6, 100]),
    page=st.sampled_from([4096, 2**16, PAGE, 3 * PAGE]),
)
@settings(deadline=None)
def test_every_layer_lies_once_and_within_its_token(group: Group, together: Any, page: int) -> None:
    found = stacking(group, page, together)
    stacks = found.stacks(group)
    assert sum(stacks, ()) == group.layers
    assert len(stacks) == found.num_stacks
    per_layer = group.bytes_per_token // group.num_layers
    assert all(len(stack) * per_layer <= found.token_bytes for stack in stacks)
    assert found.slot_bytes >= group.bytes_per_token
    tokens = found.page_tokens(page)
    assert tokens * found.token_bytes % page == 0
    if together == "auto":  # little is left empty
        assert 8 * (found.slot_bytes - group.bytes_per_token) <= group.bytes_per_token
    parts = apart([group], page, together)
    if together is None:
        assert parts == [(Group(spec=group.spec, layers=(n,)), None) for n in group.layers]
    else:
        assert [part.layers for part, _ in parts] == stacks
        assert sum(own.slot_bytes for _, own in parts if own) == found.slot_bytes


def test_states_and_ranges_head_by_head_are_no_stacks() -> None:
    state = RecurrentState(states=(StateTensor(name="s", shape=(3,), dtype="float32"),))
    assert stacking_of_ranges(Group(spec=state, layers=(0, 1)), PAGE, 4) is None
    assert stacking_of_ranges(layers(4), PAGE, None) is None


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "contiguous": ("contiguous", {"reserve": "request"}),
    "growing": ("growing", {"growth_tokens": 128}),
    "virtual": ("virtual", {}),
    "virtual-shared": ("virtual", {"shares_pages": True}),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("together", ["auto", 4, 36])
def test_a_hundred_tokens_of_qwen3_4b_take_18_mib_of_a_gpu(name: str, together: Any) -> None:
    """14.06 MiB of entries; by the accounting, by the storage, and by the driver."""
    strategy, options = STRATEGIES[name]
    driver = EmulatedDriver(granularity=PAGE, total_bytes=GIB)
    memory = CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=0)
    sizes = config(
        max_model_len=40_960,
        max_num_seqs=4,
        capacity_bytes=6 * GIB,
        page_bytes=PAGE,
        layers_per_page=together,
        **options,
    )
    accounting = build_accounting(strategy, QWEN3_4B, sizes)
    storage = build_storage(strategy, accounting, memory)
    accounting.add(0, max_tokens=128)
    assert isinstance(accounting.try_extend(0, 100), Fits)
    storage.apply(accounting.drain())
    assert accounting.usage().committed_bytes == 18 * MIB
    assert storage.memory.committed_bytes == driver.physical_bytes == 18 * MIB
    # What is written is found again, and lies in those pages: elsewhere it would fault.
    slots = torch.from_numpy(accounting.slots(0, 0, 0, 100))
    for layer in (0, 3, 4, 35):
        k, v = torch.randn(2, 100, 8, 128).bfloat16()
        index = next(n for n, group in enumerate(accounting.groups) if layer in group.layers)
        own = torch.from_numpy(accounting.slots(index, 0, 0, 100))
        assert torch.equal(own - own[0], slots - slots[0])
        storage.write(layer, own, k, v)
        keys, values = storage.gather(layer, own)
        assert torch.equal(keys.transpose(0, 1), k)
        assert torch.equal(values.transpose(0, 1), v)
    accounting.free(0, forget=True)
    accounting.resize(0, for_now=True)
    storage.apply(accounting.drain())
    memory.poll(wait=True)
    assert driver.physical_bytes == 0
    storage.close()
