"""Grow and copy: how far ahead, what is copied, and the peak while old and new live together."""

from collections.abc import Iterable

import pytest

from kv.geometry import MIB, QWEN3_4B, SMALL, config, spec_of
from quire.kv import Commit, Copy, Fits, Growth, NotNow, Release, StorageOp
from quire.kv.growing import GROWTH, GrowingAccounting
from quire.spec import FullAttention

LAYER_TOKEN_BYTES = 4096  # of Qwen3-4B


def test_a_step_of_4096_tokens() -> None:
    """Seed 0: Qwen3-4B grows by 16 MiB a layer, and all 36 layers copy 576 MiB."""
    cache = GrowingAccounting(QWEN3_4B.groups, config(max_model_len=40_960, growth_tokens=4096))
    cache.add(0)
    cache.try_extend(0, 4096)
    assert cache.usage().committed_bytes == 576 * MIB
    cache.drain()
    cache.try_extend(0, 4097)
    copied = [change for change in cache.drain() if isinstance(change, Copy)]
    assert [copy.num_slots * LAYER_TOKEN_BYTES for copy in copied] == [16 * MIB] * 36
    assert cache.usage().committed_bytes == 2 * 576 * MIB


def test_spare_room_of_a_buffer() -> None:
    """Seed 2: a buffer of 128 holds [1, 32, 17, 64]: upper padding 111, and 110 a token later."""
    spec = spec_of(FullAttention(num_kv_heads=32, head_dim=64, dtype="float16"))
    cache = GrowingAccounting(spec.groups, config(growth_tokens=128))
    cache.add(0)
    cache.try_extend(0, 17)
    assert cache.spare_tokens(0, 0) == 111
    cache.drain()
    cache.try_extend(0, 18)
    assert cache.spare_tokens(0, 0) == 110
    assert cache.drain() == []  # in place


@pytest.mark.parametrize(
    ("growth", "capacities"),
    [
        ("uniform", [100, 100, 200, 300, 900]),
        ("doubling", [100, 100, 200, 400, 1600]),
        ("staggered", [105, 105, 105, 305, 905]),
    ],
)
def test_how_far_ahead(growth: Growth, capacities: list[int]) -> None:
    """Each from the capacity before it; a staggered buffer of layer 68 is 4 longer than 0's."""
    capacity, seen = 0, []
    for needed in (1, 100, 101, 201, 801):
        if needed > capacity:
            capacity = GROWTH[growth](capacity, needed, 100, 68)
        seen.append(capacity)
    assert seen == capacities


def test_only_layers_that_are_full_grow() -> None:
    """Seed 2: staggered capacities spread the copies over as many steps as there are layers."""
    cache = GrowingAccounting(QWEN3_4B.groups, config(growth="staggered", growth_tokens=128))
    cache.add(0)
    cache.try_extend(0, 100)
    cache.drain()
    growing_layers = []
    for num_tokens in range(101, 265):
        cache.try_extend(0, num_tokens)
        growing_layers.append([c.group for c in cache.drain() if isinstance(c, Copy)])
    assert max(map(len, growing_layers)) == 1
    assert [layers for layers in growing_layers if layers] == [[layer] for layer in range(36)]


def test_each_layer_is_given_back_before_the_next_grows() -> None:
    cache = GrowingAccounting(QWEN3_4B.groups, config())
    cache.add(0)
    cache.try_extend(0, 256)
    cache.drain()
    cache.try_extend(0, 257)
    kinds = [type(change) for change in cache.drain()]
    assert kinds == [Commit, Copy, Release] * 36


def test_a_buffer_grows_into_the_other_of_its_two_places() -> None:
    cache = GrowingAccounting(SMALL.groups, config(max_model_len=64, growth_tokens=8))
    cache.add(0)
    places = []
    for num_tokens in (8, 16, 24):
        cache.try_extend(0, num_tokens)
        places.append(cache.table(0, 0).tolist())
    assert places[0] == places[2] != places[1]


def test_old_buffers_are_kept_for_one_step() -> None:
    cache = GrowingAccounting(QWEN3_4B.groups, config(keep_old=True))
    for seq_id in (0, 1):
        cache.add(seq_id)
        cache.try_extend(seq_id, 256)
    cache.drain()
    for seq_id in (0, 1):  # one step: neither may give back what the step still reads
        cache.try_extend(seq_id, 257)
    assert not any(isinstance(change, Release) for change in cache.drain())
    assert cache.usage().committed_bytes == 2 * (256 + 512) * QWEN3_4B.bytes_per_token
    assert {type(change) for change in cache.drain()} == {Release}  # the next, though none grows
    assert cache.usage().committed_bytes == 2 * 512 * QWEN3_4B.bytes_per_token


def test_growing_twice_in_one_step_keeps_only_what_the_step_began_with() -> None:
    """Its two places are both in use then; the one in between has not been read."""
    cache = GrowingAccounting(SMALL.groups, config(keep_old=True))
    cache.add(0)
    for num_tokens in (256, 257, 513):
        cache.try_extend(0, num_tokens)
    assert [type(change) for change in cache.drain()] == [
        *(Commit, Commit, Copy, Release, Commit, Copy),
    ]
    assert cache.usage().committed_bytes == (512 + 768) * SMALL.bytes_per_token
    cache.check()


@pytest.mark.parametrize("keep_old", [False, True])
def test_the_way_there_must_fit_too(keep_old: bool) -> None:
    """36 layers from 256 to 512: freed at once, one old buffer is the most beside the new ones."""
    old, new = 256 * 36, 512 * 36
    peak = (old + new if keep_old else new + 256) * LAYER_TOKEN_BYTES
    for capacity_bytes, fits in ((peak - 1, False), (peak, True)):
        options = dict(capacity_bytes=capacity_bytes, keep_old=keep_old)
        cache = GrowingAccounting(QWEN3_4B.groups, config(**options))
        cache.add(0)
        cache.try_extend(0, 256)
        assert isinstance(cache.try_extend(0, 257), Fits) == fits


def test_who_cannot_hold_old_and_new_must_begin_again() -> None:
    """It fits an empty cache: the only holder that has to end is the one that asks."""
    capacity_bytes = 600 * QWEN3_4B.bytes_per_token
    options = dict(capacity_bytes=capacity_bytes, keep_old=True)
    cache = GrowingAccounting(QWEN3_4B.groups, config(**options))
    cache.add(0)
    cache.try_extend(0, 256)
    verdict = cache.try_extend(0, 257)
    assert isinstance(verdict, NotNow)
    assert verdict.holders == (0,)
    cache.free(0)
    cache.add(0)
    assert isinstance(cache.try_extend(0, 257), Fits)


# -- peaks, as published for 64 sessions from 100 to 1,124 tokens ---------------------------------

NUM_SESSIONS = 64
RUN = 8  # sessions that are really accounted: in lockstep all do the same
PROMPT, LAST = 100, 1124
FINAL_GB = NUM_SESSIONS * LAST * 36 * LAYER_TOKEN_BYTES / 1e9


def replay(changes: Iterable[StorageOp], committed: int) -> tuple[int, int]:
    """(peak, committed) slots of a layer after each change, one by one."""
    peak = committed
    for change in changes:
        if isinstance(change, Copy):
            continue
        slots = change.stop - change.start
        committed += slots if isinstance(change, Commit) else -slots
        peak = max(peak, committed)
    return peak, committed


def peak_gb(growth: Growth, growth_tokens: int, *, keep_old: bool) -> float:
    """The peak of all sessions, which grow in lockstep."""
    cache = GrowingAccounting(
        QWEN3_4B.groups,
        config(growth=growth, growth_tokens=growth_tokens, keep_old=keep_old, max_num_seqs=RUN),
    )
    for seq_id in range(RUN):
        cache.add(seq_id)
    peak = committed = 0
    for num_tokens in range(PROMPT, LAST + 1):
        for seq_id in range(RUN):
            assert isinstance(cache.try_extend(seq_id, num_tokens), Fits)
        highest, committed = replay(cache.drain(), committed)
        peak = max(peak, highest)
    return peak * LAYER_TOKEN_BYTES * NUM_SESSIONS / RUN / 1e9


@pytest.mark.parametrize(
    ("growth", "growth_tokens", "kept_gb", "freed_gb"),
    [
        # Published for "256 more than held"; ours are whole steps from zero. A quarter of the
        # length makes the two meet at the end, where both are full.
        ("uniform", 281, 18.8, 10.6),
        # The same policy. Published from 72 buffers a session (we keep keys and values in one).
        ("staggered", 128, 11.5, 11.3),
        # The same policy, from the same first size.
        ("doubling", 200, 22.7, 15.1),
    ],
)
def test_published_peaks(
    growth: Growth, growth_tokens: int, kept_gb: float, freed_gb: float
) -> None:
    """A published simulation's peaks, in GB. Ours are up to 2 % off: a buffer is whole pages here,
    16 tokens of this model, and one layer's old buffer is the least that lives beside the new.
    """
    assert pytest.approx(10.61, abs=0.005) == FINAL_GB
    assert peak_gb(growth, growth_tokens, keep_old=True) == pytest.approx(kept_gb, rel=0.02)
    assert peak_gb(growth, growth_tokens, keep_old=False) == pytest.approx(freed_gb, rel=0.02)


def test_whole_steps_of_256() -> None:
    """Where ours differs: steps end at 1,024 and 1,280, not at 868 and 1,124."""
    full_gb = FINAL_GB * 1280 / LAST
    kept, freed = (peak_gb("uniform", 256, keep_old=keep_old) for keep_old in (True, False))
    assert kept == pytest.approx(FINAL_GB * (1024 + 1280) / LAST)  # 21.7 GB, published 18.8
    # Seed 2's peak vanishes if each layer's old buffer goes at once: only one of 36 remains.
    assert full_gb < freed < 1.01 * full_gb
    assert peak_gb("staggered", 128, keep_old=True) < 0.55 * kept
