"""Page in software: blocks of a pool, found through a block table, shared by reference count.

A fork shares every block; the first write into a shared one copies it (copy-on-write). A prompt
begins with what others have computed (prefix caching). What a window has passed is given back while
the sequence runs. External fragmentation does not exist, internal is less than one block a sequence
and group.

Who holds which block is decided by ``quire.kv.Coordinator``; here it is given the layout's
sizes, and its answers the words of ``Accounting``.
"""

from collections.abc import Sequence

import numpy as np

from quire.errors import ConfigError
from quire.kv.allocation import FITS, Fits, Never, Verdict, peak_bytes, verdict_on_length
from quire.kv.block_pools import PoolSize
from quire.kv.coordinator import Coordinator
from quire.kv.eviction import POLICIES
from quire.kv.interface import CacheConfig, Counts, Slots, Usage
from quire.kv.layout import granule_blocks, row_bytes, slot_bytes, stacking
from quire.kv.occupancy import Census, block_census, used_tokens
from quire.kv.packing import packed_positions
from quire.kv.prefix_cache import PrefixHit, TokenIds
from quire.kv.prefix_index import NO_KEYS, BlockKey, PrefixKeys
from quire.kv.storage_ops import Change
from quire.spec import (
    ChunkedAttention,
    FullAttention,
    Group,
    KeptWhole,
    LatentAttention,
    RecurrentState,
    SlidingWindow,
)
from quire.units import align_down, align_up, ceil_div


class PagedAccounting:
    """One pool of blocks for each group, all drawing on one ceiling of bytes."""

    shares_blocks = True

    def __init__(
        self, groups: tuple[Group, ...], config: CacheConfig, *, whole_pages: bool = False
    ) -> None:
        """``whole_pages``: a block is made of those, all layers of a group together."""
        if config.eviction_policy not in POLICIES:
            raise ConfigError(
                f"eviction policy {config.eviction_policy!r} is unknown; known: "
                f"{', '.join(POLICIES)}"
            )
        self.groups = groups
        self._config = config
        self._sizes = [self._size(group, whole_pages) for group in groups]
        self.blocks = Coordinator(
            groups,
            self._sizes,
            block_size=config.block_size,
            capacity_bytes=config.capacity_bytes,
            make_policy=POLICIES[config.eviction_policy],
            caching=config.enable_prefix_caching,
            keep_events=config.keep_events,
        )
        self.ceiling = self.blocks.pools.ceiling
        self._reserved_bytes = sum(size.num_ids * size.block_bytes for size in self._sizes)
        self._token_bytes = [group.bytes_per_token for group in groups]
        # A page with several blocks is as full as their order has it.
        self._is_steady = all(
            isinstance(group.spec, FullAttention | LatentAttention) and size.granule_blocks == 1
            for group, size in zip(groups, self._sizes, strict=True)
        )
        self._peaks = peak_bytes(
            groups,
            [config.block_size for _ in groups],
            [size.block_bytes for size in self._sizes],
            config.max_model_len,
            granule_units=[size.granule_blocks for size in self._sizes],
        )

    @property
    def state_block_size(self) -> int:
        has_states = any(isinstance(group.spec, RecurrentState) for group in self.groups)
        return self._config.block_size if has_states and self.blocks.caching else 0

    @property
    def held_bytes(self) -> int:
        return self.blocks.pools.held_bytes

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        return self._peaks[num_tokens]

    def num_slots(self, group: int) -> int:
        return self._sizes[group].num_ids * self._sizes[group].slots

    def slot_bytes(self, group: int) -> int:
        return self._sizes[group].block_bytes // self._sizes[group].slots

    def block_size(self, group: int) -> int:
        return self._sizes[group].slots

    def add(
        self,
        seq_id: int,
        *,
        max_tokens: int | None = None,
        keys: PrefixKeys = NO_KEYS,
        priority: int = 0,
    ) -> None:
        self.blocks.add(seq_id, keys, priority=priority)

    def could_hold(self, num_tokens: int, *, max_tokens: int | None = None) -> Fits | Never:
        return verdict_on_length(num_tokens, self._peaks, self.ceiling.capacity_bytes)

    def match_prefix(self, seq_id: int, token_ids: TokenIds) -> PrefixHit:
        return self.blocks.match_prefix(seq_id, token_ids)

    def next_block(
        self, seq_id: int, token_ids: Sequence[int], hit: PrefixHit | None = None
    ) -> tuple[BlockKey, int] | None:
        return self.blocks.next_block(seq_id, token_ids, hit)

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
        if num_tokens > self._config.max_model_len:
            return self._never(num_tokens, self._fresh_bytes(num_tokens))
        lookahead = min(lookahead_tokens, self._config.max_model_len - num_tokens)
        begin = (self.num_tokens(seq_id) if hit is None else hit.num_tokens) + external_tokens
        if promised_tokens > num_tokens:
            promised = min(promised_tokens, self._config.max_model_len)
            alone_bytes = self._fresh_bytes(num_tokens + lookahead, begin)
            kept_bytes += max(0, int(self._peaks[promised]) - alone_bytes)
        verdict = self.blocks.try_extend(
            seq_id,
            num_tokens,
            hit=hit,
            external_tokens=external_tokens,
            lookahead_tokens=lookahead,
            kept_bytes=kept_bytes,
        )
        if verdict is FITS:
            return verdict
        never = self.never_fits(seq_id, num_tokens, begin=begin, lookahead_tokens=lookahead)
        return never or verdict

    def never_fits(
        self, seq_id: int, num_tokens: int, *, begin: int, lookahead_tokens: int
    ) -> Never | None:
        """The verdict on a step from token ``begin`` on, if it is too much without others."""
        lookahead = min(lookahead_tokens, self._config.max_model_len - num_tokens)
        room, capacity_bytes = num_tokens + lookahead, self.ceiling.capacity_bytes
        alone_bytes = self._fresh_bytes(room, begin)
        if self._peaks[self.num_tokens(seq_id)] > capacity_bytes:
            # It came so far under a larger capacity, and could not again: where its blocks lie
            # scattered over pages, it must go on with them.
            alone_bytes = max(alone_bytes, self.blocks.bytes_without_others(seq_id, room))
        if alone_bytes <= capacity_bytes:
            return None
        return self._never(num_tokens, alone_bytes, lookahead)

    def try_extend_each(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> int:
        ends = np.asarray(num_tokens, np.int64)
        too_long = (ends > self._config.max_model_len).nonzero()[0]
        fitting = int(too_long[0]) if len(too_long) else len(ends)
        return self.blocks.try_extend_each(seq_ids[:fitting], ends[:fitting])

    def mark_computed(
        self, seq_ids: Sequence[int], counts: Sequence[int] | None, token_ids: TokenIds
    ) -> None:
        self.blocks.mark_computed(seq_ids, counts, token_ids)

    def keep_state(self, seq_id: int) -> bool:
        return self.blocks.keep_state(seq_id)

    def resize(self, capacity_bytes: int, *, for_now: bool = False) -> int:
        return self.blocks.resize(min(capacity_bytes, self._config.most_bytes), for_now=for_now)

    def reset_prefix_cache(self) -> bool:
        return self.blocks.reset_prefix_cache()

    def fork(self, seq_id: int, new_id: int) -> Fits:
        self.blocks.fork(seq_id, new_id)
        return FITS

    def steady_tokens(self, seq_id: int) -> int:
        return self._config.max_model_len if self._is_steady else self.num_tokens(seq_id)

    def trim(self, seq_id: int, num_tokens: int) -> None:
        self.blocks.trim(seq_id, num_tokens)

    def free(self, seq_id: int, *, forget: bool = False) -> None:
        self.blocks.free(seq_id, forget=forget)

    def num_tokens(self, seq_id: int) -> int:
        return int(self.blocks.tables.num_tokens[self.blocks.tables.rows[seq_id]])

    def table(self, group: int, seq_id: int) -> Slots:
        tables = self.blocks.tables
        row = tables.rows[seq_id]
        return tables.ids[group][row, : tables.ends[group, row]].astype(np.int64)

    def slots(self, group: int, seq_id: int, start: int, stop: int) -> Slots:
        positions, size = np.arange(start, stop), self._config.block_size
        blocks = self.table(group, seq_id)[positions // size]
        assert (blocks >= 0).all(), f"sequence {seq_id}: a window has passed token {start}"
        return blocks * size + positions % size

    def packed(
        self, group: int, seq_ids: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[Slots, Slots]:
        tables, size = self.blocks.tables, self._config.block_size
        rows = tables.rows_of(seq_ids)
        num_blocks = int(tables.ends[group, rows].max(initial=0))
        ids = tables.ids[group][rows, :num_blocks].astype(np.int64)
        owners, positions = packed_positions(starts, stops)
        blocks = ids[owners, positions // size]
        assert (blocks >= 0).all(), "a window has passed a token that is asked for"
        return ids, blocks * size + positions % size

    def drain(self) -> list[Change]:
        changes, self.blocks.pools.changes = self.blocks.pools.changes, []
        return changes

    def usage(self) -> Usage:
        tables, pools = self.blocks.tables, self.blocks.pools
        used_bytes = 0
        for number, group in enumerate(self.groups):
            num_held = pools[number].num_held
            if isinstance(group.spec, KeptWhole):
                used_bytes += num_held * group.num_layers * group.spec.state_bytes
            else:
                tokens = used_tokens(tables, number, group, num_held)
                used_bytes += tokens * self._token_bytes[number]
        return Usage(
            reserved_bytes=self._reserved_bytes,
            committed_bytes=pools.committed_bytes,
            used_bytes=used_bytes,
            cached_bytes=pools.cached_bytes,
            num_sequences=len(tables),
            num_tokens=int(tables.num_tokens.sum()),
        )

    def census(self, group: int) -> Census:
        size, blocks = self._sizes[group], self.blocks
        return block_census(
            self.groups[group],
            group,
            blocks.pools[group],
            blocks.tables,
            size.block_bytes,
            size.slots,
        )

    def cells(self, group: int, seq_id: int) -> Slots:
        return self.table(group, seq_id)

    def check(self) -> None:
        self.blocks.check()

    def _size(self, group: Group, whole_pages: bool) -> PoolSize:
        config = self._config
        granule, slots, row, page = 1, 1, None, config.page_bytes
        size = slot_bytes(group, page)
        if not isinstance(group.spec, KeptWhole):
            slots = config.block_size
            if whole_pages:
                size = stacking(group, page, config.layers_per_page).slot_bytes
            else:
                granule = granule_blocks(group, slots, page)
                row = row_bytes(group, slots, page)
        block_bytes = row or slots * size
        # Any group may come to hold the whole capacity.
        num_blocks = max(align_down(config.most_bytes // block_bytes, granule), granule)
        # Where nothing is cached a block is committed anew wherever it lies, so that neighbours
        # cost no more than addresses. Where pages are mapped they are worth that in any case.
        roomy = whole_pages or (granule == 1 and not config.enable_prefix_caching)
        spare = num_blocks if roomy else 0
        return PoolSize(
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            spare_blocks=spare,
            granule_blocks=granule,
            slots=slots,
            forgets=isinstance(group.spec, SlidingWindow | ChunkedAttention | RecurrentState),
        )

    def _never(self, num_tokens: int, need_bytes: int, lookahead_tokens: int = 0) -> Never:
        """The verdict on a step that ends at ``num_tokens`` and is too much for an empty cache."""
        longest = self._config.max_model_len
        return self._config.never(
            num_tokens,
            lambda n: self._fresh_bytes(min(n + lookahead_tokens, longest)),
            need_bytes=need_bytes,
            capacity_bytes=self.ceiling.capacity_bytes,
        )

    def _fresh_bytes(self, num_tokens: int, computed_tokens: int = 0) -> int:
        """What a sequence commits in an empty cache when a step begins at ``computed_tokens``."""
        block_size, total = self._config.block_size, 0
        for group, size in zip(self.groups, self._sizes, strict=True):
            if isinstance(group.spec, KeptWhole):
                blocks = group.spec.num_places
            else:
                first = group.live_start(computed_tokens) // block_size
                blocks = ceil_div(num_tokens, block_size) - first
            total += align_up(blocks, size.granule_blocks) * size.block_bytes
        return total
