"""First fit: ranges of any length in one arena. External fragmentation lives here.

This is what paging abolishes, so it is measured rather than hidden: enough free slots in all, and
yet no hole for the next range. ``compact`` is the classic cure, a pass that moves every range down.
"""

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A range that compaction moved: ``length`` slots from ``source`` down to ``target``."""

    source: int
    target: int
    length: int


class FirstFit:
    """Disjoint ranges [start, start + length) of [0, num_slots), each placed in the lowest hole."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._starts: list[int] = []  # ascending
        self._lengths: dict[int, int] = {}

    def allocate(self, length: int) -> int | None:
        """The start of a new range, or None if no hole is long enough."""
        for index, (start, room) in enumerate(self._holes()):
            if room >= length:
                self._starts.insert(index, start)
                self._lengths[start] = length
                return start
        return None

    def free(self, start: int) -> None:
        """Give a range back. Raises: KeyError if none begins at ``start``."""
        del self._lengths[start]
        self._starts.pop(bisect.bisect_left(self._starts, start))

    def compact(self) -> list[Move]:
        """Slide every range down to close the holes; the moves, in an order safe to carry out."""
        moves: list[Move] = []
        lengths: dict[int, int] = {}
        target = 0
        for start in self._starts:
            length = self._lengths[start]
            if start != target:
                moves.append(Move(source=start, target=target, length=length))
            lengths[target] = length
            target += length
        self._starts, self._lengths = list(lengths), lengths
        return moves

    @property
    def free_slots(self) -> int:
        return self.num_slots - sum(self._lengths.values())

    @property
    def largest_hole(self) -> int:
        return max(room for _, room in self._holes())

    @property
    def fragmentation(self) -> float:
        """The share of the free slots outside the largest hole: 0 is one hole, 1 is dust."""
        return 1 - self.largest_hole / self.free_slots if self.free_slots else 0.0

    def check(self) -> None:
        assert self._starts == sorted(self._lengths), "starts and lengths name different ranges"
        end = 0
        for start in self._starts:
            assert start >= end, f"the range at {start} begins inside the one before it"
            end = start + self._lengths[start]
        assert end <= self.num_slots, f"the last range ends at {end}, past {self.num_slots}"

    def _holes(self) -> list[tuple[int, int]]:
        """(start, length) of what lies before each range, and of what lies after the last."""
        holes, end = [], 0
        for start in self._starts:
            holes.append((end, start - end))
            end = start + self._lengths[start]
        holes.append((end, self.num_slots - end))
        return holes
