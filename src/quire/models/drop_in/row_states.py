"""What recurrent layers remember of a batch: one state a row, in the order of the rows.

The rows of a batch change together and each step overwrites all their states, so no state is ever
shared and none needs a place of its own choice: row i has slot i of each group, and a layer's
states are always one view. What is given here is memory; Transformers' own code fills it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from quire.kv import Accounting, Commit, Release, Storage, Usage
from quire.kv.interface import place_of
from quire.kv.layout import slot_bytes
from quire.kv.page_tables import tables_of_one_piece
from quire.kv.storage.states import StateRows
from quire.memory import CountedMemory
from quire.spec import CrossAttention, Group, RecurrentState

# -- row states ------------------------------------------------------------------------------------


def state_row_bytes(groups: Sequence[Group], page_bytes: int) -> int:
    """Count the bytes of one row's states, in whole pages."""
    return sum(slot_bytes(group, page_bytes) for group in _recurrent(groups))


class RowStates:
    """The states of ``num_rows`` rows. Their pages are taken when the first one is asked for."""

    def __init__(
        self, memory: CountedMemory, groups: Sequence[Group], num_rows: int, max_rows: int
    ) -> None:
        kept = _recurrent(groups)
        self.num_rows = num_rows
        self._row_bytes = state_row_bytes(groups, memory.page_bytes)
        self._used_bytes = sum(group.bytes_for(1) for group in kept)  # of a row
        self._max_rows = max_rows
        self._groups = [StateRows(memory, group, max_rows) for group in kept]
        self._group_of = {
            layer: rows
            for rows, group in zip(self._groups, kept, strict=True)
            for layer in group.layers
        }
        self._num_committed = 0  # rows with pages

    def layer(self, layer: int) -> tuple[Tensor, ...]:
        """Return each of a layer's states as the spec lists them: [rows, *shape], a view.

        Raises: MemoryUnavailable, and then only ``close`` is left.
        """
        self._back(self.num_rows)
        return tuple(kept[: self.num_rows] for kept in self._group_of[layer].layer(layer))

    def select(self, source_rows: list[int]) -> None:
        """Make row i a copy of row ``source_rows[i]``; there may be more or fewer than before.

        Raises: as ``layer``.
        """
        self.num_rows = len(source_rows)
        if not self._num_committed:
            return
        self._back(max(self._num_committed, self.num_rows))
        sources = torch.tensor(source_rows)
        for layer, rows in self._group_of.items():
            for kept in rows.layer(layer):  # one at a time: what is copied lies twice meanwhile
                kept[: self.num_rows] = kept[sources]
        self._back(self.num_rows)

    def take_over(self, other: "RowStates") -> None:
        """Make them a copy of another batch's states, of as many rows. Raises: as ``layer``."""
        if not other._num_committed:
            return
        for layer in self._group_of:
            for own, kept in zip(self.layer(layer), other.layer(layer), strict=True):
                own.copy_(kept)

    def added_to(self, usage: Usage) -> Usage:
        """Add these to the usage of keys and values."""
        taken = self._num_committed * self._row_bytes
        return replace(
            usage,
            reserved_bytes=usage.reserved_bytes + self._max_rows * self._row_bytes,
            committed_bytes=usage.committed_bytes + taken,
            used_bytes=usage.used_bytes + self._num_committed * self._used_bytes,
            page_table_bytes=(usage.page_table_bytes or 0) + tables_of_one_piece(taken),
        )

    def close(self) -> None:
        """Give everything back."""
        for rows in self._groups:
            rows.close()

    def _back(self, num_rows: int) -> None:
        """Have pages behind exactly so many rows."""
        held = self._num_committed
        for number, rows in enumerate(self._groups):
            if held < num_rows:
                rows.apply(Commit(number, held, num_rows))
            elif held > num_rows:
                rows.apply(Release(number, num_rows, held))
        self._num_committed = num_rows


def _recurrent(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if isinstance(group.spec, RecurrentState)]


# -- row sources -----------------------------------------------------------------------------------

# What a batch's rows read of their sources: one place a row, which rows may share.
#
# A source is written when its row has its first tokens and is as long in all rows, as an encoder's
# output is. Which row has which place, accounting knows.


def equally_spaced(places: Sequence[int]) -> slice | None:
    """Return them as a slice, if each lies behind the one before it at the same distance."""
    step = places[1] - places[0] if len(places) > 1 else 1
    if step < 1 or any(b - a != step for a, b in pairwise(places)):
        return None
    return slice(places[0], places[-1] + 1, step)


class Sources:
    """The keys and values of all rows' sources, over an accounting and its storage."""

    def __init__(self, accounting: Accounting, storage: Storage) -> None:
        self._accounting, self._storage = accounting, storage
        self._group_of = {
            layer: number
            for number, group in enumerate(accounting.groups)
            if isinstance(group.spec, CrossAttention)
            for layer in group.layers
        }
        self._length = 0  # tokens of a source

    @property
    def layers(self) -> list[int]:
        """Those that read a source."""
        return list(self._group_of)

    def take_over(self, other: "Sources") -> None:
        """Read what forks of another batch's rows hold."""
        self._length = other._length

    def write(self, layer: int, seq_ids: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Put in each row's keys and values: [rows, K, S, D] and […, Dv]."""
        slots = torch.tensor(self._slots(layer, seq_ids))
        self._length = k.shape[2]
        for kept, new in zip(self._kept(layer), (k, v), strict=True):
            kept[slots, :, : self._length] = new

    def read(
        self, layer: int, seq_ids: Sequence[int], owners: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return them as written; ``owners`` i64[rows]: whose place a row reads, if not its own.

        A view where one place or equally distant ones are read, else a copy.
        """
        slots = self._slots(layer, seq_ids)
        if owners is not None:
            slots = [slots[owner] for owner in owners.tolist()]
        k, v = (kept[:, :, : self._length] for kept in self._kept(layer))
        if len(set(slots)) == 1:
            num_rows, place = len(slots), slice(slots[0], slots[0] + 1)
            return k[place].expand(num_rows, -1, -1, -1), v[place].expand(num_rows, -1, -1, -1)
        places = equally_spaced(slots)
        if places is None:
            several = torch.tensor(slots)
            return k[several], v[several]
        return k[places], v[places]

    def _kept(self, layer: int) -> tuple[Tensor, ...]:
        """[slots, K, longest source, D] and […, Dv]."""
        return self._storage.states(self._group_of[layer]).layer(layer)

    def _slots(self, layer: int, seq_ids: Sequence[int]) -> list[int]:
        group = self._group_of[layer]
        return [place_of(self._accounting, group, seq_id) for seq_id in seq_ids]
