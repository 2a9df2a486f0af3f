"""The cache in use, what the model knows of it, and the slow twins of its answers.

What is asked of ``quire`` here is which blocks lie in a table and who holds them; sums, hits and
verdicts are worked out again, block by block.

Blocks may be seen through windows (``virtual`` with sharing). Then ``accounting`` is what is asked,
and ``pool`` the blocks inside it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from conformance.sharing_model import Contents, Held, Prefixes, Step
from quire.kv import CacheConfig, Extension, Fits
from quire.kv.interface import Slots
from quire.kv.layout import stacking
from quire.kv.paged import PagedAccounting
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.spec import Group, RecurrentState
from quire.units import ceil_div

PLENTY = 2**22  # bytes: more than one sequence can take


class World:
    """One pool and the sequences in it."""

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        self.groups, self.config = groups, config
        self.states = [isinstance(group.spec, RecurrentState) for group in groups]
        self.longest, self.capacity = config.max_model_len, config.capacity_bytes
        self.ceiling = self.capacity
        self.windows = SharedVirtualAccounting(groups, config) if config.shares_pages else None
        self.accounting = self.windows or PagedAccounting(groups, config)
        self.size = self.accounting.tables.block_size
        self.pools, self.index = self.accounting.pools, self.accounting.index
        self.one_a_granule = all(size.granule_blocks == 1 for size in self.pools.sizes)
        self.store = Contents(self.accounting, self.capacity)
        self.prefixes = Prefixes()
        self.present: set[tuple[int, int]] = set()  # group and node, as the events tell
        self.held: dict[int, Held] = {}
        self.windowed: set[int] = set()  # sequences that have had a block
        seen = [g for g, state in enumerate(self.states) if not state]
        self.num_stacks = max(
            stacking(groups[g], config.page_bytes, config.layers_per_page).num_stacks for g in seen
        )
        self._seen = seen  # groups that windows show
        self._peaks, self._alone = [0], self.alone(PLENTY)
        self._longest: dict[int, int] = {}  # by capacity

    # -- sequences -------------------------------------------------------------------------------

    def used(self) -> bool:
        """Whether anything is held or cached; without, only a new sequence changes that."""
        return bool(self.held or self.present)

    def running(self) -> list[int]:
        return [seq_id for seq_id, held in self.held.items() if not held.pin]

    def pick(self, which: int) -> int:
        running = self.running()
        return running[which % len(running)]

    def say(self, held: Held, token: int) -> None:
        """A sequence's text goes on."""
        before = held.contents[-1] if held.contents else (held.keys.salt, held.keys.lora)
        held.contents.append(self.prefixes.content(before, token, held.keys, len(held.ids)))
        held.ids.append(token)
        if len(held.ids) % self.size == 0:
            extras, number = held.keys.of_blocks(self.size), len(held.nodes)
            extra = extras[number] if number < len(extras) else ()
            parent = held.nodes[-1] if held.nodes else held.root
            tokens = tuple(held.ids[-self.size :])
            held.nodes.append(self.prefixes.node(parent, tokens, extra))

    def tip(self, held: Held) -> int:
        whole = held.computed // self.size
        return held.nodes[whole - 1] if whole else held.root

    def table(self, g: int, seq_id: int) -> Slots:
        return self.accounting.block_ids(g, seq_id)

    def slots(self, g: int, seq_id: int, start: int, stop: int) -> Slots:
        """Where tokens lie, as the sequence sees it."""
        if self.windows is None or self.held[seq_id].pin:
            return self.accounting.block_slots(g, seq_id, start, stop)
        return self.store.seen(g, self.windows.slots(g, seq_id, start, stop))

    def note_window(self, seq_id: int) -> None:
        """With its first block a sequence has a window, to its end."""
        if self.windows and any(len(self.table(g, seq_id)) for g in self._seen):
            self.windowed.add(seq_id)

    def lacks_window(self, seq_id: int) -> bool:
        taken = len(self.windowed) == self.config.max_num_seqs
        return self.windows is not None and taken and seq_id not in self.windowed

    def free(self, seq_id: int) -> None:
        """A sequence ends. A pin has no window, and is taken out of the pool."""
        self.windowed.discard(seq_id)
        del self.held[seq_id]
        self.accounting.free(seq_id)

    # -- the slow twins --------------------------------------------------------------------------

    def held_blocks(self, g: int) -> set[int]:
        return set(np.flatnonzero(self.pools[g].refs).tolist())

    def held_bytes(self) -> int:
        total = 0
        for g, size in enumerate(self.pools.sizes):
            granules = {block // size.granule_blocks for block in self.held_blocks(g)}
            total += len(granules) * size.granule_blocks * size.block_bytes
        return total

    def free_bytes(self) -> int:
        return self.ceiling - self.held_bytes()

    def need(self, steps: Sequence[Step], more: Sequence[int] | None = None) -> int:
        """Bytes by which what is held would rise, if these steps were made together."""
        total = -self.held_bytes()
        for g, size in enumerate(self.pools.sizes):
            refs, held = self.pools[g].refs, self.held_blocks(g)
            losses: Counter[int] = Counter()
            writers: Counter[int] = Counter()
            new, gained = more[g] if more else 0, set[int]()
            for step in steps:
                table, first, written, last = self.columns(g, step)
                if step.hit:
                    gained |= {block for block in table if block >= 0}
                losses.update(block for block in table[:first] if block >= 0)
                writers.update(table[written:last])
                new += max(0, last - max(len(table), first))
            for block, count in writers.items():
                if refs[block] > 1:
                    # Where all holders write it or pass it, the last one writes in place.
                    copies = count - (count + losses[block] == refs[block])
                    losses[block] += copies
                    new += copies
            held = (held - {block for block, n in losses.items() if n == refs[block]}) | gained
            granules = len({block // size.granule_blocks for block in held})
            gaps = granules * size.granule_blocks - len(held)
            granules += ceil_div(max(0, new - gaps), size.granule_blocks)
            total += granules * size.granule_blocks * size.block_bytes
        return total

    def columns(self, g: int, step: Step) -> tuple[list[int], int, int, int]:
        """A table as the step finds it; the columns that it reads and writes from, and its end."""
        group, size = self.groups[g], self.size
        spec, first = group.spec, group.live_start(step.begin) // size
        table = self.table(g, step.seq_id).tolist()
        if isinstance(spec, RecurrentState):
            return table, 0, 0, 1 + spec.num_speculative_blocks
        if step.hit:
            whole = step.hit.num_tokens // size
            found = self.index.blocks[g][step.hit.rows[:whole]].tolist()
            table = [-1] * min(first, whole) + found[first:]
        return table, first, step.begin // size, ceil_div(step.end, size)

    def hits(self, held: Held, limit: int, *, whole: bool = False) -> set[int]:
        """How long a hit may be; more than one, if several children begin alike."""
        nodes, size = self.prefixes.nodes, self.size
        alive: set[int] = set()
        tips = [self.tip(other) for other in self.held.values()]
        for number in [node for _, node in self.present] + tips:
            up: int | None = number
            while up is not None and up not in alive:
                alive.add(up)
                up = nodes[up].parent
        path: list[int] = []
        for node in held.nodes:
            if node not in alive:
                break
            path.append(node)
        known, children = len(path) * size, [(0, -1)]
        rest, extras = held.ids[known : known + size], held.keys.of_blocks(size)
        if rest and known < limit and not whole and not any(extras[len(path) : len(path) + 1]):
            tip = path[-1] if path else held.root
            for child in alive:
                if nodes[child].parent == tip and not nodes[child].extra:
                    pairs = list(zip(nodes[child].tokens, rest, strict=False))
                    common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                    children.append((common, child))
        most = max(children)[0]
        lengths = set()
        for _, child in (each for each in children if each[0] == most):
            column = [*path, child]
            options = [min(known + most, limit), *range(0, min(known, limit) + 1, size)]
            lengths.add(max(n for n in options if n == 0 or self.serves(column, n)))
        return lengths

    def serves(self, column: list[int], num_tokens: int) -> bool:
        """Whether every group has what a sequence reads that goes on after so many tokens."""
        for g, group in enumerate(self.groups):
            if self.states[g] and num_tokens % self.size:
                return False
            first = group.live_start(num_tokens)
            end = ceil_div(num_tokens, self.size) if first < num_tokens else 0
            blocks = range(first // self.size, end)
            if any((g, column[i]) not in self.present for i in blocks):
                return False
        return True

    def alone(self, capacity_bytes: int) -> PagedAccounting:
        """An empty cache with one sequence, 0."""
        config = replace(
            self.config,
            capacity_bytes=capacity_bytes,
            max_capacity_bytes=None,
            block_size=self.size,
        )
        fresh = PagedAccounting(self.groups, config, whole_pages=self.windows is not None)
        fresh.add(0)
        return fresh

    def fits_alone(self, step: Step) -> bool:
        """Whether a sequence could make this step if all others ended, or it began again too."""
        verdict = self.alone(self.capacity).try_extend(
            0, step.end, Extension(external_tokens=step.begin)
        )
        if not isinstance(verdict, Fits):
            return False
        held = self.held.get(step.seq_id)
        if held is None or self.peak(held.room) <= self.capacity:
            return True
        return self.bytes_in_place(step) <= self.capacity

    def bytes_in_place(self, step: Step) -> int:
        """What a sequence holds by itself after a step, with its blocks where they are now."""
        total = 0
        for g, size in enumerate(self.pools.sizes):
            table, first, _, last = self.columns(g, step)
            granules = {block // size.granule_blocks for block in table[first:]}
            fewest = ceil_div(max(last, len(table)) - first, size.granule_blocks)
            total += max(len(granules), fewest) * size.granule_blocks * size.block_bytes
        return total

    def longest_alone(self) -> int:
        """How far a sequence can go in an empty cache, token by token."""
        if self.capacity not in self._longest:
            cache, lengths = self.alone(self.capacity), range(1, self.longest + 1)
            steps = takewhile(lambda n: isinstance(cache.try_extend(0, n), Fits), lengths)
            self._longest[self.capacity] = sum(1 for _ in steps)
        return self._longest[self.capacity]

    def promise(self, step: Step) -> int:
        """Bytes that a sequence will need after a step to go on to what it was promised."""
        if step.promised <= step.end or step.end > self.longest:
            return 0
        end = min(step.end + step.drafts, self.longest)
        plenty = self.alone(PLENTY)
        assert isinstance(plenty.try_extend(0, end, Extension(external_tokens=step.begin)), Fits)
        peak = self.peak(min(step.promised, self.longest))
        return max(0, peak - _committed(plenty))

    def peak(self, num_tokens: int) -> int:
        """The most bytes that one sequence holds on the way to a length, token by token."""
        while len(self._peaks) <= num_tokens:
            assert isinstance(self._alone.try_extend(0, len(self._peaks)), Fits)
            self._peaks.append(max(self._peaks[-1], _committed(self._alone)))
        return self._peaks[num_tokens]

    def snapshot(self) -> Any:
        """All that a refusal must not change."""
        blocks = self.accounting
        tables = [
            [self.table(g, seq_id).tolist() for g in range(len(self.groups))]
            for seq_id in self.held
        ]
        pools = [
            (
                [each.tolist() for each in pool.evictable.order()],  # what would go next
                pool.refs.tolist(),
                pool.nodes.tolist(),
            )
            for pool in (self.pools[g] for g in range(len(self.groups)))
        ]
        counts = len(self.index), len(self.index.events), len(self.pools.changes)
        rooms = [self.accounting.num_tokens(seq_id) for seq_id in self.held]
        computed = blocks.tables.num_computed.tolist()
        return self.pools.committed_bytes, tables, pools, counts, rooms, computed


def _committed(cache: PagedAccounting) -> int:
    return cache.pools.committed_bytes
