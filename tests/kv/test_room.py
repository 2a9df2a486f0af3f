"""Room: what is asked is what is taken, a refusal changes nothing, and bytes are set aside."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from kv.caches import (
    BLOCK_BYTES,
    FULL,
    LATENT,
    SIZE,
    STATE,
    Cache,
    chunked,
    ids,
    sliding,
    span,
)
from quire.kv import FITS, CacheConfig, Fits, Never, NotNow, PrefixHit
from quire.kv.paged import PagedAccounting
from quire.spec import Layer, LayerSpec, ModelSpec

MIXES: list[tuple[LayerSpec, ...]] = [
    (FULL,),
    (sliding(6),),
    (chunked(8),),
    (STATE,),
    (FULL, sliding(6)),
    (FULL, STATE),
    (LATENT, chunked(8), sliding(3)),
    (FULL, sliding(1), sliding(9), STATE),
]
mixes = pytest.mark.parametrize("specs", MIXES)

# -- need ----------------------------------------------------------------------------------------


@given(
    specs=st.sampled_from(MIXES),
    actions=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 14), st.sampled_from(["", "fork", "free"])),
        max_size=30,
    ),
    num_blocks=st.integers(1, 60),
)
@settings(max_examples=examples(30, of=80), deadline=None)
def test_what_is_asked_is_what_is_taken(
    specs: tuple[LayerSpec, ...], actions: list[tuple[int, int, str]], num_blocks: int
) -> None:
    """vLLM: the planned need and the blocks then taken agree, always: with hits that lie in the
    cache, blocks that windows give back, and copies of what is shared."""
    cache = Cache(*specs, num_blocks=num_blocks)
    new_id = 10
    for seq_id, num_more, then in actions:
        tokens, hit = span(0, num_more), None
        if seq_id in cache.tokens:
            length = len(cache.tokens[seq_id])
            tokens = span(length, length + num_more)
        else:
            cache.add(seq_id)
            hit = cache.blocks.match_prefix(seq_id, ids(tokens))
        pools = cache.blocks.pools
        held = pools.held_bytes
        # Asked with everything set aside: the refusal names the sum.
        asked = cache.extend(seq_id, tokens, hit=hit, kept_bytes=10**9)
        need = asked.need_bytes if isinstance(asked, NotNow) else 0
        verdict = cache.extend(seq_id, tokens, hit=hit)
        assert (verdict is FITS) == (need <= pools.ceiling.capacity_bytes - held)
        if verdict is FITS:
            # Duplicates are given back when they are reported: count what was taken before that.
            assert cache.held_bytes_before_report - held == need
            if need > 0:
                assert isinstance(asked, NotNow)
                assert asked.free_bytes == pools.ceiling.capacity_bytes - held
                assert asked.kept_bytes == 10**9
        if then == "fork":
            cache.fork(seq_id, new_id)
            new_id += 1
        elif then == "free":
            cache.free(seq_id)


@mixes
def test_admission_is_sizing(specs: tuple[LayerSpec, ...]) -> None:
    """vLLM: what is told about a length is what happens on the way there, token by token."""
    model = ModelSpec(
        model_type="test",
        layers=tuple(Layer(specs=(spec,)) for spec in specs),
        max_model_len=60,
        dtype="bfloat16",
    )
    for num_blocks in range(15):
        for page_blocks in (1, 2):
            config = CacheConfig(
                max_model_len=60,
                max_num_seqs=2,
                capacity_bytes=num_blocks * BLOCK_BYTES,
                block_size=SIZE,
                page_bytes=page_blocks * BLOCK_BYTES,
            )
            cache = PagedAccounting(model.groups, config)
            cache.add(0)
            longest = 0
            while longest < 60 and cache.try_extend(0, longest + 1) is FITS:
                longest += 1
            for num_tokens in (1, longest, longest + 1, 61):
                fits = cache.could_hold(num_tokens) is FITS
                assert fits == (num_tokens <= longest), f"{num_blocks} blocks, {num_tokens} tokens"
            verdict = cache.could_hold(61)
            assert isinstance(verdict, Never)
            assert verdict.option == "max_model_len"


def test_long_windows_are_admitted_and_long_prompts_of_full_attention_are_not() -> None:
    """vLLM: a window admits by what it can ever hold, full attention by length."""
    cache = Cache(sliding(6), num_blocks=3)
    cache.add(0)
    for start in range(0, 400, SIZE):
        assert cache.extend(0, span(start, start + SIZE)) is FITS
    full = Cache(FULL, num_blocks=3)
    full.add(0)
    assert isinstance(full.extend(0, span(0, 13)), NotNow)
    assert full.extend(0, span(0, 12)) is FITS


@mixes
@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_pools_of_next_to_nothing(specs: tuple[LayerSpec, ...], num_blocks: int) -> None:
    cache = Cache(*specs, num_blocks=num_blocks)
    cache.add(0)
    for num_tokens in range(1, 30):
        if cache.extend(0, [num_tokens]) is not FITS:
            break
    assert cache.num_held <= num_blocks
    cache.free(0)
    assert cache.num_held == 0


# -- refusals ------------------------------------------------------------------------------------


@mixes
def test_a_refusal_changes_nothing(specs: tuple[LayerSpec, ...]) -> None:
    """In all groups or in none; the verdict names who could make room."""
    cache = Cache(*specs, num_blocks=4 * len(specs))
    cache.start(0, span(0, 9))
    cache.keep_state(0)
    cache.start(1, [50])
    cache.fork(1, 2)
    cache.free(0)
    cache.add(3)
    tokens = span(0, 9 + 4 * SIZE * len(specs))
    hit = cache.blocks.match_prefix(3, ids(tokens))
    before = cache.state()
    verdict = cache.extend(3, tokens, hit=hit, kept_bytes=cache.capacity_bytes)
    assert isinstance(verdict, NotNow)
    assert cache.state() == before
    assert verdict.holders == (1, 2)


def test_a_step_of_many_goes_as_far_as_it_fits() -> None:
    cache = Cache(FULL, num_blocks=7)
    for seq_id in range(4):
        cache.start(seq_id, span(100 * seq_id, 100 * seq_id + 4))
    # 3 blocks are left: the first, the third and the fourth cross an edge, the second twice.
    more = {0: [1], 1: [1, 2, 3, 4, 5], 2: [1], 3: [1]}
    assert cache.extend_each(more) == 2
    assert [len(cache.table(seq_id)) for seq_id in range(4)] == [2, 3, 1, 1]
    assert isinstance(cache.extend(2, [1]), NotNow)
    cache.free(1)
    assert cache.extend_each({2: [1], 3: [1]}) == 2


def test_a_step_of_many_counts_those_who_have_room_already() -> None:
    cache = Cache(FULL, num_blocks=3)
    for seq_id in range(3):
        cache.start(seq_id, span(100 * seq_id, 100 * seq_id + 4 - seq_id))
    assert cache.extend_each({2: [1], 1: [1], 0: [1]}) == 2
    assert cache.blocks.try_extend_each([2, 1], [3, 4]) == 2
    assert cache.extend_each({}) == 0


def test_who_has_room_already_counts_in_the_place_where_a_step_of_many_ends() -> None:
    """The answer is a place among those who asked, not among those who grow."""
    cache = Cache(FULL, num_blocks=5)
    for seq_id in range(4):
        cache.start(seq_id, span(100 * seq_id, 100 * seq_id + 4))
    # The second and the third grow; the first and the last have room as they are.
    assert cache.blocks.try_extend_each([0, 1, 2, 3], [4, 5, 5, 4]) == 2
    assert [len(cache.table(seq_id)) for seq_id in range(4)] == [1, 2, 1, 1]
    assert cache.blocks.try_extend_each([0, 1, 3], [4, 5, 4]) == 3


KINDS = [FULL, sliding(1), sliding(5), chunked(8), STATE]


@given(
    specs=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    granule_blocks=st.sampled_from([1, 2]),
)
@settings(max_examples=examples(25, of=60), deadline=None)
def test_to_begin_alone_is_to_begin_in_a_step_of_many(
    specs: list[LayerSpec], lengths: list[int], granule_blocks: int
) -> None:
    """A first step by itself, against the step of any rows: the same blocks, bytes and changes."""
    alone, many = (
        Cache(*specs, num_blocks=60, granule_blocks=granule_blocks).blocks for _ in range(2)
    )
    for seq_id, length in enumerate(lengths):
        alone.add(seq_id)
        many.add(seq_id)
        assert (alone.allocate(seq_id, length) is FITS) == many.try_extend_each([seq_id], [length])
        assert alone.pools.held_bytes == many.pools.held_bytes
        assert alone.pools.changes == many.pools.changes
        for ours, theirs in zip(alone.tables.ids, many.tables.ids, strict=True):
            width = min(ours.shape[1], theirs.shape[1])
            assert (ours[:, :width] == theirs[:, :width]).all()
        for name in ("starts", "ends", "num_tokens"):
            assert (getattr(alone.tables, name) == getattr(many.tables, name)).all()
        alone.check()


# -- bytes set aside -----------------------------------------------------------------------------


def test_kept_bytes_are_left_to_others() -> None:
    """A watermark, or what has been promised: extend succeeds if need ≤ free − kept."""
    cache = Cache(FULL, num_blocks=8)
    cache.start(0, span(0, 8))
    cache.add(1)
    assert isinstance(cache.extend(1, span(50, 62), kept_bytes=4 * BLOCK_BYTES), NotNow)
    verdict = cache.extend(1, span(50, 62), kept_bytes=3 * BLOCK_BYTES + 1)
    assert isinstance(verdict, NotNow)
    assert "set aside" in str(verdict)
    assert cache.extend(1, span(50, 62), kept_bytes=3 * BLOCK_BYTES) is FITS


def test_what_is_only_cached_counts_as_free() -> None:
    cache = Cache(FULL, num_blocks=8)
    cache.start(0, span(0, 32))
    cache.free(0)
    assert cache.num_cached == 8
    cache.add(1)
    assert cache.extend(1, span(50, 62), kept_bytes=5 * BLOCK_BYTES) is FITS
    assert cache.num_cached == 5


def test_room_for_a_copy_is_not_taken_from_what_is_kept() -> None:
    """A source is copied if that leaves the bytes that are set aside, else it is taken over."""
    for kept, copied in ((0, True), (1, False)):
        cache = Cache(FULL, num_blocks=3)
        cache.start(0, span(0, 12))
        cache.free(0)
        cache.add(1)
        prompt = [*span(0, 6), 99]
        hit = cache.blocks.match_prefix(1, ids(prompt))
        assert cache.extend(1, prompt, hit=hit, kept_bytes=kept * BLOCK_BYTES) is FITS
        assert cache.lookup(span(0, 9)).num_tokens == (8 if copied else 4)
        assert cache.num_held == 2


# -- a source in several groups ------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", range(5, 11))
def test_a_source_held_in_one_group_and_cached_in_another(num_blocks: int) -> None:
    """The window has passed the block, so only full attention's is still held by its owner."""
    cache = Cache(FULL, sliding(3), num_blocks=num_blocks)
    cache.start(0, span(0, 8))
    for token in range(8, 12):
        cache.extend(0, [token])
    cache.add(1)
    prompt = [*span(0, 6), 99]
    hit = cache.blocks.match_prefix(1, ids(prompt))
    assert hit.num_tokens == 6
    # 3 blocks of full attention and 1 of the window are held; 2 more are needed of each, one of
    # which full attention shares.
    fits = cache.extend(1, prompt, hit=hit) is FITS
    assert fits == (num_blocks >= 4 + 1 + 1)
    cache.extend(0, [12])
    cache.free(1)
    cache.free(0)


def test_a_block_that_one_passes_while_another_writes() -> None:
    """Two hold it; in one step the window of one leaves it behind and the other writes into it."""
    cache = Cache(sliding(4), num_blocks=3)
    cache.start(0, span(0, 8))
    cache.fork(0, 1)
    cache.extend(0, span(8, 11))
    cache.trim(1, 6)
    count = cache.extend_each({0: [11], 1: [50]})
    for seq_id in (0, 1)[:count]:
        cache.extend(seq_id, [60])
    cache.free(0, 1)
    assert cache.num_held == 0


# -- granules ------------------------------------------------------------------------------------


def test_pages_are_filled_where_they_are_held() -> None:
    """Three sequences in two granules; two end, and a new one could move in with the third.

    With several blocks a granule the need is the least: nothing is evicted for it while there is
    room elsewhere.
    """
    cache = Cache(FULL, num_blocks=8, granule_blocks=2)
    for seq_id in range(3):
        cache.start(seq_id, [seq_id] * SIZE)
    cache.free(1, 2)
    before = cache.blocks.pools.held_bytes
    cache.add(3)
    asked = cache.extend(3, [3] * SIZE, kept_bytes=10**6)
    assert isinstance(asked, NotNow)
    assert cache.extend(3, [3] * SIZE) is FITS
    rise = cache.blocks.pools.held_bytes - before
    assert asked.need_bytes <= rise <= 2 * BLOCK_BYTES
    assert cache.blocks.pools.committed_bytes <= cache.capacity_bytes


@pytest.mark.parametrize("granule_blocks", [1, 2])
def test_need_is_the_least_and_without_granules_exact(granule_blocks: int) -> None:
    cache = Cache(FULL, sliding(5), num_blocks=8 * granule_blocks, granule_blocks=granule_blocks)
    for seq_id in range(2):
        cache.start(seq_id, [seq_id] * SIZE)
    cache.free(0)
    for length in range(2, 12):
        pools, more = cache.blocks.pools, [7] * length
        before = pools.held_bytes
        asked = cache.extend(1, more, kept_bytes=10**6)
        assert isinstance(asked, NotNow)
        if isinstance(cache.extend(1, more), NotNow):
            assert asked.need_bytes > cache.capacity_bytes - before
            return
        rise = cache.held_bytes_before_report - before
        assert rise >= asked.need_bytes
        assert rise == asked.need_bytes or granule_blocks > 1
        assert pools.committed_bytes <= cache.capacity_bytes
    raise AssertionError("it was to be refused in the end")


def test_room_in_granules_is_found_as_it_was_planned() -> None:
    cache = Cache(FULL, STATE, num_blocks=7, granule_blocks=2)
    for seq_id in range(3):
        cache.start(seq_id, [seq_id] * SIZE)
    cache.free(1, 2)
    cache.blocks.resize(5 * BLOCK_BYTES)
    cache.end_step()
    cache.start(3, [3] * SIZE)
    assert cache.num_held == 4


def test_a_lone_sequence_in_granules_goes_on() -> None:
    cache = Cache(chunked(8), FULL, num_blocks=14, granule_blocks=4)
    cache.start(0, span(0, 14))
    assert cache.extend(0, span(14, 19)) is FITS


def test_taking_over_in_granules() -> None:
    """What is taken over keeps its whole granule, which the plan may have given to another."""
    cache = Cache(FULL, sliding(1), num_blocks=6, granule_blocks=2)
    cache.start(0, span(0, 8))
    cache.free(0)
    cache.start(1, span(0, 5))
    cache.add(2)
    prompt = [0, 101, 2, 103]
    hit = cache.blocks.match_prefix(2, ids(prompt))
    # The window's group has a gap beside what is held there; its source lies in another granule.
    assert isinstance(cache.extend(2, prompt, hit=hit), Fits | NotNow)
    assert cache.blocks.pools.held_bytes <= cache.capacity_bytes


# -- resize --------------------------------------------------------------------------------------


def test_shrinking_takes_what_is_cached_and_never_what_is_held() -> None:
    cache = Cache(FULL, num_blocks=8)
    cache.start(0, span(0, 12))
    cache.start(1, span(50, 62))
    cache.free(1)
    blocks = cache.blocks
    assert blocks.resize(5 * BLOCK_BYTES) == 5 * BLOCK_BYTES
    assert cache.lookup(span(50, 63)).num_tokens == 8  # the deepest went
    assert blocks.resize(0) == 3 * BLOCK_BYTES
    assert cache.lookup(span(50, 63)).num_tokens == 0
    cache.end_step()
    assert cache.lookup(span(0, 13)).num_tokens == 12
    assert isinstance(cache.extend(0, [12]), NotNow)
    assert blocks.resize(4 * BLOCK_BYTES) == 4 * BLOCK_BYTES
    assert blocks.resize(5 * BLOCK_BYTES, for_now=True) == 4 * BLOCK_BYTES
    assert cache.extend(0, [12]) is FITS


def test_hits_name_their_limit() -> None:
    hits: list[PrefixHit] = []
    cache = Cache(FULL, num_blocks=9)
    cache.start(0, span(0, 12))
    hits += [cache.lookup(span(0, length)) for length in range(1, 16)]
    assert [hit.limit for hit in hits] == list(range(15))
    assert [hit.num_tokens for hit in hits] == [*range(13), 12, 12]
    assert all(a.num_tokens <= b.num_tokens for a, b in pairwise(hits))
