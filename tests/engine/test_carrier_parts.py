"""What blocks travel through, part by part: staging memory, a thread of calls, a loader."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.offloading.carrier import CallThread, ThreadedCarrier
from quire.engine.offloading.copy_events import CopyEvents
from quire.engine.offloading.forgetting import Forgetting
from quire.engine.offloading.loading import RecordLoader, payloads_of
from quire.engine.offloading.staging import Staging
from quire.engine.offloading.storing import OutgoingBlock, RecordStorer
from quire.engine.scheduling.block_carrier import LoadJob
from quire.engine.sequence import RemoteBlocks
from quire.kv.prefix_index import BlockIdentity, PrefixKeys
from quire.spec import FullAttention, Group
from quire.tiers import Deadline
from quire.tiers.files import FileTier
from quire.tiers.guard import GuardedTier
from quire.tiers.host_memory import HostMemoryTier
from quire.tiers.record import KeyedSeal, RecordFormat
from tiers.records import BLOCK_SIZE, chain_of_blocks, right_record, small_format

PLAIN = small_format()
SEALED = small_format(KeyedSeal(bytes(range(32))))
GROUP = Group(spec=FullAttention(num_kv_heads=1, head_dim=8, dtype="float32"), layers=(0, 1))


def soon() -> Deadline:
    return Deadline.after(10)


def tier_of(form: RecordFormat, *, is_sealed: bool = False) -> GuardedTier:
    own = HostMemoryTier(64 * form.num_bytes, form.num_bytes)
    return GuardedTier("attic:", own, [form], is_sealed=is_sealed)


@contextmanager
def running(name: str = "calls") -> Iterator[CallThread]:
    thread = CallThread(name)
    thread.start()
    try:
        yield thread
    finally:
        thread.end()
        thread.join(10)


class Loading:
    """A loader with one tier, in which a prompt's blocks are."""

    def __init__(self, num_blocks: int = 4) -> None:
        self.tier = tier_of(PLAIN)
        self.blocks = chain_of_blocks(num_blocks)
        several = [right_record(PLAIN, block) for block in self.blocks]
        records = [memoryview(record) for _, record in several]
        assert self.tier.store([name for name, _ in several], records, soon()) == num_blocks
        self.staging = Staging(16 * PLAIN.num_bytes, [PLAIN.num_bytes])
        events = CopyEvents(())
        self.loader = RecordLoader(
            [GROUP],
            BLOCK_SIZE,
            [self.tier],
            self.staging,
            transfer=None,
            forgetting=Forgetting([self.tier], None, events, threading.Event()),
            events=events,
        )

    def job(self, **options: Any) -> LoadJob:
        tokens = np.concatenate([block.token_ids for block in self.blocks])
        return LoadJob(
            seq_id=0,
            keys=PrefixKeys(),
            token_ids=tokens,
            first=0,
            blocks=list(self.blocks),
            deadline_s=float("inf"),
            **options,
        )

    def load(self, job: LoadJob) -> None:
        job.end = job.first
        self.loader.load(job, soon())


# -- a thread of calls -----------------------------------------------------------------------------


def test_a_thread_outlives_what_its_calls_raise(caplog: pytest.LogCaptureFixture) -> None:
    """Also what it asks an idle engine: else nothing would ever be forgotten again."""
    asked, is_done = threading.Event(), threading.Event()

    def store() -> bool:
        asked.set()
        raise MemoryError("no staging memory")

    with running() as thread:
        thread.when_idle = store
        thread.put(lambda: 1 / 0)
        assert asked.wait(10)
        thread.put(is_done.set)
        assert is_done.wait(10)
    said = [record.getMessage() for record in caplog.records]
    assert "tiers: what was to be done with blocks has failed" in said
    assert "tiers: blocks cannot be stored while the engine is idle" in said


def test_calls_that_have_come_are_made_before_a_thread_ends() -> None:
    made = list[int]()
    with running() as thread:
        hold = threading.Event()
        thread.put(hold.wait)
        for number in range(5):
            thread.put(lambda number=number: made.append(number))
        thread.end()
        hold.set()
    assert made == [0, 1, 2, 3, 4]


# -- staging memory --------------------------------------------------------------------------------


def test_memory_that_the_system_refuses_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    staging = Staging(1000, [100, 300])
    with monkeypatch.context() as patch:
        patch.setattr("quire.engine.offloading.staging.np.empty", refuse)
        assert staging.take(1) is None
    assert staging.free_bytes == 1000
    several = [staging.take(0) for _ in range(10)]
    assert all(each is not None for each in several)
    assert staging.take(0) is None


def test_free_buffers_of_another_size_make_way() -> None:
    staging = Staging(600, [100, 300])
    small = [staging.take(0) for _ in range(6)]
    staging.give(each for each in small if each is not None)
    large = [staging.take(1), staging.take(1)]
    assert [len(each) for each in large if each is not None] == [300, 300]
    assert (staging.free_bytes, staging.take(0)) == (0, None)
    assert sum(map(len, staging._free.values())) == 0, "more is held than the capacity"


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [0, 2])
def test_no_buffer_is_lost_with_an_error(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out while records are checked."""
    own, real, calls = Loading(), RecordFormat.flaw, iter(range(100))

    def flaw(*several: Any) -> Any:
        if next(calls) == fails_at:
            raise MemoryError
        return real(*several)

    monkeypatch.setattr(RecordFormat, "flaw", flaw)
    job = own.job()
    with pytest.raises(MemoryError):
        own.load(job)
    assert len(job.payloads) == fails_at
    assert own.staging.free_bytes == own.staging.capacity_bytes - fails_at * PLAIN.num_bytes
    own.staging.give(each.buffer for each in payloads_of(job).values())
    assert own.staging.free_bytes == own.staging.capacity_bytes


def test_what_a_peer_takes_says_nothing_of_tiers() -> None:
    own = Loading()
    own.load(job := own.job(remote=RemoteBlocks(host="h", port=1, lease="")))
    assert job.end == 4
    assert own.loader.times.seconds(4) == 0.0
    own.load(job := own.job())
    assert job.end == 4
    assert own.loader.times.seconds(4) > 0.0


def test_a_bad_record_ends_a_run_and_is_to_be_stored_again() -> None:
    own = Loading()
    name, record = right_record(PLAIN, own.blocks[2])
    own.tier.drop([name], soon())
    record[-1] ^= 1
    assert own.tier.store([name], [memoryview(record)], soon()) == 1
    own.load(job := own.job())
    assert (job.end, job.lacking) == (2, [own.blocks[2]])
    assert own.staging.free_bytes == own.staging.capacity_bytes - 2 * PLAIN.num_bytes


def test_a_prompt_larger_than_staging_memory_is_brought_in_part() -> None:
    own = Loading(20)
    own.load(job := own.job())
    assert (job.end, job.is_cut) == (16, True)


# -- storing ---------------------------------------------------------------------------------------


def outgoing(
    staging: Staging, block: BlockIdentity, tiers: Sequence[GuardedTier]
) -> tuple[OutgoingBlock, bytes]:
    buffer = staging.take(0)
    assert buffer is not None
    payload = np.random.default_rng(1).bytes(PLAIN.payload_bytes)
    buffer[-len(payload) :] = np.frombuffer(payload, np.uint8)
    return OutgoingBlock(0, block, buffer, tiers), payload


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_tier_gets_records_of_its_own_format(order: tuple[int, int]) -> None:
    """One whose records are sealed gets no plain one, and a plain one no ciphertext."""
    pytest.importorskip("cryptography")
    known = (tier_of(PLAIN), tier_of(SEALED, is_sealed=True))
    tiers = [known[number] for number in order]
    staging = Staging(8 * SEALED.num_bytes, [max(PLAIN.num_bytes, SEALED.num_bytes)])
    block = chain_of_blocks(1)[0]
    block_out, payload = outgoing(staging, block, tiers)
    storer = RecordStorer(tiers, staging, transfer=None, events=CopyEvents(()))
    storer.store([block_out])
    assert staging.free_bytes == staging.capacity_bytes
    for tier in tiers:
        form = tier.formats[0]
        header = form.header(block)
        record = memoryview(bytearray(form.num_bytes))
        assert tier.load([form.name(header)], [record], soon()) == 1
        assert (payload in bytes(record)) is not tier.is_sealed
        assert form.flaw(record, header) is None
        assert bytes(form.payload(record)) == payload


def test_nothing_is_stored_when_time_is_over_and_its_memory_is_given_back() -> None:
    tier = tier_of(PLAIN)
    staging = Staging(8 * PLAIN.num_bytes, [PLAIN.num_bytes])
    storer = RecordStorer([tier], staging, transfer=None, events=CopyEvents(()))
    storer.stop_s = 0.0
    storer.store([outgoing(staging, chain_of_blocks(1)[0], [tier])[0]])
    assert tier.usage().num_records == 0
    assert staging.free_bytes == staging.capacity_bytes


# -- forgetting ------------------------------------------------------------------------------------


def forgetting_of(
    tier: GuardedTier, closing: threading.Event | None = None
) -> tuple[Forgetting, Callable[[], int], list[BlockIdentity]]:
    blocks = chain_of_blocks(3)
    own = Forgetting([tier], None, CopyEvents(()), closing or threading.Event())
    return own, lambda: own.num_kept(blocks), blocks


def test_a_block_is_found_again_once_all_that_dropped_it_are_done() -> None:
    tier = tier_of(PLAIN)
    own, num_kept, blocks = forgetting_of(tier)
    own.begin_drop(blocks[1:])
    own.begin_drop(blocks[1:2])
    own.drop(blocks[1:])
    assert num_kept() == 1
    own.drop(blocks[1:2])
    assert num_kept() == 3


def test_a_tier_that_refuses_to_forget_is_asked_until_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.engine.offloading.forgetting._DROP_AGAIN_S", 0.001)
    own, num_kept, blocks = forgetting_of(tier := tier_of(PLAIN))
    name, record = right_record(PLAIN, blocks[0])
    tier.store([name], [memoryview(record)], soon())
    real, refusals = tier._tier.drop, iter([OSError("away"), OSError("still away")])

    def drop(*several: Any) -> None:
        for error in refusals:
            raise error
        real(*several)

    monkeypatch.setattr(tier._tier, "drop", drop)
    own.begin_drop(blocks[:1])
    own.drop(blocks[:1])
    assert tier.counted().num_errors == {"drop": 2}
    assert (tier.find([name], soon()), num_kept()) == (0, 3)


def test_an_event_tells_what_a_tier_has_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(PLAIN)
    staging, events = Staging(8 * PLAIN.num_bytes, [PLAIN.num_bytes]), CopyEvents([tier])
    blocks = chain_of_blocks(2)
    monkeypatch.setattr(tier._tier, "store", lambda *_: 1)
    storer = RecordStorer([tier], staging, transfer=None, events=events)
    storer.store([outgoing(staging, block, [tier])[0] for block in blocks])
    assert events.take() == [blocks[0].stored(0, "CPU")]
    assert events.take() == []


def test_while_tiers_are_cleared_no_copy_is_told() -> None:
    tier = tier_of(PLAIN)
    events, (block,) = CopyEvents([tier]), chain_of_blocks(1)
    kept, lost = [(bytes(32), 0, block)], [(0, block)]
    events.begin_clearing()
    events.begin_clearing()
    events.end_clearing()
    events.note_kept(tier, kept)
    events.note_lost(tier, lost)
    assert events.take() == []
    events.end_clearing()
    events.note_kept(tier, kept)
    events.note_lost(tier, lost)
    assert events.take() == [block.stored(0, "CPU"), block.removed(0, "CPU")]


# -- a carrier -------------------------------------------------------------------------------------


class Copies:
    """Blocks of nothing."""

    def out(self, group: int, block: int, buffer: Any) -> None:
        buffer[:] = block

    def forget(self) -> None:
        """Nothing is held."""


def carrier_of(tier: GuardedTier, **options: Any) -> ThreadedCarrier:
    """A carrier without threads: ``work`` does what they would."""
    staging = Staging(4 * PLAIN.num_bytes, [PLAIN.num_bytes])
    copies: Any = Copies()
    return ThreadedCarrier([GROUP], BLOCK_SIZE, copies, [tier], staging, **options)


def test_a_tier_is_not_asked_that_will_not_answer_nor_without_staging_memory() -> None:
    own = Loading()
    carrier = carrier_of(own.tier)
    taken = [carrier.staging.take(0) for _ in range(4)]
    assert not carrier.load(own.job(), 10)
    carrier.staging.give(each for each in taken if each is not None)
    job = own.job()
    assert carrier.load(job, 10)
    assert carrier.work()
    assert (carrier.loaded(), job.end) == ([job], 4)
    carrier.release(job)
    assert carrier.staging.free_bytes == carrier.staging.capacity_bytes
    own.tier.is_suspect = True
    assert not carrier.load(own.job(), 10)
    assert not carrier.work()


def test_a_tier_that_takes_nothing_costs_no_staging_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carrier, block = carrier_of(tier := tier_of(PLAIN)), chain_of_blocks(1)[0]
    monkeypatch.setattr(tier._tier, "store", lambda *_: 1 / 0)
    assert carrier.copy_out(0, 0, block)
    carrier.send()
    assert carrier.work()
    assert not carrier.may_store
    assert carrier.copy_out(0, 0, block)
    carrier.send()
    assert not carrier.work()
    assert carrier.staging.free_bytes == carrier.staging.capacity_bytes


@pytest.mark.parametrize("only_reads", [False, True])
def test_the_last_blocks_go_where_they_may(only_reads: bool, tmp_path: Path) -> None:
    folder = FileTier(tmp_path, "0" * 16, size_bytes=2**24, reserve_bytes=0)
    carrier = carrier_of(GuardedTier("file:", folder, [PLAIN]), only_reads=only_reads)
    assert carrier.may_drain is not only_reads
    assert not carrier_of(tier_of(PLAIN)).may_drain
    folder.close()


def test_what_was_copied_out_before_a_reset_is_forgotten_with_it() -> None:
    carrier, block = carrier_of(tier := tier_of(PLAIN)), chain_of_blocks(1)[0]
    assert carrier.copy_out(0, 0, block)
    done = carrier.clear()
    while carrier.work():
        pass
    carrier.send()
    while carrier.work():
        pass
    assert done.result(0) == {}
    assert (tier.usage().num_records, tier.counted().num_stored) == (0, 1)


def test_a_carrier_that_closes_ends_its_jobs_and_loads_no_more() -> None:
    own = Loading()
    carrier = carrier_of(own.tier)
    job = own.job()
    assert carrier.load(job, 10)
    carrier.close()
    assert carrier.work()
    assert (carrier.loaded(), job.end, job.payloads) == ([job], 0, {})
    assert own.tier.counted().num_errors == {}, "a closed tier was asked"
    assert carrier.clear().result(0) == {"attic:": "it is closed"}
