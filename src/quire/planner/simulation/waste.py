"""Measure fragmentation: how much held memory stays empty, and how much free memory is in pieces.

An engine does not know how long answers get, but a trace does. Part of the empty memory is filled
*later*, before its sequence ends; the rest never is (internal fragmentation). Free memory is *in
pieces* while the first waiting sequence would fit in it, but in no single hole (external
fragmentation), which happens only to strategies that give sequences ranges.

Samples become rarer with time, so that their number grows with its logarithm.

Source: the terms are those of Kwon et al. 2023, figure 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from quire.kv import Accounting
from quire.kv.occupancy import CellState, Occupancy

_EVERY_FRACTION = 1 / 64  # a sample stands for this share of the time so far


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteShares:
    """Means over time; None if there was nothing to have a share of."""

    later_fraction: float | None  # of empty memory
    pieces_fraction: float | None  # of free memory


@final
class Waste:
    """The fragmentation of one accounting, in bytes times seconds."""

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self._ends: dict[int, int] = {}  # tokens that each unfinished sequence will have
        self._last_s = self._next_s = 0.0
        self._empty = self._later = self._free = self._in_pieces = 0.0

    def came(self, seq_id: int, num_tokens: int) -> None:
        """Add a sequence that will have ``num_tokens`` at its end."""
        self._ends[seq_id] = num_tokens

    def ended(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._ends.pop(seq_id, None)

    def note(self, now_s: float) -> None:
        """Take a sample if one is due."""
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
        """Leave out the time until now, in which there was no sequence."""
        self._last_s = max(self._last_s, now_s)

    @staticmethod
    def shares(several: "Sequence[Waste]") -> WasteShares:
        """Return the shares of several accountings together."""
        empty, free = sum(each._empty for each in several), sum(each._free for each in several)
        later = sum(each._later for each in several)
        in_pieces = sum(each._in_pieces for each in several)
        return WasteShares(
            later_fraction=later / empty if empty else None,
            pieces_fraction=in_pieces / free if free else None,
        )

    def later_bytes(self) -> int:
        """Return the empty bytes that are filled before their sequences end."""
        return sum(
            self._later_in(self._accounting.census(group))
            for group in range(len(self._accounting.groups))
        )

    def is_in_pieces(self, free_bytes: int) -> bool:
        """Return whether the first waiting sequence fits in the free bytes but in no hole."""
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
