"""Machines that plans are made for, the same on every machine that runs the tests."""

from typing import Any

from quire.config import EngineConfig
from quire.planner.hardware import device, machine_of, machine_with
from quire.planner.plan import Place, Plan, plan
from quire.planner.sequence_memory import Request
from quire.planner.subject import Subject, find_subject

GIB = 1 << 30
THOUSAND = Request(input_tokens=1000, output_tokens=250)


def host(memory_bytes: int = 64 * GIB) -> Place:
    """A machine whose processor runs the model."""
    return Place(
        machine=machine_of(memory_bytes), page_bytes=4096, can_share=True, max_mappings=None
    )


def card(name: str) -> Place:
    """A device of the table."""
    found = device(name)
    return Place(
        machine=machine_with(found), page_bytes=found.page_bytes, can_share=True, max_mappings=None
    )


def planned(
    subject: Subject | str,
    place: Place,
    *,
    num_ranks: int = 1,
    request: Request = THOUSAND,
    compare: bool = False,
    **options: Any,
) -> Plan:
    """A plan by a model's name."""
    if isinstance(subject, str):
        subject = find_subject(subject)
    config = EngineConfig(**options)
    return plan(subject, config, place, num_ranks=num_ranks, request=request, compare=compare)
