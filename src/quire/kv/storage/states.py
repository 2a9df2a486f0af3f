"""Where recurrent states and sources lie, the same in every strategy: a row of pages each.

A row holds one sequence's states in all layers of a group, or its source's keys and values, side by
side: it is committed, copied and given back as one. Rows are slots, which accounting hands out;
what is written into them is the models' affair.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.kv.layout import slot_bytes, state_offsets
from quire.kv.storage_ops import Commit, Copy, Release, StorageOp
from quire.memory import CountedMemory
from quire.spec import Group, KeptWhole
from quire.spec.layer_specs import dtype_bytes

if TYPE_CHECKING:
    from torch import Tensor


class StateRows:
    """One group's states, ``num_slots`` of them."""

    def __init__(self, memory: CountedMemory, group: Group, num_slots: int) -> None:
        import torch

        assert isinstance(group.spec, KeptWhole), "tokens have no rows"
        self._row_bytes = slot_bytes(group, memory.page_bytes)
        self._region = memory.reserve(num_slots * self._row_bytes)
        flat = self._region.tensor(torch.uint8)[: num_slots * self._row_bytes]
        self._rows = flat.view(num_slots, self._row_bytes)
        offsets, layer_bytes = state_offsets(group.spec)
        self._used_bytes = layer_bytes * group.num_layers  # of a row
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        for number, layer in enumerate(group.layers):
            tensors = []
            for state, offset in zip(group.spec.states, offsets, strict=True):
                first, dtype = number * layer_bytes + offset, getattr(torch, state.dtype)
                length = state.num_bytes // dtype_bytes(state.dtype)
                part = self._rows[:, first : first + state.num_bytes].view(dtype)
                assert part.shape[1] == length, f"{state.name} lies across its own size"
                tensors.append(part.view(num_slots, *state.shape))
            self._layers[layer] = tuple(tensors)

    def layer(self, layer: int) -> "tuple[Tensor, ...]":
        """Return each of its states as the spec lists them: [slots, *shape]."""
        return self._layers[layer]

    def apply(self, change: StorageOp) -> None:
        """Carry a change out. Raises: MemoryUnavailable, and then nothing of it is done."""
        if isinstance(change, Copy):
            stop = change.source + change.num_slots
            target = self._rows[change.target : change.target + change.num_slots]
            target.copy_(self._rows[change.source : stop])
            return
        assert isinstance(change, Commit | Release), f"{change} asks for a window"
        start, stop = change.start * self._row_bytes, change.stop * self._row_bytes
        if isinstance(change, Commit):
            self._region.commit(start, stop - start)
        else:
            self._region.decommit(start, stop - start)

    @property
    def rows(self) -> "Tensor":
        """Return what each slot has: u8[slots, bytes]."""
        return self._rows[:, : self._used_bytes]

    def save(self, slots: "Tensor") -> "list[Tensor]":
        """Copy rows out: slots i64[n]; one tensor, u8[n, bytes]."""
        return [self._rows[slots, : self._used_bytes]]

    def load(self, slots: "Tensor", parts: "list[Tensor]") -> None:
        """Put back what ``save`` gave: slots i64[n], one tensor u8[n, bytes]."""
        (rows,) = parts
        self._rows[slots, : self._used_bytes] = rows.to(self._rows.device)

    def close(self) -> None:
        """Give every page back."""
        self._region.close()


def make_states(
    memory: CountedMemory, groups: tuple[Group, ...], num_slots: Callable[[int], int]
) -> dict[int, StateRows]:
    """Make rows for the groups that keep something whole, by the groups' numbers."""
    return {
        index: StateRows(memory, group, num_slots(index))
        for index, group in enumerate(groups)
        if isinstance(group.spec, KeptWhole)
    }
