"""What is demanded of the cache: after every step, of a hit, of a refusal, of an eviction."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from conformance.sharing_model import Held, Step
from conformance.sharing_world import World
from quire.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored
from quire.strategies import Fits, Never, NotNow, PrefixHit, Usage

NOBODY = 1000  # has held a block
UNKNOWN = -1000  # it was read in part: whether that counts depends on the room there was


class Checks:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Of each block that can be found, the smallest priority of those that have held it.
        self._importance = [np.full(size.num_ids, NOBODY) for size in world.pools.sizes]

    def check(self) -> None:
        self.world.accounting.check()
        self.check_events()
        self.check_usage()
        for seq_id, held in self.world.held.items():
            self.check_contents(seq_id, held)

    def check_contents(self, seq_id: int, held: Held) -> None:
        """What the last step read, and what a later one can read, is what the sequence wrote."""
        assert self.world.accounting.num_tokens(seq_id) == held.room
        for g, group in enumerate(self.world.groups):
            table = self.world.accounting.table(g, seq_id)
            if self.world.states[g]:
                start, slots = max(0, held.room - 1), table[: min(held.room, 1)]
            else:
                start = group.live_start(held.base)
                slots = self.world.accounting.slots(g, seq_id, start, held.room)
            self.world.store.read(
                g, table, slots, start, np.array(held.contents[start : held.room])
            )

    def check_events(self) -> None:
        """From the events alone it is known which blocks can be found."""
        nodes = self.world.prefixes.nodes
        for event in self.world.index.events:
            if isinstance(event, AllBlocksCleared):
                self.world.present.clear()
                continue
            number = self.world.prefixes.by_digest[event.block_hash]
            place = event.group_idx, number
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
                table = self.world.accounting.table(g, seq_id)
                refs.update(table[table >= 0].tolist())
                if not self.world.states[g]:
                    start = group.live_start(held.room)
                    live.update(self.world.accounting.slots(g, seq_id, start, held.room).tolist())
            assert pool.refs.sum() == refs.total(), "references are not the tables' entries"
            only_cached = set(np.flatnonzero(pool.nodes >= 0).tolist()) - refs.keys()
            granules = {block // size.granule_blocks for block in only_cached | refs.keys()}
            assert len(granules) == pool.num_open_granules, "a block is lost"
            used += len(refs) * size.block_bytes if self.world.states[g] else 0
            used += len(live) * group.bytes_per_token
            cached += len(only_cached) * size.block_bytes
            committed += len(granules) * size.granule_blocks * size.block_bytes
            reserved += size.num_ids * size.block_bytes
        assert committed == self.world.store.committed_bytes <= self.world.capacity
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
            if (self.world.accounting.table(g, seq_id) >= 0).any()
        }
        assert set(verdict.holders) == holders
        assert holders or step.kept_bytes, f"nobody can end, so it is never: {verdict}"

    def check_pages(self, step: Step, verdict: Any) -> None:
        """With several blocks a granule the sum is the least; what is taken over may need more."""
        assert not self.world.one_a_granule, f"there is room: {verdict}"
        assert step.hit, f"there is room: {verdict}"
        assert isinstance(verdict, NotNow)
        assert verdict.need_bytes > verdict.free_bytes - verdict.kept_bytes
        assert verdict.holders, f"nobody can end, so it is never: {verdict}"

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

    # -- who matters more ------------------------------------------------------------------------

    def note_importance(self) -> None:
        """Who holds which block that can be found."""
        world = self.world
        for g, importance in enumerate(self._importance):
            unknown = world.pools[g].nodes < 0
            importance[unknown] = NOBODY
            for seq_id, held in world.held.items():
                table = world.accounting.table(g, seq_id)
                blocks = table[table >= 0]
                blocks = blocks[~unknown[blocks]]
                importance[blocks] = np.minimum(importance[blocks], held.priority)

    @contextmanager
    def evictions(self, hit: PrefixHit | None) -> Iterator[None]:
        """Nothing goes while something less important could."""
        pools, before = self.world.pools, []
        for g, importance in enumerate(self._importance):
            pool = pools[g]
            if hit:
                importance[np.isin(pool.nodes, hit.rows[-1:]) & (pool.refs == 0)] = UNKNOWN
            known = (importance > UNKNOWN) & (importance < NOBODY)
            cached = np.flatnonzero((pool.nodes >= 0) & (pool.refs == 0) & known)
            before.append((cached, pool.nodes[cached]))
        yield
        for g, (cached, nodes) in enumerate(before):
            gone, left = pools[g].nodes[cached] != nodes, pools[g].refs[cached] == 0
            least = self._importance[g][cached]
            first, last = least[gone].min(initial=NOBODY), least[left & ~gone].max(initial=UNKNOWN)
            assert first >= last, "a more important block went first"
