"""What clients ask the cache to keep: for how long, up to which share, and at whose cost."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kv.caches import FULL, SIZE, STATE, Cache, chunked, policy_pool, sliding, span
from quire.kv import EVICTION_POLICIES, CachedBlock, PrefixKeys, Retention, Score, ScoredPolicy
from quire.kv.retention import HeedsRetention, RetainedBlocks

HOUR = 3600.0


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Asking(Cache):
    """A cache of whose capacity clients can have a share kept."""

    def __init__(self, *specs: Any, num_blocks: int, share: float = 0.25, **kwargs: Any) -> None:
        super().__init__(*specs, num_blocks=num_blocks, retention_share=share, **kwargs)
        self.clock = Clock()

    def retain(self, seq_id: int, *marks: tuple[int, float], owner: str = "") -> int:
        retention = Retention(owner=owner, marks=marks, clock=self.clock)
        count = self.blocks.retain(seq_id, retention)
        self.blocks.check()
        return count

    def serve(
        self,
        seq_id: int,
        tokens: Sequence[int],
        seconds: float = 0,
        *,
        owner: str = "",
        keys: PrefixKeys | None = None,
    ) -> int:
        """A whole request, which asks for all of its prompt. Returns: tokens of the hit."""
        found = self.start(seq_id, tokens, keys=keys or PrefixKeys(tenant=owner))
        if seconds:
            self.retain(seq_id, (len(tokens), seconds), owner=owner)
        self.free(seq_id)
        return found

    def flood(self, num_blocks: int) -> None:
        """As many blocks of prompts that do not come again."""
        for at in range(num_blocks // 2):
            self.serve(1000 + at, span(10_000 + at * 2 * SIZE, 10_000 + (at + 1) * 2 * SIZE))


def test_what_is_retained_outlives_a_flood_until_its_time_is_over() -> None:
    cache = Asking(FULL, num_blocks=16)
    prompt = span(0, 4 * SIZE)
    cache.start(0, prompt)
    assert cache.retain(0, (len(prompt), 300)) == len(prompt)
    cache.free(0)
    cache.flood(40)
    assert cache.lookup(prompt).num_tokens == len(prompt) - 1
    cache.clock.now_s += 299
    cache.flood(40)
    assert cache.lookup(prompt).num_tokens == len(prompt) - 1
    cache.clock.now_s += 1
    cache.flood(40)
    assert cache.lookup(prompt).num_tokens == 0


def test_asking_again_begins_the_time_anew_and_no_mark_shortens_another() -> None:
    cache = Asking(FULL, num_blocks=16)
    prompt = span(0, 4 * SIZE)
    cache.serve(0, prompt, 300)
    cache.clock.now_s += 299
    cache.serve(1, prompt, 300)
    cache.clock.now_s += 200
    cache.flood(40)
    assert cache.serve(2, prompt, 1) == len(prompt) - 1  # a second, and 100 are left
    cache.clock.now_s += 99
    cache.flood(40)
    assert cache.lookup(prompt).num_tokens == len(prompt) - 1


def test_each_mark_has_its_time_and_a_longer_time_holds_for_what_comes_before() -> None:
    cache = Asking(FULL, num_blocks=16, share=0.5)
    prompt = span(0, 6 * SIZE)
    cache.start(0, prompt)
    assert cache.retain(0, (2 * SIZE, HOUR), (5 * SIZE + 1, 60)) == 5 * SIZE  # whole blocks
    cache.free(0)
    for seconds, left in ((59, 5 * SIZE), (1, 2 * SIZE), (HOUR, 0)):
        cache.clock.now_s += seconds
        cache.flood(40)
        assert cache.lookup(prompt).num_tokens == left
    cache.start(1, prompt)
    assert cache.retain(1, (2 * SIZE, 60), (4 * SIZE, HOUR)) == 4 * SIZE
    cache.free(1)
    cache.clock.now_s += 61
    cache.flood(40)
    assert cache.lookup(prompt).num_tokens == 4 * SIZE


def test_a_sequence_that_needs_the_room_gets_it() -> None:
    """A hint is no promise: nothing is refused for its sake."""
    cache = Asking(FULL, num_blocks=16, share=1.0)
    first, second = span(0, 8 * SIZE), span(100, 100 + 8 * SIZE)
    cache.serve(0, first, HOUR)
    cache.serve(1, second, HOUR)
    cache.start(2, span(1000, 1000 + 8 * SIZE))
    assert cache.lookup(first).num_tokens == 0, "the oldest goes first"
    assert cache.lookup(second).num_tokens == 8 * SIZE - 1
    cache.extend(2, span(2000, 2000 + 3 * SIZE))
    assert cache.lookup(second).num_tokens == 5 * SIZE, "its deepest blocks go first"


def test_more_than_the_share_is_not_retained() -> None:
    cache = Asking(FULL, num_blocks=16)
    prompt = span(0, 8 * SIZE)
    cache.start(0, prompt)
    assert cache.retain(0, (len(prompt), HOUR)) == 4 * SIZE  # its first blocks
    cache.free(0)
    cache.flood(40)
    assert cache.lookup(prompt).num_tokens == 4 * SIZE
    other = span(500, 500 + 4 * SIZE)
    cache.serve(1, other, HOUR)
    cache.flood(40)
    assert cache.lookup(prompt).num_tokens == 0, "the oldest gives way"
    assert cache.lookup(other).num_tokens == 4 * SIZE - 1


def test_nothing_is_retained_without_a_share_nor_of_what_is_not_computed() -> None:
    cache = Asking(FULL, num_blocks=16, share=0.0)
    cache.start(0, span(0, 4 * SIZE))
    assert cache.retain(0, (4 * SIZE, HOUR)) == 0
    cache = Asking(FULL, num_blocks=16)
    cache.add(0)
    assert cache.retain(0, (4 * SIZE, HOUR)) == 0
    cache = Asking(FULL, num_blocks=16, caching=False)
    cache.start(0, span(0, 4 * SIZE), read=False)
    assert cache.retain(0, (4 * SIZE, HOUR)) == 0


def test_a_cache_that_shrinks_retains_a_share_of_what_is_left() -> None:
    cache = Asking(FULL, num_blocks=16)
    prompt = span(0, 4 * SIZE)
    cache.serve(0, prompt, HOUR)
    cache.blocks.resize(cache.capacity_bytes // 2, for_now=True)
    cache.end_step()
    cache.blocks.check()
    cache.flood(40)
    assert cache.lookup(prompt).num_tokens == 2 * SIZE


def neighbour_hits(*, num_blocks: int, asks: bool) -> int:
    """A neighbour's hit tokens: chats that go on, among long prompts of a client that come once.

    That client ``asks`` for a day each time.
    """
    cache, rng, found = Asking(FULL, num_blocks=num_blocks), random.Random(0), 0
    chats = [span(at * 100_000, at * 100_000 + 2 * SIZE) for at in range(6)]
    for seq_id in range(200):
        at = rng.randrange(len(chats))
        found += cache.serve(2 * seq_id, chats[at], owner="neighbour")
        grown = [*chats[at], *span(chats[at][-1] + 1, chats[at][-1] + 1 + SIZE)]
        chats[at] = grown if len(grown) < 6 * SIZE else span(grown[-1], grown[-1] + 2 * SIZE)
        tokens = span(10**7 + seq_id * 8 * SIZE, 10**7 + (seq_id + 1) * 8 * SIZE)
        cache.serve(2 * seq_id + 1, tokens, 24 * HOUR if asks else 0, owner="hostile")
        cache.clock.now_s += 1
    return found


def test_a_client_that_asks_for_all_costs_a_neighbour_no_more_than_the_share() -> None:
    """The neighbour finds what it would in the rest of the cache, if no client asked at all."""
    rest = neighbour_hits(num_blocks=48, asks=False)
    assert 0 < rest < neighbour_hits(num_blocks=64, asks=False)
    assert neighbour_hits(num_blocks=64, asks=True) >= rest


def test_a_tenant_that_asks_for_all_takes_nothing_that_another_has_asked_for() -> None:
    cache = Asking(FULL, num_blocks=64)
    prompt, keys = span(0, 4 * SIZE), PrefixKeys(tenant="quiet")
    cache.serve(0, prompt, HOUR, owner="quiet")
    for at in range(50):
        tokens = span(1000 + at * 100, 1000 + at * 100 + 8 * SIZE)
        # Salts are the client's own: they make no other client of it.
        cache.serve(
            1 + at, tokens, 24 * HOUR, owner="loud", keys=PrefixKeys(tenant="loud", salt=str(at))
        )
    cache.flood(200)
    assert cache.lookup(prompt, keys).num_tokens == len(prompt) - 1
    policy = cache.blocks.pools[0].evictable
    assert isinstance(policy, RetainedBlocks)
    assert policy.num_retained == 16


def test_what_a_hit_needs_of_windows_and_states_is_retained_too() -> None:
    for specs, share in (((FULL, sliding(6)), 0.5), ((FULL, STATE), 0.9), ((chunked(8),), 0.5)):
        cache = Asking(*specs, num_blocks=48, share=share)
        prompt = span(0, 5 * SIZE)
        cache.start(0, prompt[: 4 * SIZE])
        cache.keep_state(0)
        assert cache.retain(0, (4 * SIZE, HOUR)) == 4 * SIZE
        cache.free(0)
        cache.flood(100)
        assert cache.lookup(prompt).num_tokens == 4 * SIZE
        cache.clock.now_s += HOUR
        cache.flood(100)
        assert cache.lookup(prompt).num_tokens == 0


def test_a_state_that_was_kept_nowhere_is_no_beginning() -> None:
    cache = Asking(FULL, STATE, num_blocks=48, share=0.9)
    cache.start(0, span(0, 4 * SIZE))
    assert cache.retain(0, (4 * SIZE, HOUR)) == 0


def test_a_policy_is_told_what_was_asked_for_and_judges_it_afterwards() -> None:
    seen = list[tuple[int, float]]()

    class Noting(ScoredPolicy):
        def score(self, block: CachedBlock, now: int) -> Score:
            seen.append((block.depth, block.retained_s))
            return block.last_used

    assert isinstance(Noting(policy_pool(4)), HeedsRetention)
    cache = Asking(FULL, num_blocks=16, make_policy=Noting)
    cache.start(0, span(0, 3 * SIZE))
    cache.retain(0, (2 * SIZE, 300))
    cache.clock.now_s += 100
    cache.free(0)
    assert seen == [(2, 0.0)]  # the others are not put to it yet
    cache.clock.now_s += 200
    cache.flood(16)
    assert seen[1:] != []
    assert {(1, 200.0), (0, 200.0)} <= set(seen)
    seen.clear()
    cache.serve(1, span(0, 3 * SIZE))
    assert {seconds for _, seconds in seen} == {0.0}


@pytest.mark.parametrize("policy", ["choice", "lru", "lru-2", "bip"])
@pytest.mark.parametrize("forgets", [False, True])
def test_at_random_the_counts_stay_true_and_no_block_loses_its_ancestors(
    policy: str, forgets: bool
) -> None:
    """What is forgotten on purpose, descendants of others may outlive."""
    rng = random.Random(0)
    cache = Asking(
        FULL,
        num_blocks=32,
        share=0.5,
        granule_blocks=1 + forgets,
        make_policy=EVICTION_POLICIES[policy],
    )
    cache.blocks.pools._clock = 2**31 - 700  # it is set back on the way
    running = list[int]()
    for seq_id in range(250):
        while len(running) > 2:
            gone = running.pop(rng.randrange(len(running)))
            cache.blocks.free(gone, forget=forgets and gone % 11 == 4, ended=gone % 3 == 0)
            cache.blocks.check()
        tokens = [rng.randrange(3) for _ in range(2)] + [rng.randrange(2) for _ in range(22)]
        cut = rng.choice((4, 8, 16, 24))
        tokens[cut:] = [each + 10 * seq_id for each in tokens[cut:]]
        owner = rng.choice("ab")
        cache.start(seq_id, tokens, keys=PrefixKeys(tenant=owner))
        running.append(seq_id)
        if rng.random() < 0.6:
            marks = [(rng.randrange(25), rng.choice((1.0, 5.0, 50.0))) for _ in range(2)]
            asked = max(count for count, _ in marks) // SIZE * SIZE
            assert cache.retain(seq_id, *marks, owner=owner) <= asked
        if seq_id % 40 == 20:
            cache.blocks.resize(cache.capacity_bytes * 3 // 4, for_now=True)
            cache.end_step()
            cache.blocks.resize(cache.capacity_bytes, for_now=True)
        cache.clock.now_s += rng.choice((0, 1, 3))
        index = cache.blocks.index
        for row in [] if forgets else np.flatnonzero(index.blocks[0] >= 0).tolist():
            assert (index.blocks[0][list(index.upwards(row))] >= 0).all()
    policy_now = cache.blocks.pools[0].evictable
    assert isinstance(policy_now, RetainedBlocks)
    order, times = policy_now.order()
    assert len(order) == len(policy_now) == len(times) == cache.num_cached
    first = policy_now.next_time()
    assert first == times[0]
