"""Providers that wrap a provider: counters, a ceiling, injected failures, checks.

Each wrapper does one thing, so that they stack: ``CountedMemory(LimitedMemory(HostMemory(), …))``.
A region that is dropped without ``close`` stays in their counts.
"""

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from quire.errors import MemoryUnavailable
from quire.memory.provider import MemoryProvider, Region, Window
from quire.units import format_bytes, format_count

if TYPE_CHECKING:
    import torch


class WrappedMemory:
    """A provider that forwards to ``upstream`` all but ``reserve``."""

    def __init__(self, upstream: MemoryProvider) -> None:
        self._upstream = upstream

    @property
    def page_bytes(self) -> int:
        return self._upstream.page_bytes

    @property
    def cannot_share(self) -> str | None:
        return self._upstream.cannot_share

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        self._upstream.used_on(stream, ends=ends)


class WrappedRegion:
    """A region that forwards to ``upstream`` what a subclass does not do itself."""

    __slots__ = ("_upstream",)

    def __init__(self, upstream: Region) -> None:
        self._upstream = upstream

    @property
    def nbytes(self) -> int:
        return self._upstream.nbytes

    @property
    def committed_bytes(self) -> int:
        return self._upstream.committed_bytes

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._upstream.commit(offset, nbytes, stride=stride, count=count)

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._upstream.decommit(offset, nbytes, stride=stride, count=count)

    def window(self, nbytes: int) -> Window:
        return self._upstream.window(nbytes)

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        return self._upstream.tensor(dtype)

    def close(self) -> None:
        self._upstream.close()


@final
class CountedMemory(WrappedMemory):
    """Counts over all regions. ``returned_bytes`` only ever grows: all that was decommitted."""

    def __init__(self, upstream: MemoryProvider) -> None:
        super().__init__(upstream)
        self.reserved_bytes = 0
        self.committed_bytes = 0
        self.peak_committed_bytes = 0
        self.returned_bytes = 0

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> "CountedRegion":
        region = CountedRegion(self._upstream.reserve(nbytes, heap_bytes=heap_bytes), self)
        self.reserved_bytes += region.nbytes
        return region

    def add(self, num_bytes: int) -> None:
        """Count what a region has committed."""
        self.committed_bytes += num_bytes
        if self.committed_bytes > self.peak_committed_bytes:
            self.peak_committed_bytes = self.committed_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count what a region has decommitted."""
        self.committed_bytes -= num_bytes
        self.returned_bytes += num_bytes


@final
class CountedRegion(WrappedRegion):
    """Reports to its ``CountedMemory`` what has happened."""

    __slots__ = ("_counts", "_open", "_window_bytes")

    def __init__(self, upstream: Region, counts: CountedMemory) -> None:
        super().__init__(upstream)
        self._counts = counts
        self._open = True
        self._window_bytes = 0

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._upstream.commit(offset, nbytes, stride=stride, count=count)
        self._counts.add(nbytes * count)

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._upstream.decommit(offset, nbytes, stride=stride, count=count)
        self._counts.give_back(nbytes * count)

    def window(self, nbytes: int) -> Window:
        window = self._upstream.window(nbytes)
        self._window_bytes += window.nbytes
        self._counts.reserved_bytes += window.nbytes
        return window

    def close(self) -> None:
        if self._open:
            self._open = False
            self._counts.give_back(self._upstream.committed_bytes)
            self._counts.reserved_bytes -= self._upstream.nbytes + self._window_bytes
            self._upstream.close()


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one region that go together: ``count`` equal pieces, ``stride`` bytes apart."""

    region: Region
    offset: int
    nbytes: int
    stride: int = 0
    count: int = 1


def commit_pages(pages: Sequence[Pages]) -> None:
    """Commit the pages of several regions.

    Raises: MemoryUnavailable for a commit that is refused; then none of them is committed.
    """
    for index, each in enumerate(pages):
        try:
            each.region.commit(each.offset, each.nbytes, stride=each.stride, count=each.count)
        except MemoryUnavailable:
            for done in pages[:index]:
                done.region.decommit(done.offset, done.nbytes, stride=done.stride, count=done.count)
            raise


@final
class GuardedRegion(WrappedRegion):
    """Calls ``guard`` before each commit, with its bytes; the guard refuses by raising."""

    __slots__ = ("_guard",)

    def __init__(self, upstream: Region, guard: Callable[[int], None]) -> None:
        super().__init__(upstream)
        self._guard = guard

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._guard(nbytes * count)
        self._upstream.commit(offset, nbytes, stride=stride, count=count)


@final
class LimitedMemory(WrappedMemory):
    """Refuses a commit that would take all regions together past ``limit_bytes``.

    The limit may be moved at any time; what is committed above a lowered one stays.
    """

    def __init__(self, upstream: MemoryProvider, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._counted = CountedMemory(upstream)
        super().__init__(self._counted)

    @property
    def committed_bytes(self) -> int:
        """Bytes committed in all regions."""
        return self._counted.committed_bytes

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> GuardedRegion:
        region = self._counted.reserve(nbytes, heap_bytes=heap_bytes)
        return GuardedRegion(region, self._refuse_above_limit)

    def _refuse_above_limit(self, asked_bytes: int) -> None:
        committed_bytes = self._counted.committed_bytes
        if committed_bytes + asked_bytes > self.limit_bytes:
            raise MemoryUnavailable(
                f"{format_bytes(asked_bytes)} asked with {format_bytes(committed_bytes)} committed "
                f"would pass the limit of {format_bytes(self.limit_bytes)}: free memory, or raise "
                f"limit_bytes by {format_count(committed_bytes + asked_bytes - self.limit_bytes)} "
                f"bytes"
            )


@final
class FailingMemory(WrappedMemory):
    """Fails the commits whose number is in ``failing``: 1 is the first, over all regions.

    ``failing`` is any container: ``{3}``, or ``range(5, 100)`` for a system that stays full.
    """

    def __init__(self, upstream: MemoryProvider, *, failing: Container[int]) -> None:
        super().__init__(upstream)
        self.num_commits = 0
        self._failing = failing

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> GuardedRegion:
        region = self._upstream.reserve(nbytes, heap_bytes=heap_bytes)
        return GuardedRegion(region, self._fail_in_turn)

    def _fail_in_turn(self, asked_bytes: int) -> None:
        self.num_commits += 1
        if self.num_commits in self._failing:
            raise MemoryUnavailable(
                f"commit {self.num_commits} ({format_bytes(asked_bytes)}) fails, as it was told to"
            )


# -- checks, for tests and for hunting a leak ------------------------------------------------------


@final
class CheckedMemory(WrappedMemory):
    """Holds callers to the promises in ``Region``, remembering every committed page."""

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> "CheckedRegion":
        if heap_bytes is not None and (heap_bytes < 1 or heap_bytes % self.page_bytes):
            raise AssertionError(f"heap_bytes={heap_bytes}: not whole pages of {self.page_bytes}")
        region = self._upstream.reserve(nbytes, heap_bytes=heap_bytes)
        return CheckedRegion(region, self.page_bytes)


@final
class CheckedRegion(WrappedRegion):
    """Raises AssertionError, and has changed nothing, for pieces that are misaligned, outside of
    the region, overlapping, or not in the state that the caller claims.
    """

    __slots__ = ("_committed", "_page_bytes", "_windows")

    def __init__(self, upstream: Region, page_bytes: int) -> None:
        super().__init__(upstream)
        self._page_bytes = page_bytes
        self._committed: set[int] = set()  # page numbers
        self._windows: weakref.WeakSet[CheckedWindow] = weakref.WeakSet()

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        pages = self._pages(offset, nbytes, stride, count)
        if twice := self._committed.intersection(pages):
            raise AssertionError(f"page {min(twice)} is committed already")
        self._upstream.commit(offset, nbytes, stride=stride, count=count)
        self._committed.update(pages)

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        pages = self._pages(offset, nbytes, stride, count)
        if never := set(pages) - self._committed:
            raise AssertionError(f"page {min(never)} is not committed")
        for window in self._windows:
            if seen := window.shown.intersection(pages):
                raise AssertionError(f"page {min(seen)} is still seen through a window")
        self._upstream.decommit(offset, nbytes, stride=stride, count=count)
        self._committed.difference_update(pages)

    def window(self, nbytes: int) -> "CheckedWindow":
        window = CheckedWindow(self, self._upstream.window(nbytes), self._page_bytes)
        self._windows.add(window)
        return window

    def close(self) -> None:
        self.check()
        self._upstream.close()
        self._committed.clear()
        self._windows.clear()

    def check(self) -> None:
        """Check that the region's counter says what its pages say. Raises: AssertionError."""
        if self.committed_bytes != len(self._committed) * self._page_bytes:
            raise AssertionError(
                f"{len(self._committed)} pages of {self._page_bytes} bytes are committed, but the "
                f"region counts {self.committed_bytes} bytes"
            )

    def committed_pages(self, offset: int, nbytes: int) -> list[int]:
        """Return the page numbers of a piece. Raises: AssertionError if one is not committed."""
        pages = self._pages(offset, nbytes, 0, 1)
        if never := set(pages) - self._committed:
            raise AssertionError(f"page {min(never)} is shown and not committed")
        return pages

    def _pages(self, offset: int, nbytes: int, stride: int, count: int) -> list[int]:
        return _page_numbers(self._page_bytes, self.nbytes, offset, nbytes, stride, count)


@final
class CheckedWindow:
    """Raises AssertionError, and has changed nothing, where a page is shown that is not committed,
    and for pieces that are misaligned or outside of the window.
    """

    __slots__ = ("__weakref__", "_page_bytes", "_region", "_sources", "_upstream")

    def __init__(self, region: CheckedRegion, upstream: Window, page_bytes: int) -> None:
        self._region = region
        self._upstream = upstream
        self._page_bytes = page_bytes
        self._sources: dict[int, int] = {}  # page of the window → page of the region

    @property
    def nbytes(self) -> int:
        return self._upstream.nbytes

    @property
    def shown(self) -> set[int]:
        """Pages of the region that are seen here."""
        return set(self._sources.values())

    def map(self, offset: int, source: int, nbytes: int) -> None:
        pages = _page_numbers(self._page_bytes, self.nbytes, offset, nbytes, 0, 1)
        sources = self._region.committed_pages(source, nbytes)
        self._upstream.map(offset, source, nbytes)
        self._sources.update(zip(pages, sources, strict=True))

    def unmap(self, offset: int, nbytes: int) -> None:
        pages = _page_numbers(self._page_bytes, self.nbytes, offset, nbytes, 0, 1)
        self._upstream.unmap(offset, nbytes)
        for page in pages:
            self._sources.pop(page, None)

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        return self._upstream.tensor(dtype)

    def close(self) -> None:
        self._upstream.close()
        self._sources.clear()


def _page_numbers(
    page: int, whole: int, offset: int, nbytes: int, stride: int, count: int
) -> list[int]:
    asked = f"offset={offset}, nbytes={nbytes}, stride={stride}, count={count}"
    if offset % page or nbytes % page or stride % page:
        raise AssertionError(f"{asked}: not multiples of the page, {page} bytes")
    if nbytes < 1 or count < 1 or (count > 1 and stride < nbytes):
        raise AssertionError(f"{asked}: pieces are empty, or overlap")
    if offset < 0 or offset + stride * (count - 1) + nbytes > whole:
        raise AssertionError(f"{asked}: outside of the range, {whole} bytes")
    starts = [(offset + stride * i) // page for i in range(count)]
    return [start + i for start in starts for i in range(nbytes // page)]
