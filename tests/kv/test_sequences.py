"""What sequences do besides growing: look ahead, bring tokens along, pin, fork and go back."""

import numpy as np
import pytest

from kv.caches import BLOCK_BYTES, FULL, SIZE, STATE, Cache, chunked, ids, sliding, span
from quire.kv import FITS, Copy, NotNow, PrefixKeys
from quire.spec import LayerSpec, RecurrentState
from quire.spec.layer_specs import StateTensor

# -- lookahead -----------------------------------------------------------------------------------


def test_lookahead_slots_get_room_without_counting() -> None:
    """vLLM: draft tokens have slots before it is known whether they stay."""
    cache = Cache(FULL, num_blocks=10)
    cache.add(0)
    cache.extend(0, span(0, 5), lookahead_tokens=4)
    assert len(cache.table(0)) == 3
    row = cache.blocks.tables.rows[0]
    assert cache.blocks.tables.num_tokens[row] == 5
    blocks = cache.table(0)
    cache.extend(0, span(5, 9), lookahead_tokens=3)
    assert cache.table(0) == blocks
    cache.extend(0, span(9, 10), lookahead_tokens=4)
    assert cache.table(0)[:3] == blocks
    assert len(cache.table(0)) == 4


@pytest.mark.parametrize("lookahead", range(6))
@pytest.mark.parametrize("length", range(1, 10))
def test_blocks_for_tokens_and_lookahead(length: int, lookahead: int) -> None:
    """As many as all of them fill, whether they come at once or after what was there."""
    for first in range(length + 1):
        cache = Cache(FULL, num_blocks=10)
        cache.add(0)
        cache.extend(0, span(0, first))
        cache.extend(0, span(first, length), lookahead_tokens=lookahead)
        assert len(cache.table(0)) == -(-(length + lookahead) // SIZE)


def test_lookahead_is_part_of_the_question() -> None:
    cache = Cache(FULL, num_blocks=2)
    cache.add(0)
    assert isinstance(cache.extend(0, span(0, 6), lookahead_tokens=3), NotNow)
    assert cache.extend(0, span(0, 6), lookahead_tokens=2) is FITS


def test_lookahead_does_not_move_a_window() -> None:
    """What a rejected draft leaves must still have its window."""
    cache = Cache(sliding(5), num_blocks=20)
    cache.start(0, span(0, 8))
    cache.extend(0, [8], lookahead_tokens=12)
    assert [block >= 0 for block in cache.table(0)] == [False, *[True] * 5]
    cache.extend(0, span(9, 14))
    assert len(cache.table(0)) == 6


def test_rejected_drafts_are_given_back() -> None:
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 5))
    cache.extend(0, span(5, 14), lookahead_tokens=4)
    assert len(cache.table(0)) == 5
    cache.trim(0, 7)
    assert len(cache.table(0)) == 2
    cache.extend(0, [90, 91, 92])
    assert cache.lookup([*span(0, 7), 90, 91]).num_tokens == 8


def test_forked_lookahead_is_not_written_by_both() -> None:
    """Room that is shared by a fork is copied or replaced before it is written."""
    cache = Cache(FULL, num_blocks=20)
    cache.add(0)
    cache.extend(0, span(0, 5), lookahead_tokens=4)
    cache.fork(0, 1)
    cache.extend(0, span(5, 12))
    cache.extend(1, span(105, 112))
    assert set(cache.table(0)[1:]).isdisjoint(cache.table(1)[1:])
    for seq_id in (0, 1):
        cache.extend(seq_id, [1])


def test_recurrent_drafts_have_states_of_their_own() -> None:
    """One state, and one more for each draft token that may be undone: at any length."""
    states = (StateTensor(name="state", shape=(BLOCK_BYTES,), dtype="int8"),)
    cache = Cache(RecurrentState(states=states, num_speculative_blocks=3), num_blocks=20)
    cache.start(0, span(0, 1))
    for token in range(1, 20):
        cache.extend(0, [token], lookahead_tokens=3)
        assert len(set(cache.table(0))) == 4


# -- tokens from outside -------------------------------------------------------------------------


def test_external_tokens_follow_the_hit() -> None:
    """vLLM: room for what an outside store brings, behind what is here already."""
    cache = Cache(FULL, num_blocks=10)
    cache.start(0, span(0, 8))
    blocks = cache.table(0)
    cache.add(1)
    hit = cache.blocks.match_prefix(1, ids(span(0, 20)))
    verdict = cache.extend(1, span(0, 20), hit=hit, external_tokens=8, lookahead_tokens=3)
    assert verdict is FITS
    assert cache.table(1)[:2] == blocks
    assert len(cache.table(1)) == 6
    assert cache.lookup(span(0, 21)).num_tokens == 20


def test_external_tokens_without_a_hit() -> None:
    cache = Cache(FULL, num_blocks=10)
    cache.add(0)
    assert cache.extend(0, span(0, 11), external_tokens=8) is FITS
    assert len(cache.table(0)) == 3


def test_external_tokens_in_part_of_a_block() -> None:
    cache = Cache(FULL, num_blocks=10)
    cache.start(0, span(0, 8))
    cache.add(1)
    prompt = [*span(0, 6), *span(50, 60)]
    hit = cache.blocks.match_prefix(1, ids(prompt))
    assert cache.extend(1, prompt, hit=hit, external_tokens=5) is FITS
    cache.extend(1, span(60, 64))
    cache.extend(0, [8])


@pytest.mark.parametrize("preempt", [False, True])
def test_external_tokens_in_three_groups(preempt: bool) -> None:
    """vLLM: local hit and tokens from outside; no block is handed out twice, no count drifts,
    also when the sequence is preempted and comes back."""
    cache = Cache(FULL, sliding(5), chunked(8), num_blocks=40)
    cache.start(0, span(0, 16))
    cache.free(0)
    for turn in range(4):
        cache.add(1)
        hit = cache.blocks.match_prefix(1, ids(span(0, 30)))
        assert hit.num_tokens in (16, 28, 29)
        more = min(8, 29 - hit.num_tokens)
        assert cache.extend(1, span(0, 30), hit=hit, external_tokens=more) is FITS
        # Windows begin where the first token that is computed here reads, behind what is brought.
        begin = hit.num_tokens + more
        assert cache.table(1, 1).count(-1) == (begin - 4) // SIZE
        assert cache.table(1, 2).count(-1) == begin // 8 * 2
        cache.start(2, span(500 + turn, 520 + turn))
        for group in range(3):
            assert set(cache.held(1, group)).isdisjoint(cache.held(2, group))
        cache.free(2)
        if not preempt:
            cache.extend(1, span(30, 33))
        cache.free(1)
    assert cache.num_held == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_a_block_that_was_brought_in_part_is_read_by_no_other(is_known: bool) -> None:
    """A window of six needs token 11 of what comes from outside, and not tokens 8 to 10 beside it.

    What their block holds must not be found: neither under a new node, nor under one that is known
    and has lost its own.
    """
    cache = Cache(FULL, sliding(6), num_blocks=60)
    prompt = span(0, 30)
    cache.start(0, prompt[:8])
    if is_known:
        cache.start(2, prompt[:12])  # computes the block whole …
        cache.blocks.pools.forget(1, np.array(cache.table(2, 1)[2:]))  # … and it is evicted
        cache.end_step()
    cache.add(1)
    hit = cache.blocks.match_prefix(1, ids(prompt[:9]))
    assert hit.num_tokens == 8
    assert cache.extend(1, prompt[:20], hit=hit, external_tokens=8) is FITS
    assert cache.table(1, 1)[:2] == [-1, -1]
    assert cache.table(1, 1)[2] >= 0
    assert cache.lookup([*prompt[:12], 777]).num_tokens == 8
    cache.start(3, [*prompt[:12], 777])  # reads what it finds


@pytest.mark.parametrize("others", [0, 20])
def test_a_block_that_was_brought_in_part_is_known_for_it_until_it_is_full(others: int) -> None:
    """A window of two needs token 9 from outside, not token 8, and goes on in their block."""
    cache = Cache(FULL, sliding(2), num_blocks=80)
    prompt = span(0, 20)
    cache.start(0, prompt[:8])
    cache.add(1)
    hit = cache.blocks.match_prefix(1, ids(prompt[:9]))
    assert cache.extend(1, prompt[:11], hit=hit, external_tokens=2) is FITS
    for other in range(others):  # more than there are rows at first
        cache.start(10 + other, [900 + other])
    cache.extend(1, prompt[11:13])
    assert cache.start(2, [*prompt[:9], 777]) == 8
    # The sequence that has its place in the tables afterwards writes its blocks whole.
    cache.free(1)
    cache.start(3, span(300, 312), read=False)
    assert cache.lookup(span(300, 313)).num_tokens == 12


def test_external_tokens_bring_their_state() -> None:
    """A snapshot of an earlier state is of no use then."""
    cache = Cache(STATE, num_blocks=10)
    cache.start(0, span(0, 4))
    cache.keep_state(0)
    cache.add(1)
    hit = cache.blocks.match_prefix(1, ids(span(0, 20)))
    assert hit.num_tokens == 4
    assert cache.extend(1, span(0, 12), hit=hit, external_tokens=4) is FITS
    assert not any(isinstance(change, Copy) for change in cache.changes)
    cache.extend(1, [12])


def test_a_begun_sequence_takes_no_hit() -> None:
    cache = Cache(FULL, num_blocks=10)
    cache.start(0, span(0, 4))
    with pytest.raises(AssertionError, match="has begun already"):
        cache.extend(0, [4], external_tokens=1)


# -- pins ----------------------------------------------------------------------------------------

PIN = 77


def test_a_pinned_prefix_is_not_evicted() -> None:
    cache = Cache(FULL, num_blocks=6)
    cache.start(0, span(0, 11))
    assert cache.blocks.pin(PIN, ids(span(0, 11))) == 8
    cache.free(0)
    cache.start(1, span(500, 516))
    cache.free(1)
    assert cache.lookup(span(0, 11)).num_tokens == 8
    cache.add(2)
    verdict = cache.extend(2, span(500, 520))
    assert isinstance(verdict, NotNow)
    assert verdict.holders == (PIN,)
    cache.free(PIN)
    assert cache.num_held == 0
    assert cache.extend(2, span(600, 620)) is FITS


def test_a_pin_holds_what_there_is() -> None:
    """Whole blocks under its own keys; nothing is no mistake."""
    cache = Cache(FULL, num_blocks=9)
    salt = PrefixKeys(salt="a")
    cache.start(0, span(0, 10), keys=salt)
    assert cache.blocks.pin(1, ids(span(0, 10))) == 0
    assert cache.blocks.pin(2, ids(span(0, 8)), salt) == 8
    assert cache.blocks.pin(3, ids(span(0, 7)), salt) == 4
    assert cache.blocks.pin(4, ids([*span(0, 6), 99, 99]), salt) == 4
    with pytest.raises(KeyError):
        cache.blocks.pin(4, ids([1]))
    cache.blocks.check()
    cache.free(0)
    assert cache.num_held == 2
    cache.free(1, 2, 3, 4)
    assert cache.num_held == 0


def test_a_pin_behind_a_window_holds_the_window() -> None:
    cache = Cache(FULL, sliding(5), STATE, num_blocks=40)
    cache.add(0)
    for start in range(0, 16, SIZE):
        cache.extend(0, span(start, start + SIZE))
    cache.keep_state(0)
    assert cache.blocks.pin(PIN, ids(span(0, 16))) == 16
    cache.free(0)
    cache.blocks.resize(0)
    cache.end_step()
    assert len(cache.held(PIN, 0)) == 4
    assert len(cache.held(PIN, 1)) == 1  # tokens 12 … 15
    assert len(cache.held(PIN, 2)) == 1
    cache.blocks.resize(cache.capacity_bytes)
    assert cache.start(1, span(0, 18)) == 16
    cache.extend(1, [18])


def test_a_pin_ends_where_its_window_is_whole() -> None:
    """Partly equal blocks do not count: where the pin ends, all that is read there is held."""
    cache = Cache(FULL, sliding(4), num_blocks=6)
    cache.add(0)
    for token in range(12):
        cache.extend(0, [token])
    cache.free(0)
    cache.start(1, [500])  # the window's first two blocks go, being the ones let go first
    cache.free(1)
    num_tokens = cache.blocks.pin(PIN, ids([*span(0, 11), 99]))
    cache.blocks.check()
    cache.free(PIN)
    assert num_tokens in (0, 8)
    if num_tokens == 8:
        assert cache.lookup(span(0, 9)).num_tokens == 8


# -- forks ---------------------------------------------------------------------------------------


def test_a_fork_takes_nothing_and_copies_what_it_writes() -> None:
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 10))
    source = cache.table(0)
    for seq_id in (1, 2):
        cache.fork(0, seq_id)
    assert cache.num_held == 3
    for seq_id in (1, 2):
        cache.extend(seq_id, [50 + seq_id])
        (copy,) = (change for change in cache.changes if isinstance(change, Copy))
        own = cache.table(seq_id)[2]
        assert copy == Copy(0, source[2] * SIZE, own * SIZE, 2)
    cache.extend(0, [50])  # the last writes where it is
    assert not any(isinstance(change, Copy) for change in cache.changes)
    assert cache.table(0) == source


def test_all_forks_write_in_one_step() -> None:
    """All but one of them need a copy."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 10))
    for seq_id in (1, 2):
        cache.fork(0, seq_id)
    assert cache.extend_each({0: [50], 1: [51], 2: [52]}) == 3
    assert sum(isinstance(change, Copy) for change in cache.changes) == 2
    assert len({cache.table(seq_id)[2] for seq_id in (0, 1, 2)}) == 3
    assert cache.extend_each({0: [60], 1: [61], 2: [62]}) == 3


@pytest.mark.parametrize("specs", [(FULL,), (FULL, sliding(5)), (FULL, chunked(8)), (STATE,)])
def test_beams_come_and_go(specs: tuple[LayerSpec, ...]) -> None:
    """Beam search: each step forks the better half and drops the other."""
    cache = Cache(*specs, num_blocks=60)
    cache.start(0, span(0, 6))
    beams = [0]
    for step in range(12):
        beams = beams[-2:]
        for seq_id in list(beams):
            new_id = 10 * (step + 1) + len(beams)
            cache.fork(seq_id, new_id)
            beams.append(new_id)
        assert cache.extend_each({seq_id: [1000 + seq_id] for seq_id in beams}) == len(beams)
        for seq_id in beams[:-2]:
            cache.free(seq_id)
    cache.free(*beams[-2:])
    assert cache.num_held == 0


# -- going back ----------------------------------------------------------------------------------


def test_going_back_into_what_others_share_copies_it() -> None:
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 12))
    cache.fork(0, 1)
    cache.trim(1, 6)
    cache.extend(1, span(70, 75))
    assert cache.table(1)[0] == cache.table(0)[0]
    assert cache.table(1)[1] != cache.table(0)[1]
    cache.extend(0, [12])
    assert cache.lookup(span(0, 13)).num_tokens == 12
    assert cache.lookup([*span(0, 6), 70, 71, 1]).num_tokens == 8


def test_going_back_into_what_is_cached_forgets_it() -> None:
    """The only holder writes in place: what stood there is found no more."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 8))
    blocks = cache.table(0)
    cache.trim(0, 6)
    assert cache.lookup(span(0, 9)).num_tokens == 8  # nothing is overwritten yet
    cache.extend(0, [70])
    assert cache.table(0) == blocks
    assert cache.lookup(span(0, 9)).num_tokens == 4


def test_going_back_and_forth_again() -> None:
    """The same tokens again are the same blocks again; others are entered beside them."""
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 12))
    for num_tokens in (11, 8, 6, 4, 1, 0):
        cache.trim(0, num_tokens)
        cache.extend(0, span(num_tokens, 12))
        assert cache.lookup(span(0, 13)).num_tokens == 12
    cache.trim(0, 5)
    cache.extend(0, span(90, 95))
    assert cache.lookup([*span(0, 5), *span(90, 94)]).num_tokens == 8


def test_going_back_to_where_a_window_has_passed_is_refused() -> None:
    cache = Cache(FULL, sliding(5), num_blocks=40)
    cache.start(0, span(0, 16))
    cache.extend(0, span(16, 20))
    cache.trim(0, 16)
    before = cache.state()
    for num_tokens in (10, 15):  # token 15 would read token 11
        with pytest.raises(ValueError, match=f"cannot go back to {num_tokens} tokens"):
            cache.trim(0, num_tokens)
    assert cache.state() == before
    cache.extend(0, span(30, 34))


def test_going_back_without_caching() -> None:
    cache = Cache(FULL, num_blocks=9, caching=False)
    cache.start(0, span(0, 8))
    for num_tokens in (7, 3, 0):
        cache.trim(0, num_tokens)
        assert len(cache.table(0)) == -(-num_tokens // SIZE)
        cache.extend(0, span(50, 55))
