"""What every eviction policy promises, over Quire's own and an example of another package.

`--eviction-policy NAME` asks a policy of your own instead. Each runs in the real accounting, with
`Checked` around it: a model of which blocks are cached, free and used when, that every call and
every answer is compared with.
"""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kv.caches import FULL, Cache, policy_pool, span
from quire.errors import ConfigError
from quire.kv import (
    EVICTION_POLICIES,
    CacheConfig,
    CachedBlock,
    EvictionPolicy,
    Extension,
    Fits,
    HeedsEnds,
    PagedAccounting,
    PolicyPool,
    Retention,
    Score,
    ScoredPolicy,
)
from quire.kv.counted_hits import Run
from quire.kv.eviction import Priority, Recency, Times
from quire.kv.eviction_queue import Ids
from quire.kv.order_trials import Order, OrderTrials
from quire.planner.hit_rates import hit_rate_curve
from quire.spec import FullAttention, Group
from quire.traces import TraceRequest

OWN = ("choice", "lru", "lru-2", "bip")
EXAMPLE = "lfu"  # of another package: examples/eviction_policy.py
NUM_BLOCKS = 24
GROUP = Group(spec=FullAttention(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn"), layers=(0,))


class Checked(EvictionPolicy):
    """A policy, and what is demanded of it."""

    def __init__(self, policy: EvictionPolicy, pool: PolicyPool) -> None:
        self._policy, self._pool = policy, pool
        self._places: dict[int, tuple[int, int]] = {}  # of used blocks: prefix, the one before it
        self._last: dict[int, int] = {}
        self._priorities: dict[int, int] = {}
        self._free: set[int] = set()
        self.num_evicted = self.num_ended = 0

    def __len__(self) -> int:
        assert len(self._policy) == len(self._free)
        return len(self._policy)

    def use(self, blocks: Ids, now: int, priority: Priority) -> None:
        ids = blocks.tolist()
        assert not self._free.intersection(ids), "a sequence holds what it uses"
        _, prefixes, parents = self._pool.places_of(blocks)
        self._places.update(zip(ids, zip(prefixes, parents, strict=True), strict=True))
        self._last.update(dict.fromkeys(ids, now))
        for block, each in zip(ids, np.broadcast_to(priority, blocks.shape).tolist(), strict=True):
            self._priorities[block] = min(each, self._priorities.get(block, 127))
        self._policy.use(blocks, now, priority)

    def end(self, blocks: Ids) -> None:
        assert not self._free.intersection(blocks.tolist()), "what ends is used just before"
        assert {self._last[block] for block in blocks.tolist()} == {max(self._last.values())}
        if isinstance(self._policy, HeedsEnds):
            self._policy.end(blocks)
            self.num_ended += len(blocks)

    def free(self, blocks: Ids) -> None:
        self._free.update(blocks.tolist())
        self._policy.free(blocks)

    def hold(self, blocks: Ids) -> None:
        self._free.difference_update(blocks.tolist())
        self._policy.hold(blocks)

    def drop(self, blocks: Ids) -> None:
        self._forget(blocks.tolist())
        self._policy.drop(blocks)

    def next_time(self) -> int:
        blocks, times = self.order()
        time = self._policy.next_time()
        assert time == times[0] == self._last[int(blocks[0])]
        return time

    def evict(self, count: int, *, alike: bool = False) -> Ids:
        before, (expected, _) = len(self), self.order()
        blocks = self._policy.evict(count, alike=alike)
        ids = blocks.tolist()
        assert len(ids) == min(count, before) or (alike and 0 < len(ids) < count)
        assert ids == expected[: len(ids)].tolist(), "it evicts in the order that it says"
        if alike:
            assert len({self._last[block] for block in ids}) == 1
        least_left = max((self._priorities[b] for b in self._free.difference(ids)), default=-128)
        for at, block in enumerate(ids):
            assert block in self._free, "a block that a sequence holds, or that is gone"
            gone = ids[:at]
            prefix = self._places[block][0]
            below = {b for b in self._free if self._places[b][1] == prefix}
            assert below <= {*gone}, "a block goes after those that depend on it"
            assert self._priorities[block] >= least_left, "who matters more goes later"
        self._forget(ids)
        self.num_evicted += len(ids)
        return blocks

    def order(self) -> tuple[Ids, Times]:
        blocks, times = self._policy.order()
        assert sorted(blocks.tolist()) == sorted(self._free)
        assert times.tolist() == [self._last[block] for block in blocks.tolist()]
        return blocks, times

    def take_out(self, blocks: Ids) -> None:
        assert self._free.issuperset(blocks.tolist())
        self._forget(blocks.tolist())
        self._policy.take_out(blocks)

    def rewind(self, ticks: int) -> None:
        self._last = {block: max(0, time - ticks) for block, time in self._last.items()}
        self._policy.rewind(ticks)

    def check(self, cached: Ids) -> None:
        assert sorted(self._free) == cached.tolist()
        self._policy.check(cached)

    def _forget(self, ids: list[int]) -> None:
        for block in ids:
            self._free.discard(block)
            for known in (self._places, self._last, self._priorities):
                known.pop(block, None)


@contextmanager
def checked(name: str) -> Iterator[list[Checked]]:
    """Register a policy with the checks around it, as "checked"; the list has what was made."""
    make, made = EVICTION_POLICIES.find(name, "--eviction-policy"), list[Checked]()

    def make_checked(pool: PolicyPool) -> EvictionPolicy:
        made.append(Checked(make(pool), pool))
        return made[-1]

    EVICTION_POLICIES.register("checked", make_checked)
    try:
        yield made
    finally:
        EVICTION_POLICIES.unregister("checked")


def play(
    num_groups: int,
    page_bytes: int,
    *,
    seed: int,
    priorities: tuple[int, ...],
    ends: bool = False,
    retains: bool = False,
) -> None:
    """Prompts that begin alike, three at a time, in a cache that is too small for all."""
    rng = random.Random(seed)
    config = CacheConfig(
        max_model_len=24,
        max_num_seqs=4,
        capacity_bytes=NUM_BLOCKS * GROUP.bytes_per_token * num_groups * 2,
        block_size=2,
        page_bytes=page_bytes,
        eviction_policy="checked",
    )
    accounting = PagedAccounting((GROUP,) * num_groups, config)
    accounting.pools._clock = 2**31 - 400  # it is set back on the way
    running: list[int] = []
    for seq_id in range(100):
        while len(running) > 2:
            ended = running.pop(rng.randrange(len(running)))
            accounting.free(ended, forget=ended % 9 == 4, ended=ends and ended % 3 > 0)
        prompt = np.array([rng.randrange(3), *(rng.randrange(2) for _ in range(15))], np.int32)
        prompt[rng.choice((1, 4, 8, 16)) :] += 10 * seq_id  # a part of its own
        accounting.add(seq_id, priority=rng.choice(priorities))
        hit = accounting.match_prefix(seq_id, prompt)
        verdict = accounting.try_extend(seq_id, len(prompt), Extension(hit=hit))
        running.append(seq_id)
        if not isinstance(verdict, Fits):
            accounting.free(running.pop())
            continue
        rest = prompt[hit.num_tokens :]
        accounting.mark_computed([seq_id], [len(rest)], rest)
        if retains:  # a second is a request
            marks = ((rng.randrange(17), rng.randrange(1, 20)), (4, 30))
            asked = Retention(owner=rng.choice("ab"), marks=marks, clock=lambda now=seq_id: now)
            assert accounting.retain(seq_id, asked) <= len(prompt)
            accounting.check()
        if seq_id % 30 == 20:  # the machine is short of memory, and then no longer
            whole = config.capacity_bytes
            accounting.resize(accounting.held_bytes + 6 * GROUP.bytes_per_token, for_now=True)
            accounting.resize(whole, for_now=True)
        accounting.drain()
    accounting.check()


@pytest.mark.policies(*OWN, EXAMPLE)
@pytest.mark.parametrize(("num_groups", "page_bytes"), [(1, 1), (2, 1), (1, 12)])
def test_a_policy_evicts_in_its_order_what_may_go(
    name: str, num_groups: int, page_bytes: int
) -> None:
    with checked(name) as made:
        play(num_groups, page_bytes, seed=1, priorities=(0,))
        play(num_groups, page_bytes, seed=2, priorities=(-1, 0, 0, 5))
        play(num_groups, page_bytes, seed=3, priorities=(0,), ends=True)
        play(num_groups, page_bytes, seed=4, priorities=(0,), ends=True, retains=True)
    assert len(made) == 4 * num_groups
    assert sum(policy.num_evicted for policy in made) > 60
    heeds = any(isinstance(policy._policy, HeedsEnds) for policy in made)
    assert heeds == any(policy.num_ended for policy in made)


@pytest.mark.policies(*OWN, EXAMPLE)
def test_a_policy_finds_what_comes_back_at_once(name: str) -> None:
    requests = [
        TraceRequest(
            at_s=at, input_tokens=4, output_tokens=1, hash_ids=(at // 2, -at // 2), id_tokens=2
        )
        for at in range(40)
    ]
    rates = hit_rate_curve(requests, [12], [name])
    assert rates.at(name, 12).hit_tokens >= 20 * 2


class ParentsFirst(ScoredPolicy):
    """No score keeps a block from being evicted after its descendants."""

    def score(self, block: CachedBlock, now: int) -> Score:
        return block.depth


def test_the_suite_runs_the_policy_that_is_named_and_no_other() -> None:
    seen = set[int]()

    class Watched(ParentsFirst):
        def score(self, block: CachedBlock, now: int) -> Score:
            assert block.num_tokens == 2
            assert block.prefix_tokens == 2 * block.depth + 2
            assert block.tokens_saved == 2 * block.hits
            assert block.first_used <= (block.used_before or 0) <= block.last_used <= now or (
                block.used_before is None and block.first_used == block.last_used <= now
            )
            seen.add(block.depth)
            return super().score(block, now)

    class WithoutOrder(EvictionPolicy):
        """A planted wrong one: the order of ids, whatever depends on them."""

        def __init__(self, pool: PolicyPool) -> None:
            self._own = EVICTION_POLICIES["lru"](pool)
            for verb in ("use", "free", "hold", "drop", "rewind", "check", "next_time", "take_out"):
                setattr(self, verb, getattr(self._own, verb))

        def __len__(self) -> int:
            return len(self._own)

        def order(self) -> tuple[Ids, Times]:
            blocks, times = self._own.order()
            by_id = np.argsort(blocks)
            return blocks[by_id], times[by_id]

        def evict(self, count: int, *, alike: bool = False) -> Ids:
            blocks = self.order()[0][:count]
            self._own.take_out(blocks)
            return blocks

    try:
        EVICTION_POLICIES.register("watched", Watched)
        test_a_policy_evicts_in_its_order_what_may_go("watched", 1, 1)
        assert seen >= set(range(8))
        EVICTION_POLICIES.register("wrong", WithoutOrder)
        with pytest.raises(AssertionError, match="after those that depend on it"):
            test_a_policy_evicts_in_its_order_what_may_go("wrong", 1, 1)
    finally:
        for name in ("watched", "wrong"):
            EVICTION_POLICIES.unregister(name)
    with pytest.raises(ConfigError, match=r"--eviction-policy='wrong' is no eviction policy"):
        test_a_policy_evicts_in_its_order_what_may_go("wrong", 1, 1)


@pytest.mark.parametrize("wrong", [float("nan"), (0, float("nan")), None, (1, None), "1", [1]])
def test_a_score_that_is_not_a_number_is_an_error(wrong: Any) -> None:
    class Broken(ScoredPolicy):
        def score(self, block: CachedBlock, now: int) -> Score:
            return wrong  # type: ignore[no-any-return]

    said = re.escape(f"Broken.score gives {wrong!r} for ") + ".*block=3"
    with pytest.raises(ValueError, match=said):
        let_go(Broken(policy_pool(8)), 1, 3)


def test_numpy_s_numbers_are_scores() -> None:
    class Rounded(ScoredPolicy):
        def score(self, block: CachedBlock, now: int) -> Score:
            return float(np.float32(block.hits)), np.int64(block.last_used), np.float64(0)

    policy = Rounded(policy_pool(8))
    let_go(policy, 1, 3, 2)
    assert policy.evict(9).tolist() == [3, 2]


def test_a_policy_is_told_what_has_ended() -> None:
    class EndedFirst(ScoredPolicy):
        def score(self, block: CachedBlock, now: int) -> Score:
            return not block.ended, block.last_used

    policy = EndedFirst(policy_pool(8))
    for now, blocks, ended in ((1, (1, 0), False), (2, (3, 2), True), (3, (5, 4), True)):
        policy.use(ids(*blocks), now, 0)
        if ended:
            policy.end(ids(*blocks))
        policy.free(ids(*blocks))
    policy.hold(ids(5, 4))
    let_go(policy, 4, 5, 4)  # it has not ended after all
    assert policy.evict(9).tolist() == [3, 2, 1, 0, 5, 4]
    EVICTION_POLICIES.register("ended-first", EndedFirst)
    try:
        test_a_policy_evicts_in_its_order_what_may_go("ended-first", 1, 1)
    finally:
        EVICTION_POLICIES.unregister("ended-first")


def test_what_has_ended_goes_first_but_not_what_others_use() -> None:
    policy = Recency(policy_pool(16), order=Order.ENDED_FIRST)
    let_go(policy, 1, 15)
    policy.end(ids(15))  # from now on it is known who uses what
    let_go(policy, 2, 3, 2, 1, 0)
    policy.hold(ids(1, 0))
    let_go(policy, 3, 5, 4, 1, 0)  # they part behind 1
    policy.hold(ids(5, 4, 1, 0))
    policy.use(ids(6, 5, 4, 1, 0), 4, 0)
    policy.end(ids(6, 5, 4, 1, 0))
    policy.free(ids(6, 5, 4, 1, 0))
    assert policy.evict(9).tolist() == [6, 5, 4, 15, 3, 2, 1, 0]


def test_what_had_ended_is_known_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it was evicted; and what others use besides had not."""
    policy, said = Recency(policy_pool(16), with_trials=True), list[list[bool]]()
    watch = OrderTrials.watch

    def noting(
        self: OrderTrials, prints: list[int], runs: list[Run], num_hits: int, now: int
    ) -> Order:
        said.append([had_ended for _, had_ended, count in runs for _ in range(count)])
        return watch(self, prints, runs, num_hits, now)

    monkeypatch.setattr(OrderTrials, "watch", noting)
    let_go(policy, 1, 15)
    policy.end(ids(15))  # from now on it is known who uses what
    for now, end in ((2, 2), (3, 4)):  # they part behind 1
        if now == 3:
            policy.hold(ids(1, 0))
        policy.use(ids(end + 1, end, 1, 0), now, 0)
        policy.end(ids(end + 1, end, 1, 0))
        policy.free(ids(end + 1, end, 1, 0))
    policy.hold(ids(5, 4, 1, 0))
    let_go(policy, 4, 5, 4, 1, 0)
    assert said[1:] == [[False] * 4, [False, False, True, True], [True, True, False, False]]
    assert len(policy.evict(16)) == 7
    let_go(policy, 5, 3, 2, 1, 0)
    let_go(policy, 6, 5, 4)
    assert said[4:] == [[True, True, False, False], [False, False]]


def test_a_policy_of_any_order_passes() -> None:
    class NewestFirst(ScoredPolicy):
        def score(self, block: CachedBlock, now: int) -> Score:
            return -block.last_used

    EVICTION_POLICIES.register("newest", NewestFirst)
    try:
        test_a_policy_evicts_in_its_order_what_may_go("newest", 1, 1)
        test_a_policy_finds_what_comes_back_at_once("newest")
        test_who_matters_more_goes_later_in_a_batch("newest")
        test_a_clock_that_is_set_back_changes_no_order("newest")
        test_check_names_what_may_be_evicted("newest")
    finally:
        EVICTION_POLICIES.unregister("newest")


@pytest.mark.parametrize("victims", [[], [0], [1], [2, 2], [3, 2, 3]])
def test_victims_that_may_not_go_are_refused(victims: list[int]) -> None:
    """Of none, the search for room had no end; of a held block, two sequences wrote into one."""

    class Wrong(Recency):
        def evict(self, count: int, *, alike: bool = False) -> Ids:
            return ids(*victims)

    cache = Cache(FULL, num_blocks=4, make_policy=Wrong)
    cache.start(0, span(0, 4))  # block 0
    cache.start(1, span(10, 22))
    cache.free(1)  # blocks 1, 2 and 3 are cached
    pool = cache.blocks.pools[0]
    assert (pool.refs[:4].tolist(), pool.num_cached) == ([1, 0, 0, 0], 3)
    pool.forget(ids(1))
    with pytest.raises(ConfigError, match=r"Wrong evicts blocks \[.*another prefix_caching_policy"):
        pool.evict(2, alike=False)
    assert pool.refs[:4].tolist() == [1, 0, 0, 0]


# -- one by one ------------------------------------------------------------------------------------


def ids(*blocks: int) -> npt.NDArray[np.intp]:
    return np.array(blocks, np.intp)


def let_go(policy: EvictionPolicy, now: int, *blocks: int, priority: int = 0) -> None:
    policy.use(ids(*blocks), now, priority)
    policy.free(ids(*blocks))


@pytest.mark.parametrize("name", ["lru", EXAMPLE])
def test_what_was_let_go_first_goes_first(name: str) -> None:
    policy = EVICTION_POLICIES[name](policy_pool(8))
    let_go(policy, 1, 3, 2, 1)
    let_go(policy, 2, 6, 5)
    assert len(policy) == 5
    assert policy.next_time() == 1
    assert policy.evict(9, alike=True).tolist() == [3, 2, 1]
    assert policy.evict(1, alike=True).tolist() == [6]
    policy.hold(ids(5))
    let_go(policy, 3, 5)
    assert policy.next_time() == 3
    assert policy.evict(9).tolist() == [5]
    assert len(policy) == 0


@pytest.mark.policies(*OWN, EXAMPLE)
def test_who_matters_more_goes_later_in_a_batch(name: str) -> None:
    """Several sequences let go in one step, and a block that two of them held counts as both."""
    policy = EVICTION_POLICIES[name](policy_pool(8))
    for blocks, priorities, order in (
        ([0, 1, 2], [0, 5, -1], [1, 0, 2]),
        ([0, 1, 2], [5, 0, -5], [0, 1, 2]),
        ([0, 1, 0, 2], [0, 1, 3, 2], [2, 1, 0]),
        ([0, 1, 0, 2], [3, 1, 0, 2], [2, 1, 0]),
    ):
        policy.use(ids(*blocks), 1, np.array(priorities, np.int8))
        policy.free(ids(0, 1, 2))
        assert policy.evict(9).tolist() == order


@pytest.mark.policies(*OWN, EXAMPLE)
def test_a_clock_that_is_set_back_changes_no_order(name: str) -> None:
    policy = EVICTION_POLICIES[name](policy_pool(8))
    ticks = 1 << 30
    for now, blocks in ((10, (0, 1)), (20, (5,)), (30, (3, 4))):
        let_go(policy, ticks + now, *blocks)
    before, times = policy.order()
    policy.rewind(ticks)
    after, earlier = policy.order()
    assert after.tolist() == before.tolist()
    assert earlier.tolist() == (times - ticks).tolist()
    assert policy.evict(9).tolist() == before.tolist()


@pytest.mark.parametrize("name", ["lru", "lru-2", EXAMPLE])
def test_what_is_used_after_the_clock_is_set_back_goes_later(name: str) -> None:
    policy = EVICTION_POLICIES[name](policy_pool(8))
    ticks = 1 << 30

    def use_twice(now: int, *blocks: int) -> None:
        let_go(policy, now, *blocks)
        policy.hold(ids(*blocks))
        let_go(policy, now + 1, *blocks)

    use_twice(ticks + 10, 0, 1)
    policy.rewind(ticks)
    assert policy.next_time() == 11
    use_twice(20, 2, 3)
    assert set(policy.evict(2).tolist()) == {0, 1}
    assert set(policy.evict(2).tolist()) == {2, 3}


@pytest.mark.policies(*OWN, EXAMPLE)
def test_check_names_what_may_be_evicted(name: str) -> None:
    policy = EVICTION_POLICIES[name](policy_pool(4))
    let_go(policy, 1, 2, 0)
    policy.check(ids(0, 2))
    for wrong in ((0, 1, 2), (2,)):
        with pytest.raises(AssertionError):
            policy.check(ids(*wrong))
