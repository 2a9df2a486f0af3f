"""Where the bytes lie: one region of address space a layer, in two layouts.

``RangeStorage`` holds ranges (contiguous, growing, virtual): head-major, [K, slots, D] and then
[K, slots, Dv]. ``BlockStorage`` holds blocks (paged): [N, K, {keys, values}, B, D], so that a block
is one piece of memory and a head's keys and values are neighbours. Both carry out changes in order
and never decide anything.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.blocks import Change, Commit, Copy, Release
from quire.errors import MemoryUnavailable
from quire.memory import CountedMemory, MemoryProvider, Region
from quire.spec import AttentionSpec
from quire.spec.layers import dtype_bytes
from quire.strategies.base import Accounting, LayerView
from quire.strategies.layout import attention_spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    region: Region
    view: LayerView
    k: "Tensor"  # ranges: [K, slots, D]; blocks: [N, K, B, D]
    v: "Tensor"


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of one layer that go together: ``count`` equal pieces, ``stride`` bytes apart."""

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

    def __init__(self, accounting: Accounting, provider: MemoryProvider) -> None:
        self.memory = CountedMemory(provider)
        self._groups = accounting.groups
        self._num_slots = [accounting.num_slots(group) for group in range(len(self._groups))]
        self._layers: dict[int, _Layer] = {}
        for index, group in enumerate(self._groups):
            longest = accounting.block_size(index)
            for layer in group.layers:
                self._layers[layer] = self._layer(
                    attention_spec(group), self._num_slots[index], longest
                )

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            layers = [self._layers[layer] for layer in self._groups[change.group].layers]
            if isinstance(change, Copy):
                for held in layers:
                    self._copy(held, change)
            else:
                _back(change, [pages for held in layers for pages in self._pages(held, change)])

    def write(self, layer: int, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        held = self._layers[layer]
        held.k.index_copy_(1, slots, k.transpose(0, 1))
        held.v.index_copy_(1, slots, v.transpose(0, 1))

    def gather(self, layer: int, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        held = self._layers[layer]
        return held.k[:, slots], held.v[:, slots]

    def view(self, layer: int) -> LayerView:
        return self._layers[layer].view

    def close(self) -> None:
        for held in self._layers.values():
            held.region.close()

    def _layer(self, spec: AttentionSpec, slots: int, longest: int) -> _Layer:
        import torch

        (heads, key_dim), (_, value_dim) = spec.entry_shapes
        key_elements = heads * slots * key_dim
        region = self.memory.reserve(slots * spec.bytes_per_token)
        flat = region.tensor(getattr(torch, spec.dtype))[: slots * heads * (key_dim + value_dim)]
        k = flat[:key_elements].view(heads, slots, key_dim)
        v = flat[key_elements:].view(heads, slots, value_dim)
        view = LayerView(
            k=_ranges_from_every_slot(k, longest), v=_ranges_from_every_slot(v, longest)
        )
        return _Layer(region, view, k, v)

    def _pages(self, held: _Layer, change: Commit | Release) -> Iterator[_Pages]:
        """One piece a head, among the keys and among the values."""
        spec = attention_spec(self._groups[change.group])
        slots, base = self._num_slots[change.group], 0
        for heads, width in spec.entry_shapes:
            row = width * dtype_bytes(spec.dtype)
            length = (change.stop - change.start) * row
            yield _Pages(held.region, base + change.start * row, length, slots * row, heads)
            base += heads * slots * row

    @staticmethod
    def _copy(held: _Layer, change: Copy) -> None:
        source = slice(change.source, change.source + change.num_slots)
        target = slice(change.target, change.target + change.num_slots)
        overlap = abs(change.source - change.target) < change.num_slots
        for rows in (held.k, held.v):
            rows[:, target] = rows[:, source].clone() if overlap else rows[:, source]


class BlockStorage:
    """Blocks of a pool."""

    def __init__(self, accounting: Accounting, provider: MemoryProvider) -> None:
        self.memory = CountedMemory(provider)
        self._groups = accounting.groups
        self._block_size = accounting.block_size(0)
        self._layers = {
            layer: self._layer(attention_spec(group), accounting.num_slots(index))
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
                row = attention_spec(group).bytes_per_token
                start, length = change.start * row, (change.stop - change.start) * row
                _back(change, [_Pages(held.region, start, length) for held in layers])

    def write(self, layer: int, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        held = self._layers[layer]
        block, offset = slots // self._block_size, slots % self._block_size
        held.k[block, :, offset] = k
        held.v[block, :, offset] = v

    def gather(self, layer: int, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        held = self._layers[layer]
        block, offset = slots // self._block_size, slots % self._block_size
        # [*S, K, D] → [K, *S, D]
        return held.k[block, :, offset].movedim(-2, 0), held.v[block, :, offset].movedim(-2, 0)

    def view(self, layer: int) -> LayerView:
        return self._layers[layer].view

    def close(self) -> None:
        for held in self._layers.values():
            held.region.close()

    def _layer(self, spec: AttentionSpec, slots: int) -> _Layer:
        import torch

        size = self._block_size
        (heads, key_dim), (_, value_dim) = spec.entry_shapes
        region = self.memory.reserve(slots * spec.bytes_per_token)
        flat = region.tensor(getattr(torch, spec.dtype))
        shape = (slots // size, heads, size)
        head = size * (key_dim + value_dim)  # elements: a head's keys, then its values
        k = flat.as_strided((*shape, key_dim), (heads * head, head, key_dim, 1))
        v = flat.as_strided((*shape, value_dim), (heads * head, head, value_dim, 1), size * key_dim)
        return _Layer(region, LayerView(k=k, v=v), k, v)

    def _copy(self, held: _Layer, change: Copy) -> None:
        """Within one block: this is copy-on-write."""
        source, start = divmod(change.source, self._block_size)
        target, goal = divmod(change.target, self._block_size)
        assert max(start, goal) + change.num_slots <= self._block_size, "a copy across blocks"
        for blocks in (held.k, held.v):
            blocks[target, :, goal : goal + change.num_slots] = blocks[
                source, :, start : start + change.num_slots
            ]


def _back(change: Commit | Release, pages: list[_Pages]) -> None:
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


def _ranges_from_every_slot(rows: "Tensor", longest: int) -> "Tensor":
    """[K, slots, D] → [slots - longest + 1, K, longest, D]: row i is the range from slot i on."""
    heads, slots, width = rows.shape
    return rows.as_strided(
        (slots - longest + 1, heads, longest, width), (width, slots * width, width, 1)
    )
