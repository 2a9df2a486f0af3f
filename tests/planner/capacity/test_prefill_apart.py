"""What a plan says of prefill replicas: against simulations of both fleets, and at its limits."""

from dataclasses import replace

import pytest

from planner.places import card
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.planner.capacity import CapacityPlan, peer_of, plan
from quire.planner.hardware import roofline
from quire.planner.planned_tiers import TierTable
from quire.planner.prefill_apart import PrefillApart, prefill_apart
from quire.planner.sequence_memory import PlannedLengths
from quire.planner.simulation.result import SimulationResult
from quire.planner.simulation.simulator import fleet_for, simulate
from quire.planner.subject import find_subject
from quire.traces.synthetic import Gamma, LogNormal, Synthetic

SUBJECT = find_subject("Qwen3-4B")
GPU = card("h100")
COSTS = roofline(SUBJECT, SUBJECT.spec, "h100", 1)
QUICK, SLOW = "peer=50,50,0", "peer=0.5,50,0"


def planned(asked: int = 1024, answered: int = 64, **options: object) -> CapacityPlan:
    config = EngineConfig.from_options(
        **{"cache": "paged", "max_num_seqs": 64, "max_num_batched_tokens": 512, **options}
    )
    request = PlannedLengths(input_tokens=asked, output_tokens=answered)
    return plan(SUBJECT, config, GPU, request=request, compare=False)


def compared(
    found: CapacityPlan, speed: str = QUICK, size: str = "64GiB", **how: float
) -> PrefillApart:
    link = peer_of(found, TierTable.of((speed,), (f"peer={size}",)))
    said = prefill_apart(found, COSTS, link, **{"num_replicas": 1, "num_prefill": 1, **how})  # type: ignore[arg-type]
    assert said is not None
    return said


def simulated(found: CapacityPlan, rate: float, num_prefill: int, speed: str) -> SimulationResult:
    fleet = fleet_for(
        SUBJECT,
        found.config,
        GPU,
        COSTS,
        num_replicas=2 - num_prefill,
        num_prefill=num_prefill,
        routing="least-loaded",
        tier_table=TierTable.of((speed,), ("peer=64GiB",)),
    )
    trace = Synthetic(
        arrivals=Gamma(rate=rate, cv=1.0),
        input_tokens=LogNormal(mean_tokens=found.request.input_tokens),
        output_tokens=LogNormal(mean_tokens=found.request.output_tokens),
        num_requests=150,
        seed=0,
    )
    return simulate(trace, fleet)


@pytest.mark.parametrize("speed", [QUICK, SLOW])
def test_what_a_plan_says_a_simulation_does(speed: str) -> None:
    found = planned()
    said = compared(found, speed)
    together = simulated(found, said.requests_per_s, 0, speed)
    apart = simulated(found, said.requests_per_s, 1, speed)
    for side, result in ((said.together, together), (said.apart, apart)):
        assert side.token_s == pytest.approx(result.latencies["tpot_s"]["mean"], rel=0.25)
    assert said.together.first_token_s == pytest.approx(
        together.latencies["ttft_s"]["mean"], rel=0.4
    )
    # Both say by how much the first token is later.
    assert said.apart.first_token_s is not None
    assert said.apart.first_token_s > said.together.first_token_s
    assert apart.latencies["ttft_s"]["mean"] > together.latencies["ttft_s"]["mean"]
    assert apart.prefill is not None
    moved = said.share * apart.num_requests * said.move.num_bytes  # type: ignore[operator]
    assert apart.prefill.moved_bytes == pytest.approx(moved, rel=0.3, abs=8 * said.move.num_bytes)


def test_the_bytes_of_a_prompt_are_those_of_its_blocks() -> None:
    found = planned(asked=1000)
    move = compared(found).move
    assert move.num_tokens == 992
    least = 992 * SUBJECT.spec.bytes_per_token
    assert least < move.num_bytes < 1.1 * least  # with headers
    some = compared(found, size=str(move.num_bytes // 2)).move
    assert some.num_tokens == 496
    window = replace(found, spec=replace(found.spec, layers=found.spec.layers[:1]))
    assert compared(window).move.num_bytes < move.num_bytes / 30


def test_a_slow_link_loses_and_a_quick_one_is_a_trade() -> None:
    found = planned()
    trade, loses = compared(found), compared(found, SLOW, requests_per_s=20.0)
    assert trade.verdict == "is a trade"
    assert "longest step" in trade.sentence.partition("and lose")[0]
    assert trade.apart.most_requests_per_s < trade.together.most_requests_per_s
    assert loses.verdict == "loses"
    assert "gain nothing" in loses.sentence
    assert loses.share is not None
    assert loses.share < 1
    assert loses.prefill_idle_fraction > trade.prefill_idle_fraction


def test_short_prompts_of_long_answers_leave_prefill_replicas_idle() -> None:
    said = compared(planned(asked=64, answered=512), num_replicas=3)
    assert said.prefill_idle_fraction > 0.8
    assert said.apart.most_requests_per_s == pytest.approx(
        0.75 * said.together.most_requests_per_s, rel=0.1
    )
    assert said.apart.num_sequences == 3 * 64
    assert said.together.num_sequences == 4 * 64


def test_a_rate_that_a_fleet_does_not_carry_is_said() -> None:
    found = planned()
    most = compared(found)
    between = (most.apart.most_requests_per_s + most.together.most_requests_per_s) / 2
    said = compared(found, requests_per_s=between)
    assert said.apart.token_s is None
    assert said.together.token_s is not None
    assert said.trade is None
    assert "falling behind" in said.sentence
    assert compared(found, requests_per_s=1e6).verdict == "loses"


def test_the_door_weighs_as_a_fleet_does() -> None:
    found = planned()
    busy, idle = compared(found), compared(found, requests_per_s=0.1)
    assert busy.trade is not None
    assert busy.trade.pays
    assert idle.trade is not None
    assert idle.trade.here_s < busy.trade.here_s


def test_nothing_is_said_where_nothing_fits() -> None:
    found = planned()
    none = replace(found, cell=replace(found.cell, max_num_seqs=0))
    link = peer_of(found)
    assert prefill_apart(none, COSTS, link, num_replicas=1, num_prefill=1) is None
    with pytest.raises(ConfigError, match=r"prefill_replicas needs .* enable_prefix_caching"):
        peer_of(planned(enable_prefix_caching=False))
