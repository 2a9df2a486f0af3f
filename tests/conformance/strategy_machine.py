"""Random use of a strategy, against an obvious model: a list of unique token ids a sequence.

The machine does not care what a token's bytes are. A ``Store`` does: it is told the changes and
where each token id is written, and is asked what lies in a slot. ``SlotStore`` is a store without
tensors, for the accounting alone; the storage suite brings one with tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from conformance.census_checks import check_census
from conformance.mapping_checks import counted_mappings
from conformance.strategy_cases import KINDS_WITH_STATES, OPTIONS, layers_of, model_spec
from quire.kv import (
    STRATEGIES,
    Accounting,
    AllocationResult,
    CacheConfig,
    Commit,
    Copy,
    Fits,
    Map,
    Never,
    NotNow,
    Release,
    StorageOp,
    Unmap,
    Usage,
    build_accounting,
)
from quire.kv.contiguous import ContiguousAccounting
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.spec import ChunkedAttention, CrossAttention, Group, KeptWhole, SlidingWindow

Ids = npt.NDArray[np.int64]


def is_state(group: Group) -> bool:
    return isinstance(group.spec, KeptWhole)


class Store(Protocol):
    """Where the machine's token ids lie."""

    committed_bytes: int
    peak_committed_bytes: int

    def apply(self, changes: Sequence[StorageOp]) -> None: ...
    def lies(self, group: int, slots: Ids) -> Ids: ...
    def write(self, group: int, slots: Ids, ids: Ids) -> None: ...
    def read(self, group: int, table: Ids, slots: Ids, start: int, expected: Ids) -> None: ...
    def verify(self, usage: Usage) -> None: ...
    def resize(self, capacity_bytes: int) -> None: ...
    def close(self) -> None: ...


class SlotStore:
    """A token id a slot; replays changes one by one and holds them to the contract."""

    def __init__(self, accounting: Accounting, capacity_bytes: int) -> None:
        self.committed_bytes = self.peak_committed_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._slot_bytes = [accounting.slot_bytes(n) for n in range(len(accounting.groups))]
        groups = range(len(accounting.groups))
        sizes = [accounting.num_slots(group) for group in groups]
        # Where sequences see the pool through windows: which of its slots each of theirs shows.
        self._shown: list[Ids] | None = None
        if isinstance(accounting, SharedVirtualAccounting):
            self._shown = [
                np.arange(size) if is_state(group) else np.full(size, -1)
                for group, size in zip(accounting.groups, sizes, strict=True)
            ]
            self._in_windows = [not is_state(group) for group in accounting.groups]
            sizes = [accounting.pool_slots(group) for group in groups]
        self._committed = [np.zeros(size, bool) for size in sizes]
        self._ids: list[Ids] = [np.full(size, -1) for size in sizes]  # -1: nothing written

    def apply(self, changes: Iterable[StorageOp]) -> None:
        for change in changes:
            if isinstance(change, Map | Unmap):
                self._show(change)
                continue
            committed, ids = self._committed[change.group], self._ids[change.group]
            if isinstance(change, Copy):
                source = slice(change.source, change.source + change.num_slots)
                target = slice(change.target, change.target + change.num_slots)
                assert committed[source].all(), f"{change} reads what is not committed"
                assert committed[target].all(), f"{change} writes what is not committed"
                ids[target] = ids[source].copy()
                continue
            pages = slice(change.start, change.stop)
            assert 0 <= change.start < change.stop <= len(committed), f"{change} is out of bounds"
            if isinstance(change, Commit):
                assert not committed[pages].any(), f"{change} commits twice"
            else:
                assert committed[pages].all(), f"{change} releases what is not committed"
                assert not self._sees(change), f"{change} releases what a window shows"
            committed[pages] = isinstance(change, Commit)
            ids[pages] = -1
            num_bytes = (change.stop - change.start) * self._slot_bytes[change.group]
            self.committed_bytes += num_bytes if isinstance(change, Commit) else -num_bytes
            self.peak_committed_bytes = max(self.peak_committed_bytes, self.committed_bytes)
            assert self.committed_bytes <= self._capacity_bytes, f"{change} passes the ceiling"

    def _show(self, change: Map | Unmap) -> None:
        assert self._shown is not None, f"{change}: there are no windows here"
        shown = self._shown[change.group]
        if isinstance(change, Unmap):
            gone = shown[change.start : change.stop]
            assert (gone >= 0).any(), f"{change} hides nothing"
            gone[:] = -1
            return
        target = slice(change.target, change.target + change.num_slots)
        source = np.arange(change.source, change.source + change.num_slots)
        assert self._committed[change.group][source].all(), f"{change} shows what has no page"
        assert (shown[target] == -1).all(), f"{change} shows over what is shown"
        shown[target] = source

    def _sees(self, change: Release) -> bool:
        if self._shown is None or not self._in_windows[change.group]:
            return False
        shown = self._shown[change.group]
        return bool(((change.start <= shown) & (shown < change.stop)).any())

    def lies(self, group: int, slots: Ids) -> Ids:
        """Where the entries of these slots lie."""
        if self._shown is None:
            return slots
        places = self._shown[group][slots]
        assert (places >= 0).all(), "a token is not seen through its window"
        return places

    def write(self, group: int, slots: Ids, ids: Ids) -> None:
        slots = self.lies(group, slots)
        assert self._committed[group][slots].all(), "a token has no page"
        self._ids[group][slots] = ids

    def read(self, group: int, table: Ids, slots: Ids, start: int, expected: Ids) -> None:
        slots = self.lies(group, slots)
        assert self._committed[group][slots].all(), "a token that can be read has no page"
        assert (self._ids[group][slots] == expected).all(), "a token that can be read is lost"

    def verify(self, usage: Usage) -> None:
        pass

    def resize(self, capacity_bytes: int) -> None:
        assert self.committed_bytes <= capacity_bytes, "committed above the new ceiling"
        self._capacity_bytes = capacity_bytes

    def close(self) -> None:
        pass


@dataclass(kw_only=True)
class Held:
    """What the model knows of a sequence."""

    ids: list[int] = field(default_factory=list)
    written: int = 0  # tokens whose ids lie in the store
    state: int = -1  # the id that was written last, which a state stands for
    source: int = -1  # … and first, after which a source is not written again
    base: int = 0  # tokens before the last extension: what it may still be undone to
    max_tokens: int | None = None
    history: list[tuple[str, int]] = field(default_factory=list)

    def copy(self) -> "Held":
        return Held(
            ids=self.ids.copy(),
            written=self.written,
            state=self.state,
            source=self.source,
            base=len(self.ids),
            max_tokens=self.max_tokens,
            history=self.history.copy(),
        )


class StrategyMachine(RuleBasedStateMachine):
    """One cache, used at random. Which strategy it is, and how tight, is drawn at the start."""

    def __init__(
        self,
        option: str,
        make_store: Callable[[Accounting, CacheConfig], Store],
        *,
        page_bytes: int,
        dtypes: Sequence[str] = ("bfloat16",),
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.strategy, self.changed = OPTIONS[option]
        self.make_store, self.page_bytes = make_store, page_bytes
        self.dtypes, self.wide = dtypes, wide

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        draw = data.draw
        kind, dtype = draw(st.sampled_from(KINDS_WITH_STATES)), draw(st.sampled_from(self.dtypes))
        self.spec = model_spec(layers_of(kind, dtype, wide=self.wide))
        token_bytes = self.spec.bytes_per_token or self.page_bytes // 16
        longest = draw(st.sampled_from([50, 20, 64]))
        capacity_bytes = draw(st.integers(60, 300) | st.integers(10, 700)) * token_bytes
        capacity_bytes += draw(st.integers(0, 99))
        self.config = CacheConfig(
            max_model_len=longest,
            max_num_seqs=draw(st.sampled_from([6, 3, 1])),
            capacity_bytes=capacity_bytes,
            page_bytes=self.page_bytes,
            max_capacity_bytes=capacity_bytes * draw(st.integers(1, 2)),
            **self.changed,
        )
        self.first_config = self.config  # of which ``resize`` changes the capacity
        self.ceiling = self.config.capacity_bytes
        self.accounting = self.fresh()
        self.store = self.make_store(self.accounting, self.config)
        self.forgets = any(
            isinstance(group.spec, SlidingWindow | ChunkedAttention) for group in self.spec.groups
        )
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.held: dict[int, Held] = {}
        self.next_seq = self.next_token = 0

    # -- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.held) < 8)
    @rule(
        max_tokens=st.integers(10, 40) | st.none() | st.integers(1, 70),
        num_tokens=st.integers(6, 30) | st.integers(0, 64),
    )
    def admit(self, max_tokens: int | None, num_tokens: int) -> None:
        self.call("add", self.next_seq, max_tokens=max_tokens)
        self.held[self.next_seq] = Held(max_tokens=max_tokens)
        self.extend_one(self.next_seq, num_tokens)
        self.next_seq += 1
        self.end_step()

    @precondition(lambda self: self.held)
    @rule(num_steps=st.integers(3, 12))
    def decode(self, num_steps: int) -> None:
        """Every sequence grows by a token a step; one that finds no room waits."""
        for _ in range(num_steps):
            for seq_id, held in self.held.items():
                if 0 < len(held.ids) < self.config.max_model_len:
                    self.extend_one(seq_id, len(held.ids) + 1)
            self.end_step()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_actions=st.integers(1, 4))
    def step(self, data: st.DataObject, num_actions: int) -> None:
        """A step of an engine: some sequences grow, some end; then the changes are carried out."""
        grown: set[int] = set()
        for _ in range(num_actions):
            if not self.held:
                break
            seq_id = data.draw(st.sampled_from(sorted(self.held)))
            if data.draw(st.sampled_from([*["extend"] * 9, "free"])) == "free":
                self.free_one(seq_id)
                continue
            now = len(self.held[seq_id].ids)
            reach = st.integers(now + 1, now + 9) | st.integers(0, self.config.max_model_len + 2)
            num_tokens = data.draw(st.integers(0, now) if seq_id in grown else reach)
            refused = not self.extend_one(seq_id, num_tokens)
            grown.add(seq_id)
            if refused and num_actions == 1:
                changes = self.call("drain")
                # With keep_old a step begins by giving back what the one before it has outgrown.
                assert all(isinstance(change, Release | Unmap) for change in changes)
                self.store.apply(changes)
        self.end_step()

    @precondition(lambda self: self.held and len(self.held) < 8)
    @rule(data=st.data(), num_more=st.integers(1, 5))
    def fork(self, data: st.DataObject, num_more: int) -> None:
        """A sequence is continued in two ways."""
        seq_id = data.draw(st.sampled_from(sorted(self.held)))
        before = self.snapshot()
        verdict = self.call("fork", seq_id, self.next_seq)
        if isinstance(verdict, Fits):
            self.held[self.next_seq] = self.held[seq_id].copy()
            self.end_step()
            for either in (self.next_seq, seq_id):
                self.extend_one(either, len(self.held[either].ids) + num_more)
            self.next_seq += 1
        else:
            assert self.snapshot() == before, "a refusal has changed something"
            sharing = self.accounting.shares_blocks
            assert not sharing or verdict.option == "max_num_seqs", "sharing needs no room"
            # The cache holds such a sequence already: it cannot be impossible.
            assert isinstance(verdict, NotNow)
            self.check_holders(verdict)
        self.end_step()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[seq_id]
        near = st.integers(held.base, len(held.ids))
        num_tokens = data.draw(near | st.integers(0, self.config.max_model_len))
        before = self.snapshot()
        refusal = ""
        try:
            self.call("trim", seq_id, num_tokens)
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert self.forgets, "nothing is ever forgotten, so anything can be undone"
            assert num_tokens < held.base, "the last extension could not be undone"
            assert f"to {num_tokens} tokens" in refusal
            assert self.snapshot() == before, "a refusal has changed something"
        else:
            held.ids = held.ids[:num_tokens]
            held.written = min(held.written, num_tokens)
            held.base = min(held.base, num_tokens)
            held.history.append(("trim", num_tokens))
        self.end_step()

    @precondition(lambda self: len(self.held) > 2)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_one(data.draw(st.sampled_from(sorted(self.held))))
        self.end_step()

    @precondition(lambda self: self.held)
    @rule(share=st.integers(6, 17) | st.integers(0, 17), for_now=st.booleans())
    def resize(self, share: int, for_now: bool) -> None:
        """The ceiling is moved, for now or for good. What is held stays as it is."""
        wanted, tables = self.config.most_bytes * share // 16, self.snapshot()[1]
        ceiling = self.call("resize", wanted, for_now=for_now)
        changes = self.call("drain")
        assert all(isinstance(change, Release | Unmap) for change in changes)
        assert self.snapshot()[1] == tables, "a sequence's tokens have moved"
        self.store.apply(changes)
        lowest = max(min(wanted, self.config.most_bytes), self.store.committed_bytes)
        if not for_now:
            self.config = replace(self.config, capacity_bytes=lowest)
        self.ceiling = min(lowest, self.config.capacity_bytes)
        assert ceiling == self.accounting.ceiling.now_bytes == self.ceiling
        assert self.accounting.ceiling.capacity_bytes == self.config.capacity_bytes
        self.store.resize(self.ceiling)
        self.end_step()

    @precondition(lambda self: self.strategy == "contiguous" and len(self.held) > 1)
    @rule(data=st.data())
    def defrag(self, data: st.DataObject) -> None:
        """A sequence leaves a hole, and the others close it."""
        assert isinstance(self.accounting, ContiguousAccounting)
        self.free_one(data.draw(st.sampled_from(sorted(self.held))))
        self.end_step()
        self.store.resize(self.config.most_bytes)  # the caller knows that there is room
        self.call("defrag")
        self.store.apply(self.call("drain"))
        self.store.resize(self.ceiling)
        assert self.accounting.fragmentation == 0
        self.end_step()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for seq_id in list(self.held):
            self.free_one(seq_id)
        self.end_step()
        usage = self.accounting.usage()
        assert usage.committed_bytes == usage.used_bytes == self.store.committed_bytes == 0
        assert self.call("drain") == []
        self.store.close()

    # -- what the rules are made of --------------------------------------------------------------

    def fresh(self, config: CacheConfig | None = None) -> Accounting:
        return build_accounting(self.strategy, self.spec, config or self.config)

    def call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Have the accounting do something. It is noted, to be done again elsewhere."""
        answer = getattr(self.accounting, verb)(*arguments, **options)
        if not isinstance(answer, NotNow | Never):  # a refusal has changed nothing
            self.calls.append((verb, arguments, options))
        return answer

    def free_one(self, seq_id: int) -> None:
        self.call("free", seq_id)
        del self.held[seq_id]

    def extend_one(self, seq_id: int, num_tokens: int) -> bool:
        held = self.held[seq_id]
        before = self.snapshot()
        verdict = self.call("try_extend", seq_id, num_tokens)
        if not isinstance(verdict, Fits):
            assert self.snapshot() == before, "a refusal has changed something"
            self.check_refusal(seq_id, num_tokens, verdict)
            return False
        if num_tokens <= len(held.ids):
            assert self.snapshot() == before, "there was room already"
            return True
        held.base = len(held.ids)
        held.history.append(("extend", num_tokens))
        for _ in range(num_tokens - len(held.ids)):
            held.ids.append(self.next_token)
            self.next_token += 1
        return True

    def end_step(self) -> None:
        """Carry out the changes, write the new tokens, and look at everything."""
        with counted_mappings(self.accounting):
            changes = self.call("drain")
            self.store.apply(changes)
        for seq_id, held in self.held.items():
            if held.written == len(held.ids):
                continue
            held.state = held.ids[-1]
            if not held.written:
                held.source = held.state
            for number, group in enumerate(self.accounting.groups):
                if isinstance(group.spec, CrossAttention) and held.written:
                    continue
                ids = [held.state] if is_state(group) else held.ids[held.written :]
                slots = self.slots(number, seq_id, held.written, len(held.ids))
                self.store.write(number, slots, np.array(ids, np.int64))
            held.written = len(held.ids)
        self.accounting.check()
        self.check_usage()
        check_census(self.accounting, self.held)
        self.check_contents()

    def slots(self, number: int, seq_id: int, start: int, stop: int) -> Ids:
        """Where a sequence's tokens are in a group, or its state, if it has any."""
        if is_state(self.accounting.groups[number]):
            return self.accounting.table(number, seq_id)[: min(1, stop)]
        return self.accounting.slots(number, seq_id, start, stop)

    def snapshot(self) -> Any:
        """All that can be seen from outside."""
        accounting = self.accounting
        return accounting.usage(), [
            (seq_id, accounting.num_tokens(seq_id), accounting.table(group, seq_id).tolist())
            for seq_id in self.held
            for group in range(len(accounting.groups))
        ]

    # -- what is demanded ------------------------------------------------------------------------

    def check_contents(self) -> None:
        """Every token that the last step read, or a later one can read, is where it should be."""
        for seq_id, held in self.held.items():
            assert self.accounting.num_tokens(seq_id) == len(held.ids)
            for index, group in enumerate(self.accounting.groups):
                start = group.live_range(held.base).start
                slots = self.slots(index, seq_id, start, len(held.ids))
                expected = np.array(held.ids[start:], np.int64)
                if is_state(group):
                    is_source = isinstance(group.spec, CrossAttention)
                    kept = held.source if is_source else held.state
                    expected = np.array([kept] * len(slots), np.int64)
                    assert len(slots) == min(1, len(held.ids)), "a state without a slot"
                table = self.accounting.table(index, seq_id)
                self.store.read(index, table, slots, start, expected)
        self.check_packed()

    def check_packed(self) -> None:
        """All sequences at once are what each of them is."""
        seq_ids = list(self.held)
        stops = [len(held.ids) for held in self.held.values()]
        for index, group in enumerate(self.accounting.groups):
            if is_state(group):
                continue
            starts = [group.live_range(held.base).start for held in self.held.values()]
            tables, slots = self.accounting.packed(index, seq_ids, starts, stops)
            each = list(zip(seq_ids, starts, stops, strict=True))
            several = [self.accounting.slots(index, *chunk) for chunk in each]
            assert slots.tolist() == [slot for own in several for slot in own.tolist()]
            for row, seq_id in zip(tables.tolist(), seq_ids, strict=True):
                table = self.accounting.table(index, seq_id).tolist()
                assert row == table + [-1] * (len(row) - len(table))

    def check_usage(self) -> None:
        usage = self.accounting.usage()
        groups = list(enumerate(self.accounting.groups))
        used_bytes = reserved_bytes = 0
        for index, group in groups:
            live: set[int] = set()
            for seq_id, held in self.held.items():
                range_ = group.live_range(len(held.ids))
                slots = self.slots(index, seq_id, range_.start, range_.stop)
                live.update(self.store.lies(index, slots).tolist())
            entry_bytes = group.bytes_for(1) if is_state(group) else group.bytes_per_token
            used_bytes += len(live) * entry_bytes
            num_slots = self.accounting.num_slots(index)
            if isinstance(self.accounting, SharedVirtualAccounting) and not is_state(group):
                num_slots += self.accounting.pool_slots(index)
            reserved_bytes += num_slots * self.accounting.slot_bytes(index)
        assert usage == Usage(
            reserved_bytes=reserved_bytes,
            committed_bytes=self.store.committed_bytes,
            used_bytes=used_bytes,
            num_sequences=len(self.held),
            num_tokens=sum(len(held.ids) for held in self.held.values()),
        )
        assert usage.reserved_bytes >= usage.committed_bytes >= usage.used_bytes
        assert usage.committed_bytes <= self.ceiling
        self.store.verify(usage)

    def check_refusal(self, seq_id: int, num_tokens: int, verdict: AllocationResult) -> None:
        held = self.held[seq_id]
        routes = [held.history, []]
        if self.strategy not in ("contiguous", "growing"):  # windows pass token by token
            routes.append([("extend", n + 1) for n in range(len(held.ids))])
        alone = any(self.fits_alone(held, route, num_tokens) for route in routes)
        alone = alone or self.fits_without_others(seq_id, num_tokens)
        if isinstance(verdict, NotNow):
            assert alone, f"{num_tokens} tokens will never fit: {verdict}"
            self.check_holders(verdict)
            return
        assert isinstance(verdict, Never)
        assert not alone, f"{num_tokens} tokens fit an empty cache: {verdict}"
        at_most = verdict.fitting_tokens
        assert at_most < num_tokens or STRATEGIES[self.strategy].reserves
        assert self.fits_alone(held, [], at_most, limit=at_most), f"fewer would fit: {verdict}"
        if at_most < min(held.max_tokens or 70, self.config.max_model_len):
            more = at_most + 1
            assert not self.fits_alone(held, [], more, limit=more), f"more would fit: {verdict}"

    def check_holders(self, verdict: NotNow) -> None:
        assert verdict.holders or self.ceiling < self.config.capacity_bytes
        assert all(self.accounting.table(0, seq_id).size for seq_id in verdict.holders)

    def fits_without_others(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the sequence could go on with what it holds if all others ended.

        It may hold more tokens than it could come to again: the capacity was larger then, and
        windows have passed since what did not fit any more.
        """
        cache = self.fresh(self.first_config)
        for verb, arguments, options in self.calls:
            getattr(cache, verb)(*arguments, **options)
        for other in self.held.keys() - {seq_id}:
            cache.free(other)
        cache.drain()
        cache.resize(self.config.capacity_bytes)
        return isinstance(cache.try_extend(seq_id, num_tokens), Fits)

    def fits_alone(
        self,
        held: Held,
        route: Iterable[tuple[str, int]],
        num_tokens: int,
        *,
        limit: int | None = None,
    ) -> bool:
        """Whether an empty cache could take the sequence there and to ``num_tokens``.

        One that reserves does so for the longest: with ``limit`` that is all that is asked to fit.
        """
        cache, max_tokens = self.fresh(), held.max_tokens
        if limit is not None and STRATEGIES[self.strategy].reserves:
            config = replace(self.config, max_model_len=max(1, limit))
            cache, max_tokens = build_accounting(self.strategy, self.spec, config), None
        cache.add(0, max_tokens=max_tokens)
        for verb, n in (*route, ("extend", num_tokens)):
            if verb == "trim":
                cache.trim(0, n)
            elif not isinstance(cache.try_extend(0, n), Fits):
                return False
            cache.drain()
        return True
