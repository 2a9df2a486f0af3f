"""Where the bytes lie: one region of address space a layer, in two layouts.

``RangeStorage`` holds ranges (contiguous, growing, virtual): head-major, [K, slots, D] and then
[K, slots, Dv]. ``BlockStorage`` holds blocks (paged): [N, K, {keys, values}, B, D], so that a block
is one piece of memory and a head's keys and values are neighbours. Scales come last (``layout``).
Both carry out changes in order and never decide anything.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.kv.interface import Accounting, EntryWriter, LayerView, MakeWriter
from quire.kv.layout import attention_spec, range_rows, row_bytes
from quire.kv.storage.entries import Entries, RangeLayer, layer_view, stored
from quire.kv.storage.states import StateRows, make_states
from quire.kv.storage_ops import Commit, Copy, Release, StorageOp
from quire.memory import CountedMemory, MemoryProvider, Region
from quire.memory.provider_wrappers import Pages, commit_pages
from quire.spec import AttentionSpec, Group
from quire.spec.layer_specs import dtype_bytes, scale_bytes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Range:
    """A layer of ranges, and its memory."""

    region: Region
    layer: RangeLayer


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A layer of blocks."""

    view: LayerView
    keys: Entries
    values: Entries
    write: EntryWriter | None  # None: torch does it
    rows: "Tensor"  # u8[N, bytes of a block]: all of them

    @property
    def parts(self) -> "list[Tensor]":
        """All that a slot has: [N, K, B, D] and [N, K, B]."""
        return [*self.keys.parts, *self.values.parts]


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where a group's blocks lie: a region for each layer, or one region with a row for all."""

    regions: tuple[Region, ...]
    block_bytes: int  # in each

    def pages(self, first: int, count: int) -> list[Pages]:
        """Return the pages of neighbouring blocks."""
        start, length = first * self.block_bytes, count * self.block_bytes
        return [Pages(region, start, length) for region in self.regions]


class RangeStorage:
    """Head-major ranges."""

    def __init__(
        self,
        accounting: Accounting,
        provider: MemoryProvider,
        make_writer: MakeWriter | None = None,
    ) -> None:
        self.memory = CountedMemory(provider)
        self._groups = accounting.groups
        self._num_slots = [accounting.num_slots(group) for group in range(len(self._groups))]
        self._layers: dict[int, _Range] = {}
        self._states = make_states(self.memory, accounting.groups, accounting.num_slots)
        for index, group in enumerate(self._groups):
            if index in self._states:
                continue
            longest = accounting.block_size(index)
            for layer in group.layers:
                self._layers[layer] = self._layer(
                    attention_spec(group), self._num_slots[index], longest, make_writer
                )

    def apply(self, changes: Iterable[StorageOp]) -> None:
        for change in changes:
            if change.group in self._states:
                self._states[change.group].apply(change)
                continue
            layers = [self._layers[layer] for layer in self._groups[change.group].layers]
            if isinstance(change, Copy):
                for held in layers:
                    self._copy(held.layer, change)
            else:
                assert isinstance(change, Commit | Release), f"{change} asks for a window"
                pages = [each for held in layers for each in self._pages(held.region, change)]
                _change_pages(pages, change)

    def settle(self) -> None:
        """Do nothing: no copy runs beside the steps."""

    def write(self, layer: int, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        self._layers[layer].layer.write(slots, k, v)

    def gather(self, layer: int, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        return self._layers[layer].layer.gather(slots)

    def save(self, layer: int, slots: "Tensor") -> "list[Tensor]":
        return self._layers[layer].layer.save(slots)

    def load(self, layer: int, slots: "Tensor", parts: "list[Tensor]") -> None:
        self._layers[layer].layer.load(slots, parts)

    def view(self, layer: int) -> LayerView:
        """Return the view of a layer."""
        return self._layers[layer].layer.view

    def states(self, group: int) -> StateRows:
        return self._states[group]

    def close(self) -> None:
        for held in self._layers.values():
            held.region.close()
        for rows in self._states.values():
            rows.close()

    def _layer(
        self, spec: AttentionSpec, slots: int, longest: int, make_writer: MakeWriter | None
    ) -> _Range:
        import torch

        (heads, key_dim), (_, value_dim) = spec.entry_shapes
        sizes = [heads * slots * key_dim, heads * slots * value_dim]  # elements
        region = self.memory.reserve(slots * spec.bytes_per_token)
        flat = region.tensor(getattr(torch, spec.dtype))[: sum(sizes)]
        k, v = torch.split(flat, sizes)
        keys = Entries(k.view(heads, slots, key_dim))
        values = Entries(v.view(heads, slots, value_dim))
        if scale := scale_bytes(spec.dtype):
            start = sum(sizes) * dtype_bytes(spec.dtype) // scale
            flat = region.tensor(torch.float32)[start : start + 2 * heads * slots]
            scales = flat.view(slots, heads, 2).permute(2, 1, 0)  # [{key, value}, K, slots]
            keys, values = Entries(keys.codes, scales[0]), Entries(values.codes, scales[1])
        return _Range(region, RangeLayer(keys, values, longest, make_writer))

    def _pages(self, region: Region, change: Commit | Release) -> Iterator[Pages]:
        """One piece a head, among the keys and among the values; one among the scales."""
        spec = attention_spec(self._groups[change.group])
        slots, base = self._num_slots[change.group], 0
        for pieces, row in range_rows(spec):
            length = (change.stop - change.start) * row
            yield Pages(region, base + change.start * row, length, slots * row, pieces)
            base += pieces * slots * row

    @staticmethod
    def _copy(held: RangeLayer, change: Copy) -> None:
        source = slice(change.source, change.source + change.num_slots)
        target = slice(change.target, change.target + change.num_slots)
        overlap = abs(change.source - change.target) < change.num_slots
        for rows in held.parts:
            rows[:, target] = rows[:, source].clone() if overlap else rows[:, source]


def _change_pages(pages: Sequence[Pages], change: Commit | Release) -> None:
    if isinstance(change, Commit):
        commit_pages(pages)
        return
    for each in pages:
        each.region.decommit(each.offset, each.nbytes, stride=each.stride, count=each.count)


class BlockStorage:
    """Blocks of a pool."""

    def __init__(
        self,
        accounting: Accounting,
        provider: MemoryProvider,
        make_writer: MakeWriter | None = None,
    ) -> None:
        self.memory = CountedMemory(provider)
        self._groups = accounting.groups
        # Groups of states come last; without any group there is no token to find.
        self._block_size = accounting.block_size(0) if self._groups else 1
        self._states = make_states(self.memory, accounting.groups, accounting.num_slots)
        self._layers: dict[int, _Blocks] = {}
        self._memory: dict[int, _Memory] = {}  # of each group
        for index, group in enumerate(self._groups):
            if index not in self._states:
                num_blocks = accounting.num_slots(index) // self._block_size
                self._memory[index] = self._add(group, num_blocks, make_writer)

    def apply(self, changes: Iterable[StorageOp]) -> None:
        for change in changes:
            if change.group in self._states:
                self._states[change.group].apply(change)
            elif isinstance(change, Copy):
                for layer in self._groups[change.group].layers:
                    self._copy(self._layers[layer], change)
            else:
                assert isinstance(change, Commit | Release), f"{change} asks for a window"
                first, stop = change.start // self._block_size, change.stop // self._block_size
                pages = self._memory[change.group].pages(first, stop - first)
                _change_pages(pages, change)

    def settle(self) -> None:
        """Do nothing: no copy runs beside the steps."""

    def write(self, layer: int, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        held = self._layers[layer]
        if held.write is not None:
            held.write(slots, k, v)
            return
        block, offset = slots // self._block_size, slots % self._block_size
        for blocks, new in stored(held.keys, held.values, k, v):
            blocks[block, :, offset] = new

    def gather(self, layer: int, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        held = self._layers[layer]
        index = (slots // self._block_size, slice(None), slots % self._block_size)
        # [*S, K, D] → [K, *S, D]
        return held.keys.read(index).movedim(-2, 0), held.values.read(index).movedim(-2, 0)

    def save(self, layer: int, slots: "Tensor") -> "list[Tensor]":
        block, offset = slots // self._block_size, slots % self._block_size
        return [part[block, :, offset] for part in self._layers[layer].parts]

    def load(self, layer: int, slots: "Tensor", parts: "list[Tensor]") -> None:
        block, offset = slots // self._block_size, slots % self._block_size
        for held, part in zip(self._layers[layer].parts, parts, strict=True):
            held[block, :, offset] = part.to(held.device)

    block_order = "heads first"  # of each layer [heads, tokens, D]

    def block_rows(self, group: int) -> "list[Tensor]":
        if group in self._states:
            return [self._states[group].rows]
        return [self._layers[layer].rows for layer in self._groups[group].layers]

    def view(self, layer: int) -> LayerView:
        """Return the view of a layer."""
        return self._layers[layer].view

    def states(self, group: int) -> StateRows:
        return self._states[group]

    def close(self) -> None:
        for memory in self._memory.values():
            for region in memory.regions:
                region.close()
        for rows in self._states.values():
            rows.close()

    def _add(self, group: Group, num_blocks: int, make_writer: MakeWriter | None) -> _Memory:
        import torch

        spec = attention_spec(group)
        block = spec.block_bytes(self._block_size)
        row = row_bytes(group, self._block_size, self.memory.page_bytes)
        regions = tuple(
            self.memory.reserve(num_blocks * (row or block))
            for _ in (group.layers if row is None else group.layers[:1])
        )
        for number, layer in enumerate(group.layers):
            region, first = (regions[number], 0) if row is None else (regions[0], number * block)
            flat = region.tensor(torch.uint8)[: num_blocks * (row or block)]
            own = flat.view(num_blocks, -1)[:, first : first + block]
            self._layers[layer] = self._layer(spec, own, make_writer)
        return _Memory(regions, row or block)

    def _layer(
        self, spec: AttentionSpec, blocks: "Tensor", make_writer: MakeWriter | None
    ) -> _Blocks:
        """``blocks``: u8[N, bytes of one]."""
        import torch

        size, dtype = self._block_size, getattr(torch, spec.dtype)
        (heads, key_dim), (_, value_dim) = spec.entry_shapes
        # Bytes of a head: its keys, its values, the scales of both.
        scales = size * scale_bytes(spec.dtype)
        sizes = [size * width * dtype_bytes(spec.dtype) for width in (key_dim, value_dim)]
        parts = torch.split(blocks.view(len(blocks), heads, -1), [*sizes, scales, scales], 2)
        k = parts[0].view(dtype).view(-1, heads, size, key_dim)
        v = parts[1].view(dtype).view(-1, heads, size, value_dim)
        keys, values = Entries(k), Entries(v)
        if scales:
            keys = Entries(k, parts[2].view(torch.float32))
            values = Entries(v, parts[3].view(torch.float32))
        view = layer_view(keys, values, slots_per_row=size)
        return _Blocks(view, keys, values, make_writer and make_writer(view), blocks)

    def _copy(self, held: _Blocks, change: Copy) -> None:
        """Within one block: this is copy-on-write."""
        source, start = divmod(change.source, self._block_size)
        target, goal = divmod(change.target, self._block_size)
        assert max(start, goal) + change.num_slots <= self._block_size, "a copy across blocks"
        for blocks in held.parts:
            blocks[target, :, goal : goal + change.num_slots] = blocks[
                source, :, start : start + change.num_slots
            ]
