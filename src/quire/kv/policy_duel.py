"""A duel of two eviction orders on miniature caches of a sample of the traffic.

Which of LRU and LRU-2 finds more depends on the traffic and on the size of the cache, so the policy
``choice`` measures both all the time. A shadow cache holds no blocks, only the fingerprints of one
prefix in so many, and is smaller than the cache by the same factor. Its hits estimate those of the
whole cache. The first order keeps its seat in doubt.

benchmarks/accounting/policy_duel.md has the evidence that this pays.

Source: Waldspurger et al. 2017 (miniature simulations).
"""

import heapq

NEVER = -1  # the time of a use that is not known
_SAMPLES = 128  # blocks of a shadow
_HALF_LIFE = 16  # of a won hit, in shadow sizes of use
_MARGIN, _HEAD_START = 1.02, 8.0  # by which the challenger must be ahead
_SHADOW_REACH = 8  # shadow sizes back that a last use is remembered


class PolicyDuel:
    """Least recently used against least recently used but one, for a cache of ``num_blocks``."""

    def __init__(self, num_blocks: int) -> None:
        one_in = 1 << max(0, (num_blocks // _SAMPLES).bit_length() - 1)
        self.mask = one_in - 1  # fingerprints with none of these bits are the sample
        self._size = max(1, num_blocks // one_in)
        self._champion = _ByLast(self._size)
        self._challenger = _ByLastButOne(self._size)
        self._won = [0.0, 0.0]
        self._by_last = True

    def watch(self, prints: list[int]) -> bool:
        """Replay a sequence's use of prefixes, by their sampled fingerprints, shallowest first.

        Returns: whether blocks are now judged by their last use, rather than the one before it.
        """
        if len(prints) > self._size:
            return self._by_last
        decay = 0.5 ** (len(prints) / (_HALF_LIFE * self._size))
        hits = self._champion.request(prints), self._challenger.request(prints)
        self._won = [(won + new) * decay for won, new in zip(self._won, hits, strict=True)]
        champion, challenger = self._won
        if self._by_last:
            self._by_last = challenger <= _MARGIN * champion + _HEAD_START
        else:
            self._by_last = champion > challenger
        return self._by_last


class _ByLast:
    """A cache of fingerprints that evicts the least recently used."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._cached: dict[int, None] = {}  # in order of use

    def request(self, prints: list[int]) -> int:
        """Use these, shallowest first, and cache them all. Return how many hit."""
        cached = self._cached
        hits = next((i for i, each in enumerate(prints) if each not in cached), len(prints))
        for each in reversed(prints):
            cached.pop(each, None)
            cached[each] = None
        for _ in range(len(cached) - self._size):
            del cached[next(iter(cached))]
        return hits


class _ByLastButOne:
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
        hits = next((i for i, each in enumerate(prints) if each not in entry), len(prints))
        cached = [each for each in prints if each in entry]
        for each in cached:
            entry[each] = 0  # it stays while room is made for the rest
        self._evict(len(entry) + len(prints) - len(cached) - self._size)
        self._clock += max(1, len(prints) - hits)
        clock, oldest, before = self._clock, self._clock - _SHADOW_REACH * self._size, NEVER
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
        if len(last_use) > 2 * _SHADOW_REACH * self._size:
            kept = (item for item in last_use.items() if item[1] >= oldest or item[0] in entry)
            self._last = dict(kept)
        return hits

    def _evict(self, count: int) -> None:
        while count > 0:
            _, serial, each = heapq.heappop(self._heap)
            if self._entry.get(each) == serial:
                del self._entry[each]
                count -= 1
