"""Sharing what has been computed, under plain attention: what is found, what stays, what goes.

The semantics are those that vLLM's tests pin, said of our own verbs; where a docstring names vLLM
the behaviour is one of its. Contents are followed slot by slot in ``caches``.
"""

import pytest

from kv.caches import BLOCK_BYTES, FULL, LATENT, SIZE, STATE, Cache, ids, sliding, span
from quire.kv import FITS, Commit, Copy, NotNow, PrefixHit
from quire.spec import LayerSpec

# -- sharing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FULL, LATENT])
def test_full_blocks_are_shared_while_their_owner_lives(spec: LayerSpec) -> None:
    """vLLM: all three full blocks of a prompt are shared, counted twice; the tail is not."""
    cache = Cache(spec, num_blocks=20)
    assert cache.start(0, span(0, 15)) == 0
    assert cache.start(1, [*span(0, 12), *span(90, 93)]) == 12
    assert cache.table(1)[:3] == cache.table(0)[:3]
    assert cache.table(1)[3] != cache.table(0)[3]
    assert cache.refs(0) == cache.refs(1) == [2, 2, 2, 1]
    assert cache.num_held == 5


def test_full_blocks_are_shared_after_their_owner_died() -> None:
    """vLLM: a free block is not an empty block."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 15))
    blocks = cache.table(0)
    cache.free(0)
    assert (cache.num_held, cache.num_cached) == (0, 3)
    assert cache.start(1, [*span(0, 12), *span(90, 93)]) == 12
    assert cache.table(1)[:3] == blocks[:3]
    assert cache.refs(1) == [1, 1, 1, 1]
    assert cache.num_cached == 0


def test_a_block_that_is_not_full_is_not_found() -> None:
    """vLLM: the tail is never keyed, so a longer prompt hits only the blocks before it."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 15))
    assert cache.lookup(span(0, 20)).num_tokens == 12
    cache.extend(0, [15])
    assert cache.lookup(span(0, 20)).num_tokens == 16


def test_the_last_token_is_always_computed() -> None:
    """Some token must produce logits. vLLM drops the last block for that, here it is copied."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 12))
    hit = cache.lookup(span(0, 12))
    assert (hit.num_tokens, hit.limit, hit.shortfall) == (11, 11, "")
    assert cache.start(1, span(0, 12)) == 11
    # The copy turned out to be what the first has, and was given back.
    assert cache.table(1) == cache.table(0)


def test_a_prompt_of_one_token_or_none_finds_nothing() -> None:
    cache = Cache(FULL, num_blocks=4)
    cache.start(0, span(0, 8))
    for tokens in ([], [0]):
        hit = cache.lookup(tokens)
        assert (hit.num_tokens, hit.limit, hit.shortfall) == (0, 0, "")


# -- part of a block -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_common", range(1, 13))
def test_a_block_used_in_part_is_copied(num_common: int) -> None:
    """vLLM has it beside Mamba only: the source keeps its key, the copy has none until full."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 12))
    sources = cache.table(0)
    cache.free(0)
    num_whole, num_part = divmod(num_common, SIZE)
    assert cache.start(1, [*span(0, num_common), 99]) == num_common
    assert cache.table(1)[:num_whole] == sources[:num_whole]
    own = cache.table(1)[num_whole]
    assert own not in sources
    copies = [change for change in cache.changes if isinstance(change, Copy)]
    wanted = [Copy(0, sources[num_whole] * SIZE, own * SIZE, num_part)] if num_part else []
    assert copies == wanted
    # The source is found as before, and now also what was written into the copy, once it is full.
    assert cache.lookup(span(0, 13)).num_tokens == 12
    cache.extend(1, span(70, 73 - num_part))
    full = len(cache.tokens[1]) // SIZE * SIZE
    assert full == num_whole * SIZE + SIZE
    assert cache.lookup([*cache.tokens[1][:full], 500]).num_tokens == full


def test_a_copy_is_made_before_it_is_written() -> None:
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 8))
    cache.start(1, [*span(0, 6), 99])
    assert [type(change) for change in cache.changes] == [Commit, Copy]


def test_of_many_beginnings_the_longest_is_used() -> None:
    cache = Cache(FULL, num_blocks=20)
    for seq_id, block in enumerate(([1, 2, 3, 4], [1, 2, 7, 8], [1, 5, 3, 4], [2, 2, 7, 8])):
        cache.start(seq_id, block)
    assert cache.start(9, [1, 2, 7, 1, 1]) == 3
    assert cache.lookup([1, 2, 7, 8]).num_tokens == 3
    assert cache.lookup([1, 9, 9]).num_tokens == 1
    assert cache.lookup([3, 9, 9]).num_tokens == 0


def test_a_source_that_has_no_room_beside_its_copy_is_taken_over() -> None:
    """The sequence goes on in the block itself, which is found no more; what is before it is."""
    cache = Cache(FULL, num_blocks=3)
    cache.start(0, span(0, 12))
    blocks = cache.table(0)
    cache.free(0)
    assert cache.start(1, [*span(0, 10), 99]) == 10
    assert cache.table(1) == blocks
    assert not any(isinstance(change, Copy) for change in cache.changes)
    assert cache.lookup(span(0, 13)).num_tokens == 8
    cache.extend(1, [98])
    assert cache.lookup([*span(0, 10), 99, 98, 1]).num_tokens == 12


def test_taking_over_the_first_block() -> None:
    cache = Cache(FULL, num_blocks=1)
    cache.start(0, span(0, 4))
    cache.free(0)
    assert cache.start(1, [0, 1, 99]) == 2
    assert cache.lookup(span(0, 5)).num_tokens == 0
    cache.extend(1, [98])
    assert cache.lookup([0, 1, 99, 98, 1]).num_tokens == 4


def test_a_source_that_is_held_is_copied_or_the_prompt_waits() -> None:
    cache = Cache(FULL, num_blocks=3)
    cache.start(0, span(0, 8))
    cache.add(1)
    hit = cache.blocks.match_prefix(1, ids([*span(0, 6), *span(90, 93)]))
    assert hit.num_tokens == 6
    assert isinstance(cache.extend(1, [*span(0, 6), *span(90, 93)], hit=hit), NotNow)
    hit = cache.blocks.match_prefix(1, ids([*span(0, 6), 90]))
    assert cache.extend(1, [*span(0, 6), 90], hit=hit) is FITS
    assert cache.refs(0) == [2, 1]


# -- computing on --------------------------------------------------------------------------------


def test_decoding_takes_a_block_at_block_edges_only() -> None:
    """vLLM: tokens into a begun block allocate nothing; a full one becomes findable."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 5))
    for token in range(5, 40):
        before = cache.table(0)
        cache.extend(0, [token])
        new = cache.table(0)[len(before) :]
        assert cache.table(0)[: len(before)] == before
        assert len(new) == (token % SIZE == 0)
        assert cache.lookup(span(0, 41)).num_tokens == (token + 1) // SIZE * SIZE


def test_many_tokens_at_once_fill_several_blocks() -> None:
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 6))
    cache.extend(0, span(6, 21))
    assert len(cache.table(0)) == 6
    assert cache.lookup(span(0, 30)).num_tokens == 20


def test_what_two_compute_alike_is_kept_once() -> None:
    """vLLM keeps both copies and finds either; here the second gives its own back."""
    cache = Cache(FULL, num_blocks=20)
    for seq_id in (0, 1):
        cache.add(seq_id)
    hits = [cache.blocks.match_prefix(seq_id, ids(span(0, 10))) for seq_id in (0, 1)]
    for seq_id, hit in enumerate(hits):
        assert cache.extend(seq_id, span(0, 10), hit=hit) is FITS
    assert cache.table(0)[:2] == cache.table(1)[:2]
    assert cache.num_held == 4
    cache.free(0)
    assert cache.lookup(span(0, 12)).num_tokens == 8
    assert cache.extend(1, [10, 11]) is FITS
    assert cache.lookup(span(0, 13)).num_tokens == 12


def test_sequences_that_decode_alike_share_as_they_go() -> None:
    cache = Cache(FULL, num_blocks=20)
    for seq_id in (0, 1, 2):
        cache.start(seq_id, span(0, 5))
    for token in range(5, 20):
        assert cache.extend_each({seq_id: [token] for seq_id in (0, 1, 2)}) == 3
    assert cache.table(0) == cache.table(1) == cache.table(2)
    assert cache.num_held == 5
    assert cache.refs(0) == [3] * 5


def test_tokens_of_several_sequences_are_reported_packed() -> None:
    """Counts may differ, and be 0: each sequence gets its own tokens."""
    cache = Cache(FULL, num_blocks=20)
    for seq_id in (0, 1):
        cache.add(seq_id)
        cache.blocks.allocate(seq_id, 8)
    cache.blocks.mark_computed([0, 1], [2, 0], ids([50, 51]))
    cache.blocks.mark_computed([0, 1], [2, 4], ids([52, 53, 60, 61, 62, 63]))
    assert cache.lookup([50, 51, 52, 53, 1]).num_tokens == 4
    assert cache.lookup([60, 61, 62, 63, 1]).num_tokens == 4


def test_a_token_of_each_needs_no_counts() -> None:
    cache = Cache(FULL, num_blocks=20)
    for seq_id in (0, 1):
        cache.add(seq_id)
        cache.blocks.allocate(seq_id, 4)
    for token in range(4):
        cache.blocks.mark_computed([0, 1], None, ids([50 + token, 60 + token]))
    assert cache.lookup([50, 51, 52, 53, 1]).num_tokens == 4
    assert cache.lookup([60, 61, 62, 63, 1]).num_tokens == 4


@pytest.mark.parametrize("caching", [True, False])
def test_reporting_nothing(caching: bool) -> None:
    cache = Cache(FULL, num_blocks=20, caching=caching)
    cache.blocks.mark_computed([], [], ids([]))
    cache.blocks.mark_computed([], None, ids([]))
    cache.start(0, span(0, 3))
    cache.blocks.mark_computed([0], [0], ids([]))
    cache.extend(0, [3])
    assert cache.lookup(span(0, 5)).num_tokens == 4 * caching


def test_a_sequence_that_reads_nothing_still_contributes() -> None:
    """As in vLLM: a prompt that opts out of reading computes all, and others find it."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 8))
    assert cache.start(1, span(0, 12), read=False) == 0
    assert cache.num_held == 3  # the same content is kept once even so
    cache.free(0, 1)
    assert cache.start(2, span(0, 13)) == 12


# -- eviction ------------------------------------------------------------------------------------


def test_what_is_empty_goes_before_what_is_cached() -> None:
    """vLLM: blocks without content are used first."""
    cache = Cache(FULL, num_blocks=6)
    cache.start(0, span(0, 10))
    cache.start(1, span(20, 30))
    cache.free(0, 1)
    assert cache.num_cached == 4
    cache.start(2, span(50, 58))
    assert cache.num_cached == 4
    assert cache.lookup(span(0, 10)).num_tokens == 8
    assert cache.lookup(span(20, 30)).num_tokens == 8


def test_the_deepest_block_of_the_least_recent_sequence_goes_first() -> None:
    """vLLM: tail first within a sequence, least recently used between them."""
    cache = Cache(FULL, num_blocks=4)
    cache.start(0, span(0, 8))
    cache.start(1, span(20, 28))
    cache.free(1, 0)
    found = []
    for seq_id in range(2, 6):
        cache.start(seq_id, [1000 + seq_id])
        found.append([cache.lookup(span(at, at + 9)).num_tokens for at in (0, 20)])
    assert found == [[8, 4], [8, 0], [4, 0], [0, 0]]


@pytest.mark.parametrize("priority", [-1, 1])
def test_what_is_left_for_a_copy_matters_as_its_reader_does(priority: int) -> None:
    """A sequence goes back into a block that another one shares, and goes on in a copy of it."""
    cache = Cache(FULL, num_blocks=6)
    if priority > 0:
        cache.start(2, span(60, 68))
        cache.free(2)
    cache.start(0, span(0, 8), priority=priority)
    assert cache.start(1, span(0, 9), priority=2) == 8
    cache.trim(0, 6)
    cache.extend(0, [50])
    cache.free(1, 0)
    if priority < 0:
        cache.start(2, span(60, 68))
        cache.free(2)
    cache.start(3, span(70, 82))  # all that is empty, and a block more
    found = [cache.lookup(span(at, at + 9)).num_tokens for at in (0, 60)]
    assert found == ([8, 4] if priority < 0 else [4, 8])


def test_a_hit_makes_recent() -> None:
    """vLLM: a hit takes a block out of the middle of the queue."""
    cache = Cache(FULL, num_blocks=4)
    cache.start(0, span(0, 8))
    cache.start(1, span(20, 28))
    cache.free(0, 1)
    cache.start(2, span(0, 5))
    cache.free(2)
    for seq_id in (3, 4, 5):
        cache.start(seq_id, [1000 + seq_id])
    assert cache.lookup(span(0, 5)).num_tokens == 4
    assert cache.lookup(span(20, 25)).num_tokens == 0


def test_a_block_that_is_used_again_loses_what_it_held() -> None:
    """vLLM: a recycled block is not found under its old content."""
    cache = Cache(FULL, num_blocks=2)
    cache.start(0, span(0, 8))
    blocks = cache.table(0)
    cache.free(0)
    cache.start(1, span(50, 58))
    assert sorted(cache.table(1)) == sorted(blocks)
    assert cache.lookup(span(0, 9)).num_tokens == 0
    cache.free(1)
    assert cache.lookup(span(50, 59)).num_tokens == 8


def test_the_blocks_of_a_hit_are_not_evicted_for_the_rest() -> None:
    """vLLM: a sequence's own hit is held before its new blocks are taken."""
    cache = Cache(FULL, num_blocks=4)
    cache.start(0, span(0, 12))
    blocks = cache.table(0)
    cache.free(0)
    assert cache.start(1, [*span(0, 8), *span(90, 98)]) == 8
    assert cache.table(1)[:2] == blocks[:2]
    assert len(set(cache.table(1))) == 4
    assert cache.lookup(span(0, 13)).num_tokens == 8


def test_the_source_of_a_copy_is_not_evicted_for_the_rest() -> None:
    """It is the deepest block of the least recent sequence, and stays cached beside its copy."""
    cache = Cache(FULL, num_blocks=6)
    for seq_id in range(2):
        cache.start(seq_id, span(100 * seq_id, 100 * seq_id + 8))
    cache.free(0)
    cache.free(1)
    assert cache.start(2, [*span(0, 6), *span(90, 100)]) == 6
    assert cache.lookup(span(0, 9)).num_tokens == 8
    assert cache.lookup(span(100, 109)).num_tokens == 4


# -- refusals ------------------------------------------------------------------------------------


def test_what_a_hit_takes_out_of_the_cache_counts() -> None:
    """vLLM: hit blocks on the free queue count against capacity; a refusal changes nothing."""
    cache = Cache(FULL, num_blocks=4)
    cache.start(0, span(0, 8))
    cache.start(1, span(50, 58))
    cache.free(0)
    cache.add(2)
    prompt = [*span(0, 8), 9]
    hit = cache.blocks.match_prefix(2, ids(prompt))
    assert hit.num_tokens == 8
    before = cache.state()
    verdict = cache.extend(2, prompt, hit=hit)
    assert isinstance(verdict, NotNow)
    assert (verdict.need_bytes, verdict.free_bytes) == (3 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert verdict.holders == (1,)
    assert cache.state() == before
    # The same blocks held by another cost nothing.
    cache.free(1)
    cache.start(3, span(0, 8))
    cache.start(4, [1])
    hit = cache.blocks.match_prefix(2, ids(prompt))
    assert cache.extend(2, prompt, hit=hit) is FITS


def test_without_caching_nothing_is_found() -> None:
    """vLLM: no hits; and full is full."""
    cache = Cache(FULL, num_blocks=4, caching=False)
    cache.start(0, span(0, 12))
    hit = cache.lookup(span(0, 12))
    assert (hit.num_tokens, hit.shortfall) == (0, "strategy")
    cache.add(1)
    assert isinstance(cache.extend(1, span(0, 5)), NotNow)
    cache.free(0)
    assert cache.num_cached == cache.blocks.pools.committed_bytes == 0
    assert cache.extend(1, span(0, 5)) is FITS
    assert len(cache.blocks.index) == len({cache.blocks.index.root()})


# -- a hit shorter than it could be says why -----------------------------------------------------


def reason(hit: PrefixHit) -> tuple[int, str]:
    return hit.num_tokens, hit.shortfall


def test_shortfalls() -> None:
    cache = Cache(FULL, num_blocks=8)
    assert reason(cache.lookup(span(0, 9))) == (0, "unknown")
    cache.start(0, span(0, 12))
    assert reason(cache.lookup(span(0, 9))) == (8, "")
    assert reason(cache.lookup(span(0, 13))) == (12, "")
    assert reason(cache.lookup(span(0, 14))) == (12, "unknown")
    assert reason(cache.lookup([*span(0, 6), 99, 99])) == (6, "unknown")


def test_a_gap_is_told_from_an_end() -> None:
    """The second block is written anew by its only holder, while the third is still cached."""
    cache = Cache(FULL, num_blocks=8)
    cache.start(0, span(0, 12))
    cache.trim(0, 6)
    cache.extend(0, [99])
    assert reason(cache.lookup(span(0, 13))) == (4, "evicted")
    # A sequence that computes the block again closes the gap, and finds the third at its end.
    assert cache.start(1, span(0, 8)) == 4
    assert reason(cache.lookup(span(0, 13))) == (12, "")


# -- forgetting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("granule_blocks", [1, 2])
def test_what_is_forgotten_is_found_by_no_prompt(granule_blocks: int) -> None:
    """Neither what it computed nor what it began with; other holders go on, and may share anew."""
    cache = Cache(FULL, sliding(5), STATE, num_blocks=60, granule_blocks=granule_blocks)
    cache.start(0, span(0, 12))
    assert cache.keep_state(0)
    cache.start(1, span(0, 24))
    cache.fork(1, 2)
    cache.extend(1, span(24, 34))
    cache.start(3, span(50, 60))
    cache.blocks.free(1, forget=True)
    cache.blocks.check()
    assert cache.lookup(span(0, 34)).num_tokens == 0
    cache.extend(2, span(70, 80))
    cache.extend(0, span(12, 20))
    assert cache.start(4, span(0, 30)) == 0
    cache.free(0, 2, 3, 4)
    assert cache.num_held == 0
    assert cache.blocks.reset_prefix_cache()
    assert cache.blocks.pools.committed_bytes == 0


def test_a_lone_sequence_that_is_forgotten_leaves_no_page() -> None:
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 19))
    cache.blocks.free(0, forget=True)
    cache.blocks.check()
    assert (cache.num_held, cache.num_cached, cache.blocks.pools.committed_bytes) == (0, 0, 0)
    cache.end_step()
    assert cache.lookup(span(0, 19)).num_tokens == 0
