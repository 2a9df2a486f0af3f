"""A provider that keeps the pages which its regions give back, and can back pages beforehand."""

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from quire.errors import MemoryUnavailable
from quire.memory.provider import MemoryProvider, Region
from quire.memory.provider_wrappers import WrappedMemory, WrappedRegion
from quire.units import align_down, ceil_div, format_bytes

log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]  # (bytes done, bytes in all)
_Run: TypeAlias = tuple[int, int]  # pages [start, stop)

_EMPTY, _KEPT, _COMMITTED = 0, 1, 2  # what a page is
_STEP_BYTES = 64 * 2**20  # backed, touched or made room for at once


@final
class PageCacheMemory(WrappedMemory):
    """Keeps the pages that its regions decommit, and gives them out again first, as zeros.

    Committed and kept pages together are ``backed``. Nothing is kept beyond ``limit_bytes`` of
    them, and kept pages go where others must be committed within it. The limit refuses no commit. A
    region that is dropped without ``close`` stays in ``backed_bytes``. For memory of the CPU only.
    """

    def __init__(self, upstream: MemoryProvider, *, limit_bytes: int) -> None:
        super().__init__(upstream)
        self.limit_bytes = limit_bytes
        self.backed_bytes = 0  # of pages that exist, committed or kept
        # Held while pages go or regions come, and while they are read to keep them alive.
        self.giving_back = threading.Lock()
        # By number, so that they are asked in one order: a set's depends on their addresses.
        self._regions: weakref.WeakValueDictionary[int, PageCacheRegion] = (
            weakref.WeakValueDictionary()
        )
        self._numbers = itertools.count()
        this = weakref.ref(self)

        def in_child() -> None:
            if (mine := this()) is not None:
                mine._leave()

        os.register_at_fork(after_in_child=in_child)

    @property
    def kept_bytes(self) -> int:
        """Bytes of pages that are backed and not committed."""
        return sum(region.kept_bytes for region in self._living())

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> "PageCacheRegion":
        region = PageCacheRegion(self._upstream.reserve(nbytes, heap_bytes=heap_bytes), self)
        with self.giving_back:
            self._regions[next(self._numbers)] = region
        return region

    def prefault(self, progress: Progress | None = None) -> int:
        """Back the regions up to the limit, each from its beginning; return the bytes backed then.

        Where more addresses are reserved than the limit allows pages, each region gets its share,
        and pages that lie in the wrong place make room for others later.

        Raises: MemoryUnavailable; then what is backed stays so.
        """
        regions = self._living()
        reserved = sum(region.nbytes for region in regions)
        goal = min(self.limit_bytes, reserved)
        for region in regions:
            share = align_down(region.nbytes * goal // reserved, self.page_bytes)
            for _ in region.back(share):
                if progress is not None:
                    progress(min(self.backed_bytes, goal), goal)
        log.info(
            "%s of KV memory are backed at the start, %s of addresses reserved%s",
            format_bytes(self.backed_bytes),
            format_bytes(reserved),
            "" if goal == reserved else ": other pages take their place as tokens need them",
        )
        return self.backed_bytes

    def release_kept(self, nbytes: int | None = None) -> int:
        """Give kept pages back to the system: all, or at least ``nbytes`` if there are so many.

        Returns the bytes given back. Every region gives its share, those with the highest
        addresses first: they are handed out last.

        Raises: MemoryUnavailable where the system does not take them.
        """
        kept = self.kept_bytes
        wanted = kept if nbytes is None else min(kept, nbytes)
        released = 0
        for region in self._living():
            if region.kept_bytes and wanted:
                share = ceil_div(wanted * region.kept_bytes, kept)
                released += region.release(ceil_div(share, self.page_bytes))
        return released

    def move_limit(self, limit_bytes: int) -> int:
        """Set another limit, and return the bytes that were given back for it.

        Raises: MemoryUnavailable where the system does not take pages back.
        """
        self.limit_bytes = limit_bytes
        return self.release_kept(max(0, self.backed_bytes - limit_bytes))

    def make_room(self, nbytes: int) -> None:
        """Give kept pages back for ``nbytes`` of others, several at once: it takes a search."""
        excess = self.backed_bytes + nbytes - self.limit_bytes
        if excess > 0:
            self.release_kept(max(excess, _STEP_BYTES))

    def touch(self) -> None:
        """Read a byte of each page that is backed. Another thread may call it."""
        with self.giving_back:
            regions = self._living()
        for region in regions:
            region.touch()

    def _living(self) -> "list[PageCacheRegion]":
        """Return the regions that there are, in the order in which they came."""
        return list(self._regions.values())

    def _leave(self) -> None:
        """Keep nothing in a forked child: its pages are gone, or its parent's."""
        self.giving_back = threading.Lock()
        self.limit_bytes = 0
        for region in self._living():
            region.forget_kept()


@final
class PageCacheRegion(WrappedRegion):
    """Knows of each page whether it is empty, kept or committed. Kept pages hold zeros."""

    __slots__ = (
        "__weakref__",
        "_bytes",
        "_memory",
        "_page_bytes",
        "_pages",
        "committed_bytes",
        "kept_bytes",
    )
    committed_bytes: int

    def __init__(self, upstream: Region, memory: PageCacheMemory) -> None:
        import torch

        super().__init__(upstream)
        self.committed_bytes = 0
        self.kept_bytes = 0
        self._memory = memory
        self._page_bytes = memory.page_bytes
        # Untouched zeros take no memory: this is as sparse as the region.
        self._pages = np.zeros(upstream.nbytes // self._page_bytes, np.uint8)
        self._bytes: NDArray[np.uint8] | None = upstream.tensor(torch.uint8).numpy()

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        pages = self._states(offset, nbytes, stride, count)
        kept = pages == _KEPT
        kept_bytes = int(np.count_nonzero(kept)) * self._page_bytes
        # Taken first, so that making room for the others does not give them away.
        pages[kept] = _COMMITTED
        self.kept_bytes -= kept_bytes
        missing_bytes = nbytes * count - kept_bytes
        try:
            if missing_bytes:
                self._memory.make_room(missing_bytes)
            if not kept_bytes:
                self._back(offset, nbytes, stride, count)
            elif missing_bytes:
                self._commit_runs(list(self._runs(offset, stride, ~kept)))
        except (MemoryUnavailable, ValueError):
            pages[kept] = _KEPT
            self.kept_bytes += kept_bytes
            raise
        pages[...] = _COMMITTED
        self.committed_bytes += nbytes * count

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        pages = self._states(offset, nbytes, stride, count)
        if self._memory.backed_bytes > self._memory.limit_bytes:
            with self._memory.giving_back:
                self._give_back(offset, nbytes, stride, count)
            pages[...] = _EMPTY
        else:
            np.ndarray((count, nbytes), np.uint8, self._content(), offset, (stride, 1))[...] = 0
            pages[...] = _KEPT
            self.kept_bytes += nbytes * count
        self.committed_bytes -= nbytes * count

    def close(self) -> None:
        with self._memory.giving_back:
            if self._bytes is not None:
                self._memory.backed_bytes -= self._upstream.committed_bytes
            self._pages[:] = _EMPTY
            self._bytes = None
            self.committed_bytes = self.kept_bytes = 0
            self._upstream.close()

    def back(self, nbytes: int) -> Iterator[int]:
        """Back the empty pages in [0, nbytes) and keep them, as far as the limit allows.

        Yield after each step, with its bytes. Raises: MemoryUnavailable.
        """
        step = _STEP_BYTES // self._page_bytes
        empty = self._pages[: nbytes // self._page_bytes] == _EMPTY
        for start, stop in _runs(np.flatnonzero(empty)):
            for first in range(start, stop, step):
                last = min(first + step, stop)
                length = (last - first) * self._page_bytes
                if self._memory.backed_bytes + length > self._memory.limit_bytes:
                    return
                self._back(first * self._page_bytes, length)
                self._pages[first:last] = _KEPT
                self.kept_bytes += length
                yield length

    def release(self, num_pages: int) -> int:
        """Give the last ``num_pages`` kept pages back; return their bytes.

        Raises: MemoryUnavailable.
        """
        released = 0
        for start, stop in _runs(np.flatnonzero(self._pages == _KEPT)[-num_pages:]):
            length = (stop - start) * self._page_bytes
            with self._memory.giving_back:
                self._give_back(start * self._page_bytes, length)
                self._pages[start:stop] = _EMPTY
            self.kept_bytes -= length
            released += length
        return released

    def forget_kept(self) -> None:
        """Mark kept pages as empty."""
        self._pages[self._pages == _KEPT] = _EMPTY
        self.kept_bytes = 0

    def touch(self) -> None:
        """Read a byte of each page that is backed."""
        step = _STEP_BYTES // self._page_bytes
        for first in range(0, len(self._pages), step):
            with self._memory.giving_back:
                for start, stop in _runs(first + np.flatnonzero(self._pages[first : first + step])):
                    run = self._content()[start * self._page_bytes : stop * self._page_bytes]
                    run[:: self._page_bytes].max(initial=0)

    def _content(self) -> NDArray[np.uint8]:
        """Return the region's bytes. Raises: ValueError after ``close``."""
        if self._bytes is None:
            raise ValueError("this memory region is closed")
        return self._bytes

    def _states(self, offset: int, nbytes: int, stride: int, count: int) -> NDArray[np.uint8]:
        """Return the states of the pieces' pages, [count, pages], to be changed in place."""
        self._content()
        first, num, step = (n // self._page_bytes for n in (offset, nbytes, stride))
        return np.ndarray((count, num), np.uint8, self._pages, first, (step, 1))

    def _runs(self, offset: int, stride: int, wanted: NDArray[np.bool_]) -> Iterator[_Run]:
        piece, page = np.nonzero(wanted)
        return _runs((offset + piece * stride) // self._page_bytes + page)

    def _commit_runs(self, runs: list[_Run]) -> None:
        """Commit all of them or none. Raises: MemoryUnavailable."""
        done: list[_Run] = []
        try:
            for start, stop in runs:
                self._back(start * self._page_bytes, (stop - start) * self._page_bytes)
                done.append((start, stop))
        except MemoryUnavailable:
            for start, stop in done:
                self._give_back(start * self._page_bytes, (stop - start) * self._page_bytes)
            raise

    def _back(self, offset: int, nbytes: int, stride: int = 0, count: int = 1) -> None:
        self._upstream.commit(offset, nbytes, stride=stride, count=count)
        self._memory.backed_bytes += nbytes * count

    def _give_back(self, offset: int, nbytes: int, stride: int = 0, count: int = 1) -> None:
        self._upstream.decommit(offset, nbytes, stride=stride, count=count)
        self._memory.backed_bytes -= nbytes * count


def _runs(pages: NDArray[np.int64]) -> Iterator[_Run]:
    """Yield the runs of neighbours among sorted page numbers, i64[n]."""
    if len(pages):
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        starts, stops = pages[[0, *cuts]], pages[[*(cuts - 1), -1]] + 1
        yield from zip(starts.tolist(), stops.tolist(), strict=True)
