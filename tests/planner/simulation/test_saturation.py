"""A saturated server: the mean step of a plan, against the simulator's whole run."""

from dataclasses import replace

import pytest

from planner.places import card
from quire.config import EngineConfig
from quire.planner.capacity import CapacityPlan, plan
from quire.planner.hardware import roofline
from quire.planner.saturation import saturated
from quire.planner.sequence_memory import PlannedLengths
from quire.planner.simulation.simulator import fleet_for, simulate
from quire.planner.subject import find_subject
from quire.traces import TraceRequest

SUBJECT = find_subject("Qwen3-4B")
GPU = card("h100")
COSTS = roofline(SUBJECT, SUBJECT.spec, "h100", 1)


def planned(asked: int, answered: int, **options: object) -> CapacityPlan:
    config = EngineConfig.from_options(
        cache="paged",
        enable_prefix_caching=False,
        max_model_len=asked + answered + 1,
        block_size=64,
        **options,
    )
    request = PlannedLengths(input_tokens=asked, output_tokens=answered)
    return plan(SUBJECT, config, GPU, request=request, compare=False)


@pytest.mark.parametrize(
    ("asked", "answered", "chunk"), [(256, 256, 4096), (1024, 64, 4096), (512, 128, 512)]
)
def test_the_mean_step_makes_what_a_long_run_makes(asked: int, answered: int, chunk: int) -> None:
    found = planned(asked, answered, max_num_seqs=24, max_num_batched_tokens=chunk)
    full = saturated(found, COSTS)
    assert full is not None
    fleet = fleet_for(SUBJECT, found.config, GPU, COSTS)
    request = TraceRequest(at_s=0.0, input_tokens=asked, output_tokens=answered)
    result = simulate((request for _ in range(240)), fleet)
    assert full.output_tokens_per_s == pytest.approx(result.output_tokens_per_s, rel=0.15)


def test_more_memory_makes_more_until_computing_is_the_limit() -> None:
    rates = []
    for count in (1, 4, 16, 64):
        full = saturated(planned(512, 256, max_num_seqs=count), COSTS)
        assert full is not None
        assert full.num_sequences <= count
        rates.append(full.output_tokens_per_s)
    assert rates == sorted(rates)


def test_prompts_hold_up_answers_where_a_step_has_no_more_tokens() -> None:
    found = planned(4096, 16, max_num_seqs=64, max_num_batched_tokens=2048)
    full = saturated(found, COSTS)
    assert full is not None
    assert full.num_sequences == round(2048 / (1 + 4096 / 16))


def test_nothing_is_made_where_nothing_fits() -> None:
    found = planned(512, 256)
    none = replace(found, cell=replace(found.cell, max_num_seqs=0))
    assert saturated(none, COSTS) is None
    few = saturated(found, COSTS, num_requests=2)
    assert few is not None
    assert few.num_sequences == 2
