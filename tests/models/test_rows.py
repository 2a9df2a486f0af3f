"""Rows of a batch: all change together or none does, and nothing is copied that need not be."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import OutOfKVMemory, RequestTooLong
from quire.kv import STRATEGIES, CacheConfig
from quire.memory import CheckedMemory, HostMemory
from quire.models.drop_in.rows import BatchRows, CacheFamily
from quire.spec import FullAttention, Layer, ModelSpec, SlidingWindow

# 512 bytes a key: eight tokens a page. The second layer reads the last five tokens.
FULL = FullAttention(num_kv_heads=1, head_dim=128, dtype="float32")
WINDOW = SlidingWindow(num_kv_heads=1, head_dim=128, dtype="float32", window=6)
SPEC = ModelSpec(
    model_type="tiny",
    layers=(Layer(specs=(FULL,)), Layer(specs=(WINDOW,))),
    max_model_len=64,
    dtype="float32",
)
PAGE_TOKENS = 8
BLOCK_BYTES = PAGE_TOKENS * SPEC.bytes_per_token
CONFIG = CacheConfig(
    max_model_len=64,
    max_num_seqs=8,
    capacity_bytes=100 * BLOCK_BYTES,
    block_size=4,
    growth_tokens=8,
    page_bytes=HostMemory().page_bytes,
)
SHARED = "virtual-shared"
MakeRows = Callable[..., BatchRows]


@pytest.fixture(params=[*STRATEGIES, SHARED])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(strategy: str, num_rows: int, **changed: Any) -> BatchRows:
    config = replace(CONFIG, shares_pages=strategy == SHARED, **changed)
    name = "virtual" if strategy == SHARED else strategy
    return BatchRows(
        CacheFamily(name, SPEC, config, CheckedMemory(HostMemory()), num_rows), num_rows
    )


def entries(rows: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """[rows, 1, n, 128]: row and token can be read from each value."""
    values = 1000 * torch.arange(rows)[:, None] + torch.arange(start, stop) + 1.0
    k = values[:, None, :, None].expand(-1, 1, -1, 128)
    return k, -k


def write(rows: BatchRows, start: int, stop: int) -> None:
    for layer in (0, 1):
        rows.write(layer, start, *entries(len(rows), start, stop))


def expect(rows: BatchRows, start: int, stop: int, row_of: list[int] | None = None) -> None:
    """What the next token reads; ``row_of``: the rows that the rows were once."""
    every = list(range(len(rows))) if row_of is None else row_of
    for layer, first in ((0, start), (1, max(start, stop - 5))):
        wanted = entries(1 + max(every), first, stop)
        for want, got in zip(wanted, rows.read(layer, first, stop), strict=True):
            assert torch.equal(got, want[every])


def test_a_refused_extension_loses_nothing(strategy: str) -> None:
    """The first row had its room already: its window must not have moved on."""
    limit = {"contiguous": 16, "growing": 9, "paged": 8, "virtual": 8, SHARED: 8}[strategy]
    rows = make(strategy, 2, max_model_len=64, capacity_bytes=limit * BLOCK_BYTES)
    rows.extend(7)
    write(rows, 0, 7)
    usage = rows.usage()
    if strategy != "contiguous":  # it has all the room that it may ever need
        with pytest.raises(OutOfKVMemory, match="2 rows of 40 tokens"):
            rows.extend(40)
        assert rows.usage().num_tokens == usage.num_tokens
        assert rows.usage().used_bytes == usage.used_bytes
    with pytest.raises(RequestTooLong, match=r"at most .* raise"):
        rows.extend(65)
    assert rows.num_tokens == 7
    expect(rows, 0, 7)
    rows.extend(9)
    write(rows, 7, 9)
    expect(rows, 0, 9)
    rows.close()
    assert rows.memory.committed_bytes == 0


def test_a_refused_copy_leaves_no_half(strategy: str) -> None:
    rows = make(strategy, 2, capacity_bytes=17 * BLOCK_BYTES, growth_tokens=32)
    rows.extend(33)
    write(rows, 0, 33)
    before = rows.usage()
    wanted = [0, 1, 0, 1, 0, 1]
    if strategy in ("paged", SHARED):
        rows.select(wanted)
        assert rows.usage().committed_bytes == before.committed_bytes
    else:
        with pytest.raises(OutOfKVMemory):
            rows.select(wanted)
        assert rows.usage() == before
    assert rows.memory.committed_bytes == before.committed_bytes
    expect(rows, 0, 33, wanted if strategy in ("paged", SHARED) else [0, 1])


def test_ranges_are_read_where_they_lie(strategy: str) -> None:
    rows = make(strategy, 3)
    rows.extend(10)
    write(rows, 0, 10)
    k, v = rows.read(0, 2, 10)
    k[...] = 5.0
    v[...] = 6.0
    seen = rows.read(0, 2, 10)
    if strategy == "paged":
        expect(rows, 0, 10)
    else:
        assert seen[0].eq(5).all()
        assert seen[1].eq(6).all()


def test_reordered_rows_read_the_rows_that_they_continue(strategy: str) -> None:
    rows = make(strategy, 3)
    rows.extend(5)
    write(rows, 0, 5)
    committed_bytes = rows.memory.committed_bytes
    rows.reorder(torch.tensor([2, 2, 0]))
    assert rows.memory.committed_bytes <= committed_bytes  # shared blocks free others
    expect(rows, 0, 5, [2, 2, 0])
    rows.extend(7)
    write(rows, 5, 7)
    rows.reorder(torch.tensor([1, 0, 1]))
    expect(rows, 0, 5, [2, 2, 2])
    expect(rows, 5, 7, [1, 0, 1])
    rows.trim(6)
    expect(rows, 5, 6, [1, 0, 1])
    rows.select([2, 0])
    expect(rows, 0, 5, [2, 2])
    expect(rows, 5, 6, [1, 1])
    rows.extend(8)
    write(rows, 6, 8)
    expect(rows, 6, 8, [0, 1])


def test_clearing_gives_every_page_back(strategy: str) -> None:
    rows = make(strategy, 2)
    rows.extend(20)
    rows.reorder(torch.tensor([1, 1]))
    rows.clear(5)
    assert len(rows) == 5
    assert rows.num_tokens == rows.memory.committed_bytes == rows.usage().committed_bytes == 0
    rows.extend(3)
    write(rows, 0, 3)
    expect(rows, 0, 3)


def test_rows_that_grow_at_once_keep_what_they_outgrow_at_once() -> None:
    """A batch is one step: with keep_old all old buffers live beside all new ones."""
    for keep_old, blocks in ((True, 4 * (1 + 2)), (False, 4 * 2)):
        rows = make("growing", 4, keep_old=keep_old)
        rows.extend(8)
        rows.extend(9)
        peak = rows.memory.peak_committed_bytes
        # Freed at once, one layer's old buffer is the most that is kept beside the new ones.
        assert peak == blocks * BLOCK_BYTES + (0 if keep_old else BLOCK_BYTES // 2)
        rows.extend(10)
        assert rows.memory.committed_bytes == 4 * 2 * BLOCK_BYTES
