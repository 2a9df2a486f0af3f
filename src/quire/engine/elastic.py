"""The cache's ceiling, moved as the machine's memory comes and goes.

How far, is the governor's decision. What goes for it, goes in order: pages that nobody needs and
blocks that are only cached; then newcomers find no room; then running sequences are preempted, the
youngest first. The oldest keeps what it has and gets what it needs (``Scheduler``).

The machine is looked at between two steps by whoever steps, and while nobody does by a thread.
"""

import logging
import math
import threading
import weakref
from dataclasses import dataclass

from quire.engine.cache_lock import CacheLock
from quire.engine.kv_cache import KVCache
from quire.engine.scheduler import Scheduler
from quire.errors import MemoryUnavailable
from quire.memory.governor import Decision, Governor, Reading
from quire.memory.machine.readings import Gauge, MemoryReading
from quire.memory.residency import Resident

log = logging.getLogger(__name__)

_INTERVAL_S = 0.2
_RETRY_S = 5.0  # where the system did not say how much memory there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """Where the ceiling is, and what moving it has cost so far."""

    capacity_bytes: int
    ceiling_bytes: int
    num_shrinks: int  # times that something was given back
    returned_bytes: int  # in them
    num_preemptions: int  # of running sequences, for the machine's or an operator's sake
    reason: str  # of the last decision
    memory: MemoryReading | None  # where the cache lies, as it was last looked at


class Elastic:
    """Of one engine. ``lock`` is held during a step, and while anybody else uses the cache."""

    def __init__(
        self,
        kv: KVCache,
        resident: Resident,
        scheduler: Scheduler,
        governor: Governor,
        gauge: Gauge,
        lock: CacheLock,
    ) -> None:
        self.lock = lock
        self._resident = resident
        self._kv, self._scheduler = kv, scheduler
        self._governor, self._gauge = governor, gauge
        self._due_s = -math.inf  # when to look at the machine next
        self._is_silent = False  # the machine, when it was last looked at
        self._busy_s = gauge.now_s()  # when there was something to do
        self._asked_bytes: int | None = None  # by an operator, and not done yet
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_shrinks = self._returned_bytes = self._num_preemptions = 0
        self._reason = ""
        self._memory: MemoryReading | None = None

    @property
    def state(self) -> Elasticity:
        return Elasticity(
            capacity_bytes=self._kv.accounting.ceiling.capacity_bytes,
            ceiling_bytes=self._kv.accounting.ceiling.now_bytes,
            num_shrinks=self._num_shrinks,
            returned_bytes=self._returned_bytes,
            num_preemptions=self._num_preemptions,
            reason=self._reason,
            memory=self._memory,
        )

    def settle(self) -> None:
        """Between two steps: do what an operator asked for, and look at the machine if it is due.

        Raises nothing: while the system does not say how much memory there is, nothing is moved.
        """
        now_s = self._gauge.now_s()
        if self._scheduler.has_unfinished:
            self._busy_s = now_s
        self._obey()
        if now_s < self._due_s or self._stop.is_set():
            return
        self._due_s = now_s + _INTERVAL_S
        memory = self._read()
        if memory is None:
            self._due_s = now_s + _RETRY_S
            return
        self._memory = memory
        taken = self._carried_out_bytes()
        reading = Reading(
            now_s=now_s,
            total_bytes=memory.total_bytes,
            available_bytes=memory.available_bytes,
            stalled_s=memory.stalled_s,
            capacity_bytes=self._kv.accounting.ceiling.capacity_bytes,
            ceiling_bytes=self._kv.accounting.ceiling.now_bytes,
            committed_bytes=taken,
            idle_s=now_s - self._busy_s,
        )
        self._carry_out(self._governor.decide(reading), taken)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity itself: now, or before the next step if one is under way."""
        self._asked_bytes = capacity_bytes
        while self._asked_bytes is not None:  # whoever steps may be quicker
            if self.lock.acquire(timeout=0.05):
                try:
                    self._obey()
                finally:
                    self.lock.release()

    def watch(self) -> None:
        """Look at the machine also while nobody steps, from now on."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._stop),
                name="quire-elastic",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """Move nothing any more."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _read(self) -> MemoryReading | None:
        """What there is; None where nobody says, and the log hears of that once."""
        was_silent = self._is_silent
        try:
            memory = self._gauge.read()
        except MemoryUnavailable as error:
            self._is_silent, self._reason = True, str(error)
            if not was_silent:
                log.warning("the ceiling on KV memory stays where it is for now: %s", error)
            return None
        self._is_silent = False
        if was_silent:
            log.info("the machine says again how much memory there is")
        return memory

    def _carry_out(self, decision: Decision, before: int) -> None:
        if decision.drop_cached:
            self._kv.accounting.resize(0, for_now=True)
        self._lower(decision.ceiling_bytes, preempt=decision.event == "pressure")
        self._count(before, decision.reason)
        if decision.event:
            self._resident.rest(short=decision.event == "pressure")

    def _obey(self) -> None:
        """Set the capacity that an operator asked for, if one did."""
        asked, self._asked_bytes = self._asked_bytes, None
        if asked is None:
            return
        before = self._carried_out_bytes()
        while self._kv.accounting.resize(asked) > asked and self._preempt(spare_oldest=False):
            pass
        self._count(before, "the capacity was changed")

    def _lower(self, ceiling_bytes: int, *, preempt: bool) -> None:
        while self._kv.accounting.resize(ceiling_bytes, for_now=True) > ceiling_bytes and preempt:
            preempt = self._preempt(spare_oldest=True)

    def _preempt(self, *, spare_oldest: bool) -> bool:
        done = self._scheduler.preempt_youngest(spare_oldest=spare_oldest)
        self._num_preemptions += done
        return done

    def _count(self, committed_before: int, reason: str) -> None:
        """Give back what is to be given back, and note it."""
        returned = committed_before - self._carried_out_bytes()
        self._num_shrinks += returned > 0
        self._returned_bytes += max(0, returned)
        self._reason = reason

    def _carried_out_bytes(self) -> int:
        """What is committed or kept when storage has done all that accounting has decided."""
        self._kv.carry_out()
        self._resident.follow(self._kv.accounting.ceiling.now_bytes)
        return self._kv.memory.committed_bytes + self._resident.kept_bytes


def _watch(elastic_ref: "weakref.ref[Elastic]", stop: threading.Event) -> None:
    """Until it is closed, or nobody has it any more."""
    while not stop.wait(_INTERVAL_S):
        elastic = elastic_ref()
        if elastic is None:
            return
        try:
            # While somebody steps, whoever it is looks at the machine too.
            if elastic.lock.acquire(blocking=False):
                try:
                    elastic.settle()
                finally:
                    elastic.lock.release()
        except Exception:  # a device that is lost, which the next step will tell
            log.warning("memory is not watched any more between steps", exc_info=True)
            return
        del elastic
