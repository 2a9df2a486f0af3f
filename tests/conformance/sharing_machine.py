"""Random sharing of blocks: sequences begin alike, fork, go back, are pinned, and end.

The blocks are those of ``paged``, or of ``virtual``, which has windows that show them.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from conformance.sharing_model import MAX_SEQS, SHARING_KINDS, TENANTS, Held, Step, groups_of
from conformance.sharing_steps import Engine
from conformance.sharing_world import World
from conformance.strategy_cases import KINDS
from quire.kv import EVICTION_POLICIES, CacheConfig, PrefixKeys


class SharingMachine(RuleBasedStateMachine):
    """One pool, used at random by sequences that begin alike."""

    def __init__(self, kind: str | None = None, *, through_windows: bool = False) -> None:
        super().__init__()
        self.kind, self.through_windows = kind, through_windows

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        draw = data.draw
        kinds = KINDS if self.through_windows else SHARING_KINDS
        groups = groups_of(self.kind or draw(st.sampled_from(kinds)))
        size, longest = draw(st.sampled_from([4, 1, 16])), draw(st.sampled_from([64, 30]))
        token_bytes = sum(group.bytes_per_token for group in groups)
        page_bytes = draw(st.sampled_from([128, 2048]))
        num_tokens = draw(st.integers(0, 2 * longest) | st.integers(0, 5 * longest))
        extra_bytes = draw(st.integers(0, 8)) * 1024 + draw(st.integers(0, 99))
        capacity = num_tokens * token_bytes + extra_bytes
        self.most = capacity * draw(st.integers(1, 2))
        windows: dict[str, Any] = {}
        if self.through_windows:
            windows = dict(
                shares_pages=True,
                max_num_seqs=draw(st.sampled_from([MAX_SEQS, 3, MAX_SEQS, 1])),
                max_mappings=draw(st.none() | st.integers(4, 80)),
                heap_bytes=draw(st.sampled_from([2**14, 1, 2**28])),
                layers_per_page=draw(st.sampled_from([None, 1])),
            )
        config = CacheConfig(
            max_model_len=longest,
            capacity_bytes=capacity,
            block_size=size,
            page_bytes=page_bytes,
            enable_prefix_caching=draw(st.sampled_from([True] * 7 + [False])),
            eviction_policy=draw(st.sampled_from(sorted(EVICTION_POLICIES))),
            keep_events=True,
            max_capacity_bytes=self.most,
            **{"max_num_seqs": MAX_SEQS, **windows},
        )
        self.world = World(groups, config)
        self.engine = Engine(self.world)
        self.texts: list[list[int]] = [[]]
        self.next_seq = 0

    # -- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.held) < MAX_SEQS)
    @rule(
        like=st.integers(0, 7),
        cut=st.integers(0, 63),
        tail=st.integers(1, 2**20),
        tenant=st.sampled_from(TENANTS),
        chunk=st.integers(0, 40),
        outside=st.integers(0, 15),
        tells=st.sampled_from([0, 0, 0, 1, 2]),
        priority=st.sampled_from([0, 0, 0, -1, 3, 200]),
    )
    def admit(
        self,
        like: int,
        cut: int,
        tail: int,
        tenant: PrefixKeys,
        chunk: int,
        outside: int,
        tells: int,
        priority: int,
    ) -> None:
        """A sequence that begins as one before it did, up to some token."""
        begun = self.texts[like % len(self.texts)][: max(0, self.world.longest - cut)]
        ids = (begun + [int(bit) for bit in f"{tail:b}"])[: self.world.longest]
        self.texts = [*self.texts[-5:], ids]
        root = self.world.prefixes.node(None, (), tenant.of_root())
        held = Held(keys=tenant, root=root, tells=tells, priority=min(priority, 127))
        self.world.held[self.next_seq] = held
        for token in ids:
            self.world.say(held, token)
        self.world.accounting.add(self.next_seq, keys=tenant, priority=priority)
        self.engine.begin(self.next_seq, chunk, outside)
        self.next_seq += 1
        self.engine.end_step()

    @precondition(lambda self: self.world.running())
    @rule(
        which=st.integers(0, 7),
        chunk=st.integers(0, 24),
        more=st.integers(0, 63),
        promise=st.sampled_from([0, 0, 12, 63]),
    )
    def advance(self, which: int, chunk: int, more: int, promise: int) -> None:
        """One sequence goes on: with its prompt, or with what comes after it."""
        seq_id = self.world.pick(which)
        held = self.world.held[seq_id]
        if held.room:
            self.engine.extend(
                Step(
                    seq_id=seq_id,
                    begin=held.room,
                    end=held.room + chunk,
                    drafts=more % 4,
                    promised=held.room + promise if promise else 0,
                    kept_bytes=500 * (more // 32),
                )
            )
        else:
            self.engine.begin(seq_id, chunk, more)
        self.engine.end_step()

    @precondition(lambda self: self.world.running())
    @rule(num_steps=st.integers(1, 5), chunks=st.integers(0, 255))
    def decode(self, num_steps: int, chunks: int) -> None:
        """All of them grow, together."""
        for number in range(num_steps):
            steps = []
            for seq_id, held in self.world.held.items():
                if held.room and not held.pin:
                    more = 1 + 2 * (chunks >> seq_id % 8 & 1)
                    steps.append(Step(seq_id=seq_id, begin=held.room, end=held.room + more))
            self.engine.extend_each(steps)
            self.engine.end_step(look=number == num_steps - 1)

    @precondition(lambda self: self.world.running() and len(self.world.held) < MAX_SEQS)
    @rule(
        which=st.integers(0, 7),
        tells=st.sampled_from([0, 0, 1, 2]),
        count=st.sampled_from([1, 1, 3]),
    )
    def fork(self, which: int, tells: int, count: int) -> None:
        seq_id = self.world.pick(which)
        for _ in range(min(count, MAX_SEQS - len(self.world.held))):
            if self.engine.fork(seq_id, self.next_seq):
                self.world.held[self.next_seq].tells = tells
                self.next_seq += 1
        self.engine.end_step()

    @precondition(lambda self: self.world.running())
    @rule(which=st.integers(0, 7), back=st.integers(0, 9) | st.integers(0, 63))
    def trim(self, which: int, back: int) -> None:
        world, seq_id = self.world, self.world.pick(which)
        held, num_tokens = world.held[seq_id], max(0, world.held[seq_id].room - back)
        undone = num_tokens < held.written
        tables = [world.table(g, seq_id) for g in range(len(world.groups))]
        shared = [
            state and world.pools[g].refs[tables[g][:1]].sum() > 1
            for g, state in enumerate(world.states)
        ]
        if undone and num_tokens >= max(1, held.computed) and any(shared):
            return  # a state is taken back from a draft's, which the model does at once
        passed = [int((table < 0).sum()) * world.size for table in tables]
        lacking = [
            0 < num_tokens < held.computed
            if world.states[g]
            else group.live_start(num_tokens) < passed[g]
            for g, group in enumerate(world.groups)
        ]
        assert num_tokens < held.base or not any(
            each for each, state in zip(lacking, world.states, strict=True) if not state
        ), "the last extension could not be undone"
        if any(lacking):
            before = world.snapshot()
            with pytest.raises(ValueError, match=f"to {num_tokens} tokens"):
                world.accounting.trim(seq_id, num_tokens)
            assert world.snapshot() == before, "a refusal has changed something"
            return
        world.accounting.trim(seq_id, num_tokens)
        held.ids, held.contents = held.ids[:num_tokens], held.contents[:num_tokens]
        held.nodes = held.nodes[: num_tokens // world.size]
        held.room, held.base = num_tokens, min(held.base, num_tokens)
        held.written, held.computed = min(held.written, num_tokens), min(held.computed, num_tokens)
        self.engine.apply()
        for g, state in enumerate(world.states):
            if state and num_tokens and undone:
                self.engine.write(g, tables[g][:1], held.contents[-1:])
        self.engine.end_step()

    @precondition(lambda self: self.world.held)
    @rule(which=st.integers(0, 7))
    def free(self, which: int) -> None:
        """A sequence ends, or a pin is taken out."""
        seq_id = sorted(self.world.held)[which % len(self.world.held)]
        self.world.free(seq_id)
        self.engine.end_step()

    @precondition(lambda self: self.world.used() and len(self.world.held) < MAX_SEQS)
    @rule(like=st.integers(0, 7), cut=st.integers(0, 63), tenant=st.sampled_from(TENANTS))
    def pin(self, like: int, cut: int, tenant: PrefixKeys) -> None:
        ids = self.texts[like % len(self.texts)][: self.world.longest - cut]
        root = self.world.prefixes.node(None, (), tenant.of_root())
        held = Held(keys=tenant, root=root, pin=True)
        for token in ids:
            self.world.say(held, token)
        whole = len(ids) // self.world.size * self.world.size
        expected = max(self.world.hits(held, whole, whole=True))
        pinned = self.world.accounting.pin(self.next_seq, np.array(ids, np.int32), tenant)
        assert pinned == expected, f"{pinned} tokens are pinned, {expected} are cached"
        held.ids, held.contents = ids[:pinned], held.contents[:pinned]
        held.room = held.written = held.computed = held.base = pinned
        self.world.held[self.next_seq] = held
        self.next_seq += 1
        self.engine.end_step()

    @precondition(lambda self: any(self.world.states) and self.world.running())
    @rule(which=st.integers(0, 7))
    def keep_state(self, which: int) -> None:
        """A copy of the state after a sequence's last token is kept for others."""
        world, seq_id = self.world, self.world.pick(which)
        held = world.held[seq_id]
        if held.computed < held.written:
            return
        node, states = world.tip(held), [g for g, state in enumerate(world.states) if state]
        lacking = [g for g in states if (g, node) not in world.present]
        new = [int(g in lacking) for g in range(len(world.groups))]
        whole = held.computed and held.computed % world.size == 0
        expected = bool(whole and world.config.enable_prefix_caching and lacking)
        expected = expected and world.need([], new) <= world.free_bytes()
        before = None if expected else world.snapshot()
        with self.engine.checks.evictions(None):
            assert world.accounting.keep_state(seq_id) == expected
        assert expected or world.snapshot() == before, "a refusal has changed something"
        self.engine.end_step()
        assert not expected or all((g, node) in world.present for g in states)

    @precondition(lambda self: self.world.used())
    @rule(share=st.integers(0, 16), length=st.integers(0, 99), for_now=st.booleans())
    def resize(self, share: int, length: int, for_now: bool) -> None:
        """The ceiling is moved. What is held stays, and what is cached goes only if it must."""
        world, wanted = self.world, self.most * share // 16
        before, surplus = world.present.copy(), world.store.committed_bytes - wanted
        lowest, beside = max(wanted, world.held_bytes()), self.engine.checks.cached_beside_held()
        with self.engine.checks.evictions(None, by_pages=True):
            ceiling = world.accounting.resize(wanted, for_now=for_now)
        if not for_now:
            world.capacity = lowest
        world.ceiling = min(lowest, world.capacity)
        assert ceiling == world.ceiling
        assert beside == self.engine.checks.cached_beside_held(), "evicted for nothing"
        self.engine.apply()
        most = max(size.granule_blocks * size.block_bytes for size in world.pools.sizes)
        assert world.store.committed_bytes > ceiling - most or surplus <= 0, "evicted too much"
        world.store.resize(world.ceiling)
        self.engine.end_step()
        assert surplus > 0 or before <= world.present, "evicted without need"
        if length < 80 and share % 3 == 0:
            self.engine.checks.check_length(length)

    @precondition(lambda self: self.world.used() and len(self.world.held) < 2)
    @rule()
    def clear(self) -> None:
        """Forget what is cached, if nothing is held."""
        idle = self.world.held_bytes() == 0
        assert self.world.accounting.reset_prefix_cache() == idle
        self.engine.end_step()
        assert not (idle and self.world.present)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for seq_id in list(self.world.held):
            self.world.free(seq_id)
        self.engine.end_step()
        assert self.world.accounting.resize(0) == 0
        self.engine.end_step()
        assert self.world.store.committed_bytes == len(self.world.index) == 0
