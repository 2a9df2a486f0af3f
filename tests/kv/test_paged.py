"""Blocks: tables, slots, sharing and copy-on-write, and what little is wasted."""

from dataclasses import replace

import numpy as np
import pytest

from kv.geometry import QWEN3_4B, SMALL, SMALL_PAGE_BYTES, config, spec_of
from quire.errors import ConfigError
from quire.kv import Commit, Copy, Fits, Never, NotNow, Release
from quire.kv.paged import PagedAccounting
from quire.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    SlidingWindow,
)

BLOCK = 16


def pool(num_tokens: int = 4096, **changed: int) -> PagedAccounting:
    return PagedAccounting(
        SMALL.groups,
        config(
            capacity_bytes=num_tokens * SMALL.bytes_per_token,
            page_bytes=SMALL_PAGE_BYTES,
            **changed,
        ),
    )


def put(cache: PagedAccounting, seq_id: int, num_tokens: int) -> None:
    cache.add(seq_id)
    assert isinstance(cache.try_extend(seq_id, num_tokens), Fits)


def test_38_tokens_are_16_and_16_and_6() -> None:
    """Seed 4."""
    cache = pool()
    put(cache, 0, 38)
    assert cache.table(0, 0).tolist() == [0, 1, 2]
    blocks = (cache.slots(0, 0, 0, 38) // BLOCK).tolist()
    assert [blocks.count(block) for block in (0, 1, 2)] == [16, 16, 6]


def test_a_source_is_shared_by_forks_and_never_copied() -> None:
    """Its place is taken once for all forks: only the text's last block is copied on write."""
    full = FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16")
    source = CrossAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16", source_tokens=100)
    groups = spec_of(full, source).groups
    cache = PagedAccounting(groups, config(capacity_bytes=2**20, page_bytes=64))
    put(cache, 0, 3)
    cache.drain()
    before = cache.held_bytes
    for fork in (1, 2):
        assert isinstance(cache.fork(0, fork), Fits)
    for seq_id in (0, 1, 2):
        for num_tokens in (4, 5):
            assert isinstance(cache.try_extend(seq_id, num_tokens), Fits)
    changes = cache.drain()
    (place,) = cache.table(1, 0).tolist()
    assert [cache.table(1, fork).tolist() for fork in (1, 2)] == [[place], [place]]
    assert {change.group for change in changes} == {0}
    assert [type(change) for change in changes].count(Copy) == 2
    assert cache.held_bytes - before == 2 * BLOCK * full.bytes_per_token
    assert cache.usage().used_bytes == 3 * 5 * full.bytes_per_token + source.state_bytes
    for seq_id in (0, 1):
        cache.free(seq_id)
        assert not [c for c in cache.drain() if isinstance(c, Release) and c.group == 1]
    cache.free(2)
    assert Release(1, place, place + 1) in cache.drain()
    cache.check()


def test_a_text_that_depends_on_a_source_is_not_found_by_its_tokens() -> None:
    full = FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16")
    source = CrossAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16", source_tokens=9)
    cache = PagedAccounting(
        spec_of(full, source).groups, config(capacity_bytes=2**20, page_bytes=64)
    )
    put(cache, 0, 33)
    cache.mark_computed([0], [33], np.arange(33, dtype=np.int32))
    cache.drain()
    cache.free(0)
    cache.add(1)
    hit = cache.match_prefix(1, np.arange(33, dtype=np.int32))
    assert (hit.num_tokens, hit.shortfall) == (0, "strategy")
    assert not cache.state_block_size
    assert not cache.usage().committed_bytes


def test_a_slot_is_block_times_size_plus_offset() -> None:
    """Seed 3."""
    cache = pool()
    put(cache, 0, 20)
    put(cache, 1, 20)
    cache.try_extend(0, 40)
    first, second, third = cache.table(0, 0).tolist()
    assert not {first, second, third} & set(cache.table(0, 1).tolist())
    assert cache.slots(0, 0, 14, 18).tolist() == [
        *(first * BLOCK + 14, first * BLOCK + 15),
        *(second * BLOCK, second * BLOCK + 1),
    ]
    assert cache.slots(0, 0, 31, 34).tolist() == [
        second * BLOCK + 15,
        *(third * BLOCK, third * BLOCK + 1),
    ]


def test_block_bytes() -> None:
    """Seed 3: 2 x block_size x kv_heads x head_size x dtype bytes, in each of 36 layers."""
    cache = PagedAccounting(QWEN3_4B.groups, config())
    put_bytes = 36 * 2 * 16 * 8 * 128 * 2
    cache.add(0)
    for num_tokens, num_blocks in ((1, 1), (16, 1), (17, 2), (4096, 256)):
        cache.try_extend(0, num_tokens)
        assert cache.usage().committed_bytes == num_blocks * put_bytes


def test_block_bytes_in_eight_bits() -> None:
    """A scale for each token's key in each head and one for its value; fp8 has none."""
    for dtype, scale in (("int8", 4), ("float8_e4m3fn", 0)):
        cache = PagedAccounting(QWEN3_4B.with_kv_dtype(dtype).groups, config())
        put(cache, 0, 4096)
        assert cache.usage().used_bytes == 36 * 4096 * 2 * 8 * (128 + scale)
        # int8: 33,792 bytes a layer and block are 8.25 pages, and those of all layers 297.
        put(cache, 1, 1)
        more = cache.usage().committed_bytes - 36 * 4096 * 2 * 8 * (128 + scale)
        assert more == 36 * 16 * 2 * 8 * (128 + scale)


def test_scales_lie_at_whole_multiples_of_their_size() -> None:
    spec = spec_of(LatentAttention(latent_dim=5, rope_dim=2, dtype="int8"))
    small = config(capacity_bytes=2**20)
    for block_size in (1, 2, 6):
        with pytest.raises(ConfigError, match=f"block_size={block_size} gives .* multiple of 4"):
            PagedAccounting(spec.groups, replace(small, block_size=block_size))
    PagedAccounting(spec.groups, replace(small, block_size=4))
    in_fp8 = spec.with_kv_dtype("float8_e4m3fn")
    PagedAccounting(in_fp8.groups, replace(small, block_size=1))


def test_a_system_prompt_is_shared_whole() -> None:
    """Seed 4: 4,096 tokens are 256 blocks, held once however many requests read them."""
    cache = pool(2 * 4096, max_model_len=8192)
    put(cache, 0, 4096)
    alone = cache.usage()
    for seq_id in range(1, 50):
        assert isinstance(cache.fork(0, seq_id), Fits)
        assert len(cache.table(0, seq_id)) == 256
    usage = cache.usage()
    assert usage.committed_bytes == alone.committed_bytes == 4096 * SMALL.bytes_per_token
    assert usage.used_bytes == alone.used_bytes
    assert usage.num_tokens == 50 * 4096


def test_three_ways_and_one_block_copied() -> None:
    """Seed 4: three candidates share the prompt; the first write of one copies exactly a block."""
    cache = pool()
    put(cache, 0, 38)
    cache.fork(0, 1)
    cache.fork(0, 2)
    cache.drain()
    assert isinstance(cache.try_extend(1, 39), Fits)
    assert cache.drain() == [
        Commit(0, 3 * BLOCK, 4 * BLOCK),
        Copy(0, 2 * BLOCK, 3 * BLOCK, 6),
    ]
    tables = [cache.table(0, seq_id).tolist() for seq_id in (0, 1, 2)]
    assert tables == [[0, 1, 2], [0, 1, 3], [0, 1, 2]]
    cache.try_extend(1, 40)
    assert cache.drain() == []
    cache.try_extend(2, 39)
    assert [type(change) for change in cache.drain()] == [Commit, Copy]
    cache.try_extend(0, 39)  # the last holder writes where it is
    assert cache.drain() == []
    assert cache.table(0, 0).tolist() == [0, 1, 2]


def test_a_full_last_block_is_not_copied() -> None:
    cache = pool()
    put(cache, 0, 32)
    cache.fork(0, 1)
    cache.drain()
    cache.try_extend(1, 33)
    assert cache.drain() == [Commit(0, 2 * BLOCK, 3 * BLOCK)]


def test_half_a_block_is_wasted() -> None:
    """Seeds 3 and 4: at most block - 1 tokens a sequence; on average half a block, 8 of 16."""
    cache = pool(2**20, max_num_seqs=256)
    wasted = []
    for num_tokens in range(1, 257):
        before = cache.usage().wasted_bytes
        put(cache, num_tokens, num_tokens)
        wasted.append((cache.usage().wasted_bytes - before) // SMALL.bytes_per_token)
    assert max(wasted) == BLOCK - 1
    assert sum(wasted) / len(wasted) == pytest.approx(BLOCK / 2, abs=0.5)


def test_no_external_fragmentation() -> None:
    """Seed 3: any free block will do, wherever it lies."""
    cache = pool(20 * BLOCK)
    for seq_id in range(20):
        put(cache, seq_id, BLOCK)
    freed = [cache.table(0, seq_id)[0] for seq_id in range(0, 20, 2)]
    for seq_id in range(0, 20, 2):
        cache.free(seq_id)
    put(cache, 20, 10 * BLOCK)
    assert sorted(cache.table(0, 20).tolist()) == sorted(freed)


WINDOW = 40


def windowed(num_blocks: int) -> PagedAccounting:
    """A full layer and one that looks back 40 tokens, 128 bytes a token together."""
    spec = spec_of(
        FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16"),
        SlidingWindow(num_kv_heads=1, head_dim=16, dtype="bfloat16", window=WINDOW),
    )
    capacity_bytes = num_blocks * BLOCK * 64
    return PagedAccounting(
        spec.groups, config(capacity_bytes=capacity_bytes, page_bytes=SMALL_PAGE_BYTES)
    )


def test_a_window_gives_blocks_back_while_it_runs() -> None:
    cache = windowed(num_blocks=256)
    cache.add(0)
    released = most = 0
    for num_tokens in range(1, 1001):
        cache.try_extend(0, num_tokens)
        changes = cache.drain()
        released += sum(isinstance(change, Release) for change in changes)
        most = max(most, int((cache.table(1, 0) >= 0).sum()))
    assert most == -(-(WINDOW + BLOCK - 1) // BLOCK)
    assert cache.table(1, 0).tolist()[:60] == [-1] * 60
    assert released == 60
    assert (cache.table(0, 0) >= 0).all()


def test_groups_draw_on_one_ceiling() -> None:
    """What one group's window gives back, the other takes."""
    cache = windowed(num_blocks=20)
    cache.add(0)
    num_tokens = 0
    while isinstance(verdict := cache.try_extend(0, num_tokens + 1), Fits):
        num_tokens += 1
    assert isinstance(verdict, Never)
    # 16 blocks of the full layer and, when a step begins, at most 4 of the other.
    assert num_tokens == 16 * BLOCK
    usage = cache.usage()
    assert usage.committed_bytes == 19 * BLOCK * 64
    assert verdict.fitting_tokens == 10 * BLOCK  # … in one step


def test_going_back_behind_a_window_is_refused() -> None:
    cache = windowed(num_blocks=256)
    cache.add(0)
    for num_tokens in (100, 200):
        cache.try_extend(0, num_tokens)
    cache.trim(0, 100)
    before = cache.usage()
    with pytest.raises(ValueError, match="cannot go back to 80 tokens"):
        cache.trim(0, 80)
    assert cache.usage() == before
    assert cache.num_tokens(0) == 100


def test_blocks_of_a_page_are_committed_together() -> None:
    """A page of 4096 bytes is four blocks of 1024: a page goes when its last block goes."""
    cache = PagedAccounting(SMALL.groups, config(page_bytes=4096))
    for seq_id in range(5):
        put(cache, seq_id, BLOCK)
    assert cache.drain() == [Commit(0, 0, 4 * BLOCK), Commit(0, 4 * BLOCK, 8 * BLOCK)]
    for seq_id in (0, 1, 2):
        cache.free(seq_id)
    assert cache.drain() == []
    cache.free(3)
    assert cache.drain() == [Release(0, 0, 4 * BLOCK)]


def test_whole_pages_count_for_what_can_never_fit() -> None:
    """33 tokens are three blocks, in two pages of two: they will not fit in three blocks."""
    options = dict(capacity_bytes=3 * BLOCK * 64, page_bytes=2 * BLOCK * 64)
    cache = PagedAccounting(SMALL.groups, config(**options))
    put(cache, 0, 1)
    cache.add(1)
    verdict = cache.try_extend(1, 33)
    assert isinstance(verdict, Never)
    assert verdict.fitting_tokens == 32
    assert isinstance(cache.try_extend(1, 32), NotNow | Fits)


# A chunk of eight tokens takes 128 bytes a token, the layer beside it 64: a page, or half of one.
CHUNKED = spec_of(
    FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16"),
    ChunkedAttention(num_kv_heads=2, head_dim=16, dtype="bfloat16", chunk=8),
)


def behind_a_chunk(*, scattered: bool) -> PagedAccounting:
    """Sequence 0 has nine tokens, sequence 1 a few, and the capacity is what they hold.

    Alone, eight tokens take 8 x 192 = 1536 bytes, nine 5 x 128 + 128 = 768.
    """
    cache = PagedAccounting(
        CHUNKED.groups, config(capacity_bytes=2**13, block_size=1, page_bytes=128)
    )
    cache.add(0)
    cache.add(1)
    for num_tokens in range(1, 10):
        assert isinstance(cache.try_extend(0, num_tokens), Fits)
        if scattered or num_tokens == 9:
            assert isinstance(cache.try_extend(1, num_tokens if scattered else 1), Fits)
    return cache


def test_who_came_far_under_a_larger_capacity_goes_on_when_others_end() -> None:
    """It could not come there again; but it is there, and has passed what took so much."""
    cache = behind_a_chunk(scattered=False)
    assert cache.resize(0) == cache.held_bytes == 768 + 128  # one has room beside the ninth
    assert isinstance(cache.could_hold(9), Never)
    assert isinstance(cache.try_extend(0, 10), NotNow)
    cache.free(1)
    assert isinstance(cache.try_extend(0, 10), Fits)


def test_who_came_far_and_lies_scattered_is_told_that_it_can_go_no_further() -> None:
    """Its full layer holds half of nine pages: no other sequence's end, nor its own, helps it."""
    cache = behind_a_chunk(scattered=True)
    cache.free(1)
    assert cache.resize(0) == cache.held_bytes == 9 * 128 + 128
    cache.add(2)
    verdict = cache.try_extend(0, 10)
    assert isinstance(verdict, Never)
    assert (verdict.need_bytes, verdict.capacity_bytes) == (9 * 128 + 2 * 128, 1280)
    assert isinstance(cache.could_hold(verdict.fitting_tokens), Fits)
    assert isinstance(cache.could_hold(10), Never)


def test_who_lies_scattered_is_not_now_where_it_can_begin_again() -> None:
    cache = behind_a_chunk(scattered=True)
    cache.free(1)
    cache.resize(0)
    cache.resize(1536)
    num_tokens = 9
    while isinstance(verdict := cache.try_extend(0, num_tokens + 1), Fits):
        num_tokens += 1
    assert isinstance(verdict, NotNow)
    assert verdict.holders == (0,)
    cache.free(0)
    cache.add(0)
    for length in range(1, num_tokens + 2):
        assert isinstance(cache.try_extend(0, length), Fits)
