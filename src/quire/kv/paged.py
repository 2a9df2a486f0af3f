"""Page in software: blocks of a pool, found through a block table, shared by reference count.

A fork shares every block; the first write into a shared one copies it (copy-on-write). A prompt
begins with what others have computed (prefix caching). What a window has passed is given back while
the sequence runs. External fragmentation does not exist, internal is less than one block a sequence
and group.

Who holds which block is decided by ``quire.kv.BlockCoordinator``; here it is given the layout's
sizes, and its answers the words of ``Accounting``.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.kv.allocation import (
    FITS,
    AllocationResult,
    Fits,
    Never,
    NotNow,
    peak_bytes,
    verdict_on_length,
)
from quire.kv.block_pool import Moves, Pools, PoolSize
from quire.kv.block_steps import Counts, GroupStep, check_trim, first_columns, group_step
from quire.kv.block_tables import PASSED, BlockTables
from quire.kv.eviction import (
    EVICTION_POLICIES,
    EvictionPolicy,
    MakePolicy,
    PolicyPool,
    Priority,
)
from quire.kv.eviction_queue import NO_IDS, Ids
from quire.kv.evidence import Evidence, SharesEvidence
from quire.kv.interface import AS_IT_IS, CacheConfig, Extension, Slots, Usage
from quire.kv.layout import granule_blocks, row_bytes, slot_bytes, stacking
from quire.kv.occupancy import Occupancy, block_census, used_tokens
from quire.kv.packed_slots import packed_positions
from quire.kv.prefix_cache import PrefixCache, PrefixHit, TokenIds, no_hit, start_of
from quire.kv.prefix_index import (
    NO_KEYS,
    BlockEvent,
    BlockIdentity,
    BlockKey,
    PrefixIndex,
    PrefixKeys,
)
from quire.kv.retention import Retention
from quire.kv.storage_ops import StorageOp
from quire.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    Group,
    KeptWhole,
    LatentAttention,
    RecurrentState,
    SlidingWindow,
)
from quire.units import align_down, align_up, ceil_div

# -- coordinator -----------------------------------------------------------------------------------

# All groups at once: which sequence holds which blocks, and whether there is room for more.
#
# Every verb asks first and acts then, so a refusal has changed nothing. Steps of many sequences
# are planned together: a few numpy expressions over their rows, and Python only for what is rare.
#
# What a step does to the tables is worked out in ``steps``, bytes are counted in ``pools``, and
# what blocks contain is known to ``prefix_cache``.


class BlockCoordinator:
    """Sequences' blocks in all groups, drawing on one budget of bytes."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        sizes: Sequence[PoolSize],
        *,
        block_size: int,
        capacity_bytes: int,
        make_policy: MakePolicy,
        caching: bool = True,
        keep_events: bool = False,
        retention_share: float = 0.0,
    ) -> None:
        self.groups = groups
        # What tokens stand for depends on the source too, which no key of a prefix names.
        self.caching = caching and not any(isinstance(g.spec, CrossAttention) for g in groups)
        self.tables = BlockTables(len(groups), block_size)
        self.index = PrefixIndex(len(groups), block_size, keep_events=keep_events)
        self.pools = Pools(sizes, capacity_bytes, self.index, make_policy, retention_share)
        self.ceiling = self.pools.ceiling
        self._cache = PrefixCache(groups, self.index, self.pools, self.tables)
        self._numbers = range(len(groups))
        self._has_priorities = False
        self._kept_whole = [isinstance(group.spec, KeptWhole) for group in groups]

    # -- sequences come, fork and go -------------------------------------------------------------

    def add(
        self,
        seq_id: int,
        *,
        max_tokens: int | None = None,
        keys: PrefixKeys = NO_KEYS,
        priority: int = 0,
    ) -> None:
        """Announce a sequence, which holds nothing yet. Raises: KeyError if the id is in use.

        What it leaves in the cache goes before that of sequences with a smaller ``priority``.
        ``max_tokens`` is no matter here: blocks are held as they are needed.
        """
        self._announce(seq_id, keys, priority)

    def _announce(self, seq_id: int, keys: PrefixKeys, priority: int = 0) -> None:
        row = self.tables.add(seq_id)
        self._has_priorities |= priority != 0
        self.tables.priorities[row] = min(max(priority, -128), 127)
        self._cache.add(row, keys)

    def fork(self, seq_id: int, new_id: int) -> AllocationResult:
        """Begin ``new_id`` as a copy of ``seq_id``: every block is shared until it is written."""
        source = self.tables.rows[seq_id]
        target = self.tables.add(new_id)
        self.tables.copy(source, target)
        self._cache.fork(source, target)
        for number in self._numbers:
            # What there is room for and nothing in, the new one does not share.
            self.tables.cut(number, target, self._num_blocks(number, target))
            self.pools.hold(number, self.tables.held(number, target))
        return FITS

    def trim(self, seq_id: int, num_tokens: int) -> None:
        """Keep only the first ``num_tokens`` tokens.

        Raises: ValueError if a window or a state cannot go back there; nothing has changed then.
        """
        row = self.tables.rows[seq_id]
        num_tokens = min(num_tokens, int(self.tables.num_tokens[row]))
        for number, group in enumerate(self.groups):
            check_trim(self.tables, number, group, row, num_tokens)
        if self.caching:
            self._cache.trim(row, num_tokens)
        self.tables.num_computed[row] = min(num_tokens, int(self.tables.num_computed[row]))
        self.tables.num_tokens[row] = num_tokens
        for number in self._numbers:
            blocks = self.tables.cut(number, row, self._num_blocks(number, row))
            self._release(number, row, blocks)

    def free(self, seq_id: int, *, forget: bool = False, ended: bool = False) -> None:
        """End a sequence, deepest block first; ``forget`` what it leaves in the index.

        ``ended``: its conversation ends with it.
        """
        row = self.tables.rows[seq_id]
        if forget:
            self._cache.forget(row)
        for number in self._numbers:
            self._release(number, row, self.tables.held(number, row), ended=ended)
        self._cache.remove(row)
        self.tables.remove(seq_id)

    # -- room ------------------------------------------------------------------------------------

    def allocate(
        self,
        seq_id: int,
        num_tokens: int,
        *,
        hit: PrefixHit | None = None,
        external_tokens: int = 0,
        lookahead_tokens: int = 0,
        kept_bytes: int = 0,
    ) -> Fits | NotNow:
        """Make room for a sequence's first ``num_tokens`` tokens in every group, or in none.

        A sequence that holds nothing may begin with a ``hit`` and with ``external_tokens`` after
        it, which will be brought from outside. ``lookahead_tokens`` get room too, without counting
        as the sequence's. ``kept_bytes`` of the free ones are for others.
        """
        row = self.tables.rows[seq_id]
        held, end = int(self.tables.num_tokens[row]), num_tokens + lookahead_tokens
        has_begun = self.tables.ends[0, row] > 0
        if external_tokens or (hit is not None and hit.num_tokens):
            assert not has_begun, f"sequence {seq_id} has begun already"
        elif end <= held:
            return FITS
        if has_begun:
            rows = np.array([row])
            steps = self._steps(rows, np.array([held]), np.array([end]))
            verdict = self._verdict([step.moves() for step in steps], kept_bytes)
            if verdict is FITS:
                self._carry_out(rows, steps)
        else:
            hit = hit or no_hit(num_tokens, "", self._cache.tail(row))
            verdict = self._begin(row, hit, hit.num_tokens + external_tokens, end, kept_bytes)
        if verdict is FITS:
            self.tables.num_tokens[row] = max(num_tokens, held)
        return verdict

    def bytes_without_others(self, seq_id: int, num_tokens: int) -> int:
        """Return the bytes a sequence would hold with room for ``num_tokens`` if all others ended.

        Its blocks stay where they are; new ones fill their pages first.
        """
        row, total = self.tables.rows[seq_id], 0
        steps = self._steps(
            np.array([row]), self.tables.num_tokens[[row]], np.array([num_tokens], np.int64)
        )
        for number, (step, size) in enumerate(zip(steps, self.pools.sizes, strict=True)):
            start, end = int(step.starts[0]), int(step.ends[0])
            kept = self.tables.ids[number][row, start : self.tables.ends[number, row]]
            num_granules = max(
                len(np.unique(kept // size.granule_blocks)),
                ceil_div(end - start, size.granule_blocks),
            )
            total += num_granules * size.granule_blocks * size.block_bytes
        return total

    def try_extend_each(self, seq_ids: Sequence[int], num_tokens: Sequence[int] | Counts) -> int:
        """Make room for each of these sequences, in order; how many of them have it now.

        The next one does not fit: ``try_extend`` says why.
        """
        rows, end = self.tables.rows_of(seq_ids), np.asarray(num_tokens, np.int64)
        begin = self.tables.num_tokens[rows]
        growing = (end > begin).nonzero()[0]
        if len(growing) < len(rows):
            rows, begin, end = rows[growing], begin[growing], end[growing]
        steps = self._steps(rows, begin, end)
        count = len(rows)
        if not self._fit(steps):
            # The first sequences never need more than all: find by bisection how many fit.
            low, high = 0, count - 1
            while low < high:
                middle = (low + high + 1) // 2
                steps = self._steps(rows[:middle], begin[:middle], end[:middle])
                low, high = (middle, high) if self._fit(steps) else (low, middle - 1)
            count = low
            steps = self._steps(rows[:count], begin[:count], end[:count])
        self._carry_out(rows[:count], steps)
        self.tables.num_tokens[rows[:count]] = end[:count]
        return len(seq_ids) if count == len(growing) else int(growing[count])

    # -- prefixes --------------------------------------------------------------------------------

    def match_prefix(self, seq_id: int, token_ids: TokenIds) -> PrefixHit:
        """Find the longest cached prefix of a prompt (i32[n]): all but its last token at most.

        It is for a sequence that holds nothing, and for the very next ``try_extend``.
        """
        row = self.tables.rows[seq_id]
        if not self.caching:
            return no_hit(len(token_ids), "strategy", self._cache.tail(row))
        return self._cache.match(row, token_ids, max(0, len(token_ids) - 1))

    def next_block(
        self, seq_id: int, token_ids: Sequence[int], hit: PrefixHit | None = None
    ) -> tuple[BlockKey, int] | None:
        """Return the key of the next full block of these token ids, and the token it ends at.

        Of a sequence that holds nothing it is the one behind the ``hit``. None: there is none, or
        it will not be found.
        """
        if not self.caching:
            return None
        return self._cache.next_block(self.tables.rows[seq_id], token_ids, hit)

    def pin(self, pin_id: int, token_ids: TokenIds, keys: PrefixKeys = NO_KEYS) -> int:
        """Keep what is cached of a prefix until ``free(pin_id)``; how many tokens that is.

        A pin is a sequence that never runs: it holds whole blocks, and they are not evicted.
        """
        self._announce(pin_id, keys)
        row, size = self.tables.rows[pin_id], self.tables.block_size
        whole = token_ids[: len(token_ids) // size * size]
        hit = self._cache.match(row, whole, len(whole), in_part=False)
        for number, group in enumerate(self.groups):
            start = start_of(self.index, number, group, size, hit, hit.num_tokens)
            blocks = np.append(start.blocks, start.source)  # of a state, the snapshot itself
            self.pools.hold(number, blocks)
            self.tables.place(number, row, start.first, blocks)
            self.tables.starts[number, row] = start.first
            self.tables.ends[number, row] = start.first + len(blocks)
        self._cache.adopt(row, hit)
        self.tables.num_tokens[row] = hit.num_tokens
        return hit.num_tokens

    def following_blocks(
        self, seq_id: int, token_ids: TokenIds, hit: PrefixHit
    ) -> list[BlockIdentity]:
        """Name the full blocks of a prompt (i32[n]) behind the hit of an empty sequence."""
        return self._cache.following(self.tables.rows[seq_id], token_ids, hit)

    def computed_blocks(self, seq_id: int) -> list[BlockIdentity]:
        """Name a sequence's full blocks, from its first one on."""
        return self._cache.computed(self.tables.rows[seq_id])

    def computed_nodes(self, seq_id: int) -> list[int]:
        """List the index's nodes of a sequence's full blocks, from its first one on."""
        return self._cache.computed_nodes(self.tables.rows[seq_id])

    def hottest_nodes(self) -> list[int]:
        """List the index's nodes of cached blocks: those that are evicted last come first.

        Each comes behind its parent.
        """
        seen: dict[int, None] = {}  # in order
        for number in self._numbers:
            pool = self.pools[number]
            blocks, _ = pool.evictable.order()
            for row in pool.nodes[blocks[::-1]].tolist():
                path = []
                for each in self.index.upwards(row):
                    if each in seen:
                        break
                    path.append(each)
                seen.update(dict.fromkeys(reversed(path)))
        return [self.index.node(row) for row in seen]

    def reserve_blocks(
        self, pin_id: int, token_ids: TokenIds, keys: PrefixKeys = NO_KEYS
    ) -> list[tuple[int, Ids]] | None:
        """Take the blocks of a prefix (i32[n], whole blocks) that are not cached, to be filled.

        Returns: for each group the first column that is to be filled, and the blocks from there
        on: those that a sequence which begins behind the prefix reads. The caller writes whole
        blocks, and calls ``insert_blocks`` or ``free``. Empty if all of it is cached; None if there
        is no room. Nothing has changed then.
        """
        self._announce(pin_id, keys)
        row, end = self.tables.rows[pin_id], len(token_ids)
        hit = self._cache.match(row, token_ids, end, in_part=False)
        external = end - hit.num_tokens
        if not external or self.allocate(pin_id, end, hit=hit, external_tokens=external) != FITS:
            self.free(pin_id)
            return None if external else []
        first = hit.num_tokens // self.tables.block_size
        reserved = []
        for number in self._numbers:
            if self._kept_whole[number]:
                reserved.append((end // self.tables.block_size - 1, self.tables.held(number, row)))
                continue
            start = max(first, int(self.tables.starts[number, row]))
            stop = int(self.tables.ends[number, row])
            reserved.append((start, self.tables.ids[number][row, start:stop].astype(np.intp)))
        self.tables.shareable_from[:, row] = 0  # all of them are written whole
        return reserved

    def insert_blocks(self, pin_id: int, token_ids: TokenIds) -> list[int]:
        """Let reserved blocks, which are filled now, be found: i32[n], as they were reserved.

        They are cached, and ``pin_id`` is free. Returns: the index's nodes of them.
        """
        row = self.tables.rows[pin_id]
        begun = int(self.tables.num_computed[row])
        self._cache.mark_computed(np.array([row]), [len(token_ids) - begun], token_ids[begun:])
        node, lacking = self._cache.lacking_states(row)
        for number in lacking:
            self._cache.attach(number, np.array([node]), self.tables.held(number, row)[:1])
        nodes = self._cache.last_nodes(row, (len(token_ids) - begun) // self.tables.block_size)
        # Two prompts use them: the one that they were computed for, and the one that they are
        # brought for. Known for one use, they would be the first to go, before the second has come.
        for number in self._numbers:
            held = self.tables.held(number, row)
            self.pools[number].hold(held)
            self._release(number, row, held)
        self.free(pin_id)
        return nodes

    def keep_state(self, seq_id: int) -> bool:
        """Keep a copy of a sequence's recurrent states, if it stands at the end of a full block.

        Others can then begin there. It takes free bytes only, at most from what is cached; False if
        there are none, or nothing to keep.
        """
        row = self.tables.rows[seq_id]
        node, lacking = self._cache.lacking_states(row)
        num_new = [int(self.caching and number in lacking) for number in self._numbers]
        moves = [Moves(released=NO_IDS, held=NO_IDS, num_new=count) for count in num_new]
        if not any(num_new) or self._verdict(moves, 0) is not FITS:
            return False
        for number, block in enumerate(self.pools.allocate(num_new)):
            if len(block):
                self.pools.copy(number, self.tables.held(number, row)[:1], block, [1])
                self._cache.attach(number, np.array([node]), block)
                self._release(number, row, block)
        return True

    def retain(self, seq_id: int, retention: Retention) -> int:
        """Keep what is computed of a prompt's beginning for a while, as its client asks.

        Returns: how many tokens are kept so; fewer than asked for where the share is used up.
        """
        return self._cache.retain(self.tables.rows[seq_id], retention)

    def mark_computed(
        self, seq_ids: Sequence[int], counts: Sequence[int] | None, token_ids: TokenIds
    ) -> None:
        """Note that ``counts[i]`` more tokens of sequence i are computed: others may share them.

        ``token_ids`` holds all of them, packed (i32[T]); without ``counts``, one of each sequence.
        """
        rows = self.tables.rows_of(seq_ids)
        if self.caching:
            self._cache.mark_computed(rows, counts, token_ids)
        else:
            self.tables.num_computed[rows] += 1 if counts is None else np.asarray(counts, np.int64)

    # -- whole -----------------------------------------------------------------------------------

    def resize(self, capacity_bytes: int, *, for_now: bool = False) -> int:
        """Set the ceiling, or the capacity with it; where it is then, never below what is held.

        What is only cached goes, pages of which no block is held, the least recently used
        first; what is held never does.
        """
        self.pools.evict(capacity_bytes)
        committed = self.pools.committed_bytes
        return self.ceiling.move(capacity_bytes, committed, for_now=for_now)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; False, and nothing is done, while a block is held."""
        if self.pools.held_bytes:
            return False
        self.pools.evict(0)
        self.index.note_cleared()
        return True

    def evidence(self) -> tuple[Evidence | None, ...]:
        """Return what each group's eviction policy has found. Any thread may call."""
        several = (self.pools[number].evictable for number in self._numbers)
        return tuple(
            each.evidence() if isinstance(each, SharesEvidence) else None for each in several
        )

    def hear_evidence(self, others: Sequence[Evidence | None]) -> None:
        """Tell each group's eviction policy what others have found. Any thread may call."""
        for number, each in zip(self._numbers, others, strict=False):
            policy = self.pools[number].evictable
            if isinstance(policy, SharesEvidence):
                policy.hear(each)

    def take_events(self) -> list[BlockEvent]:
        events, self.index.events = self.index.events, []
        return events

    def check(self) -> None:
        self.pools.check()
        self.index.check()
        for number in self._numbers:
            refs = np.zeros_like(self.pools[number].refs)
            for row in self.tables.rows.values():
                np.add.at(refs, self.tables.held(number, row), 1)
            assert (refs == self.pools[number].refs).all(), "references differ from the tables"
        assert self.pools.committed_bytes <= self.ceiling.now_bytes, "above the ceiling"

    # -- what the verbs are made of --------------------------------------------------------------

    def _begin(
        self, row: int, hit: PrefixHit, begin: int, end: int, kept_bytes: int
    ) -> Fits | NotNow:
        """A sequence's first step: perhaps after a hit, and tokens from outside.

        Its tables only grow: no window has passed anything, and nothing shared is written.
        """
        size = self.tables.block_size
        starts = [
            start_of(self.index, number, group, size, hit, begin)
            for number, group in enumerate(self.groups)
        ]
        grown = [
            first_columns(group, size, start, begin, end)
            for group, start in zip(self.groups, starts, strict=True)
        ]
        moves = [
            Moves(released=NO_IDS, held=start.blocks, num_new=len(columns))
            for start, columns in zip(starts, grown, strict=True)
        ]
        verdict = self._verdict(moves, kept_bytes)
        if verdict is not FITS:
            return verdict
        # A block that is used in part stays cached and is copied, if there is room for both;
        # otherwise the sequence takes it over. One that is held stays anyway.
        evicts = any(len(start.source) for start in starts) and self.pools.evicts(
            [move.num_new for move in moves]
        )
        taken = [False for _ in moves]
        if evicts:
            both = [
                replace(m, held=np.append(s.blocks, s.source))
                for m, s in zip(moves, starts, strict=True)
            ]
            if self._verdict(both, kept_bytes) is not FITS:
                taken = [self.pools.is_only_cached(n, s.source) for n, s in enumerate(starts)]
                fewer = [
                    replace(m, num_new=m.num_new - t) for m, t in zip(both, taken, strict=True)
                ]
                verdict = self._verdict(fewer, kept_bytes)
                if verdict is not FITS:  # it lies in a page of its own, which is one too many
                    return verdict
        self._cache.adopt(row, hit)
        after: list[int] = []  # of each group, the block that its new ones should lie behind
        for number, start in enumerate(starts):
            blocks, columns = start.blocks, grown[number]
            self.tables.starts[number, row] = start.first if len(blocks) else columns.start
            self.tables.shareable_from[number, row] = start.shareable_from
            self.pools.hold(number, blocks)
            if taken[number]:
                self.pools.take_over(number, start.source)
                blocks, grown[number] = np.append(blocks, start.source), columns[1:]
            elif evicts:
                self.pools.hold(number, start.source)
            if len(blocks):
                self.tables.place(number, row, start.first, blocks)
            follows = len(blocks) > 0 and start.first + len(blocks) == grown[number].start
            after.append(int(blocks[-1]) if follows else -1)
        new = self.pools.allocate([len(columns) for columns in grown], after)
        for number, (start, columns) in enumerate(zip(starts, grown, strict=True)):
            self.tables.place(number, row, columns.start, new[number])
            self.tables.ends[number, row] = columns.stop
            if len(start.source) and not taken[number]:
                self.pools.copy(number, start.source, new[number][:1], [start.num_slots])
                if evicts:
                    self._release(number, row, start.source)
        return FITS

    def _num_blocks(self, number: int, row: int) -> int:
        """Columns that a row's tokens take in a group."""
        num_tokens = int(self.tables.num_tokens[row])
        if self._kept_whole[number]:
            return int(self.tables.ends[number, row]) if num_tokens else 0
        return -(-num_tokens // self.tables.block_size)

    def _release(self, number: int, row: int, blocks: Ids, *, ended: bool = False) -> None:
        """A row holds these no more; they are given shallowest first, and go deepest first."""
        self.pools.release(number, blocks[::-1], int(self.tables.priorities[row]), ended=ended)

    def _priorities(self, rows: Ids) -> Priority:
        return self.tables.priorities[rows] if self._has_priorities else 0

    def _carry_out(self, rows: Ids, steps: list[GroupStep]) -> None:
        """Do what was found to fit: first what gives room, then what takes it."""
        for number, step in enumerate(steps):
            if len(step.passed_blocks):
                priorities = self._priorities(step.passed[0][::-1])
                self.pools.release(number, step.passed_blocks[::-1], priorities)
                self.tables.ids[number][step.passed] = PASSED
            if len(step.rewritten):
                self.pools.forget(number, step.rewritten)
            if step.num_new:
                self.tables.have_columns(number, int(step.ends.max()) + 1)
        after = [s.after(table) for s, table in zip(steps, self.tables.ids, strict=True)]
        taken = self.pools.allocate([step.num_new for step in steps], after)
        for number, (step, new) in enumerate(zip(steps, taken, strict=True)):
            num_copied = len(step.copied_blocks)
            if num_copied:
                self.pools.copy(number, step.copied_blocks, new[:num_copied], step.copied_slots)
                priorities = self._priorities(step.copied[0])
                self.pools.release(number, step.copied_blocks, priorities)
                self.tables.ids[number][step.copied] = new[:num_copied]
            if len(new) > num_copied:
                self.tables.ids[number][step.grown] = new[num_copied:]
            self.tables.starts[number, rows] = step.starts
            self.tables.ends[number, rows] = step.ends
            if self.tables.changed is not None:
                self.tables.note(step.changed_rows())

    def _steps(self, rows: Ids, begin: Counts, end: Counts) -> list[GroupStep]:
        """The step in each group, of sequences that have begun or have no hit."""
        starts, ends = self.tables.starts[:, rows], self.tables.ends[:, rows]
        return [
            group_step(
                self.tables.ids[number],
                self.tables.block_size,
                group,
                self.pools[number],
                rows,
                (begin, end),
                (starts[number], ends[number]),
            )
            for number, group in enumerate(self.groups)
        ]

    def _fit(self, steps: list[GroupStep]) -> bool:
        after = self.pools.held_bytes_after([step.moves() for step in steps])
        return after <= self.ceiling.now_bytes

    def _verdict(self, moves: list[Moves], kept_bytes: int) -> Fits | NotNow:
        held, after = self.pools.held_bytes, self.pools.held_bytes_after(moves)
        free = self.ceiling.now_bytes - held
        if after - held <= free - kept_bytes:
            return FITS
        return NotNow(
            need_bytes=after - held,
            free_bytes=free,
            kept_bytes=kept_bytes,
            holders=self.tables.holders(),
        )


# -- paged -----------------------------------------------------------------------------------------


class PagedAccounting(BlockCoordinator):
    """One pool of blocks for each group, all drawing on one ceiling of bytes."""

    shares_blocks = True
    fragmentation = 0.0

    def __init__(
        self, groups: tuple[Group, ...], config: CacheConfig, *, whole_pages: bool = False
    ) -> None:
        """``whole_pages``: a block is made of those, all layers of a group together."""
        self._config = config
        self._sizes = [self._size(group, whole_pages) for group in groups]
        name, option = config.eviction_policy, "prefix_caching_policy"
        make = EVICTION_POLICIES.find(name, option)

        def make_policy(pool: PolicyPool) -> EvictionPolicy:
            with EVICTION_POLICIES.blamed(name, option):
                return make(pool)

        super().__init__(
            groups,
            self._sizes,
            block_size=config.block_size,
            capacity_bytes=config.capacity_bytes,
            make_policy=make_policy,
            caching=config.enable_prefix_caching,
            keep_events=config.keep_events,
            retention_share=config.retention_share,
        )
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
        return self._config.block_size if has_states and self.caching else 0

    @property
    def held_bytes(self) -> int:
        return self.pools.held_bytes

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        return self._peaks[num_tokens]

    def num_slots(self, group: int) -> int:
        return self._sizes[group].num_ids * self._sizes[group].slots

    def slot_bytes(self, group: int) -> int:
        return self._sizes[group].block_bytes // self._sizes[group].slots

    def block_size(self, group: int) -> int:
        return self._sizes[group].slots

    def could_hold(self, num_tokens: int, *, max_tokens: int | None = None) -> Fits | Never:
        return verdict_on_length(num_tokens, self._peaks, self.ceiling.capacity_bytes)

    def try_extend(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        longest = self._config.max_model_len
        if num_tokens > longest:
            return self._never(num_tokens, self._fresh_bytes(num_tokens))
        hit, kept_bytes = extension.hit, extension.kept_bytes
        lookahead = min(extension.lookahead_tokens, longest - num_tokens)
        begin = self.num_tokens(seq_id) if hit is None else hit.num_tokens
        begin += extension.external_tokens
        if extension.promised_tokens > num_tokens:
            promised = min(extension.promised_tokens, longest)
            alone_bytes = self._fresh_bytes(num_tokens + lookahead, begin)
            kept_bytes += max(0, int(self._peaks[promised]) - alone_bytes)
        verdict = self.allocate(
            seq_id,
            num_tokens,
            hit=hit,
            external_tokens=extension.external_tokens,
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
        """Return the result of a step from token ``begin`` on, if it never fits; else None."""
        lookahead = min(lookahead_tokens, self._config.max_model_len - num_tokens)
        room, capacity_bytes = num_tokens + lookahead, self.ceiling.capacity_bytes
        alone_bytes = self._fresh_bytes(room, begin)
        if self._peaks[self.num_tokens(seq_id)] > capacity_bytes:
            # It came so far under a larger capacity, and could not again: where its blocks lie
            # scattered over pages, it must go on with them.
            alone_bytes = max(alone_bytes, self.bytes_without_others(seq_id, room))
        if alone_bytes <= capacity_bytes:
            return None
        return self._never(num_tokens, alone_bytes, lookahead)

    def try_extend_each(self, seq_ids: Sequence[int], num_tokens: Sequence[int] | Counts) -> int:
        ends = np.asarray(num_tokens, np.int64)
        too_long = (ends > self._config.max_model_len).nonzero()[0]
        fitting = int(too_long[0]) if len(too_long) else len(ends)
        return super().try_extend_each(seq_ids[:fitting], ends[:fitting])

    def resize(self, capacity_bytes: int, *, for_now: bool = False) -> int:
        return super().resize(min(capacity_bytes, self._config.most_bytes), for_now=for_now)

    def steady_tokens(self, seq_id: int) -> int:
        return self._config.max_model_len if self._is_steady else self.num_tokens(seq_id)

    def num_tokens(self, seq_id: int) -> int:
        return int(self.tables.num_tokens[self.tables.rows[seq_id]])

    def block_ids(self, group: int, seq_id: int) -> Slots:
        """Return a sequence's blocks (i64[P]) in a group; -1 where a window has passed."""
        tables = self.tables
        row = tables.rows[seq_id]
        return tables.ids[group][row, : tables.ends[group, row]].astype(np.int64)

    def table(self, group: int, seq_id: int) -> Slots:
        return self.block_ids(group, seq_id)

    def slots(self, group: int, seq_id: int, start: int, stop: int) -> Slots:
        return self.block_slots(group, seq_id, start, stop)

    def block_slots(self, group: int, seq_id: int, start: int, stop: int) -> Slots:
        """Return where tokens [start, stop) lie in the pool of blocks: slots i64[stop - start]."""
        positions, size = np.arange(start, stop), self._config.block_size
        blocks = self.block_ids(group, seq_id)[positions // size]
        assert (blocks >= 0).all(), f"sequence {seq_id}: a window has passed token {start}"
        return blocks * size + positions % size

    def packed(
        self, group: int, seq_ids: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[Slots, Slots]:
        tables, size = self.tables, self._config.block_size
        rows = tables.rows_of(seq_ids)
        num_blocks = int(tables.ends[group, rows].max(initial=0))
        ids = tables.ids[group][rows, :num_blocks].astype(np.int64)
        owners, positions = packed_positions(starts, stops)
        blocks = ids[owners, positions // size]
        assert (blocks >= 0).all(), "a window has passed a token that is asked for"
        return ids, blocks * size + positions % size

    def drain(self) -> list[StorageOp]:
        changes, self.pools.changes = self.pools.changes, []
        return changes

    def usage(self) -> Usage:
        tables, pools = self.tables, self.pools
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

    def census(self, group: int) -> Occupancy:
        size = self._sizes[group]
        return block_census(
            self.groups[group],
            group,
            self.pools[group],
            self.tables,
            size.block_bytes,
            size.slots,
        )

    def cells(self, group: int, seq_id: int) -> Slots:
        return self.block_ids(group, seq_id)

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
