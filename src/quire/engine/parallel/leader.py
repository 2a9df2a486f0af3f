"""``LeaderGroup``: the other ranks of one engine, as rank 0's storage, runner and swap know them.

Each method carries out rank 0's own part and has the other ranks carry out theirs. ``WorkerGroup``
sends the calls.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, final

from quire.attention import AttentionBatch
from quire.engine.parallel.messages import Answer, Call, Failed
from quire.engine.parallel.worker_group import WorkerGroup, nothing
from quire.engine.swap.kv_mover import KVMover, Note, Timer
from quire.errors import RankLost
from quire.kv import Storage, StorageOp
from quire.kv.interface import Slots
from quire.memory import MemoryProvider
from quire.memory.machine.readings import Gauge, MemoryReading, SharedGauge
from quire.memory.residency import Residency, Resident
from quire.models.step_inputs import HostInputs

T = TypeVar("T")


@final
class LeaderGroup:
    """The other ranks of one engine. Methods raise RankLost, but not those that give memory back.

    ``least_committed_bytes``: of the rank that committed the fewest at the last changes.
    """

    def __init__(self, workers: WorkerGroup, *assembly: Any) -> None:
        """Assemble an engine in each rank: see ``Worker.assemble``. Raises: what a rank raises."""
        self._workers, self._engine = workers, workers.new_name()
        self.least_committed_bytes = 0
        try:
            self.required("assemble", *assembly, own=nothing)
        except Exception:
            self.close()  # a rank may have assembled it all the same
            raise

    def required(self, method: str, *args: Any, own: Callable[[], T]) -> T:
        """Call a method of each rank's engine beside ``own``. Raises: what any of them raises."""
        return self._workers.required(Call(method, (self._engine, *args)), own)

    def all_of(self, method: str, *args: Any, own: Callable[[], T]) -> tuple[T, list[Answer]]:
        """Call a method as ``required`` does, and return all answers. Raises: what ``own`` does."""
        return self._workers.all_of(Call(method, (self._engine, *args)), own)

    def try_tell(self, method: str, *args: Any) -> None:
        """Call a method of each rank's engine, and raise nothing."""
        self._workers.try_tell(Call(method, (self._engine, *args)))

    def make_storage(self, make: Callable[[], Storage]) -> Storage:
        """Make every rank's storage. Raises: MemoryUnavailable, and no rank has one then."""
        made: list[Storage] = []
        try:
            self.required("make_storage", own=lambda: made.append(make()))
        except Exception:
            for storage in made:
                storage.close()
            raise
        self.least_committed_bytes = 0
        return made[0]

    def apply(self, changes: Sequence[StorageOp], own: Storage) -> None:
        """Carry out changes in every rank.

        Raises: MemoryUnavailable where a rank was refused pages; RuntimeError where the ranks have
        committed different numbers of bytes.
        """
        failure: Exception | None = None

        def apply_own() -> int:
            nonlocal failure
            try:
                own.apply(changes)
            except Exception as error:  # the other ranks' answers are needed too
                failure = error
            return own.memory.committed_bytes

        here, answers = self.all_of("apply", changes, own=apply_own)
        there = [int(answer.value) for answer in answers]
        self.least_committed_bytes = min(here, *there)
        for error in (failure, *(a.error for a in answers if isinstance(a, Failed))):
            if error is not None:
                raise error
        if {here} != set(there):
            raise RuntimeError(
                f"the ranks have committed {[here, *there]} bytes for the same changes: what one "
                f"accounting decides must be the same in all"
            )

    def close_storage(self) -> None:
        """Close the other ranks' storages."""
        self.try_tell("close_storage")

    def compute(
        self, batches: Iterable[AttentionBatch], given: HostInputs, own: Callable[[], T]
    ) -> T:
        """Run one forward pass in all ranks. Return what rank 0's part returns."""
        numbers = [
            (b.query_starts, b.context_lens, b.tables.numpy(), b.slots.numpy(), b.block_size)
            for b in batches
        ]
        return self.required("compute", numbers, given, own=own)

    def resident(self, own: Resident, residency: Residency) -> Resident:
        """Return rank 0's memory around its cache, with that of the other ranks."""
        return RankedResident(self, own, keeps=residency != "on-demand" or own.prepares)

    def gauge(self, own: Gauge) -> Gauge:
        """Return a gauge of the rank with the least memory, or of a share of one machine's."""
        if self._workers.device_type == "cpu":
            return SharedGauge(own, self._workers.num_ranks)
        return RankedGauge(self, own)

    def open_swap(self, path: str | None, own: KVMover) -> KVMover:
        """Open swap space in every rank. Raises: ConfigError where a rank cannot write there."""
        self.required("open_swap", path, own=nothing)
        return RankedMover(self, own)

    def close(self) -> None:
        """Close the engine's part in each rank."""
        self.try_tell("disassemble")


@final
class RankedResident:
    """The memory around a cache that lies in several ranks. See ``Resident``.

    Each rank prepares the pages of its own steps. Of other ranks only ``prefault`` raises.
    """

    def __init__(self, team: LeaderGroup, own: Resident, *, keeps: bool) -> None:
        """``keeps``: whether a rank keeps memory that follows the ceiling."""
        self._team, self._own, self._keeps = team, own, keeps
        self._told_bytes: int | None = None

    @property
    def provider(self) -> MemoryProvider:
        return self._own.provider

    @property
    def prepares(self) -> bool:
        return self._own.prepares

    @property
    def kept_bytes(self) -> int:
        """This rank's; the others keep as much, or nearly."""
        return self._own.kept_bytes

    def prefault(self) -> None:
        if self._keeps:
            self._team.required("prefault", own=self._own.prefault)

    def prepare(self) -> None:
        self._own.prepare()

    def watch(self) -> None:
        self._own.watch()

    def follow(self, ceiling_bytes: int) -> None:
        self._own.follow(ceiling_bytes)
        if self._keeps and ceiling_bytes != self._told_bytes:
            self._told_bytes = ceiling_bytes
            self._team.try_tell("follow", ceiling_bytes)

    def rest(self, *, short: bool) -> None:
        self._own.rest(short=short)
        self._team.try_tell("rest", short)

    def close(self) -> None:
        self._own.close()  # the other ranks close theirs with their engine


@final
class RankedGauge:
    """Reads the device that has the least memory left, of all ranks' devices."""

    def __init__(self, team: LeaderGroup, own: Gauge) -> None:
        self._team, self._own = team, own

    def now_s(self) -> float:
        return self._own.now_s()

    def read(self) -> MemoryReading:
        """Read every device. Raises: MemoryUnavailable where one cannot be read."""
        try:
            here, answers = self._team.all_of("read_memory", own=self._own.read)
        except RankLost:  # the next step raises it
            return self._own.read()
        readings: list[MemoryReading] = [here]
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
            readings.append(answer.value)
        return min(readings, key=lambda reading: reading.available_bytes)


@final
class RankedMover:
    """Moves a sequence's entries in every rank, or in none. See ``KVMover``."""

    def __init__(self, team: LeaderGroup, own: KVMover) -> None:
        self._team, self._own = team, own

    @property
    def timer(self) -> Timer:
        return self._own.timer

    def save(self, seq_id: int, slots: Sequence[Slots]) -> None:
        try:
            self._team.required("save", seq_id, slots, own=lambda: self._own.save(seq_id, slots))
        except Exception:
            self.drop([seq_id])  # a rank may have saved it all the same
            raise

    def put_back(self, seq_id: int, slots: Sequence[Slots], num_skipped: Sequence[int]) -> int:
        return self._team.required(
            "put_back",
            *(seq_id, slots, num_skipped),
            own=lambda: self._own.put_back(seq_id, slots, num_skipped),
        )

    def drop(self, seq_ids: Sequence[int]) -> None:
        self._own.drop(seq_ids)
        if seq_ids:
            self._team.try_tell("drop", seq_ids)

    def try_out(self, num_bytes: int, saved: Note, loaded: Note) -> None:
        self._own.try_out(num_bytes, saved, loaded)

    def close(self) -> None:
        self._own.close()  # the other ranks close theirs with their engine
