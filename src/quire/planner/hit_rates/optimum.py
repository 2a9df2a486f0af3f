"""The best that any order of eviction could find, knowing the future: Belady's, on prefixes.

When a prompt comes, what is cached of its beginning is found and held; room is made for the rest;
all of it is cached then, as it must be for it to be computed. Of all other blocks those go first
whose next use is farthest, or never comes; of equal ones the deepest. A block is used whenever its
child is, so its next use is never later, and what is cached stays closed under prefixes.

This is the optimum of caches that must hold every prompt that comes. One that could turn blocks
away (compute them elsewhere) finds a little more in small caches.

Source: Belady 1966.
"""

from array import array
from collections import deque
from heapq import heappop, heappush
from typing import final

from quire.planner.hit_rates.prefix_tree import TELL_EVERY, OnRequest, Prompts


@final
class Optimum:
    """What is to come of a trace's prompts; then ``hits`` for a size of cache."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._paths = [array("i", prompts.path(now)) for now in range(prompts.num_requests)]
        following = [prompts.num_requests] * len(prompts.lengths)
        self._next_uses = [array("i") for _ in self._paths]
        for now in range(prompts.num_requests - 1, -1, -1):
            path = self._paths[now]
            self._next_uses[now] = array("i", [following[each] for each in path])
            for each in path:
                following[each] = now

    def hits(
        self,
        num_blocks: int,
        on_request: OnRequest = lambda _: None,
        *,
        first_counted: int = 0,
    ) -> int:
        """Tokens found from request ``first_counted`` on; a larger prompt is refused."""
        prompts, lengths = self._prompts, self._prompts.lengths
        cached = [0] * len(lengths)  # blocks of each stretch, from its first on
        kept = _ByNextUse(cached)
        num_cached = hit_tokens = 0
        for now, (path, next_uses) in enumerate(zip(self._paths, self._next_uses, strict=True)):
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


@final
class _ByNextUse:
    """Cached stretches by their next use.

    Those that are next used by one request lie on its path, and come in here the deepest first: it
    was used last no later than what is above it. So the first that came in is the first to go.
    """

    def __init__(self, cached: list[int]) -> None:
        self._cached = cached
        self._stretches: dict[int, deque[int]] = {}
        self._latest: list[int] = []  # a heap of negated next uses

    def come(self, now: int) -> None:
        """What is next used now is held."""
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
