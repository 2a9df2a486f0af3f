"""What is empty now and filled later, against what every sequence will hold, one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fleets import BLOCK_BYTES, CACHES, fleet_of, request, spec_of
from quire.kv import Fits, build_accounting
from quire.planner.simulation.simulator import simulate
from quire.planner.simulation.waste import Waste

LENGTHS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=6)
TOKEN_BYTES = BLOCK_BYTES // 16


@settings(max_examples=40)
@given(LENGTHS, st.sampled_from(sorted(CACHES)))
def test_later_is_what_sequences_still_fill_of_what_they_hold(
    lengths: list[tuple[int, int]], case: str
) -> None:
    fleet = fleet_of(case, num_blocks=1000)
    cache = build_accounting(fleet.cache, spec_of(), fleet.sizes)
    waste, filled_bytes = Waste(cache), 0
    for seq_id, (now, more) in enumerate(lengths):
        end = min(now + more, 511)
        held_before = cache.held_bytes
        cache.add(seq_id, max_tokens=end + 1)
        assert isinstance(cache.try_extend(seq_id, min(now, end)), Fits)
        cache.drain()
        waste.came(seq_id, end)
        room_bytes = cache.held_bytes - held_before - min(now, end) * TOKEN_BYTES
        filled_bytes += min(room_bytes, (end - min(now, end)) * TOKEN_BYTES)
    later = waste.later_bytes()
    assert 0 <= later <= cache.usage().wasted_bytes
    if "staggered" not in case:  # there no two layers have room for as much
        assert later == filled_bytes


def test_free_memory_is_in_pieces_only_if_one_piece_would_do() -> None:
    fleet = fleet_of("contiguous-request", num_blocks=12)
    cache = build_accounting("contiguous", spec_of(), fleet.sizes)
    waste = Waste(cache)
    for seq_id in range(3):
        cache.add(seq_id, max_tokens=64)
        assert isinstance(cache.try_extend(seq_id, 64), Fits)
        waste.came(seq_id, 63)
    cache.drain()
    for seq_id in (0, 2):
        cache.free(seq_id)
        waste.ended(seq_id)
    cache.drain()
    free_bytes = 8 * BLOCK_BYTES
    assert not waste.is_in_pieces(free_bytes)  # none waits
    cache.add(3, max_tokens=100)
    waste.came(3, 99)
    assert waste.is_in_pieces(free_bytes)
    cache.add(4, max_tokens=500)
    waste.ended(3)
    waste.came(4, 499)
    assert not waste.is_in_pieces(free_bytes)  # too little altogether


SHORT = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40)), min_size=1, max_size=5)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.floats(0, 2), SHORT), min_size=1, max_size=3))
def test_looking_changes_nothing(bursts: list[tuple[float, list[tuple[int, int]]]]) -> None:
    at_s, trace = 0.0, []
    for wait_s, lengths in bursts:
        at_s += wait_s
        trace += [request(at_s, now, more) for now, more in lengths]
    for case in ("contiguous-request", "paged"):
        fleet = fleet_of(case, num_blocks=40)
        plain = simulate(trace, fleet).to_json()
        looked = simulate(trace, fleet, looks_at_waste=True).to_json()
        for name in ("later_fraction", "pieces_fraction"):
            found = looked.pop(name)
            assert plain.pop(name) is None
            assert found is None or 0 <= found <= 1 + 1e-9
        assert looked == plain


def test_a_reserved_maximum_is_mostly_never_filled() -> None:
    trace = [request(0.1 * number, 30, 20) for number in range(40)]
    results = {
        case: simulate(trace, fleet_of(case, num_blocks=128), looks_at_waste=True)
        for case in ("contiguous", "contiguous-request", "paged")
    }
    assert results["contiguous"].later_fraction == pytest.approx(0.02, abs=0.02)
    assert results["contiguous-request"].later_fraction > 0.3
    assert results["paged"].utilization > results["contiguous"].utilization
