"""A simulation adds up, and taking steps together changes no figure of it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.told import Prompt
from planner.fleets import CACHES, COSTS, FULL, WINDOW, fleet_of, request, spec_of
from quire.engine.scheduling import headroom
from quire.fleet.placement import Load
from quire.planner.simulation.result import Goals, SimulationResult
from quire.planner.simulation.routing import ROUTES
from quire.planner.simulation.simulated_door import DoorCosts
from quire.planner.simulation.simulated_engine import prices_of, prompt_of
from quire.planner.simulation.simulator import make_replica, router_of, simulate
from quire.traces import TraceRequest

GOALS = Goals(ttft_s=0.5, tpot_s=0.03)
REQUEST = st.builds(
    lambda gap, length, output, ids: (gap, length, output, ids),
    st.sampled_from([0.0, 0.0, 0.01, 0.2, 3.0]),
    st.integers(1, 200),
    st.integers(0, 120),
    st.lists(st.integers(0, 2), max_size=5),
)


def trace_of(drawn: list[tuple[float, int, int, list[int]]]) -> list[TraceRequest]:
    now_s, trace = 0.0, []
    for gap_s, length, output, ids in drawn:
        now_s += gap_s
        num_ids = min(len(ids), -(-length // 32))
        trace.append(request(now_s, length, output, *ids[:num_ids]))
    return trace


def figures(result: SimulationResult) -> dict[str, object]:
    """What two ways must agree in: counts exactly, means but for the order of sums."""
    plain = result.to_json()
    timelines = plain.pop("timelines")
    found: dict[str, object] = {
        name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        for name, value in plain.items()
    }
    found["spans"] = [[(p["start_s"], p["stop_s"]) for p in points] for points in timelines]
    return found


def check_sums(result: SimulationResult, trace: list[TraceRequest]) -> None:
    ended = sum(result.num_finished.values())
    assert ended + result.num_refused == result.num_requests == len(trace)
    done = result.num_finished["length"]
    assert result.latencies["e2e_s"]["max"] <= result.duration_s
    if done == len(trace):
        assert result.num_input_tokens == sum(r.input_tokens for r in trace)
        assert result.num_output_tokens == sum(max(1, r.output_tokens) for r in trace)
        # Every token but a sequence's last is computed, found, or brought back, and what was lost
        # again.
        tokens = result.num_input_tokens + result.num_output_tokens - len(trace)
        if not result.num_preemptions:
            assert result.num_scheduled_tokens == tokens - result.prefix_hit_tokens
        else:
            assert result.num_scheduled_tokens >= tokens - result.prefix_hit_tokens
    missed = sum(result.prefix_missed_tokens.values())
    assert missed + result.prefix_hit_tokens <= result.prefix_query_tokens
    assert result.peak_committed_bytes <= result.memory_bytes
    assert result.used_bytes <= result.committed_bytes * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from(sorted(CACHES)),
    drawn=st.lists(REQUEST, min_size=1, max_size=14),
    num_blocks=st.sampled_from([34, 40, 64, 200]),
    max_num_seqs=st.sampled_from([2, 4, 8]),
    policy=st.sampled_from(["fcfs", "shortest", "priority"]),
    swap_blocks=st.sampled_from([0, 20]),
    replicas=st.sampled_from([(1, "round-robin"), (2, "least-loaded"), (2, "prefix-aware")]),
    door=st.sampled_from([DoorCosts(), DoorCosts(request_s=0.03, token_s=1e-4, busy_s=0.02)]),
)
def test_steps_taken_together_give_the_same_figures(
    case, drawn, num_blocks, max_num_seqs, policy, swap_blocks, replicas, door
) -> None:
    trace = trace_of(drawn)
    fleet = fleet_of(
        case,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        policy=policy,
        swap_blocks=swap_blocks,
        num_replicas=replicas[0],
        routing=replicas[1],
        door=door,
    )
    fast = simulate(trace, fleet, goals=GOALS)
    slow = simulate(trace, fleet, goals=GOALS, by_steps=True)
    assert fast.num_steps == slow.num_steps
    assert figures(slow) == figures(fast)
    check_sums(fast, trace)


@pytest.mark.parametrize("case", CACHES)
def test_a_long_decode_is_taken_together(case: str) -> None:
    """Else the comparison above would compare nothing."""
    replica = make_replica(fleet_of(case), lambda _: None)
    plans = []
    replica.engine.watch = plans.append
    replica.add(request(0.0, 40, 300), 0)
    replica.run_until(float("inf"))
    assert replica.num_steps == 300
    assert len(plans) < 60


def test_admission_knows_how_long_sequences_are_after_a_stride(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths are read again after some steps, and the steps of a stride count too."""
    monkeypatch.setattr(headroom, "_LOOKED_AT", 1)
    replica = make_replica(fleet_of(max_num_batched_tokens=256), lambda _: None)
    for number in range(6):
        replica.add(request(0.0, 20 + number, 200), number)
    replica.run_until(1.0)
    assert replica.num_steps > 20
    running = replica.scheduler._queues.company
    expected = [sequence.num_tokens for sequence in running._members]
    assert running.prospects(0).num_tokens.tolist() == expected


def test_windows_go_step_by_step_and_come_to_their_end() -> None:
    fleet = fleet_of("paged", spec=spec_of(FULL, WINDOW))
    trace = [request(0.1 * i, 90, 60) for i in range(6)]
    result = simulate(trace, fleet)
    assert result.num_finished["length"] == 6
    check_sums(result, trace)


def test_prompts_that_share_hash_ids_are_found_and_no_others() -> None:
    """Blocks of 16, ids of 32: ids 1 2 then 1 3 share 32 tokens."""
    trace = [
        request(0.0, 64, 2, 1, 2),
        request(5.0, 64, 2, 1, 3),
        request(10.0, 64, 2, 4, 2),  # 2 behind another id is another text
        request(15.0, 64, 2),
        request(20.0, 96, 2, 1, 2, 5),
    ]
    result = simulate(trace, fleet_of("paged", num_blocks=200))
    assert result.prefix_hit_tokens == 32 + 64


def test_what_a_trace_generated_is_not_found_again() -> None:
    trace = [request(0.0, 40, 100, 1, 2), request(9.0, 64, 1, 1, 2), request(18.0, 40, 1, 1, 2)]
    result = simulate(trace, fleet_of("paged", num_blocks=200))
    # The second shares all 40 tokens; a hit ends at a block or within one.
    assert result.prefix_hit_tokens <= 40 + 39


@pytest.mark.parametrize("routing", ROUTES)
def test_a_fleet_serves_every_request_once(routing: str) -> None:
    trace = [request(0.01 * i, 60, 20, i % 3, 10 + i % 3) for i in range(40)]
    result = simulate(trace, fleet_of(num_blocks=40, num_replicas=3, routing=routing))
    assert result.num_finished["length"] == 40
    assert len(result.timelines) == 3


def test_prefix_aware_finds_what_round_robin_scatters() -> None:
    trace = [request(2.0 * i, 96, 4, i % 2, 10 + i % 2, 20 + i % 2) for i in range(24)]
    hits = {
        routing: simulate(
            trace, fleet_of(num_blocks=40, num_replicas=3, routing=routing)
        ).prefix_hit_tokens
        for routing in ("round-robin", "prefix-aware")
    }
    assert hits["prefix-aware"] > hits["round-robin"]


@pytest.mark.parametrize(("delay_s", "is_known"), [(0.0, True), (0.5, True), (2.0, False)])
def test_a_router_hears_of_a_cache_after_a_delay(delay_s: float, is_known: bool) -> None:
    """The second replica has the prompt; the first is a little less busy, as both say at once."""
    fleet = fleet_of(num_replicas=2, routing="prefix-aware", event_delay_s=delay_s)
    router = router_of(fleet)
    assert router is not None
    asked = request(1.0, 96, 1, 1, 2, 3)
    told = Prompt(prompt_of(asked, 0)).stored(16, range(6))
    router.line(1).tell_blocks(0.0, told)
    router.line(1).tell_load(-delay_s, Load(num_running=1))
    assert router.choose(asked, 0) == (1 if is_known else 0)


def test_a_replica_that_got_no_request_tells_how_fast_it_is() -> None:
    """Else the router guesses, and may never find out that its guess is too slow."""
    fleet = fleet_of(num_replicas=2, routing="prefix-aware")
    router = router_of(fleet)
    assert router is not None
    told: list[Load] = []
    line = router.line(1)
    replica = make_replica(fleet, lambda _: None, line=line)
    line.tell_load = lambda _, load: told.append(load)  # type: ignore[method-assign]
    for moment_s in (0.5, 1.0):
        replica.run_until(moment_s)
    (load,) = told
    assert load.num_running == 0
    assert load.compute_s_per_token == pytest.approx(prices_of(COSTS, 96).token_s)


@pytest.mark.parametrize("cache", ["contiguous", "paged-without-caching"])
def test_caches_that_tell_of_no_blocks_are_routed_by_load(cache: str) -> None:
    trace = [request(0.01 * i, 60, 20, 1) for i in range(20)]
    fleet = fleet_of(cache, num_blocks=40, num_replicas=2, routing="prefix-aware")
    assert simulate(trace, fleet).num_finished["length"] == 20


def test_more_replicas_are_not_slower() -> None:
    trace = [request(0.0, 100, 50) for _ in range(24)]
    one = simulate(trace, fleet_of(max_num_seqs=4))
    three = simulate(trace, fleet_of(max_num_seqs=4, num_replicas=3))
    assert three.duration_s < one.duration_s
    assert three.latencies["ttft_s"]["p99"] < one.latencies["ttft_s"]["p99"]


def test_what_can_never_run_is_counted_and_others_go_on() -> None:
    trace = [request(0.0, 600, 5), request(0.0, 50, 5)]
    result = simulate(trace, fleet_of())
    assert (result.num_refused, result.num_finished["length"]) == (1, 1)


def test_goodput_counts_who_meets_all_goals() -> None:
    trace = [request(0.0, 90, 30) for _ in range(20)]
    fleet = fleet_of(max_num_seqs=4, num_blocks=200)
    assert simulate(trace, fleet).num_good == 20
    some = simulate(trace, fleet, goals=Goals(ttft_s=0.5)).num_good
    assert 0 < some < 20
    assert simulate(trace, fleet, goals=Goals(ttft_s=0.5, tpot_s=1e-9)).num_good == 0


def test_an_empty_trace_is_a_result_of_nothing() -> None:
    result = simulate([], fleet_of())
    assert (result.num_requests, result.duration_s, result.utilization) == (0, 0.0, 0.0)


def test_a_result_is_plain_data() -> None:
    import json

    result = simulate([request(0.0, 50, 20), request(40.0, 50, 20)], fleet_of())
    plain = json.loads(json.dumps(result.to_json()))
    assert plain["num_requests"] == 2
    assert plain["timelines"][0][0]["committed_bytes"] > 0
    assert plain["timelines"][0][-1]["stop_s"] == pytest.approx(result.duration_s)


def test_a_burst_beyond_what_is_known_to_the_scheduler_keeps_its_order() -> None:
    """Of a long queue only the first are in the scheduler: the same order, and the same times."""
    trace = [request(0.0, 30, 10) for _ in range(60)]
    fleet = fleet_of(max_num_seqs=2, num_blocks=64)
    known = replace(fleet.limits, policy="shortest")  # all equal: as they came
    assert figures(simulate(trace, fleet)) == figures(simulate(trace, replace(fleet, limits=known)))
