"""A duel of two eviction orders on miniature caches of a sample of the traffic.

Which of LRU and LRU-2 finds more depends on the traffic and on the size of the cache, so both are
measured all the time (``shadow_caches``). The first order keeps its seat in doubt.

A pool of blocks knows more than a sample, and has its own: ``order_trials``.
"""

from quire.kv.shadow_caches import ByLast, ByLastButOne

_SAMPLES = 128  # blocks of a shadow
HALF_LIFE = 16  # of a won hit, in shadow sizes of use
_MARGIN, _HEAD_START = 1.02, 8.0  # by which the challenger must be ahead


class PolicyDuel:
    """Least recently used against least recently used but one, for a cache of ``num_blocks``."""

    def __init__(self, num_blocks: int) -> None:
        one_in, self._size = sample_of(num_blocks)
        self.mask = one_in - 1  # fingerprints with none of these bits are the sample
        self._champion = ByLast(self._size)
        self._challenger = ByLastButOne(self._size)
        self._won = [0.0, 0.0]
        self._by_last = True

    def watch(self, prints: list[int]) -> bool:
        """Replay a sequence's use of prefixes, by their sampled fingerprints, shallowest first.

        Returns: whether blocks are now judged by their last use, rather than the one before it.
        """
        if len(prints) > self._size:
            return self._by_last
        decay = 0.5 ** (len(prints) / (HALF_LIFE * self._size))
        hits = self._champion.request(prints), self._challenger.request(prints)
        self._won = [(won + new) * decay for won, new in zip(self._won, hits, strict=True)]
        champion, challenger = self._won
        if self._by_last:
            self._by_last = challenger <= _MARGIN * champion + _HEAD_START
        else:
            self._by_last = champion > challenger
        return self._by_last


def sample_of(num_blocks: int) -> tuple[int, int]:
    """Return for how many prefixes one of the sample stands (2ⁿ), and the size of a shadow."""
    one_in = 1 << max(0, (num_blocks // _SAMPLES).bit_length() - 1)
    return one_in, max(1, num_blocks // one_in)
