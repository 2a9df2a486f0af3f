"""``UseOrder``: which record goes first, by its last use or by the one before it.

Most records are stored and never asked for, so an order by last use lets them push out those that
are. By *the use before the last*, records that were used once go first, however late that was, and
those whose last two uses lie far back go next. Where what came last comes back soonest, the last
use alone is the better judge. Which it is depends on the traffic and on the size: both are tried on
a sample of the names all the time, as the pool does (``kv.policy_duel``), and the better one says
how a record is judged from then on. benchmarks/tiers has what this finds of recorded traffic.

A record that comes back soon after it went was used before, so names that went are remembered with
their last use (``evicted_names``).

Time is counted in *turns*: a turn is over when a part of all room was filled anew, and some seconds
have gone by. Records of one turn are in one list, from which the latest goes first: a chain of
blocks is moved from its first block on, and its last blocks are no use without its first ones. So
a record costs two links and its last turn, and there is nothing to sort.

Source: LRU-2 (O'Neil, O'Neil and Weikum, 1993); miniature simulations (Waldspurger et al., 2017).
"""

from collections.abc import Callable, Container
from typing import final

import numpy as np

from quire.kv.policy_duel import PolicyDuel
from quire.tiers.evicted_names import MOMENTS, EvictedNames
from quire.tiers.tier import Name

TURN_S = 4.0  # at least

_TURNS_A_FILL = 32  # in which all room is filled anew
_ONCE, _AGAIN = 0, 1  # which records a ring of lists has: used once, as far as is known, or again


@final
class UseOrder:
    """The order of numbered records that a tier keeps, and the names of those that went."""

    def __init__(
        self, num_units: int, most_records: int, weight: Callable[[int], int], *, expected: int
    ) -> None:
        """``num_units``: of room. ``most_records``: their numbers are below it.

        ``weight``: of a record, in units, as long as it is in. ``expected``: how many records are
        kept at once, about.
        """
        self.total_weight = 0  # of all records
        self._weight = weight
        self._turn_weight = num_units // _TURNS_A_FILL  # that a turn enters, at least
        self._evicted = EvictedNames(expected)
        self._duel, self._by_last = PolicyDuel(max(1, expected)), True
        # Behind the records' numbers are the ends of lists. Pages that no record needs are never
        # backed.
        self._first_end = most_records
        self._next = np.empty(most_records + 2 * MOMENTS, np.int32).data
        self._before = np.empty(most_records + 2 * MOMENTS, np.int32).data
        for end in range(most_records, most_records + 2 * MOMENTS):
            self._next[end] = self._before[end] = end
        self._last = np.empty(most_records, np.uint8).data  # the turn of the last use
        self._turn, self._turn_end_s, self._entered = 0, 0.0, 0
        self._oldest = [0, 0]  # turns before which a ring's lists are empty

    def add(self, record: int, name: Name, now_s: float) -> None:
        """Enter a record."""
        self._watch(name)
        self._pass_time(now_s)
        moment = self._evicted.take(name)
        weight = self._weight(record)
        self.total_weight += weight
        self._entered += weight
        self._insert(record, None if moment is None else self._turn_of(moment))

    def use(self, record: int, name: Name, now_s: float) -> None:
        """Note that a record was asked for."""
        self._watch(name)
        self._pass_time(now_s)
        before = self._turn_of(self._last[record])
        self._unlink(record)
        self._insert(record, before)

    def remove(self, record: int) -> None:
        """Take a record out."""
        self.total_weight -= self._weight(record)
        self._unlink(record)

    def evict(self, record: int, name: Name) -> None:
        """Take a record out for others, and remember it."""
        self._evicted.add(name, self._last[record])
        self.remove(record)

    def oldest(self, kept: Container[int]) -> int | None:
        """Return the record to go next that is none of ``kept``; None if there is none."""
        at = [self._skip_empty(ring) for ring in (_ONCE, _AGAIN)]
        while True:
            left = [ring for ring in (_ONCE, _AGAIN) if at[ring] <= self._turn]
            if not left:
                return None
            # In doubt one goes that was used once.
            ring = min(left, key=at.__getitem__) if self._by_last else left[0]
            end = self._end(ring, at[ring])
            record = self._next[end]
            while record != end and record in kept:
                record = self._next[record]
            if record != end:
                return record
            at[ring] += 1

    # -- turns -------------------------------------------------------------------------------------

    def _pass_time(self, now_s: float) -> None:
        """Begin a turn, if it is time. Its seconds count from its first new record on."""
        if not self._entered:
            self._turn_end_s = now_s + TURN_S
            return
        if self._entered < self._turn_weight or now_s < self._turn_end_s:
            return
        self._turn, self._turn_end_s, self._entered = self._turn + 1, now_s + TURN_S, 0
        oldest = self._turn - MOMENTS + 1
        for ring in (_ONCE, _AGAIN):
            if self._oldest[ring] < oldest:  # what is older still counts as of the oldest turn
                self._append(self._end(ring, self._turn), self._end(ring, oldest))
                self._oldest[ring] = oldest

    def _turn_of(self, moment: int) -> int:
        """Return the last turn that a moment may stand for."""
        return self._turn - (self._turn - moment) % MOMENTS

    def _append(self, end: int, to: int) -> None:
        """Move one list behind another one, where what it has goes first."""
        first, last = self._next[end], self._before[end]
        if first == end:
            return
        after = self._next[to]
        self._next[to], self._before[first] = first, to
        self._next[last], self._before[after] = after, last
        self._next[end] = self._before[end] = end

    # -- lists -------------------------------------------------------------------------------------

    def _insert(self, record: int, before: int | None) -> None:
        """Enter a record that is used now, and was used before in that turn, if in any."""
        self._last[record] = self._turn % MOMENTS
        ring = _ONCE if before is None else _AGAIN
        turn = self._turn if before is None or self._by_last else before
        self._oldest[ring] = min(self._oldest[ring], turn)
        end = self._end(ring, turn)
        after = self._next[end]
        self._next[end] = self._before[after] = record
        self._before[record], self._next[record] = end, after

    def _unlink(self, record: int) -> None:
        before, after = self._before[record], self._next[record]
        self._next[before], self._before[after] = after, before

    def _end(self, ring: int, turn: int) -> int:
        return self._first_end + ring * MOMENTS + turn % MOMENTS

    def _skip_empty(self, ring: int) -> int:
        turn = self._oldest[ring]
        while turn <= self._turn and self._next[end := self._end(ring, turn)] == end:
            turn += 1
        self._oldest[ring] = turn
        return turn

    # -- which use counts --------------------------------------------------------------------------

    def _watch(self, name: Name) -> None:
        """Let both orders see a name, if it is in the sample, and follow the better one."""
        fingerprint = int.from_bytes(name[12:16], "little")  # which no bucket and no tag depends on
        if not fingerprint & self._duel.mask:
            self._by_last = self._duel.watch([fingerprint])
