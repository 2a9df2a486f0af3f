"""Ranges of addresses: they never move, pages follow the tokens, and go behind a window."""

import pytest

from kv.geometry import QWEN3_4B, config, spec_of
from quire.kv import Commit, Copy, Extension, Fits, NotNow, Release
from quire.kv.virtual import VirtualAccounting
from quire.spec import ChunkedAttention, FullAttention, SlidingWindow

PAGE = 4  # tokens a page: 32 bytes a head's key, pages of 128 bytes
FULL = FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16")
WINDOW = SlidingWindow(num_kv_heads=1, head_dim=16, dtype="bfloat16", window=10)
CHUNK = ChunkedAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16", chunk=8)
TOKEN_BYTES = 64  # of each of these layers


def ranges(
    *layers: FullAttention | SlidingWindow | ChunkedAttention, **changed: int
) -> VirtualAccounting:
    return VirtualAccounting(spec_of(*layers).groups, config(page_bytes=128, **changed))


def test_pages_follow_the_tokens() -> None:
    """Seed 0: Qwen3-4B's 100 tokens take 112 (whole pages of 16), not the whole context."""
    cache = VirtualAccounting(QWEN3_4B.groups, config(max_model_len=40_960))
    cache.add(0)
    cache.try_extend(0, 100)
    usage = cache.usage()
    assert usage.committed_bytes == 112 * QWEN3_4B.bytes_per_token
    assert usage.reserved_bytes == 64 * 40_960 * QWEN3_4B.bytes_per_token


def test_pages_in_eight_bits() -> None:
    """32 tokens fill a page of one head's keys; 64 one of a layer's scales."""
    for dtype, step in (("float8_e4m3fn", 32), ("int8", 64)):
        spec = QWEN3_4B.with_kv_dtype(dtype)
        cache = VirtualAccounting(spec.groups, config(max_model_len=40_960))
        cache.add(0)
        for num_tokens in (1, step, step + 1):
            cache.try_extend(0, num_tokens)
            pages = -(-num_tokens // step)
            assert cache.usage().committed_bytes == pages * step * spec.bytes_per_token


def test_a_range_never_moves() -> None:
    cache = ranges(FULL, max_model_len=64)
    for seq_id in (0, 1):
        cache.add(seq_id)
        cache.try_extend(seq_id, 1)
    tables = [cache.table(0, seq_id).tolist() for seq_id in (0, 1)]
    cache.drain()
    commits = []
    for num_tokens in range(2, 65):
        assert isinstance(cache.try_extend(0, num_tokens), Fits)
        commits += cache.drain()
    assert [cache.table(0, seq_id).tolist() for seq_id in (0, 1)] == tables
    (start,) = tables[0]
    assert commits == [
        Commit(0, first, first + PAGE) for first in range(start + PAGE, start + 64, PAGE)
    ]


def test_a_window_gives_pages_back_while_it_runs() -> None:
    cache = ranges(FULL, WINDOW)
    cache.add(0)
    most = 0
    for num_tokens in range(1, 1001):
        cache.try_extend(0, num_tokens)
        full_bytes = -(-num_tokens // PAGE) * PAGE * TOKEN_BYTES
        most = max(most, cache.usage().committed_bytes - full_bytes)
    assert most == 16 * TOKEN_BYTES  # ten tokens touch four pages at most
    released = sum(c.stop - c.start for c in cache.drain() if isinstance(c, Release))
    assert released == 988  # the window now begins at 990


def test_what_a_window_skips_of_what_is_brought_takes_no_page() -> None:
    """Of 30 tokens from outside the window needs 21 to 29, and it never had the pages before."""
    cache = ranges(WINDOW)
    cache.add(0)
    assert isinstance(cache.try_extend(0, 32, Extension(external_tokens=30)), Fits)
    assert cache.drain() == [Commit(0, 20, 32)]
    cache.check()


def test_a_fork_takes_the_pages_of_the_window_only() -> None:
    """Not those that the first sequence has given back long ago."""
    cache = ranges(WINDOW, capacity_bytes=24 * TOKEN_BYTES)
    cache.add(0)
    for num_tokens in range(1, 101):
        assert isinstance(cache.try_extend(0, num_tokens), Fits)
    cache.drain()
    before = cache.usage().committed_bytes
    assert isinstance(cache.fork(0, 1), Fits)
    assert cache.usage().committed_bytes == 2 * before
    start = int(cache.table(0, 1)[0]) - int(cache.table(0, 0)[0])
    commit, copy = cache.drain()
    assert isinstance(commit, Commit)
    assert isinstance(copy, Copy)
    assert copy.target - copy.source == start
    assert copy.num_slots == 12


def test_a_refused_trim_changes_nothing() -> None:
    cache = ranges(FULL, WINDOW)
    cache.add(0)
    for num_tokens in (50, 60):
        cache.try_extend(0, num_tokens)
    before = cache.usage()
    with pytest.raises(ValueError, match="cannot go back to 20 tokens"):
        cache.trim(0, 20)
    assert cache.usage() == before
    assert cache.num_tokens(0) == 60
    cache.check()


@pytest.mark.parametrize("num_tokens", [0, 8, 16])
def test_a_chunk_s_edge_behind_the_pages_is_refused(num_tokens: int) -> None:
    """Nothing there would be read, but what is written next would find no page."""
    cache = ranges(CHUNK)
    cache.add(0)
    for reached in (30, 40):
        cache.try_extend(0, reached)
    with pytest.raises(ValueError, match=f"cannot go back to {num_tokens} tokens"):
        cache.trim(0, num_tokens)
    cache.trim(0, 30)
    cache.check()


def test_there_may_be_more_sequences_than_ranges() -> None:
    cache = ranges(FULL, max_num_seqs=2)
    for seq_id in range(4):
        cache.add(seq_id)
    for seq_id in (0, 1):
        assert isinstance(cache.try_extend(seq_id, 5), Fits)
    verdict = cache.try_extend(2, 5)
    assert isinstance(verdict, NotNow)
    assert verdict.holders == (0, 1)
    cache.free(0)
    assert isinstance(cache.try_extend(2, 5), Fits)


def test_a_range_is_used_again_by_the_next() -> None:
    cache = ranges(FULL)
    for seq_id in range(10):
        cache.add(seq_id)
        cache.try_extend(seq_id, 9)
        assert cache.table(0, seq_id).tolist() == [0]
        cache.free(seq_id)
        assert cache.drain() == [Commit(0, 0, 12), Release(0, 0, 12)]
    assert cache.usage().committed_bytes == 0
