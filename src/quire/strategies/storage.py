"""Where the bytes lie: one region of address space a layer, in two layouts.

``RangeStorage`` holds ranges (contiguous, growing, virtual): head-major, [K, slots, D] and then
[K, slots, Dv]. ``BlockStorage`` holds blocks (paged): [N, K, {keys, values}, B, D], so that a block
is one piece of memory and a head's keys and values are neighbours. Scales come last (``layout``).
Both carry out changes in order and never decide anything.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.blocks import Change, Commit, Copy, Release
from quire.errors import MemoryUnavailable
from quire.memory import CountedMemory, MemoryProvider, Region
from quire.spec import AttentionSpec
from quire.spec.layers import dtype_bytes, scale_bytes
from quire.strategies.base import Accounting, EntryWriter, LayerView, MakeWriter
from quire.strategies.entries import Entries, RangeLayer, layer_view, stored
from quire.strategies.layout import attention_spec, range_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Range:
    """A layer of ranges, and its memory."""

    region: Region
    layer: RangeLayer


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A layer of blocks, and its memory."""

    region: Region
    view: LayerView
    keys: Entries
    values: Entries
    write: EntryWriter | None  # None: torch does it

    @property
    def parts(self) -> "list[Tensor]":
        """All that a slot has: [N, K, B, D] and [N, K, B]."""
        return [*self.keys.parts, *self.values.parts]


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one region that go together: ``count`` equal pieces, ``stride`` bytes apart."""

    region: Region
    offset: int
    nbytes: int
    stride: int = 0
    count: int = 1

    def commit(self) -> None:
        self.region.commit(self.offset, self.nbytes, stride=self.stride, count=self.count)

    def decommit(self) -> None:
        self.region.decommit(self.offset, self.nbytes, stride=self.stride, count=self.count)


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
        for index, group in enumerate(self._groups):
            longest = accounting.block_size(index)
            for layer in group.layers:
                self._layers[layer] = self._layer(
                    attention_spec(group), self._num_slots[index], longest, make_writer
                )

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            layers = [self._layers[layer] for layer in self._groups[change.group].layers]
            if isinstance(change, Copy):
                for held in layers:
                    self._copy(held.layer, change)
            else:
                assert isinstance(change, Commit | Release), f"{change} asks for a window"
                regions = [held.region for held in layers]
                back(change, [pages for each in regions for pages in self._pages(each, change)])

    def write(self, layer: int, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        self._layers[layer].layer.write(slots, k, v)

    def gather(self, layer: int, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        return self._layers[layer].layer.gather(slots)

    def save(self, layer: int, slots: "Tensor") -> "list[Tensor]":
        return self._layers[layer].layer.save(slots)

    def load(self, layer: int, slots: "Tensor", parts: "list[Tensor]") -> None:
        self._layers[layer].layer.load(slots, parts)

    def view(self, layer: int) -> LayerView:
        return self._layers[layer].layer.view

    def close(self) -> None:
        for held in self._layers.values():
            held.region.close()

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
        self._block_size = accounting.block_size(0)
        self._layers = {
            layer: self._layer(attention_spec(group), accounting.num_slots(index), make_writer)
            for index, group in enumerate(self._groups)
            for layer in group.layers
        }

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            group = self._groups[change.group]
            layers = [self._layers[layer] for layer in group.layers]
            if isinstance(change, Copy):
                for held in layers:
                    self._copy(held, change)
            else:
                assert isinstance(change, Commit | Release), f"{change} asks for a window"
                row = attention_spec(group).bytes_per_token
                start, length = change.start * row, (change.stop - change.start) * row
                back(change, [Pages(held.region, start, length) for held in layers])

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
        return [part[block, :, offset].cpu() for part in self._layers[layer].parts]

    def load(self, layer: int, slots: "Tensor", parts: "list[Tensor]") -> None:
        block, offset = slots // self._block_size, slots % self._block_size
        for held, part in zip(self._layers[layer].parts, parts, strict=True):
            held[block, :, offset] = part.to(held.device)

    def view(self, layer: int) -> LayerView:
        return self._layers[layer].view

    def close(self) -> None:
        for held in self._layers.values():
            held.region.close()

    def _layer(self, spec: AttentionSpec, slots: int, make_writer: MakeWriter | None) -> _Blocks:
        import torch

        size, dtype = self._block_size, getattr(torch, spec.dtype)
        (heads, key_dim), (_, value_dim) = spec.entry_shapes
        region = self.memory.reserve(slots * spec.bytes_per_token)
        flat = region.tensor(torch.uint8)[: slots * spec.bytes_per_token]
        # Bytes of a head: its keys, its values, the scales of both.
        scales = size * scale_bytes(spec.dtype)
        sizes = [size * width * dtype_bytes(spec.dtype) for width in (key_dim, value_dim)]
        parts = torch.split(flat.view(slots // size, heads, -1), [*sizes, scales, scales], 2)
        k = parts[0].view(dtype).view(-1, heads, size, key_dim)
        v = parts[1].view(dtype).view(-1, heads, size, value_dim)
        keys, values = Entries(k), Entries(v)
        if scales:
            keys = Entries(k, parts[2].view(torch.float32))
            values = Entries(v, parts[3].view(torch.float32))
        view = layer_view(keys, values, slots_per_row=size)
        return _Blocks(region, view, keys, values, make_writer and make_writer(view))

    def _copy(self, held: _Blocks, change: Copy) -> None:
        """Within one block: this is copy-on-write."""
        source, start = divmod(change.source, self._block_size)
        target, goal = divmod(change.target, self._block_size)
        assert max(start, goal) + change.num_slots <= self._block_size, "a copy across blocks"
        for blocks in held.parts:
            blocks[target, :, goal : goal + change.num_slots] = blocks[
                source, :, start : start + change.num_slots
            ]


def back(change: Commit | Release, pages: list[Pages]) -> None:
    """Carry a change out in every layer. A commit that is refused has committed none of them."""
    if isinstance(change, Release):
        for piece in pages:
            piece.decommit()
        return
    for index, piece in enumerate(pages):
        try:
            piece.commit()
        except MemoryUnavailable:
            for done in pages[:index]:
                done.decommit()
            raise
