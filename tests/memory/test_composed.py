"""Ceilings, counters, injected failures and checked promises, each and stacked."""

import pytest
import torch

from quire.errors import MemoryUnavailable
from quire.memory import (
    CheckedMemory,
    CountedMemory,
    FailingMemory,
    HostMemory,
    LimitedMemory,
    Region,
)

PAGE = HostMemory().page_bytes


def test_counted_memory_adds_up_over_regions() -> None:
    counted = CountedMemory(HostMemory())
    one, other = counted.reserve(10 * PAGE), counted.reserve(20 * PAGE)
    assert counted.reserved_bytes == 30 * PAGE

    one.commit(0, 4 * PAGE)
    other.commit(0, PAGE, stride=3 * PAGE, count=6)
    assert counted.committed_bytes == counted.peak_committed_bytes == 10 * PAGE
    other.decommit(0, PAGE, stride=3 * PAGE, count=2)
    one.commit(8 * PAGE, PAGE)
    assert counted.committed_bytes == 9 * PAGE
    assert counted.peak_committed_bytes == 10 * PAGE
    assert counted.returned_bytes == 2 * PAGE

    one.close()
    one.close()
    assert counted.reserved_bytes == 20 * PAGE
    assert counted.committed_bytes == other.committed_bytes == 4 * PAGE
    assert counted.returned_bytes == 7 * PAGE
    other.close()
    assert counted.reserved_bytes == counted.committed_bytes == 0
    assert counted.peak_committed_bytes == 10 * PAGE
    assert counted.returned_bytes == 11 * PAGE


def test_counted_memory_does_not_count_what_was_refused() -> None:
    counted = CountedMemory(LimitedMemory(HostMemory(), limit_bytes=PAGE))
    region = counted.reserve(10 * PAGE)
    with pytest.raises(MemoryUnavailable):
        region.commit(0, 2 * PAGE)
    assert counted.committed_bytes == counted.peak_committed_bytes == 0


def test_limited_memory_names_the_numbers() -> None:
    limited = LimitedMemory(HostMemory(), limit_bytes=2**20)
    one, other = limited.reserve(2**21), limited.reserve(2**21)
    one.commit(0, 2**19)
    other.commit(0, 2**19)
    with pytest.raises(
        MemoryUnavailable,
        match=r"64\.00 KiB asked with 1\.00 MiB committed would pass the limit of 1\.00 MiB: "
        r"free memory, or raise limit_bytes by 65,536 bytes",
    ):
        other.commit(2**19, 2**15, stride=2**16, count=2)
    assert limited.committed_bytes == 2**20


def test_a_limit_may_move() -> None:
    limited = LimitedMemory(HostMemory(), limit_bytes=2 * PAGE)
    region = limited.reserve(10 * PAGE)
    region.commit(0, 2 * PAGE)
    limited.limit_bytes = PAGE
    assert limited.committed_bytes == region.committed_bytes == 2 * PAGE
    region.decommit(0, PAGE)
    with pytest.raises(MemoryUnavailable):
        region.commit(0, PAGE)
    limited.limit_bytes = 10 * PAGE
    region.commit(0, PAGE)
    region.commit(2 * PAGE, 8 * PAGE)


def test_closing_a_region_makes_room_under_the_limit() -> None:
    limited = LimitedMemory(HostMemory(), limit_bytes=PAGE)
    region = limited.reserve(PAGE)
    region.commit(0, PAGE)
    region.close()
    limited.reserve(PAGE).commit(0, PAGE)


def test_failing_memory_fails_by_number_over_all_regions() -> None:
    failing = FailingMemory(HostMemory(), failing={2, 4})
    one, other = failing.reserve(10 * PAGE), failing.reserve(10 * PAGE)
    one.commit(0, PAGE)
    with pytest.raises(MemoryUnavailable, match="commit 2"):
        other.commit(0, PAGE, stride=2 * PAGE, count=3)
    other.commit(0, PAGE)
    with pytest.raises(MemoryUnavailable, match="commit 4"):
        one.commit(PAGE, PAGE)
    one.commit(PAGE, PAGE)
    assert failing.num_commits == 5
    assert (one.committed_bytes, other.committed_bytes) == (2 * PAGE, PAGE)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"offset": 0, "nbytes": PAGE}, "page 0 is committed already"),
        ({"offset": 5 * PAGE, "nbytes": PAGE, "stride": PAGE, "count": 6}, "page 8 is committed"),
        ({"offset": 100, "nbytes": PAGE}, "not multiples of the page"),
        ({"offset": 0, "nbytes": 100}, "not multiples of the page"),
        ({"offset": 0, "nbytes": PAGE, "stride": PAGE + 1, "count": 2}, "not multiples"),
        ({"offset": 5 * PAGE, "nbytes": 0}, "empty"),
        ({"offset": 5 * PAGE, "nbytes": PAGE, "count": 0}, "empty"),
        ({"offset": 5 * PAGE, "nbytes": PAGE, "count": 2}, "overlap"),
        ({"offset": 5 * PAGE, "nbytes": 2 * PAGE, "stride": PAGE, "count": 2}, "overlap"),
        ({"offset": 19 * PAGE, "nbytes": 2 * PAGE}, "outside of the region"),
        ({"offset": -PAGE, "nbytes": PAGE}, "outside of the region"),
        ({"offset": 5 * PAGE, "nbytes": PAGE, "stride": 5 * PAGE, "count": 4}, "outside"),
    ],
)
def test_checked_memory_refuses_a_broken_promise(asked: dict[str, int], complaint: str) -> None:
    region = CheckedMemory(HostMemory()).reserve(20 * PAGE)
    region.commit(0, PAGE, stride=8 * PAGE, count=2)
    with pytest.raises(AssertionError, match=complaint):
        region.commit(**asked)
    assert region.committed_bytes == 2 * PAGE
    region.check()


def test_checked_memory_refuses_to_give_back_twice() -> None:
    region = CheckedMemory(HostMemory()).reserve(20 * PAGE)
    region.commit(0, 8 * PAGE)
    region.decommit(2 * PAGE, PAGE)
    with pytest.raises(AssertionError, match="page 2 is not committed"):
        region.decommit(0, 4 * PAGE)
    with pytest.raises(AssertionError, match="page 8 is not committed"):
        region.decommit(4 * PAGE, PAGE, stride=2 * PAGE, count=3)
    assert region.committed_bytes == 7 * PAGE


def test_checked_memory_forgets_a_commit_that_failed() -> None:
    region = CheckedMemory(FailingMemory(HostMemory(), failing={1})).reserve(PAGE)
    with pytest.raises(MemoryUnavailable):
        region.commit(0, PAGE)
    region.commit(0, PAGE)
    region.check()


def test_checked_memory_notices_a_counter_that_drifted() -> None:
    upstream = HostMemory()
    host_region = upstream.reserve(4 * PAGE)

    class Handing:
        page_bytes = PAGE

        def reserve(self, nbytes: int) -> Region:
            return host_region

    region = CheckedMemory(Handing()).reserve(4 * PAGE)
    region.commit(0, PAGE)
    host_region.commit(PAGE, PAGE)  # behind its back
    with pytest.raises(AssertionError, match=f"1 pages of {PAGE} bytes are committed"):
        region.check()


def test_providers_stack() -> None:
    limited = LimitedMemory(HostMemory(), limit_bytes=4 * PAGE)
    counted = CountedMemory(FailingMemory(limited, failing={2}))
    region = CheckedMemory(counted).reserve(10 * PAGE)
    region.commit(0, 3 * PAGE)
    with pytest.raises(MemoryUnavailable, match="commit 2"):
        region.commit(3 * PAGE, PAGE)
    with pytest.raises(MemoryUnavailable, match="limit"):
        region.commit(3 * PAGE, 2 * PAGE)
    region.commit(3 * PAGE, PAGE)
    region.tensor(torch.uint8)[: 4 * PAGE] = 1
    assert limited.committed_bytes == counted.committed_bytes == 4 * PAGE
    region.close()
    assert limited.committed_bytes == counted.committed_bytes == 0
    assert counted.returned_bytes == 4 * PAGE
