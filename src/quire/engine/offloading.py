"""``ThreadedCarrier`` moves blocks between an engine's cache and its tiers, beside its steps.

Steps copy blocks to staging memory and from it; threads move staging memory to tiers and back, and
check every record before a byte of it can reach the cache.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.engine.kv_cache import KVCache
from quire.engine.kv_fingerprint import BlockLayout, has_blocks, kv_fingerprint
from quire.engine.kv_sizing import require_blocks, staging_bytes
from quire.engine.scheduling.offers import Lease, Offers
from quire.engine.scheduling.offload_policy import (
    LoadJob,
    OffloadPolicy,
    TierReport,
    columns_read,
)
from quire.engine.scheduling.step_costs import Clock, Costs
from quire.engine.sequence import RemoteBlocks
from quire.engine.statistics import PROMOTION_SECONDS, Histogram
from quire.engine.transfer import PeerTransfer
from quire.errors import ConfigError
from quire.kv.interface import BlockBytes, ExternalBlocks
from quire.kv.layout import attention_spec
from quire.kv.prefix_index import BlockEvent, BlockIdentity, BlockRemoved, Medium
from quire.models.file_hashes import CannotName
from quire.models.loader import LoadedModel
from quire.spec import Group, KeptWhole
from quire.tiers import TIERS, Deadline, Name, TierError
from quire.tiers.guard import TIER_CALLS, GuardedTier
from quire.tiers.record import BAD_REASONS, Checksums, KeyedSeal, Part, RecordFormat, Seal
from quire.tiers.tier import DescribedTier

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_STORE_SHARE = 0.5  # of staging memory, that may hold what is to be stored
_DROP_AGAIN_S = 1.0  # after a tier has refused to drop records
_STORE_S = 10.0  # that a batch of records may take
_IDLE_S = 0.02  # between two questions to an engine that has more to store
_CLOSE_S = 5.0  # to store what was copied out
CLEAR_S = 60.0  # that all tiers may take to forget a namespace
_NEW_SHARE = 0.2  # of a new measurement, in a mean
_LONGEST_KEY = 4096  # bytes of a key's file
_DRAINED_AT_ONCE = 16  # blocks that go to a thread together
_MOST_TRIED = 64  # ends of a prefix, where windows or states must be there too

Bytes = npt.NDArray[np.uint8]


# -- staging memory ------------------------------------------------------------------------------


@final
class Staging:
    """Buffers for records, of a few sizes, within a budget of bytes. Threads share it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._used_bytes = self._held_bytes = 0  # given out; and with those that are free
        self._free: dict[int, list[Bytes]] = {}

    def take(self, num_bytes: int, *, share: float = 1.0) -> Bytes | None:
        """Take a buffer u8[num_bytes], while less than a share of the capacity is taken."""
        with self._lock:
            if self._used_bytes + num_bytes > self.capacity_bytes * share:
                return None
            self._used_bytes += num_bytes
            if free := self._free.get(num_bytes):
                return free.pop()
            self._held_bytes += num_bytes
            for size, several in self._free.items():  # of other sizes
                while several and self._held_bytes > self.capacity_bytes:
                    several.pop()
                    self._held_bytes -= size
        return np.empty(num_bytes, np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Give a buffer back."""
        with self._lock:
            self._used_bytes -= len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
            self._has_room.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until a buffer is given back, or for so many seconds."""
        with self._lock:
            self._has_room.wait(seconds)

    @property
    def free_bytes(self) -> int:
        """Return the bytes that can be taken."""
        with self._lock:
            return self.capacity_bytes - self._used_bytes


# -- copies ----------------------------------------------------------------------------------------


def record_formats(
    kv: KVCache, fingerprint: bytes, block_size: int, seal: Seal
) -> list[RecordFormat]:
    """Make the format of each group's records, after how its blocks lie in storage."""
    assert isinstance(kv.storage, BlockBytes)
    formats = []
    for number, group in enumerate(kv.accounting.groups):
        rows = kv.storage.block_rows(number)
        formats.append(
            RecordFormat(
                fingerprint,
                number,
                block_size,
                list(_parts(group, rows, kv.storage.block_order)),
                seal,
            )
        )
    return formats


def _parts(group: Group, rows: "list[Tensor]", order: str) -> Iterable[Part]:
    layers = group.layers[:: max(1, -(-len(group.layers) // len(rows)))]
    if isinstance(group.spec, KeptWhole):
        for layer, row in zip(layers, rows, strict=True):
            size = row.shape[1]
            yield Part(layer=layer, dtype="uint8", order="states", shape=(size,), num_bytes=size)
        return
    spec = attention_spec(group)
    (heads, key_dim), (_, value_dim) = spec.entry_shapes
    together = len(group.layers) // len(rows)
    for layer, row in zip(layers, rows, strict=True):
        yield Part(
            layer=layer,
            dtype=spec.dtype,
            order=order,
            shape=(together, heads, key_dim, value_dim),
            num_bytes=row.shape[1],
        )


@final
class BlockCopies:
    """Copies whole blocks between a cache and payloads in staging memory."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._is_known = False  # where blocks lie
        self._rows: list[list[Tensor]] = []
        self._arrays: list[list[Bytes]] | None = None

    def out(self, group: int, block: int, payload: Bytes) -> None:
        """Copy a block into a payload: u8[bytes]."""
        self._look()
        start = 0
        if self._arrays is not None:
            for rows in self._arrays[group]:
                payload[start : start + rows.shape[1]] = rows[block]
                start += rows.shape[1]
            return
        import torch

        for tensor in self._rows[group]:
            size = tensor.shape[1]
            torch.from_numpy(payload[start : start + size]).copy_(tensor[block])
            start += size

    def into(self, group: int, block: int, payload: Bytes) -> None:
        """Copy a payload u8[bytes] into a block."""
        self._look()
        start = 0
        if self._arrays is not None:
            for rows in self._arrays[group]:
                rows[block] = payload[start : start + rows.shape[1]]
                start += rows.shape[1]
            return
        import torch

        for tensor in self._rows[group]:
            size = tensor.shape[1]
            tensor[block].copy_(torch.from_numpy(payload[start : start + size]))
            start += size

    def forget(self) -> None:
        """Let go of the cache's memory, until the next copy."""
        self._is_known, self._rows, self._arrays = False, [], None

    def _look(self) -> None:
        if self._is_known:
            return
        storage = self._kv.storage
        assert isinstance(storage, BlockBytes)
        self._is_known = True
        self._rows = [
            storage.block_rows(number) for number in range(len(self._kv.accounting.groups))
        ]
        on_host = all(rows.device.type == "cpu" for several in self._rows for rows in several)
        self._arrays = (
            [[rows.numpy() for rows in several] for several in self._rows] if on_host else None
        )


# -- the carrier -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A record that a job needs, and the tier that seems to have it."""

    tier: GuardedTier
    group: int
    column: int
    header: bytes
    name: Name


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A record that was loaded: its payload lies at the end of a buffer."""

    identity: BlockIdentity
    buffer: Bytes
    tier: GuardedTier  # which had it


@dataclass(slots=True)
class _Outgoing:
    """A block that is to be stored: its payload lies at the end of a buffer."""

    group: int
    identity: BlockIdentity
    buffer: Bytes
    is_sealed: bool | None = None  # None: the buffer has no header yet
    lease: str = ""  # for another server, and for no tier
    is_last: bool = False  # only for what keeps it when this process has ended


@dataclass(frozen=True, slots=True)
class _Drop:
    """Blocks of which tiers are to forget all records."""

    blocks: list[BlockIdentity]


@dataclass(frozen=True, slots=True)
class _Clear:
    """Tiers are to forget all records of the engine's namespace."""

    done: "Future[Mapping[str, str]]" = field(default_factory=Future)  # why one has not, by name


# An event is set once all before it is stored.
_Task: TypeAlias = list[_Outgoing] | LoadJob | _Drop | _Clear | threading.Event


class ThreadedCarrier:
    """See ``BlockCarrier``. A thread loads and another one stores; both end with ``close``.

    Records of all tiers are equally long. A tier that is sealed has names and bytes of its own.
    """

    def __init__(  # noqa: PLR0913 - what an engine has, and what its options say
        self,
        groups: Sequence[Group],
        block_size: int,
        copies: BlockCopies,
        tiers: Sequence[GuardedTier],  # the nearest first
        staging: Staging,
        *,
        transfer: PeerTransfer | None = None,  # blocks for other servers, and theirs
        only_reads: bool = False,  # tiers; a peer may be given blocks all the same
        has_threads: bool = True,  # without them the caller works
        keeps_events: bool = False,
    ) -> None:
        # Copies more out, unless steps do. Returns False to be called again: there is more.
        self.when_idle: Callable[[], bool] | None = None
        self.tiers, self.staging, self._transfer = tuple(tiers), staging, transfer
        self._groups, self._block_size, self._copies = tuple(groups), block_size, copies
        # A buffer holds the longest header that a tier has, and the payload at its end.
        # What records come from: its own tiers first, and then what others have left.
        self._sources = (*self.tiers, *(() if transfer is None else transfer.tiers))
        drains_to = None if transfer is None else transfer.drain_to
        # What keeps records when this process has ended.
        self._lasting = (
            *(tier for tier in tiers if _lasts(tier) and not only_reads),
            *(() if drains_to is None else (drains_to,)),
        )
        formats = [tier.formats for tier in tiers]
        formats += () if transfer is None else transfer.formats
        self._sizes = [max(each[n].num_bytes for each in formats) for n in range(len(groups))]
        self._payloads = [form.payload_bytes for form in formats[0]]
        # Groups of which a hit needs every block, and those of which it needs the last ones.
        self._everywhere = [n for n, group in enumerate(groups) if _is_full(group)]
        self._elsewhere = [n for n in range(len(groups)) if n not in self._everywhere]
        self._column_bytes = sum(self._sizes[n] for n in self._everywhere)
        self._end_bytes = sum(
            self._sizes[n] * len(columns_read(groups[n], block_size, 0, 2**20))
            for n in self._elsewhere
        )
        self._done: deque[LoadJob] = deque()
        self._came = threading.Condition()
        self._outgoing: list[_Outgoing] = []
        self._to_load: SimpleQueue[tuple[LoadJob, Deadline] | RemoteBlocks | None] = SimpleQueue()
        self._to_store: SimpleQueue[_Task | None] = SimpleQueue()
        self._events: list[BlockEvent] | None = [] if keeps_events else None
        # Of a tier that tells what it evicts, by name: the event that a copy is gone.
        self._told: dict[GuardedTier, dict[Name, BlockRemoved]] = {
            tier: {} for tier in tiers if keeps_events and tier.tells_evictions
        }
        for tier in self._told:
            tier.take_evicted()  # so that it begins to remember them
        self._num_clearing = 0  # while there is one, nothing is found
        self._hit_tokens = [0] * len(self._sources)  # the engine's thread writes them …
        # … and the loading one these.
        self._promotion_s = [Histogram(PROMOTION_SECONDS) for _ in self._sources]
        self._dropping: Counter[bytes] = Counter()  # chains of blocks that are not loaded
        self._stop_s: float | None = None  # monotonic: no record is stored after it
        self._load_s = self._copy_s = self._store_s = 0.0  # of a block
        works = {"load": self._load_all, "store": self._store_all} if has_threads else {}
        self._threads = [
            threading.Thread(target=work, name=f"quire-tiers-{name}", daemon=True)
            for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine's side -------------------------------------------------------------------------

    @property
    def load_s_per_block(self) -> float:
        return self._load_s

    @property
    def store_s_per_block(self) -> float:
        return self._copy_s + self._store_s

    def load(self, job: LoadJob, wait_s: float) -> bool:
        if self.staging.free_bytes < self._column_bytes + self._end_bytes:
            return False
        if not any(tier.may_load for tier in self._tiers_of(job)):
            return False
        self._to_load.put((job, Deadline.after(wait_s)))
        return True

    def loaded(self) -> list[LoadJob]:
        with self._came:
            done = list(self._done)
            self._done.clear()
        return done

    def fill(self, group: int, blocks: list[int], payloads: list[object]) -> None:
        for block, loaded in zip(blocks, payloads, strict=True):
            assert isinstance(loaded, _Loaded)
            self._copies.into(group, block, loaded.buffer[-self._payloads[group] :])

    def release(self, job: LoadJob) -> None:
        self._to_store.put(job)

    def copy_out(self, group: int, block: int, identity: BlockIdentity) -> bool:
        if not self.may_store:
            return True  # there is no place for it, and it is not asked for again
        buffer = self.staging.take(self._sizes[group], share=_STORE_SHARE)
        if buffer is None:
            return False
        begun_s = time.perf_counter()
        self._copies.out(group, block, buffer[-self._payloads[group] :])
        self._outgoing.append(_Outgoing(group, identity, buffer))
        self._copy_s = _mean(self._copy_s, time.perf_counter() - begun_s)
        return True

    def copy_leased(self, group: int, block: int, identity: BlockIdentity, lease: str) -> bool:
        buffer = self.staging.take(self._sizes[group], share=_STORE_SHARE)
        if buffer is None:
            return False
        self._copies.out(group, block, buffer[-self._payloads[group] :])
        self._outgoing.append(_Outgoing(group, identity, buffer, lease=lease))
        return True

    def lease(self, groups: Sequence[Sequence[int]]) -> Lease | None:
        return None if self._transfer is None else self._transfer.lease(groups)

    def skip(self, group: int, lease: str) -> None:
        if self._transfer is not None:
            self._transfer.skip(group, lease)

    def release_remote(self, remote: RemoteBlocks) -> None:
        self._to_load.put(remote)

    def end_leases(self) -> None:
        if self._transfer is not None:
            self._transfer.records.release_all()

    def send(self) -> None:
        if self._outgoing:
            self._to_store.put(self._outgoing)
            self._outgoing = []

    @property
    def may_drain(self) -> bool:
        return any(tier.may_store for tier in self._lasting)

    def copy_to_last(self, group: int, block: int, identity: BlockIdentity) -> bool:
        buffer = self.staging.take(self._sizes[group], share=_STORE_SHARE)
        if buffer is None:
            return False
        self._copies.out(group, block, buffer[-self._payloads[group] :])
        self._outgoing.append(_Outgoing(group, identity, buffer, is_last=True))
        if len(self._outgoing) >= _DRAINED_AT_ONCE:
            self.send()
        return True

    def wait_until_stored(self, seconds: float) -> None:
        stored = threading.Event()
        self._to_store.put(stored)
        stored.wait(seconds)

    def drop(self, blocks: Iterable[BlockIdentity]) -> None:
        several = list(blocks)
        with self._came:
            self._dropping.update(block.chain for block in several)
        self._to_store.put(_Drop(several))

    def note_inserted(self, job: LoadJob, end: int) -> None:
        tier: GuardedTier | None = None
        for column in range(end - 1, job.first - 1, -1):
            # A column without a record of its own was brought by what lies behind it: a state.
            for group in range(len(self._groups)):
                loaded = job.payloads.get((group, column))
                if isinstance(loaded, _Loaded):
                    tier = loaded.tier
                    break
            if tier is not None:
                self._hit_tokens[self._sources.index(tier)] += self._block_size

    def take_events(self) -> list[BlockEvent]:
        if not self._events:
            return []
        with self._came:
            events, self._events = self._events, []
        return events

    def report(self) -> tuple[TierReport, ...]:
        return tuple(map(self._report, range(len(self._sources))))

    def _report(self, at: int) -> TierReport:
        tier = self._sources[at]
        counts, usage, traits = tier.counted(), tier.usage(), tier.traits
        return TierReport(
            name=tier.name,
            medium=_medium(tier),
            is_shared=traits.is_shared,
            is_persistent=traits.is_persistent,
            state=tier.state,
            may_clear=tier.may_clear,
            num_records=usage.num_records,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            hit_tokens=self._hit_tokens[at],
            num_loaded=counts.num_loaded,
            loaded_bytes=counts.loaded_bytes,
            load_s=counts.load_s,
            num_stored=counts.num_stored,
            stored_bytes=counts.stored_bytes,
            store_s=counts.store_s,
            num_dropped=counts.num_stores_dropped,
            num_errors={call: counts.num_errors[call] for call in TIER_CALLS},
            num_bad={reason: counts.num_bad[reason] for reason in BAD_REASONS},
            promotion_s=self._promotion_s[at],
        )

    def trust(self, name: str | None) -> None:
        for tier in self._sources:
            if name in (None, tier.name):
                tier.trust()

    def clear(self) -> "Future[Mapping[str, str]]":
        clear = _Clear()
        if self._stop_s is not None:
            clear.done.set_result({tier.name: "it is closed" for tier in self.tiers})
            return clear.done
        clear.done.set_running_or_notify_cancel()  # a caller that leaves ends nothing
        self.send()  # so that it is stored before, and forgotten
        with self._came:
            self._num_clearing += 1
        self._to_store.put(clear)
        return clear.done

    @property
    def may_store(self) -> bool:
        return any(tier.may_store for tier in self.tiers)

    def wait_for_room(self, seconds: float) -> None:
        self.staging.wait(seconds)

    def restart(self) -> None:
        self._copies.forget()

    def wait(self, seconds: float) -> None:
        with self._came:
            if not self._done:
                self._came.wait(seconds)

    def close(self) -> None:
        if self._stop_s is not None:
            return
        self.send()
        self._stop_s = time.monotonic() + _CLOSE_S
        self._to_load.put(None)
        self._to_store.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a collector may run in any
                thread.join(_CLOSE_S + _STORE_S)
        self._copies.forget()
        if self._transfer is not None:
            self._transfer.close()
        for tier in self.tiers:
            tier.close()

    def work(self, *, loads: bool = True, stores: bool = True) -> None:
        """Do in this thread what the threads would: one load, one task of storing."""
        with suppress(Empty):
            if loads and (task := self._to_load.get_nowait()) is not None:
                self._take_up(task)
        with suppress(Empty):
            if stores and (other := self._to_store.get_nowait()) is not None:
                self._store(other)

    # -- loading -----------------------------------------------------------------------------------

    def _load_all(self) -> None:
        while (task := self._to_load.get()) is not None:
            self._take_up(task)

    def _take_up(self, task: tuple[LoadJob, Deadline] | RemoteBlocks) -> None:
        if isinstance(task, tuple):
            self._load(*task)
        elif self._transfer is not None:
            self._transfer.release(task)

    def _tiers_of(self, job: LoadJob) -> tuple[GuardedTier, ...]:
        """Return the tiers that a job asks: a peer that its request names goes first."""
        if self._transfer is None:
            return self.tiers
        return (*self._transfer.tiers_for(job.remote), *self.tiers)

    def _load(self, job: LoadJob, deadline: Deadline) -> None:
        job.end = job.first
        try:
            if not job.is_given_up and self._stop_s is None:
                self._load_one(job, deadline)
        except Exception:  # of a tier of another package: the job ends all the same
            log.exception("blocks cannot be loaded from tiers")
            job.end = job.first
        with self._came:
            self._done.append(job)
            self._came.notify_all()

    def _load_one(self, job: LoadJob, deadline: Deadline) -> None:
        """Load the longest run that tiers have, or as much of it as staging memory holds."""
        count = len(job.blocks)
        if self._column_bytes:
            count = min(count, (self.staging.free_bytes - self._end_bytes) // self._column_bytes)
        begun_s = time.perf_counter()
        if job.remote is not None and self._transfer is not None:
            self._transfer.wait_for(job.remote, deadline)
        run = self._run(job, max(0, count), deadline)
        end, trailing = job.first + len(run), list[_Wanted]()
        job.lacking = job.blocks[len(run) : max(0, count)]
        if self._elsewhere:
            end, trailing = self._end(job, end, deadline)
        whole = [each for column in run[: end - job.first] for each in column]
        num_loaded = self._load_records(job, [*trailing, *whole], deadline)
        if num_loaded == len(trailing) + len(whole):
            job.end = end
        elif not self._elsewhere:
            job.end = job.first + num_loaded // len(self._everywhere)
        job.is_cut = count < len(job.blocks) and job.end == job.first + count > job.first
        took_s = time.perf_counter() - begun_s
        if job.end > job.first:
            self._load_s = _mean(self._load_s, took_s / (job.end - job.first))
        for tier in {
            loaded.tier for loaded in job.payloads.values() if isinstance(loaded, _Loaded)
        }:
            self._promotion_s[self._sources.index(tier)].observe(took_s)

    def _run(self, job: LoadJob, count: int, deadline: Deadline) -> list[list[_Wanted]]:
        """Find the longest run of blocks, of at most ``count``, each from the nearest tier."""
        if not self._everywhere:
            return [[] for _ in range(count)]
        found: list[list[_Wanted]] = []
        goes_on = True
        tiers = self._tiers_of(job)
        while goes_on and len(found) < count:
            goes_on = False
            for tier in tiers:
                rest = [
                    [self._wanted(tier, group, job, job.first + at) for group in self._everywhere]
                    for at in range(len(found), count)
                ]
                in_order = [each for column in rest for each in column]
                more = self._find(tier, job, in_order, deadline) // len(self._everywhere)
                found += rest[:more]
                if more:
                    goes_on = True
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
        for tier in self._tiers_of(job):
            several = [self._wanted(tier, group, job, column) for column in columns]
            if self._find(tier, job, several, deadline) == len(several):
                return several
        return None

    def _wanted(self, tier: GuardedTier, group: int, job: LoadJob, column: int) -> _Wanted:
        header = tier.formats[group].header(job.blocks[column - job.first])
        return _Wanted(tier, group, column, header, tier.formats[group].name(header))

    def _find(
        self, tier: GuardedTier, job: LoadJob, several: list[_Wanted], deadline: Deadline
    ) -> int:
        """Count the first of these records that a tier has, and that are not being dropped."""
        with self._came:
            if self._num_clearing:
                return 0
            dropping = set(self._dropping) if self._dropping else ()
        if dropping:
            for at, each in enumerate(several):
                if job.blocks[each.column - job.first].chain in dropping:
                    several = several[:at]
                    break
        return tier.find([each.name for each in several], deadline)

    def _load_records(self, job: LoadJob, records: list[_Wanted], deadline: Deadline) -> int:
        """Load and check records, in order. Return how many, up to the first that is no use."""
        done = 0
        while done < len(records):
            tier = records[done].tier
            several, buffers = list[_Wanted](), list[Bytes]()
            for each in records[done : done + tier.traits.batch]:
                buffer = None
                if each.tier is tier:
                    buffer = self.staging.take(self._sizes[each.group])
                if buffer is None:
                    break
                several.append(each)
                buffers.append(buffer)
            count = self._load_batch(job, tier, several, buffers, deadline)
            for buffer in buffers[count:]:
                self.staging.give(buffer)
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
    ) -> int:
        """Load records of one tier into buffers. Return how many are good, from the first one."""
        views = [
            buffer.data[-tier.formats[each.group].num_bytes :]
            for each, buffer in zip(several, buffers, strict=True)
        ]
        count = tier.load([each.name for each in several], views, deadline)
        for at, (each, view) in enumerate(zip(several[:count], views, strict=False)):
            block = job.blocks[each.column - job.first]
            flaw = tier.formats[each.group].flaw(view, each.header)
            if flaw is not None:
                tier.note_bad(each.name, flaw)
                job.lacking.append(block)  # so that it is stored again
                self._tell_lost(tier, [(each.group, block)])
                return at
            tier.note_good(len(view))
            self._tell_kept(tier, [(each.name, each.group, block)])
            job.payloads[each.group, each.column] = _Loaded(block, buffers[at], tier)
        return count

    # -- storing -----------------------------------------------------------------------------------

    def _store_all(self) -> None:
        while (task := self._next_to_store()) is not None:
            self._store(task)

    def _store(self, task: _Task) -> None:
        try:
            if isinstance(task, threading.Event):
                task.set()
            elif isinstance(task, _Drop):
                self._drop_records(task)
            elif isinstance(task, _Clear):
                self._clear_all(task)
            elif isinstance(task, LoadJob):
                self._free_records(task)
            else:
                self._store_records(task)
        except Exception:  # of a tier of another package
            log.exception("blocks cannot be stored in tiers")

    def _next_to_store(self) -> _Task | None:
        """Wait for the next task. An engine without steps is asked for what it still has."""
        while self.when_idle is not None:
            try:
                return self._to_store.get_nowait()
            except Empty:
                if self.when_idle():
                    break
            try:
                return self._to_store.get(timeout=_IDLE_S)
            except Empty:
                pass
        return self._to_store.get()

    def _store_records(self, several: list[_Outgoing]) -> None:
        begun_s = time.thread_time()
        try:
            for each in several:
                if each.lease and self._transfer is not None:
                    self._transfer.keep(each.lease, each.group, each.identity, each.buffer.data)
            self._store_in_each(self._lasting, [each for each in several if each.is_last])
            usual = [each for each in several if not (each.lease or each.is_last)]
            self._store_in_each(self.tiers, usual)
        finally:
            for each in several:
                self.staging.give(each.buffer)
        self._store_s = _mean(self._store_s, (time.thread_time() - begun_s) / len(several))

    def _store_in_each(self, tiers: Sequence[GuardedTier], several: list[_Outgoing]) -> None:
        # A seal encrypts the payload in its place, so that plain records come first.
        for tier in sorted(tiers, key=lambda tier: tier.is_sealed):
            self._store_in(tier, several)

    def _store_in(self, tier: GuardedTier, several: list[_Outgoing]) -> None:
        for start in range(0, len(several), tier.traits.batch):
            names, views = list[Name](), list[memoryview]()
            for each in several[start : start + tier.traits.batch]:
                form = tier.formats[each.group]
                header = form.header(each.identity)
                view = each.buffer.data[-form.num_bytes :]
                if each.is_sealed is not tier.is_sealed:
                    form.finish(view, header)
                    each.is_sealed = tier.is_sealed
                names.append(form.name(header))
                views.append(view)
            if self._stop_s is not None and time.monotonic() > self._stop_s:
                return
            count = tier.store(names, views, Deadline.after(_STORE_S))
            kept = zip(names[:count], several[start : start + count], strict=True)
            self._tell_kept(tier, [(name, each.group, each.identity) for name, each in kept])

    def _free_records(self, job: LoadJob) -> None:
        """Give a job's buffers back, once nearer tiers have what they hold."""
        loaded, job.payloads = job.payloads, {}
        several: dict[int, list[_Outgoing]] = {}  # by the tier that had them
        try:
            for (group, _), each in loaded.items():
                assert isinstance(each, _Loaded)
                if each.tier not in self.tiers:  # a peer's, to which none is nearer
                    continue
                at = self.tiers.index(each.tier)
                several.setdefault(at, []).append(_Outgoing(group, each.identity, each.buffer))
            for at, outgoing in several.items():
                if not job.is_wrong:
                    self._store_in_each(self.tiers[:at], outgoing)
        finally:
            for each in loaded.values():
                assert isinstance(each, _Loaded)
                self.staging.give(each.buffer)

    def _drop_records(self, drop: _Drop) -> None:
        for tier in self.tiers:
            names = [
                form.name(form.header(block)) for block in drop.blocks for form in tier.formats
            ]
            while not tier.drop(names, Deadline.after(_STORE_S)) and self._stop_s is None:
                time.sleep(_DROP_AGAIN_S)  # no wrong record may stay where it can be found
            groups = range(len(tier.formats))
            self._tell_lost(tier, [(group, block) for block in drop.blocks for group in groups])
        if self._transfer is not None:
            self._transfer.drop(drop.blocks)
        with self._came:
            self._dropping -= Counter(block.chain for block in drop.blocks)

    def _clear_all(self, clear: _Clear) -> None:
        """Clear each tier. One that fails is not loaded from, so the others may be."""
        deadline, left = Deadline.after(CLEAR_S), dict[str, str]()
        for tier in self.tiers:
            try:
                why = tier.clear(deadline)
            except Exception as error:  # of a tier of another package
                log.exception("tier %s cannot be cleared", tier.name)
                why = str(error) or type(error).__name__
            if why is not None:
                left[tier.name] = why
        self.end_leases()
        with self._came:
            self._num_clearing -= 1
            for told in self._told.values():
                told.clear()
        clear.done.set_result(left)

    # -- events ------------------------------------------------------------------------------------

    # AllBlocksCleared, which is for all media, is told before tiers are cleared: what they keep
    # until then is not.

    def _tell_kept(self, tier: GuardedTier, several: list[tuple[Name, int, BlockIdentity]]) -> None:
        """Tell which copies a tier has, and which it has evicted for them."""
        if self._events is None or tier not in self.tiers:  # a peer's are not ours to tell
            return
        medium, told = _medium(tier), self._told.get(tier)
        events = list[BlockEvent]()
        if told is not None:
            gone = (told.pop(name, None) for name in tier.take_evicted())
            events += (event for event in gone if event is not None)
        events += (block.stored(group, medium) for _, group, block in several)
        with self._came:
            if self._num_clearing:
                return
            self._events += events
            if told is not None:
                told.update((name, block.removed(group, medium)) for name, group, block in several)

    def _tell_lost(self, tier: GuardedTier, several: list[tuple[int, BlockIdentity]]) -> None:
        """Tell which copies a tier was made to forget."""
        with self._came:
            if self._events is not None and tier in self.tiers and not self._num_clearing:
                self._events += (block.removed(group, _medium(tier)) for group, block in several)


def _is_full(group: Group) -> bool:
    """Tell whether a sequence reads all of its blocks in a group, however long it is."""
    return not isinstance(group.spec, KeptWhole) and int(group.live_start(2**40)) == 0


def _lasts(tier: GuardedTier) -> bool:
    """Tell whether a tier's records are of use when this process has ended."""
    return tier.traits.is_persistent or tier.traits.is_shared


def _medium(tier: GuardedTier) -> Medium:
    return "STORAGE" if _lasts(tier) else "CPU"


def _mean(mean: float, new: float) -> float:
    return new if not mean else mean + _NEW_SHARE * (new - mean)


# -- tiers of an engine ----------------------------------------------------------------------------


def make_offloading(
    config: EngineConfig, loaded: LoadedModel, kv: KVCache, costs: Costs, clock: Clock
) -> OffloadPolicy | None:
    """Open the tiers that the options name, for an engine's cache; None if they name none.

    Raises: ConfigError where the cache has no blocks that tiers could keep, for a shared tier
    without a key, and for a tier that cannot be opened.
    """
    transferring = config.kv_transfer_config
    if transferring is not None and not transferring.is_own:
        transferring = None  # vLLM's words for tiers
    if not config.tiers and transferring is None:
        return None
    require_blocks(
        config,
        loaded.name,
        source_tokens=loaded.spec.source_tokens,
        has_blocks=has_blocks(kv.accounting, kv.storage),
    )
    layout = BlockLayout.of(kv.accounting, kv.storage)
    key = None if config.kv_tier_key is None else _read_key(config.kv_tier_key)
    try:
        fingerprint = kv_fingerprint(loaded, config, layout)
    except CannotName as error:
        raise ConfigError(
            f"kv_tier: records of {loaded.name} would have no name: {error}"
        ) from None
    assert isinstance(kv.accounting, ExternalBlocks)
    block_size = layout.block_size
    plain = record_formats(kv, fingerprint.digest, block_size, Checksums())
    sealed, seal = plain, None
    if key is not None:
        seal = KeyedSeal(key)
        sealed = record_formats(kv, fingerprint.digest, block_size, seal)

    def is_same_model() -> bool:
        try:
            return kv_fingerprint(loaded, config, layout) == fingerprint
        except CannotName:
            return False

    largest = max(form.num_bytes for form in (*plain, *sealed))
    with ExitStack() as undo:
        tiers = list[GuardedTier]()
        for address in config.tiers:
            make = TIERS.find(address.kind, "kv_tier")
            with TIERS.blamed(address.kind, "kv_tier"):
                tier = make(address, largest, fingerprint.namespace)
            undo.callback(tier.close)
            if isinstance(tier, DescribedTier):
                try:
                    tier.describe(fingerprint.description.encode())
                except TierError as error:
                    log.warning("tier %s: %s", address, error)
            is_shared = tier.traits.is_shared
            if is_shared and key is None and not config.kv_tier_trusted:
                raise ConfigError(
                    f"kv_tier={address} is shared: who can write to it would choose this "
                    f"engine's answers: set kv_tier_key to a file with a secret key, or "
                    f"kv_tier_trusted if only trusted engines can reach it"
                )
            is_sealed = is_shared and key is not None
            alike = sum(str(other) == str(address) for other in config.tiers[: len(tiers)])
            name = str(address).removesuffix(":") + f" ({alike + 1})" * bool(alike)
            formats = sealed if is_sealed else plain
            tiers.append(GuardedTier(name, tier, formats, is_sealed=is_sealed))
        transfer = None
        if transferring is not None:
            transfer = PeerTransfer(transferring, plain, sealed, seal, fingerprint.digest)
            undo.callback(transfer.close)
            transfer.start()
        carrier = ThreadedCarrier(
            kv.accounting.groups,
            block_size,
            BlockCopies(kv),
            tiers,
            Staging(staging_bytes(kv.accounting.groups, block_size)),
            keeps_events=config.kv_events_config is not None and config.kv_events_config.publishes,
            transfer=transfer,
            only_reads=config.kv_tier_write == "never",
        )
        undo.pop_all()
    return OffloadPolicy(
        carrier,
        kv.accounting,
        costs,
        clock,
        write=config.kv_tier_write if config.tiers else "never",
        offers=None if transfer is None else Offers(carrier, clock),
        # Weights that only the engine has are never changed under it.
        is_same_model=(lambda: True) if loaded.is_private else is_same_model,
    )


def _read_key(path: str) -> bytes:
    """Read a key's file. Raises: ConfigError, which never shows the key."""
    try:
        with Path(path).expanduser().open("rb") as file:
            key = file.read(_LONGEST_KEY + 1)
    except OSError as error:
        raise ConfigError(f"kv_tier_key={path!r} cannot be read: {error.strerror}") from None
    if len(key) > _LONGEST_KEY:
        raise ConfigError(f"kv_tier_key={path!r} has more than {_LONGEST_KEY:,} bytes")
    return key
