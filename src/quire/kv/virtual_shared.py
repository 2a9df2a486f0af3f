"""Page in hardware, shared: each sequence sees blocks of ``paged`` through its own window.

Prefixes, forks and copy-on-write work as in ``paged``. A sequence sees its blocks side by side in
one range of addresses, because the processor's page table repeats the block table. So an unmodified
kernel reads shared blocks.

A block is made of whole pages, with all layers of a stack together, and lies in a heap of physical
memory. Tokens are then farther apart than in a head-major range, which is what sharing costs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.kv.allocation import FITS, AllocationResult, NotNow
from quire.kv.interface import AS_IT_IS, CacheConfig, Counts, Extension, Slots, Usage
from quire.kv.layout import Stacking, attention_groups, stacked_block_size, stacking
from quire.kv.packed_slots import packed_ranges
from quire.kv.paged import PagedAccounting
from quire.kv.prefix_cache import PrefixHit, start_of
from quire.kv.prefix_index import NO_KEYS, PrefixKeys
from quire.kv.storage_ops import Release, StorageOp
from quire.kv.windows import NUM_GAPS, Table, Windows
from quire.spec import Group
from quire.units import align_up, ceil_div

_NO_ROW = -1


class SharedVirtualAccounting(PagedAccounting):
    """``max_num_seqs`` windows of ``max_model_len`` slots over one pool of blocks a group."""

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        seen = attention_groups(groups)  # they come first; a state needs no window
        page, together = config.page_bytes, config.layers_per_page
        size = stacked_block_size(seen, config.block_size, page, together)
        self._stackings = [stacking(group, page, together) for group in seen]
        super().__init__(groups, replace(config, block_size=size), whole_pages=True)
        self._num_seen = len(seen)
        num_stacks = max((each.num_stacks for each in self._stackings), default=1)
        self._heap_blocks = [
            max(1, config.heap_bytes // (size * each.slot_bytes)) for each in self._stackings
        ]
        self._row_blocks = ceil_div(config.max_model_len, size)
        self._windows = Windows(
            config.max_num_seqs,
            self._row_blocks,
            block_size=size,
            heap_blocks=self._heap_blocks,
            max_mappings=config.max_mappings and config.max_mappings // num_stacks,
        )
        self._rows: dict[int, int] = {}  # windows, by sequence
        self._sequences: dict[int, int] = {}  # … of each row of the block tables …
        self._changed = self.tables.changed = set[int]()  # … and which have changed
        self.tables.may_swap = self._may_swap

    # -- what storage asks -----------------------------------------------------------------------

    def stacking(self, group: int) -> Stacking:
        """Return how a group's layers lie together."""
        return self._stackings[group]

    def num_slots(self, group: int) -> int:
        if group >= self._num_seen:
            return super().num_slots(group)
        return self._config.max_num_seqs * self._row_blocks * self._windows.block_size

    def block_size(self, group: int) -> int:
        return self._config.max_model_len if group < self._num_seen else 1

    def pool_slots(self, group: int) -> int:
        """Return the pool's slots, in whole heaps; ``num_slots`` counts those of windows."""
        if group >= self._num_seen:
            return self.num_slots(group)
        return align_up(super().num_slots(group), self.heap_slots(group))

    def heap_slots(self, group: int) -> int:
        """Return the slots of a heap."""
        return self._heap_blocks[group] * self._windows.block_size

    # -- verbs -----------------------------------------------------------------------------------

    def add(
        self,
        seq_id: int,
        *,
        max_tokens: int | None = None,
        keys: PrefixKeys = NO_KEYS,
        priority: int = 0,
    ) -> None:
        super().add(seq_id, max_tokens=max_tokens, keys=keys, priority=priority)
        self._note(seq_id)

    def try_extend(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        hit, lookahead = extension.hit, extension.lookahead_tokens
        held, num_mappings = self.num_tokens(seq_id), 0
        room = num_tokens + lookahead
        if held < room and num_tokens <= self._config.max_model_len:
            begin = held if hit is None else hit.num_tokens
            num_mappings = self._new_mappings(seq_id, begin, room) + self._hit_mappings(hit)
            refusal = self._refusal(self._rows[seq_id], num_mappings)
            if refusal is not None:
                begin += extension.external_tokens
                never = self.never_fits(seq_id, num_tokens, begin=begin, lookahead_tokens=lookahead)
                return never or refusal
        verdict = super().try_extend(seq_id, num_tokens, extension)
        if verdict is FITS:
            self._windows.num_promised += num_mappings
            self._have_window(seq_id)
        return verdict

    def try_extend_each(self, seq_ids: Sequence[int], num_tokens: Sequence[int] | Counts) -> int:
        tables, size = self.tables, self._block_size
        rows, ends = tables.rows_of(seq_ids), np.asarray(num_tokens, np.int64)
        windows = np.fromiter(map(self._rows.__getitem__, seq_ids), np.intp)
        after = -(-ends // size)
        num_new = (after - tables.num_tokens[rows] // size).clip(0) * self._num_seen
        num_new += np.count_nonzero(tables.ends[: self._num_seen, rows] > after, axis=0)
        num_new += NUM_GAPS * self._windows.num_blank(windows)
        # The caller tries a sequence without a window, or near the limit of mappings, by itself.
        waiting = np.flatnonzero(windows < 0)
        fitting = int(waiting[0]) if len(waiting) else len(seq_ids)
        if not self._windows.have_mappings(int(num_new[:fitting].sum())):
            fitting = 0
        count = super().try_extend_each(seq_ids[:fitting], num_tokens[:fitting])
        self._windows.num_promised += int(num_new[:count].sum())
        return count

    def resize(self, capacity_bytes: int, *, for_now: bool = False) -> int:
        if capacity_bytes < self.ceiling.now_bytes:
            self._windows.give_up_parked()
        return super().resize(capacity_bytes, for_now=for_now)

    def fork(self, seq_id: int, new_id: int) -> AllocationResult:
        source = self._rows[seq_id]
        if source >= 0:
            num_mappings = self._windows.mappings_for(self._tables(seq_id))
            refusal = self._refusal(_NO_ROW, num_mappings)
            if refusal is not None:
                return refusal
            self._windows.num_promised += num_mappings
        super().fork(seq_id, new_id)
        self._note(new_id)
        self._have_window(new_id)
        return FITS

    def steady_tokens(self, seq_id: int) -> int:
        if self._config.max_mappings is not None:  # which are refused one by one
            return self.num_tokens(seq_id)
        return super().steady_tokens(seq_id)

    def free(self, seq_id: int, *, forget: bool = False, ended: bool = False) -> None:
        row = self._rows.pop(seq_id, _NO_ROW)  # a prefix that is pinned has none
        self._sequences.pop(self.tables.rows[seq_id], None)
        super().free(seq_id, forget=forget, ended=ended)
        if row >= 0:
            self._windows.park(row)

    # -- questions -------------------------------------------------------------------------------

    def table(self, group: int, seq_id: int) -> Slots:
        if group >= self._num_seen:
            return super().table(group, seq_id)
        row = self._rows[seq_id]
        return np.array([self._windows.first_slot(row)] if row >= 0 else [], np.int64)

    def slots(self, group: int, seq_id: int, start: int, stop: int) -> Slots:
        first = self._windows.first_slot(self._rows[seq_id])
        return np.arange(first + start, first + stop)

    def packed(
        self, group: int, seq_ids: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[Slots, Slots]:
        rows = (self._rows[seq_id] for seq_id in seq_ids)
        first = (self._windows.first_slot(row) if row >= 0 else -1 for row in rows)
        return packed_ranges(first, starts, stops)

    def drain(self) -> list[StorageOp]:
        """Drain the operations: unmap before a release, and map after a commit."""
        changes = super().drain()
        hidden, shown = self._windows.drain(), list[StorageOp]()
        windows = self._changed_windows()
        for change in changes:
            if isinstance(change, Release) and change.group < self._num_seen:
                first, stop = change.start // self._block_size, change.stop // self._block_size
                hidden += self._windows.release(change.group, first, stop, windows)
        for window, seq_id in windows.items():
            less, more = self._windows.show(window, self._tables(seq_id))
            hidden += less
            shown += more
        self._windows.num_promised = 0
        return [*hidden, *changes, *shown]

    def usage(self) -> Usage:
        reserved_bytes = sum(
            self.num_slots(number) * self.slot_bytes(number) for number in range(len(self.groups))
        )
        reserved_bytes += sum(
            self.pool_slots(number) * self.slot_bytes(number) for number in range(self._num_seen)
        )
        return replace(super().usage(), reserved_bytes=reserved_bytes)

    @property
    def shown_slots(self) -> int:
        """Slots of each place in a window."""
        return self._block_size

    def shown(self, group: int) -> Slots:
        """List the places (i64[n], ascending over all windows) that show a block."""
        return self._windows.shown(group)

    def check(self) -> None:
        super().check()
        if not self._changed:
            taken = {row: self._tables(seq) for seq, row in self._rows.items() if row >= 0}
            self._windows.check(taken)
        for seq_id, row in self._rows.items():
            held = any(len(table) for table in self._tables(seq_id))
            assert row >= 0 or not held, "a sequence has blocks and no window"

    # -- windows of sequences --------------------------------------------------------------------

    @property
    def _block_size(self) -> int:
        return self._windows.block_size

    def _tables(self, seq_id: int) -> list[Table]:
        """Return a sequence's blocks in each group with windows; -1 where attention has passed."""
        tables = self.tables
        row = tables.rows[seq_id]
        return [
            ids[row, : tables.ends[group, row]]
            for group, ids in enumerate(tables.ids[: self._num_seen])
        ]

    def _note(self, seq_id: int) -> None:
        """Note a new sequence, which has no window yet."""
        self._rows[seq_id] = _NO_ROW
        self._sequences[self.tables.rows[seq_id]] = seq_id

    def _have_window(self, seq_id: int) -> None:
        """Give a sequence a window with its first block."""
        if self._rows[seq_id] < 0:
            tables = self._tables(seq_id)
            if any(len(table) for table in tables):
                self._rows[seq_id] = self._windows.take(tables)

    def _changed_windows(self) -> dict[int, int]:
        """Return the windows whose blocks have changed, with their sequences."""
        if not self._changed:
            return {}
        owners = [self._sequences[row] for row in self._changed if row in self._sequences]
        self._changed.clear()
        return {self._rows[seq]: seq for seq in owners if self._rows[seq] >= 0}

    def _new_mappings(self, seq_id: int, begin: int, end: int) -> int:
        """Count the most mappings that a step adds: one for each block that it takes or copies.

        Room for drafts behind a copy begins another mapping.
        """
        size, tables, pools = self._block_size, self.tables, self.pools
        after = ceil_div(end, size)
        count = (after - ceil_div(begin, size)) * self._num_seen
        count += NUM_GAPS * int(self._windows.num_blank(np.array([self._rows[seq_id]]))[0])
        if begin % size == 0:
            return count
        row, column = tables.rows[seq_id], begin // size
        for number, ids in enumerate(tables.ids[: self._num_seen]):
            # A step copies a hit's last block, used in part, and a block that others hold too.
            held = column < tables.ends[number, row]
            if not held or pools[number].refs[ids[row, column]] > 1:
                count += 1 + int(tables.ends[number, row] > after)
        return count

    def _may_swap(self, group: int, row: int, column: int, block: int) -> bool:
        """Tell whether a row can show another sequence's block of the same content.

        If mappings are lacking, the sequence keeps its own block: it cannot wait here.
        """
        table = self.tables.ids[group][row]
        num_mappings = self._windows.num_cuts(group, table, column, block)
        if not self._windows.have_mappings(num_mappings):
            return False
        self._windows.num_promised += num_mappings
        return True

    def _hit_mappings(self, hit: PrefixHit | None) -> int:
        """Count the mappings that it takes to show a hit's blocks."""
        if hit is None or not hit.num_tokens:
            return 0
        index, size = self.index, self._block_size
        starts = (
            start_of(index, number, group, size, hit, hit.num_tokens)
            for number, group in enumerate(self.groups[: self._num_seen])
        )
        return sum(self._windows.num_runs(n, start.blocks) for n, start in enumerate(starts))

    def _refusal(self, row: int, num_mappings: int) -> NotNow | None:
        """Return why a sequence with this window, or none, cannot have more mappings now."""
        if row < 0 and not self._windows.num_vacant:
            option = "max_num_seqs"
        elif self._windows.have_mappings(num_mappings):
            return None
        elif all(other < 0 or other == row for other in self._rows.values()):
            return None  # a sequence alone may try: a mapping for each block is rare
        else:
            option = "vm.max_map_count"
        return NotNow(
            need_bytes=0,
            free_bytes=self.ceiling.now_bytes - self.pools.held_bytes,
            holders=tuple(seq_id for seq_id, other in self._rows.items() if other >= 0),
            option=option,
        )
