"""Rank 0's storage of a cache that lies in several ranks: its own part, and word to the others."""

from collections.abc import Callable, Iterable, Sequence
from typing import final

from torch import Tensor

from quire.kv import Change, LayerView, Storage
from quire.kv.storage.states import StateRows
from quire.memory import CountedMemory


@final
class RankedStorage:
    """What a step reads and writes here is this rank's; changes are made in all ranks.

    ``apply_all`` carries changes out in all ranks, this one's storage among them.
    """

    def __init__(
        self,
        own: Storage,
        apply_all: Callable[[Sequence[Change], Storage], None],
        close_others: Callable[[], None],
    ) -> None:
        self._own = own
        self._apply_all, self._close_others = apply_all, close_others

    @property
    def memory(self) -> CountedMemory:
        """This rank's: so much has each of them."""
        return self._own.memory

    def apply(self, changes: Iterable[Change]) -> None:
        several = list(changes)
        if several:  # of a step that changes nothing the other ranks need not hear
            self._apply_all(several, self._own)

    def settle(self) -> None:
        self._own.settle()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._own.write(layer, slots, k, v)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._own.gather(layer, slots)

    def save(self, layer: int, slots: Tensor) -> list[Tensor]:
        return self._own.save(layer, slots)

    def load(self, layer: int, slots: Tensor, parts: list[Tensor]) -> None:
        self._own.load(layer, slots, parts)

    def view(self, layer: int) -> LayerView:
        return self._own.view(layer)

    def states(self, group: int) -> StateRows:
        return self._own.states(group)

    def close(self) -> None:
        self._own.close()
        self._close_others()
