"""What becomes of memory that is held and empty, and whether free memory lies in pieces.

An engine cannot know the first: it does not know how long answers get. A trace says it. So of what
is empty a part is filled *later*, before its sequence ends, and the rest never is (internal
fragmentation). What is free is *in pieces* while there is enough of it for the first that waits,
and no hole is long enough (external fragmentation); only where sequences get ranges.

Moments are looked at ever less often, so that any length of time costs the logarithm of it.

Source: the words are those of Kwon et al. 2023, figure 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from quire.kv import Accounting
from quire.kv.occupancy import CellState, Occupancy

_EVERY_FRACTION = 1 / 64  # of the time so far is one moment taken to stand for


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteShares:
    """Means over time; None where there was nothing to have a share of."""

    later_fraction: float | None  # of what is held and empty
    pieces_fraction: float | None  # of what is not committed


@final
class Waste:
    """Of one accounting. Bytes times seconds are added up."""

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self._ends: dict[int, int] = {}  # tokens that each unfinished sequence will have
        self._last_s = self._next_s = 0.0
        self._empty = self._later = self._free = self._in_pieces = 0.0

    def came(self, seq_id: int, num_tokens: int) -> None:
        """It will have room for so many before it ends."""
        self._ends[seq_id] = num_tokens

    def ended(self, seq_id: int) -> None:
        self._ends.pop(seq_id, None)

    def note(self, now_s: float) -> None:
        """Sequences may have come, moved on or ended."""
        if now_s < self._next_s or now_s <= self._last_s:
            return
        seconds = now_s - self._last_s
        usage = self._accounting.usage()
        free_bytes = max(0, self._accounting.ceiling.capacity_bytes - usage.committed_bytes)
        self._empty += seconds * usage.wasted_bytes
        self._later += seconds * min(usage.wasted_bytes, self.later_bytes())
        self._free += seconds * free_bytes
        if self.is_in_pieces(free_bytes):
            self._in_pieces += seconds * free_bytes
        self._last_s = now_s
        self._next_s = now_s * (1 + _EVERY_FRACTION)

    def skip(self, now_s: float) -> None:
        """No sequence was there until now."""
        self._last_s = max(self._last_s, now_s)

    @staticmethod
    def shares(several: "Sequence[Waste]") -> WasteShares:
        """Of several accountings together."""
        empty, free = sum(each._empty for each in several), sum(each._free for each in several)
        later = sum(each._later for each in several)
        in_pieces = sum(each._in_pieces for each in several)
        return WasteShares(
            later_fraction=later / empty if empty else None,
            pieces_fraction=in_pieces / free if free else None,
        )

    def later_bytes(self) -> int:
        """Empty now, and filled before its sequence ends."""
        return sum(
            self._later_in(self._accounting.census(group))
            for group in range(len(self._accounting.groups))
        )

    def is_in_pieces(self, free_bytes: int) -> bool:
        """Whether the first that waits would have room in what is free, if that were one piece."""
        cache = self._accounting
        if not cache.fragmentation:
            return False
        waiting = (each for each in sorted(self._ends) if not cache.num_tokens(each))
        first = next(waiting, None)
        if first is None:
            return False
        end = np.array([self._ends[first]], np.int64)
        need_bytes = int(cache.bytes_alone(end, end + 1)[0])
        hole_bytes = (1 - cache.fragmentation) * free_bytes
        return hole_bytes < need_bytes <= free_bytes

    def _later_in(self, census: Occupancy) -> int:
        held = census.states >= CellState.SPARE
        holders, place = np.unique(census.holders[held], return_inverse=True)
        num_cells = np.bincount(place, minlength=len(holders))
        filled = np.bincount(place, weights=census.fills[held], minlength=len(holders))
        spare = num_cells * census.cell_tokens - filled
        coming = [
            max(0, self._ends.get(seq_id, 0) - self._accounting.num_tokens(seq_id))
            for seq_id in holders.tolist()
        ]
        return int(np.minimum(spare, coming).clip(0).sum()) * census.entry_bytes
