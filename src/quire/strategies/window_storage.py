"""Where the bytes lie that sequences see through windows: ``virtual`` with sharing.

A stack of layers has one region of blocks, in heaps, and one range of addresses with a window for
each sequence. A token's entries lie together, ``[layers, K, {key, value}, D]`` (scales last), so
that in a window layer l of all tokens is a range ``[K, slots, D]`` with equal strides.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.blocks import Change, Commit, Copy, Map, Release, Unmap
from quire.errors import MemoryUnavailable
from quire.memory import CountedMemory, MemoryProvider, Region, Window
from quire.spec import AttentionSpec
from quire.spec.layers import dtype_bytes, scale_bytes
from quire.strategies.entries import Entries, RangeLayer
from quire.strategies.layout import attention_spec, stacks
from quire.strategies.pages import Pages, back
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
            for layers in stacks(group, accounting.stack_layers):
                stack = self._stack(accounting, index, len(layers) * spec.bytes_per_token)
                self._stacks[-1].append(stack)
                seen = _rows(stack.window, slots, stack.token_bytes)
                for number, layer in enumerate(layers):
                    keys, values = _entries(seen, spec, number * spec.bytes_per_token)
                    self._layers[layer] = RangeLayer(keys, values, longest, make_writer)

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
                    _copy(stack.blocks, change)
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
            blocks=_rows(region, slots, token_bytes),
        )


def _rows(memory: Region | Window, slots: int, token_bytes: int) -> "Tensor":
    import torch

    return memory.tensor(torch.uint8)[: slots * token_bytes].view(slots, token_bytes)


def _entries(rows: "Tensor", spec: AttentionSpec, start: int) -> tuple[Entries, Entries]:
    """One layer's keys and values among the bytes of tokens: rows u8[slots, token_bytes]."""
    import torch

    (heads, key_dim), (_, value_dim) = spec.entry_shapes
    size, scale, slots = dtype_bytes(spec.dtype), scale_bytes(spec.dtype), len(rows)
    width = (key_dim + value_dim) * size
    codes = rows[:, start : start + heads * width].view(getattr(torch, spec.dtype))
    both = codes.view(slots, heads, key_dim + value_dim).transpose(0, 1)  # [K, slots, D + Dv]
    k, v = both[..., :key_dim], both[..., key_dim:]
    if not scale:
        return Entries(k), Entries(v)
    first = start + heads * width
    scales = rows[:, first : first + 2 * heads * scale].view(torch.float32)
    of_each = scales.view(slots, heads, 2).permute(2, 1, 0)  # [{key, value}, K, slots]
    return Entries(k, of_each[0]), Entries(v, of_each[1])


def _pages(stack: _Stack, change: Commit | Release) -> Pages:
    size = stack.token_bytes
    return Pages(stack.region, change.start * size, (change.stop - change.start) * size)


def _copy(blocks: "Tensor", change: Copy) -> None:
    """Between two blocks: this is copy-on-write."""
    source = blocks[change.source : change.source + change.num_slots]
    blocks[change.target : change.target + change.num_slots] = source


def _show(several: list[_Stack], change: Map) -> None:
    """In all stacks, or in none."""
    for index, stack in enumerate(several):
        try:
            stack.show(change)
        except MemoryUnavailable:
            for done in several[:index]:
                done.hide(change.target, change.target + change.num_slots)
            raise
