"""What every tier promises, over each of Quire's own and an example of another package.

``--tier ADDRESS`` asks a tier of your own instead. A tier may forget a record at any moment, so no
test demands that one is still there, except right after it was stored into a tier that has room.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from conformance.tier_cases import (
    CASES,
    LARGEST_BYTES,
    NUM_FIT,
    TierCase,
    buffers,
    content,
    loaded,
    new_names,
    soon,
    store,
    tier_case,
    views,
)
from quire.tiers import Deadline, Name, Tier, TierError, TierFull
from quire.tiers.tier import ClearableTier

pytestmark = pytest.mark.tiers(*CASES)
SIZES = (1, 63, 64, 65, 1000, LARGEST_BYTES)
NUM_THREADS, NUM_ROUNDS = 4, 60


@pytest.fixture
def case(name: str, tmp_path: Path) -> Iterator[TierCase]:
    with tier_case(name, tmp_path) as made:
        yield made


@pytest.fixture
def tier(case: TierCase) -> Iterator[Tier]:
    made = case.make()
    yield made
    made.close()


# -- one caller ------------------------------------------------------------------------------------


def test_an_empty_batch_is_no_error(tier: Tier) -> None:
    assert tier.find([], soon()) == 0
    assert tier.load([], [], soon()) == 0
    assert tier.store([], [], soon()) == 0
    tier.drop([], soon())


def test_what_was_never_stored_is_not_there(tier: Tier) -> None:
    names = new_names(3)
    assert tier.find(names, soon()) == 0
    assert loaded(tier, names) == 0
    tier.drop(names, soon())


@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_is_stored_is_found_and_loaded(tier: Tier, num_bytes: int) -> None:
    names = new_names(5)
    assert store(tier, names, num_bytes) == 5
    assert tier.find(names, soon()) == 5
    assert loaded(tier, names, num_bytes) == 5
    assert loaded(tier, names[::-1], num_bytes) == 5


def test_records_of_several_lengths_lie_beside_each_other(tier: Tier) -> None:
    names = new_names(len(SIZES))
    records = [content(name, size) for name, size in zip(names, SIZES, strict=True)]
    assert tier.store(names, views(records), soon()) == len(names)
    into = buffers(SIZES)
    assert tier.load(names, into, soon()) == len(names)
    assert into == records


def test_a_run_ends_before_the_first_record_that_is_absent(tier: Tier) -> None:
    names = new_names(4)
    assert store(tier, [names[0], names[1], names[3]]) == 3
    assert tier.find(names, soon()) == 2
    assert loaded(tier, names) == 2
    assert tier.find(names[2:], soon()) == 0
    assert loaded(tier, names[3:]) == 1


@pytest.mark.parametrize("other", [LARGEST_BYTES - 1, 1, LARGEST_BYTES + 1])
def test_a_record_of_another_length_than_its_buffer_ends_the_run(tier: Tier, other: int) -> None:
    names = new_names(3)
    assert store(tier, names) == 3
    into = buffers([LARGEST_BYTES, other, LARGEST_BYTES])
    assert tier.load(names, into, soon()) == 1
    assert into[0] == content(names[0])


def test_nothing_is_written_beside_a_buffer(tier: Tier) -> None:
    names = new_names(2)
    assert store(tier, names) == 2
    memory = bytearray(b"\xaa" * (2 * LARGEST_BYTES + 30))
    whole = memoryview(memory)
    into = [whole[10 : 10 + LARGEST_BYTES], whole[20 + LARGEST_BYTES : 20 + 2 * LARGEST_BYTES]]
    assert tier.load(names, into, soon()) == 2
    assert into == [content(name) for name in names]
    for start in (0, 10 + LARGEST_BYTES, 20 + 2 * LARGEST_BYTES):
        assert memory[start : start + 10] == b"\xaa" * 10


def test_a_record_is_not_changed_by_its_storing(tier: Tier) -> None:
    (name,) = new_names(1)
    data = bytearray(content(name))
    assert tier.store([name], [memoryview(data)], soon()) == 1
    assert data == content(name)
    data[:] = bytes(len(data))  # the caller's buffer has other content next
    assert loaded(tier, [name]) == 1


def test_a_record_may_be_stored_again(tier: Tier) -> None:
    names = new_names(3)
    assert store(tier, names[:2]) == 2
    assert store(tier, names) == 3
    assert loaded(tier, names) == 3


def test_of_two_lengths_under_one_name_one_is_whole(tier: Tier) -> None:
    (name,) = new_names(1)
    assert store(tier, [name], 1000) == 1
    assert store(tier, [name], 64) == 1
    assert loaded(tier, [name], 1000) + loaded(tier, [name], 64) == 1


def test_what_is_dropped_is_gone(tier: Tier) -> None:
    names = new_names(3)
    assert store(tier, names) == 3
    tier.drop(names[1:2], soon())
    tier.drop(names[1:2], soon())
    assert tier.find(names, soon()) == 1
    assert loaded(tier, names) == 1
    assert loaded(tier, names[2:]) == 1
    assert store(tier, names) == 3
    assert loaded(tier, names) == 3


def test_a_cleared_namespace_is_empty_and_another_one_is_not(case: TierCase, tier: Tier) -> None:
    if not isinstance(tier, ClearableTier):
        pytest.skip("this kind does not find all records of a namespace")
    names, other = new_names(20), case.make("f" * 16)
    try:
        assert store(tier, names) == 20
        kept = store(other, names[:3])
        tier.clear(soon())
        assert [tier.find([name], soon()) for name in names] == [0] * 20
        assert loaded(other, names[:3]) == kept == 3
        tier.clear(soon())
        assert store(tier, names) == 20
        assert loaded(tier, names) == 20
        with pytest.raises(TierError):
            tier.clear(Deadline.after(0))
        assert isinstance(other, ClearableTier)
        other.clear(soon())
    finally:
        other.close()


def test_usage_says_what_is_there(tier: Tier) -> None:
    names = new_names(4)
    before = tier.usage()
    assert store(tier, names) == 4
    full = tier.usage()
    if before.num_records is not None and full.num_records is not None:
        assert full.num_records == before.num_records + 4
    if before.used_bytes is not None and full.used_bytes is not None:
        assert full.used_bytes >= before.used_bytes + 4 * LARGEST_BYTES
    tier.drop(names, soon())
    after = tier.usage()
    assert after.num_records == before.num_records
    if before.used_bytes is not None:
        assert after.used_bytes == before.used_bytes


def test_traits_are_plain(tier: Tier) -> None:
    assert tier.traits.batch >= 1
    assert {type(tier.traits.is_shared), type(tier.traits.is_persistent)} == {bool}


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_s", [0.0, -1.0])
def test_a_call_whose_time_is_over_returns_at_once(tier: Tier, left_s: float) -> None:
    names = new_names(4)
    assert store(tier, names[:3]) == 3
    calls: list[Callable[[Deadline], int | None]] = [
        lambda over: tier.find(names, over),
        lambda over: tier.load(names, buffers([LARGEST_BYTES] * 4), over),
        lambda over: tier.store(names, views([content(name) for name in names]), over),
        lambda over: tier.drop(names, over),
    ]
    for call in calls:
        begin_s = time.monotonic()
        with suppress(TierError):
            assert call(Deadline.after(left_s)) in (None, 0, 1, 2, 3, 4)
        assert time.monotonic() - begin_s < 10  # and no call that waits gives up so soon
    assert loaded(tier, names[:3]) in range(4)


# -- several callers -------------------------------------------------------------------------------


def test_threads_see_each_record_whole_or_not_at_all(tier: Tier) -> None:
    names, failures = new_names(12), list[BaseException]()

    def use(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(NUM_ROUNDS):
                some, num_bytes = draw.sample(names, 3), draw.choice((64, 3000))
                what = draw.random()
                if what < 0.4:
                    assert store(tier, some, num_bytes) in range(4)
                elif what < 0.9:
                    assert tier.find(some, soon()) in range(4)
                    assert loaded(tier, some, num_bytes) in range(4)
                else:
                    tier.drop(some[:1], soon())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert store(tier, names) == len(names)
    assert loaded(tier, names) == len(names)


def test_writers_of_one_record_do_not_disturb_each_other(tier: Tier) -> None:
    (name,), counts = new_names(1), list[int]()
    threads = [
        threading.Thread(target=lambda: counts.append(store(tier, [name]))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 4
    assert loaded(tier, [name]) == 1
    tier.drop([name], soon())
    assert tier.find([name], soon()) == 0


def test_another_namespace_does_not_see_a_record(case: TierCase, tier: Tier) -> None:
    names = new_names(2)
    other = case.make("fedcba9876543210")
    assert store(tier, names) == 2
    assert other.find(names, soon()) == 0
    assert store(other, names, 64) == 2
    assert loaded(other, names, 64) == 2
    assert loaded(tier, names) == 2
    other.close()


# -- limits ----------------------------------------------------------------------------------------


def require_small(case: TierCase) -> None:
    if not case.is_small:
        pytest.skip("a test fills only a tier that it has made")


def test_a_full_tier_keeps_its_limit_and_takes_what_is_new(case: TierCase, tier: Tier) -> None:
    require_small(case)
    names, refused = new_names(4 * NUM_FIT), 0
    for start in range(0, len(names), 4):
        some = names[start : start + 4]
        try:
            count = store(tier, some)
        except TierFull:
            refused += 1
            continue
        assert tier.find(some, soon()) >= min(count, 1)
        usage = tier.usage()
        assert usage.capacity_bytes is not None
        assert usage.used_bytes is not None
        assert usage.used_bytes <= usage.capacity_bytes == NUM_FIT * LARGEST_BYTES
    kept = sum(loaded(tier, [name]) for name in names)
    assert 0 < kept <= NUM_FIT
    assert kept >= NUM_FIT // 2, "it gives up more than it must"


def test_what_is_larger_than_all_room_is_refused(case: TierCase, tier: Tier) -> None:
    require_small(case)
    names = new_names(2)
    assert store(tier, names[:1]) == 1
    with pytest.raises(TierFull):
        store(tier, names[1:], 2 * NUM_FIT * LARGEST_BYTES)
    assert tier.find(names[1:], soon()) == 0
    assert store(tier, names[:1]) == 1
    assert loaded(tier, names[:1]) == 1


def test_a_batch_that_does_not_fit_keeps_its_first_records(case: TierCase, tier: Tier) -> None:
    require_small(case)
    names = new_names(NUM_FIT + 8)
    count = store(tier, names)
    assert NUM_FIT // 2 <= count <= NUM_FIT
    assert tier.find(names, soon()) >= count
    assert loaded(tier, names[:count]) == count


# -- the end ---------------------------------------------------------------------------------------


def calls_of(tier: Tier, name: Name) -> list[Callable[[], object]]:
    return [
        lambda: tier.find([name], soon()),
        lambda: tier.load([name], buffers([64]), soon()),
        lambda: tier.store([name], views([content(name, 64)]), soon()),
        lambda: tier.drop([name], soon()),
        tier.usage,
    ]


def test_a_closed_tier_says_so(case: TierCase) -> None:
    tier = case.make()
    (name,) = new_names(1)
    assert store(tier, [name], 64) == 1
    tier.close()
    tier.close()
    for call in calls_of(tier, name):
        with pytest.raises(TierError):
            call()


def test_what_persists_is_there_after_a_restart(case: TierCase) -> None:
    first, names = case.make(), new_names(4)
    assert store(first, names) == 4
    persists = first.traits.is_persistent
    first.close()
    second = case.make()
    assert second.find(names, soon()) == (4 if persists else 0)
    assert loaded(second, names) == (4 if persists else 0)
    second.drop(names, soon())
    second.close()


def test_a_tier_closed_under_its_callers_raises_nothing_else(case: TierCase) -> None:
    tier, names, failures = case.make(), new_names(6), list[BaseException]()

    def use() -> None:
        try:
            while True:
                store(tier, names)
                loaded(tier, names)
                tier.drop(names, soon())
        except TierError:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    tier.close()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
