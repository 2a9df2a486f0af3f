"""The tier that fails on purpose: each fault happens, and no fault of bytes passes for a record."""

import time

import pytest

from quire.tiers import Deadline, TierError, TierFull
from quire.tiers.host_memory import HostMemoryTier
from quire.tiers.record import Checksums, KeyedSeal, RecordFormat, Seal
from tiers.faulty import BYTE_FAULTS, FAULTS, FaultyTier
from tiers.records import chain_of_blocks, right_record, small_format

SEALS: list[Seal] = [Checksums(), KeyedSeal(bytes(range(32)))]
BLOCKS = chain_of_blocks(4)


def soon() -> Deadline:
    return Deadline.after(10)


def filled(of: RecordFormat, **options: object) -> tuple[FaultyTier, list[bytes]]:
    """Make a tier with the records of ``BLOCKS``."""
    tier = FaultyTier(HostMemoryTier(1 << 16, of.num_bytes), **options)
    names, records = zip(*(right_record(of, block) for block in BLOCKS), strict=True)
    tier.store(names, [memoryview(record) for record in records], soon())
    return tier, list(names)


@pytest.mark.parametrize("seal", SEALS, ids=["checksums", "sealed"])
@pytest.mark.parametrize("fault", BYTE_FAULTS)
def test_no_fault_of_bytes_passes_for_the_record(fault: str, seal: Seal) -> None:
    of = small_format(seal)
    for seed in range(20):
        tier, names = filled(of, seed=seed, script={number: fault for number in range(1, 9)})
        for name, block in zip(names, BLOCKS, strict=True):
            into = memoryview(bytearray(of.num_bytes))
            assert tier.load([name], [into], soon()) == 1
            assert of.flaw(into, of.header(block)) is not None
        assert tier.done[fault] == len(BLOCKS)


@pytest.mark.parametrize("fault", BYTE_FAULTS)
def test_a_spoiled_record_lies_in_the_tier(fault: str) -> None:
    of = small_format()
    tier, names = filled(of, share=0.0)
    name, record = right_record(of, BLOCKS[1])
    assert tier.store_spoiled(fault, name, memoryview(record), soon()) == 1
    into = [memoryview(bytearray(of.num_bytes)) for _ in names]
    assert tier.load(names, into, soon()) == 4
    flaws = [of.flaw(each, of.header(block)) for each, block in zip(into, BLOCKS, strict=True)]
    assert [flaw is None for flaw in flaws] == [True, False, True, True]


def test_calls_fail_as_they_are_told() -> None:
    of = small_format()
    script = {1: "error", 2: "full", 3: "found", 4: "lost", 5: "hang", 6: "short", 8: "forgotten"}
    tier, names = filled(of, script=script)
    (name, record), views = right_record(of, BLOCKS[0]), [memoryview(bytearray(of.num_bytes))] * 4
    with pytest.raises(TierError, match="no route"):
        tier.find(names, soon())
    with pytest.raises(TierFull):
        tier.store([name], [memoryview(record)], soon())
    assert tier.find([*names, bytes(32)], soon()) == 5
    assert tier.load(names, views, soon()) < 4
    begin_s = time.monotonic()
    with pytest.raises(TierError, match="out of time"):
        tier.find(names, Deadline.after(0.05))
    assert time.monotonic() - begin_s >= 0.05
    tier.load(names, views, soon())
    tier.drop([name], soon())
    assert tier.store([name], [memoryview(record)], soon()) == 1
    assert tier.find([name], soon()) == 0
    assert sum(tier.done.values()) == len(script)


def test_a_seed_draws_one_schedule_and_every_fault_has_its_turn() -> None:
    of = small_format()

    def play(seed: int) -> FaultyTier:
        tier, names = filled(of, seed=seed, share=0.9)
        name, record = right_record(of, BLOCKS[0])
        spare = [memoryview(bytearray(of.num_bytes)) for _ in names]
        for _ in range(120):
            for call in (
                lambda: tier.find(names, Deadline.after(0.001)),
                lambda: tier.load(names, spare, Deadline.after(0.001)),
                lambda: tier.store([name], [memoryview(record)], Deadline.after(0.001)),
                lambda: tier.drop([name], Deadline.after(0.001)),
            ):
                try:
                    call()
                except TierError:
                    continue
        return tier

    faults = [fault for fault in FAULTS if fault not in ("hang", "delay")]
    first = FaultyTier(HostMemoryTier(1 << 16, of.num_bytes), seed=5, faults=faults)
    second = FaultyTier(HostMemoryTier(1 << 16, of.num_bytes), seed=5, faults=faults)
    for tier in (first, second):
        for _ in range(200):
            try:
                tier.find([bytes(32)], soon())
            except TierError:
                continue
    assert first.done == second.done
    assert set(play(1).done) | {"hang"} >= {*FAULTS} - {"delay"}
