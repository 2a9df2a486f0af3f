"""Caches that hold no blocks, only the fingerprints of a sample of the prefixes.

Such a shadow is smaller than a cache by the same factor by which the sample is smaller than the
traffic, and its hits estimate those of the whole cache, were it to evict in that order. A class
here is an order.

Source: Waldspurger et al. 2017 (miniature simulations).
"""

import heapq
from typing import Protocol

NEVER = -1  # the time of a use that is not known
KEEP_ONE_IN = 32  # prompts whose newcomers are kept where newcomers go first
_REACH = 8  # shadow sizes back that a last use is remembered


class ShadowCache(Protocol):
    """A cache of fingerprints in some order of eviction."""

    def request(self, prints: list[int]) -> int:
        """Use these, shallowest first, and cache them all. Return how many hit."""
        ...


class ByLast:
    """A cache of fingerprints that evicts the least recently used."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._cached: dict[int, None] = {}  # in order of use

    def request(self, prints: list[int]) -> int:
        """Use these, shallowest first, and cache them all. Return how many hit."""
        cached = self._cached
        hits = _num_first(prints, cached)
        for each in reversed(prints):
            cached.pop(each, None)
            cached[each] = None
        for _ in range(len(cached) - self._size):
            del cached[next(iter(cached))]
        return hits


class ByLastButOne:
    """A cache of fingerprints that evicts by the use before the last, and remembers the evicted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._clock = self._serial = 0
        self._last: dict[int, int] = {}  # also of what has been evicted, for a while
        self._entry: dict[int, int] = {}  # what is cached → serial of its valid entry
        self._heap: list[tuple[int, int, int]] = []  # score, serial, fingerprint

    def request(self, prints: list[int]) -> int:
        """Use these, shallowest first, and cache them all. Return how many hit."""
        entry, last_use = self._entry, self._last
        hits = _num_first(prints, entry)
        cached = [each for each in prints if each in entry]
        for each in cached:
            entry[each] = 0  # it stays while room is made for the rest
        self._evict(len(entry) + len(prints) - len(cached) - self._size)
        self._clock += max(1, len(prints) - hits)
        clock, oldest, before = self._clock, self._clock - _REACH * self._size, NEVER
        for each in reversed(prints):
            last = last_use.get(each, NEVER)
            if last > before and (last >= oldest or each in entry):
                before = last
            last_use[each] = clock
            self._serial += 1
            entry[each] = self._serial
            heapq.heappush(self._heap, (before, self._serial, each))
        if len(self._heap) > 4 * self._size + 64:
            self._heap = [item for item in self._heap if entry.get(item[2]) == item[1]]
            heapq.heapify(self._heap)
        if len(last_use) > 2 * _REACH * self._size:
            kept = (item for item in last_use.items() if item[1] >= oldest or item[0] in entry)
            self._last = dict(kept)
        return hits

    def _evict(self, count: int) -> None:
        while count > 0:
            _, serial, each = heapq.heappop(self._heap)
            if self._entry.get(each) == serial:
                del self._entry[each]
                count -= 1


class NewcomersFirst:
    """A cache of fingerprints in which those that were not hit yet go first, the newest first.

    Of one prompt in so many, newcomers count as hit: else what came first would stay for good.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._hit: dict[int, None] = {}  # in order of use
        self._new: dict[int, None] = {}  # in order of coming, the shallowest of a prompt first
        self._num_misses = 0

    def request(self, prints: list[int]) -> int:
        """Use these, shallowest first, and cache them all. Return how many hit."""
        hit, new = self._hit, self._new
        hits = len(prints)
        fresh = []
        for at in range(len(prints) - 1, -1, -1):
            each = prints[at]
            if each in hit:
                del hit[each]
            elif each in new:
                del new[each]
            else:
                fresh.append(each)
                hits = at
                continue
            hit[each] = None
        if not fresh:
            return hits
        excess = len(hit) + len(new) + len(fresh) - self._size
        while excess > 0:
            excess -= 1
            if new:
                new.popitem()
            else:
                del hit[next(iter(hit))]
        self._num_misses += 1
        if self._num_misses % KEEP_ONE_IN:
            new.update(dict.fromkeys(reversed(fresh)))
        else:
            hit.update(dict.fromkeys(fresh))
        return hits


def _num_first(prints: list[int], cached: dict[int, None] | dict[int, int]) -> int:
    """Count the first ones that are cached."""
    for at, each in enumerate(prints):
        if each not in cached:
            return at
    return len(prints)
