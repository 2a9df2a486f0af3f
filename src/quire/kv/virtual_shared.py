"""Page in hardware, shared: the blocks of ``paged``, seen through a window by each sequence.

Who holds which block is decided as in ``paged``: prefixes, forks and copy-on-write. A sequence sees
its blocks side by side in one range of addresses, whichever they are, because the processor's page
table is set to what the block table says. So an unmodified kernel reads what is shared.

A block is made of whole pages, with all layers of a stack together, and lies in a heap of physical
memory. Tokens are then further apart than in a head-major range, which is what sharing costs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.kv.allocation import FITS, Fits, Never, NotNow, Verdict
from quire.kv.interface import CacheConfig, Counts, Slots, Usage
from quire.kv.layout import Stacking, attention_groups, stacked_block_size, stacking
from quire.kv.occupancy import Census
from quire.kv.packing import packed_ranges
from quire.kv.paged import PagedAccounting
from quire.kv.prefix_cache import PrefixHit, TokenIds, start_of
from quire.kv.prefix_index import NO_KEYS, BlockKey, PrefixKeys
from quire.kv.storage_ops import Change, Release
from quire.kv.windows import NUM_GAPS, Table, Windows
from quire.spec import Group
from quire.units import align_up, ceil_div

_NO_ROW = -1


class SharedVirtualAccounting:
    """``max_num_seqs`` windows of ``max_model_len`` slots over one pool of blocks a group."""

    shares_blocks = True

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        seen = attention_groups(groups)  # they come first; a state needs no window
        page, together = config.page_bytes, config.layers_per_page
        size = stacked_block_size(seen, config.block_size, page, together)
        self._stackings = [stacking(group, page, together) for group in seen]
        self.groups = groups
        self.pool = PagedAccounting(groups, replace(config, block_size=size), whole_pages=True)
        self.ceiling = self.pool.ceiling
        self._config = config
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
        self._changed = self.pool.blocks.tables.changed = set[int]()  # … and which have changed
        self.pool.blocks.tables.may_swap = self._may_swap

    @property
    def state_block_size(self) -> int:
        return self.pool.state_block_size

    @property
    def held_bytes(self) -> int:
        return self.pool.held_bytes

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        return self.pool.bytes_alone(num_tokens, max_tokens)

    # -- what storage asks -----------------------------------------------------------------------

    def stacking(self, group: int) -> Stacking:
        """How a group's layers lie together."""
        return self._stackings[group]

    def num_slots(self, group: int) -> int:
        if group >= self._num_seen:
            return self.pool.num_slots(group)
        return self._config.max_num_seqs * self._row_blocks * self._windows.block_size

    def slot_bytes(self, group: int) -> int:
        return self.pool.slot_bytes(group)

    def block_size(self, group: int) -> int:
        return self._config.max_model_len if group < self._num_seen else 1

    def pool_slots(self, group: int) -> int:
        """Slots in which entries can lie, in whole heaps; those of windows are ``num_slots``."""
        if group >= self._num_seen:
            return self.num_slots(group)
        return align_up(self.pool.num_slots(group), self.heap_slots(group))

    def heap_slots(self, group: int) -> int:
        """Slots of a heap."""
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
        self.pool.add(seq_id, max_tokens=max_tokens, keys=keys, priority=priority)
        self._note(seq_id)

    def could_hold(self, num_tokens: int, *, max_tokens: int | None = None) -> Fits | Never:
        return self.pool.could_hold(num_tokens, max_tokens=max_tokens)

    def match_prefix(self, seq_id: int, token_ids: TokenIds) -> PrefixHit:
        return self.pool.match_prefix(seq_id, token_ids)

    def next_block(
        self, seq_id: int, token_ids: Sequence[int], hit: PrefixHit | None = None
    ) -> tuple[BlockKey, int] | None:
        return self.pool.next_block(seq_id, token_ids, hit)

    def try_extend(
        self,
        seq_id: int,
        num_tokens: int,
        *,
        hit: PrefixHit | None = None,
        external_tokens: int = 0,
        lookahead_tokens: int = 0,
        promised_tokens: int = 0,
        kept_bytes: int = 0,
    ) -> Verdict:
        held, num_mappings = self.pool.num_tokens(seq_id), 0
        room = num_tokens + lookahead_tokens
        if held < room and num_tokens <= self._config.max_model_len:
            begin = held if hit is None else hit.num_tokens
            num_mappings = self._new_mappings(seq_id, begin, room) + self._hit_mappings(hit)
            refusal = self._refusal(self._rows[seq_id], num_mappings)
            if refusal is not None:
                begin += external_tokens
                never = self.pool.never_fits(
                    seq_id, num_tokens, begin=begin, lookahead_tokens=lookahead_tokens
                )
                return never or refusal
        verdict = self.pool.try_extend(
            seq_id,
            num_tokens,
            hit=hit,
            external_tokens=external_tokens,
            lookahead_tokens=lookahead_tokens,
            promised_tokens=promised_tokens,
            kept_bytes=kept_bytes,
        )
        if verdict is FITS:
            self._windows.num_promised += num_mappings
            self._have_window(seq_id)
        return verdict

    def try_extend_each(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> int:
        tables, size = self.pool.blocks.tables, self._block_size
        rows, ends = tables.rows_of(seq_ids), np.asarray(num_tokens, np.int64)
        windows = np.fromiter(map(self._rows.__getitem__, seq_ids), np.intp)
        after = -(-ends // size)
        num_new = (after - tables.num_tokens[rows] // size).clip(0) * self._num_seen
        num_new += np.count_nonzero(tables.ends[: self._num_seen, rows] > after, axis=0)
        num_new += NUM_GAPS * self._windows.num_blank(windows)
        # A sequence that has no window yet, or may pass the limit of mappings, is tried by itself.
        waiting = np.flatnonzero(windows < 0)
        fitting = int(waiting[0]) if len(waiting) else len(seq_ids)
        if not self._windows.have_mappings(int(num_new[:fitting].sum())):
            fitting = 0
        count = self.pool.try_extend_each(seq_ids[:fitting], num_tokens[:fitting])
        self._windows.num_promised += int(num_new[:count].sum())
        return count

    def mark_computed(
        self, seq_ids: Sequence[int], counts: Sequence[int] | None, token_ids: TokenIds
    ) -> None:
        self.pool.mark_computed(seq_ids, counts, token_ids)

    def keep_state(self, seq_id: int) -> bool:
        return self.pool.keep_state(seq_id)

    def resize(self, capacity_bytes: int, *, for_now: bool = False) -> int:
        if capacity_bytes < self.ceiling.now_bytes:
            self._windows.give_up_parked()
        return self.pool.resize(capacity_bytes, for_now=for_now)

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset_prefix_cache()

    def fork(self, seq_id: int, new_id: int) -> Verdict:
        source = self._rows[seq_id]
        if source >= 0:
            num_mappings = self._windows.mappings_for(self._tables(seq_id))
            refusal = self._refusal(_NO_ROW, num_mappings)
            if refusal is not None:
                return refusal
            self._windows.num_promised += num_mappings
        self.pool.fork(seq_id, new_id)
        self._note(new_id)
        self._have_window(new_id)
        return FITS

    def steady_tokens(self, seq_id: int) -> int:
        if self._config.max_mappings is not None:  # which are refused one by one
            return self.num_tokens(seq_id)
        return self.pool.steady_tokens(seq_id)

    def trim(self, seq_id: int, num_tokens: int) -> None:
        self.pool.trim(seq_id, num_tokens)

    def free(self, seq_id: int, *, forget: bool = False) -> None:
        row = self._rows.pop(seq_id)
        del self._sequences[self.pool.blocks.tables.rows[seq_id]]
        self.pool.free(seq_id, forget=forget)
        if row >= 0:
            self._windows.park(row)

    # -- questions -------------------------------------------------------------------------------

    def num_tokens(self, seq_id: int) -> int:
        return self.pool.num_tokens(seq_id)

    def table(self, group: int, seq_id: int) -> Slots:
        if group >= self._num_seen:
            return self.pool.table(group, seq_id)
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

    def drain(self) -> list[Change]:
        """Nothing is shown that is released, and nothing that is not committed."""
        changes = self.pool.drain()
        hidden, shown = self._windows.drain(), list[Change]()
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
        return replace(self.pool.usage(), reserved_bytes=reserved_bytes)

    @property
    def shown_slots(self) -> int:
        """Of each place in a window."""
        return self._block_size

    def shown(self, group: int) -> Slots:
        """The places (i64[n], ascending over all windows) at which a block is shown."""
        return self._windows.shown(group)

    def census(self, group: int) -> Census:
        return self.pool.census(group)

    def cells(self, group: int, seq_id: int) -> Slots:
        return self.pool.cells(group, seq_id)

    def check(self) -> None:
        self.pool.check()
        if not self._changed:
            taken = {row: self._tables(seq) for seq, row in self._rows.items() if row >= 0}
            self._windows.check(taken)
        for seq_id, row in self._rows.items():
            held = any(len(table) for table in self._tables(seq_id))
            assert row >= 0 or not held, "a sequence has blocks and no window"

    # -- what they are made of -------------------------------------------------------------------

    @property
    def _block_size(self) -> int:
        return self._windows.block_size

    def _tables(self, seq_id: int) -> list[Table]:
        """Its blocks in each group that is seen; -1 where a window has passed."""
        tables = self.pool.blocks.tables
        row = tables.rows[seq_id]
        return [
            ids[row, : tables.ends[group, row]]
            for group, ids in enumerate(tables.ids[: self._num_seen])
        ]

    def _note(self, seq_id: int) -> None:
        """A sequence has come, without a window."""
        self._rows[seq_id] = _NO_ROW
        self._sequences[self.pool.blocks.tables.rows[seq_id]] = seq_id

    def _have_window(self, seq_id: int) -> None:
        """With its first block a sequence gets a window."""
        if self._rows[seq_id] < 0:
            tables = self._tables(seq_id)
            if any(len(table) for table in tables):
                self._rows[seq_id] = self._windows.take(tables)

    def _changed_windows(self) -> dict[int, int]:
        """Windows that show something else from now on, and whose they are."""
        if not self._changed:
            return {}
        owners = [self._sequences[row] for row in self._changed if row in self._sequences]
        self._changed.clear()
        return {self._rows[seq]: seq for seq in owners if self._rows[seq] >= 0}

    def _new_mappings(self, seq_id: int, begin: int, end: int) -> int:
        """How many it takes at most to show what a step takes or copies: one for each block.

        Where room for drafts lies behind a copy, that begins another one.
        """
        size, tables, pools = self._block_size, self.pool.blocks.tables, self.pool.blocks.pools
        after = ceil_div(end, size)
        count = (after - ceil_div(begin, size)) * self._num_seen
        count += NUM_GAPS * int(self._windows.num_blank(np.array([self._rows[seq_id]]))[0])
        if begin % size == 0:
            return count
        row, column = tables.rows[seq_id], begin // size
        for number, ids in enumerate(tables.ids[: self._num_seen]):
            # A hit's last block, used in part, is copied; so is one that others hold too.
            held = column < tables.ends[number, row]
            if not held or pools[number].refs[ids[row, column]] > 1:
                count += 1 + int(tables.ends[number, row] > after)
        return count

    def _may_swap(self, group: int, row: int, column: int, block: int) -> bool:
        """Whether there are mappings to show a block that another sequence has filled alike.

        Where there are not, a sequence keeps its own block: by then none can be asked to wait.
        """
        table = self.pool.blocks.tables.ids[group][row]
        num_mappings = self._windows.num_cuts(group, table, column, block)
        if not self._windows.have_mappings(num_mappings):
            return False
        self._windows.num_promised += num_mappings
        return True

    def _hit_mappings(self, hit: PrefixHit | None) -> int:
        """How many it takes to show what a hit begins with."""
        if hit is None or not hit.num_tokens:
            return 0
        index, size = self.pool.blocks.index, self._block_size
        starts = (
            start_of(index, number, group, size, hit, hit.num_tokens)
            for number, group in enumerate(self.groups[: self._num_seen])
        )
        return sum(self._windows.num_runs(n, start.blocks) for n, start in enumerate(starts))

    def _refusal(self, row: int, num_mappings: int) -> NotNow | None:
        """Why a sequence with this window, or none, cannot have so many more mappings now."""
        if row < 0 and not self._windows.num_vacant:
            option = "max_num_seqs"
        elif self._windows.have_mappings(num_mappings):
            return None
        elif all(other < 0 or other == row for other in self._rows.values()):
            return None  # alone it may try: a mapping for each block is rare
        else:
            option = "vm.max_map_count"
        return NotNow(
            need_bytes=0,
            free_bytes=self.ceiling.now_bytes - self.pool.blocks.pools.held_bytes,
            holders=tuple(seq_id for seq_id, other in self._rows.items() if other >= 0),
            option=option,
        )
