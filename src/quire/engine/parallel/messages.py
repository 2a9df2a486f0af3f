"""What rank 0 sends the other ranks, and their answers: one to each call.

As with vLLM's ``collective_rpc``, a call names a method of ``Worker``. Its arguments are numbers:
block tables, slots, token ids. Sequences, requests and samplers stay in rank 0.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

# All ranks compute these together: a rank that stops half-way leaves the others waiting.
_EXCHANGES = frozenset({"join", "load", "expect", "compute"})


@dataclass(frozen=True, slots=True)
class Call:
    """A method of ``Worker``, and its arguments."""

    method: str
    args: tuple[Any, ...] = ()

    @property
    def is_exchange(self) -> bool:
        """Whether the ranks wait for one another in it."""
        return self.method in _EXCHANGES


@dataclass(frozen=True, slots=True)
class Heard:
    """Tells a rank that rank 0 knows of its failed part of an exchange. It has no answer."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Ends a rank. It has no answer."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a call that was carried out, with what it returned."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a call that raised; ``value`` is what it had done before."""

    error: Exception
    value: Any = None


Answer: TypeAlias = Done | Failed
