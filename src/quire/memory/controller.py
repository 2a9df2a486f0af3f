"""How much of the machine a cache may hold right now: a policy, without a thread or a clock.

It takes a reading, and says where the ceiling should be and why. ``quire.engine.elastic`` reads,
and gives memory back.

A part of the machine, the *headroom* of the ledger, is left to others; what is free beyond it is
slack, and a cache grows into slack only. Others may take a quarter of the headroom before the cache
reacts, so that no single reading decides. Then there is *pressure*: the cache gives back what the
headroom lacks at once, and does not grow for a while. In ``shared`` mode it also gives back all
that no sequence holds; and the ceiling moves towards a multiple of the slack. All caches that
follow that rule end up with the same share, in whatever order they came, and leave some slack, so
that they put no pressure on each other.

Where the system kills a process that finds no memory, what the next step takes stays free too. It
may be taken out of the headroom, but not out of what others have.

Source: Choudhury and Hahne, Dynamic queue length thresholds, 1998 (fair shares from the slack).
"""

import math
from dataclasses import dataclass
from typing import Literal

from quire.memory.budget.rules import Mode, headroom_bytes
from quire.units import format_bytes

FAIR_MULTIPLE = 20  # of the slack: n alike hold 20 / (1 + 20 n) each, so one 95 %, two 49 %
_SETTLING_S = 12.5  # in which a ceiling comes within a third of where it is drawn to
_LONGEST_MOVE_S = 0.25  # counted between two decisions: more would make several swing
_HOLD_S = 5.0  # after pressure, before anything grows
_STALLED = 0.05  # share of the time that tasks wait for memory: pressure comes sooner
_IDLE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReading:
    """The machine and the cache at one moment."""

    now_s: float
    total_bytes: int  # of the tightest bound …
    available_bytes: int  # … what is left
    step_bytes: int = 0  # what the next step takes besides KV memory, where lack of it kills
    stalled_s: float = 0.0  # so far: some task waited for memory
    capacity_bytes: int  # what the cache's ceiling may be at most …
    ceiling_bytes: int  # … what it is …
    committed_bytes: int  # … and what lies under it
    idle_s: float = 0.0  # since the last sequence ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where the ceiling goes, and what is given back for it."""

    ceiling_bytes: int
    event: Literal["", "pressure", "idle"] = ""  # pressure: running sequences make room too
    drop_cached: bool = False  # all that no sequence holds
    reason: str


class MemoryController:
    """Decides where one cache's ceiling should be."""

    def __init__(self, mode: Mode, *, room_bytes: int | None = None) -> None:
        """``room_bytes``: the most that the cache could take when its budget was stated.

        None: its rule left the headroom.
        """
        self._mode = mode
        self._room_bytes = room_bytes
        self._share = math.inf  # where the ceiling is drawn to by now
        self._grows_from_s = -math.inf  # the end of a hold
        self._last_s = math.nan
        self._stalled_s = math.inf
        self._rests = False  # idle, and all is given back

    def headroom_bytes(self, now: ControllerReading) -> int:
        """Return the bytes that are left to others, as the ledger has it."""
        spare = None if self._room_bytes is None else self._room_bytes - now.capacity_bytes
        return headroom_bytes(now.total_bytes, self._mode, spare_bytes=spare)

    def lacks(self, now: ControllerReading) -> bool:
        """Return whether too little is left: others have more than a quarter of the headroom."""
        return now.available_bytes < self._floor_bytes(now)

    def _floor_bytes(self, now: ControllerReading) -> int:
        headroom = self.headroom_bytes(now)
        return max(headroom - headroom // 4, now.step_bytes)

    def decide(self, now: ControllerReading) -> Decision:
        """Decide where the ceiling should be after this reading."""
        headroom = self.headroom_bytes(now)
        kept = self._floor_bytes(now) + headroom // 4
        elapsed_s = now.now_s - self._last_s if self._last_s <= now.now_s else 0.0
        stalled = now.stalled_s - self._stalled_s > _STALLED * elapsed_s > 0
        self._last_s, self._stalled_s = now.now_s, now.stalled_s
        slack = now.available_bytes - kept
        least = min(now.capacity_bytes, headroom // 64)  # giving it back would help no other
        if slack < 0 and (stalled or self.lacks(now)) and now.committed_bytes > least:
            self._grows_from_s = now.now_s + _HOLD_S
            self._share = max(least, min(now.ceiling_bytes, now.committed_bytes + slack))
            waits = "tasks wait for memory and " if stalled else ""
            return Decision(
                ceiling_bytes=int(self._share),
                event="pressure",
                drop_cached=self._mode == "shared",
                reason=f"{waits}{format_bytes(now.available_bytes)} is available, of which "
                f"{format_bytes(kept)} is for {'others' if kept == headroom else 'a step'}: "
                f"{format_bytes(-slack)} is missing",
            )
        ceiling, reason = self._without_pressure(now, slack, least, elapsed_s)
        idle = self._mode == "shared" and now.idle_s >= _IDLE_S
        first, self._rests = idle and not self._rests, idle
        if first and now.committed_bytes:
            reason = f"idle for {now.idle_s:.0f} s: what is only cached is given back"
        return Decision(
            ceiling_bytes=ceiling,
            event="idle" if first else "",
            drop_cached=first,
            reason=reason,
        )

    def _without_pressure(
        self, now: ControllerReading, slack: int, least: int, elapsed_s: float
    ) -> tuple[int, str]:
        """Return the ceiling and why: this cache's share, reached without a jump."""
        capacity = now.capacity_bytes
        goal = min(capacity, FAIR_MULTIPLE * slack) if self._mode == "shared" else capacity
        goal = max(least, goal)
        share = min(self._share, capacity)
        holds = goal > share and now.now_s < self._grows_from_s
        if not holds:
            moved = 1 - math.exp(-min(elapsed_s, _LONGEST_MOVE_S) / _SETTLING_S)
            share += (goal - share) * moved
            if goal == capacity and goal - share <= least:
                share = capacity
        self._share = share
        # A share is not there for the taking at once: others may have taken it meanwhile.
        ceiling = max(least, min(int(share), now.committed_bytes + max(0, slack)))
        if ceiling == capacity:
            return ceiling, "all of the capacity may be used"
        if holds:
            return ceiling, "memory was short a moment ago"
        return ceiling, f"{format_bytes(max(0, slack))} is more than others may need soon"
