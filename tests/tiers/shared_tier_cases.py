"""What every tier does that other machines write to too, whatever it is made of."""

import threading
from collections.abc import Callable, Sequence

import pytest

from quire.tiers import Deadline, Name, Tier, TierError

RECORD_BYTES = 100_000  # more than a socket sends at once
WITHIN_S = 20.0

MakeNamespace = Callable[[str], Tier]  # of one store


def names_of(count: int, first: int = 0) -> list[Name]:
    """Make names whose records are no zeros, as new buffers are."""
    return [bytes([1 + i]) * 32 for i in range(first, first + count)]


def record_of(name: Name, num_bytes: int = RECORD_BYTES) -> memoryview:
    return memoryview((name * (num_bytes // len(name) + 1))[:num_bytes])


def records_of(names: Sequence[Name]) -> list[memoryview]:
    return [record_of(name) for name in names]


def buffers(count: int, num_bytes: int = RECORD_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(num_bytes)) for _ in range(count)]


def soon() -> Deadline:
    return Deadline.after(WITHIN_S)


class SharedTierCases:
    """A subclass has the fixture ``make``."""

    def test_what_is_stored_is_found_and_loaded(self, make: MakeNamespace) -> None:
        tier, names = make("0" * 16), names_of(20)
        assert tier.store(names, records_of(names), soon()) == 20
        assert tier.find(names, soon()) == 20
        into = buffers(20)
        assert tier.load(names, into, soon()) == 20
        assert into == records_of(names)

    def test_nothing_of_nothing(self, make: MakeNamespace) -> None:
        tier = make("0" * 16)
        assert tier.find([], soon()) == tier.load([], [], soon()) == tier.store([], [], soon()) == 0
        tier.drop([], soon())

    def test_a_run_ends_before_what_is_not_there(self, make: MakeNamespace) -> None:
        tier, names = make("0" * 16), names_of(6)
        there = [*names[:3], *names[4:]]
        assert tier.store(there, records_of(there), soon()) == 5
        assert tier.find(names, soon()) == 3
        into = buffers(6)
        assert tier.load(names, into, soon()) == 3
        assert into[:3] == records_of(names[:3])
        assert tier.load(names[3:], buffers(3), soon()) == 0
        assert tier.load(names[4:], into[4:], soon()) == 2, "and the tier goes on"

    @pytest.mark.parametrize("difference", [-1, 1, -RECORD_BYTES, 3 * RECORD_BYTES])
    def test_a_run_ends_before_a_record_of_another_length(
        self, make: MakeNamespace, difference: int
    ) -> None:
        tier, names = make("0" * 16), names_of(6)
        records = records_of(names)
        records[2] = record_of(names[2], RECORD_BYTES + difference)
        assert tier.store(names, records, soon()) == 6
        around = bytearray(RECORD_BYTES + 2)
        into = [*buffers(2), memoryview(around)[1:-1], *buffers(3)]
        assert tier.load(names, into, soon()) == 2
        assert into[:2] == records[:2]
        assert (around[0], around[-1]) == (0, 0)
        assert tier.load(names[2:], into[2:], soon()) == 0
        right = records_of(names[2:3])
        assert tier.store(names[2:3], right, soon()) == 1, "another length is not left"
        assert tier.load(names, into, soon()) == 6

    def test_what_is_dropped_is_gone(self, make: MakeNamespace) -> None:
        tier, names = make("0" * 16), names_of(4)
        tier.store(names, records_of(names), soon())
        tier.drop(names[1:], soon())
        tier.drop(names[1:], soon())
        assert tier.find(names, soon()) == 1

    def test_namespaces_do_not_meet(self, make: MakeNamespace) -> None:
        one, other, names = make("0" * 16), make("1" * 16), names_of(2)
        one.store(names, records_of(names), soon())
        assert other.find(names, soon()) == 0
        other.drop(names, soon())
        assert make("0" * 16).find(names, soon()) == 2, "another process finds them"

    def test_several_threads_at_once(self, make: MakeNamespace) -> None:
        tier = make("0" * 16)
        failed: list[BaseException] = []

        def use(first: int) -> None:
            try:
                names = names_of(5, first)
                for _ in range(5):
                    assert tier.store(names, records_of(names), soon()) == 5
                    into = buffers(5)
                    assert tier.load(names, into, soon()) == 5
                    assert into == records_of(names)
                    assert tier.find(names, soon()) == 5
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=use, args=(10 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        assert not failed, failed

    def test_no_time_is_an_error(self, make: MakeNamespace) -> None:
        tier, names = make("0" * 16), names_of(2)
        over = Deadline.after(0)
        for call in (
            lambda: tier.find(names, over),
            lambda: tier.load(names, buffers(2), over),
            lambda: tier.store(names, records_of(names), over),
            lambda: tier.drop(names, over),
        ):
            with pytest.raises(TierError, match="out of time"):
                call()
        assert tier.find(names, soon()) == 0

    def test_it_says_what_it_is(self, make: MakeNamespace) -> None:
        tier = make("0" * 16)
        assert tier.traits.is_shared
        assert tier.usage().num_records is None
        tier.close()
        with pytest.raises(TierError, match="closed"):
            tier.find(names_of(1), soon())
