"""A cache used as an engine uses it, and watched: what lies in every slot is followed.

What a token's entry contains depends on all tokens before it and on the prefix keys, so a block
that is shared, kept or copied wrongly is read wrongly by a sequence. Blocks of all groups have the
same size in bytes unless a test says otherwise, so that capacities can be counted in blocks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quire.kv import (
    EVICTION_POLICIES,
    FITS,
    NO_KEYS,
    BlockCoordinator,
    Commit,
    Copy,
    Fits,
    NotNow,
    PolicyPool,
    PoolSize,
    PrefixHit,
    PrefixKeys,
    Release,
    StorageOp,
)
from quire.kv.eviction import MakePolicy
from quire.spec import (
    ChunkedAttention,
    FullAttention,
    Group,
    LatentAttention,
    LayerSpec,
    RecurrentState,
    SlidingWindow,
)
from quire.spec.layer_specs import StateTensor

SIZE = 4  # tokens a block
BLOCK_BYTES = 8

_KV: dict[str, Any] = dict(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn")
FULL = FullAttention(**_KV)
LATENT = LatentAttention(latent_dim=1, rope_dim=1, dtype="float8_e4m3fn")
STATE = RecurrentState(states=(StateTensor(name="state", shape=(BLOCK_BYTES,), dtype="int8"),))


def policy_pool(num_blocks: int) -> PolicyPool:
    """Make what a policy is made for, of blocks that are all the first of a prompt."""
    return PolicyPool(
        num_blocks=num_blocks,
        prints_of=lambda blocks: blocks.astype(np.uint32),
        places_of=lambda blocks: ([0] * len(blocks), blocks.tolist(), [-1] * len(blocks)),
    )


def sliding(window: int) -> SlidingWindow:
    return SlidingWindow(window=window, **_KV)


def chunked(chunk: int) -> ChunkedAttention:
    return ChunkedAttention(chunk=chunk, **_KV)


def ids(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def span(start: int, stop: int) -> list[int]:
    """Token ids that differ from all others."""
    return list(range(start, stop))


def content(keys: PrefixKeys, tokens: Sequence[int]) -> int:
    """What the entry of the last of these tokens contains."""
    images = tuple(image for image in keys.images if image.start < len(tokens))
    return hash((keys.salt, keys.lora, images, tuple(tokens)))


BROUGHT = -2


class Cache:
    """A coordinator with one group for each spec, ``num_blocks`` of capacity, and sequences."""

    def __init__(
        self,
        *specs: LayerSpec,
        num_blocks: int,
        granule_blocks: int = 1,
        spare_blocks: int = 0,
        caching: bool = True,
        keep_events: bool = False,
        retention_share: float = 0.0,
        make_policy: MakePolicy = EVICTION_POLICIES["lru"],
    ) -> None:
        groups = tuple(Group(spec=spec, layers=(i,)) for i, spec in enumerate(specs))
        self.capacity_bytes = num_blocks * BLOCK_BYTES
        sizes = [self._size(group, granule_blocks, spare_blocks) for group in groups]
        self.blocks = BlockCoordinator(
            groups,
            sizes,
            block_size=SIZE,
            capacity_bytes=self.capacity_bytes,
            make_policy=make_policy,
            caching=caching,
            keep_events=keep_events,
            retention_share=retention_share,
        )
        self.groups, self.sizes = groups, sizes
        self.tokens: dict[int, list[int]] = {}
        self.keys: dict[int, PrefixKeys] = {}
        self.changes: list[StorageOp] = []  # of the last step
        self.held_bytes_before_report = 0  # in the last step, when all room was taken
        self._slots: list[dict[int, int]] = [{} for _ in specs]  # slot → content
        self._pages: list[set[int]] = [set() for _ in specs]  # committed slots

    def _size(self, group: Group, granule: int, spare_blocks: int) -> PoolSize:
        state = isinstance(group.spec, RecurrentState)
        block_bytes, granule = group.block_bytes(SIZE), 1 if state else granule
        return PoolSize(
            block_bytes=block_bytes,
            num_blocks=max(self.capacity_bytes // block_bytes // granule, 1) * granule,
            spare_blocks=spare_blocks,
            granule_blocks=granule,
            slots=1 if state else SIZE,
            forgets=not isinstance(group.spec, FullAttention | LatentAttention),
        )

    # -- what an engine does ---------------------------------------------------------------------

    def start(
        self,
        seq_id: int,
        tokens: Sequence[int],
        *,
        keys: PrefixKeys = NO_KEYS,
        read: bool = True,
        priority: int = 0,
    ) -> int:
        """A prompt that must fit: announce, match, extend, compute. Returns: tokens of the hit."""
        self.add(seq_id, keys, priority=priority)
        hit = self.blocks.match_prefix(seq_id, ids(tokens)) if read else None
        assert self.extend(seq_id, tokens, hit=hit) is FITS
        return hit.num_tokens if hit else 0

    def add(self, seq_id: int, keys: PrefixKeys = NO_KEYS, *, priority: int = 0) -> None:
        self.blocks.add(seq_id, keys=keys, priority=priority)
        self.tokens[seq_id], self.keys[seq_id] = [], keys

    def lookup(self, tokens: Sequence[int], keys: PrefixKeys = NO_KEYS) -> PrefixHit:
        """What a prompt would find now."""
        self.blocks.add(-1, keys=keys)
        hit = self.blocks.match_prefix(-1, ids(tokens))
        self.blocks.free(-1)
        return hit

    def extend(
        self,
        seq_id: int,
        tokens: Sequence[int],
        *,
        hit: PrefixHit | None = None,
        external_tokens: int = 0,
        lookahead_tokens: int = 0,
        kept_bytes: int = 0,
    ) -> Fits | NotNow:
        """Room for more tokens, and if there is, compute them."""
        before = self.tokens[seq_id]
        known = [*before, *tokens]
        state = self.state()
        verdict = self.blocks.allocate(
            seq_id,
            len(known),
            hit=hit,
            external_tokens=external_tokens,
            lookahead_tokens=lookahead_tokens,
            kept_bytes=kept_bytes,
        )
        if verdict is FITS:
            begin = hit.num_tokens if hit else len(before)
            self._compute([seq_id], [known], begin, external_tokens)
        else:
            assert self.state() == state, "a refusal has changed something"
        self.blocks.check()
        return verdict

    def extend_each(self, tokens: dict[int, Sequence[int]]) -> int:
        known = {seq_id: [*self.tokens[seq_id], *more] for seq_id, more in tokens.items()}
        lengths = [len(each) for each in known.values()]
        count = self.blocks.try_extend_each(list(known), lengths)
        self._compute(list(known)[:count], list(known.values())[:count])
        self.blocks.check()
        return count

    def fork(self, seq_id: int, new_id: int) -> None:
        self.blocks.fork(seq_id, new_id)
        self.tokens[new_id], self.keys[new_id] = self.tokens[seq_id].copy(), self.keys[seq_id]
        self.blocks.check()

    def keep_state(self, seq_id: int) -> bool:
        kept = self.blocks.keep_state(seq_id)
        self.end_step()
        self.blocks.check()
        return kept

    def bring(self, tokens: Sequence[int], keys: PrefixKeys = NO_KEYS) -> bool:
        """Fill what is lacking of a prefix from outside, if there is something, and room."""
        state = self.state()
        reserved = self.blocks.reserve_blocks(BROUGHT, ids(tokens), keys)
        if not reserved:
            assert self.state() == state, "a refusal has changed something"
            return False
        self.end_step()
        for number, (column, blocks) in enumerate(reserved):
            slots = self._slots[number]
            is_state = isinstance(self.groups[number].spec, RecurrentState)
            for at, block in enumerate(blocks.tolist(), column):
                for offset in range(1 if is_state else SIZE):
                    stop = len(tokens) if is_state else at * SIZE + offset + 1
                    slot = block if is_state else block * SIZE + offset
                    assert slot in self._pages[number], "a block that is brought has no page"
                    slots[slot] = content(keys, tokens[:stop])
        self.blocks.insert_blocks(BROUGHT, ids(tokens))
        self.blocks.check()
        return True

    def trim(self, seq_id: int, num_tokens: int) -> None:
        self.blocks.trim(seq_id, num_tokens)
        self.tokens[seq_id] = self.tokens[seq_id][:num_tokens]
        self.blocks.check()

    def free(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.blocks.free(seq_id)
            self.tokens.pop(seq_id, None)
        self.blocks.check()

    def end_step(self) -> None:
        """Carry out what has been noted."""
        self.changes, self.blocks.pools.changes = self.blocks.pools.changes, []
        self._apply(self.changes)

    # -- what can be seen ------------------------------------------------------------------------

    def table(self, seq_id: int, group: int = 0) -> list[int]:
        row = self.blocks.tables.rows[seq_id]
        end = int(self.blocks.tables.ends[group, row])
        return [int(block) for block in self.blocks.tables.ids[group][row, :end]]

    def held(self, seq_id: int, group: int = 0) -> list[int]:
        return [block for block in self.table(seq_id, group) if block >= 0]

    def refs(self, seq_id: int, group: int = 0) -> list[int]:
        """How many hold each of a sequence's blocks."""
        return [int(self.blocks.pools[group].refs[block]) for block in self.held(seq_id, group)]

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold, in all groups, if all are of one size."""
        return self.blocks.pools.held_bytes // BLOCK_BYTES

    @property
    def num_cached(self) -> int:
        return self.blocks.pools.cached_bytes // BLOCK_BYTES

    def state(self) -> tuple[Any, ...]:
        """All that a refusal must leave as it was."""
        pools, tables = self.blocks.pools, self.blocks.tables
        groups = range(len(self.groups))
        return (
            pools.committed_bytes,
            pools.held_bytes,
            pools.cached_bytes,
            pools.ceiling.capacity_bytes,
            tuple(pools.changes),
            tuple(tuple(pools[group].refs.tolist()) for group in groups),
            tuple(tuple(pools[group].nodes.tolist()) for group in groups),
            tuple((seq, tuple(map(tuple, self._tables(seq)))) for seq in tables.rows),
            tuple(tables.num_tokens.tolist()),
            tuple(tables.num_computed.tolist()),
            len(self.blocks.index),
            tuple(self.blocks.index.events),
        )

    def _tables(self, seq_id: int) -> list[list[int]]:
        return [self.table(seq_id, group) for group in range(len(self.groups))]

    # -- contents --------------------------------------------------------------------------------

    def _compute(
        self,
        seq_ids: Sequence[int],
        known: Sequence[Sequence[int]],
        begin: int | None = None,
        external_tokens: int = 0,
    ) -> None:
        """A forward pass: carry the changes out, read what must be readable, write, report.

        What comes from outside is written like what is computed, but in a window only as far back
        as the first computed token reads.
        """
        self.end_step()
        begins = [len(self.tokens[s]) if begin is None else begin for s in seq_ids]
        for seq_id, tokens, first in zip(seq_ids, known, begins, strict=True):
            for number, group in enumerate(self.groups):
                if not (external_tokens and isinstance(group.spec, RecurrentState)):
                    self._read(number, group, seq_id, tokens, first)
        for seq_id, tokens, first in zip(seq_ids, known, begins, strict=True):
            for number, group in enumerate(self.groups):
                brought = group.live_start(first + external_tokens) if external_tokens else first
                self._write(number, seq_id, tokens, max(first, brought))
            self.tokens[seq_id] = list(tokens)
        self.held_bytes_before_report = self.blocks.pools.held_bytes
        counts = [len(each) - first for each, first in zip(known, begins, strict=True)]
        packed = [t for each, first in zip(known, begins, strict=True) for t in each[first:]]
        self.blocks.mark_computed(seq_ids, counts, ids(packed))

    def _read(
        self, number: int, group: Group, seq_id: int, tokens: Sequence[int], begin: int
    ) -> None:
        """What the first new token reads is there. What is brought from outside is not read."""
        keys, slots, table = self.keys[seq_id], self._slots[number], self.table(seq_id, number)
        if isinstance(group.spec, RecurrentState):
            if begin:
                found = slots.get(table[0])
                assert found == content(keys, tokens[:begin]), "the state is another's"
            return
        for token in range(group.live_start(begin), begin):
            block = table[token // SIZE]
            if block < 0:
                continue  # only after external tokens: the window ends behind them
            found = slots.get(block * SIZE + token % SIZE)
            assert found == content(keys, tokens[: token + 1]), f"token {token} is another's"

    def _write(self, number: int, seq_id: int, tokens: Sequence[int], begin: int) -> None:
        keys, slots, table = self.keys[seq_id], self._slots[number], self.table(seq_id, number)
        if isinstance(self.groups[number].spec, RecurrentState):
            slots[table[0]] = content(keys, tokens)
            assert table[0] in self._pages[number]
            return
        for token in range(begin, len(tokens)):
            if table[token // SIZE] >= 0:
                slot = table[token // SIZE] * SIZE + token % SIZE
                assert slot in self._pages[number], "a token has no page"
                slots[slot] = content(keys, tokens[: token + 1])

    def _apply(self, changes: Iterable[StorageOp]) -> None:
        for change in changes:
            slots, pages = self._slots[change.group], self._pages[change.group]
            if isinstance(change, Copy):
                reach = range(change.num_slots)
                assert pages.issuperset(change.source + i for i in reach), "a copy of no page"
                assert pages.issuperset(change.target + i for i in reach), "a copy to no page"
                entries = [slots.get(change.source + i) for i in reach]
                for i, entry in enumerate(entries):
                    slots.pop(change.target + i, None)
                    if entry is not None:  # nothing was written where no window could read it
                        slots[change.target + i] = entry
                continue
            touched = range(change.start, change.stop)
            if isinstance(change, Commit):
                assert pages.isdisjoint(touched), f"{change} commits twice"
                pages.update(touched)
            else:
                assert isinstance(change, Release)
                assert pages.issuperset(touched), f"{change} releases what is not committed"
                pages.difference_update(touched)
                for slot in touched:
                    slots.pop(slot, None)
