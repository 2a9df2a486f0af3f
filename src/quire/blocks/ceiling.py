"""How much may be committed: what sequences can count on, and what there is for now."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Ceiling:
    """``now_bytes`` ≤ ``capacity_bytes``: below it only while the machine is short of memory.

    What can ever fit is judged by the capacity, and what fits at present by the ceiling.
    """

    capacity_bytes: int
    now_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.now_bytes = self.capacity_bytes

    def move(self, num_bytes: int, held_bytes: int, *, for_now: bool) -> int:
        """Set the ceiling, or the capacity with it; where it is then, never below what is held."""
        num_bytes = max(num_bytes, held_bytes)
        if not for_now:
            self.capacity_bytes = num_bytes
        self.now_bytes = min(num_bytes, self.capacity_bytes)
        return self.now_bytes
