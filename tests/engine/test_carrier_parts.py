"""What blocks travel through, part by part: staging memory, a thread of calls, a loader."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
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
from quire.kv.prefix_index import BlockIdentity, BlockStored, PrefixKeys
from quire.spec import FullAttention, Group
from quire.tiers import Deadline, TierError
from quire.tiers.files import FileTier
from quire.tiers.guard import GuardedTier
from quire.tiers.host_memory import HostMemoryTier, piece_bytes
from quire.tiers.record import KeyedSeal, RecordFormat
from quire.units import align_up
from tiers.records import BLOCK_SIZE, chain_of_blocks, right_record, small_format

PLAIN = small_format()
SEALED = small_format(KeyedSeal(bytes(range(32))))
GROUP = Group(spec=FullAttention(num_kv_heads=1, head_dim=8, dtype="float32"), layers=(0, 1))


def soon() -> Deadline:
    return Deadline.after(10)


def tier_of(form: RecordFormat, *, is_sealed: bool = False, num_records: int = 64) -> GuardedTier:
    own = HostMemoryTier(
        num_records * align_up(form.num_bytes, piece_bytes(form.num_bytes)), form.num_bytes
    )
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
            forgetting=Forgetting([self.tier], None, events),
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


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_record_of_another_length_is_dropped_and_counted(place: int, change: int) -> None:
    """A tier finds it and does not load it: without a new one that goes on for ever."""
    own = Loading()
    name, record = right_record(PLAIN, own.blocks[place])
    wrong = bytearray(record[:-1]) if change < 0 else bytearray(record) + b"\0"
    assert own.tier._tier.store([name], [memoryview(wrong)], soon()) == 1
    own.load(job := own.job())
    assert (job.end, job.lacking) == (place, [own.blocks[place]])
    assert own.tier.counts.num_bad == {"size": 1}
    assert own.tier.find([name], soon()) == 0
    assert own.tier.store([name], [memoryview(record)], soon()) == 1
    own.load(job := own.job())
    assert (job.end, job.lacking) == (4, [])


def test_what_a_tier_lost_meanwhile_is_stored_again_and_not_counted_as_bad() -> None:
    own = Loading()
    own.load(job := own.job())
    assert (job.end, job.lacking) == (4, [])
    load = own.tier._tier.load
    own.tier._tier.load = lambda names, into, deadline: load(names[:2], into[:2], deadline)
    own.load(job := own.job())
    assert (job.end, job.lacking) == (2, [own.blocks[2]])
    assert not own.tier.counts.num_bad


def test_what_there_was_no_time_to_find_is_not_said_to_be_lacking() -> None:
    """It would be stored again for nothing."""
    own = Loading()
    own.loader.load(job := own.job(), Deadline.after(0.0))
    assert (job.end, job.lacking) == (0, [])
    own.tier.drop([right_record(PLAIN, own.blocks[0])[0]], soon())
    own.load(job := own.job())
    assert (job.end, job.lacking) == (0, own.blocks)


def test_behind_a_missing_block_all_are_to_be_stored_again() -> None:
    """Also those that staging memory had no room for, which would never be asked for."""
    own = Loading(num_blocks=20)  # staging memory holds 16
    own.load(job := own.job())
    assert (job.end, job.is_cut, job.lacking) == (16, True, [])
    own.staging.give([payload.buffer for payload in payloads_of(job).values()])
    own.tier.drop([right_record(PLAIN, own.blocks[3])[0]], soon())
    own.load(job := own.job())
    assert (job.end, job.lacking) == (3, own.blocks[3:])


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_goes_from_tier_to_tier(first: int) -> None:
    """Each block from the nearest that has it, however they lie."""
    tiers, blocks = [tier_of(PLAIN), tier_of(PLAIN)], chain_of_blocks(6)
    for number, block in enumerate(blocks):
        name, record = right_record(PLAIN, block)
        assert tiers[(number + first) % 2].store([name], [memoryview(record)], soon()) == 1
    own = Loading()
    own.blocks = blocks
    own.loader._tiers = tuple(tiers)
    own.load(job := own.job())
    assert job.end == 6
    found = [payloads_of(job)[0, column].tier for column in range(6)]
    assert found == [tiers[(number + first) % 2] for number in range(6)]


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


def storer_of(
    tiers: Sequence[GuardedTier], staging: Staging, events: CopyEvents | None = None
) -> RecordStorer:
    events = events or CopyEvents(())
    forgetting = Forgetting(tiers, None, events)
    return RecordStorer(tiers, staging, transfer=None, forgetting=forgetting, events=events)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_tier_gets_records_of_its_own_format(order: tuple[int, int]) -> None:
    """One whose records are sealed gets no plain one, and a plain one no ciphertext."""
    pytest.importorskip("cryptography")
    known = (tier_of(PLAIN), tier_of(SEALED, is_sealed=True))
    tiers = [known[number] for number in order]
    staging = Staging(8 * SEALED.num_bytes, [max(PLAIN.num_bytes, SEALED.num_bytes)])
    block = chain_of_blocks(1)[0]
    block_out, payload = outgoing(staging, block, tiers)
    storer = storer_of(tiers, staging)
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
    storer = storer_of([tier], staging)
    storer.stop_s = 0.0
    storer.store([outgoing(staging, chain_of_blocks(1)[0], [tier])[0]])
    assert tier.usage().num_records == 0
    assert staging.free_bytes == staging.capacity_bytes


# -- forgetting ------------------------------------------------------------------------------------


def forgetting_of(tier: GuardedTier) -> tuple[Forgetting, Callable[[], int], list[BlockIdentity]]:
    blocks = chain_of_blocks(3)
    own = Forgetting([tier], None, CopyEvents(()))
    return own, lambda: own.num_kept(tier, blocks), blocks


def refusing(tier: GuardedTier, *errors: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a tier refuse to forget, so many times."""
    real, refusals = tier._tier.drop, iter(errors)

    def drop(*several: Any) -> None:
        for error in refusals:
            raise error
        real(*several)

    monkeypatch.setattr(tier._tier, "drop", drop)


def test_a_block_is_found_again_once_all_that_dropped_it_are_done() -> None:
    tier = tier_of(PLAIN)
    own, num_kept, blocks = forgetting_of(tier)
    own.begin_drop(blocks[1:])
    own.begin_drop(blocks[1:2])
    own.drop(blocks[1:])
    assert num_kept() == 1
    own.drop(blocks[1:2])
    assert num_kept() == 3


def test_a_tier_that_refuses_to_forget_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Less and less often, and it may be loaded from and stored to meanwhile, but for these."""
    own, num_kept, blocks = forgetting_of(tier := tier_of(PLAIN))
    name, record = right_record(PLAIN, blocks[0])
    tier.store([name], [memoryview(record)], soon())
    refusing(tier, OSError("away"), OSError("still away"), monkeypatch=monkeypatch)
    own.begin_drop(blocks[:1])
    own.drop(blocks[:1])
    assert (num_kept(), own.is_kept(tier, blocks[0])) == (0, False)
    assert own.again_s == 1.0
    assert (tier.may_load, tier.may_store, tier.state) == (True, True, "ok")
    own.drop_again()
    assert tier.counted().num_errors == {"drop": 1}, "it was to be left alone"
    monkeypatch.setattr(tier._drops, "_open_until_s", 0.0)
    own.drop_again()
    assert own.again_s is not None
    assert 1.0 < own.again_s <= 2.0
    monkeypatch.setattr(tier._drops, "_open_until_s", 0.0)
    own.begin_drop(blocks[1:2])
    own.drop(blocks[1:2])  # which waits for the first one: they go together
    assert num_kept() == 0
    own.drop_again()
    assert (own.again_s, tier.find([name], soon()), num_kept()) == (None, 0, 3)
    assert tier.counted().num_errors == {"drop": 2}


def test_a_tier_that_never_forgets_is_not_loaded_from(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it was to forget is remembered, up to a number."""
    monkeypatch.setattr("quire.engine.offloading.forgetting._MOST_REFUSED", 4)
    own, num_kept, blocks = forgetting_of(tier := tier_of(PLAIN))
    refusing(tier, *[OSError("no right to")] * 9, monkeypatch=monkeypatch)
    for _ in range(2):
        own.begin_drop(blocks)
        own.drop(blocks)
    assert (tier.state, own.again_s, num_kept()) == ("suspect", None, 3)
    assert "it was to forget 6 blocks, and has not" in caplog.text


def test_what_a_tier_still_has_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it outlives the process. It is asked once more, also if it was to be left alone."""
    folder = FileTier(tmp_path, "0" * 16, size_bytes=2**24, reserve_bytes=0)
    for tier, num_refusals in (
        (GuardedTier("file:", folder, [PLAIN]), 1),
        (GuardedTier("file:", folder, [PLAIN]), 2),
        (tier_of(PLAIN), 2),
    ):
        own, _, blocks = forgetting_of(tier)
        with monkeypatch.context() as patch:
            refusing(tier, *[OSError("away")] * num_refusals, monkeypatch=patch)
            own.begin_drop(blocks)
            own.drop(blocks)
            own.end()
        lasts = tier.traits.outlives_process
        assert tier.counted().num_errors["drop"] == (num_refusals if lasts else 1)
        said = "may still have records of 3 blocks" in caplog.text
        assert said is (lasts and num_refusals == 2)
        caplog.clear()
    folder.close()


def test_a_tier_that_refuses_to_forget_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is given no record of what it was to forget: an old one may still be there."""
    bad, good = tier_of(PLAIN), tier_of(PLAIN)
    refusing(bad, *[OSError("away")] * 99, monkeypatch=monkeypatch)
    carrier, (first, second) = carrier_of(bad, good), chain_of_blocks(2)
    carrier.start()
    carrier.drop([first])
    for block in (first, second):
        assert carrier.copy_out(0, 0, block)
    carrier.send()
    carrier.wait_until_stored(10)
    assert (bad.counted().num_stored, good.counted().num_stored) == (1, 2)
    assert bad.counted().num_errors["drop"] == 1
    carrier.close()


def test_a_tier_that_refuses_to_forget_is_asked_again_by_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.engine.offloading.forgetting._DROP_AGAIN_S", 0.001)
    monkeypatch.setattr("quire.tiers.guard._LONGEST_BREAK_S", 0.001)
    tier, blocks = tier_of(PLAIN), chain_of_blocks(3)
    refusing(tier, *[OSError("away")] * 3, monkeypatch=monkeypatch)
    carrier = carrier_of(tier)
    carrier.start()
    carrier.drop(blocks[:1])
    carrier.drop(blocks[1:])
    stop_s = time.monotonic() + 10
    while carrier._forgetting.num_kept(tier, blocks) < 3 and time.monotonic() < stop_s:
        time.sleep(0.001)
    assert carrier._forgetting.num_kept(tier, blocks) == 3
    assert tier.counted().num_errors["drop"] == 3
    carrier.close()


def test_a_clear_leaves_time_for_each_tier_and_ends_what_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad, good = tier_of(PLAIN), tier_of(PLAIN)
    given = list[float]()

    def hang(deadline: Deadline) -> None:
        given.append(deadline.left_s)
        raise TierError("away")

    own = Forgetting([bad, good], None, CopyEvents(()))
    blocks = chain_of_blocks(3)
    refusing(good, OSError("away"), monkeypatch=monkeypatch)
    own.begin_drop(blocks)
    own.drop(blocks)
    monkeypatch.setattr(bad._tier, "clear", hang)
    own.begin_clear()
    own.clear(done := Future())
    assert done.result(0) == {"attic:": "away"}
    assert 29 < given[0] <= 30
    assert (own.num_kept(good, blocks), own.again_s) == (3, None)


# -- events ----------------------------------------------------------------------------------------


def test_an_event_tells_what_a_tier_has_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(PLAIN)
    staging, events = Staging(8 * PLAIN.num_bytes, [PLAIN.num_bytes]), CopyEvents([tier])
    blocks = chain_of_blocks(2)
    monkeypatch.setattr(tier._tier, "store", lambda *_: 1)
    storer = storer_of([tier], staging, events)
    storer.store([outgoing(staging, block, [tier])[0] for block in blocks])
    assert events.take() == [blocks[0].stored(0, "CPU")]
    assert events.take() == []


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Told:
    """A tier's events, and one block whose copy comes and goes."""

    def __init__(self, tier: GuardedTier | None = None) -> None:
        self.tier = tier or tier_of(PLAIN)
        self.events, self.blocks = CopyEvents([self.tier]), chain_of_blocks(4)
        self.block = self.blocks[0]
        self.stored, self.removed = self.block.stored(0, "CPU"), self.block.removed(0, "CPU")

    def copy(self, block: BlockIdentity | None = None) -> tuple[bytes, int, BlockIdentity]:
        block = block or self.block
        return PLAIN.name(PLAIN.header(block)), 0, block

    def keep(self) -> None:
        with self.events.keeping(self.tier) as call:
            self.events.note_kept(call, [self.copy()])

    def lose(self) -> None:
        with self.events.losing(self.tier, [self.copy()]):
            pass


def test_while_tiers_are_cleared_no_copy_is_told() -> None:
    own = Told()
    own.keep()
    own.events.begin_clearing()
    own.events.begin_clearing()
    assert own.events.take() == [], "what was told before is over"
    own.events.end_clearing()
    own.keep()
    own.lose()
    assert own.events.take() == []
    own.events.end_clearing()
    own.keep()
    own.lose()
    assert own.events.take() == [own.stored, own.removed]


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
def test_what_a_call_has_kept_is_not_told_behind_a_clearing(begins: str) -> None:
    own = Told()
    if begins == "meanwhile":
        own.events.begin_clearing()
    with own.events.keeping(own.tier) as call:
        if begins == "before":
            own.events.begin_clearing()
        own.events.end_clearing()
        own.events.note_kept(call, [own.copy()])
    assert own.events.take() == []
    own.keep()
    assert own.events.take() == [own.stored]


@pytest.mark.parametrize("order", ["lost while it is kept", "kept while it is lost"])
def test_a_copy_that_is_kept_and_lost_at_once_is_told_to_be_lost(order: str) -> None:
    """And the next one is told again."""
    own = Told()
    if order == "lost while it is kept":
        with own.events.keeping(own.tier) as call:
            own.lose()
            own.events.note_kept(call, [own.copy(), own.copy(own.blocks[1])])
    else:
        with (
            own.events.losing(own.tier, [own.copy()]),
            own.events.keeping(own.tier) as call,
        ):
            own.events.note_kept(call, [own.copy(), own.copy(own.blocks[1])])
    assert own.events.take() == [own.removed, own.blocks[1].stored(0, "CPU")]
    own.keep()
    assert own.events.take() == [own.stored]


def test_a_copy_that_is_evicted_while_it_is_loaded_is_told_to_be_lost() -> None:
    """Whichever of the two calls tells it."""
    for teller in ("store", "load"):
        own = Told(tier_of(PLAIN, num_records=2))
        several = [right_record(PLAIN, block) for block in own.blocks]
        views = [memoryview(record) for _, record in several]

        def store(*which: int, own: Told = own, several: Any = several, views: Any = views) -> None:
            names = [several[at][0] for at in which]
            with own.events.keeping(own.tier) as call:
                assert own.tier.store(names, [views[at] for at in which], soon()) == len(which)
                kept = [(several[at][0], 0, own.blocks[at]) for at in which]
                own.events.note_kept(call, kept)

        store(0, 1)
        with own.events.keeping(own.tier) as load:
            assert own.tier.load([several[0][0]], [memoryview(bytearray(views[0]))], soon()) == 1
            if teller == "store":
                store(2, 3)
            else:
                assert own.tier.store([several[n][0] for n in (2, 3)], views[2:], soon()) == 2
            own.events.note_kept(load, [own.copy()])
        told = [event for event in own.events.take() if event.block_hash == own.block.chain]
        assert told == [own.stored, own.removed]


def test_no_copy_is_told_that_is_not_there_whatever_two_threads_do(quick_turns: None) -> None:
    """One loads, and finds some records bad; the other one stores, and drops some."""
    own = Told(tier_of(PLAIN, num_records=6))
    blocks = chain_of_blocks(24)
    records = [right_record(PLAIN, block) for block in blocks]
    copies = [(name, 0, block) for (name, _), block in zip(records, blocks, strict=True)]
    by_hash = {block.chain: name for block, (name, _) in zip(blocks, records, strict=True)}
    told, num_told, num_there = set[bytes](), 0, 0

    def move(call: Callable[..., int], seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(4):
            first = draw.randrange(len(blocks) - 3)
            several = range(first, first + draw.randint(1, 3))
            if draw.random() < 0.15:
                with own.events.losing(own.tier, [copies[n] for n in several]):
                    own.tier.drop([records[n][0] for n in several], soon())
                continue
            views = [memoryview(bytearray(records[n][1])) for n in several]
            with own.events.keeping(own.tier) as under_way:
                count = call([records[n][0] for n in several], views, soon())
                own.events.note_kept(under_way, [copies[n] for n in several[:count]])

    for seed in range(150):
        threads = [
            threading.Thread(target=move, args=(call, 2 * seed + number))
            for number, call in enumerate((own.tier.load, own.tier.store))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        with own.events.keeping(own.tier):
            pass  # what was evicted last is taken
        for event in own.events.take():
            name = by_hash[event.block_hash]
            told.add(name) if isinstance(event, BlockStored) else told.discard(name)
        there = {name for name, _ in records if own.tier.find([name], soon())}
        assert told <= there
        num_told, num_there = num_told + len(told), num_there + len(there)
    assert num_told > num_there // 2, "hardly anything is told"


def test_no_step_waits_for_a_tier_to_tell_what_it_has_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tier of another package may ask another machine."""
    own, asked, go_on = Told(), threading.Event(), threading.Event()
    own.keep()

    def hang() -> list[bytes]:
        asked.set()
        assert go_on.wait(20)
        return []

    monkeypatch.setattr(own.tier._tier, "take_evicted", hang)
    with running() as thread:
        thread.put(own.keep)
        assert asked.wait(10)
        events = list[Any]()
        reader = threading.Thread(target=lambda: events.extend(own.events.take()))
        reader.start()
        reader.join(10)
        assert not reader.is_alive()
        go_on.set()
    assert events == [own.stored]


def test_a_bad_record_is_told_to_be_lost_before_another_one_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that comes between the drop and its end is not followed by "lost"."""
    own, loading = Told(), Loading()
    own.tier = loading.tier
    own.events = loading.loader._events = CopyEvents([loading.tier])
    own.block, (name, record) = loading.blocks[0], right_record(PLAIN, loading.blocks[0])
    real = loading.tier._tier.drop

    def drop(*several: Any) -> None:
        real(*several)
        loading.tier.store([name], [memoryview(record)], soon())

    monkeypatch.setattr(loading.tier._tier, "drop", drop)
    monkeypatch.setattr(RecordFormat, "flaw", lambda *_: "checksum")
    loading.load(loading.job())
    own.keep()
    told = own.events.take()
    assert told == [own.block.removed(0, "CPU"), own.block.stored(0, "CPU")]


# -- a carrier -------------------------------------------------------------------------------------


class Copies:
    """Blocks of nothing."""

    def out(self, group: int, block: int, buffer: Any) -> None:
        buffer[:] = block

    def forget(self) -> None:
        """Nothing is held."""


def carrier_of(*tiers: GuardedTier, **options: Any) -> ThreadedCarrier:
    """A carrier without threads: ``work`` does what they would."""
    staging = Staging(4 * PLAIN.num_bytes, [PLAIN.num_bytes])
    copies: Any = Copies()
    return ThreadedCarrier([GROUP], BLOCK_SIZE, copies, tiers, staging, **options)


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


def test_while_a_load_hangs_no_other_prompt_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is gone keeps no deadline. Its thread hangs, and no breaker hears of it."""
    own = Loading()
    carrier, hold, begun = carrier_of(own.tier), threading.Event(), threading.Event()

    def find(names: list[bytes], deadline: Deadline) -> int:
        begun.set()
        hold.wait(20)
        return 0

    monkeypatch.setattr(own.tier._tier, "find", find)
    carrier.start()
    jobs = [own.job() for _ in range(3)]
    assert carrier.load(jobs[0], 10)
    assert begun.wait(10)
    assert carrier.load(jobs[1], 10), "its time is not over"
    monkeypatch.setattr("quire.engine.offloading.carrier._OVERDUE_S", -20.0)  # now it is
    assert not carrier.load(jobs[2], 10)
    assert not carrier.load(jobs[2], 10)
    assert caplog.text.count("a load hangs") == 1
    hold.set()
    done = list[LoadJob]()
    while len(done) < 2:
        carrier.wait(10)
        done += carrier.loaded()
    assert carrier.load(jobs[2], 10)
    carrier.close()


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
