"""Page in software: blocks of a pool, found through a block table, shared by reference count.

A fork shares every block; the first write into a shared one copies it (copy-on-write). What a
window has passed is given back while the sequence runs. External fragmentation does not exist,
internal is less than one block a sequence and group.
"""

from dataclasses import dataclass

import numpy as np

from quire.blocks import BlockPool
from quire.spec import Group
from quire.strategies.base import (
    FITS,
    CacheConfig,
    Change,
    Commit,
    Copy,
    NotNow,
    Release,
    Slots,
    Usage,
    Verdict,
)
from quire.strategies.layout import check_trim, granule_blocks
from quire.units import align_down, align_up, ceil_div

_PASSED = -1  # in a table: the window has passed this block


@dataclass(slots=True)
class _Held:
    num_tokens: int
    tables: list[list[int]]  # a group: block ids


class PagedAccounting:
    """One pool of blocks for each group, all drawing on one ceiling of bytes."""

    shares_blocks = True

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        self.groups = groups
        self._config = config
        self._block_bytes = [group.bytes_per_token * config.block_size for group in groups]
        self._pools = [
            self._pool(group, size) for group, size in zip(groups, self._block_bytes, strict=True)
        ]
        self._held: dict[int, _Held] = {}
        self._changes: list[Change] = []

    def num_slots(self, group: int) -> int:
        return self._pools[group].num_blocks * self._config.block_size

    def block_size(self, group: int) -> int:
        return self._config.block_size

    def add(self, seq_id: int, *, max_tokens: int | None = None) -> None:
        if seq_id in self._held:
            raise KeyError(f"sequence {seq_id} is already here")
        self._held[seq_id] = _Held(num_tokens=0, tables=[[] for _ in self.groups])

    def try_extend(self, seq_id: int, num_tokens: int) -> Verdict:
        held = self._held[seq_id]
        if num_tokens <= held.num_tokens:
            return FITS
        if num_tokens > self._config.max_model_len:
            return self._config.never(num_tokens, self._fresh_bytes)
        passed = [self._passed(group, held) for group in range(len(self.groups))]
        need = [self._need_blocks(group, held, num_tokens) for group in range(len(self.groups))]
        refusal = self._refusal(held, need, passed, num_tokens)
        if refusal is not None:
            return refusal
        for group, blocks in enumerate(passed):
            for index in blocks:
                self._release(group, held.tables[group][index])
                held.tables[group][index] = _PASSED
        for group in range(len(self.groups)):
            self._own_last_block(group, held)
            missing = ceil_div(num_tokens, self._config.block_size) - len(held.tables[group])
            held.tables[group] += self._allocate(group, missing)
        held.num_tokens = num_tokens
        return FITS

    def fork(self, seq_id: int, new_id: int) -> Verdict:
        source = self._held[seq_id]
        self.add(new_id)
        self._held[new_id] = _Held(
            num_tokens=source.num_tokens, tables=[table.copy() for table in source.tables]
        )
        for pool, table in zip(self._pools, source.tables, strict=True):
            for block in table:
                if block != _PASSED:
                    pool.share(block)
        return FITS

    def trim(self, seq_id: int, num_tokens: int) -> None:
        held = self._held[seq_id]
        num_tokens = min(held.num_tokens, num_tokens)
        for group, table in enumerate(held.tables):
            passed = table.count(_PASSED) * self._config.block_size
            check_trim(self.groups[group], passed, num_tokens)
        held.num_tokens = num_tokens
        keep = ceil_div(num_tokens, self._config.block_size)
        for group, table in enumerate(held.tables):
            while len(table) > keep:
                self._release(group, table.pop())

    def free(self, seq_id: int) -> None:
        held = self._held.pop(seq_id)
        for group, table in enumerate(held.tables):
            for block in reversed(table):
                self._release(group, block)

    def num_tokens(self, seq_id: int) -> int:
        return self._held[seq_id].num_tokens

    def table(self, group: int, seq_id: int) -> Slots:
        return np.array(self._held[seq_id].tables[group], np.int64)

    def slots(self, group: int, seq_id: int, start: int, stop: int) -> Slots:
        positions = np.arange(start, stop)
        blocks = self.table(group, seq_id)[positions // self._config.block_size]
        assert (blocks != _PASSED).all(), f"sequence {seq_id}: a window has passed token {start}"
        return blocks * self._config.block_size + positions % self._config.block_size

    def drain(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def usage(self) -> Usage:
        return Usage(
            reserved_bytes=sum(
                pool.num_blocks * size
                for pool, size in zip(self._pools, self._block_bytes, strict=True)
            ),
            committed_bytes=self._committed_bytes(),
            used_bytes=sum(self._used_bytes(group) for group in range(len(self.groups))),
            num_sequences=len(self._held),
            num_tokens=sum(held.num_tokens for held in self._held.values()),
        )

    def check(self) -> None:
        for group, pool in enumerate(self._pools):
            pool.check()
            refs = np.zeros_like(pool.refs)
            for held in self._held.values():
                table = held.tables[group]
                assert len(table) == ceil_div(held.num_tokens, self._config.block_size)
                passed = table.count(_PASSED)
                assert all(block == _PASSED for block in table[:passed]), "a hole inside a window"
                np.add.at(refs, table[passed:], 1)
            assert (refs == pool.refs).all(), "reference counts differ from the block tables"
        assert self._committed_bytes() <= self._config.capacity_bytes, "above the ceiling"

    def _pool(self, group: Group, block_bytes: int) -> BlockPool:
        granule = granule_blocks(group, self._config.block_size, self._config.page_bytes)
        # Any group may come to hold the whole capacity, but no more than all sequences can need.
        most = self._config.max_num_seqs * ceil_div(
            self._config.max_model_len, self._config.block_size
        )
        num_blocks = min(
            align_down(self._config.capacity_bytes // block_bytes, granule),
            # … with a block each to spare, for copy-on-write.
            align_up(most + self._config.max_num_seqs, granule),
        )
        return BlockPool(max(num_blocks, granule), granule_blocks=granule)

    def _passed(self, group: int, held: _Held) -> range:
        """Indices of the blocks that the *first* new token's window has left behind.

        So a step never frees what its own tokens read, and undoing the step never misses a token.
        """
        table = held.tables[group]
        live = self.groups[group].live_range(held.num_tokens)
        return range(table.count(_PASSED), min(live.start // self._config.block_size, len(table)))

    def _need_blocks(self, group: int, held: _Held, num_tokens: int) -> int:
        need = ceil_div(num_tokens, self._config.block_size) - len(held.tables[group])
        return need + self._writes_shared_block(group, held)

    def _writes_shared_block(self, group: int, held: _Held) -> bool:
        """Whether the next token goes into a block that somebody else holds too."""
        if held.num_tokens % self._config.block_size == 0:
            return False
        return bool(self._pools[group].refs[held.tables[group][-1]] > 1)

    def _own_last_block(self, group: int, held: _Held) -> None:
        """Copy-on-write: a private copy of the block that the next token is written to."""
        if not self._writes_shared_block(group, held):
            return
        table, size = held.tables[group], self._config.block_size
        (copy,) = self._allocate(group, 1)
        filled = held.num_tokens % size
        self._changes.append(Copy(group, table[-1] * size, copy * size, filled))
        self._release(group, table[-1])
        table[-1] = copy

    def _refusal(
        self, held: _Held, need: list[int], passed: list[range], num_tokens: int
    ) -> Verdict | None:
        """Why the blocks cannot be had, or None. Blocks that the window passes count as free."""
        rise_bytes = 0
        fits = True
        for group, (pool, indices) in enumerate(zip(self._pools, passed, strict=True)):
            given_back = [held.tables[group][index] for index in indices]
            rise = pool.granule_change(given_back, need[group])
            fits = fits and rise is not None
            rise_bytes += (rise or 0) * self._granule_bytes(group)
        if fits and self._committed_bytes() + rise_bytes <= self._config.capacity_bytes:
            return None
        if self._fresh_bytes(num_tokens, held.num_tokens) > self._config.capacity_bytes:
            return self._config.never(num_tokens, self._fresh_bytes)
        return NotNow(
            need_bytes=sum(n * size for n, size in zip(need, self._block_bytes, strict=True)),
            free_bytes=self._config.capacity_bytes - self._committed_bytes(),
            holders=tuple(i for i, other in self._held.items() if other.num_tokens),
        )

    def _fresh_bytes(self, num_tokens: int, computed_tokens: int = 0) -> int:
        """What a sequence commits in an empty cache when a step begins at ``computed_tokens``."""
        size, total = self._config.block_size, 0
        for index, (group, pool) in enumerate(zip(self.groups, self._pools, strict=True)):
            blocks = ceil_div(num_tokens, size) - group.live_range(computed_tokens).start // size
            total += ceil_div(blocks, pool.granule_blocks) * self._granule_bytes(index)
        return total

    def _allocate(self, group: int, num_blocks: int) -> list[int]:
        pool = self._pools[group]
        blocks, opened = pool.allocate(num_blocks)
        slots = pool.granule_blocks * self._config.block_size
        self._changes.extend(Commit(group, g * slots, (g + 1) * slots) for g in opened)
        return blocks

    def _release(self, group: int, block: int) -> None:
        if block == _PASSED:
            return
        closed = self._pools[group].release(block)
        if closed is not None:
            slots = self._pools[group].granule_blocks * self._config.block_size
            self._changes.append(Release(group, closed * slots, (closed + 1) * slots))

    def _granule_bytes(self, group: int) -> int:
        return self._pools[group].granule_blocks * self._block_bytes[group]

    def _committed_bytes(self) -> int:
        return sum(pool.num_granules * self._granule_bytes(g) for g, pool in enumerate(self._pools))

    def _used_bytes(self, group: int) -> int:
        """Bytes that some holder can still read, each token counted once."""
        size = self._config.block_size
        pool = self._pools[group]
        shared: dict[int, int] = {}  # block → a bit for each token of it that can be read
        tokens = 0
        for held in self._held.values():
            live = self.groups[group].live_range(held.num_tokens)
            tokens += len(live)
            if not pool.num_shared:
                continue
            table = held.tables[group]
            for index in range(live.start // size, len(table)):
                block = table[index]
                if pool.refs[block] > 1:
                    first = max(live.start - index * size, 0)
                    stop = min(live.stop - index * size, size)
                    tokens -= stop - first
                    shared[block] = shared.get(block, 0) | (1 << stop) - (1 << first)
        tokens += sum(readable.bit_count() for readable in shared.values())
        return tokens * self.groups[group].bytes_per_token
