"""A census as a picture of at most so many cells: what is too many is drawn several to one."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.kv import CellState, Census
from quire.server.dashboard.frames import LETTERS, Cells
from quire.units import ceil_div

Ids: TypeAlias = npt.NDArray[np.int64]

_KINDS = len(CellState)
_DIGITS = np.frombuffer(b"0123456789", np.uint8)
_LETTERS = np.frombuffer(LETTERS.encode(), np.uint8)


@dataclass(frozen=True, slots=True)
class Picture:
    """Where the cells of a census are drawn.

    Of ranges only the rows that a sequence has are shown, one below the other.
    """

    census: Census
    rows: Ids | None  # those that are shown, in order; None: there are no rows
    each: int  # cells of the census in one that is drawn

    @classmethod
    def of(cls, census: Census, most_cells: int) -> "Picture":
        if not census.row_cells:
            return cls(census, None, max(1, ceil_div(census.num_cells, most_cells)))
        rows = np.unique(census.ids // census.row_cells)[:most_cells]
        in_row = max(1, most_cells // max(1, len(rows)))
        return cls(census, rows, ceil_div(census.row_cells, in_row))

    @property
    def row_cells(self) -> int:
        """Cells that are drawn for a row, or 0."""
        return ceil_div(self.census.row_cells, self.each)

    @property
    def num_drawn(self) -> int:
        if self.rows is None:
            return ceil_div(self.census.num_cells, self.each)
        return len(self.rows) * self.row_cells

    def places(self, ids: Ids) -> Ids:
        """Where these cells are drawn; those in rows that are not shown are left out."""
        if self.rows is None:
            return ids // self.each
        row, column = np.divmod(ids, self.census.row_cells)
        at = np.searchsorted(self.rows, row)
        shown = at < len(self.rows)
        shown[shown] = self.rows[at[shown]] == row[shown]
        places: Ids = (at * self.row_cells + column // self.each)[shown]
        return places

    def cells(self) -> Cells:
        """What is drawn: of several cells in one what most of those with pages are."""
        census, count = self.census, self.num_drawn
        places = self.places(census.ids)  # none is left out, unless there are too many rows
        listed = len(places)
        states, holders = census.states[:listed], census.holders[:listed]
        if self.each == 1:
            drawn = np.full(count, _KINDS, np.int64)
            drawn[places] = states
            owners = np.full(count, -1, np.int64)
            owners[places] = holders
        else:
            votes = np.bincount(places * _KINDS + states, minlength=count * _KINDS)
            votes = votes.reshape(count, _KINDS)
            # Where there are as many of two, the one that a sequence holds.
            drawn = _KINDS - 1 - votes[:, ::-1].argmax(axis=1)
            drawn[~votes.any(axis=1)] = _KINDS
            owners = np.full(count, -1, np.int64)
            alike = states == drawn[places]
            owners[places[alike][::-1]] = holders[alike][::-1]
        tokens = np.bincount(places, census.fills[:listed], minlength=count)
        tenths = np.ceil(tokens * 9 / (self.each * census.cell_tokens)).astype(np.int64)
        num_shown = census.num_cells if self.rows is None else len(self.rows) * census.row_cells
        counts = np.bincount(states, minlength=_KINDS).tolist()
        return Cells(
            num_cells=census.num_cells,
            num_shown=num_shown,
            counts=(*counts, num_shown - listed),
            each=self.each,
            row_cells=self.row_cells,
            states=_LETTERS[drawn].tobytes().decode(),
            fills=_DIGITS[tenths.clip(0, 9)].tobytes().decode(),
            holders=_lengths(owners),
        )

    def table(self, ids: Ids) -> tuple[int, ...]:
        """A sequence's cells in their order: first place, how many, first place, …"""
        places = self.places(ids if len(ids) and ids[0] >= 0 else ids[ids >= 0])
        if not len(places):
            return ()
        steps = places[1:] - places[:-1]
        cuts = (steps != 1).nonzero()[0] if self.each == 1 else ((steps >> 1) != 0).nonzero()[0]
        firsts = [0, *(cuts + 1).tolist()]
        lasts = [*cuts.tolist(), len(places) - 1]
        runs = zip(places[firsts].tolist(), places[lasts].tolist(), strict=True)
        return tuple(each for first, last in runs for each in (first, last - first + 1))


def _lengths(values: Ids) -> tuple[int, ...]:
    """Run lengths: value, how many, value, …"""
    if not len(values):
        return ()
    starts = np.append(0, (np.diff(values) != 0).nonzero()[0] + 1)
    counts = np.diff(starts, append=len(values))
    return tuple(np.stack([values[starts], counts], axis=1).ravel().tolist())
