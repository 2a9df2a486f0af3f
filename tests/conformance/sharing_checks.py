"""What is demanded of the cache: after every step, of a hit, of a refusal, of an eviction."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from conformance.census_checks import check_census
from conformance.sharing_model import Held, Step
from conformance.sharing_world import World
from quire.kv import Fits, Never, NotNow, PrefixHit, Usage
from quire.kv.prefix_index import AllBlocksCleared, BlockRemoved, BlockStored
from quire.units import ceil_div

UNHELD = 1000  # no sequence has held the block
UNKNOWN = -1000  # it was read in part: whether that counts depends on the room there was


class Checks:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Of each block that can be found, the smallest priority of those that have held it.
        self._importance = [np.full(size.num_ids, UNHELD) for size in world.pools.sizes]

    def check(self) -> None:
        self.world.accounting.check()
        self.check_events()
        self.check_usage()
        check_census(self.world.accounting, self.world.held)
        self.check_windows()
        for seq_id, held in self.world.held.items():
            self.check_contents(seq_id, held)

    def check_contents(self, seq_id: int, held: Held) -> None:
        """What the last step read, and what a later one can read, is what the sequence wrote."""
        assert self.world.accounting.num_tokens(seq_id) == held.room
        for g, group in enumerate(self.world.groups):
            table = self.world.table(g, seq_id)
            if self.world.states[g]:
                start, slots = max(0, held.room - 1), table[: min(held.room, 1)]
            else:
                start = group.live_start(held.base)
                slots = self.world.slots(g, seq_id, start, held.room)
            self.world.store.read(
                g, table, slots, start, np.array(held.contents[start : held.room])
            )

    def check_windows(self) -> None:
        """Each shows its sequence's block table and nothing else; in as many pieces as may be."""
        world, num_mappings = self.world, 0
        if world.windows is None:
            return
        for g, size in enumerate(world.pools.sizes):
            if world.states[g]:  # a window does not show them side by side
                continue
            row_slots = world.windows.num_slots(g) // world.config.max_num_seqs
            num_mappings += world.store.num_mappings(g, row_slots, world.windows.heap_slots(g))
            for seq_id in world.windowed:
                (first,) = world.windows.table(g, seq_id)
                shown = world.store.seen(g, np.arange(first, first + row_slots))
                blocks = np.full(row_slots // size.slots, -1)
                table = world.table(g, seq_id)
                blocks[: len(table)] = table
                slots = blocks[:, None] * size.slots + np.arange(size.slots)
                slots[blocks < 0] = -1
                assert (shown == slots.ravel()).all(), "a window does not show its block table"
        limit = world.config.max_mappings
        if limit is not None and len(world.windowed) > 1:
            assert num_mappings <= limit // world.num_stacks, "the system would refuse a mapping"

    def check_events(self) -> None:
        """From the events alone it is known which blocks can be found."""
        nodes = self.world.prefixes.nodes
        for event in self.world.index.events:
            if isinstance(event, AllBlocksCleared):
                self.world.present.clear()
                continue
            number = self.world.prefixes.by_digest[event.block_hash]
            place = event.group_idx, number
            root = nodes[number]
            while root.parent is not None:
                root = nodes[root.parent]
            assert event.root_keys == root.extra
            if isinstance(event, BlockRemoved):
                self.world.present.remove(place)
                continue
            assert place not in self.world.present, "a block was stored twice"
            self.world.present.add(place)
            node = nodes[number]
            assert node.parent is not None
            parent = nodes[node.parent]
            first = parent.parent is None
            assert event == BlockStored(
                block_hash=node.digest,
                parent_block_hash=None if first else parent.digest,
                token_ids=node.tokens,
                extra_keys=(*(parent.extra if first else ()), *node.extra),
                root_keys=root.extra,
                group_idx=event.group_idx,
            )
        self.world.index.events.clear()
        found = {
            (g, self.world.prefixes.by_digest[self.world.index.block_hash(row)])
            for g, blocks in enumerate(self.world.index.blocks)
            for row in np.flatnonzero(blocks >= 0).tolist()
        }
        assert found == self.world.present, "the events do not tell what can be found"

    def check_usage(self) -> None:
        used = cached = committed = reserved = 0
        for g, (group, size) in enumerate(
            zip(self.world.groups, self.world.pools.sizes, strict=True)
        ):
            pool, live, refs = self.world.pools[g], set[int](), Counter[int]()
            for seq_id, held in self.world.held.items():
                table = self.world.table(g, seq_id)
                refs.update(table[table >= 0].tolist())
                if not self.world.states[g]:
                    start = group.live_start(held.room)
                    live.update(self.world.slots(g, seq_id, start, held.room).tolist())
            assert pool.refs.sum() == refs.total(), "references are not the tables' entries"
            only_cached = set(np.flatnonzero(pool.nodes >= 0).tolist()) - refs.keys()
            granules = {block // size.granule_blocks for block in only_cached | refs.keys()}
            assert len(granules) == pool.num_open_granules, "a block is lost"
            used += (
                len(refs) * group.num_layers * group.spec.state_bytes if self.world.states[g] else 0
            )
            used += len(live) * group.bytes_per_token
            cached += len(only_cached) * size.block_bytes
            committed += len(granules) * size.granule_blocks * size.block_bytes
            if self.world.windows is None or self.world.states[g]:
                reserved += size.num_ids * size.block_bytes
            else:
                slots = self.world.windows.num_slots(g) + self.world.windows.pool_slots(g)
                reserved += slots * group.bytes_per_token
        assert committed == self.world.store.committed_bytes <= self.world.ceiling
        usage = self.world.accounting.usage()
        assert usage == Usage(
            reserved_bytes=reserved,
            committed_bytes=committed,
            used_bytes=used,
            cached_bytes=cached,
            num_sequences=len(self.world.held),
            num_tokens=sum(held.room for held in self.world.held.values()),
        )
        assert reserved >= committed >= used + cached

    def check_hit(self, held: Held, hit: PrefixHit) -> None:
        limit = len(held.ids) - 1
        assert hit.limit == limit
        if not self.world.config.enable_prefix_caching:
            assert (hit.num_tokens, hit.shortfall) == (0, "strategy")
            return
        expected = self.world.hits(held, limit)
        assert hit.num_tokens in expected, f"{hit} should be {expected}"
        assert (hit.shortfall == "") == (hit.num_tokens == limit), f"{hit} is explained wrongly"

    def check_refusal(self, step: Step, too_long: bool, verdict: Any) -> None:
        alone = not too_long and self.world.fits_alone(step)
        if isinstance(verdict, Never):
            assert not alone, f"it fits an empty cache: {verdict}"
            assert verdict.capacity_bytes == self.world.capacity
            assert verdict.option == ("max_model_len" if too_long else "kv_cache_memory_bytes")
            assert too_long or verdict.need_bytes > self.world.capacity, f"no proof: {verdict}"
            assert verdict.fitting_tokens < step.end or too_long
            return
        assert isinstance(verdict, NotNow)
        assert alone, f"it will never fit: {verdict}"
        need, free = self.world.need([step]), self.world.free_bytes()
        assert (verdict.need_bytes, verdict.free_bytes) == (need, free)
        assert verdict.kept_bytes == step.kept_bytes
        assert need > free - step.kept_bytes
        holders = {
            seq_id
            for seq_id in self.world.held
            for g in range(len(self.world.groups))
            if (self.world.table(g, seq_id) >= 0).any()
        }
        assert set(verdict.holders) == holders
        can_wait = holders or step.kept_bytes or self.world.ceiling < self.world.capacity
        assert can_wait, f"no sequence can end, so it is never: {verdict}"

    def is_about_windows(self, verdict: Any) -> bool:
        windows = self.world.windows is not None and isinstance(verdict, NotNow)
        return windows and verdict.option != "kv_cache_memory_bytes"

    def check_window_refusal(self, step: Step, verdict: Any) -> None:
        """All windows are taken, or all mappings could be; and that can be waited out."""
        world, others = self.world, self.world.windowed - {step.seq_id}
        assert world.fits_alone(step), f"it will never fit: {verdict}"
        assert set(verdict.holders) == world.windowed
        if verdict.option == "max_num_seqs":
            assert world.lacks_window(step.seq_id), f"there is a window: {verdict}"
            return
        assert verdict.option == "vm.max_map_count"
        assert others, "alone it may try"
        limit, tokens = world.config.max_mappings, world.longest
        assert limit is not None
        # Every block by itself, what lies before and behind, and two that are counted in advance.
        each = (ceil_div(tokens, world.size) + 4) * len(world.groups) * world.num_stacks
        assert (len(others) + 1) * each > limit, f"there are mappings enough: {verdict}"

    def check_pages(self, step: Step, verdict: Any) -> None:
        """With several blocks a granule the sum is the least; what is taken over may need more."""
        assert not self.world.one_a_granule, f"there is room: {verdict}"
        assert step.hit, f"there is room: {verdict}"
        assert isinstance(verdict, NotNow)
        assert verdict.need_bytes > verdict.free_bytes - verdict.kept_bytes
        can_wait = verdict.holders or self.world.ceiling < self.world.capacity
        assert can_wait, f"no sequence can end, so it is never: {verdict}"

    def check_length(self, num_tokens: int) -> None:
        """Whether one sequence could ever become so long."""
        world, longest = self.world, self.world.longest_alone()
        verdict = world.accounting.could_hold(num_tokens)
        assert isinstance(verdict, Fits) == (num_tokens <= longest), f"{longest} fit: {verdict}"
        if isinstance(verdict, Never):
            assert verdict.fitting_tokens == longest
            assert verdict.capacity_bytes == world.capacity
            too_long = num_tokens > world.longest
            assert verdict.option == ("max_model_len" if too_long else "kv_cache_memory_bytes")
            assert too_long or verdict.need_bytes == world.peak(num_tokens) > world.capacity

    # -- which matters more ----------------------------------------------------------------------

    def note_importance(self) -> None:
        """Of each block that can be found: the least priority of those that have held it."""
        world = self.world
        for g, importance in enumerate(self._importance):
            unknown = world.pools[g].nodes < 0
            importance[unknown] = UNHELD
            for seq_id, held in world.held.items():
                table = world.table(g, seq_id)
                blocks = table[table >= 0]
                blocks = blocks[~unknown[blocks]]
                importance[blocks] = np.minimum(importance[blocks], held.priority)

    def cached_beside_held(self) -> list[list[int]]:
        """Cached blocks that are not held, in granules in which another block is held."""
        beside = []
        for g, size in enumerate(self.world.pools.sizes):
            pool = self.world.pools[g]
            held = np.flatnonzero(pool.refs) // size.granule_blocks
            cached = np.flatnonzero((pool.nodes >= 0) & (pool.refs == 0))
            beside.append(cached[np.isin(cached // size.granule_blocks, held)].tolist())
        return beside

    @contextmanager
    def evictions(self, hit: PrefixHit | None, *, by_pages: bool = False) -> Iterator[None]:
        """Nothing goes while something less important could; ``by_pages``: what lies in pages."""
        pools, before = self.world.pools, []
        for g, importance in enumerate(self._importance):
            pool = pools[g]
            if hit and (self.world.states[g] or hit.num_tokens % self.world.size):
                importance[np.isin(pool.nodes, hit.rows[-1:])] = UNKNOWN
            known = (importance > UNKNOWN) & (importance < UNHELD)
            cached = np.flatnonzero((pool.nodes >= 0) & (pool.refs == 0) & known)
            before.append((cached, pool.nodes[cached]))
        yield
        for g, (cached, nodes) in enumerate(before):
            if by_pages and not self.world.one_a_granule:
                continue
            gone, left = pools[g].nodes[cached] != nodes, pools[g].refs[cached] == 0
            least = self._importance[g][cached]
            first, last = least[gone].min(initial=UNHELD), least[left & ~gone].max(initial=UNKNOWN)
            assert first >= last, "a more important block went first"
            # What comes to lie there within the same verb, a snapshot, has no holder so far.
            self._importance[g][cached[gone]] = UNHELD
