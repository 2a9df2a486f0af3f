"""Compute the hit rate of a prefix cache by its size and eviction policy.

``hit_rate_curve(open_trace(path), [10**6, 4 * 10**6])`` does all of it. A miss has one of three
reasons: no earlier prompt had the tokens (cold), the cache had evicted them, or they fill no block
(partial). LRU is computed for all sizes in one pass, the engine's other orders by stretches of
blocks, policies of other packages by their own code, and the optimum knows the future.

A request takes no time here, and only prompts are cached. An engine holds the blocks of several
requests at once, which leaves fewer to hit, and caches answers too, which the next turn of a
conversation hits. It also computes at least one token of a prompt, where here all may hit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from quire.errors import ConfigError
from quire.kv import EVICTION_POLICIES
from quire.planner.hit_rates.optimum import Optimum
from quire.planner.hit_rates.policy_replay import PolicyReplay
from quire.planner.hit_rates.prefix_tree import OnRequest, Prompts, prompts_of
from quire.planner.hit_rates.stack_distances import infinite_hits, lru_hits
from quire.traces import TraceRequest

LRU: Final = "lru"
OPTIMUM: Final = "optimum"
OnWork = Callable[[str, int, int], None]  # the name of the work, requests done, all requests


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """The hit rate of one policy in a cache of one size."""

    policy: str
    cache_tokens: int
    prompt_tokens: int
    hit_tokens: int
    cold_tokens: int  # in no earlier prompt: a miss in any cache
    partial_tokens: int  # in no block: the end of a prompt that fills none
    num_refused: int  # prompts larger than the cache

    @property
    def evicted_tokens(self) -> int:
        """Return the tokens of an earlier prompt that were evicted since, or refused."""
        return self.prompt_tokens - self.hit_tokens - self.cold_tokens - self.partial_tokens

    @property
    def hit_fraction(self) -> float:
        return self.hit_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """The hit rates of one trace, by policy and in order of cache size."""

    num_requests: int
    prompt_tokens: int
    block_tokens: int
    num_blocks: int  # distinct blocks: a cache of this size evicts nothing
    longest_tokens: int  # of a prompt, in whole blocks: a smaller cache refuses it
    infinite: HitRate  # a cache that never evicts
    by_policy: dict[str, tuple[HitRate, ...]]

    def at(self, policy: str, cache_tokens: int) -> HitRate:
        """Return the hit rate of one policy at one cache size in tokens."""
        return next(each for each in self.by_policy[policy] if each.cache_tokens == cache_tokens)


OWN_POLICIES: Final = ("choice", "lru", "lru-2", OPTIMUM)  # the engine's default first


def require_policies(names: Iterable[str], option: str) -> None:
    """Raise ConfigError for a name that is no eviction policy and not the optimum."""
    for name in names:
        if name != OPTIMUM and name not in EVICTION_POLICIES:
            known = ", ".join((*EVICTION_POLICIES, OPTIMUM))
            raise ConfigError(f"{option} {name!r} is unknown; known: {known}")


def hit_rate_curve(
    trace: Iterable[TraceRequest] | Prompts,
    cache_tokens: Sequence[int],
    policies: Sequence[str] | None = None,
    *,
    block_tokens: int | None = None,
    whole_blocks: bool = False,
    skip_requests: int = 0,
    on_work: OnWork = lambda *_: None,
) -> HitRates:
    """Compute the hit rates of policies (default: ``OWN_POLICIES``) in caches of these tokens.

    ``block_tokens`` and ``whole_blocks`` are as in ``prompts_of``. The first ``skip_requests`` fill
    the cache and are not counted.

    Raises: ConfigError.
    """
    policies = OWN_POLICIES if policies is None else tuple(policies)
    require_policies(policies, "policies")
    if isinstance(trace, Prompts):
        prompts = trace
    else:
        prompts = prompts_of(trace, block_tokens=block_tokens, whole_blocks=whole_blocks)
    if not 0 <= skip_requests < prompts.num_requests:
        raise ConfigError(
            f"skip_requests {skip_requests:,} must be at least 0 and below the trace's "
            f"{prompts.num_requests:,} requests"
        )
    for size in cache_tokens:
        if size < prompts.block_tokens:
            raise ConfigError(
                f"a cache of {size:,} tokens is smaller than one block of {prompts.block_tokens:,}"
            )
    return _CurveRun(prompts, sorted(set(cache_tokens)), skip_requests, on_work).all(policies)


def round_sizes(prompts: Prompts) -> list[int]:
    """Choose cache sizes in tokens (1, 2, 5, 10 …): each fits every prompt, and evicts some."""
    least = max(prompts.num_blocks_of_each()) * prompts.block_tokens
    most = prompts.num_blocks * prompts.block_tokens
    several = [digit * 10**power for power in range(19) for digit in (1, 2, 5)]
    return [size for size in several if least <= size < most] or [most]


class _CurveRun:
    """One run over a trace: what all policies share, and the hits of each."""

    def __init__(
        self, prompts: Prompts, sizes: list[int], skip_requests: int, on_work: OnWork
    ) -> None:
        self._prompts, self._sizes, self._skip = prompts, sizes, skip_requests
        self._on_work = on_work
        blocks = prompts.num_blocks_of_each()
        self._longest = max(blocks)
        self._counted = blocks[skip_requests:]
        self._tokens = sum(prompts.prompt_tokens[skip_requests:])
        in_blocks = sum(
            prompts.tokens_of(request, count)
            for request, count in enumerate(self._counted, skip_requests)
        )
        self._partial = self._tokens - in_blocks
        self._infinite = infinite_hits(prompts, first_counted=skip_requests)

    def all(self, policies: Sequence[str]) -> HitRates:
        prompts = self._prompts
        all_tokens = prompts.num_blocks * prompts.block_tokens
        return HitRates(
            num_requests=len(self._counted),
            prompt_tokens=self._tokens,
            block_tokens=prompts.block_tokens,
            num_blocks=prompts.num_blocks,
            longest_tokens=self._longest * prompts.block_tokens,
            infinite=self._rate("infinite", all_tokens, self._infinite),
            by_policy={policy: tuple(self._policy(policy)) for policy in policies},
        )

    @cached_property
    def _replay(self) -> PolicyReplay:
        return PolicyReplay(self._prompts)

    def _policy(self, policy: str) -> Iterator[HitRate]:
        for size, hits in zip(self._sizes, self._hits(policy), strict=True):
            yield self._rate(policy, size, hits)

    def _hits(self, policy: str) -> list[int]:
        prompts, skip = self._prompts, self._skip
        sizes = [size // prompts.block_tokens for size in self._sizes]
        if policy == LRU:
            return lru_hits(prompts, sizes, self._teller(LRU), first_counted=skip)
        if policy == OPTIMUM:
            future = Optimum(prompts)
            return [
                future.hits(size, self._teller(f"{policy}, {size:,} blocks"), first_counted=skip)
                for size in sizes
            ]
        replay = self._replay
        return [
            replay.hits(
                size, policy, self._teller(f"{policy}, {size:,} blocks"), first_counted=skip
            )
            for size in sizes
        ]

    def _rate(self, policy: str, cache_tokens: int, hit_tokens: int) -> HitRate:
        num_blocks = cache_tokens // self._prompts.block_tokens
        return HitRate(
            policy=policy,
            cache_tokens=cache_tokens,
            prompt_tokens=self._tokens,
            hit_tokens=hit_tokens,
            cold_tokens=self._tokens - self._infinite - self._partial,
            partial_tokens=self._partial,
            num_refused=sum(count > num_blocks for count in self._counted),
        )

    def _teller(self, what: str) -> OnRequest:
        count = self._prompts.num_requests
        return lambda done: self._on_work(what, done, count)
