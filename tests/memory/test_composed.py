"""Ceilings, counters and injected failures, each and stacked."""

from collections.abc import Callable

import pytest
import torch

from conformance.memory_cases import heap_files
from quire.errors import MemoryUnavailable
from quire.memory import (
    CheckedMemory,
    CountedMemory,
    FailingMemory,
    HostMemory,
    LimitedMemory,
    MemoryProvider,
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


@pytest.mark.parametrize(
    "wrap",
    [
        CountedMemory,
        lambda upstream: LimitedMemory(upstream, limit_bytes=2**30),
        lambda upstream: FailingMemory(upstream, failing=()),
        CheckedMemory,
    ],
    ids=["counted", "limited", "failing", "checked"],
)
def test_a_provider_can_share_if_the_one_below_can(
    wrap: Callable[[MemoryProvider], MemoryProvider],
) -> None:
    portable = HostMemory(portable=True)
    assert wrap(portable).cannot_share == portable.cannot_share == "it is told to be portable"
    assert wrap(HostMemory()).cannot_share == HostMemory().cannot_share


@pytest.mark.skipif(HostMemory().cannot_share is not None, reason="no heaps here")
def test_pages_are_counted_once_however_often_they_are_seen() -> None:
    counted = CountedMemory(HostMemory())
    region = counted.reserve(10 * PAGE, heap_bytes=8 * PAGE)
    assert counted.reserved_bytes == region.nbytes == 16 * PAGE
    region.commit(0, 4 * PAGE)
    windows = [region.window(100 * PAGE) for _ in range(3)]
    for window in windows:
        window.map(0, 0, 4 * PAGE)
        window.map(50 * PAGE, 2 * PAGE, 2 * PAGE)
    assert counted.reserved_bytes == 316 * PAGE  # windows are address space too
    assert counted.committed_bytes == counted.peak_committed_bytes == 4 * PAGE
    windows[0].unmap(0, PAGE)
    windows[1].close()
    assert counted.committed_bytes == 4 * PAGE
    region.close()
    assert counted.committed_bytes == counted.reserved_bytes == 0
    assert counted.returned_bytes == 4 * PAGE


@pytest.mark.skipif(HostMemory().cannot_share is not None, reason="no heaps here")
@pytest.mark.parametrize("name", ["limited", "failing"])
def test_a_refused_commit_leaves_heaps_and_windows_as_they_were(name: str) -> None:
    refusing: LimitedMemory | FailingMemory
    if name == "limited":
        refusing = LimitedMemory(HostMemory(), limit_bytes=5 * PAGE)
    else:
        refusing = FailingMemory(HostMemory(), failing={2, 3})
    counted = CountedMemory(refusing)
    region = CheckedMemory(counted).reserve(64 * PAGE, heap_bytes=8 * PAGE)
    before = len(heap_files())
    region.commit(0, 4 * PAGE)
    window = region.window(8 * PAGE)
    window.map(0, 0, 4 * PAGE)
    seen = window.tensor(torch.uint8)
    seen[: 4 * PAGE] = 1
    for asked in (
        {"offset": 6 * PAGE, "nbytes": 30 * PAGE},
        {"offset": 8 * PAGE, "nbytes": PAGE, "stride": 8 * PAGE, "count": 5},
    ):
        with pytest.raises(MemoryUnavailable):
            region.commit(**asked)
        assert region.committed_bytes == counted.committed_bytes == 4 * PAGE
        assert len(heap_files()) == before + 1
        assert seen[: 4 * PAGE].eq(1).all()
        assert seen[4 * PAGE :].eq(0).all()
        region.check()
    region.commit(8 * PAGE, PAGE)
    window.map(4 * PAGE, 8 * PAGE, PAGE)
    assert seen[4 * PAGE :].eq(0).all()
    assert region.committed_bytes == counted.committed_bytes == 5 * PAGE
