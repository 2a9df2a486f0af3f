"""The base of the strategies that give a sequence one range of slots and share nothing.

``contiguous``, ``growing`` and ``virtual`` differ in where a range lies and in what of it has
pages. In each of them no prefix is found, nothing stays behind a sequence, and a block table has
one entry: the slot where the range begins. A strategy of another package can begin here too:
docs/guides/write-a-strategy.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from quire.kv.allocation import FITS, AllocationResult, Fits, Never
from quire.kv.block_pool import Ceiling
from quire.kv.interface import AS_IT_IS, CacheConfig, Counts, Extension, Slots, Usage
from quire.kv.layout import Stacking, page_tokens, slot_bytes, stacking_of_ranges
from quire.kv.occupancy import HeldRange, Occupancy, RangeCells
from quire.kv.packed_slots import packed_ranges
from quire.kv.prefix_cache import PrefixHit, TokenIds, no_hit
from quire.kv.prefix_index import NO_KEYS, BlockKey, PrefixKeys
from quire.kv.storage_ops import Copy, StorageOp
from quire.spec import Group, KeptWhole
from quire.units import align_up


class HeldTokens(Protocol):
    """What a strategy notes of a sequence: its length, and whatever else the strategy needs."""

    num_tokens: int


Held = TypeVar("Held", bound=HeldTokens)


class RangeAccounting(ABC, Generic[Held]):
    """An ``Accounting`` of ranges, except for where they lie and what of them has pages.

    A subclass notes each ``StorageOp`` in ``changes``, and what it must know of a sequence in
    ``sequences``. By default a sequence has one row of ``row_slots`` slots in each group.
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
    def free(self, seq_id: int, *, forget: bool = False) -> None:
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
