"""Reserve the maximum: one range a sequence in an arena, committed whole on admission.

What Hugging Face's StaticCache, llama.cpp and most first engines do. Both kinds of fragmentation
live here: inside a range (reserved for tokens that never come) and, once ranges differ in length,
between them. Every layer holds the whole range, windows too: it cannot give back its beginning.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.kv.allocation import FITS, AllocationResult, Fits, Never, NotNow
from quire.kv.interface import AS_IT_IS, CacheConfig, Counts, Extension
from quire.kv.layout import attention_groups, common_page_tokens, slot_bytes
from quire.kv.occupancy import HeldRange, Occupancy
from quire.kv.ranges import RangeAccounting
from quire.kv.storage_ops import Commit, Copy, Release
from quire.spec import Group
from quire.units import align_down, align_up

# -- ranges ----------------------------------------------------------------------------------------

# First fit: ranges of any length in one arena. External fragmentation lives here.
#
# This is what paging abolishes, so it is measured rather than hidden: enough free slots in all,
# and yet no hole for the next range. ``compact`` is the classic cure, a pass that moves every
# range down.


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A range that compaction moved: ``length`` slots from ``source`` down to ``target``."""

    source: int
    target: int
    length: int


class FirstFit:
    """Disjoint ranges [start, start + length) of [0, num_slots), each placed in the lowest hole."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._starts: list[int] = []  # ascending
        self._lengths: dict[int, int] = {}

    def allocate(self, length: int) -> int | None:
        """Place a new range and return its start; None if no hole is long enough."""
        for index, (start, room) in enumerate(self._holes()):
            if room >= length:
                self._starts.insert(index, start)
                self._lengths[start] = length
                return start
        return None

    def free(self, start: int) -> None:
        """Give a range back. Raises: KeyError if none begins at ``start``."""
        del self._lengths[start]
        self._starts.pop(bisect.bisect_left(self._starts, start))

    def compact(self) -> list[Move]:
        """Slide every range down to close the holes; the moves, in an order safe to carry out."""
        moves: list[Move] = []
        lengths: dict[int, int] = {}
        target = 0
        for start in self._starts:
            length = self._lengths[start]
            if start != target:
                moves.append(Move(source=start, target=target, length=length))
            lengths[target] = length
            target += length
        self._starts, self._lengths = list(lengths), lengths
        return moves

    @property
    def free_slots(self) -> int:
        return self.num_slots - sum(self._lengths.values())

    @property
    def largest_hole(self) -> int:
        return max(room for _, room in self._holes())

    @property
    def fragmentation(self) -> float:
        """The share of the free slots outside the largest hole: 0 is one hole, 1 is dust."""
        return 1 - self.largest_hole / self.free_slots if self.free_slots else 0.0

    def check(self) -> None:
        assert self._starts == sorted(self._lengths), "starts and lengths name different ranges"
        end = 0
        for start in self._starts:
            assert start >= end, f"the range at {start} begins inside the one before it"
            end = start + self._lengths[start]
        assert end <= self.num_slots, f"the last range ends at {end}, past {self.num_slots}"

    def _holes(self) -> list[tuple[int, int]]:
        """(start, length) of what lies before each range, and of what lies after the last."""
        holes, end = [], 0
        for start in self._starts:
            holes.append((end, start - end))
            end = start + self._lengths[start]
        holes.append((end, self.num_slots - end))
        return holes


# -- contiguous ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SequenceRange:
    max_tokens: int
    num_tokens: int = 0
    start: int | None = None  # None until the first token needs room
    cell: int = -1  # with the range: the slot of its states


class ContiguousAccounting(RangeAccounting[_SequenceRange]):
    """One arena of slots, the same in every group; first fit.

    The states of recurrent layers are not in it: each sequence has a cell for them.
    """

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        super().__init__(groups, config)
        self._num_arenas = len(attention_groups(groups))  # those groups come first
        together = config.layers_per_page
        self._align = common_page_tokens(groups, config.page_bytes, together)
        self._token_bytes = sum(
            slot_bytes(group, config.page_bytes, together) for group in attention_groups(groups)
        )
        self._state_bytes = sum(
            slot_bytes(group, config.page_bytes) for group in groups[self._num_arenas :]
        )
        self._free_cells = list(range(config.max_num_seqs))[::-1]
        longest = align_up(config.max_model_len, self._align)
        # No more address space than can be used: every sequence at its longest, or the capacity.
        num_slots = min(self._slots_in(config.most_bytes), config.max_num_seqs * longest)
        self._arena = FirstFit(num_slots)
        # A kernel may be given the longest range from any start, so that addresses go on for one
        # more behind the arena. Where every range is the longest, one arena of it is enough.
        past_end = longest if config.reserve == "request" else 0
        self._num_slots = max(num_slots + past_end, longest)

    @property
    def held_bytes(self) -> int:
        return self._held_slots * self._token_bytes + self._held_cells * self._state_bytes

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        whole = self.config.reserve == "max_model_len"
        longest = np.minimum(self.config.max_model_len, max_tokens if not whole else 2**60)
        steps: Counts = -(-longest // self._align)
        return 0 * num_tokens + steps * (self._align * self._token_bytes) + self._state_bytes

    def num_slots(self, group: int) -> int:
        return self._num_slots if group < self._num_arenas else self.config.max_num_seqs

    def page_tokens(self, group: int) -> int:
        return self._align if group < self._num_arenas else 1

    def row_slots(self, group: int) -> int:
        return 0  # all sequences use all addresses

    def bytes_for(self, num_tokens: int) -> int:
        return self._range_bytes(align_up(num_tokens, self._align))

    def begin(self, max_tokens: int | None) -> _SequenceRange:
        return _SequenceRange(max_tokens=self._longest(max_tokens))

    def could_hold(self, num_tokens: int, *, max_tokens: int | None = None) -> Fits | Never:
        held = _SequenceRange(max_tokens=self._longest(max_tokens or num_tokens))
        if num_tokens > held.max_tokens or self._length(held) > self._longest_range:
            return self._never(held, num_tokens)
        return FITS

    def try_extend(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        held = self.sequences[seq_id]  # a range is as long as it will ever be: nothing is promised
        if num_tokens <= held.num_tokens:
            return FITS
        if num_tokens > held.max_tokens:
            return self._never(held, num_tokens)
        if held.start is None:
            length = self._length(held)
            if length > self._longest_range:
                return self._never(held, num_tokens)
            spare_bytes = self._free_bytes - self._range_bytes(length)
            fits = spare_bytes >= extension.kept_bytes and self._free_cells
            start = self._place(length) if fits else None
            if start is None:
                return self._not_now(length, extension.kept_bytes)
            held.start, held.cell = start, self._free_cells.pop()
            self._each_group(Commit, start, start + length)
            self._each_cell(Commit, held.cell)
        held.num_tokens = num_tokens
        return FITS

    def fork(self, seq_id: int, new_id: int) -> AllocationResult:
        source = self.sequences[seq_id]
        self.add(new_id, max_tokens=source.max_tokens)
        verdict = self.try_extend(new_id, source.num_tokens)
        if verdict is not FITS:
            del self.sequences[new_id]
        elif source.num_tokens:
            target = self.sequences[new_id]
            assert source.start is not None
            assert target.start is not None
            for group in range(self._num_arenas):
                self.changes.append(Copy(group, source.start, target.start, source.num_tokens))
            for group in range(self._num_arenas, len(self.groups)):
                self.changes.append(Copy(group, source.cell, target.cell, 1))
        return verdict

    def steady_tokens(self, seq_id: int) -> int:
        return self.sequences[seq_id].max_tokens  # its place is there

    def free(self, seq_id: int, *, forget: bool = False, ended: bool = False) -> None:
        held = self.sequences.pop(seq_id)
        if held.start is not None:
            self._arena.free(held.start)
            self._free_cells.append(held.cell)
            self._each_group(Release, held.start, held.start + self._length(held))
            self._each_cell(Release, held.cell)

    def first_slot(self, group: int, seq_id: int) -> int:
        held = self.sequences[seq_id]
        if held.start is None:
            return -1
        return held.start if group < self._num_arenas else held.cell

    @property
    def fragmentation(self) -> float:
        """External fragmentation: the share of the free slots outside the largest hole."""
        return self._arena.fragmentation

    def defrag(self) -> int:
        """Slide every range down; the number of tokens copied (llama.cpp's defrag pass)."""
        by_start = {held.start: held for held in self.sequences.values() if held.start is not None}
        copied = 0
        for move in self._arena.compact():
            held = by_start[move.source]
            held.start = move.target
            # Only the part that does not overlap the old place changes hands with the system.
            shift = min(move.source - move.target, move.length)
            self._each_group(Commit, move.target, move.target + shift)
            for group in range(self._num_arenas):
                self.changes.append(Copy(group, move.source, move.target, held.num_tokens))
            end = move.source + move.length
            self._each_group(Release, end - shift, end)
            copied += held.num_tokens
        return copied

    def backed(self, group: int) -> Iterator[HeldRange]:
        in_arena = group < self._num_arenas
        for seq_id, held in self.sequences.items():
            if held.start is not None:
                first = held.start if in_arena else held.cell
                slots = range(self._length(held) if in_arena else 1)
                yield HeldRange(seq_id, first, slots, held.num_tokens)

    def census(self, group: int) -> Occupancy:
        num_slots = self._arena.num_slots if group < self._num_arenas else self.config.max_num_seqs
        return self._cells(group).census(self.backed(group), num_slots=num_slots)

    def check(self) -> None:
        self._arena.check()
        placed = {h.start: self._length(h) for h in self.sequences.values() if h.start is not None}
        assert sum(placed.values()) == self._held_slots, (
            "the arena holds ranges that no sequence has"
        )
        cells = [h.cell for h in self.sequences.values() if h.start is not None]
        assert sorted(cells + self._free_cells) == list(range(self.config.max_num_seqs)), (
            "a cell is lost or held twice"
        )
        assert self._free_bytes >= 0, "above the ceiling"
        for seq_id, held in self.sequences.items():
            assert held.num_tokens <= held.max_tokens, f"sequence {seq_id} is past its range"
            assert held.start is not None or not held.num_tokens, f"sequence {seq_id} has no range"

    @property
    def _held_slots(self) -> int:
        return self._arena.num_slots - self._arena.free_slots

    @property
    def _free_bytes(self) -> int:
        """What the ceiling leaves, in whatever holes it lies."""
        return self.ceiling.now_bytes - self.held_bytes

    @property
    def _longest_range(self) -> int:
        """Slots that one range could have with the cache to itself."""
        left = self.ceiling.capacity_bytes - self._state_bytes
        return min(self._arena.num_slots, self._slots_in(left))

    @property
    def _held_cells(self) -> int:
        return self.config.max_num_seqs - len(self._free_cells)

    def _range_bytes(self, length: int) -> int:
        """Of a range and its cell."""
        return length * self._token_bytes + self._state_bytes

    def _slots_in(self, num_bytes: int) -> int:
        if not self._token_bytes:  # states are all that there is to keep
            return 2**60 if num_bytes >= 0 else 0
        return align_down(max(0, num_bytes) // self._token_bytes, self._align)

    def _longest(self, max_tokens: int | None) -> int:
        """Tokens that a range is made for."""
        if self.config.reserve == "request" and max_tokens is not None:
            return min(self.config.max_model_len, max_tokens)
        return self.config.max_model_len

    def _place(self, length: int) -> int | None:
        start = self._arena.allocate(length)
        if start is None and self.config.defrag and self._may_defrag(length):
            self.defrag()
            start = self._arena.allocate(length)
        return start

    def _may_defrag(self, length: int) -> bool:
        """Whether a range would fit afterwards, and the ceiling takes the way there.

        While a range is moved, the new part of its place has pages beside the old one.
        """
        lengths = [self._length(held) for held in self.sequences.values() if held.start is not None]
        beside = min(self._arena.free_slots, max(lengths, default=0))
        return length <= self._arena.free_slots and beside * self._token_bytes <= self._free_bytes

    def _never(self, held: _SequenceRange, num_tokens: int) -> Never:
        length = "max_tokens" if self.config.reserve == "request" else "max_model_len"
        option = f"kv_cache_memory_bytes, or lower {length}"
        if num_tokens > held.max_tokens:
            whole = held.max_tokens == self.config.max_model_len
            option = "max_model_len" if whole else "max_tokens"
        longest = align_up(max(num_tokens, held.max_tokens), self._align)
        return Never(
            need_bytes=self._range_bytes(longest),
            capacity_bytes=self.ceiling.capacity_bytes,
            fitting_tokens=min(held.max_tokens, self._longest_range),
            option=option,
        )

    def _not_now(self, length: int, kept_bytes: int) -> NotNow:
        return NotNow(
            need_bytes=self._range_bytes(length),
            free_bytes=min(self._range_bytes(self._arena.largest_hole), self._free_bytes),
            kept_bytes=kept_bytes,
            holders=tuple(i for i, held in self.sequences.items() if held.start is not None),
        )

    def _length(self, held: _SequenceRange) -> int:
        return align_up(held.max_tokens, self._align)

    def _each_group(self, change: type[Commit] | type[Release], start: int, stop: int) -> None:
        if start < stop:
            self.changes.extend(change(group, start, stop) for group in range(self._num_arenas))

    def _each_cell(self, change: type[Commit] | type[Release], cell: int) -> None:
        for group in range(self._num_arenas, len(self.groups)):
            self.changes.append(change(group, cell, cell + 1))
