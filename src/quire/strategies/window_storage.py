"""Where the bytes lie that sequences see through windows: ``virtual`` with sharing.

A stack of layers has one region of blocks, in heaps, and one range of addresses with a window for
each sequence, in which each layer of all tokens is a range (``stacking``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.blocks import Change, Commit, Copy, Map, Release, Unmap
from quire.errors import MemoryUnavailable
from quire.memory import CountedMemory, MemoryProvider, Region, Window
from quire.strategies.entries import RangeLayer
from quire.strategies.layout import attention_spec
from quire.strategies.pages import Pages, back
from quire.strategies.stacked_storage import copy_tokens, stacked_layers, token_rows
from quire.strategies.states import StateRows, make_states
from quire.strategies.view import LayerView, MakeWriter
from quire.strategies.virtual_shared import SharedVirtualAccounting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers that lie together."""

    token_bytes: int
    region: Region
    window: Window
    blocks: "Tensor"  # u8[slots of the pool, token_bytes]

    def show(self, change: Map) -> None:
        size = self.token_bytes
        self.window.map(change.target * size, change.source * size, change.num_slots * size)

    def hide(self, start: int, stop: int) -> None:
        self.window.unmap(start * self.token_bytes, (stop - start) * self.token_bytes)


class WindowStorage:
    """Blocks in heaps, seen through windows."""

    def __init__(
        self,
        accounting: SharedVirtualAccounting,
        provider: MemoryProvider,
        make_writer: MakeWriter | None = None,
    ) -> None:
        self.memory = CountedMemory(provider)
        self._layers: dict[int, RangeLayer] = {}
        self._states = make_states(self.memory, accounting)
        self._stacks: list[list[_Stack]] = []  # of each group with tokens; they come first
        for index, group in enumerate(accounting.groups):
            if index in self._states:
                continue
            spec, slots = attention_spec(group), accounting.num_slots(index)
            longest = accounting.block_size(index)
            self._stacks.append([])
            layout = accounting.stacking(index)
            for layers in layout.stacks(group):
                stack = self._stack(accounting, index, layout.token_bytes)
                self._stacks[-1].append(stack)
                seen = token_rows(stack.window, slots, stack.token_bytes)
                self._layers |= stacked_layers(seen, spec, layers, longest, make_writer)

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.group in self._states:
                self._states[change.group].apply(change)
                continue
            stacks_ = self._stacks[change.group]
            if isinstance(change, Map):
                _show(stacks_, change)
            elif isinstance(change, Unmap):
                for stack in stacks_:
                    stack.hide(change.start, change.stop)
            elif isinstance(change, Copy):
                for stack in stacks_:
                    copy_tokens(stack.blocks, change)
            else:
                back(change, [_pages(stack, change) for stack in stacks_])

    def write(self, layer: int, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        self._layers[layer].write(slots, k, v)

    def gather(self, layer: int, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        return self._layers[layer].gather(slots)

    def save(self, layer: int, slots: "Tensor") -> "list[Tensor]":
        return self._layers[layer].save(slots)

    def load(self, layer: int, slots: "Tensor", parts: "list[Tensor]") -> None:
        self._layers[layer].load(slots, parts)

    def view(self, layer: int) -> LayerView:
        return self._layers[layer].view

    def states(self, group: int) -> StateRows:
        return self._states[group]

    def close(self) -> None:
        for several in self._stacks:
            for stack in several:
                stack.region.close()
        for rows in self._states.values():
            rows.close()

    def _stack(self, accounting: SharedVirtualAccounting, group: int, token_bytes: int) -> _Stack:
        slots = accounting.pool_slots(group)
        region = self.memory.reserve(
            slots * token_bytes, heap_bytes=accounting.heap_slots(group) * token_bytes
        )
        return _Stack(
            token_bytes=token_bytes,
            region=region,
            window=region.window(accounting.num_slots(group) * token_bytes),
            blocks=token_rows(region, slots, token_bytes),
        )


def _pages(stack: _Stack, change: Commit | Release) -> Pages:
    size = stack.token_bytes
    return Pages(stack.region, change.start * size, (change.stop - change.start) * size)


def _show(several: list[_Stack], change: Map) -> None:
    """In all stacks, or in none."""
    for index, stack in enumerate(several):
        try:
            stack.show(change)
        except MemoryUnavailable:
            for done in several[:index]:
                done.hide(change.target, change.target + change.num_slots)
            raise
