"""Where the bytes of layers in stacks lie: a token's entries of all of them together.

In a stack, layer l of all tokens is a range ``[K, slots, D]`` with equal strides, so that a kernel
reads it as it reads any range. What is committed is one piece of each stack. Sequences see it as it
lies (ranges on large pages), or through a window each, which shows blocks in heaps (``virtual``
with sharing).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

from quire.errors import MemoryUnavailable
from quire.kv.interface import Accounting, LayerView, MakeWriter
from quire.kv.layout import Stacking, attention_spec
from quire.kv.storage.entries import Entries, RangeLayer
from quire.kv.storage.states import StateRows, make_states
from quire.kv.storage_ops import Commit, Copy, Map, Release, StorageOp, Unmap
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.memory import CountedMemory, MemoryProvider, Region, Window
from quire.memory.provider_wrappers import Pages, commit_pages
from quire.spec import AttentionSpec
from quire.spec.layer_specs import dtype_bytes, scale_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# -- the copy stream -------------------------------------------------------------------------------

# Copies of entries on a GPU, beside the steps: on a stream of their own.
#
# A step computes one layer after the other. So what is copied in a layer is waited for where that
# layer is used for the first time, and meanwhile the layers before it are computed.


@final
class CopyStream:
    """Copies that steps may not have waited for, by what they were made in.

    The caller is on the stream of the steps. What is copied has been written there by then, and
    what is written later, over what was copied, waits for the copy as readers do.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._cuda, self._device = torch.cuda, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: dict[Hashable, Any] = {}  # events

    @property
    def stream(self) -> int:
        """The stream's handle."""
        handle: int = self._stream.cuda_stream
        return handle

    def run(self, where: Hashable, copy: Callable[[], None]) -> None:
        """Begin when the steps so far are done."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        # The device first, as in ``devices``: a user's cache may be of another one.
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            copy()
        self._copied[where] = self._stream.record_event()

    def require(self, where: Hashable) -> None:
        """Make what is launched from now on wait for the copies made in ``where``."""
        event = self._copied.pop(where, None)
        if event is not None:
            self._cuda.current_stream(self._device).wait_event(event)

    def settle(self) -> None:
        """Make what is launched from now on wait for all copies."""
        for where in list(self._copied):
            self.require(where)


# -- stacked storage -------------------------------------------------------------------------------


class StackedAccounting(Accounting, Protocol):
    """An accounting of ranges says how they are laid out."""

    def stacking(self, group: int) -> Stacking | None:
        """Return how a group's layers lie together; None: each layer by itself, head by head."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """Layers that lie together."""

    region: Region
    rows: "Tensor"  # u8[slots, token_bytes]
    window: Window | None = None  # None: it is seen as it lies

    def seen(self, slots: int) -> "Tensor":
        """u8[slots, token_bytes]"""
        return self.rows if self.window is None else _rows(self.window, slots, self.rows.shape[1])

    def pages(self, change: Commit | Release) -> Pages:
        size = self.rows.shape[1]
        return Pages(self.region, change.start * size, (change.stop - change.start) * size)

    def copy(self, change: Copy) -> None:
        """Copy all that some tokens have here."""
        source = self.rows[change.source : change.source + change.num_slots]
        if abs(change.source - change.target) < change.num_slots:  # they overlap
            source = source.clone()
        self.rows[change.target : change.target + change.num_slots] = source

    def show(self, change: Map) -> None:
        assert self.window is not None, f"{change} asks for a window"
        size = self.rows.shape[1]
        self.window.map(change.target * size, change.source * size, change.num_slots * size)

    def hide(self, start: int, stop: int) -> None:
        assert self.window is not None, "nothing is hidden without a window"
        size = self.rows.shape[1]
        self.window.unmap(start * size, (stop - start) * size)


class StackedStorage:
    """See ``Storage``."""

    def __init__(
        self,
        accounting: StackedAccounting | SharedVirtualAccounting,
        provider: MemoryProvider,
        make_writer: MakeWriter | None = None,
    ) -> None:
        self.memory = CountedMemory(provider)
        self._block_size = 1
        if isinstance(accounting, SharedVirtualAccounting):
            self._block_size = accounting.shown_slots
        self._layers: dict[int, tuple[_Stack, RangeLayer]] = {}
        self._states = make_states(self.memory, accounting.groups, accounting.num_slots)
        self._stacks: dict[int, list[_Stack]] = {}  # of each group with tokens
        for index, group in enumerate(accounting.groups):
            if index in self._states:
                continue
            spec, slots = attention_spec(group), accounting.num_slots(index)
            layout, longest = accounting.stacking(index), accounting.block_size(index)
            assert layout is not None, "its ranges are head-major"
            self._stacks[index] = []
            for layers in layout.stacks(group):
                if isinstance(accounting, SharedVirtualAccounting):
                    stack = self._in_heaps(accounting, index, layout.token_bytes)
                else:
                    stack = self._in_a_row(slots, layout.token_bytes)
                self._stacks[index].append(stack)
                found = _layers(stack.seen(slots), spec, layers, longest, make_writer)
                self._layers |= {layer: (stack, held) for layer, held in found.items()}
        self._beside = self._copies_beside()

    def apply(self, changes: Iterable[StorageOp]) -> None:
        for change in changes:
            if change.group in self._states:
                self._states[change.group].apply(change)
                continue
            stacks = self._stacks[change.group]
            if isinstance(change, Map):
                _show(stacks, change)
            elif isinstance(change, Unmap):
                for stack in stacks:
                    stack.hide(change.start, change.stop)
            elif isinstance(change, Copy):
                for stack in stacks:
                    self._copy(stack, change)
            else:
                pages = [stack.pages(change) for stack in stacks]
                if isinstance(change, Commit):
                    commit_pages(pages)
                else:
                    for each in pages:
                        each.region.decommit(each.offset, each.nbytes)

    def settle(self) -> None:
        if self._beside is not None:
            self._beside.settle()

    def write(self, layer: int, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        self._settled(layer).write(slots, k, v)

    def gather(self, layer: int, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        return self._settled(layer).gather(slots)

    def save(self, layer: int, slots: "Tensor") -> "list[Tensor]":
        return self._settled(layer).save(slots)

    def load(self, layer: int, slots: "Tensor", parts: "list[Tensor]") -> None:
        self._settled(layer).load(slots, parts)

    block_order = "token first"  # [tokens, layers, heads, D]

    def block_rows(self, group: int) -> "list[Tensor]":
        if group in self._states:
            return [self._states[group].rows]
        self.settle()
        size = self._block_size
        return [
            stack.rows[: len(stack.rows) // size * size].view(-1, size * stack.rows.shape[1])
            for stack in self._stacks[group]
        ]

    def view(self, layer: int) -> LayerView:
        """Return the view of a layer."""
        return self._settled(layer).view

    def states(self, group: int) -> StateRows:
        return self._states[group]

    def close(self) -> None:
        for stack in (stack for stacks in self._stacks.values() for stack in stacks):
            stack.region.close()
        for rows in self._states.values():
            rows.close()
        self.copy_in_line()

    def copy_in_line(self) -> None:
        """Copy on the stream of the steps from now on, between two of them."""
        if self._beside is not None:
            self._beside.settle()
            self.memory.used_on(self._beside.stream, ends=True)
            self._beside = None

    def _copies_beside(self) -> CopyStream | None:
        """On a device that does several things at a time."""
        stack = next((stack for stacks in self._stacks.values() for stack in stacks), None)
        if stack is None or stack.rows.device.type != "cuda":
            return None
        beside = CopyStream(stack.rows.device)
        self.memory.used_on(beside.stream)
        return beside

    def _copy(self, stack: _Stack, change: Copy) -> None:
        if self._beside is None:
            stack.copy(change)
        else:
            self._beside.run(stack, partial(stack.copy, change))

    def _settled(self, layer: int) -> RangeLayer:
        """A layer in which nothing is copied any more."""
        stack, found = self._layers[layer]
        if self._beside is not None:
            self._beside.require(stack)
        return found

    def _in_a_row(self, slots: int, token_bytes: int) -> _Stack:
        region = self.memory.reserve(slots * token_bytes)
        return _Stack(region, _rows(region, slots, token_bytes))

    def _in_heaps(
        self, accounting: SharedVirtualAccounting, group: int, token_bytes: int
    ) -> _Stack:
        slots = accounting.pool_slots(group)
        region = self.memory.reserve(
            slots * token_bytes, heap_bytes=accounting.heap_slots(group) * token_bytes
        )
        window = region.window(accounting.num_slots(group) * token_bytes)
        return _Stack(region, _rows(region, slots, token_bytes), window)


def _show(several: list[_Stack], change: Map) -> None:
    """Show pages in all stacks, or in none. Raises: MemoryUnavailable."""
    for index, stack in enumerate(several):
        try:
            stack.show(change)
        except MemoryUnavailable:
            for done in several[:index]:
                done.hide(change.target, change.target + change.num_slots)
            raise


def _rows(memory: Region | Window, slots: int, token_bytes: int) -> "Tensor":
    """A row for each token: u8[slots, token_bytes]."""
    import torch

    return memory.tensor(torch.uint8)[: slots * token_bytes].view(slots, token_bytes)


def _layers(
    rows: "Tensor",
    spec: AttentionSpec,
    layers: Sequence[int],
    longest: int,
    make_writer: MakeWriter | None,
) -> dict[int, RangeLayer]:
    """The layers of a stack, among the rows of its tokens."""
    found = {}
    for number, layer in enumerate(layers):
        keys, values = _entries(rows, spec, number * spec.bytes_per_token)
        found[layer] = RangeLayer(keys, values, longest, make_writer)
    return found


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
