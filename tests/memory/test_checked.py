"""Promises that are broken on purpose: each is noticed, and nothing has changed."""

import gc
from collections.abc import Callable

import pytest
import torch

from quire.errors import MemoryUnavailable
from quire.memory import CheckedMemory, FailingMemory, HostMemory, Region
from quire.memory.provider_wrappers import CheckedRegion, CheckedWindow

PAGE = HostMemory().page_bytes
heaps = pytest.mark.skipif(HostMemory().cannot_share is not None, reason="no heaps here")


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
        ({"offset": 19 * PAGE, "nbytes": 2 * PAGE}, "outside of the range"),
        ({"offset": -PAGE, "nbytes": PAGE}, "outside of the range"),
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
        cannot_share = None

        def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> Region:
            return host_region

    region = CheckedMemory(Handing()).reserve(4 * PAGE)
    region.commit(0, PAGE)
    host_region.commit(PAGE, PAGE)  # behind its back
    with pytest.raises(AssertionError, match=f"1 pages of {PAGE} bytes are committed"):
        region.check()


@pytest.fixture
def region() -> CheckedRegion:
    """Pages 0 to 7 and 12 of 32 are committed; each is full of its number and one."""
    region = CheckedMemory(HostMemory()).reserve(32 * PAGE, heap_bytes=8 * PAGE)
    region.commit(0, 8 * PAGE)
    region.commit(12 * PAGE, PAGE)
    for page in (*range(8), 12):
        region.tensor(torch.uint8)[page * PAGE : (page + 1) * PAGE] = page + 1
    return region


@pytest.fixture
def window(region: CheckedRegion) -> CheckedWindow:
    """It shows pages 2, 3 and 4, and page 3 once more."""
    window = region.window(16 * PAGE)
    window.map(0, 2 * PAGE, 3 * PAGE)
    window.map(10 * PAGE, 3 * PAGE, PAGE)
    return window


@heaps
@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda r, w: r.decommit(3 * PAGE, PAGE), "page 3 is still seen"),
        (lambda r, w: r.decommit(0, PAGE, stride=4 * PAGE, count=2), "page 4 is still seen"),
        (lambda r, w: r.decommit(0, 8 * PAGE), "page 2 is still seen"),
        (lambda r, w: r.decommit(12 * PAGE, 2 * PAGE), "page 13 is not committed"),
        (lambda r, w: r.commit(12 * PAGE, PAGE), "page 12 is committed already"),
        (lambda r, w: w.map(5 * PAGE, 8 * PAGE, PAGE), "page 8 is shown and not committed"),
        (lambda r, w: w.map(5 * PAGE, 7 * PAGE, 2 * PAGE), "page 8 is shown and not committed"),
        (lambda r, w: w.map(100, 0, PAGE), "not multiples of the page"),
        (lambda r, w: w.map(0, 100, PAGE), "not multiples of the page"),
        (lambda r, w: w.map(0, 0, 100), "not multiples of the page"),
        (lambda r, w: w.map(0, 0, 0), "empty"),
        (lambda r, w: w.map(15 * PAGE, 0, 2 * PAGE), "outside of the range"),
        (lambda r, w: w.map(-PAGE, 0, PAGE), "outside of the range"),
        (lambda r, w: w.map(0, 31 * PAGE, 2 * PAGE), "outside of the range"),
        (lambda r, w: w.map(0, -PAGE, PAGE), "outside of the range"),
        (lambda r, w: w.unmap(100, PAGE), "not multiples of the page"),
        (lambda r, w: w.unmap(0, PAGE + 1), "not multiples of the page"),
        (lambda r, w: w.unmap(0, 0), "empty"),
        (lambda r, w: w.unmap(15 * PAGE, 2 * PAGE), "outside of the range"),
        (lambda r, w: w.unmap(-PAGE, PAGE), "outside of the range"),
    ],
)
def test_a_broken_promise_about_windows_is_noticed(
    region: CheckedRegion,
    window: CheckedWindow,
    broken: Callable[[CheckedRegion, CheckedWindow], None],
    complaint: str,
) -> None:
    def seen() -> list[int]:
        return window.tensor(torch.uint8)[::PAGE].tolist()

    shown = seen()
    assert shown == [3, 4, 5, *[0] * 7, 4, *[0] * 5]
    with pytest.raises(AssertionError, match=complaint):
        broken(region, window)
    assert seen() == shown
    assert window.shown == {2, 3, 4}
    assert region.committed_bytes == 9 * PAGE
    region.check()


@heaps
def test_a_page_may_go_when_it_is_seen_nowhere(
    region: CheckedRegion, window: CheckedWindow
) -> None:
    other = region.window(PAGE)
    other.map(0, 3 * PAGE, PAGE)
    window.unmap(PAGE, PAGE)
    with pytest.raises(AssertionError, match="page 3 is still seen"):
        region.decommit(3 * PAGE, PAGE)
    window.map(10 * PAGE, 5 * PAGE, PAGE)  # it replaces what was shown
    with pytest.raises(AssertionError, match="page 3 is still seen"):
        region.decommit(3 * PAGE, PAGE)
    other.close()
    region.decommit(3 * PAGE, PAGE)
    with pytest.raises(AssertionError, match="page 2 is still seen"):
        region.decommit(2 * PAGE, PAGE)
    del window
    gc.collect()


@heaps
def test_a_dropped_window_holds_no_page(region: CheckedRegion) -> None:
    window = region.window(PAGE)
    window.map(0, 0, PAGE)
    del window
    gc.collect()
    region.decommit(0, PAGE)
    region.check()


@heaps
@pytest.mark.parametrize("heap_bytes", [0, -PAGE, 100, PAGE + 1])
def test_heaps_are_whole_pages(heap_bytes: int) -> None:
    with pytest.raises(AssertionError, match="not whole pages"):
        CheckedMemory(HostMemory()).reserve(PAGE, heap_bytes=heap_bytes)
