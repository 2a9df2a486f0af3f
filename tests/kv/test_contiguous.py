"""Reserving the maximum: waste inside a range and between ranges, and the pass that cures it."""

import pytest

from kv.geometry import GIB, QWEN3_4B, SMALL, SMALL_PAGE_BYTES, config
from quire.kv import Commit, Copy, Fits, NotNow, Release
from quire.kv.contiguous import ContiguousAccounting

TOKEN_BYTES = SMALL.bytes_per_token
ONE_TOKEN_PAGE = TOKEN_BYTES // 2  # its key fills one page, its value another


def arena(
    num_slots: int, *, page_bytes: int = ONE_TOKEN_PAGE, **changed: bool
) -> ContiguousAccounting:
    """Ranges as long as the request, in an arena of that many slots of 64 bytes."""
    capacity_bytes = num_slots * TOKEN_BYTES
    return ContiguousAccounting(
        SMALL.groups,
        config(
            capacity_bytes=capacity_bytes,
            reserve="request",
            page_bytes=page_bytes,
            **changed,
        ),
    )


def put(cache: ContiguousAccounting, seq_id: int, num_tokens: int, max_tokens: int) -> None:
    cache.add(seq_id, max_tokens=max_tokens)
    assert isinstance(cache.try_extend(seq_id, num_tokens), Fits)


def test_a_hundred_tokens_take_the_whole_context() -> None:
    """Seed 0: Qwen3-4B takes 5.625 GiB for 100 tokens, of which 14.06 MiB hold one."""
    cache = ContiguousAccounting(QWEN3_4B.groups, config(max_model_len=40_960))
    cache.add(0)
    cache.try_extend(0, 100)
    usage = cache.usage()
    assert usage.committed_bytes == 5.625 * GIB
    assert usage.used_bytes / 2**20 == pytest.approx(14.06, abs=0.005)
    cache.drain()
    cache.try_extend(0, 40_960)
    assert cache.drain() == []
    assert cache.usage().committed_bytes == 5.625 * GIB


def test_a_short_answer_in_a_long_reservation() -> None:
    """Seed 3: 8k slots are reserved, 200 tokens come, 7,800 and more stay empty to the end."""
    cache = ContiguousAccounting(QWEN3_4B.groups, config(max_model_len=8192))
    cache.add(0)
    cache.try_extend(0, 200)
    assert cache.usage().wasted_bytes == (8192 - 200) * QWEN3_4B.bytes_per_token


def test_as_many_sequences_as_ranges() -> None:
    """Seeds 3 and 4: what can run at once is the capacity over the longest, not over the actual."""
    capacity_bytes = 10 * 4096 * QWEN3_4B.bytes_per_token
    cache = ContiguousAccounting(QWEN3_4B.groups, config(capacity_bytes=capacity_bytes))
    for seq_id in range(10):
        cache.add(seq_id)
        assert isinstance(cache.try_extend(seq_id, 1), Fits)
    cache.add(10)
    verdict = cache.try_extend(10, 1)
    assert isinstance(verdict, NotNow)
    assert verdict.free_bytes == 0
    assert verdict.holders == tuple(range(10))
    cache.free(4)
    assert isinstance(cache.try_extend(10, 1), Fits)


def test_external_fragmentation_arises_and_is_measured() -> None:
    """Seeds 1 and 4: half of the arena is free, and no place for a sequence of a fifth of it."""
    cache = arena(100)
    for seq_id in range(10):
        put(cache, seq_id, 6, 10)
    for seq_id in range(0, 10, 2):
        cache.free(seq_id)
    assert cache.fragmentation == pytest.approx(0.8)
    cache.add(10, max_tokens=20)
    verdict = cache.try_extend(10, 1)
    assert isinstance(verdict, NotNow)
    assert verdict.need_bytes == 20 * TOKEN_BYTES
    assert verdict.free_bytes == 10 * TOKEN_BYTES  # the largest hole
    assert cache.usage().committed_bytes == 50 * TOKEN_BYTES


def test_the_pass_that_cures_it() -> None:
    """Seed 1: llama.cpp's defrag. It copies the tokens held, and not what is only reserved."""
    cache = arena(100, defrag=True)
    for seq_id in range(10):
        put(cache, seq_id, 6, 10)
    for seq_id in range(0, 10, 2):
        cache.free(seq_id)
    cache.drain()
    put(cache, 10, 1, 20)
    changes = cache.drain()
    copies = [change for change in changes if isinstance(change, Copy)]
    assert sum(copy.num_slots for copy in copies) == 5 * 6
    assert [int(cache.table(0, seq_id)[0]) for seq_id in (1, 3, 5, 7, 9, 10)] == [
        *range(0, 50, 10),
        50,
    ]
    assert cache.fragmentation == 0
    moved = sum(change.stop - change.start for change in changes if isinstance(change, Release))
    assert moved == 50
    cache.check()


def test_a_short_slide_recommits_only_what_it_passes_over() -> None:
    cache = arena(100)
    put(cache, 0, 4, 4)
    put(cache, 1, 30, 30)
    cache.free(0)
    cache.drain()
    assert cache.defrag() == 30
    assert cache.drain() == [Commit(0, 0, 4), Copy(0, 4, 0, 30), Release(0, 30, 34)]


def test_ranges_are_whole_pages() -> None:
    cache = arena(100, page_bytes=SMALL_PAGE_BYTES)  # four keys a page
    put(cache, 0, 1, 5)
    assert cache.usage().committed_bytes == 8 * TOKEN_BYTES


def test_a_request_may_not_pass_what_it_announced() -> None:
    cache = arena(100)
    put(cache, 0, 5, 5)
    verdict = cache.try_extend(0, 6)
    assert not isinstance(verdict, Fits | NotNow)
    assert verdict.option == "max_tokens"
    assert verdict.fitting_tokens == 5


def test_a_range_that_is_freed_gives_its_pages_back() -> None:
    cache = arena(64)
    put(cache, 0, 5, 16)
    taken = cache.drain()
    assert [(type(change), change.stop - change.start) for change in taken] == [(Commit, 16)]
    cache.free(0)
    assert cache.drain() == [Release(each.group, each.start, each.stop) for each in taken]


def test_a_fork_is_a_copy() -> None:
    cache = arena(100)
    put(cache, 0, 7, 10)
    cache.drain()
    assert isinstance(cache.fork(0, 1), Fits)
    assert cache.drain() == [Commit(0, 10, 20), Copy(0, 0, 10, 7)]
    assert not cache.shares_blocks
