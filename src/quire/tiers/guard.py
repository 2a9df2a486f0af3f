"""``GuardedTier``: a tier as an engine uses it: no error comes out, and none is repeated for long.

That goes for errors which no tier should raise, too: a tier may be of another package, and memory
may run out within any.

A tier that raises errors is left alone for one second, then for two, and so on up to a minute:
loading, storing and forgetting apart. One that answers too late for a caller is not at fault, since
the caller may have had little time: it is left alone when several have waited in vain, for a second
in all. A tier that has given two bad records of a thousand is *suspect*: nothing is loaded from it
until an administrator trusts it again.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, final, get_args

from quire.tiers.record import BadReason, RecordFormat
from quire.tiers.tier import (
    ClearableTier,
    Deadline,
    EvictingTier,
    Name,
    Tier,
    TierError,
    TierTraits,
    TierUsage,
)

log = logging.getLogger(__name__)

TierCall: TypeAlias = Literal["find", "load", "store", "drop", "clear"]
TIER_CALLS: tuple[TierCall, ...] = get_args(TierCall)

_LONGEST_BREAK_S = 60.0
_PATIENCE_S = 1.0  # that callers wait in vain, one after the other, before a tier is at fault
_FADES = 0.95  # of the longest answer, with each call
_SUSPECT_AFTER, _OUT_OF = 2, 1000  # bad records


@final
class Breaker:
    """Says when a tier that failed may be asked again. Threads share it."""

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what  # for the log
        self._lock = threading.Lock()
        self._break_s = 0.0  # 0: closed
        self._open_until_s = 0.0
        self._failing: TierCall | None = None
        self._longest_s: defaultdict[TierCall, float] = defaultdict(float)  # of answers, lately
        self._in_vain_s: defaultdict[TierCall, float] = defaultdict(float)  # since the last answer

    @property
    def is_closed(self) -> bool:
        """Whether the tier may be asked now: it works, or it may be tried again."""
        return not self.left_s

    @property
    def left_s(self) -> float:
        """Return the seconds until it may be asked."""
        return max(0.0, self._open_until_s - time.monotonic()) if self._break_s else 0.0

    @property
    def is_broken(self) -> bool:
        """Whether the last call failed."""
        return self._break_s > 0

    def note_failure(self, call: TierCall, error: Exception) -> None:
        """Leave the tier alone for a while; twice as long as the last time."""
        with self._lock:
            is_first = not self._break_s
            self._break_s = min(_LONGEST_BREAK_S, max(1.0, 2 * self._break_s))
            self._open_until_s = time.monotonic() + self._break_s
            self._in_vain_s[call] = 0.0
            if self._failing != "load":
                self._failing = call
        if is_first:
            log.warning(
                "tier %s: %s fails, and goes on without it: %s", *self._words, told_of(error)
            )

    def note_late(self, call: TierCall, waited_s: float, error: Exception) -> None:
        """Note a call that took its caller's time to the end, which were so many seconds.

        That is no fault of a tier which has needed more lately, and answered.
        """
        with self._lock:
            longest_s = self._longest_s[call]
            self._longest_s[call] *= _FADES
            if waited_s < longest_s:
                return
            self._in_vain_s[call] += waited_s
            if self._in_vain_s[call] < _PATIENCE_S:
                return
        self.note_failure(call, error)

    def note_success(self, call: TierCall, took_s: float) -> None:
        """Let the tier be asked as ever: it has answered, after so many seconds.

        That records are found says nothing of bytes that do not come, for a minute.
        """
        with self._lock:
            self._longest_s[call] = max(took_s, _FADES * self._longest_s[call])
            self._in_vain_s[call] = 0.0
            may_fail = call == "find" and self._failing == "load"
            if not self._break_s or (may_fail and self._is_young):
                return
            self._break_s, self._failing = 0.0, None
        log.warning("tier %s: %s works again", *self._words)

    @property
    def _is_young(self) -> bool:
        return time.monotonic() < self._open_until_s + _LONGEST_BREAK_S

    @property
    def _words(self) -> tuple[str, str]:
        return self._name, self._what


@dataclass(slots=True)
class TierCounts:
    """What a tier has done since the start."""

    num_loaded: int = 0  # records that were good
    loaded_bytes: int = 0
    load_s: float = 0.0
    num_stored: int = 0
    stored_bytes: int = 0
    store_s: float = 0.0
    num_stores_dropped: int = 0  # records that a full, slow or broken tier did not take
    num_errors: Counter[TierCall] = field(default_factory=Counter)
    num_bad: Counter[BadReason] = field(default_factory=Counter)


@final
class GuardedTier:
    """A tier, its name in logs and metrics, and the format of the records that it keeps."""

    def __init__(
        self,
        name: str,
        tier: Tier,
        formats: Sequence[RecordFormat],  # of each group
        *,
        is_sealed: bool = False,
    ) -> None:
        self.name, self.formats, self.is_sealed = name, tuple(formats), is_sealed
        self.counts = TierCounts()
        self.is_suspect = False
        self._is_stale = False  # it was to forget all its records, and may have some
        self._tier = tier
        self._usage = self._usage_now()
        self._reads, self._writes = Breaker(name, "loading"), Breaker(name, "storing")
        self._drops = Breaker(name, "forgetting")
        self._lock = threading.Lock()
        self._recent: list[int] = []  # bad records, as numbers of records so far
        self._num_checked = 0

    @property
    def traits(self) -> TierTraits:
        """Return what kind of tier this is."""
        return self._tier.traits

    @property
    def may_load(self) -> bool:
        """Whether the tier may be asked for records now."""
        return not (self.is_suspect or self._is_stale) and self._reads.is_closed

    @property
    def may_store(self) -> bool:
        """Whether the tier may be given records now."""
        return self._writes.is_closed

    @property
    def may_forget(self) -> bool:
        """Whether the tier may be asked to forget records now."""
        return self._drops.is_closed

    @property
    def forgets_in_s(self) -> float:
        """Return the seconds until then."""
        return self._drops.left_s

    @property
    def state(self) -> Literal["ok", "suspect", "broken"]:
        """Return the tier's state, as a metric shows it."""
        if self.is_suspect or self._is_stale:
            return "suspect"
        return "broken" if self._reads.is_broken or self._writes.is_broken else "ok"

    def suspect(self, reason: str) -> None:
        """Load nothing from the tier until an administrator has looked at it."""
        self.is_suspect = True
        log.error(
            "tier %s: nothing is loaded from it until it is trusted again (POST /tiers/trust): %s",
            self.name,
            reason,
        )

    def trust(self) -> None:
        """Load from the tier again, after an administrator has looked at it."""
        with self._lock:
            self.is_suspect = self._is_stale = False
            self._recent.clear()

    def counted(self) -> TierCounts:
        """Return a copy of the counts, which threads of the carrier go on writing."""
        with self._lock:
            counts = self.counts
            errors, bad = Counter(counts.num_errors), Counter(counts.num_bad)
            return replace(counts, num_errors=errors, num_bad=bad)

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        """Count how many of these records, from the first one on, are probably there."""
        if not (names and self.may_load and deadline.left_s):
            return 0
        return self._ask(
            "find", lambda: self._tier.find(names, deadline), names, deadline, self._reads
        )

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        """Fill the first of these buffers. Return how many; they are still to be checked."""
        if not (names and self.may_load and deadline.left_s):
            return 0
        begun_s = time.monotonic()
        count = self._ask(
            "load", lambda: self._tier.load(names, into, deadline), names, deadline, self._reads
        )
        with self._lock:
            self.counts.load_s += time.monotonic() - begun_s
        return count

    def has_another_length(self, name: Name, into: memoryview, deadline: Deadline) -> bool:
        """Tell whether a record is there that does not fit its buffer: no call ever loads it.

        It is asked for by itself: a call for several may end before it for other reasons.
        """
        return not self.load([name], [into], deadline) and self.find([name], deadline) == 1

    def note_good(self, num_bytes: int) -> None:
        """Count a record that has passed its checks."""
        with self._lock:
            self._num_checked += 1
            self.counts.num_loaded += 1
            self.counts.loaded_bytes += num_bytes

    def note_bad(self, name: Name, reason: BadReason) -> None:
        """Count a record that has not, and have the tier forget it."""
        with self._lock:
            self._num_checked += 1
            self.counts.num_bad[reason] += 1
            self._recent = [n for n in self._recent if n > self._num_checked - _OUT_OF]
            self._recent.append(self._num_checked)
            suspect = len(self._recent) >= _SUSPECT_AFTER and not self.is_suspect
            self.is_suspect |= suspect
        log.warning(
            "tier %s: a record is not what was stored (%s): it is dropped", self.name, reason
        )
        if suspect:
            self.suspect(f"it has given {len(self._recent)} bad records")
        self.drop([name], Deadline.after(1.0))

    def note_failed(
        self, call: TierCall, error: TierError, begun_s: float, deadline: Deadline
    ) -> None:
        """Note that a question has failed which was put to what is behind the tier.

        ``begun_s``: when, on the clock ``time.monotonic``.
        """
        self._failed(call, error, self._reads, begun_s, deadline)

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        """Give the tier these records. Return how many it keeps."""
        if not names:
            return 0
        begun_s, count = time.monotonic(), 0
        if self.may_store:
            count = self._ask(
                "store",
                lambda: self._tier.store(names, records, deadline),
                names,
                deadline,
                self._writes,
            )
        with self._lock:
            self.counts.store_s += time.monotonic() - begun_s
            self.counts.num_stored += count
            self.counts.stored_bytes += sum(len(record) for record in records[:count])
            self.counts.num_stores_dropped += len(names) - count
        self._usage = self._usage_now()
        return count

    def drop(self, names: Sequence[Name], deadline: Deadline) -> bool:
        """Have the tier forget these records. Return whether it has."""
        begun_s = time.monotonic()
        try:
            self._tier.drop(names, deadline)
        except Exception as error:
            self._failed("drop", error, self._drops, begun_s, deadline)
            return False
        self._drops.note_success("drop", time.monotonic() - begun_s)
        self._usage = self._usage_now()
        return True

    @property
    def may_clear(self) -> bool:
        """Whether the tier can find all records of its namespace, to forget them."""
        return isinstance(self._tier, ClearableTier)

    def clear(self, deadline: Deadline) -> str | None:
        """Have the tier forget all records of its namespace. Return why it has not, or None.

        One that has not is suspect: what was to be forgotten may be found there.
        """
        assert isinstance(self._tier, ClearableTier)
        self._is_stale, begun_s = True, time.monotonic()
        try:
            self._tier.clear(deadline)
        except Exception as error:
            self._failed("clear", error, self._drops, begun_s, deadline)
            self._is_stale = True  # also where it was trusted meanwhile
            return told_of(error)
        self._drops.note_success("clear", time.monotonic() - begun_s)
        self._is_stale = False
        self._usage = self._usage_now()
        return None

    @property
    def tells_evictions(self) -> bool:
        """Whether ``take_evicted`` has all that the tier evicts."""
        return isinstance(self._tier, EvictingTier)

    def take_evicted(self) -> list[Name]:
        """Return the records that the tier has evicted since the last call, if it tells them."""
        if not isinstance(self._tier, EvictingTier):
            return []
        try:
            return self._tier.take_evicted()
        except Exception as error:  # of a tier of another package
            self._show(error)
            return []

    def usage(self) -> TierUsage:
        """Return what the tier held after the last store or drop, without asking it."""
        return self._usage

    def close(self) -> None:
        """Give back what this process holds of the tier."""
        try:
            self._tier.close()
        except Exception as error:
            self._show(error)
            log.warning("tier %s: %s", self.name, told_of(error))
        if not self.traits.outlives_process:
            self._usage = replace(self._usage, num_records=0, used_bytes=0)

    def _usage_now(self) -> TierUsage:
        try:
            return self._tier.usage()
        except Exception:  # of a tier of another package: what it holds is not known
            log.debug("tier %s does not say what it holds", self.name, exc_info=True)
            return TierUsage()

    def _ask(
        self,
        call: TierCall,
        count: Callable[[], int],
        names: Sequence[Name],
        deadline: Deadline,
        breaker: Breaker,
    ) -> int:
        """Return what a tier counts of these records, and no more; 0 where it fails."""
        begun_s = time.monotonic()
        try:
            counted = max(0, min(count(), len(names)))
        except Exception as error:
            self._failed(call, error, breaker, begun_s, deadline)
            return 0
        breaker.note_success(call, time.monotonic() - begun_s)
        return counted

    def _failed(
        self,
        call: TierCall,
        error: Exception,
        breaker: Breaker,
        begun_s: float,
        deadline: Deadline,
    ) -> None:
        with self._lock:
            self.counts.num_errors[call] += 1
        self._show(error)
        if isinstance(error, TierError) and not deadline.left_s:
            breaker.note_late(call, time.monotonic() - begun_s, error)
        else:
            breaker.note_failure(call, error)

    def _show(self, error: Exception) -> None:
        """Show where an error is from that no tier should raise."""
        if not isinstance(error, TierError):
            log.error("tier %s raised what no tier should", self.name, exc_info=error)


def told_of(error: Exception) -> str:
    """Return an error's words, or its kind where it has none."""
    return str(error) or type(error).__name__
