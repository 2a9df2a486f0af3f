"""The cache's ceiling, moved as the machine's memory comes and goes.

How far, is the governor's decision. What goes for it, goes in order: pages that no block needs and
blocks that are only cached; then newcomers find no room; then running sequences are preempted, the
youngest first. The oldest keeps what it has and gets what it needs (``Scheduler``).

Where that is not enough, and the system kills a process that finds no memory, the step shrinks: to
as many tokens as there is room for in what is left, but for a part that others may take meanwhile.
Where not even one token's step fits, no step is begun; if that lasts, the engine ends in words.

The thread that steps looks at the machine between two steps; while none steps, another thread does.
"""

import logging
import math
import threading
import weakref
from dataclasses import dataclass, replace

from quire.engine.cache_lock import CacheLock
from quire.engine.kv_cache import KVCache
from quire.engine.profile import StepBytes
from quire.engine.scheduler import Scheduler
from quire.errors import MemoryUnavailable
from quire.memory.controller import ControllerReading, Decision, MemoryController
from quire.memory.machine.readings import Gauge, HostPeak, MemoryReading
from quire.memory.residency import Resident
from quire.units import format_bytes

log = logging.getLogger(__name__)

_INTERVAL_S = 0.2
_RETRY_S = 5.0  # where the system did not say how much memory there is
_SPARED = 32  # part of the limit that a small step leaves to others, or half of what is left
_TRIM_S = 1.0  # between two times that what is free in this process is given back
_PATIENCE_S = 30.0  # without room for a step of one token
_PAUSE_S = 0.02  # in the meantime


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """Where the ceiling is, and what moving it has cost so far."""

    capacity_bytes: int
    ceiling_bytes: int
    token_budget: int  # tokens of a step at most, for now; 0: there is room for none
    num_shrinks: int  # times that something was given back
    returned_bytes: int  # in them
    num_preemptions: int  # of running sequences, for the machine's or an operator's sake
    reason: str  # of the last decision
    memory: MemoryReading | None  # where the cache lies, as it was last looked at


class Elastic:
    """Of one engine. ``lock`` is held during a step, and during any other use of the cache."""

    def __init__(
        self,
        kv: KVCache,
        resident: Resident,
        scheduler: Scheduler,
        governor: MemoryController,
        gauge: Gauge,
        lock: CacheLock,
        step_bytes: StepBytes | None = None,
    ) -> None:
        """``step_bytes``: None where a step that finds no memory fails, and nothing is killed."""
        self.lock = lock
        self._resident = resident
        self._kv, self._scheduler = kv, scheduler
        self._governor, self._gauge = governor, gauge
        self._step_bytes = step_bytes
        self._max_tokens = scheduler.token_budget
        self._token_budget = self._max_tokens
        self._peak = HostPeak()
        self._noted_tokens = 0.0  # that had been computed when the peak began
        self._noted_kv_bytes = 0
        self._num_logits = 0
        self._trim_s = -math.inf  # when the allocators may be asked next
        self._looked_s = 0.0  # when the room for a step was last looked at
        self._starved_s = math.inf  # since when there has been no room for a step
        self._due_s = -math.inf  # when to look at the machine next
        self._is_silent = False  # the machine, when it was last looked at
        self._busy_s = gauge.now_s()  # when there was something to do
        self._asked_bytes: int | None = None  # by an operator, and not done yet
        self._is_asleep = False
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
            token_budget=self._token_budget,
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
        if now_s < self._due_s or self._is_asleep or self._stop.is_set():
            return
        self._due_s = now_s + _INTERVAL_S
        memory = self._read()
        if memory is None:
            self._due_s = now_s + _RETRY_S
            return
        taken = self._carried_out_bytes()
        reading = self._reading(memory, now_s, taken)
        if self._governor.lacks(reading) and self._trim_s <= now_s:
            self._trim_s = now_s + _TRIM_S
            self._resident.rest(short=False)  # what is free in this process first
            memory = self._read() or memory
            reading = self._reading(memory, now_s, taken)
        self._memory = memory
        self._carry_out(self._governor.decide(reading), taken)
        self._limit_step(reading, memory, taken)

    def may_step(self) -> bool:
        """Whether there is room for a step of one token; else ``pause``, and look again.

        Raises: MemoryUnavailable where there has been none for half a minute.
        """
        memory, sizes = self._memory, self._step_bytes
        if self._token_budget or memory is None or sizes is None:
            return True
        waited_s = self._gauge.now_s() - self._starved_s
        if waited_s < _PATIENCE_S:
            return False
        raise MemoryUnavailable(
            f"the system would end this process: a step of one token takes "
            f"{format_bytes(sizes.of(1, 1))}, and for {waited_s:.0f} s no more than "
            f"{format_bytes(memory.left_bytes or 0)} has been left of "
            f"{format_bytes(memory.total_bytes)} ({memory.source}). The cache has given back all "
            f"but {format_bytes(self._kv.committed_bytes)}, and the rest is this process's own or "
            f"others': end those, raise that limit, or load a smaller model"
        )

    def pause(self) -> None:
        """Wait a moment, without the lock."""
        self._stop.wait(_PAUSE_S)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity itself: now, or before the next step if one is under way."""
        self._asked_bytes = capacity_bytes
        while self._asked_bytes is not None:  # the thread that steps may be quicker
            if self.lock.acquire(timeout=0.05):
                try:
                    self._obey()
                finally:
                    self.lock.release()

    def sleep(self) -> None:
        """Give all that is held and kept back until ``wake_up``. No sequence is unfinished."""
        self._is_asleep = True
        before = self._carried_out_bytes()
        self._kv.accounting.resize(0, for_now=True)
        self._count(before, "asleep")
        self._resident.rest(short=False)

    def wake_up(self) -> None:
        """The ceiling is where the machine's memory lets it be.

        Raises: MemoryUnavailable where there is none for what is taken at the start.
        """
        capacity_bytes = self._kv.accounting.ceiling.capacity_bytes
        try:
            self._resident.follow(capacity_bytes)
            self._resident.prefault()
        except MemoryUnavailable:
            self._resident.follow(0)
            raise
        self._kv.accounting.resize(capacity_bytes, for_now=True)
        self._is_asleep, self._due_s, self._reason = False, -math.inf, "woken up"

    def count_on(self, before: Elasticity) -> None:
        """From what another one had counted, whose place this takes."""
        self._num_shrinks, self._returned_bytes = before.num_shrinks, before.returned_bytes
        self._num_preemptions = before.num_preemptions

    def watch(self) -> None:
        """Look at the machine also while no thread steps, from now on."""
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
        """What there is; None where the system does not say, and the log hears of that once."""
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

    def _reading(self, memory: MemoryReading, now_s: float, taken: int) -> ControllerReading:
        kills = memory.left_bytes is not None and self._step_bytes is not None
        return ControllerReading(
            now_s=now_s,
            total_bytes=memory.total_bytes,
            available_bytes=memory.available_bytes,
            step_bytes=self._step_bytes.whole_bytes if kills and self._step_bytes else 0,
            stalled_s=memory.stalled_s,
            capacity_bytes=self._kv.accounting.ceiling.capacity_bytes,
            ceiling_bytes=self._kv.accounting.ceiling.now_bytes,
            committed_bytes=taken,
            idle_s=now_s - self._busy_s,
        )

    def _limit_step(self, reading: ControllerReading, memory: MemoryReading, before: int) -> None:
        """Let a step have what is left, now that the cache has given back what it could."""
        sizes = self._step_bytes
        if sizes is None or memory.left_bytes is None:
            return
        taken = self._carried_out_bytes()
        returned = before - taken
        now = replace(reading, available_bytes=reading.available_bytes + returned)
        if self._token_budget:
            self._note_peak(sizes, taken)
        else:  # or what one step was said to take would keep all others from being tried
            sizes.fade(now.now_s - self._looked_s)
        self._looked_s = now.now_s
        budget = self._max_tokens
        if self._governor.lacks(now):
            left = memory.left_bytes + returned
            spared = min(left // 2, memory.total_bytes // _SPARED)
            self._num_logits = num_logits = self._scheduler.most_logits
            budget = sizes.most_tokens(left - spared, num_logits) or int(sizes.of(1, 1) <= left)
            self._due_s = now.now_s  # before each step
            self._peak.begin()
            self._noted_tokens = self._scheduler.statistics.step_tokens.sum
            self._noted_kv_bytes = taken
        self._starved_s = min(self._starved_s, now.now_s) if not budget else math.inf
        if (budget < self._max_tokens) != (self._token_budget < self._max_tokens):
            log.warning(
                "%s is left (%s): steps are of up to %d tokens",
                format_bytes(memory.left_bytes + returned),
                memory.source,
                budget,
            )
        self._token_budget = budget
        self._scheduler.token_budget = max(1, budget)

    def _note_peak(self, sizes: StepBytes, taken: int) -> None:
        """What the step since the last look has taken, if it was small for lack of memory."""
        num_tokens = int(self._scheduler.statistics.step_tokens.sum - self._noted_tokens)
        peak = self._peak.peak_bytes()
        if self._token_budget < self._max_tokens and num_tokens and peak is not None:
            sizes.note(num_tokens, self._num_logits, peak - max(0, taken - self._noted_kv_bytes))

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
    """Until it is closed, or nothing refers to it any more."""
    while not stop.wait(_INTERVAL_S):
        elastic = elastic_ref()
        if elastic is None:
            return
        try:
            # A thread that steps looks at the machine itself.
            if elastic.lock.acquire(blocking=False):
                try:
                    elastic.settle()
                finally:
                    elastic.lock.release()
        except Exception:  # a device that is lost, which the next step will tell
            log.warning("memory is not watched any more between steps", exc_info=True)
            return
        del elastic
