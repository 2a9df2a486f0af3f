"""Which goes first: an order of sequences, in which the last ones make room for the first ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Two keys of a sequence. They never change while it lives: queues are kept in this order.

    ``rank`` is the order; no two sequences have the same. It begins with the ``grade``: a
    waiting sequence may take the room of a running one of greater grade. Equals wait for each
    other.
    """

    rank: Callable[[Sequence], tuple[int, ...]]
    grade: Callable[[Sequence], int]


def _arrival(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.seq_id,)


def _priority(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.priority, sequence.seq_id)


def _length(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.max_tokens, sequence.seq_id)


def _no_grade(sequence: Sequence) -> int:
    return 0


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        # First come, first served.
        "fcfs": Policy(rank=_arrival, grade=_no_grade),
        # Smaller priorities first, at the cost of greater ones; of equals the first to come.
        "priority": Policy(rank=_priority, grade=lambda sequence: sequence.request.priority),
        # What may become the shortest first: less waiting on average, more for the longest.
        "shortest": Policy(rank=_length, grade=_no_grade),
    }
)
