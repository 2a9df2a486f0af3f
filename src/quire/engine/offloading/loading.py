"""``RecordLoader``: finds the longest run of a prompt's blocks in tiers, loads it and checks it.

A hit needs every block of some groups, and of those with windows or states the last ones alone, so
that it can end only where all of them are there.
"""

import threading
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast, final

from quire.engine.offloading.copy_events import CopyEvents
from quire.engine.offloading.forgetting import Forgetting
from quire.engine.offloading.staging import Bytes, Staging
from quire.engine.scheduling.block_carrier import LoadJob, columns_read, reads_all
from quire.engine.scheduling.step_costs import LoadTimes
from quire.engine.statistics import PROMOTION_SECONDS, Histogram
from quire.engine.transfer import PeerTransfer
from quire.kv.prefix_index import BlockIdentity
from quire.spec import Group
from quire.tiers import Deadline, Name
from quire.tiers.guard import GuardedTier
from quire.tiers.record import BadReason

_MOST_TRIED = 64  # ends of a prefix, where windows or states must be there too


@dataclass(frozen=True, slots=True)
class LoadedRecord:
    """A record in staging memory: its payload lies at the end of a buffer."""

    identity: BlockIdentity
    buffer: Bytes
    tier: GuardedTier  # which had it


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A record that a job needs, and the tier that seems to have it."""

    tier: GuardedTier
    group: int
    column: int
    identity: BlockIdentity
    header: bytes
    name: Name


def payloads_of(job: LoadJob) -> dict[tuple[int, int], LoadedRecord]:
    """Return what was loaded for a job, by group and column."""
    return cast("dict[tuple[int, int], LoadedRecord]", job.payloads)


@final
class RecordLoader:
    """Loads one job after the other, in one thread. A job is that thread's until it is done."""

    def __init__(
        self,
        groups: Sequence[Group],
        block_size: int,
        tiers: Sequence[GuardedTier],  # the nearest first
        staging: Staging,
        *,
        transfer: PeerTransfer | None,
        forgetting: Forgetting,
        events: CopyEvents,
    ) -> None:
        self.times = LoadTimes()
        self._groups, self._block_size, self._tiers = groups, block_size, tuple(tiers)
        self._staging, self._transfer = staging, transfer
        self._forgetting, self._events = forgetting, events
        self._everywhere = [n for n, group in enumerate(groups) if reads_all(group)]
        self._elsewhere = [n for n in range(len(groups)) if n not in self._everywhere]
        self._column_bytes = sum(staging.sizes[n] for n in self._everywhere)
        self._end_bytes = sum(
            staging.sizes[n] * len(columns_read(groups[n], block_size, 0, 2**20))
            for n in self._elsewhere
        )
        self._lock = threading.Lock()
        self._seconds: dict[GuardedTier, Histogram] = {}  # of jobs, by the tiers that had records

    @property
    def least_bytes(self) -> int:
        """Return the staging memory without which nothing is loaded."""
        return self._column_bytes + self._end_bytes

    def tiers_for(self, job: LoadJob) -> tuple[GuardedTier, ...]:
        """Return the tiers that a job asks: a peer that its request names goes first."""
        if self._transfer is None:
            return self._tiers
        return (*self._transfer.tiers_for(job.remote), *self._tiers)

    def seconds(self, tier: GuardedTier) -> Histogram:
        """Return how long jobs took that found records in a tier. Any thread may ask."""
        with self._lock:
            return deepcopy(self._seconds.get(tier)) or Histogram(PROMOTION_SECONDS)

    def load(self, job: LoadJob, deadline: Deadline) -> None:
        """Load the longest run that tiers have, or as much of it as staging memory holds."""
        count = len(job.blocks)
        if self._column_bytes:
            room = (self._staging.free_bytes - self._end_bytes) // self._column_bytes
            count = max(0, min(count, room))
        begun_s = time.perf_counter()
        if job.remote is not None and self._transfer is not None:
            self._transfer.wait_for(job.remote, deadline, lambda: not job.is_given_up)
        run = self._run(job, count, deadline)
        end, trailing = job.first + len(run), list[_Wanted]()
        if deadline.left_s and len(run) < count:  # else it is not known
            # Also what was not looked for: behind a missing block no other one is of use.
            job.lacking = job.blocks[len(run) :]
        if self._elsewhere:
            end, trailing = self._end(job, end, deadline)
        whole = [each for column in run[: end - job.first] for each in column]
        num_loaded = self._load_records(job, [*trailing, *whole], deadline)
        if num_loaded == len(trailing) + len(whole):
            job.end = end
        elif not self._elsewhere:
            job.end = job.first + num_loaded // len(self._everywhere)
        job.is_cut = count < len(job.blocks) and job.end == job.first + count > job.first
        self._note_time(job, time.perf_counter() - begun_s)

    def _note_time(self, job: LoadJob, took_s: float) -> None:
        if job.end > job.first and job.remote is None:  # a peer's times say nothing of tiers
            self.times.note(job.end - job.first, took_s)
        with self._lock:
            for tier in {loaded.tier for loaded in payloads_of(job).values()}:
                self._seconds.setdefault(tier, Histogram(PROMOTION_SECONDS)).observe(took_s)

    # -- finding -----------------------------------------------------------------------------------

    def _run(self, job: LoadJob, count: int, deadline: Deadline) -> list[list[_Wanted]]:
        """Find the longest run of blocks, of at most ``count``, each from the nearest tier."""
        if not self._everywhere:
            return [[] for _ in range(count)]
        found, tiers = list[list[_Wanted]](), self.tiers_for(job)
        named = dict[GuardedTier, list[list[_Wanted]]]()  # once: a long prompt has many
        while len(found) < count and deadline.left_s:
            for tier in tiers:
                if not tier.may_load:
                    continue
                if tier not in named:
                    named[tier] = [
                        [self._wanted(tier, group, job, column) for group in self._everywhere]
                        for column in range(job.first, job.first + count)
                    ]
                rest = named[tier][len(found) :]
                in_order = [each for column in rest for each in column]
                if more := self._find(tier, in_order, deadline) // len(self._everywhere):
                    found += rest[:more]
                    break
            else:
                break
        return found

    def _end(self, job: LoadJob, most: int, deadline: Deadline) -> tuple[int, list[_Wanted]]:
        """Find the last end where all windows and states are there, too: it and its records."""
        for end in range(most, max(job.first, most - _MOST_TRIED), -1):
            trailing = list[_Wanted]()
            for group in self._elsewhere:
                columns = columns_read(self._groups[group], self._block_size, job.first, end)
                several = self._all_in_one(job, group, columns, deadline)
                if several is None:
                    break
                trailing += several
            else:
                return end, trailing
        return job.first, []

    def _all_in_one(
        self, job: LoadJob, group: int, columns: range, deadline: Deadline
    ) -> list[_Wanted] | None:
        """Find a tier that has a group's records of all these columns."""
        for tier in self.tiers_for(job):
            several = [self._wanted(tier, group, job, column) for column in columns]
            if self._find(tier, several, deadline) == len(several):
                return several
        return None

    def _wanted(self, tier: GuardedTier, group: int, job: LoadJob, column: int) -> _Wanted:
        identity, form = job.blocks[column - job.first], tier.formats[group]
        header = form.header(identity)
        return _Wanted(tier, group, column, identity, header, form.name(header))

    def _find(self, tier: GuardedTier, several: Sequence[_Wanted], deadline: Deadline) -> int:
        """Count the first of these records that a tier has."""
        count = self._forgetting.num_kept(tier, (each.identity for each in several))
        return tier.find([each.name for each in several[:count]], deadline)

    # -- bytes -------------------------------------------------------------------------------------

    def _load_records(self, job: LoadJob, records: list[_Wanted], deadline: Deadline) -> int:
        """Load and check records, in order. Return how many, up to the first that is no use."""
        done = 0
        while done < len(records):
            tier = records[done].tier
            several, buffers = list[_Wanted](), list[Bytes]()
            for each in records[done : done + tier.traits.batch]:
                buffer = self._staging.take(each.group) if each.tier is tier else None
                if buffer is None:
                    break
                several.append(each)
                buffers.append(buffer)
            before = len(job.payloads)
            try:
                self._load_batch(job, tier, several, buffers, deadline)
            finally:  # memory may run out where a seal is opened
                count = len(job.payloads) - before
                self._staging.give(buffers[count:])
            done += count
            if not count or count < len(several):
                break
        return done

    def _load_batch(
        self,
        job: LoadJob,
        tier: GuardedTier,
        several: list[_Wanted],
        buffers: list[Bytes],
        deadline: Deadline,
    ) -> None:
        """Load records of one tier into buffers. The job has the good ones, from the first one."""
        views = [
            buffer.data[-tier.formats[each.group].num_bytes :]
            for each, buffer in zip(several, buffers, strict=True)
        ]
        with self._events.keeping(tier) as call:
            count = tier.load([each.name for each in several], views, deadline)
            if count < len(several) and deadline.left_s:  # found, and gone or of another length
                lost = several[count]
                if tier.has_another_length(lost.name, views[count], deadline):
                    self._drop(tier, lost, "size")
                job.lacking.append(lost.identity)
            good = 0
            for each, view in zip(several[:count], views, strict=False):
                flaw = tier.formats[each.group].flaw(view, each.header)
                if flaw is not None:
                    self._drop(tier, each, flaw)
                    job.lacking.append(each.identity)  # so that it is stored again
                    break
                tier.note_good(len(view))
                loaded = LoadedRecord(each.identity, buffers[good], tier)
                job.payloads[each.group, each.column] = loaded
                good += 1
            kept = [
                (each.name, each.group, each.identity)
                for each in several[:good]
                if self._forgetting.is_kept(tier, each.identity)
            ]
            self._events.note_kept(call, kept)

    def _drop(self, tier: GuardedTier, record: _Wanted, flaw: BadReason) -> None:
        with self._events.losing(tier, [(record.name, record.group, record.identity)]):
            tier.note_bad(record.name, flaw)
