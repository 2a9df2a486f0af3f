"""``EvictedNames``: what a tier has evicted of late, and when each of it was used last.

A record that comes back soon after it went is one that is used, so names that went are remembered
for a while: a tag of 16 bits, and a moment of 8 bits on a clock of the tier's own.

Source: the power of two choices (Mitzenmacher, 2001).
"""

from typing import final

import numpy as np

from quire.tiers.tier import Name
from quire.units import ceil_div

MOMENTS = 256  # that are told apart; a clock goes round

_GHOSTS = 3  # names that are remembered for one that is kept
_WAYS = 32  # tags of a bucket


@final
class EvictedNames:
    """Names that went, as tags in buckets, of which each forgets its oldest tag for a new one.

    A name has two buckets and goes to the one that was given fewer, so that all are given as many.
    Then the blocks of a chain, which went together, are forgotten together: were each forgotten by
    chance, some block of most chains would be.
    """

    def __init__(self, num_records: int) -> None:
        """``num_records``: how many the tier keeps at once, about."""
        self._num_buckets = ceil_div(max(1, _GHOSTS * num_records), _WAYS)
        # Of each bucket, the last one first.
        self._tags = np.zeros(self._num_buckets * _WAYS, np.uint16).data
        self._moments = np.zeros(self._num_buckets * _WAYS, np.uint8).data
        self._given = np.zeros(self._num_buckets, np.uint32).data  # modulo 2³²

    def add(self, name: Name, moment: int = 0) -> None:
        """Remember a name, and when it was used last."""
        one, other = self._buckets(name)
        # Which was given fewer, also where one count has begun anew.
        number = other if (self._given[one] - self._given[other]) & 2**31 == 0 else one
        self._given[number] = (self._given[number] + 1) & (2**32 - 1)
        first = number * _WAYS
        end = first + _WAYS
        for each in (self._tags, self._moments):
            each[first + 1 : end] = each[first : end - 1]
        self._tags[first], self._moments[first] = _tag(name), moment % MOMENTS

    def take(self, name: Name) -> int | None:
        """Forget a name. Return the moment that came with it; None: it was not remembered."""
        tag = _tag(name)
        for number in self._buckets(name):
            first = number * _WAYS
            end = first + _WAYS
            tags = self._tags[first:end].tolist()
            if tag in tags:
                at = first + tags.index(tag)
                moment = self._moments[at]
                for each in (self._tags, self._moments):
                    each[at : end - 1] = each[at + 1 : end]
                    each[end - 1] = 0
                return moment
        return None

    def _buckets(self, name: Name) -> tuple[int, int]:
        one, other = int.from_bytes(name[:4], "little"), int.from_bytes(name[4:8], "little")
        return one % self._num_buckets, other % self._num_buckets


def _tag(name: Name) -> int:
    return int.from_bytes(name[8:10], "little") or 1  # 0: there is none
