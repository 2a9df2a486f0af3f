"""What of a census is one tenant's, numbered anew.

Where a sequence's cells lie in the pool says what lies between them: how long another's prompt is,
and how it grows. So a tenant's cells are numbered in the order of its own sequences, as if there
were no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from quire.kv import Census
from quire.server.dashboard.picture import Ids

Tenant: TypeAlias = str | None  # its salt; None sees all


@dataclass(frozen=True, slots=True)
class OwnCells:
    """A census of some cells of another one. ``old`` → ``new``: their ids there and here."""

    census: Census
    old: Ids | None  # ascending; None: all cells, with the ids that they have
    new: Ids | None

    @classmethod
    def all_of(cls, census: Census) -> "OwnCells":
        return cls(census, None, None)

    @classmethod
    def of(cls, census: Census, tables: Mapping[int, Ids]) -> "OwnCells":
        """``tables``: a sequence's cells that can be read, by its id."""
        found = [np.zeros(0, np.int64)]
        for seq_id, table in tables.items():
            found += (table[table >= 0], census.ids[census.holders == seq_id])
        cells, in_row = np.concatenate(found), census.row_cells or 1
        _, firsts, rows = np.unique(cells // in_row, return_index=True, return_inverse=True)
        numbers = firsts.argsort().argsort()[rows] * in_row + cells % in_row
        old, index = np.unique(cells, return_index=True)
        new = numbers[index]
        order = new.argsort()
        at = np.searchsorted(census.ids, old[order])
        own = replace(
            census,
            num_cells=len(firsts) * in_row,
            ids=new[order],
            states=census.states[at],
            holders=census.holders[at],
            fills=census.fills[at],
        )
        return cls(own, old, new)

    def numbered(self, ids: Ids) -> Ids:
        """The same cells, by their ids in ``census``."""
        if self.old is None or self.new is None:
            return ids
        return self.new[np.searchsorted(self.old, ids[ids >= 0])]
