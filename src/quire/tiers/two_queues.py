"""Which record goes first: one that was never used since it came, before one that was.

Most records are stored and never asked for, so a single queue by last use lets them push out those
that are. Records wait in one of two queues: *new* until they are used, *used* from then on. The
older of the new ones go while new ones hold more than their share; else the least recently used
one goes. A record that comes back soon after it went was used, so names that went are remembered
for a while as tags of 16 bits.

How large the share is best depends on the traffic and on the size: half where what came last comes
back soonest, next to nothing where most records are never asked for again. So two orders are
tried on a sample of the names all the time, as the pool does (``kv.policy_duel``), and the better
one decides. benchmarks/tiers has what this finds of traffic that was recorded.

Within a round of some seconds, what comes later counts as older: a chain of blocks is moved from
its first block on, and its last blocks are no use without its first ones.

Source: 2Q (Johnson and Shasha, 1994); S3-FIFO (Yang et al., 2023); miniature simulations
(Waldspurger et al., 2017).
"""

from collections.abc import Callable, Container
from typing import final

import numpy as np

from quire.kv.policy_duel import PolicyDuel
from quire.tiers.tier import Name

NEW_SHARE = 0.5  # of the bytes, which new records keep from those that were used …
SCARCE_SHARE = 0.02  # … where a record that was used is worth more than any new one
ROUND_S = 4.0

_GHOSTS = 2  # names that are remembered for one that is kept
_WAYS = 16  # tags of a bucket
_NEW, _USED = 0, 1
_NONE = -1


@final
class EvictedNames:
    """Names that went, as tags in the bucket that a name has, the last one first.

    A bucket forgets its oldest tag, so that the blocks of a chain, which went together, are
    forgotten together: were each forgotten by chance, some block of most chains would be.
    """

    def __init__(self, num_records: int) -> None:
        """``num_records``: how many the tier keeps at once, about."""
        num_buckets = 1 << max(1, (_GHOSTS * num_records // _WAYS - 1).bit_length())
        self._mask = num_buckets - 1
        self._tags = np.zeros(num_buckets * _WAYS, np.uint16).data

    def add(self, name: Name) -> None:
        """Remember a name."""
        tags, first = self._tags, self._bucket(name)
        tags[first + 1 : first + _WAYS] = tags[first : first + _WAYS - 1]
        tags[first] = _tag(name)

    def take(self, name: Name) -> bool:
        """Return whether the name is remembered, and forget it."""
        tags, first = self._tags, self._bucket(name)
        last = first + _WAYS - 1
        try:
            at = first + tags[first : last + 1].tolist().index(_tag(name))
        except ValueError:
            return False
        tags[at:last] = tags[at + 1 : last + 1]
        tags[last] = 0
        return True

    def _bucket(self, name: Name) -> int:
        return (int.from_bytes(name[:8], "little") & self._mask) * _WAYS


def _tag(name: Name) -> int:
    return int.from_bytes(name[8:10], "little") | 1  # 0: there is none


@final
class TwoQueues:
    """The order of numbered records, each in a queue."""

    def __init__(self, most_records: int, weight: Callable[[int], int], *, expected: int) -> None:
        """``most_records``: their numbers are below it. ``weight``: of a record, as it is in.

        ``expected``: how many are kept at once, about.
        """
        self._weight = weight
        self._duel = PolicyDuel(max(1, expected))
        self._new_share = NEW_SHARE
        # Two more are the queues' ends. Pages that no record needs are never backed.
        self._new_end = most_records
        self._next = np.empty(most_records + 2, np.int32).data
        self._before = np.empty(most_records + 2, np.int32).data
        self._queue = np.empty(most_records, np.uint8).data
        self._weights = [0, 0]
        self._round_end_s = [0.0, 0.0]
        self._anchors = [most_records, most_records + 1]  # a round's records follow
        for end in self._anchors:
            self._next[end] = self._before[end] = end

    @property
    def total_weight(self) -> int:
        """Return what all records weigh."""
        return sum(self._weights)

    def add(self, record: int, name: Name, now_s: float, *, was_used: bool) -> None:
        """Enter a record, which came back if ``was_used``."""
        self._watch(name)
        self._insert(record, _USED if was_used else _NEW, now_s)

    def use(self, record: int, name: Name, now_s: float) -> None:
        """Note that a record was asked for."""
        self._watch(name)
        self.remove(record)
        self._insert(record, _USED, now_s)

    def remove(self, record: int) -> None:
        """Take a record out."""
        before, after = self._before[record], self._next[record]
        self._next[before], self._before[after] = after, before
        queue = self._queue[record]
        self._weights[queue] -= self._weight(record)
        if self._anchors[queue] == record:
            self._anchors[queue] = before

    def oldest(self, kept: Container[int]) -> int | None:
        """Return the record to go next that is none of ``kept``; None if there is none."""
        first = _NEW if self._weights[_NEW] > self._new_share * self.total_weight else _USED
        for queue in (first, 1 - first):
            end = self._new_end + queue
            record = self._next[end]
            while record != end and record in kept:
                record = self._next[record]
            if record != end:
                return record
        return None

    def _watch(self, name: Name) -> None:
        """Let both orders see a name, if it is in the sample, and take the share of the better."""
        fingerprint = int.from_bytes(name[10:14], "little")  # which no bucket and no tag depends on
        if not fingerprint & self._duel.mask:
            by_last = self._duel.watch([fingerprint])
            self._new_share = NEW_SHARE if by_last else SCARCE_SHARE

    def _insert(self, record: int, queue: int, now_s: float) -> None:
        if now_s >= self._round_end_s[queue]:
            self._round_end_s[queue] = now_s + ROUND_S
            self._anchors[queue] = self._before[self._new_end + queue]
        before = self._anchors[queue]
        after = self._next[before]
        self._next[before] = self._before[after] = record
        self._before[record], self._next[record] = before, after
        self._queue[record] = queue
        self._weights[queue] += self._weight(record)
