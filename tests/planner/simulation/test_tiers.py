"""Tiers in a simulation: what they save, what they hold, and that one seed has one result."""

from dataclasses import replace
from typing import Any

import pytest

from planner.fleets import BLOCK_BYTES, FULL, WINDOW, fleet_of, request, spec_of
from quire.config import EngineConfig
from quire.engine.scheduling.step_costs import LoadTimes
from quire.engine.sequence import Sequence
from quire.errors import ConfigError
from quire.planner.planned_tiers import TIER_SPEEDS, TierTable, planned_tiers
from quire.planner.simulation.result import SimulationResult
from quire.planner.simulation.simulator import Fleet, simulate
from quire.planner.simulation.virtual_carrier import VirtualCarrier
from quire.traces import TraceRequest

POOL_BLOCKS = 24
FAST = "memory=10,10,0"


def forgetful(**options: Any) -> Fleet:
    """A pool that holds two prompts, and keeps none of those that come in turn: it goes by LRU."""
    fleet = fleet_of(num_blocks=POOL_BLOCKS, **options)
    return replace(fleet, sizes=replace(fleet.sizes, eviction_policy="lru"))


def fleet_with(*addresses: str, speeds: tuple[str, ...] = (FAST,), **options: Any) -> Fleet:
    """A pool that holds two prompts, and tiers."""
    fleet = forgetful(**options)
    config = EngineConfig(kv_tier=addresses)
    groups = fleet.spec.groups
    tiers = planned_tiers(config, groups, block_size=16, table=TierTable.of(speeds, ()))
    return replace(fleet, tiers=tiers, tier_write="always")


def in_turn(num_prompts: int = 6, num_turns: int = 3, gap_s: float = 1.0) -> list[TraceRequest]:
    """Prompts of ten blocks, one after the other, which the pool forgets before they come again."""
    return [
        request(gap_s * number, 160, 4, *(100 * (number % num_prompts) + i for i in range(5)))
        for number in range(num_prompts * num_turns)
    ]


def run(fleet: Fleet, trace: list[TraceRequest] | None = None) -> SimulationResult:
    return simulate(in_turn() if trace is None else trace, fleet)


def test_what_the_pool_has_forgotten_comes_from_a_tier() -> None:
    without, found = run(forgetful()), run(fleet_with("memory:?size=1GiB"))
    assert without.prefix_hit_tokens == 0
    assert without.tiers is None
    totals = found.tiers
    assert totals is not None
    # The last turns find all full blocks but the one of the last token.
    assert totals.hit_tokens == found.prefix_hit_tokens == 12 * 144
    assert totals.stored_blocks == 60
    assert (totals.num_late, totals.late_tokens, totals.evicted_tokens) == (0, 0, 0)
    assert totals.saved_s > 0
    (tier,) = totals.tiers
    assert tier.num_records == 60
    assert tier.hit_tokens == totals.hit_tokens
    assert tier.read_bytes > 12 * 9 * BLOCK_BYTES
    assert found.latencies["ttft_s"]["mean"] < without.latencies["ttft_s"]["mean"]


def test_a_small_tier_evicts_and_a_larger_one_behind_it_has_the_rest() -> None:
    table = ("memory=10,10,0", "file=1,1,0.1")
    small = run(fleet_with("memory:?size=700KiB", speeds=table))
    both = run(fleet_with("memory:?size=700KiB", "file:/kv?size=1GiB", speeds=table))
    assert small.tiers is not None
    assert both.tiers is not None
    assert small.tiers.tiers[0].num_evicted > 0
    assert small.tiers.tiers[0].used_bytes <= 700 * 1024
    assert small.tiers.hit_tokens < both.tiers.hit_tokens == 12 * 144
    assert both.tiers.tiers[1].hit_tokens > 0


def test_a_slow_tier_is_not_waited_for() -> None:
    found = run(fleet_with("memory:?size=1GiB", speeds=("memory=0.0001,10,0",)))
    assert found.tiers is not None
    assert found.tiers.hit_tokens < 12 * 144
    usual = run(forgetful()).latencies["ttft_s"]["max"]
    assert found.latencies["ttft_s"]["max"] < 3 * usual  # waits no longer than computing takes


def test_a_tier_that_was_slow_is_tried_again() -> None:
    """Its first loads take a third longer than computing, and later ones next to nothing."""
    fleet = fleet_with("memory:?size=1GiB", speeds=("memory=0.015,10,0",))
    quick = replace(fleet.tiers[0], speed=TIER_SPEEDS["memory"])
    fleet_now = replace(fleet, num_replicas=1)
    carriers: list[VirtualCarrier] = []

    def ended(_: int, sequence: Sequence) -> None:
        if sequence.seq_id == 40:
            for tier in carriers[0].tiers:
                tier.planned = quick

    made = VirtualCarrier.__init__

    def make(self: VirtualCarrier, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        carriers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualCarrier, "__init__", make)
        found = simulate(in_turn(num_turns=30), fleet_now, ended=ended)
    assert found.tiers is not None
    # At most so many prompts go by before one is tried, and each one after it is loaded.
    later = 30 * 6 - 41
    assert (later - 16) * 144 <= found.tiers.hit_tokens < (later + 16) * 144


@pytest.mark.parametrize(("question_s", "block_s"), [(0.02, 0.0005), (0.0, 0.001), (0.3, 0.0)])
def test_loads_of_several_lengths_tell_a_question_from_a_block(
    question_s: float, block_s: float
) -> None:
    times = LoadTimes()
    assert times.seconds(5) == 0
    times.note(10, question_s + 10 * block_s)
    assert times.seconds(20) == pytest.approx(2 * (question_s + 10 * block_s))  # per block at first
    for number in range(40):
        count = 1 + number * 7 % 60
        times.note(count, question_s + count * block_s)
    for count in (1, 30, 200):
        assert times.seconds(count) == pytest.approx(question_s + count * block_s, rel=0.01)
    times.note(30, 100 * times.seconds(30))
    assert times.seconds(30) < 1.3 * (question_s + 30 * block_s)  # one that was far too slow


def test_replicas_share_what_is_shared() -> None:
    apart = run(fleet_with("memory:?size=1GiB", num_replicas=2))
    shared = run(fleet_with("redis://kv", speeds=("redis=10,10,0",), num_replicas=2))
    assert apart.tiers is not None
    assert shared.tiers is not None
    assert apart.tiers.tiers[0].num_records == shared.tiers.tiers[0].num_records == 60
    odd = in_turn(num_prompts=5)
    assert (
        run(fleet_with("memory:?size=1GiB", num_replicas=2), odd).prefix_hit_tokens
        < (
            run(fleet_with("redis://kv", speeds=("redis=10,10,0",), num_replicas=2), odd)
        ).prefix_hit_tokens
    )


def test_windows_and_several_tiers_are_the_same_each_time() -> None:
    fleet = fleet_with("memory:?size=2MiB", "file:/kv", spec=spec_of(FULL, WINDOW))
    first, again = (run(fleet, in_turn(gap_s=0.05)).to_json() for _ in range(2))
    assert first == again
    assert first["tiers"]["hit_tokens"] > 0
    assert (
        sum(tier["hit_tokens"] for tier in first["tiers"]["tiers"])
        == (first["tiers"]["hit_tokens"])
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file", "is not KIND=READ,WRITE"),
        ("file=1", "is not KIND=READ,WRITE"),
        ("=1,1", "is not KIND=READ,WRITE"),
        ("file=1,2,3,4", "is not KIND=READ,WRITE"),
        ("file=0,1", "READ 0 must be above 0"),
        ("file=1,nan", "WRITE nan must be above 0"),
        ("file=1,1,-1", "LATENCY -1 must be from 0"),
    ],
)
def test_a_speed_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierTable.of([text], [])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory:", "needs a size"),
        ("memory:?size=1KiB", "size=1.00 KiB holds no record"),
        ("mine:x", "speed of 'mine' is unknown"),
    ],
)
def test_a_tier_that_cannot_be_planned(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.config.engine_config.TIERS.require", lambda *_: None)
    with pytest.raises(ConfigError, match=message):
        fleet_with(address)


def test_a_size_beside_the_address_is_for_kinds_without_one() -> None:
    config = EngineConfig(kv_tier=("redis://kv", "file:/kv?size=2GiB"))
    table = TierTable.of([], ["redis=1GiB", "file=5GiB"])
    several = planned_tiers(config, spec_of().groups, block_size=16, table=table)
    assert [tier.capacity_bytes for tier in several] == [2**30, 2 * 2**30]
    for text in ("redis", "redis=", "redis=0"):
        with pytest.raises(ConfigError, match="--tier-size"):
            TierTable.of([], [text])
