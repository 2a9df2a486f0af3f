"""The memory around a cache that lies in several ranks: rank 0's own part, and word to the others.

Pages that come in the course of steps each rank prepares by itself. What is told here is rare.
"""

from typing import final

from quire.engine.parallel.crew import Crew
from quire.engine.parallel.messages import Failed, Follow, Prefault, Read, Rest
from quire.errors import RankLost
from quire.memory import MemoryProvider
from quire.memory.machine.readings import Gauge, MemoryReading
from quire.memory.residency import Resident


@final
class RankedResident:
    """See ``Resident``. Of the others' memory nothing but ``prefault`` raises."""

    def __init__(self, crew: Crew, engine: int, own: Resident, *, keeps: bool) -> None:
        """``keeps``: whether there is anything that follows the ceiling."""
        self._crew, self._engine, self._own, self._keeps = crew, engine, own, keeps
        self._told_bytes: int | None = None

    @property
    def provider(self) -> MemoryProvider:
        return self._own.provider

    def prefault(self) -> None:
        """Raises: MemoryUnavailable where one of the ranks has too little; RankLost."""
        if self._keeps:
            self._crew.required(Prefault(engine=self._engine), self._own.prefault)

    @property
    def prepares(self) -> bool:
        return self._own.prepares

    def prepare(self) -> None:
        self._own.prepare()  # as each rank does after it has answered

    def watch(self) -> None:
        self._own.watch()

    def follow(self, ceiling_bytes: int) -> None:
        self._own.follow(ceiling_bytes)
        if self._keeps and ceiling_bytes != self._told_bytes:
            self._told_bytes = ceiling_bytes
            self._crew.try_tell(Follow(engine=self._engine, ceiling_bytes=ceiling_bytes))

    def rest(self, *, short: bool) -> None:
        self._own.rest(short=short)
        self._crew.try_tell(Rest(engine=self._engine, short=short))

    @property
    def kept_bytes(self) -> int:
        """Of this rank: so much has each of them, or nearly."""
        return self._own.kept_bytes

    def close(self) -> None:
        self._own.close()  # the others' go with their engine


@final
class RankedGauge:
    """Of the ranks' devices the one that has the least left."""

    def __init__(self, crew: Crew, engine: int, own: Gauge) -> None:
        self._crew, self._engine, self._own = crew, engine, own

    def now_s(self) -> float:
        return self._own.now_s()

    def read(self) -> MemoryReading:
        """Raises: MemoryUnavailable where one of them does not say."""
        try:
            here, answers = self._crew.all_of(Read(engine=self._engine), self._own.read)
        except RankLost:  # which the next step finds out
            return self._own.read()
        readings: list[MemoryReading] = [here]
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
            readings.append(answer.value)
        return min(readings, key=lambda reading: reading.available_bytes)
