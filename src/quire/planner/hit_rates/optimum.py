"""Compute the best hit rate of any eviction order, with knowledge of the future.

A prompt hits its cached prefix, and the cache then holds all of the prompt, which an engine needs
to compute it. To make room it evicts the blocks whose next use is farthest, or never comes; of
equal ones the deepest first. A block is used whenever its child is, so its next use is never later,
and the cached blocks stay closed under prefixes.

This is the optimum for caches that must hold every prompt. A cache that could refuse blocks would
hit a little more at small sizes.

Source: Belady 1966.
"""

from array import array
from collections import deque
from heapq import heappop, heappush
from typing import final

from quire.planner.hit_rates.prefix_tree import TELL_EVERY, OnRequest, Prompts


@final
class Optimum:
    """The prompts of a trace; ``hits`` counts hits in a cache of one size."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._paths = [array("i", prompts.path(now)) for now in range(prompts.num_requests)]

    def hits(
        self,
        num_blocks: int,
        on_request: OnRequest = lambda _: None,
        *,
        first_counted: int = 0,
    ) -> int:
        """Count hit tokens from request ``first_counted`` on; the cache refuses larger prompts."""
        prompts, lengths = self._prompts, self._prompts.lengths
        cached = [0] * len(lengths)  # blocks of each stretch, from its first on
        kept = _ByNextUse(cached)
        num_cached = hit_tokens = 0
        paths = zip(self._paths, self._next_uses(num_blocks), strict=True)
        for now, (path, next_uses) in enumerate(paths):
            num_hit = total = 0
            goes_on = True
            for each in path:
                length = lengths[each]
                total += length
                if goes_on:
                    num_hit += cached[each]
                    goes_on = cached[each] == length
            if total > num_blocks:
                continue
            if now >= first_counted:
                hit_tokens += prompts.tokens_of(now, num_hit)
            kept.come(now)
            excess = num_cached + total - num_hit - num_blocks
            if excess > 0:
                kept.evict(excess)
                num_cached -= excess
            num_cached += total - num_hit
            for each in path:
                cached[each] = lengths[each]
            kept.add(path, next_uses)
            if now % TELL_EVERY == 0:
                on_request(now)
        assert num_cached == sum(cached) <= num_blocks
        return hit_tokens

    def _next_uses(self, num_blocks: int) -> list["array[int]"]:
        """Find the next use of each stretch of each prompt, by a prompt that the cache accepts."""
        lengths = self._prompts.lengths
        following = [len(self._paths)] * len(lengths)
        found = [array("i") for _ in self._paths]
        for now in range(len(self._paths) - 1, -1, -1):
            path = self._paths[now]
            if sum([lengths[each] for each in path]) <= num_blocks:
                found[now] = array("i", [following[each] for each in path])
                for each in path:
                    following[each] = now
        return found


@final
class _ByNextUse:
    """Cached stretches by their next use.

    All stretches with one next use are on that request's path. They are added deepest first, so the
    first one added is the first to evict.
    """

    def __init__(self, cached: list[int]) -> None:
        self._cached = cached
        self._stretches: dict[int, deque[int]] = {}
        self._latest: list[int] = []  # a heap of negated next uses

    def come(self, now: int) -> None:
        """Take the stretches that this request uses out of the queue."""
        self._stretches.pop(now, None)

    def add(self, path: "array[int]", next_uses: "array[int]") -> None:
        for each, when in zip(reversed(path), reversed(next_uses), strict=True):
            if when not in self._stretches:
                self._stretches[when] = deque()
                heappush(self._latest, -when)
            self._stretches[when].append(each)

    def evict(self, count: int) -> None:
        cached = self._cached
        while count:
            when = -self._latest[0]
            stretches = self._stretches.get(when)
            if not stretches:
                heappop(self._latest)
                self._stretches.pop(when, None)
                continue
            first = stretches[0]
            taken = min(count, cached[first])
            cached[first] -= taken
            count -= taken
            if not cached[first]:
                stretches.popleft()
