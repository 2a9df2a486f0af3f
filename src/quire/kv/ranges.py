"""The base of the strategies that give a sequence one range of slots and share nothing.

``contiguous``, ``growing`` and ``virtual`` differ in where a range lies and in what of it has
pages. In each of them no prefix is found, nothing stays behind a sequence, and a block table has
one entry: the slot where the range begins. A strategy of another package can begin here too:
docs/guides/write-a-strategy.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from quire.kv.allocation import FITS, AllocationResult, Fits, Never, NotNow
from quire.kv.block_pool import Ceiling
from quire.kv.interface import AS_IT_IS, CacheConfig, Counts, Extension, Slots, Usage
from quire.kv.layout import Stacking, page_tokens, slot_bytes, stacking_of_ranges
from quire.kv.occupancy import HeldRange, Occupancy, RangeCells
from quire.kv.packed_slots import packed_ranges
from quire.kv.prefix_cache import PrefixHit, TokenIds, no_hit
from quire.kv.prefix_index import NO_KEYS, BlockKey, PrefixKeys
from quire.kv.retention import Retention
from quire.kv.storage_ops import Commit, Copy, Release, StorageOp
from quire.spec import Group, KeptWhole
from quire.units import align_up


class HeldTokens(Protocol):
    """What a strategy notes of a sequence: its length, and whatever else the strategy needs."""

    num_tokens: int


Held = TypeVar("Held", bound=HeldTokens)


class RangeAccounting(ABC, Generic[Held]):
    """An ``Accounting`` of ranges, except for where they lie and what of them has pages.

    A subclass notes each ``StorageOp`` in ``changes``, and what it must know of a sequence in
    ``sequences``.
    """

    shares_blocks = False
    state_block_size = 0

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        self.groups = groups
        self.ceiling = Ceiling(config.capacity_bytes)
        self.config = config
        self.changes: list[StorageOp] = []
        self.sequences: dict[int, Held] = {}

    # -- what a strategy decides -----------------------------------------------------------------

    @abstractmethod
    def begin(self, max_tokens: int | None) -> Held:
        """Make the note of a new sequence, which holds nothing yet."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Count the committed bytes; all of them are held by sequences."""

    @abstractmethod
    def bytes_for(self, num_tokens: int) -> int:
        """Count the bytes that a new sequence takes which reaches a length in one step."""

    @abstractmethod
    def try_extend(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        """Make room as ``Accounting`` says. Raises: KeyError for an unknown sequence."""

    @abstractmethod
    def free(self, seq_id: int, *, forget: bool = False, ended: bool = False) -> None:
        """End a sequence and release its pages. Raises: KeyError for an unknown one."""

    @abstractmethod
    def first_slot(self, group: int, seq_id: int) -> int:
        """Find the slot where a sequence's range begins in a group; -1 if it holds nothing."""

    @abstractmethod
    def backed(self, group: int) -> Iterable[HeldRange]:
        """List the pieces of the group's ranges that have pages."""

    @abstractmethod
    def steady_tokens(self, seq_id: int) -> int:
        """Find the length up to which the outcome is the same token by token and at once."""

    @abstractmethod
    def check(self) -> None:
        """Compare what is counted with what is noted. Raises: AssertionError if they differ."""

    # -- what follows from it --------------------------------------------------------------------

    def add(
        self,
        seq_id: int,
        *,
        max_tokens: int | None = None,
        keys: PrefixKeys = NO_KEYS,
        priority: int = 0,
    ) -> None:
        if seq_id in self.sequences:
            raise KeyError(f"sequence {seq_id} is already here")
        self.sequences[seq_id] = self.begin(max_tokens)

    def could_hold(self, num_tokens: int, *, max_tokens: int | None = None) -> Fits | Never:
        too_long = num_tokens > self.config.max_model_len
        if too_long or self.bytes_for(num_tokens) > self.ceiling.capacity_bytes:
            return self.never(num_tokens)
        return FITS

    def never(self, num_tokens: int) -> Never:
        """Make the refusal of a length that no empty cache takes, with the longest that fits."""
        capacity_bytes = self.ceiling.capacity_bytes
        return self.config.never(num_tokens, self.bytes_for, capacity_bytes=capacity_bytes)

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        lengths, places = np.unique(num_tokens, return_inverse=True)
        sizes = np.array([self.bytes_for(length) for length in lengths.tolist()], np.int64)
        found: Counts = sizes[places].reshape(np.shape(num_tokens))
        return found

    def fork(self, seq_id: int, new_id: int) -> AllocationResult:
        num_tokens = self.sequences[seq_id].num_tokens
        self.add(new_id)
        result = self.try_extend(new_id, num_tokens)
        if not isinstance(result, Fits):
            del self.sequences[new_id]
        elif num_tokens:
            for number, group in enumerate(self.groups):
                source, target = self.first_slot(number, seq_id), self.first_slot(number, new_id)
                count = 1 if isinstance(group.spec, KeptWhole) else num_tokens
                self.changes.append(Copy(number, source, target, count))
        return result

    def trim(self, seq_id: int, num_tokens: int) -> None:
        held = self.sequences[seq_id]
        held.num_tokens = min(held.num_tokens, num_tokens)

    def num_tokens(self, seq_id: int) -> int:
        return self.sequences[seq_id].num_tokens

    def usage(self) -> Usage:
        """Count the bytes: nothing is cached, so what is committed is held."""
        lengths = [held.num_tokens for held in self.sequences.values()]
        return Usage(
            reserved_bytes=sum(
                self.num_slots(group) * self.slot_bytes(group) for group in range(len(self.groups))
            ),
            committed_bytes=self.held_bytes,
            used_bytes=sum(group.bytes_for(length) for group in self.groups for length in lengths),
            num_sequences=len(lengths),
            num_tokens=sum(lengths),
        )

    def census(self, group: int) -> Occupancy:
        return self._cells(group).census(
            self.backed(group), num_slots=self.num_slots(group), row_slots=self.row_slots(group)
        )

    def cells(self, group: int, seq_id: int) -> Slots:
        first = max(0, self.first_slot(group, seq_id))
        return self._cells(group).of(first, self.num_tokens(seq_id))

    def _cells(self, group: int) -> RangeCells:
        sizes = self.slot_bytes(group), self.page_tokens(group), self.config.block_size
        return RangeCells(self.groups[group], *sizes)

    @property
    def fragmentation(self) -> float:
        return 0.0

    # -- sizes -----------------------------------------------------------------------------------

    def stacking(self, group: int) -> Stacking | None:
        """Return how a group's layers lie together; None: head by head."""
        config = self.config
        return stacking_of_ranges(self.groups[group], config.page_bytes, config.layers_per_page)

    def page_tokens(self, group: int) -> int:
        """Return the fewest slots that fill whole pages; what is committed is a multiple."""
        config = self.config
        return page_tokens(self.groups[group], config.page_bytes, config.layers_per_page)

    def slot_bytes(self, group: int) -> int:
        config = self.config
        return slot_bytes(self.groups[group], config.page_bytes, config.layers_per_page)

    def page_slots(self, group: int, num_tokens: int) -> int:
        """Return the slots that some tokens take, in whole pages; a state has one slot."""
        if isinstance(self.groups[group].spec, KeptWhole):
            return min(1, num_tokens)
        return align_up(num_tokens, self.page_tokens(group))

    def row_slots(self, group: int) -> int:
        """Return the slots of the addresses that a sequence has for itself."""
        return self.page_slots(group, self.config.max_model_len)

    def num_slots(self, group: int) -> int:
        return self.config.max_num_seqs * self.row_slots(group)

    def block_size(self, group: int) -> int:
        return 1 if isinstance(self.groups[group].spec, KeptWhole) else self.config.max_model_len

    # -- nothing is shared -----------------------------------------------------------------------

    def match_prefix(self, seq_id: int, token_ids: TokenIds) -> PrefixHit:
        return no_hit(len(token_ids), "strategy")

    def next_block(
        self, seq_id: int, token_ids: Sequence[int], hit: PrefixHit | None = None
    ) -> tuple[BlockKey, int] | None:
        return None

    def mark_computed(
        self, seq_ids: Sequence[int], counts: Sequence[int] | None, token_ids: TokenIds
    ) -> None:
        return  # no other sequence could use it

    def keep_state(self, seq_id: int) -> bool:
        return False

    def retain(self, seq_id: int, retention: Retention) -> int:
        return 0

    def reset_prefix_cache(self) -> bool:
        return not self.held_bytes

    # -- a range is a table of one entry ---------------------------------------------------------

    def table(self, group: int, seq_id: int) -> Slots:
        first = self.first_slot(group, seq_id)
        return np.array([first] if first >= 0 else [], np.int64)

    def slots(self, group: int, seq_id: int, start: int, stop: int) -> Slots:
        first = self.first_slot(group, seq_id)
        assert first >= 0 or start == stop, f"sequence {seq_id} holds nothing"
        return np.arange(first + start, first + stop)

    def packed(
        self, group: int, seq_ids: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[Slots, Slots]:
        first = (self.first_slot(group, seq_id) for seq_id in seq_ids)
        return packed_ranges(first, starts, stops)

    # -- steps -----------------------------------------------------------------------------------

    def try_extend_each(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> int:
        for count, (seq_id, wanted) in enumerate(zip(seq_ids, num_tokens, strict=True)):
            if not isinstance(self.try_extend(seq_id, wanted), Fits):
                return count
        return len(seq_ids)

    def resize(self, capacity_bytes: int, *, for_now: bool = False) -> int:
        wanted = min(capacity_bytes, self.config.most_bytes)
        return self.ceiling.move(wanted, self.held_bytes, for_now=for_now)

    def drain(self) -> list[StorageOp]:
        changes, self.changes = self.changes, []
        return changes


# -- rows ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """A sequence's row of addresses, by number, and the part of it that has pages."""

    num_tokens: int = 0
    row: int = -1  # -1: the sequence has no pages yet
    backed: list[range] = field(default_factory=list)  # a group: slots with pages, page-aligned


class RowAccounting(RangeAccounting[Row]):
    """Rows of addresses, one a sequence; a subclass decides which of a row's slots have pages.

    There are ``max_num_seqs`` rows of ``max_model_len`` tokens. A state is a row of one slot.
    """

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        super().__init__(groups, config)
        numbers = range(len(groups))
        self._page_tokens = [super(RowAccounting, self).page_tokens(group) for group in numbers]
        self._slot_bytes = [super(RowAccounting, self).slot_bytes(group) for group in numbers]
        self._row_slots = [self.page_slots(group, config.max_model_len) for group in numbers]
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._nothing = [range(0)] * len(groups)
        self._held_bytes = 0

    def begin(self, max_tokens: int | None) -> Row:
        # A sequence without pages needs no row yet, and there may be more of them than rows.
        return Row(backed=self._nothing)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def bytes_in(self, backed: list[range]) -> int:
        """Count the bytes of a sequence with these pages, a range for each group."""
        sizes = zip(backed, self._slot_bytes, strict=True)
        return sum(len(slots) * slot_bytes for slots, slot_bytes in sizes)

    def page_tokens(self, group: int) -> int:
        return self._page_tokens[group]

    def slot_bytes(self, group: int) -> int:
        return self._slot_bytes[group]

    def row_slots(self, group: int) -> int:
        return self._row_slots[group]

    def take(
        self, held: Row, backed: list[range], num_tokens: int, kept_bytes: int = 0
    ) -> AllocationResult:
        """Give a sequence exactly these pages, and a row if it has none, or refuse.

        ``kept_bytes``: bytes that must stay free.
        """
        need_bytes = self.bytes_in(backed) - self.bytes_in(held.backed)
        needs_row = held.row < 0 and any(backed)
        free_bytes = self.ceiling.now_bytes - self._held_bytes
        if need_bytes > free_bytes - kept_bytes or (needs_row and not self._free_rows):
            return NotNow(
                need_bytes=need_bytes,
                free_bytes=free_bytes,
                kept_bytes=kept_bytes,
                holders=tuple(i for i, other in self.sequences.items() if other.row >= 0),
            )
        if needs_row:
            held.row = self._free_rows.pop()
        self._set_backed(held, backed)
        held.num_tokens = num_tokens
        return FITS

    def free(self, seq_id: int, *, forget: bool = False, ended: bool = False) -> None:
        held = self.sequences.pop(seq_id)
        if held.row >= 0:
            self._set_backed(held, self._nothing)
            self._free_rows.append(held.row)

    def place(self, group: int, held: Row) -> int:
        """Return the slot where a row begins in a group."""
        return held.row * self.row_slots(group)

    def first_slot(self, group: int, seq_id: int) -> int:
        held = self.sequences[seq_id]
        return self.place(group, held) if held.row >= 0 else -1

    def backed(self, group: int) -> Iterator[HeldRange]:
        for seq_id, held in self.sequences.items():
            if held.backed[group]:
                first = self.place(group, held)
                yield HeldRange(seq_id, first, held.backed[group], held.num_tokens)

    def check(self) -> None:
        rows = [held.row for held in self.sequences.values() if held.row >= 0]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), (
            "a row is lost or held twice"
        )
        total = sum(self.bytes_in(held.backed) for held in self.sequences.values())
        assert total == self._held_bytes, "held bytes differ from the pages of the rows"
        assert total <= self.ceiling.now_bytes, "above the ceiling"
        assert all(held.row >= 0 or not any(held.backed) for held in self.sequences.values()), (
            "pages without a row"
        )

    def _set_backed(self, held: Row, after: list[range]) -> None:
        self._held_bytes += self.bytes_in(after) - self.bytes_in(held.backed)
        pairs = list(enumerate(zip(held.backed, after, strict=True)))
        # Releases first, so that the total never rises above what was asked for.
        for group, (old, new) in pairs:
            gone = range(old.start, min(new.start, old.stop)) if new else old
            self._note(Release, group, held, gone)
        for group, (old, new) in pairs:
            self._note(Commit, group, held, range(max(old.stop, new.start), new.stop))
        held.backed = after

    def _note(
        self, change: type[Commit] | type[Release], group: int, held: Row, slots: range
    ) -> None:
        if slots:
            first = self.place(group, held)
            self.changes.append(change(group, first + slots.start, first + slots.stop))
