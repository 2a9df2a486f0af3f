"""Count what a prefix cache and the tiers behind it find of a trace's prompts.

Each prompt takes its cached blocks from the pool, and goes on with those that tiers have, each from
the nearest. What comes from a far tier goes to the nearer ones as well, and what is computed goes
to all. The pool evicts by the engine's own accounting, and a tier as ``PlannedTier.make_records``
says.

A request takes no time here, so every load comes in time and everything is stored, as with
``--kv-tier-write always``. ``quire.planner.simulation`` has the engine's policy, and time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from quire.kv import CacheConfig, Extension, Fits, PagedAccounting
from quire.planner.hit_rates.prefix_tree import TELL_EVERY, OnRequest, Prompts
from quire.planner.kept_records import ByUses, KeptRecords, LastUsed
from quire.planner.planned_tiers import RECORDS_A_CALL, PlannedTier
from quire.spec import FullAttention, Group
from quire.tiers import Name

_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHits:
    """What one tier did. Blocks are the trace's."""

    hit_tokens: int  # of prompts, that it had
    num_loads: int  # of a run of blocks each
    loaded_blocks: int
    stored_blocks: int
    num_blocks: int  # at the end
    num_evicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredHits:
    """What a pool of one size and the tiers behind it found."""

    cache_tokens: int  # of the pool
    prompt_tokens: int
    pool_hit_tokens: int
    tiers: tuple[TierHits, ...]  # the nearest first

    @property
    def hit_tokens(self) -> int:
        return self.pool_hit_tokens + sum(tier.hit_tokens for tier in self.tiers)

    @property
    def hit_fraction(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def kept_blocks(tier: PlannedTier, block_tokens: int) -> KeptRecords:
    """Make what a tier keeps, counted in the trace's blocks of ``block_tokens``."""
    num_blocks = None if tier.num_tokens is None else tier.num_tokens // block_tokens
    if num_blocks is None or not tier.keeps_by_uses:
        return LastUsed(num_blocks)
    return ByUses(num_blocks)


def prefix_accounting(num_blocks: int, policy: str, *, longest: int) -> PagedAccounting:
    """Make a cache of ``num_blocks`` blocks of one token, for prompts of ``longest`` tokens."""
    group = Group(
        spec=FullAttention(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn"), layers=(0,)
    )
    config = CacheConfig(
        max_model_len=1 + longest,
        max_num_seqs=1,
        capacity_bytes=num_blocks * group.bytes_per_token,
        block_size=1,
        page_bytes=1,
        eviction_policy=policy,
    )
    return PagedAccounting((group,), config)


def tiered_hits(
    prompts: Prompts,
    cache_tokens: int,
    tiers: Sequence[KeptRecords],  # empty ones, the nearest first
    *,
    policy: str,
    on_request: OnRequest = lambda _: None,
    first_counted: int = 0,
) -> TieredHits:
    """Replay prompts through a pool of ``cache_tokens`` with a policy, and tiers behind it.

    Prompts that are larger than the pool are refused. Requests before ``first_counted`` fill pool
    and tiers only. Raises: ConfigError for an unknown policy.
    """
    num_blocks, size = cache_tokens // prompts.block_tokens, prompts.block_tokens
    accounting = prefix_accounting(num_blocks, policy, longest=num_blocks)
    own = (
        prompts.num_blocks
    )  # of a last token that each prompt computes, so that all others may hit
    pool_tokens, tokens = 0, [0] * len(tiers)
    loads, loaded, stored = ([0] * len(tiers) for _ in range(3))
    for request in range(prompts.num_requests):
        chain, now_s = prompts.chain(request), prompts.at_s[request]
        if len(chain) > num_blocks:
            continue
        accounting.add(request)
        hit = accounting.match_prefix(request, np.append(chain, np.int32(own + request)))
        names = [_name(int(number)) for number in chain[hit.num_tokens :]]
        ends = list[tuple[int, int]]()  # of runs that tiers had: which tier, and where it ends
        end = 0
        while (run := _run(names, end, tiers)) is not None:
            number, stop = run
            for name in names[end:stop]:
                tiers[number].use(name, now_s)
            for nearer, tier in enumerate(tiers[:number]):
                stored[nearer] += _keep(tier, names[end:stop], now_s)
            loads[number] += 1
            loaded[number] += stop - end
            ends.append(run)
            end = stop
        for number, tier in enumerate(tiers):
            stored[number] += _keep(tier, names[end:], now_s)
        verdict = accounting.try_extend(request, len(chain), Extension(hit=hit))
        assert isinstance(verdict, Fits), f"{len(chain)} of {num_blocks} blocks do not fit"
        if names:
            rest = chain[hit.num_tokens :]
            accounting.mark_computed([request], [len(rest)], rest)
        accounting.free(request)
        accounting.drain()
        if request >= first_counted:
            before = prompts.tokens_of(request, hit.num_tokens)
            pool_tokens += before
            for number, stop in ends:
                upto = prompts.tokens_of(request, hit.num_tokens + stop)
                tokens[number] += upto - before
                before = upto
        if request % TELL_EVERY == 0:
            on_request(request)
    return TieredHits(
        cache_tokens=num_blocks * size,
        prompt_tokens=sum(prompts.prompt_tokens[first_counted:]),
        pool_hit_tokens=pool_tokens,
        tiers=tuple(
            TierHits(
                hit_tokens=tokens[number],
                num_loads=loads[number],
                loaded_blocks=loaded[number],
                stored_blocks=stored[number],
                num_blocks=tier.num_records,
                num_evicted=tier.num_evicted,
            )
            for number, tier in enumerate(tiers)
        ),
    )


def _run(names: Sequence[Name], start: int, tiers: Sequence[KeptRecords]) -> tuple[int, int] | None:
    """Find the nearest tier that has the next block, and the end of the run that it has."""
    for number, tier in enumerate(tiers):
        stop = start
        while stop < len(names) and tier.has(names[stop]):
            stop += 1
        if stop > start:
            return number, stop
    return None


def _keep(tier: KeptRecords, names: Sequence[Name], now_s: float) -> int:
    """Store blocks, in batches as an engine does. Return how many were not there."""
    count = 0
    for start in range(0, len(names), RECORDS_A_CALL):
        batch = names[start : start + RECORDS_A_CALL]
        lacking = [not tier.has(name) for name in batch]
        kept = tier.keep([(name, 1) for name in batch], now_s)
        count += sum(lacking[:kept])
    return count


def _name(block: int) -> Name:
    """Name a block by a hash of its number, as records are named by hashes."""
    return sha256(block.to_bytes(_NUMBER_BYTES, "little")).digest()
