"""``CopyEvents``: which copies of blocks tiers have kept and lost, for routers to be told.

Two threads call a tier at once, so a copy may be lost while a call that has found or stored it goes
on. Which of both was first is not known then, and it is told to be lost: a load tells of it again.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, final

from quire.kv.prefix_index import BlockEvent, BlockIdentity, BlockRemoved, Medium
from quire.tiers import Name
from quire.tiers.guard import GuardedTier

Copy: TypeAlias = tuple[Name, int, BlockIdentity]  # of a block: its record's name, and its group


@dataclass(eq=False, slots=True)
class KeepingCall:
    """A call under way that may find copies in a tier, or have it keep some."""

    tier: GuardedTier
    lost: set[Name] = field(default_factory=set)  # since it began
    spans_clearing: bool = False


@final
class CopyEvents:
    """Events of some tiers' copies. Threads share it.

    AllBlocksCleared, which is for all media, is told before tiers are cleared: what they keep until
    then is not.
    """

    def __init__(self, tiers: Sequence[GuardedTier]) -> None:
        """``tiers``: those whose copies are told; none: no events are wanted."""
        self._asking = threading.Lock()  # what a tier has evicted: the engine waits for no tier
        self._lock = threading.Lock()  # of all that follows, for a moment
        self._events: list[BlockEvent] = []
        self._num_clearing = 0
        self._calls: dict[GuardedTier, list[KeepingCall]] = {tier: [] for tier in tiers}
        # Copies that a tier is made to forget now.
        self._going: dict[GuardedTier, Counter[Name]] = {tier: Counter() for tier in tiers}
        # Of a tier that tells what it evicts, by name: the event that a copy is gone.
        self._told: dict[GuardedTier, dict[Name, BlockRemoved]] = {
            tier: {} for tier in tiers if tier.tells_evictions
        }
        for tier in self._told:
            tier.take_evicted()  # so that it begins to remember them

    def take(self) -> list[BlockEvent]:
        """Return the events since the last call."""
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, []
        return events

    @contextmanager
    def keeping(self, tier: GuardedTier) -> Iterator[KeepingCall]:
        """Hold a call of a tier in view: ``note_kept`` says what it has found or stored."""
        call = KeepingCall(tier)
        calls = self._calls.get(tier)
        if calls is None:
            yield call
            return
        with self._asking:
            self._note_evicted(tier)  # before it
        with self._lock:
            call.lost.update(self._going[tier])
            call.spans_clearing = self.is_clearing
            calls.append(call)
        try:
            yield call
        finally:
            with self._lock:
                calls.remove(call)

    def note_kept(self, call: KeepingCall, copies: Sequence[Copy]) -> None:
        """Note copies that a tier has. It may have evicted some for them."""
        tier = call.tier
        if tier not in self._calls:
            return
        medium, told = medium_of(tier), self._told.get(tier)
        with self._asking:
            self._note_evicted(tier)
            with self._lock:
                if call.spans_clearing:
                    return
                for name, group, block in copies:
                    if name not in call.lost:
                        self._events.append(block.stored(group, medium))
                        if told is not None:
                            told[name] = block.removed(group, medium)

    @contextmanager
    def losing(
        self, tier: GuardedTier, copies: Sequence[Copy], *, were_told: bool = False
    ) -> Iterator[None]:
        """Tell that copies are lost, and hold the call in view by which a tier forgets them.

        ``were_told``: that they are lost was told before.
        """
        if tier not in self._calls:
            yield
            return
        names, medium, told = [name for name, _, _ in copies], medium_of(tier), self._told.get(tier)
        with self._lock:
            self._note_lost(tier, names)
            self._going[tier].update(names)
            if not (self.is_clearing or were_told):
                self._events += (block.removed(group, medium) for _, group, block in copies)
            if told is not None:
                for name in names:
                    told.pop(name, None)
        try:
            yield
        finally:
            with self._lock:
                self._going[tier] -= Counter(names)

    def _note_evicted(self, tier: GuardedTier) -> None:
        """Note what a tier tells to have evicted for others."""
        told = self._told.get(tier)
        if told is None:
            return
        names = tier.take_evicted()
        with self._lock:
            self._note_lost(tier, names)
            gone = [told.pop(name, None) for name in names]
            if not self.is_clearing:
                self._events += (event for event in gone if event is not None)

    def _note_lost(self, tier: GuardedTier, names: Sequence[Name]) -> None:
        for call in self._calls[tier]:
            call.lost.update(names)

    @property
    def is_clearing(self) -> bool:
        """Whether tiers are being cleared."""
        return self._num_clearing > 0

    def begin_clearing(self) -> None:
        """Tell nothing until ``end_clearing``, which is called as often."""
        with self._lock:
            self._num_clearing += 1
            self._events.clear()
            self._note_clearing()

    def end_clearing(self) -> None:
        """Begin anew: tiers have no copies."""
        with self._lock:
            self._num_clearing -= 1
            for told in self._told.values():
                told.clear()
            self._note_clearing()

    def _note_clearing(self) -> None:
        for calls in self._calls.values():
            for call in calls:
                call.spans_clearing = True


def medium_of(tier: GuardedTier) -> Medium:
    """Return what events call the place where a tier keeps its records."""
    return "STORAGE" if tier.traits.outlives_process else "CPU"
