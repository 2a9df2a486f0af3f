"""A simulated fleet whose prefill replicas compute prompts for the others."""

from dataclasses import replace
from typing import Any

import pytest

from planner.fleets import BLOCK_BYTES, FULL, WINDOW, fleet_of, request, spec_of
from quire.engine.sequence import Sequence
from quire.errors import ConfigError
from quire.planner.planned_tiers import TierTable, planned_peer
from quire.planner.simulation.result import PrefillFigures, SimulationResult
from quire.planner.simulation.simulator import Fleet, simulate
from quire.planner.simulation.virtual_tiers import VirtualPeer
from quire.traces import TraceRequest

FAST = "peer=100,100,0"


def fleet_with(
    num_prefill: int = 1, *, speed: str = FAST, size: str = "1GiB", **options: Any
) -> Fleet:
    fleet = fleet_of(num_blocks=400, num_prefill=num_prefill, **{"max_num_seqs": 32, **options})
    table = TierTable.of((speed,), (f"peer={size}",))
    return replace(fleet, peer=planned_peer(fleet.spec.groups, block_size=16, table=table))


def busy(count: int = 30) -> list[TraceRequest]:
    """Long answers that are being written, and long prompts with short answers among them."""
    written = [request(0.0, 16, 400) for _ in range(8)]
    return written + [request(0.5 + 0.2 * number, 300, 4) for number in range(count)]


def run(fleet: Fleet, trace: list[TraceRequest] | None = None, **how: Any) -> SimulationResult:
    return simulate(busy() if trace is None else trace, fleet, **how)


def apart(result: SimulationResult) -> PrefillFigures:
    assert result.prefill is not None
    return result.prefill


def test_prompts_are_computed_apart_and_each_request_ends_once() -> None:
    ended: list[int] = []

    def note(_: int, sequence: Sequence) -> None:
        ended.append(sequence.request.request_id)

    result = run(fleet_with(), ended=note)
    assert sorted(ended) == list(range(38))
    assert result.num_finished["length"] == 38
    assert result.num_output_tokens == 8 * 400 + 30 * 4
    figures = apart(result)
    assert figures.num_prompts["apart"] > 20
    assert sum(figures.num_prompts.values()) == 38
    # All whole blocks in front of a prompt's last token.
    assert figures.moved_tokens == 288 * figures.num_prompts["apart"]
    assert figures.moved_bytes >= figures.moved_tokens // 16 * BLOCK_BYTES
    assert 0 < figures.busy_fraction < result.busy_fraction <= 1
    assert result.prefix_hit_tokens == 0  # what moved was found in no cache


def test_answers_that_are_written_wait_for_no_prompt() -> None:
    def longest_s(fleet: Fleet) -> float:
        per_token = dict[int, float]()

        def note(_: int, sequence: Sequence) -> None:
            took_s = sequence.ended_s - sequence.first_token_s  # type: ignore[operator]
            per_token[sequence.request.request_id] = took_s / (sequence.num_output_tokens - 1)

        run(fleet, ended=note)
        return max(per_token[number] for number in range(8))

    alone = fleet_of(num_blocks=400, max_num_seqs=32)
    assert longest_s(fleet_with()) < longest_s(alone)


def test_an_idle_replica_computes_its_prompts_itself() -> None:
    trace = [request(4.0 * number, 300, 4) for number in range(6)]
    assert apart(run(fleet_with(), trace)).num_prompts == {"apart": 0, "here": 6, "failed": 0}


@pytest.mark.parametrize(
    ("num_prefill", "options"),
    [
        (1, {}),
        (2, {"num_replicas": 2, "routing": "prefix-aware"}),
        (1, {"num_replicas": 2, "routing": "least-loaded", "spec": spec_of(FULL, WINDOW)}),
        (1, {"max_num_seqs": 4, "swap_blocks": 20}),
    ],
)
def test_steps_at_once_give_the_same_figures(num_prefill: int, options: dict[str, Any]) -> None:
    fleet = fleet_with(num_prefill, **options)
    one, each = run(fleet), run(fleet, by_steps=True)
    assert apart(one) == pytest.approx(apart(each))
    assert one.num_finished["length"] == 38
    assert one.duration_s == pytest.approx(each.duration_s)
    assert one.latencies["ttft_s"] == pytest.approx(each.latencies["ttft_s"])


def test_what_finds_no_room_is_computed_where_its_answer_is() -> None:
    none = run(fleet_with(size="1KiB"))
    assert none.num_finished["length"] == 38
    assert apart(none).num_prompts["failed"] > 20
    assert apart(none).moved_bytes == 0
    some = run(fleet_with(size=f"{5 * BLOCK_BYTES}"))  # with headers, four blocks
    assert 0 < apart(some).moved_tokens <= 64 * apart(some).num_prompts["apart"]


def test_a_slow_link_makes_the_first_token_wait_until_it_does_not_pay() -> None:
    quick, slow = run(fleet_with()), run(fleet_with(speed="peer=0.002,100,0"))
    assert apart(slow).num_prompts["here"] > apart(quick).num_prompts["here"]
    assert apart(slow).num_prompts["apart"] > 0  # before it was known
    assert slow.latencies["ttft_s"]["max"] > quick.latencies["ttft_s"]["max"]


def test_a_prompt_goes_on_when_its_blocks_are_out() -> None:
    quick, slow = run(fleet_with()), run(fleet_with(speed="peer=100,0.001,0"))  # to write them
    assert apart(slow).moved_tokens == 288 * apart(slow).num_prompts["apart"] > 0
    assert slow.latencies["ttft_s"]["max"] > 0.5 + quick.latencies["ttft_s"]["max"]


def test_what_prefill_replicas_find_in_their_caches_is_found() -> None:
    trace = [request(each.at_s, 320, 4, 1, 2, 3, 4, 5) for each in busy()[8:]]
    result = run(fleet_with(), [*busy()[:8], *trace])
    most = 319 * 30
    assert 0.4 * most < result.prefix_hit_tokens <= most  # about half is computed apart again


def test_a_prompt_found_at_both_replicas_counts_once() -> None:
    """The writer has the prefix itself, and is handed the same from the prefill replica."""
    trace = [request(each.at_s, 300, 4, 1, 2, 3, 4, 5, 6, 7) for each in busy()[8:]]
    result = run(fleet_with(), [*busy()[:8], *trace])
    assert apart(result).num_prompts["apart"] > 5
    assert result.prefix_hit_tokens < 300 * 30


def test_writers_take_turns_whatever_prefill_replicas_do() -> None:
    fleet = fleet_with(num_replicas=2, routing="round-robin")
    writers = list[int]()
    run(fleet, ended=lambda place, _: writers.append(place))
    assert abs(writers.count(0) - writers.count(1)) <= 2


def test_a_lease_that_ends_before_it_is_written_loses_no_request() -> None:
    waves = [replace(each, at_s=each.at_s + start_s) for start_s in (0.0, 200.0) for each in busy()]
    result = run(fleet_with(speed="peer=100,0.00002,0"), waves)
    assert sum(result.num_finished.values()) + result.num_refused == len(waves)


def test_what_can_never_run_is_refused_once() -> None:
    result = run(fleet_with(), [*busy(), request(9.0, 600, 4), request(9.1, 300, 4)])
    assert (result.num_refused, result.num_finished["length"]) == (1, 39)


def test_a_link_of_unknown_speed_is_refused() -> None:
    with pytest.raises(ConfigError, match="speed of the links"):
        run(replace(fleet_with(), peer=None))
    with pytest.raises(ConfigError, match="--prefill-replicas"):
        TierTable.of((FAST,), ()).require_used(())


def test_leases_share_records_and_give_back_what_they_took() -> None:
    peer = VirtualPeer(planned_peer(spec_of().groups, block_size=16))
    capacity = peer.tier.planned.capacity_bytes
    assert capacity == 2**30
    half = capacity // 2
    first, count = peer.lease([[half], [half], [half]], 0.0)
    assert count == 2
    assert peer.lease([[1]], 0.0) == ("", 0)  # all is reserved
    peer.keep(first, b"a", half, 1.0)
    assert peer.whole_s(first) is None
    peer.skip(first, half, 2.0)
    assert peer.whole_s(first) == 2.0
    second, count = peer.lease([[half], [half]], 3.0)
    assert count == 1
    peer.keep(second, b"a", half, 4.0)  # the same record, which is there once
    assert peer.tier.records.used_bytes == half
    peer.release(first)
    assert peer.tier.records.has(b"a")
    assert peer.lease([[half + 1]], 5.0) == ("", 0)
    peer.lease([[half]], 200.0)  # the second has ended by time
    assert peer.whole_s(second) is None
    assert not peer.tier.records.has(b"a")
