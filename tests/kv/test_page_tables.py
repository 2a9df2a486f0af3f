"""Page tables in closed form, beside what the system says of them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kv import STRATEGIES, CacheConfig, Fits, build_accounting, build_storage
from quire.kv.page_tables import page_table_bytes, tables_of_one_piece
from quire.memory import HostMemory
from quire.memory.machine.probe import spare_mappings
from quire.spec import FullAttention, Layer, ModelSpec, SlidingWindow

KEPT = FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16")
TABLE = 4096
LAYERS, LONGEST = 12, 16_384
SPEC = ModelSpec(
    model_type="tiny",
    layers=(Layer(specs=(KEPT,)),) * LAYERS,
    max_model_len=LONGEST,
    dtype="bfloat16",
)
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "virtual-shared": ("virtual", {"shares_pages": True}),
    "virtual-stacked": ("virtual", {"layers_per_page": 4}),
    **{name: (name, {}) for name in STRATEGIES},
}


def config(**changed: Any) -> CacheConfig:
    numbers = dict(
        max_model_len=LONGEST, max_num_seqs=4, capacity_bytes=4 * LONGEST * SPEC.bytes_per_token
    )
    return CacheConfig(**{**numbers, "max_mappings": spare_mappings(), **changed})


def system_bytes() -> int:
    found = re.search(r"VmPTE:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        pytest.skip("this system does not say what its page tables take")
    return int(found[1]) * 1024


@pytest.mark.parametrize("lengths", [(100,), (1_500, 40)], ids=["short", "two"])
@pytest.mark.parametrize("form", FORMS)
def test_the_system_says_the_same(form: str, lengths: tuple[int, ...]) -> None:
    strategy, changed = FORMS[form]
    if form == "contiguous":
        changed = {**changed, "max_model_len": 2_048}
    memory = HostMemory()
    if "shares_pages" in changed and memory.cannot_share is not None:
        pytest.skip(memory.cannot_share)
    accounting = build_accounting(strategy, SPEC, config(page_bytes=memory.page_bytes, **changed))
    storage = build_storage(strategy, accounting, memory)
    before = system_bytes()
    for seq_id, length in enumerate(lengths):
        accounting.add(seq_id)
        assert isinstance(accounting.try_extend(seq_id, length), Fits)
        storage.apply(accounting.drain())
        slots = torch.from_numpy(accounting.slots(0, seq_id, 0, length))
        entries = torch.ones(length, 8, 128, dtype=torch.bfloat16)
        for layer in range(LAYERS):
            storage.write(layer, slots, entries, entries)
    taken, said = system_bytes() - before, page_table_bytes(accounting, memory.page_bytes)
    pages = accounting.usage().committed_bytes // memory.page_bytes
    storage.close()
    assert said >= 8 * pages
    # The system puts regions elsewhere, and this process goes on besides.
    assert abs(taken - said) <= 0.1 * said + 32 * TABLE


def test_a_short_sequence_has_a_table_for_each_head() -> None:
    """Keys and values of each head lie as far apart as the longest sequence may become."""
    accounting = build_accounting("virtual", SPEC, config())
    assert page_table_bytes(accounting, 4096) == 0
    accounting.add(0)
    accounting.try_extend(0, 1)
    heads = LAYERS * 8 * 2
    # Twelve regions of 256 MiB are 3 GiB: three tables of 1 GiB each, and one of 512 GiB.
    region = 4 * LONGEST * KEPT.bytes_per_token
    assert region == 256 << 20
    assert page_table_bytes(accounting, 4096) == TABLE * (heads + 3 + 1)


def test_pages_side_by_side_cost_eight_bytes() -> None:
    accounting = build_accounting("paged", SPEC, config(block_size=16))
    accounting.add(0)
    accounting.try_extend(0, 8_192)
    nbytes = accounting.usage().committed_bytes
    leaves = LAYERS * (nbytes // LAYERS >> 21)
    assert leaves * TABLE == nbytes // 4096 * 8 == LAYERS * tables_of_one_piece(nbytes // LAYERS)
    assert page_table_bytes(accounting, 4096) == TABLE * (leaves + 3 + 1)  # 12 regions of 256 MiB


def test_forks_have_a_window_each() -> None:
    """One copy of the pages, and a table entry for each time they are seen."""
    accounting = build_accounting("virtual", SPEC, config(shares_pages=True))
    accounting.add(0)
    accounting.try_extend(0, 4_096)
    accounting.drain()
    alone = page_table_bytes(accounting, 4096)
    for seq_id in (1, 2, 3):
        accounting.fork(0, seq_id)
    accounting.drain()
    committed = accounting.usage().committed_bytes
    assert 4 * 8 * committed // 4096 <= page_table_bytes(accounting, 4096) <= 4 * alone


def test_what_a_window_gives_back_has_no_table() -> None:
    kept = SlidingWindow(num_kv_heads=8, head_dim=128, dtype="bfloat16", window=64)
    spec = replace(SPEC, layers=(Layer(specs=(kept,)),))
    accounting = build_accounting("virtual", spec, config())
    accounting.add(0)
    for num_tokens in range(64, LONGEST, 64):
        accounting.try_extend(0, num_tokens)
        accounting.drain()
    assert page_table_bytes(accounting, 4096) <= TABLE * (2 * 8 * 2 + 2)


def test_a_device_has_none_of_the_kernels() -> None:
    accounting = build_accounting("paged", SPEC, config(page_bytes=2**21))
    accounting.add(0)
    accounting.try_extend(0, 100)
    assert page_table_bytes(accounting, 2**21) == 0
