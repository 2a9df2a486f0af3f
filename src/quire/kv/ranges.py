"""What the strategies have in common that give a sequence one range of slots and share nothing.

``contiguous``, ``growing`` and ``virtual`` differ in where a range lies and in what of it has
pages. In each of them no prefix is found, nothing that ends is kept, and a sequence's block table
has one entry: the slot where its range begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from quire.kv.allocation import AllocationResult, Fits
from quire.kv.block_pool import Ceiling
from quire.kv.interface import AS_IT_IS, CacheConfig, Extension, Slots, Usage
from quire.kv.layout import Stacking, stacking_of_ranges
from quire.kv.packed_slots import packed_ranges
from quire.kv.prefix_cache import PrefixHit, TokenIds, no_hit
from quire.kv.prefix_index import BlockKey
from quire.kv.storage_ops import StorageOp
from quire.spec import Group


class RangeAccounting(ABC):
    """An ``Accounting`` of ranges, but for where they lie and what they commit."""

    shares_blocks = False
    state_block_size = 0

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        self.groups = groups
        self.ceiling = Ceiling(config.capacity_bytes)
        self._config = config
        self._changes: list[StorageOp] = []

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """As in ``Accounting``."""

    @abstractmethod
    def try_extend(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        """As in ``Accounting``."""

    @abstractmethod
    def usage(self) -> Usage:
        """As in ``Accounting``."""

    @abstractmethod
    def first_slot(self, group: int, seq_id: int) -> int:
        """The slot where a sequence's range begins in a group; -1 if it holds nothing."""

    def stacking(self, group: int) -> Stacking | None:
        """How a group's layers lie together; None: head by head."""
        config = self._config
        return stacking_of_ranges(self.groups[group], config.page_bytes, config.layers_per_page)

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
        return not self.usage().committed_bytes

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
        wanted = min(capacity_bytes, self._config.most_bytes)
        return self.ceiling.move(wanted, self.held_bytes, for_now=for_now)

    def drain(self) -> list[StorageOp]:
        changes, self._changes = self._changes, []
        return changes
