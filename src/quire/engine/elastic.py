"""``Elastic`` moves the cache's ceiling as the machine's free memory changes.

``MemoryController`` decides how far. A lower ceiling takes, in this order: pages that no block
needs, and blocks that are only cached; the room of newcomers; the room of running sequences, the
youngest first. The oldest keeps what it has and gets what it needs (``Scheduler``).

Where that is not enough, and the system kills a process that finds no memory, the step shrinks to
the tokens that fit into what is left, without a part that other processes may take meanwhile. Where
not even a step of one token fits, no step begins; if that lasts, the engine ends with an error.

The thread that steps reads the machine's memory between two steps; another thread does so while no
thread steps.
"""

import logging
import math
import threading
import weakref
from collections.abc import Callable
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
_RETRY_S = 5.0  # after the memory could not be read
_SPARED = 32  # a small step leaves this part of the limit to others, or half of what is left
_TRIM_S = 1.0  # between two calls that give back what is free in this process
_PATIENCE_S = 30.0  # without room for a step of one token
_PAUSE_S = 0.02  # between two looks for that room


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """Where the ceiling is, and what moving it has cost so far."""

    capacity_bytes: int
    ceiling_bytes: int
    token_budget: int  # the most tokens of a step at present; 0: there is room for none
    num_shrinks: int  # times that memory was given back …
    returned_bytes: int  # … and how much
    num_preemptions: int  # of running sequences, for the machine or an operator
    reason: str  # of the last decision
    memory: MemoryReading | None  # the last reading of where the cache lies


class Elastic:
    """Moves one engine's ceiling. ``lock`` is held during any use of the cache."""

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
        """``step_bytes`` is None where a step without memory fails and no process is killed."""
        self.lock = lock
        self._resident = resident
        self._kv, self._scheduler = kv, scheduler
        self._governor, self._gauge = governor, gauge
        self._step_bytes = step_bytes
        self._max_tokens = scheduler.token_budget
        self._token_budget = self._max_tokens
        self._peak = HostPeak()
        self._noted_tokens = 0.0  # computed when the peak's measurement began
        self._noted_kv_bytes = 0
        self._num_logits = 0
        self._trim_s = -math.inf  # when free memory of the process may next be given back
        self._looked_s = 0.0  # when the room for a step was last computed
        self._starved_s = math.inf  # since when there has been no room for a step
        self._due_s = -math.inf  # when to read the memory next
        self._is_silent = False  # the last reading failed
        self._busy_s = gauge.now_s()  # when a request last ran
        self._asked_bytes: int | None = None  # what an operator asked for, until it is set
        self._is_asleep = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Called with the lock held when the memory was read while no thread steps.
        self.after_idle: Callable[[], None] | None = None
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
        """Set the capacity that an operator asked for, and read the machine's memory if it is due.

        The caller is between two steps. While the memory cannot be read, the ceiling stays.
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
            self._resident.rest(short=False)  # gives back what is free in this process
            memory = self._read() or memory
            reading = self._reading(memory, now_s, taken)
        self._memory = memory
        self._carry_out(self._governor.decide(reading), taken)
        self._limit_step(reading, memory, taken)

    def may_step(self) -> bool:
        """Return whether there is room for a step of one token. If not, ``pause`` and ask again.

        Raises: MemoryUnavailable after half a minute without room.
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
        """Wait a moment. The caller does not hold the lock."""
        self._stop.wait(_PAUSE_S)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity, now or before the next step."""
        self._asked_bytes = capacity_bytes
        while self._asked_bytes is not None:  # until this thread or the one that steps sets it
            if self.lock.acquire(timeout=0.05):
                try:
                    self._obey()
                finally:
                    self.lock.release()

    def sleep(self) -> None:
        """Give all memory back until ``wake_up``. There are no unfinished sequences."""
        self._is_asleep = True
        before = self._carried_out_bytes()
        self._kv.accounting.resize(0, for_now=True)
        self._count(before, "asleep")
        self._resident.rest(short=False)

    def wake_up(self) -> None:
        """Raise the ceiling to the capacity again.

        Raises: MemoryUnavailable where there is too little for what is taken at the start.
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
        """Continue the counts of the one that this one replaces."""
        self._num_shrinks, self._returned_bytes = before.num_shrinks, before.returned_bytes
        self._num_preemptions = before.num_preemptions

    def watch(self) -> None:
        """Start a thread that reads the memory while no thread steps."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._stop),
                name="quire-elastic",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """Stop moving the ceiling."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _read(self) -> MemoryReading | None:
        """Read the memory. Return None if it cannot be read, which is logged once."""
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
            log.info("the machine's memory can be read again")
        return memory

    def _reading(self, memory: MemoryReading, now_s: float, taken: int) -> ControllerReading:
        kills = memory.left_bytes is not None and self._step_bytes is not None
        return ControllerReading(
            now_s=now_s,
            total_bytes=memory.total_bytes,
            available_bytes=memory.available_bytes,
            step_bytes=self._step_bytes.most_bytes if kills and self._step_bytes else 0,
            stalled_s=memory.stalled_s,
            capacity_bytes=self._kv.accounting.ceiling.capacity_bytes,
            ceiling_bytes=self._kv.accounting.ceiling.now_bytes,
            committed_bytes=taken,
            idle_s=now_s - self._busy_s,
        )

    def _limit_step(self, reading: ControllerReading, memory: MemoryReading, before: int) -> None:
        """Set the most tokens of a step by what is left, after the cache has given back."""
        sizes = self._step_bytes
        if sizes is None or memory.left_bytes is None:
            return
        taken = self._carried_out_bytes()
        returned = before - taken
        now = replace(reading, available_bytes=reading.available_bytes + returned)
        if self._token_budget:
            self._note_peak(sizes, taken)
        else:  # or the measurement of one step would prevent all others
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
        """Note the peak of a step that was small for lack of memory."""
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
        """Have storage give memory back, and count it."""
        returned = committed_before - self._carried_out_bytes()
        self._num_shrinks += returned > 0
        self._returned_bytes += max(0, returned)
        self._reason = reason

    def _carried_out_bytes(self) -> int:
        """Return the bytes that are committed or kept once storage has carried out all changes."""
        self._kv.carry_out()
        self._resident.follow(self._kv.accounting.ceiling.now_bytes)
        return self._kv.memory.committed_bytes + self._resident.kept_bytes


def _watch(elastic_ref: "weakref.ref[Elastic]", stop: threading.Event) -> None:
    """Call ``settle`` until it is closed, or no reference to it is left."""
    while not stop.wait(_INTERVAL_S):
        elastic = elastic_ref()
        if elastic is None:
            return
        try:
            # A thread that steps holds the lock, and calls ``settle`` itself.
            if elastic.lock.acquire(blocking=False):
                try:
                    elastic.settle()
                    if elastic.after_idle is not None:
                        elastic.after_idle()
                finally:
                    elastic.lock.release()
        except Exception:  # a lost device, for which the next step raises an error
            log.warning("the machine's memory is no longer watched between steps", exc_info=True)
            return
        del elastic
