"""Percentiles of a stream in bounded memory, each within half a percent of a value that was there.

Source: DDSketch (Masson, Rim, Lee 2019), logarithmic buckets, without merging the smallest ones.
"""

from math import ceil, exp, log
from typing import final

ACCURACY = 0.005
_LOG_GAMMA = log((1 + ACCURACY) / (1 - ACCURACY))
_LEAST = 1e-9  # what is smaller counts as 0


@final
class Quantiles:
    """Of values that are not negative."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.max = 0.0
        self._counts: dict[int, int] = {}  # by the logarithm of the upper bound
        self._num_zeros = 0

    def note(self, value: float) -> None:
        self.count += 1
        self.sum += value
        self.max = max(self.max, value)
        if value < _LEAST:
            self._num_zeros += 1
            return
        bucket = ceil(log(value) / _LOG_GAMMA)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def percentile(self, percentile: float) -> float:
        """The value that so many percent of all are not above; 0 of nothing."""
        rank = max(1, ceil(self.count * percentile / 100))
        seen = self._num_zeros
        if rank <= seen or not self.count:
            return 0.0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                upper = exp(bucket * _LOG_GAMMA)
                return min(self.max, upper * (1 - ACCURACY))
        return self.max
