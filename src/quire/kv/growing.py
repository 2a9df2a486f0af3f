"""Grow and copy: one buffer a sequence and layer, replaced by a larger one when it is full.

Old and new live together while tokens are copied. Two things decide how high that peak is: whether
all layers grow at the same step (``staggered`` spreads them, as OpenVINO's GPU plugin does), and
whether an old buffer is given back right after its copy or, where the graph still reads it, only in
the next step (``keep_old``). Each layer, or stack of layers, is a group of its own.

By how much buffers grow is decided in ``growth``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from quire.kv.allocation import FITS, AllocationResult, NotNow
from quire.kv.interface import AS_IT_IS, CacheConfig, Counts, Extension, Growth
from quire.kv.layout import Stacking, apart, page_tokens, slot_bytes
from quire.kv.occupancy import HeldRange
from quire.kv.ranges import RangeAccounting
from quire.kv.storage_ops import Commit, Copy, Release, StorageOp
from quire.spec import Group, KeptWhole
from quire.units import align_up

# -- growth ----------------------------------------------------------------------------------------

# How large the next buffer of ``growing`` is: policies by name.
#
# Source: OpenVINO ``128 + id % 64`` tokens ahead; mlx-lm steps of 256; Hugging Face's DynamicCache
# is a step of 1.


# (capacity, needed, step, layer) → the next capacity, in tokens
NextCapacity = Callable[[int, int, int, int], int]


def uniform(capacity: int, needed: int, step: int, layer: int) -> int:
    """Grow by whole steps; every layer grows at the same token."""
    return align_up(needed, step)


def doubling(capacity: int, needed: int, step: int, layer: int) -> int:
    """Grow to twice the capacity until it suffices: few copies, up to half of it unused."""
    capacity = max(capacity, step)
    while capacity < needed:
        capacity *= 2
    return capacity


def staggered(capacity: int, needed: int, step: int, layer: int) -> int:
    """Grow ``step + layer % 64`` tokens ahead: neighbouring layers are full at different tokens."""
    return needed + step + layer % 64


GROWTH: Mapping[Growth, NextCapacity] = MappingProxyType(
    {"uniform": uniform, "doubling": doubling, "staggered": staggered}
)


# -- growing ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Buffers:
    """A sequence's buffers: for each layer its capacity, and which of its two places it is in."""

    row: int
    num_tokens: int
    capacities: list[int]  # tokens, as the policy asked
    sides: list[int]  # 0 or 1: a buffer grows into the place that it is not in
    outgrown: list[Release] = field(default_factory=list)  # with keep_old: what is still kept …
    outgrown_in: int = -1  # … since this step


class GrowingAccounting(RangeAccounting[_Buffers]):
    """Buffers that grow by copying; bytes are counted in pages, old and new together."""

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        longest, page = config.max_model_len, config.page_bytes
        parts = apart(groups, page, config.layers_per_page)
        super().__init__(tuple(group for group, _ in parts), config)
        self._stackings = [stacked for _, stacked in parts]
        self._grow = GROWTH[config.growth]
        self._slot_bytes = [s.slot_bytes if s else slot_bytes(g, page) for g, s in parts]
        self._is_state = [isinstance(group.spec, KeptWhole) for group in self.groups]
        self._page_tokens = [s.page_tokens(page) if s else page_tokens(g, page) for g, s in parts]
        self._row_slots = [self.page_slots(group, longest) for group in range(len(parts))]
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._committed_bytes = 0
        # What some lengths take; of those between, the next one is near enough.
        self._lengths = np.unique(np.linspace(0, longest, min(longest, 256) + 1).astype(np.int64))
        self._bytes_at = np.array([self.bytes_for(n) for n in self._lengths.tolist()], np.int64)
        self._step = 0  # calls of drain so far

    @property
    def held_bytes(self) -> int:
        return self._committed_bytes

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        return self._bytes_at[np.searchsorted(self._lengths, num_tokens)]

    def stacking(self, group: int) -> Stacking | None:
        """Return how a group's layers lie together; None: head by head, one layer."""
        return self._stackings[group]

    def num_slots(self, group: int) -> int:
        return 2 * super().num_slots(group)

    def slot_bytes(self, group: int) -> int:
        return self._slot_bytes[group]

    def page_tokens(self, group: int) -> int:
        return self._page_tokens[group]

    def row_slots(self, group: int) -> int:
        return self._row_slots[group]

    def begin(self, max_tokens: int | None) -> _Buffers:
        none = [0] * len(self.groups)
        return _Buffers(row=-1, num_tokens=0, capacities=none, sides=none.copy())

    def resize(self, capacity_bytes: int, *, for_now: bool = False) -> int:
        for held in self._unread():
            self._give_back_outgrown(held)
        return super().resize(capacity_bytes, for_now=for_now)

    def try_extend(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        held = self.sequences[seq_id]
        if num_tokens <= held.num_tokens:
            return FITS
        if num_tokens > self.config.max_model_len:
            return self.never(num_tokens)
        room = min(num_tokens + extension.lookahead_tokens, self.config.max_model_len)
        wanted = [
            self._capacity(group, capacity, room) for group, capacity in enumerate(held.capacities)
        ]
        if wanted == held.capacities:
            held.num_tokens = num_tokens
            return FITS
        # Alone it could go on as it is, or begin again at this length.
        alone = self._buffer_bytes(held.capacities) + self._peak_bytes(held, wanted)
        if min(alone, self.bytes_for(room)) > self.ceiling.capacity_bytes:
            return self.never(num_tokens)
        kept_bytes = extension.kept_bytes
        if extension.promised_tokens > room:
            longest = min(extension.promised_tokens, self.config.max_model_len)
            promised = self.bytes_for(longest)
            kept_bytes += max(0, promised - self._buffer_bytes(wanted))
        return self._take(held, wanted, num_tokens, kept_bytes)

    def fork(self, seq_id: int, new_id: int) -> AllocationResult:
        source = self.sequences[seq_id]
        self.add(new_id)
        target = self.sequences[new_id]
        verdict = self._take(target, source.capacities, source.num_tokens)
        if verdict is not FITS:
            del self.sequences[new_id]
        elif source.num_tokens:
            for group in range(len(self.groups)):
                start, goal = self._first_slot(group, source), self._first_slot(group, target)
                count = min(source.num_tokens, source.capacities[group])
                self.changes.append(Copy(group, start, goal, count))
        return verdict

    def steady_tokens(self, seq_id: int) -> int:
        return min(self.sequences[seq_id].capacities)  # then it is copied

    def free(self, seq_id: int, *, forget: bool = False, ended: bool = False) -> None:
        held = self.sequences.pop(seq_id)
        if held.row < 0:
            return
        self._give_back_outgrown(held)
        for group in range(len(self.groups)):
            if held.capacities[group]:
                self._release(self._buffer(group, held))
        self._free_rows.append(held.row)

    def first_slot(self, group: int, seq_id: int) -> int:
        held = self.sequences[seq_id]
        return self._first_slot(group, held) if held.row >= 0 else -1

    def spare_tokens(self, group: int, seq_id: int) -> int:
        """Count the tokens that a buffer can still take in place (OpenVINO's upper padding)."""
        return self.sequences[seq_id].capacities[group] - self.num_tokens(seq_id)

    def drain(self) -> list[StorageOp]:
        for held in self._unread():
            self._give_back_outgrown(held)
        self._step += 1
        return super().drain()

    def backed(self, group: int) -> Iterator[HeldRange]:
        """List every buffer of a group, and the outgrown ones, which no step reads any more."""
        for seq_id, held in self.sequences.items():
            new, old = self._buffer(group, held), [o for o in held.outgrown if o.group == group]
            for each, num_tokens in ((new, held.num_tokens), *((o, 0) for o in old)):
                if each.stop > each.start:
                    backed = range(each.stop - each.start)
                    yield HeldRange(seq_id, each.start, backed, num_tokens)

    def check(self) -> None:
        rows = [held.row for held in self.sequences.values() if held.row >= 0]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), (
            "a row is lost or held twice"
        )
        total = 0
        for held in self.sequences.values():
            for capacity, state in zip(held.capacities, self._is_state, strict=True):
                needed = min(held.num_tokens, 1) if state else held.num_tokens
                assert needed <= capacity, "a buffer is too short"
            assert held.row >= 0 or not any(held.capacities), "a buffer without a place"
            total += self._buffer_bytes(held.capacities) + self._outgrown_bytes(held)
        assert total == self._committed_bytes, "committed bytes differ from the buffers"
        assert total <= self.ceiling.now_bytes, "above the ceiling"

    def _unread(self) -> list[_Buffers]:
        """Sequences whose outgrown buffers are not read any more: an earlier step copied them."""
        return [held for held in self.sequences.values() if held.outgrown_in < self._step]

    def _take(
        self, held: _Buffers, wanted: list[int], num_tokens: int, kept_bytes: int = 0
    ) -> AllocationResult:
        """Give a sequence buffers of these capacities, and a row if it has none, or refuse."""
        peak = self._peak_bytes(held, wanted)
        # What this step just copied is not read any more.
        unread = [held, *(other for other in self._unread() if other is not held)]
        free = self.ceiling.now_bytes - self._committed_bytes
        needs_row = held.row < 0 and any(wanted)
        spare = free + sum(map(self._outgrown_bytes, unread)) - kept_bytes
        if peak > spare or (needs_row and not self._free_rows):
            return NotNow(
                need_bytes=peak,
                free_bytes=free,
                kept_bytes=kept_bytes,
                holders=tuple(i for i, other in self.sequences.items() if other.row >= 0),
            )
        if needs_row:
            held.row = self._free_rows.pop()
        for other in unread:
            self._give_back_outgrown(other)
        self._replace(held, wanted)
        held.num_tokens = num_tokens
        return FITS

    def _capacity(self, group: int, capacity: int, num_tokens: int) -> int:
        if num_tokens <= capacity:
            return capacity
        if self._is_state[group]:
            return 1
        layer = self.groups[group].layers[0]
        grown = self._grow(capacity, num_tokens, self.config.growth_tokens, layer)
        return max(num_tokens, min(grown, self.config.max_model_len))

    def _peak_bytes(self, held: _Buffers, wanted: list[int]) -> int:
        """The most by which the committed total rises on the way, layer by layer."""
        rise = peak = 0
        for group, (old, new) in enumerate(zip(held.capacities, wanted, strict=True)):
            if new != old:
                rise += self._backed_bytes(group, new)
                peak = max(peak, rise)
                if not self.config.keep_old:
                    rise -= self._backed_bytes(group, old)
        return peak

    def _replace(self, held: _Buffers, wanted: list[int]) -> None:
        before, held.capacities = held.capacities, held.capacities.copy()
        for group, (old_capacity, capacity) in enumerate(zip(before, wanted, strict=True)):
            if capacity == old_capacity:
                continue
            old = self._buffer(group, held)
            held.capacities[group] = capacity
            if old_capacity:
                held.sides[group] ^= 1
            new = self._buffer(group, held)
            self._committed_bytes += self._release_bytes(new)
            self.changes.append(Commit(group, new.start, new.stop))
            if held.num_tokens:
                self.changes.append(Copy(group, old.start, new.start, held.num_tokens))
            if old_capacity and self.config.keep_old:
                held.outgrown.append(old)
                held.outgrown_in = self._step
            elif old_capacity:
                self._release(old)

    def _give_back_outgrown(self, held: _Buffers) -> None:
        for release in held.outgrown:
            self._release(release)
        held.outgrown = []

    def _release(self, release: Release) -> None:
        self._committed_bytes -= self._release_bytes(release)
        self.changes.append(release)

    def _buffer(self, group: int, held: _Buffers) -> Release:
        """The pages of a buffer, as what would give them back."""
        start, step = self._first_slot(group, held), self._page_tokens[group]
        return Release(group, start, start + align_up(held.capacities[group], step))

    def _release_bytes(self, release: Release) -> int:
        return (release.stop - release.start) * self._slot_bytes[release.group]

    def _outgrown_bytes(self, held: _Buffers) -> int:
        return sum(map(self._release_bytes, held.outgrown))

    def bytes_for(self, num_tokens: int) -> int:
        groups = range(len(self.groups))
        return self._buffer_bytes([self._capacity(group, 0, num_tokens) for group in groups])

    def _buffer_bytes(self, capacities: list[int]) -> int:
        return sum(self._backed_bytes(g, capacity) for g, capacity in enumerate(capacities))

    def _backed_bytes(self, group: int, capacity: int) -> int:
        return align_up(capacity, self._page_tokens[group]) * self._slot_bytes[group]

    def _first_slot(self, group: int, held: _Buffers) -> int:
        return (2 * held.row + held.sides[group]) * self.row_slots(group)
