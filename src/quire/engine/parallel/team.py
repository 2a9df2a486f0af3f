"""``Team``: the other ranks of one engine, as its storage, runner, swap and memory ask them.

Each asks for its own part and for the others' at once. ``crew`` carries the messages.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, final

from quire.attention import AttentionBatch
from quire.engine.parallel.crew import Crew
from quire.engine.parallel.messages import (
    Apply,
    Assemble,
    CloseStorage,
    Compute,
    Disassemble,
    DropSaved,
    Expect,
    Failed,
    Go,
    GroupBatch,
    MakeStorage,
    OpenSwap,
    PutBack,
    Save,
)
from quire.engine.parallel.resident import RankedGauge, RankedResident
from quire.engine.parallel.storage import RankedStorage
from quire.engine.swap.mover import Mover
from quire.engine.swap.timers import Note, Timer
from quire.kv import Change, Storage
from quire.kv.interface import Slots
from quire.memory.machine.readings import Gauge, SharedGauge
from quire.memory.residency import Residency, Resident
from quire.models.placing import HostInputs

T = TypeVar("T")


@final
class Team:
    """What rank 0's engine knows of the others. Raises: RankLost, from every method but the last.

    ``least_committed_bytes``: of the rank that has committed the fewest, after the last changes.
    """

    def __init__(self, crew: Crew, assembly: Assemble) -> None:
        """Raises: what an engine cannot be assembled for in one of the ranks."""
        self._crew, self._engine = crew, assembly.engine
        self.num_ranks = crew.num_ranks
        self.least_committed_bytes = 0
        try:
            crew.required(assembly, _nothing)
        except Exception:
            self.close()  # where it is assembled all the same
            raise

    def make_storage(self, make: Callable[[], Storage]) -> Storage:
        """Rank 0's, which tells the others. Raises: MemoryUnavailable, and there is none then."""
        made: list[Storage] = []
        try:
            self._crew.required(MakeStorage(engine=self._engine), lambda: made.append(make()))
        except Exception:
            for storage in made:
                storage.close()
            raise
        self.least_committed_bytes = 0
        return RankedStorage(made[0], self.apply, self.close_storage)

    def apply(self, changes: Sequence[Change], own: Storage) -> None:
        """Raises: MemoryUnavailable where any of the ranks was refused pages."""
        failure: Exception | None = None

        def apply_own() -> int:
            nonlocal failure
            try:
                own.apply(changes)
            except Exception as error:  # the others may have done it, which is to be known too
                failure = error
            return own.memory.committed_bytes

        message = Apply(engine=self._engine, changes=changes)
        here, answers = self._crew.all_of(message, apply_own)
        there = [int(answer.value) for answer in answers]
        self.least_committed_bytes = min(here, *there)
        errors = [failure, *(a.error for a in answers if isinstance(a, Failed))]
        for error in errors:
            if error is not None:
                raise error
        if {here} != set(there):
            raise RuntimeError(
                f"the ranks have committed {[here, *there]} bytes for the same changes: what one "
                f"accounting decides must be the same in all"
            )

    def close_storage(self) -> None:
        self._crew.try_tell(CloseStorage(engine=self._engine))

    def go(self, way: str, own: Callable[[], None]) -> None:
        self._crew.required(Go(engine=self._engine, way=way), own)

    def expect(self, max_tokens: int, own: Callable[[], None]) -> None:
        self._crew.required(Expect(engine=self._engine, max_tokens=max_tokens), own)

    def compute(
        self,
        batches: Iterable[AttentionBatch],
        given: HostInputs,
        own: Callable[[], T],
    ) -> T:
        step = Compute(
            engine=self._engine,
            batches=[
                GroupBatch(
                    query_starts=batch.query_starts,
                    context_lens=batch.context_lens,
                    tables=batch.tables.numpy(),
                    slots=batch.slots.numpy(),
                    block_size=batch.block_size,
                )
                for batch in batches
            ],
            token_ids=given.token_ids,
            positions=given.positions,
            logits_at=given.logits_at,
        )
        return self._crew.required(step, own)

    def resident(self, own: Resident, residency: Residency) -> Resident:
        """Rank 0's memory around its cache, which tells the others."""
        keeps = residency != "on-demand" or own.prepares
        return RankedResident(self._crew, self._engine, own, keeps=keeps)

    def gauge(self, own: Gauge) -> Gauge:
        """How much memory is left where it is scarcest; of a machine that all share, a share."""
        if self._crew.device_type == "cpu":
            return SharedGauge(own, self.num_ranks)
        return RankedGauge(self._crew, self._engine, own)

    def open_swap(self, path: str | None, own: Mover) -> Mover:
        """Rank 0's place for saved entries, which tells the others."""
        self._crew.required(OpenSwap(engine=self._engine, path=path), _nothing)
        return RankedMover(self._crew, self._engine, own)

    def close(self) -> None:
        """The engine is closed."""
        self._crew.try_tell(Disassemble(engine=self._engine))


@final
class RankedMover:
    """Moves a sequence's entries in every rank, or says that it is not done."""

    def __init__(self, crew: Crew, engine: int, own: Mover) -> None:
        self._crew, self._engine, self._own = crew, engine, own

    @property
    def timer(self) -> Timer:
        return self._own.timer

    def save(self, seq_id: int, slots: Sequence[Slots]) -> None:
        message = Save(engine=self._engine, seq_id=seq_id, slots=slots)
        try:
            self._crew.required(message, lambda: self._own.save(seq_id, slots))
        except Exception:
            self.drop([seq_id])  # where it is saved all the same
            raise

    def put_back(self, seq_id: int, slots: Sequence[Slots], num_skipped: Sequence[int]) -> int:
        message = PutBack(engine=self._engine, seq_id=seq_id, slots=slots, num_skipped=num_skipped)
        return self._crew.required(message, lambda: self._own.put_back(seq_id, slots, num_skipped))

    def drop(self, seq_ids: Sequence[int]) -> None:
        self._own.drop(seq_ids)
        if seq_ids:
            self._crew.try_tell(DropSaved(engine=self._engine, seq_ids=seq_ids))

    def try_out(self, num_bytes: int, saved: Note, loaded: Note) -> None:
        self._own.try_out(num_bytes, saved, loaded)

    def close(self) -> None:
        self._own.close()  # the others' goes with their engine


def _nothing() -> None:
    """Rank 0 has no part in it."""
