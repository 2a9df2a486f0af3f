"""``CopyEvents``: which copies of blocks tiers have kept and lost, for routers to be told."""

import threading
from collections.abc import Sequence
from typing import final

from quire.kv.prefix_index import BlockEvent, BlockIdentity, BlockRemoved, Medium
from quire.tiers import Name
from quire.tiers.guard import GuardedTier


@final
class CopyEvents:
    """Events of some tiers' copies. Threads share it.

    AllBlocksCleared, which is for all media, is told before tiers are cleared: what they keep until
    then is not.
    """

    def __init__(self, tiers: Sequence[GuardedTier]) -> None:
        """``tiers``: those whose copies are told; none: no events are wanted."""
        self._tiers = frozenset(tiers)
        self._lock = threading.Lock()
        self._events: list[BlockEvent] = []
        self._num_clearing = 0
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

    def note_kept(
        self, tier: GuardedTier, copies: Sequence[tuple[Name, int, BlockIdentity]]
    ) -> None:
        """Note copies that a tier has: name, group and block. It may have evicted some for them."""
        if tier not in self._tiers:
            return
        medium, told = medium_of(tier), self._told.get(tier)
        with self._lock:
            gone = [] if told is None else [told.pop(name, None) for name in tier.take_evicted()]
            if self._num_clearing:
                return
            self._events += (event for event in gone if event is not None)
            self._events += (block.stored(group, medium) for _, group, block in copies)
            if told is not None:
                told.update((name, block.removed(group, medium)) for name, group, block in copies)

    def note_lost(self, tier: GuardedTier, copies: Sequence[tuple[int, BlockIdentity]]) -> None:
        """Note copies that a tier was made to forget: group and block."""
        if tier not in self._tiers:
            return
        with self._lock:
            if not self._num_clearing:
                self._events += (block.removed(group, medium_of(tier)) for group, block in copies)

    @property
    def is_clearing(self) -> bool:
        """Whether tiers are being cleared."""
        return self._num_clearing > 0

    def begin_clearing(self) -> None:
        """Tell nothing until ``end_clearing``, which is called as often."""
        with self._lock:
            self._num_clearing += 1

    def end_clearing(self) -> None:
        """Begin anew: tiers have no copies."""
        with self._lock:
            self._num_clearing -= 1
            for told in self._told.values():
                told.clear()


def medium_of(tier: GuardedTier) -> Medium:
    """Return what events call the place where a tier keeps its records."""
    return "STORAGE" if tier.traits.outlives_process else "CPU"
