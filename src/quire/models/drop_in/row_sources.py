"""What a batch's rows read of their sources: one place a row, which rows may share.

A source is written when its row has its first tokens and is as long in all rows, as an encoder's
output is. Which row has which place, accounting knows.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quire.kv import Accounting, Storage
from quire.kv.interface import place_of
from quire.spec import CrossAttention


def equally_spaced(places: Sequence[int]) -> slice | None:
    """Them as a slice, if each lies behind the one before it at the same distance."""
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
        """They as they were written; ``owners`` (i64[rows]): whose place a row reads, if not its.

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
