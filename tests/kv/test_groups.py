"""Several groups under one prefix: the longest hit that all have, and what each may forget.

Full attention reads every token, a window the last few, a chunk those since its beginning, and a
recurrent layer one state. What the next token does not read need not be there.
"""

from collections.abc import Sequence

import numpy as np
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
    sliding,
    span,
)
from quire.kv import Copy
from quire.kv.eviction_queue import Ids
from quire.spec import ChunkedAttention, FullAttention, LayerSpec, RecurrentState, SlidingWindow
from quire.spec.layer_specs import StateTensor

NUM_BLOCKS = 6  # of the prompts whose blocks are dropped here
PROMPT = span(0, NUM_BLOCKS * SIZE)


def computed(*specs: LayerSpec) -> Cache:
    """A cache that has all blocks of ``PROMPT``, and its states, and no sequence holds them."""
    cache = Cache(*specs, num_blocks=100)
    cache.add(0)
    for start in range(0, len(PROMPT), SIZE):
        cache.extend(0, PROMPT[start : start + SIZE])
        assert cache.keep_state(0) == (STATE in specs)
    cache.free(0)
    return cache


def nodes(cache: Cache) -> Ids:
    index = cache.blocks.index
    root = index.root()
    rows = index.rows(index.walk(root, np.array(PROMPT, np.int32).tobytes()))
    index.decref(root)
    return rows


def drop(cache: Cache, group: int, columns: Sequence[int]) -> None:
    """Evict just these blocks of ``PROMPT`` in a group."""
    blocks = cache.blocks.index.blocks[group][nodes(cache)[list(columns)]]
    cache.blocks.pools.forget(group, blocks.astype(np.intp))
    cache.end_step()


def read_by(spec: LayerSpec, token: int) -> set[int]:
    """Columns of the blocks that a token reads from before itself, from the definitions."""
    match spec:
        case SlidingWindow():
            first = token - spec.window + 1
        case ChunkedAttention():
            first = token - token % spec.chunk
        case RecurrentState():
            first = token - 1
        case _:
            first = 0
    return {max(0, at) // SIZE for at in range(max(0, first), token)}


# -- which hits there are ------------------------------------------------------------------------

KINDS = [FULL, LATENT, sliding(1), sliding(2), sliding(5), sliding(9), chunked(8), STATE]


@given(
    specs=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    gone=st.lists(st.sets(st.integers(0, NUM_BLOCKS - 1)), min_size=3, max_size=3),
    length=st.integers(2, len(PROMPT)),
)
@settings(max_examples=examples(50, of=150), deadline=None)
def test_the_longest_common_hit(specs: list[LayerSpec], gone: list[set[int]], length: int) -> None:
    """vLLM: whichever blocks are evicted in whichever groups, the hit is the longest that all
    groups can serve. Against brute force over all block ends and the prompt's own end."""
    cache = computed(*specs)
    columns = gone[: len(specs)]
    # What some group keeps of a node keeps the node; where none does, all after it are lost.
    lost = set.intersection(*columns)
    for group, dropped in enumerate(columns):
        drop(cache, group, sorted(dropped - lost))
    present = len(nodes(cache))
    for column in sorted(lost, reverse=True):
        for group in range(len(specs)):
            if column < present:
                drop(cache, group, [column])

    def serves(num_tokens: int) -> bool:
        if num_tokens % SIZE and STATE in specs:
            return False  # a state is kept at the end of a block only
        return all(
            read_by(spec, num_tokens).isdisjoint(dropped)
            for spec, dropped in zip(specs, columns, strict=True)
        )

    limit = length - 1
    reachable = min(limit, len(nodes(cache)) * SIZE)
    candidates = [*range(0, reachable + 1, SIZE), reachable]
    wanted = max(each for each in candidates if serves(each))
    assert cache.lookup(PROMPT[:length]).num_tokens == wanted
    assert cache.start(1, PROMPT[:length]) == wanted


@pytest.mark.parametrize(
    ("window", "present", "hit"),
    [
        # by hand, at blocks of 4: a hit of n tokens needs tokens n - window + 1 … n - 1
        (4, "......", 0),
        (4, "x.....", 4),
        (4, ".x....", 8),  # tokens 5, 6, 7
        (4, "x.x.x.", 20),
        (5, "....x.", 20),  # tokens 16 … 19: a window of 5 sees 4 others
        (6, "....x.", 0),  # tokens 15 … 19
        (6, "...xx.", 20),
        (6, "xx..x.", 8),
        (9, ".xx...", 12),
        (9, "x.xx..", 16),
        (9, "x.x.x.", 4),
        (1, "......", 0),
    ],
)
def test_windows_by_hand(window: int, present: str, hit: int) -> None:
    """vLLM: a window's hit ends behind the last run of blocks that is long enough."""
    cache = computed(sliding(window), sliding(NUM_BLOCKS * SIZE))  # the second keeps the nodes
    drop(cache, 0, [at for at, kept in enumerate(present) if kept == "."])
    found = cache.lookup([*PROMPT, 99])
    if window == 1:  # reads nothing from before
        assert found.num_tokens == len(PROMPT)
        return
    assert found.num_tokens == hit
    assert found.shortfall == "window"


@pytest.mark.parametrize(
    ("present", "hit"),
    [("......", 16), ("xx....", 16), (".....x", 16), ("....xx", 24), ("....x.", 20)],
)
def test_chunks_by_hand(present: str, hit: int) -> None:
    """vLLM: at a chunk's beginning nothing before is read, so a hit there needs no block."""
    cache = computed(chunked(16), FULL)
    drop(cache, 0, [at for at, kept in enumerate(present) if kept == "."])
    assert cache.lookup([*PROMPT, 99]).num_tokens == hit


def test_what_lies_outside_a_window_may_go() -> None:
    """vLLM: the hit is as long as before, and its table begins with what is passed."""
    cache = computed(FULL, sliding(6), sliding(10))
    drop(cache, 1, [0, 1, 2, 3])
    drop(cache, 2, [0, 1, 2])
    assert cache.start(1, [*PROMPT, 99]) == len(PROMPT)
    assert [block >= 0 for block in cache.table(1, 1)] == [False] * 4 + [True] * 3
    assert [block >= 0 for block in cache.table(1, 2)] == [False] * 3 + [True] * 4
    assert cache.refs(1, 0) == [1] * 7


def test_groups_that_diverge_meet_where_all_can() -> None:
    cache = computed(FULL, sliding(6))
    drop(cache, 0, [5])
    drop(cache, 1, [4])
    # 24 fails in both, 20 in the window (16 … 19), and so does 18 …
    hit = cache.lookup([*PROMPT, 99])
    assert (hit.num_tokens, hit.limit) == (16, 24)
    assert hit.shortfall in ("evicted", "window")


def test_why_a_hit_is_not_longer() -> None:
    for specs, group, why in (
        ((FULL, sliding(6)), 0, "evicted"),
        ((FULL, sliding(6)), 1, "window"),
        ((FULL, chunked(8)), 1, "window"),
        ((FULL, STATE), 1, "state"),
    ):
        cache = computed(*specs)
        drop(cache, group, [4])
        hit = cache.lookup(PROMPT[:21])
        assert (hit.num_tokens, hit.shortfall) == (16, why)


# -- what is forgotten while running -------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_a_window_passes_token_by_token(window: int) -> None:
    """vLLM: a block goes exactly when the next token no longer reads its last token."""
    cache = Cache(sliding(window), FULL, num_blocks=100)
    cache.add(0)
    for token in range(40):
        cache.extend(0, [token])
        last_read = max(0, token - window + 1)
        held = [block >= 0 for block in cache.table(0)]
        assert held == [column >= last_read // SIZE for column in range(token // SIZE + 1)]


def test_the_boundaries_of_a_window_by_hand() -> None:
    """A window of 6 at blocks of 4: token 9 is the first to read nothing of tokens 0 … 3."""
    cache = Cache(sliding(6), num_blocks=100)
    cache.start(0, span(0, 8))
    num_held = []
    for token in range(8, 18):
        cache.extend(0, [token])
        num_held.append(len(cache.held(0)))
    #                    8  9 10 11 12 13 14 15 16 17
    assert num_held == [3, 2, 2, 2, 3, 2, 2, 2, 3, 2]


def test_a_chunk_is_passed_at_once() -> None:
    """vLLM: with the first token of the next chunk, and not before."""
    cache = Cache(chunked(8), num_blocks=100)
    cache.start(0, span(0, 7))
    num_held = []
    for token in range(7, 18):
        cache.extend(0, [token])
        num_held.append(len(cache.held(0)))
    #                    7  8  9 10 11 12 13 14 15 16 17
    assert num_held == [2, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1]


def test_a_long_step_keeps_what_its_first_token_reads() -> None:
    cache = Cache(sliding(6), num_blocks=100)
    cache.start(0, span(0, 12))
    cache.extend(0, span(12, 40))
    assert [block >= 0 for block in cache.table(0)] == [False] + [True] * 9
    cache.extend(0, [40])
    assert [block >= 0 for block in cache.table(0)] == [False] * 8 + [True] * 3


def test_passed_blocks_are_the_first_to_go() -> None:
    """vLLM: what no window can reach again must not push out what one can."""
    cache = Cache(sliding(6), num_blocks=10)
    cache.add(0)
    for token in range(40):
        cache.extend(0, [token])
    cache.free(0)
    assert cache.num_cached == 10
    for seq_id in range(1, 9):
        cache.start(seq_id, [1000 + seq_id])
    assert cache.num_cached == 2
    assert cache.lookup(span(0, 41)).num_tokens == 40


def test_a_window_hit_goes_on_after_its_prefix_is_gone() -> None:
    """Nodes outlive their blocks, so what follows is found; and is found by others in turn."""
    cache = Cache(sliding(6), num_blocks=4)
    cache.add(0)
    for token in range(40):
        cache.extend(0, [token])
    cache.free(0)
    assert cache.start(1, span(0, 41)) == 40
    for token in range(41, 60):
        cache.extend(1, [token])
    cache.free(1)
    assert cache.lookup(span(0, 61)).num_tokens == 60


@pytest.mark.parametrize("specs", [(sliding(1),), (chunked(4),), (sliding(1), chunked(4))])
def test_a_hit_that_needs_no_block(specs: tuple[LayerSpec, ...]) -> None:
    """Nothing of the prefix is held; its nodes must not vanish under the sequence."""
    cache = Cache(*specs, num_blocks=2 * len(specs))
    cache.start(0, span(0, 5))
    cache.free(0)
    hit = cache.start(1, [*span(0, 8), 70])
    assert hit in (0, 4)
    cache.extend(1, span(71, 75))
    cache.free(1)
    cache.start(2, [*span(0, 4), *span(80, 84)])


def test_a_block_without_its_beginning_is_read_by_no_other() -> None:
    """Token 10 begins a chunk, so it needs nothing of the block that it goes on in."""
    cache = computed(FULL, chunked(5))
    drop(cache, 1, [2])
    own = [*PROMPT[:10], 901, 902, 903]
    assert cache.start(1, own) == 10
    assert cache.table(1, 1)[2] >= 0
    # Token 9 would read token 8, which lies in that block only where it was computed.
    assert cache.start(2, [*own[:9], 777, 778]) == 8


# -- recurrent states ----------------------------------------------------------------------------


def test_a_state_is_kept_at_the_end_of_a_block_only() -> None:
    cache = Cache(FULL, STATE, num_blocks=20)
    cache.start(0, span(0, 7))
    assert not cache.keep_state(0)
    cache.extend(0, [7])
    assert cache.keep_state(0)
    assert not cache.keep_state(0)  # it is kept already
    cache.extend(0, [8])
    hit = cache.lookup(span(0, 12))
    assert (hit.num_tokens, hit.shortfall) == (8, "unknown")


def test_a_state_is_copied_and_not_shared() -> None:
    """The next token uses a state up, so each sequence has its own; the snapshot stays."""
    cache = Cache(STATE, num_blocks=20)
    cache.start(0, span(0, 8))
    cache.keep_state(0)
    cache.free(0)
    for seq_id in (1, 2):
        assert cache.start(seq_id, [*span(0, 8), seq_id]) == 8
        assert sum(isinstance(change, Copy) for change in cache.changes) == 1
    assert cache.table(1) != cache.table(2)
    assert cache.num_cached == 1


def test_a_snapshot_without_room_for_a_copy_is_taken_over() -> None:
    cache = Cache(STATE, num_blocks=2)
    cache.start(0, span(0, 4))
    assert cache.keep_state(0)
    cache.free(0)
    cache.start(5, [7])
    assert cache.start(1, span(0, 6)) == 4
    assert cache.num_cached == 0
    cache.free(1)
    assert cache.lookup(span(0, 6)).num_tokens == 0


def test_a_snapshot_takes_free_bytes_only() -> None:
    cache = Cache(FULL, STATE, num_blocks=3)
    cache.start(0, span(0, 8))
    before = cache.state()
    assert not cache.keep_state(0)
    assert cache.state() == before


def test_a_state_cannot_go_back() -> None:
    for caching in (True, False):
        cache = Cache(FULL, STATE, num_blocks=20, caching=caching)
        cache.start(0, span(0, 8))
        before = cache.state()
        for num_tokens in (1, 6, 7):
            with pytest.raises(ValueError, match=f"cannot go back to {num_tokens} tokens"):
                cache.trim(0, num_tokens)
        assert cache.state() == before
        cache.trim(0, 0)
        assert cache.num_held == 0


def test_a_fork_copies_the_state_of_the_first_who_goes_on() -> None:
    cache = Cache(STATE, num_blocks=20)
    cache.start(0, span(0, 6))
    cache.fork(0, 1)
    assert cache.table(0) == cache.table(1)
    cache.extend(1, [50])
    assert cache.table(0) != cache.table(1)
    cache.extend(0, [60])
    assert not any(isinstance(change, Copy) for change in cache.changes)


# -- bytes ---------------------------------------------------------------------------------------

WIDE = FullAttention(num_kv_heads=5, head_dim=3, dtype="bfloat16")  # 60 bytes a token
BIG = RecurrentState(states=(StateTensor(name="s", shape=(7, 11), dtype="float32"),))  # 308 bytes


def test_no_group_is_padded_to_another() -> None:
    """A short prompt of a hybrid takes its own blocks' bytes and no more (vLLM pads them to one
    size, or stretches the attention blocks until they weigh as much as a state)."""
    cache = Cache(FULL, sliding(6), WIDE, BIG, num_blocks=1000)
    cache.start(0, span(0, 12))
    wanted = 3 * BLOCK_BYTES + 3 * BLOCK_BYTES + 3 * SIZE * 60 + 308
    assert cache.blocks.pools.held_bytes == cache.blocks.pools.committed_bytes == wanted
    # Hits are aligned to one block, whatever a state weighs.
    cache.keep_state(0)
    assert cache.start(1, [*span(0, 12), 99]) == 12


def test_what_was_used_longest_ago_goes_first_of_all_groups() -> None:
    cache = Cache(FULL, sliding(9), num_blocks=6)
    for seq_id in range(2):
        cache.start(seq_id, span(100 * seq_id, 100 * seq_id + 4))
        cache.free(seq_id)
    cache.start(2, span(200, 208))  # two blocks in each group: two are evicted
    assert cache.lookup(span(0, 5)).num_tokens == 0
    assert cache.lookup(span(100, 105)).num_tokens == 4


def test_one_group_takes_what_another_gives_back() -> None:
    """Bytes, not blocks, are shared out: caches of other sizes make room for each other."""
    cache = Cache(sliding(5), WIDE, num_blocks=64)
    cache.start(0, span(0, 8))
    cache.free(0)
    assert cache.num_cached * BLOCK_BYTES == 2 * (BLOCK_BYTES + SIZE * 60) // 8 * 8
    cache.start(1, span(50, 58))
    assert cache.blocks.pools.committed_bytes <= cache.capacity_bytes
    assert cache.lookup(span(50, 59)).num_tokens == 8
