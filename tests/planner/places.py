"""Machines that plans are made for, the same on every machine that runs the tests."""

from typing import Any

from quire.config import EngineConfig
from quire.planner.capacity import CapacityPlan, PlanTarget, plan
from quire.planner.hardware import device, machine_of, machine_with
from quire.planner.sequence_memory import PlannedLengths
from quire.planner.subject import Subject, find_subject

GIB = 1 << 30
THOUSAND = PlannedLengths(input_tokens=1000, output_tokens=250)


def host(memory_bytes: int = 64 * GIB) -> PlanTarget:
    """A machine whose processor runs the model."""
    return PlanTarget(
        machine=machine_of(memory_bytes), page_bytes=4096, can_share=True, max_mappings=None
    )


def card(name: str) -> PlanTarget:
    """A device of the table."""
    found = device(name)
    return PlanTarget(
        machine=machine_with(found), page_bytes=found.page_bytes, can_share=True, max_mappings=None
    )


def planned(
    subject: Subject | str,
    place: PlanTarget,
    *,
    num_ranks: int = 1,
    request: PlannedLengths = THOUSAND,
    compare: bool = False,
    **options: Any,
) -> CapacityPlan:
    """A plan by a model's name."""
    if isinstance(subject, str):
        subject = find_subject(subject)
    config = EngineConfig(**options)
    return plan(subject, config, place, num_ranks=num_ranks, request=request, compare=compare)
