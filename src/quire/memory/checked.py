"""A provider that holds its users to what they promise, for tests and for hunting a leak."""

import weakref
from typing import TYPE_CHECKING, final

from quire.memory.provider import Region, Window
from quire.memory.provider_wrappers import WrappedMemory, WrappedRegion

if TYPE_CHECKING:
    import torch


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
