"""The door of a simulated fleet: what a request takes between its client and its engine.

HTTP, checks, tokenizing, the placement, the way to the replica, and that of the first token back:
all of it comes before the replica's first step here. A door handles requests one after the other.
"""

from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorCosts:
    """Seconds that a request takes beside the steps of its engine."""

    request_s: float = 0.0
    token_s: float = 0.0  # of its prompt
    busy_s: float = 0.0  # of the above, in which the door takes no other request


@final
class SimulatedDoor:
    """Lets requests through, in the order in which they come."""

    def __init__(self, costs: DoorCosts) -> None:
        self._costs = costs
        self._free_s = 0.0  # when it has handled all that have come

    def through_s(self, at_s: float, num_tokens: int) -> float:
        """Return the moment at which a request with a prompt of so many tokens is at its replica.

        ``at_s``: when it came to the door.
        """
        begun_s = max(at_s, self._free_s)
        self._free_s = begun_s + self._costs.busy_s
        return begun_s + self._costs.request_s + self._costs.token_s * num_tokens
