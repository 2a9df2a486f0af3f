"""``ThreadedCarrier`` moves blocks between an engine's cache and its tiers, beside its steps.

The engine copies blocks to staging memory and from it, between steps. One thread moves records from
tiers into staging memory and checks each before a byte of it can reach the cache (``loading``); the
other one stores what was copied out (``storing``) and has tiers forget (``forgetting``).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias, final

from quire.engine.offloading.block_copies import BlockCopies
from quire.engine.offloading.copy_events import CopyEvents, medium_of
from quire.engine.offloading.forgetting import Forgetting
from quire.engine.offloading.loading import LoadedRecord, RecordLoader, payloads_of
from quire.engine.offloading.staging import Bytes, Staging
from quire.engine.offloading.storing import OutgoingBlock, RecordStorer
from quire.engine.scheduling.block_carrier import LoadJob, TierReport
from quire.engine.scheduling.offers import Lease
from quire.engine.scheduling.step_costs import mean_of_latest
from quire.engine.sequence import RemoteBlocks
from quire.engine.transfer import PeerTransfer
from quire.errors import ConfigError
from quire.kv.prefix_index import BlockEvent, BlockIdentity
from quire.spec import Group
from quire.tiers import Deadline
from quire.tiers.guard import TIER_CALLS, GuardedTier
from quire.tiers.record import BAD_REASONS

log = logging.getLogger(__name__)

_STORE_SHARE = 0.5  # of staging memory, that may hold what is to be stored
_IDLE_S = 0.02  # between two questions to an engine that has more to store
_CLOSE_S = 5.0  # to store what was copied out
_LAST_CALL_S = 10.0  # that a call may go on which is under way then
_DRAINED_AT_ONCE = 16  # blocks that go to a thread together
_OVERDUE_S = 1.0  # that a job's thread may need beyond the job's time before none is given to it

_Call: TypeAlias = Callable[[], object]


class ThreadedCarrier:
    """See ``BlockCarrier`` and, with a ``transfer``, ``BlockTransfer``. Closed, it has no threads.

    Fields without a word of their own are the engine's: the thread that holds its lock.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        block_size: int,
        copies: BlockCopies,
        tiers: Sequence[GuardedTier],  # the nearest first
        staging: Staging,
        *,
        transfer: PeerTransfer | None = None,  # blocks for other servers, and theirs
        only_reads: bool = False,  # tiers; a peer may be given blocks all the same
        keeps_events: bool = False,
    ) -> None:
        """Make a carrier that works after ``start``, or where its caller calls ``work``."""
        self.tiers, self.staging, self._transfer = tuple(tiers), staging, transfer
        self._block_size, self._copies = block_size, copies
        drains_to = None if transfer is None else transfer.drain_to
        # What keeps records when this process has ended.
        self._lasting = (
            *(tier for tier in tiers if tier.traits.outlives_process and not only_reads),
            *(() if drains_to is None else (drains_to,)),
        )
        self._nearer = {tier: self.tiers[:at] for at, tier in enumerate(tiers)}
        self._outgoing: list[OutgoingBlock] = []
        self._copy_s = 0.0  # of a block
        self._hit_tokens = Counter[GuardedTier]()
        self._came = threading.Condition()
        self._done: list[LoadJob] = []  # under its lock
        self._job_ends_s: float | None = None  # monotonic: the one under way. The loading thread's
        self._told_s: float | None = None  # … of one that the log has
        self._closing = threading.Event()
        events = self._events = CopyEvents(tiers if keeps_events else ())
        self._forgetting = Forgetting(self.tiers, transfer, events)
        self._drops_again = False  # a call that does is to come
        self._loader = RecordLoader(
            groups,
            block_size,
            self.tiers,
            staging,
            transfer=transfer,
            forgetting=self._forgetting,
            events=events,
        )
        self._storer = RecordStorer(
            self.tiers, staging, transfer=transfer, forgetting=self._forgetting, events=events
        )
        self._loading, self._storing = (
            CallThread("quire-tiers-load"),
            CallThread("quire-tiers-store"),
        )

    def start(self) -> None:
        """Begin the two threads, or none. Raises: ConfigError if the system has none left."""
        try:
            self._loading.start()
            self._storing.start()
        except RuntimeError as error:
            self._loading.end()
            self._loading.join(_CLOSE_S)
            raise ConfigError(
                f"kv_tier: the thread that moves blocks cannot be started ({error}): raise the "
                f"limit of threads (ulimit -u, or pids of a control group)"
            ) from error

    def work(self, *, loads: bool = True, stores: bool = True) -> bool:
        """Do here what each thread would do next. Return whether there was something."""
        loaded = loads and self._loading.make_one()
        return (stores and self._storing.make_one()) or loaded

    def close(self) -> None:
        if self._closing.is_set():
            return
        self.send()
        self._storer.stop_s = time.monotonic() + _CLOSE_S
        self._closing.set()
        self._storing.put(self._forgetting.end)
        for thread in (self._loading, self._storing):
            thread.end()
        for thread in (self._loading, self._storing):
            thread.join(_CLOSE_S + _LAST_CALL_S)
        self._copies.forget()
        if self._transfer is not None:
            self._transfer.close()
        for tier in self.tiers:
            tier.close()

    def restart(self) -> None:
        self._copies.forget()

    # -- loading -----------------------------------------------------------------------------------

    def load_s(self, num_blocks: int) -> float:
        return self._loader.times.seconds(num_blocks)

    def load(self, job: LoadJob, wait_s: float) -> bool:
        if self.staging.free_bytes < self._loader.least_bytes or self._hangs():
            return False
        if not any(tier.may_load for tier in self._loader.tiers_for(job)):
            return False
        self._loading.put(partial(self._load, job, Deadline.after(wait_s)))
        return True

    def _hangs(self) -> bool:
        """Tell whether the loading thread hangs in a tier that keeps no deadline: a dead disk."""
        ends_s = self._job_ends_s
        if ends_s is None or time.monotonic() <= ends_s + _OVERDUE_S:
            return False
        if ends_s != self._told_s:
            self._told_s = ends_s
            log.warning("tiers: a load hangs: until it ends, all prompts are computed")
        return True

    def _load(self, job: LoadJob, deadline: Deadline) -> None:
        job.end, self._job_ends_s = job.first, max(time.monotonic(), deadline.at_s)
        try:
            # No tier is to blame for a job that has waited for others until its time was over.
            if deadline.left_s and not job.is_given_up and not self._closing.is_set():
                self._loader.load(job, deadline)
        except Exception:  # of a tier of another package: the job ends all the same
            log.exception("blocks cannot be loaded from tiers")
            job.end = job.first
        self._job_ends_s = None
        with self._came:
            self._done.append(job)
            self._came.notify_all()

    def wait(self, seconds: float) -> None:
        with self._came:
            if not self._done:
                self._came.wait(seconds)

    def loaded(self) -> list[LoadJob]:
        with self._came:
            done, self._done = self._done, []
        return done

    def fill(self, group: int, blocks: list[int], payloads: list[object]) -> None:
        for block, loaded in zip(blocks, payloads, strict=True):
            assert isinstance(loaded, LoadedRecord)
            self._copies.into(group, block, loaded.buffer)

    def note_inserted(self, job: LoadJob, end: int) -> None:
        loaded, tier = payloads_of(job), None
        for column in range(end - 1, job.first - 1, -1):
            # A column without a record of its own was brought by what lies behind it: a state.
            own = (loaded.get((group, column)) for group in range(len(self.staging.sizes)))
            tier = next((record.tier for record in own if record is not None), tier)
            if tier is not None:
                self._hit_tokens[tier] += self._block_size

    def release(self, job: LoadJob) -> None:
        loaded, job.payloads = payloads_of(job), {}
        promoted, rest = list[OutgoingBlock](), list[Bytes]()
        for (group, _), each in loaded.items():
            nearer = () if job.is_wrong else self._nearer.get(each.tier, ())
            if nearer:
                promoted.append(OutgoingBlock(group, each.identity, each.buffer, nearer))
            else:
                rest.append(each.buffer)
        self.staging.give(rest)
        if promoted:
            promoted.sort(key=lambda each: len(each.tiers))
            self._storing.put(partial(self._storer.store, promoted))

    # -- storing -----------------------------------------------------------------------------------

    @property
    def store_s_per_block(self) -> float:
        return self._copy_s + self._storer.s_per_block

    @property
    def may_store(self) -> bool:
        return any(tier.may_store for tier in self.tiers)

    @property
    def may_drain(self) -> bool:
        return any(tier.may_store for tier in self._lasting)

    def copy_out(self, group: int, block: int, identity: BlockIdentity) -> bool:
        if not self.may_store:
            return True  # there is no place for it, and it is not asked for again
        return self._copy_out(group, block, identity, self.tiers)

    def copy_to_last(self, group: int, block: int, identity: BlockIdentity) -> bool:
        if not self._copy_out(group, block, identity, self._lasting):
            return False
        if len(self._outgoing) >= _DRAINED_AT_ONCE:
            self.send()
        return True

    def _copy_out(
        self,
        group: int,
        block: int,
        identity: BlockIdentity,
        tiers: Sequence[GuardedTier],
        lease: str = "",
    ) -> bool:
        buffer = self.staging.take(group, share=_STORE_SHARE)
        if buffer is None:
            self._storing.wake()  # there may be room when no step is run any more
            return False
        begun_s = time.perf_counter()
        self._copies.out(group, block, buffer)
        self._copy_s = mean_of_latest(self._copy_s, time.perf_counter() - begun_s)
        self._outgoing.append(OutgoingBlock(group, identity, buffer, tiers, lease))
        return True

    def send(self) -> None:
        if self._outgoing:
            self._storing.put(partial(self._storer.store, self._outgoing))
            self._outgoing = []

    def wait_for_room(self, seconds: float) -> None:
        self.staging.wait(seconds)

    def wait_until_stored(self, seconds: float) -> None:
        stored = threading.Event()
        self._storing.put(stored.set)
        stored.wait(seconds)

    @property
    def when_idle(self) -> Callable[[], bool] | None:
        return self._storing.when_idle

    @when_idle.setter
    def when_idle(self, store: Callable[[], bool] | None) -> None:
        self._storing.when_idle = store

    def drop(self, blocks: Iterable[BlockIdentity]) -> None:
        several = list(blocks)
        self._forgetting.begin_drop(several)
        self._storing.put(partial(self._drop, several))

    def _drop(self, blocks: Sequence[BlockIdentity]) -> None:
        self._forgetting.drop(blocks)
        self._ask_again()

    def _drop_again(self) -> None:
        self._drops_again = False
        self._forgetting.drop_again()
        self._ask_again()

    def _ask_again(self) -> None:
        """Have tiers that have refused to forget asked again, when they may be."""
        again_s = self._forgetting.again_s
        if again_s is not None and not self._drops_again:
            self._drops_again = True
            self._storing.put_later(self._drop_again, again_s)

    def clear(self) -> "Future[Mapping[str, str]]":
        done = Future[Mapping[str, str]]()
        if self._closing.is_set():
            done.set_result({tier.name: "it is closed" for tier in self.tiers})
            return done
        done.set_running_or_notify_cancel()  # a caller that leaves ends nothing
        self.send()  # so that it is stored before, and forgotten
        self._forgetting.begin_clear()
        self._storing.put(partial(self._forgetting.clear, done))
        return done

    # -- for other servers -------------------------------------------------------------------------

    @property
    def _peers(self) -> PeerTransfer:
        assert self._transfer is not None  # else there are no offers
        return self._transfer

    def lease(self, groups: Sequence[Sequence[int]]) -> Lease | None:
        return self._peers.lease(groups)

    def copy_leased(self, group: int, block: int, identity: BlockIdentity, lease: str) -> bool:
        return self._copy_out(group, block, identity, (), lease)

    def skip(self, group: int, lease: str) -> None:
        self._peers.skip(group, lease)

    def least_wait_s(self, remote: RemoteBlocks | None) -> float:
        return self._peers.least_wait_s(remote)

    def release_remote(self, remote: RemoteBlocks) -> None:
        self._loading.put(partial(self._peers.release, remote))

    def end_leases(self) -> None:
        self._peers.records.release_all()

    # -- what is seen of it ------------------------------------------------------------------------

    @property
    def _sources(self) -> tuple[GuardedTier, ...]:
        """Return what records come from: its own tiers, and then what others have left."""
        return (*self.tiers, *(() if self._transfer is None else self._transfer.tiers))

    def report(self) -> tuple[TierReport, ...]:
        return tuple(map(self._report, self._sources))

    def _report(self, tier: GuardedTier) -> TierReport:
        counts, usage, traits = tier.counted(), tier.usage(), tier.traits
        return TierReport(
            name=tier.name,
            medium=medium_of(tier),
            is_shared=traits.is_shared,
            is_persistent=traits.is_persistent,
            state=tier.state,
            may_clear=tier.may_clear or tier not in self.tiers,  # those are not ours to clear
            num_records=usage.num_records,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            hit_tokens=self._hit_tokens[tier],
            num_loaded=counts.num_loaded,
            loaded_bytes=counts.loaded_bytes,
            load_s=counts.load_s,
            num_stored=counts.num_stored,
            stored_bytes=counts.stored_bytes,
            store_s=counts.store_s,
            num_dropped=counts.num_stores_dropped,
            num_errors={call: counts.num_errors[call] for call in TIER_CALLS},
            num_bad={reason: counts.num_bad[reason] for reason in BAD_REASONS},
            promotion_s=self._loader.seconds(tier),
        )

    def take_events(self) -> list[BlockEvent]:
        return self._events.take()

    def trust(self, name: str | None) -> None:
        for tier in self._sources:
            if name in (None, tier.name):
                tier.trust()


@final
class CallThread:
    """A thread that makes calls, one after the other, in the order in which they came."""

    def __init__(self, name: str) -> None:
        # Is called while there are no calls: False, to be asked again soon. Set once, by another.
        # After an error it is not asked before the next call.
        self.when_idle: Callable[[], bool] | None = None
        self._may_sleep = False  # it waits for a call, or is about to
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._later: list[tuple[float, _Call]] = []  # by when; its own
        self._thread = threading.Thread(target=self._make_all, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._may_sleep = True
        self._thread.start()

    def put(self, call: _Call) -> None:
        """Have a call made. Its errors are logged."""
        self._calls.put(call)

    def put_later(self, call: _Call, seconds: float) -> None:
        """Have a call made so many seconds from now at the earliest. A call of its own may ask."""
        self._later.append((time.monotonic() + seconds, call))

    def wake(self) -> None:
        """Have ``when_idle`` asked again: there is more to do, though no call says so."""
        if self._may_sleep and self._thread is not threading.current_thread():
            self._calls.put(_pass)

    def make_one(self) -> bool:
        """Make the next call in the caller's thread. Return whether there was one."""
        call = self._due()
        if call is None:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return False
        self._make(call)
        return True

    def end(self) -> None:
        """End after the calls that have come."""
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, or for so many seconds."""
        # A collector, which closes what it finds, may run in any thread.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _make_all(self) -> None:
        while (call := self._next()) is not None:
            self._make(call)

    def _make(self, call: _Call | None) -> None:
        try:
            if call is not None:
                call()
        except Exception:  # of a tier of another package
            log.exception("tiers: what was to be done with blocks has failed")

    def _next(self) -> _Call | None:
        asks = True
        while True:
            if (call := self._due()) is not None:
                return call
            with suppress(Empty):
                return self._calls.get_nowait()
            wait_s = min((at_s for at_s, _ in self._later), default=None)
            if wait_s is not None:
                wait_s = max(0.0, wait_s - time.monotonic())
            if asks and self.when_idle is not None:
                self._may_sleep = True  # before it is asked, so that no call to wake up is lost
                asks = not self._is_done()
                if asks:
                    self._may_sleep, wait_s = False, _IDLE_S
            with suppress(Empty):
                return self._calls.get(timeout=wait_s)

    def _due(self) -> _Call | None:
        """Take a call that was to be made later, once it is time."""
        for own in self._later:
            if own[0] <= time.monotonic():
                self._later.remove(own)
                return own[1]
        return None

    def _is_done(self) -> bool:
        try:
            return self.when_idle is None or self.when_idle()
        except Exception:  # without this thread nothing would be stored or forgotten any more
            log.exception("tiers: blocks cannot be stored while the engine is idle")
            return True


def _pass() -> None:
    """Do nothing."""
