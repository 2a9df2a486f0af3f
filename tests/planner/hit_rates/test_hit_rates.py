"""Hit rates: the fast ways against slow ones, the core of the engine, and all there could be."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kv import EVICTION_POLICIES, CachedBlock, Extension, Fits, Score, ScoredPolicy
from quire.kv.eviction import MakePolicy, lru2
from quire.planner.hit_rates import (
    OWN_POLICIES,
    Prompts,
    TieredHits,
    hit_rate_curve,
    policy_replay,
    prompts_of,
    tiered_hits,
)
from quire.planner.hit_rates.optimum import Optimum
from quire.planner.hit_rates.policy_replay import PolicyReplay
from quire.planner.hit_rates.stack_distances import infinite_hits, lru_curve, lru_hits
from quire.planner.hit_rates.tiered import prefix_accounting
from quire.planner.kept_records import ByUses, KeptRecords, LastUsed
from quire.traces import TraceRequest

TOKENS = 4  # of a hash id


def request(ids: Sequence[int], tokens: int | None = None) -> TraceRequest:
    count = TOKENS * len(ids) if tokens is None else tokens
    return TraceRequest(
        at_s=0.0, input_tokens=count, output_tokens=1, hash_ids=tuple(ids), id_tokens=TOKENS
    )


@st.composite
def traffic(
    draw: st.DrawFn, most: int = 25, longest: int = 6, kinds: int = 3
) -> list[TraceRequest]:
    """Prompts over few ids, so that many begin alike; of some the last block is not full."""
    several = draw(st.lists(st.lists(st.integers(0, kinds - 1), max_size=longest), max_size=most))
    short = draw(st.lists(st.integers(0, TOKENS - 1), min_size=len(several), max_size=len(several)))
    found = [
        request(ids, max(1, TOKENS * len(ids) - lacks))
        for ids, lacks in zip(several, short, strict=True)
    ]
    return [*found, request([0])]


# -- slow twins: what is said of the caches, as it is said -------------------------------------


def nodes(requests: Sequence[TraceRequest]) -> list[list[tuple[int, ...]]]:
    """A block is known by all ids up to its own."""
    return [[r.hash_ids[: n + 1] for n in range(len(r.hash_ids))] for r in requests]


def tokens_of(asked: TraceRequest, num_blocks: int) -> int:
    return min(asked.input_tokens, num_blocks * TOKENS)


def slow_lru(requests: Sequence[TraceRequest], size: int) -> int:
    stack: list[tuple[int, ...]] = []  # the last used first
    found = 0
    for asked, chain in zip(requests, nodes(requests), strict=True):
        if len(chain) > size:
            continue
        num_hit = 0
        while num_hit < len(chain) and chain[num_hit] in stack:
            num_hit += 1
        found += tokens_of(asked, num_hit)
        stack = [*chain, *(each for each in stack if each not in chain)][:size]
    return found


def best_of_all(requests: Sequence[TraceRequest], size: int) -> int:
    """Every choice of what to keep after every prompt: the most blocks that could be found."""
    chains = [chain for chain in nodes(requests) if len(chain) <= size]

    @cache
    def best(at: int, cached: frozenset[tuple[int, ...]]) -> int:
        if at == len(chains):
            return 0
        chain = chains[at]
        num_hit = 0
        while num_hit < len(chain) and chain[num_hit] in cached:
            num_hit += 1
        others = cached - set(chain)
        room = size - len(chain)
        kept = combinations(others, min(room, len(others)))
        return num_hit + max(best(at + 1, frozenset({*chain, *each})) for each in kept)

    return best(0, frozenset())


def core_hits(prompts: Prompts, num_blocks: int, policy: str) -> int:
    """Each prompt through the engine's accounting, a block of the trace as a block of one token."""
    accounting = prefix_accounting(num_blocks, policy, longest=num_blocks)
    own = (
        prompts.num_blocks
    )  # of a last token that each prompt computes, so that all others may hit
    hit_tokens = 0
    for number in range(prompts.num_requests):
        chain = prompts.chain(number)
        if len(chain) > num_blocks:
            continue
        accounting.add(number)
        hit = accounting.match_prefix(number, np.append(chain, np.int32(own + number)))
        assert isinstance(accounting.try_extend(number, len(chain), Extension(hit=hit)), Fits)
        if hit.num_tokens < len(chain):
            rest = chain[hit.num_tokens :]
            accounting.mark_computed([number], [len(rest)], rest)
        accounting.free(number)
        accounting.drain()
        hit_tokens += prompts.tokens_of(number, hit.num_tokens)
    return hit_tokens


@contextmanager
def registered(name: str, policy: MakePolicy) -> Iterator[None]:
    EVICTION_POLICIES.register(name, policy)
    try:
        yield
    finally:
        EVICTION_POLICIES.unregister(name)


class FewestHits(ScoredPolicy):
    """A policy of another package, which is told where each block is."""

    def score(self, block: CachedBlock, now: int) -> Score:
        return block.hits, -block.depth, block.last_used


# -- the tests ----------------------------------------------------------------------------------


@given(requests=traffic(), whole=st.booleans())
def test_the_tree_has_each_prompts_blocks(requests: list[TraceRequest], whole: bool) -> None:
    prompts = prompts_of(requests, whole_blocks=whole)
    known: dict[int, tuple[int, ...]] = {}
    for number, (asked, chain) in enumerate(zip(requests, nodes(requests), strict=True)):
        blocks = prompts.chain(number).tolist()
        wanted = chain[: asked.input_tokens // TOKENS] if whole else chain
        assert len(blocks) == len(wanted) == prompts.num_blocks_of_each()[number]
        for block, node in zip(blocks, wanted, strict=True):
            assert known.setdefault(block, node) == node
        assert prompts.tokens_of(number, len(blocks)) == tokens_of(asked, len(wanted))
    assert len(set(known.values())) == len(known) == prompts.num_blocks
    assert prompts.num_tokens == sum(asked.input_tokens for asked in requests)


@given(requests=traffic(), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_lru_of_all_sizes_at_once_is_lru_of_each(
    requests: list[TraceRequest], sizes: list[int]
) -> None:
    prompts = prompts_of(requests)
    assert lru_hits(prompts, sizes) == [slow_lru(requests, size) for size in sizes]


@given(requests=traffic(), size=st.integers(1, 30))
@settings(max_examples=40)
def test_the_engines_own_core_finds_what_is_found_without_it(
    requests: list[TraceRequest], size: int
) -> None:
    prompts = prompts_of(requests)
    replay = PolicyReplay(prompts)
    assert core_hits(prompts, size, "lru") == lru_hits(prompts, [size])[0]
    with registered("fewest-hits", FewestHits):
        for policy in (*EVICTION_POLICIES, "fewest-hits"):
            assert replay.hits(size, policy) == core_hits(prompts, size, policy), policy


def test_a_long_trace_is_found_the_same_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for ghosts and trials of orders; and paths are not kept."""
    rng = np.random.default_rng(3)
    monkeypatch.setattr(policy_replay, "_KEPT_IDS", 0)
    beginnings = rng.integers(0, 40, 600) * 10
    prompts = prompts_of(
        request([n, n + 1, n + 2, *range(1000 * at, 1000 * at + at % 4)])
        for at, n in enumerate(beginnings.tolist(), 1)
    )
    for policy in ("choice", "lru-2", "bip"):
        assert PolicyReplay(prompts).hits(60, policy) == core_hits(prompts, 60, policy) > 0


def test_ghosts_take_some_blocks_for_others() -> None:
    """Fingerprints that many blocks share: a stretch that never came before may be known."""
    rng = np.random.default_rng(5)
    beginnings = rng.integers(0, 40, 400) * 10
    prompts = prompts_of(
        request([n, n + 1, *range(1000 * at, 1000 * at + at % 4)])
        for at, n in enumerate(beginnings.tolist(), 1)
    )
    replay = PolicyReplay(prompts)
    replay._prints = rng.integers(1, 200, prompts.num_blocks).astype(np.uint32) << np.uint32(16)
    found = replay._hits(60, lru2, lambda _: None, 0, ())  # block by block
    assert replay.hits(60, "lru-2") == found != PolicyReplay(prompts).hits(60, "lru-2")


def test_an_order_takes_the_seat_and_leaves_it_as_in_the_core() -> None:
    """Prompts come round and round, too many for the cache; then half of them come no more."""
    rng = np.random.default_rng(4)
    circle = [[n, 1000 + n, 2000 + n] for n in range(70)]
    drifting = [[n // 3, 3000 + n] for n in rng.integers(0, 150, 500).tolist()]
    prompts = prompts_of(request(ids) for ids in (*circle * 8, *drifting, *circle * 2))
    found = PolicyReplay(prompts).hits(60, "choice")
    assert found == core_hits(prompts, 60, "choice")
    assert found > 2 * lru_hits(prompts, [60])[0]


@given(requests=traffic(most=6, longest=4, kinds=2), size=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_nothing_finds_more_than_the_optimum(requests: list[TraceRequest], size: int) -> None:
    full = [request(each.hash_ids) for each in requests if each.hash_ids]
    best = best_of_all(full, size)
    assert Optimum(prompts_of(full)).hits(size) == best * TOKENS


@given(requests=traffic(), size=st.integers(1, 30), skip=st.integers(0, 5))
def test_policies_lie_between_nothing_and_the_optimum(
    requests: list[TraceRequest], size: int, skip: int
) -> None:
    full = [request(each.hash_ids) for each in requests]
    prompts = prompts_of(full)
    optimum = Optimum(prompts).hits(size)
    assert 0 <= lru_hits(prompts, [size])[0] <= optimum <= infinite_hits(prompts)
    if size >= prompts.num_blocks:
        assert lru_hits(prompts, [size])[0] == optimum == infinite_hits(prompts)
    skip = min(skip, len(full) - 1)
    before = [each for each in prompts.prompt_tokens[:skip]]
    counted = lru_hits(prompts, [size], first_counted=skip)[0]
    assert counted <= lru_hits(prompts, [size])[0] <= counted + sum(before)


def test_a_refused_prompt_is_no_next_use() -> None:
    prompts = prompts_of([request(ids) for ids in ([1], [1, 2, 3], [4], [5], [4], [5])])
    assert Optimum(prompts).hits(2) == lru_hits(prompts, [2])[0] == 2 * TOKENS


@given(requests=traffic(), whole=st.booleans(), skip=st.integers(0, 3))
@settings(max_examples=40)
def test_every_token_is_a_hit_or_has_a_reason(
    requests: list[TraceRequest], whole: bool, skip: int
) -> None:
    skip = min(skip, len(requests) - 1)
    found = hit_rate_curve(
        requests, [TOKENS, 5 * TOKENS, 400 * TOKENS], whole_blocks=whole, skip_requests=skip
    )
    assert set(found.by_policy) == set(OWN_POLICIES)
    total = sum(asked.input_tokens for asked in requests[skip:])
    for several in found.by_policy.values():
        assert [each.cache_tokens for each in several] == [TOKENS, 5 * TOKENS, 400 * TOKENS]
        for each in several:
            parts = (each.hit_tokens, each.cold_tokens, each.evicted_tokens, each.partial_tokens)
            assert min(parts) >= 0
            assert sum(parts) == each.prompt_tokens == total
        assert several[-1].evicted_tokens == several[-1].num_refused == 0
        assert several[-1].hit_tokens == found.infinite.hit_tokens
    if not whole:
        lacking = sum(each.input_tokens for each in requests[skip:] if not each.hash_ids)
        assert found.infinite.partial_tokens == lacking


@given(requests=traffic(), times=st.integers(1, 4))
def test_ids_can_be_joined_to_larger_blocks(requests: list[TraceRequest], times: int) -> None:
    joined = prompts_of(requests, block_tokens=times * TOKENS)
    parts: dict[tuple[int, ...], int] = {}
    by_hand = [
        TraceRequest(
            at_s=0,
            input_tokens=each.input_tokens,
            output_tokens=1,
            hash_ids=tuple(
                parts.setdefault(each.hash_ids[start : start + times], len(parts))
                for start in range(0, len(each.hash_ids), times)
            ),
            id_tokens=times * TOKENS,
        )
        for each in requests
    ]
    assert lru_curve(joined).tolist() == lru_curve(prompts_of(by_hand)).tolist()


def test_a_system_prompt_and_its_users_by_hand() -> None:
    """Blocks of 4: a system prompt of 8 tokens, three users of 4, 4 and 3 more."""
    requests = [request([1, 2, 3]), request([1, 2, 4]), request([1, 2, 3]), request([1, 2, 5], 11)]
    found = hit_rate_curve(requests, [3 * TOKENS, 4 * TOKENS], ["lru", "optimum"])
    assert found.prompt_tokens == 47
    assert found.infinite.hit_tokens == 8 + 12 + 8
    assert found.infinite.cold_tokens == 12 + 4 + 3
    assert [each.hit_tokens for each in found.by_policy["lru"]] == [8 + 8 + 8, 8 + 12 + 8]
    assert found.at("lru", 12).evicted_tokens == 4
    assert [each.hit_tokens for each in found.by_policy["optimum"]] == [24, 28]
    assert found.longest_tokens == 12
    # In an engine the end of the last prompt fills no block.
    whole = hit_rate_curve(requests, [12], ["lru"], whole_blocks=True)
    assert whole.infinite.partial_tokens == 3
    assert whole.infinite.cold_tokens == 12 + 4


def test_the_deepest_of_equals_goes_first() -> None:
    """The second prompt uses the first block once more: its children must go before it."""
    requests = [request(ids) for ids in ([1, 2, 3], [1, 9], [7, 8], [1, 2, 3])]
    assert Optimum(prompts_of(requests)).hits(4) == TOKENS * (1 + 2)
    assert best_of_all(requests, 4) == 1 + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ["fifo"]}, "'fifo' is unknown; known: choice, "),
        ({"cache_tokens": [3]}, "a cache of 3 tokens is smaller than one block of 4"),
        ({"skip_requests": 2}, "below the trace's 2 requests"),
        ({"block_tokens": 6}, "--block-size 6 must be a multiple of 4"),
        ({"trace": []}, "the trace has no requests"),
        (
            {"trace": [TraceRequest(at_s=0, input_tokens=5, output_tokens=1)]},
            r"has no hash_ids, which a hit rate needs",
        ),
        (
            {
                "trace": [
                    request([1]),
                    TraceRequest(
                        at_s=0, input_tokens=5, output_tokens=1, hash_ids=(1,), id_tokens=5
                    ),
                ]
            },
            "hash ids of 4 and of 5 tokens",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(options: dict[str, Any], message: str) -> None:
    wanted = {"trace": [request([1, 2]), request([1])], "cache_tokens": [8], **options}
    with pytest.raises(ConfigError, match=message):
        hit_rate_curve(**wanted)


def test_long_work_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    requests = [request([1, 2]) for _ in range(600)]
    hit_rate_curve(requests, [8, 16], on_work=lambda *what: told.append(what))
    assert {what for what, _, _ in told} == {
        "lru",
        *(f"{policy}, {n} blocks" for policy in OWN_POLICIES if policy != "lru" for n in (2, 4)),
    }
    assert {done for _, done, _ in told} == {0, 256, 512}
    assert {count for _, _, count in told} == {600}


@given(requests=traffic(), size=st.integers(6, 12), most=st.integers(1, 30))
@settings(max_examples=60)
def test_a_tier_adds_to_what_the_pool_finds_and_a_large_one_finds_all(
    requests: list[TraceRequest], size: int, most: int
) -> None:
    prompts = prompts_of(requests)

    def found(*tiers: KeptRecords) -> TieredHits:
        return tiered_hits(prompts, size * TOKENS, tiers, policy="lru")

    pool = core_hits(prompts, size, "lru")
    assert found().hit_tokens == pool
    small = found(ByUses(most))
    assert pool == small.pool_hit_tokens <= small.hit_tokens <= infinite_hits(prompts)
    assert small.tiers[0].num_blocks <= most
    assert found(LastUsed(None)).hit_tokens == infinite_hits(prompts)
    both = found(ByUses(most), LastUsed(None))
    assert both.hit_tokens == infinite_hits(prompts)
    assert both.tiers[1].num_evicted == 0
