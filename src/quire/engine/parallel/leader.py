"""``LeaderGroup``: the other ranks of one engine, as its storage, runner, swap and memory ask them.

Each asks for its own part and for the others' at once. ``crew`` carries the messages.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, final

from torch import Tensor

from quire.attention import AttentionBatch
from quire.engine.parallel.messages import (
    Apply,
    Assemble,
    CloseStorage,
    Compute,
    Disassemble,
    DropSaved,
    Expect,
    Failed,
    Follow,
    Go,
    GroupBatch,
    MakeStorage,
    OpenSwap,
    Prefault,
    PutBack,
    Read,
    Rest,
    SaveEntries,
)
from quire.engine.parallel.worker_group import WorkerGroup
from quire.engine.swap.kv_mover import KVMover, Note, Timer
from quire.errors import RankLost
from quire.kv import LayerView, Storage, StorageOp
from quire.kv.interface import Slots
from quire.kv.storage.states import StateRows
from quire.memory import CountedMemory, MemoryProvider
from quire.memory.machine.readings import Gauge, MemoryReading, SharedGauge
from quire.memory.residency import Residency, Resident
from quire.models.step_inputs import HostInputs

# -- memory ----------------------------------------------------------------------------------------

# The memory around a cache that lies in several ranks: rank 0's own part, and word to the others.
#
# Pages that come in the course of steps each rank prepares by itself. What is told here is rare.


@final
class RankedResident:
    """See ``Resident``. Of the others' memory nothing but ``prefault`` raises."""

    def __init__(self, crew: WorkerGroup, engine: int, own: Resident, *, keeps: bool) -> None:
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

    def __init__(self, crew: WorkerGroup, engine: int, own: Gauge) -> None:
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


# -- storage ---------------------------------------------------------------------------------------

# Rank 0's storage of a cache that lies in several ranks: its own part, and word to the others.


@final
class RankedStorage:
    """What a step reads and writes here is this rank's; changes are made in all ranks.

    ``apply_all`` carries changes out in all ranks, this one's storage among them.
    """

    def __init__(
        self,
        own: Storage,
        apply_all: Callable[[Sequence[StorageOp], Storage], None],
        close_others: Callable[[], None],
    ) -> None:
        self._own = own
        self._apply_all, self._close_others = apply_all, close_others

    @property
    def memory(self) -> CountedMemory:
        """This rank's: so much has each of them."""
        return self._own.memory

    def apply(self, changes: Iterable[StorageOp]) -> None:
        several = list(changes)
        if several:  # of a step that changes nothing the other ranks need not hear
            self._apply_all(several, self._own)

    def settle(self) -> None:
        self._own.settle()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._own.write(layer, slots, k, v)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._own.gather(layer, slots)

    def save(self, layer: int, slots: Tensor) -> list[Tensor]:
        return self._own.save(layer, slots)

    def load(self, layer: int, slots: Tensor, parts: list[Tensor]) -> None:
        self._own.load(layer, slots, parts)

    def view(self, layer: int) -> LayerView:
        return self._own.view(layer)

    def states(self, group: int) -> StateRows:
        return self._own.states(group)

    def close(self) -> None:
        self._own.close()
        self._close_others()


# -- the group -------------------------------------------------------------------------------------


T = TypeVar("T")


@final
class LeaderGroup:
    """What rank 0's engine knows of the others. Raises: RankLost, from every method but the last.

    ``least_committed_bytes``: of the rank that has committed the fewest, after the last changes.
    """

    def __init__(self, crew: WorkerGroup, assembly: Assemble) -> None:
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

    def apply(self, changes: Sequence[StorageOp], own: Storage) -> None:
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

    def open_swap(self, path: str | None, own: KVMover) -> KVMover:
        """Rank 0's place for saved entries, which tells the others."""
        self._crew.required(OpenSwap(engine=self._engine, path=path), _nothing)
        return RankedMover(self._crew, self._engine, own)

    def close(self) -> None:
        """The engine is closed."""
        self._crew.try_tell(Disassemble(engine=self._engine))


@final
class RankedMover:
    """Moves a sequence's entries in every rank, or says that it is not done."""

    def __init__(self, crew: WorkerGroup, engine: int, own: KVMover) -> None:
        self._crew, self._engine, self._own = crew, engine, own

    @property
    def timer(self) -> Timer:
        return self._own.timer

    def save(self, seq_id: int, slots: Sequence[Slots]) -> None:
        message = SaveEntries(engine=self._engine, seq_id=seq_id, slots=slots)
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
