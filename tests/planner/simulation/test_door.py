"""What a request takes at the door of a simulated fleet, beside the steps of its engine."""

import pytest

from planner.fleets import fleet_of, request
from planner.simulation.test_prefill import apart, busy, fleet_with
from quire.engine.sequence import Sequence
from quire.engine.statistics import Latencies
from quire.planner.simulation.simulated_door import DoorCosts, SimulatedDoor
from quire.planner.simulation.simulator import Fleet, simulate
from quire.traces import TraceRequest


def firsts(trace: list[TraceRequest], fleet: Fleet) -> list[float]:
    """Return the seconds to the first token of each request."""
    found: dict[int, float] = {}

    def note(_: int, sequence: Sequence) -> None:
        first_s = Latencies.of(sequence).first_token_s
        assert first_s is not None
        found[sequence.request.request_id] = first_s

    simulate(trace, fleet, ended=note)
    return [found[number] for number in range(len(trace))]


def test_one_request_takes_the_door_and_its_steps() -> None:
    trace, door = [request(3.0, 50, 10)], DoorCosts(request_s=0.02, token_s=0.001)
    plain, through = simulate(trace, fleet_of()), simulate(trace, fleet_of(door=door))
    for figure in ("ttft_s", "e2e_s"):
        more_s = through.latencies[figure]["mean"] - plain.latencies[figure]["mean"]
        assert more_s == pytest.approx(0.02 + 50 * 0.001)
    assert through.duration_s == pytest.approx(plain.duration_s + 0.07)
    assert through.latencies["tpot_s"]["mean"] == pytest.approx(plain.latencies["tpot_s"]["mean"])


def test_a_door_takes_one_request_after_the_other() -> None:
    door = SimulatedDoor(DoorCosts(request_s=0.02, busy_s=0.015))
    moments = [door.through_s(at_s, 100) for at_s in (1.0, 1.0, 1.02, 2.0)]
    assert moments == pytest.approx([1.02, 1.035, 1.05, 2.02])


def test_requests_at_once_come_to_their_replicas_one_by_one() -> None:
    """The first of each replica is computed alone, and the others miss that step."""
    trace = [request(0.0, 30, 5) for _ in range(4)]
    at_once = firsts(trace, fleet_of(num_replicas=2))
    assert max(at_once) == min(at_once)  # all in the first step
    door = DoorCosts(request_s=0.001, busy_s=0.001)
    spread = firsts(trace, fleet_of(num_replicas=2, door=door))
    assert spread[1] == pytest.approx(spread[0] + 0.001)
    assert min(spread[2:]) > 1.5 * spread[1]


def test_a_request_at_the_door_joins_no_step_before() -> None:
    """It comes while another one is being written, and is computed when it is through."""
    trace = [request(0.0, 20, 100), request(0.2, 40, 2)]
    _, first_s = firsts(trace, fleet_of(door=DoorCosts(request_s=0.5)))
    assert 0.5 < first_s < 0.55


def test_a_prompt_that_is_computed_apart_comes_through_the_door_first() -> None:
    plain = simulate(busy(), fleet_with())
    door = simulate(busy(), fleet_with(door=DoorCosts(request_s=0.03)))
    assert apart(door).num_prompts["apart"] > 20
    assert door.num_finished["length"] == plain.num_finished["length"] == 38
    more_s = door.latencies["ttft_s"]["mean"] - plain.latencies["ttft_s"]["mean"]
    assert more_s == pytest.approx(0.03, abs=0.01)
