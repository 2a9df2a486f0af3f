"""``VirtualCarrier`` moves no block: it says when one would have come, to ``OffloadPolicy``.

Two threads are simulated, as an engine has them: one loads, job after job, and the other one
stores. Each call of a tier takes its latency, and each record its bytes over the tier's speed.
Copies between the cache and staging memory take the engine's own time, at the price of swapping.
What is stored can be found when the whole task is done.

Left out: that these threads take processor time from the steps of an engine on a CPU, and that
several servers share the network and the disk of a shared tier.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias, final

from quire.engine.scheduling.block_carrier import LoadJob, TierReport, columns_read, reads_all
from quire.engine.scheduling.offers import Lease
from quire.engine.scheduling.step_costs import LoadTimes, mean_of_latest
from quire.engine.sequence import RemoteBlocks
from quire.fleet.detours import WAIT_S
from quire.kv.prefix_index import BlockEvent, BlockIdentity
from quire.planner.planned_tiers import RECORDS_A_CALL
from quire.planner.simulation.cost_model import StepCosts
from quire.planner.simulation.simulated_engine import VirtualClock
from quire.planner.simulation.virtual_tiers import Places, VirtualPeer
from quire.spec import Group
from quire.tiers import Name

# As in ``engine.offloading``.
_STORE_SHARE = 0.5  # of staging memory, that may hold what is to be stored
_MOST_TRIED = 64  # ends of a prefix, where windows or states must be there too
_CLOSE_S = 5.0  # to store what was copied out


@dataclass(frozen=True, slots=True)
class _Record:
    """One block of a group, which is in a tier or is to go there."""

    group: int
    column: int
    identity: BlockIdentity
    name: Name
    tier: int  # that has it; -1: none yet
    lease: str = ""  # for which another replica is to have it


_Task: TypeAlias = tuple[LoadJob, float] | list[_Record] | LoadJob


@dataclass(slots=True)
class _SimulatedThread:
    """A thread, which does one task after the other."""

    tasks: deque[tuple[float, _Task]] = field(default_factory=deque)  # and when each came
    current: _Task | None = None
    end_s: float = 0.0  # of the current task, or of the last one

    @property
    def next_s(self) -> float:
        """The moment at which it ends its task, or begins one."""
        if self.current is not None:
            return self.end_s
        return max(self.end_s, self.tasks[0][0]) if self.tasks else inf


@final
class VirtualCarrier:
    """See ``BlockCarrier``."""

    def __init__(
        self,
        groups: Sequence[Group],
        block_size: int,
        places: Places,
        costs: StepCosts,
        clock: VirtualClock,
        *,
        staging_bytes: int,
        shares_processor: bool,  # what stores takes computing from the steps
    ) -> None:
        self.when_idle: Callable[[], bool] | None = None
        self.tiers, self._places = places.tiers, places
        self.peer_load_s, self.num_peer_records = 0.0, 0  # that were loaded from peers
        self._sources = places.sources
        self._groups, self._block_size = tuple(groups), block_size
        self._costs, self._clock = costs, clock
        known = self._sources[0] if places.leaves_at is None else places.leaves_at.tier
        self._sizes = known.planned.record_bytes
        self._everywhere = [n for n, group in enumerate(groups) if reads_all(group)]
        self._elsewhere = [n for n in range(len(groups)) if n not in self._everywhere]
        self._column_bytes = sum(self._sizes[n] for n in self._everywhere)
        self._end_bytes = sum(
            self._sizes[n] * len(columns_read(groups[n], block_size, 0, 2**20))
            for n in self._elsewhere
        )
        self._staging_bytes, self._staged_bytes = staging_bytes, 0
        self._shares_processor = shares_processor
        self._loader, self._storer = _SimulatedThread(), _SimulatedThread()
        self._done: deque[LoadJob] = deque()
        self._outgoing: list[_Record] = []
        self._loads = LoadTimes()
        self._copy_s = self._store_s = 0.0  # of a block

    # -- the engine's side -------------------------------------------------------------------------

    def load_s(self, num_blocks: int) -> float:
        return self._loads.seconds(num_blocks)

    @property
    def store_s_per_block(self) -> float:
        return self._copy_s + self._store_s

    @property
    def may_store(self) -> bool:
        return True

    def load(self, job: LoadJob, wait_s: float) -> bool:
        self._catch_up()
        if self._free_bytes < self._column_bytes + self._end_bytes:
            return False
        self._loader.tasks.append((self._clock.now_s, (job, self._clock.now_s + wait_s)))
        return True

    def loaded(self) -> list[LoadJob]:
        self._catch_up()
        done = list(self._done)
        self._done.clear()
        return done

    def fill(self, group: int, blocks: list[int], payloads: list[object]) -> None:
        self._clock.now_s += len(blocks) * self._sizes[group] * self._costs.load_s_per_byte

    def release(self, job: LoadJob) -> None:
        self._storer.tasks.append((self._clock.now_s, job))

    def copy_out(self, group: int, block: int, identity: BlockIdentity) -> bool:
        return self._copy_out(group, identity, "")

    def _copy_out(self, group: int, identity: BlockIdentity, lease: str) -> bool:
        self._catch_up()
        size = self._sizes[group]
        if self._staged_bytes + size > _STORE_SHARE * self._staging_bytes:
            return False
        self._staged_bytes += size
        copy_s = size * self._costs.save_s_per_byte
        self._clock.now_s += copy_s
        self._copy_s = mean_of_latest(self._copy_s, copy_s)
        self._outgoing.append(_Record(group, -1, identity, _name(group, identity), -1, lease))
        return True

    def send(self) -> None:
        if self._outgoing:
            self._storer.tasks.append((self._clock.now_s, self._outgoing))
            self._outgoing = []

    def wait_for_room(self, seconds: float) -> None:
        staged, stop_s = self._staged_bytes, self._clock.now_s + seconds
        while self._staged_bytes >= staged and self._next_s <= stop_s:
            self._clock.wait_until(self._next_s)
            self._work()
        if self._staged_bytes >= staged:
            self._clock.wait_until(stop_s)

    may_drain = False  # a simulation ends with its trace

    def copy_to_last(self, group: int, block: int, identity: BlockIdentity) -> bool:
        return False

    def wait_until_stored(self, seconds: float) -> None:
        """Return before any of the ``seconds``: what is sent is stored at once."""

    def drop(self, blocks: Iterable[BlockIdentity]) -> None:
        for block in blocks:
            for group in range(len(self._groups)):
                for tier in self.tiers:
                    tier.records.drop(_name(group, block))

    def wait(self, seconds: float) -> None:
        stop_s = self._clock.now_s + seconds
        self._catch_up()
        while not self._done and self._next_s <= stop_s:
            self._clock.wait_until(self._next_s)
            self._work()
        if not self._done:
            self._clock.wait_until(stop_s)

    def restart(self) -> None:
        """Do nothing: no memory of a cache is held."""

    def note_inserted(self, job: LoadJob, end: int) -> None:
        tier = None
        for column in range(end - 1, job.first - 1, -1):
            # A column without a record of its own was brought by what lies behind it: a state.
            records = (job.payloads.get((group, column)) for group in range(len(self._groups)))
            tier = next((each.tier for each in records if isinstance(each, _Record)), tier)
            if tier is not None:
                self._sources[tier].hit_tokens += self._block_size

    def report(self) -> tuple[TierReport, ...]:
        """Return nothing: a simulation reads ``tiers`` itself."""
        return ()

    def take_events(self) -> list[BlockEvent]:
        """Return nothing: no router listens."""
        return []

    def trust(self, name: str | None) -> None:
        """Do nothing: no record here is bad."""

    def clear(self) -> "Future[Mapping[str, str]]":
        for tier in self.tiers:
            tier.records = tier.planned.make_records()
        done = Future[Mapping[str, str]]()
        done.set_result({})
        return done

    def close(self) -> None:
        self.send()
        stop_s = self._clock.now_s + _CLOSE_S
        while self._next_s <= stop_s:
            self._work()

    # -- threads -----------------------------------------------------------------------------------

    @property
    def _free_bytes(self) -> int:
        return self._staging_bytes - self._staged_bytes

    @property
    def _next_s(self) -> float:
        return min(self._loader.next_s, self._storer.next_s)

    def _catch_up(self) -> None:
        """Do what the threads have done by now."""
        while self._next_s <= self._clock.now_s:
            self._work()

    def _work(self) -> None:
        """End or begin the next task of a thread."""
        worker = self._loader if self._loader.next_s <= self._storer.next_s else self._storer
        now_s, task = worker.next_s, worker.current
        if task is not None:
            worker.current = None
            self._end(task, now_s)
            return
        _, worker.current = worker.tasks.popleft()
        worker.end_s = now_s + self._begin(worker.current, now_s)

    def _begin(self, task: _Task, now_s: float) -> float:
        """Return the seconds that a task will take."""
        if isinstance(task, tuple):
            return self._load_one(*task, now_s)
        if isinstance(task, LoadJob):
            return sum(self._store_s_of(records, of) for of, records in self._promoted(task))
        leased, own = self._parted(task)
        seconds = self._store_s_of(own, len(self.tiers)) + self._leave_s(leased)
        if self._shares_processor:
            self._store_s = mean_of_latest(self._store_s, seconds / len(task))
        return seconds

    def _end(self, task: _Task, now_s: float) -> None:
        if isinstance(task, tuple):
            self._done.append(task[0])
            return
        if isinstance(task, LoadJob):
            for of, records in self._promoted(task):
                self._store_in(records, of, now_s)
            self._give_back(task.payloads.values())
            task.payloads = {}
            return
        leased, own = self._parted(task)
        self._store_in(own, len(self.tiers), now_s)
        for record in leased:
            self._peer.keep(record.lease, record.name, self._sizes[record.group], now_s)
        self._give_back(task)

    # -- for other replicas ------------------------------------------------------------------------

    @property
    def _peer(self) -> VirtualPeer:
        assert self._places.leaves_at is not None, "nothing is left for others here"
        return self._places.leaves_at

    @property
    def is_of_prefill(self) -> bool:
        """Return whether it leaves blocks for other replicas."""
        return self._places.leaves_at is not None

    @property
    def is_idle(self) -> bool:
        """Whether its threads have nothing to do, and have done nothing that is not asked for."""
        return self._next_s == inf and not (self._done or self._outgoing)

    @property
    def next_s(self) -> float:
        """Return the moment at which a thread ends its task or begins one; infinite: at none."""
        return self._next_s

    def do_next(self) -> None:
        """End a thread's task or begin one, as soon as that is due, whatever the engine does."""
        self._work()

    def lease(self, groups: Sequence[Sequence[int]]) -> Lease | None:
        sizes = [[self._sizes[group] for group in own] for own in groups]
        name, count = self._peer.lease(sizes, self._clock.now_s)
        if not count:
            return None
        params = {"remote_port": self._peer.number, "remote_request_id": name}
        return Lease(name=name, num_blocks=count, params=params)

    def copy_leased(self, group: int, block: int, identity: BlockIdentity, lease: str) -> bool:
        return self._copy_out(group, identity, lease)

    def skip(self, group: int, lease: str) -> None:
        self._peer.skip(lease, self._sizes[group], self._clock.now_s)

    def least_wait_s(self, remote: RemoteBlocks | None) -> float:
        return 0.0 if remote is None else WAIT_S

    def release_remote(self, remote: RemoteBlocks) -> None:
        self._places.peers[remote.port].release(remote.lease)

    def end_leases(self) -> None:
        """Do nothing: no model here is another one than it was."""

    def _parted(self, records: list[_Record]) -> tuple[list[_Record], list[_Record]]:
        """Return the records that are left for others, and those for tiers."""
        leased = [record for record in records if record.lease]
        return leased, [record for record in records if not record.lease]

    def _leave_s(self, records: list[_Record]) -> float:
        """Return the seconds to write records where others load them."""
        if not records:
            return 0.0
        num_bytes = sum(self._sizes[record.group] for record in records)
        return num_bytes / self._peer.tier.planned.speed.write_bytes_per_s

    def _asked(self, job: LoadJob) -> Sequence[int]:
        """Return the sources that are asked for a job's blocks: the peer that it names first."""
        own = range(len(self.tiers))
        return own if job.remote is None else (len(own) + job.remote.port, *own)

    # -- loading -----------------------------------------------------------------------------------

    def _load_one(self, job: LoadJob, deadline_s: float, now_s: float) -> float:
        """Find the longest run that tiers have, and what of it comes in time. Return the seconds.

        As much is loaded as staging memory holds.
        """
        job.end = job.first
        if job.is_given_up:
            return 0.0
        count = len(job.blocks)
        if self._column_bytes:
            count = min(count, (self._free_bytes - self._end_bytes) // self._column_bytes)
        count = max(0, count)
        run, seconds = self._run(job, count)
        end, trailing = job.first + len(run), list[_Record]()
        job.lacking = job.blocks[len(run) :] if len(run) < count else []
        if self._elsewhere:
            end, trailing, more_s = self._last_end(job, end)
            seconds += more_s
        wanted = [*trailing, *(each for column in run[: end - job.first] for each in column)]
        finding_s = seconds
        good, seconds = self._in_time(wanted, seconds, max(0.0, deadline_s - now_s))
        if job.remote is not None:
            self.peer_load_s += seconds - finding_s
            self.num_peer_records += len(good)
        for record in good:
            size = self._sizes[record.group]
            self._staged_bytes += size
            tier = self._sources[record.tier]
            tier.loaded_bytes += size
            tier.records.use(record.name, now_s)
            job.payloads[record.group, record.column] = record
        if len(good) == len(wanted):
            job.end = end
        elif not self._elsewhere:
            job.end = job.first + len(good) // len(self._everywhere)
        job.is_cut = count < len(job.blocks) and job.end == job.first + count > job.first
        if job.end > job.first and job.remote is None:  # a peer's times say nothing of tiers
            self._loads.note(job.end - job.first, seconds)
        return seconds

    def _run(self, job: LoadJob, count: int) -> tuple[list[list[_Record]], float]:
        """Find the longest run of blocks, each from the nearest tier, and the seconds it takes."""
        if not self._everywhere:
            return [[] for _ in range(count)], 0.0
        found: list[list[_Record]] = []
        seconds, goes_on = 0.0, True
        while goes_on and len(found) < count:
            goes_on = False
            for number in self._asked(job):
                tier = self._sources[number]
                seconds += tier.planned.speed.call_s
                before = len(found)
                for at in range(before, count):
                    column = self._column(job, job.first + at, self._everywhere, number)
                    if not all(tier.records.has(each.name) for each in column):
                        break
                    found.append(column)
                if len(found) > before:
                    goes_on = True
                    break
        return found, seconds

    def _last_end(self, job: LoadJob, most: int) -> tuple[int, list[_Record], float]:
        """Find the last end where windows and states are there: it, its records, the seconds."""
        seconds = 0.0
        for end in range(most, max(job.first, most - _MOST_TRIED), -1):
            trailing = list[_Record]()
            for group in self._elsewhere:
                columns = columns_read(self._groups[group], self._block_size, job.first, end)
                several, more_s = self._all_in_one(job, group, columns)
                seconds += more_s
                if several is None:
                    break
                trailing += several
            else:
                return end, trailing, seconds
        return job.first, [], seconds

    def _all_in_one(
        self, job: LoadJob, group: int, columns: range
    ) -> tuple[list[_Record] | None, float]:
        """Find a tier that has a group's records of all these columns, and the seconds it takes."""
        seconds = 0.0
        for number in self._asked(job):
            tier = self._sources[number]
            seconds += tier.planned.speed.call_s
            several = [self._column(job, column, [group], number)[0] for column in columns]
            if all(tier.records.has(each.name) for each in several):
                return several, seconds
        return None, seconds

    def _column(self, job: LoadJob, column: int, groups: Sequence[int], tier: int) -> list[_Record]:
        identity = job.blocks[column - job.first]
        return [_Record(n, column, identity, _name(n, identity), tier) for n in groups]

    def _in_time(
        self, wanted: list[_Record], seconds: float, wait_s: float
    ) -> tuple[list[_Record], float]:
        """Return the first records that come before a job's deadline, and the seconds they take."""
        in_batch, last = 0, -1
        for count, record in enumerate(wanted):
            speed = self._sources[record.tier].planned.speed
            if record.tier != last or in_batch == RECORDS_A_CALL:
                seconds += speed.call_s
                in_batch, last = 0, record.tier
            in_batch += 1
            seconds += self._sizes[record.group] / speed.read_bytes_per_s
            if seconds > wait_s:
                return wanted[:count], wait_s
        return wanted, seconds

    # -- storing -----------------------------------------------------------------------------------

    def _promoted(self, job: LoadJob) -> list[tuple[int, list[_Record]]]:
        """Return what goes to nearer tiers of what was loaded: how many tiers, and records."""
        if job.is_wrong:
            return []
        several: dict[int, list[_Record]] = {}
        for payload in job.payloads.values():
            assert isinstance(payload, _Record)
            if 0 < payload.tier < len(self.tiers):  # what peers left goes nowhere else
                several.setdefault(payload.tier, []).append(payload)
        return list(several.items())

    def _store_s_of(self, records: list[_Record], num_tiers: int) -> float:
        """Return the seconds to store records in the first tiers."""
        seconds = 0.0
        for tier in self.tiers[:num_tiers]:
            speed = tier.planned.speed
            seconds += speed.call_s * -(-len(records) // RECORDS_A_CALL)
            lacking = (r for r in records if not tier.records.has(r.name))
            seconds += sum(self._sizes[r.group] for r in lacking) / speed.write_bytes_per_s
        return seconds

    def _store_in(self, records: list[_Record], num_tiers: int, now_s: float) -> None:
        for tier in self.tiers[:num_tiers]:
            for start in range(0, len(records), RECORDS_A_CALL):
                batch = records[start : start + RECORDS_A_CALL]
                lacking = [not tier.records.has(record.name) for record in batch]
                sizes = [self._sizes[record.group] for record in batch]
                kept = tier.records.keep(
                    [(r.name, size) for r, size in zip(batch, sizes, strict=True)], now_s
                )
                tier.stored_bytes += sum(
                    size for size, new in zip(sizes[:kept], lacking[:kept], strict=True) if new
                )

    def _give_back(self, records: Iterable[object]) -> None:
        for record in records:
            assert isinstance(record, _Record)
            self._staged_bytes -= self._sizes[record.group]


def _name(group: int, block: BlockIdentity) -> Name:
    """Name a record. A tier's own names are hashes too, of the block's chain and more."""
    return bytes((block.chain[0] ^ group,)) + block.chain[1:] if group else block.chain
