"""Host memory whose pages can be seen at several addresses: heaps of physical memory, and windows.

A heap is an anonymous file (memfd), so that the offset of a page in it plays the part of a physical
address: to see a page somewhere is to map that offset there. Holes in the file take no memory. The
number of mappings is limited (``probe.mapping_limit``); neighbours in a heap that are seen as
neighbours are one mapping.

What is called a placement heap and a sparse buffer elsewhere is a heap and a window here.
"""

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from quire.errors import MemoryUnavailable
from quire.memory.host.addresses import Addresses, ForkGuard, SystemCalls
from quire.units import align_up, format_bytes

if TYPE_CHECKING:
    import torch


@final
class _Heap:
    """Physical memory: a file without a name, and how much of it has pages."""

    __slots__ = ("__weakref__", "committed_bytes", "file")

    def __init__(self, nbytes: int) -> None:
        self.committed_bytes = 0
        self.file = os.memfd_create("quire", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)  # the pages go when nothing shows them either
        os.ftruncate(self.file, nbytes)


@dataclass(frozen=True, slots=True)
class _Part:
    """What of a piece lies in one heap."""

    heap: int  # its number
    start: int  # in the heap
    nbytes: int
    offset: int  # in the region


@final
class Heaps:
    """A source of regions with heaps."""

    __slots__ = ("_calls", "_guard")

    def __init__(self) -> None:
        self._calls = SystemCalls()
        self._guard = ForkGuard()

    def reserve(self, nbytes: int, heap_bytes: int) -> "HeapRegion":
        return HeapRegion(self._calls, self._guard, align_up(nbytes, heap_bytes), heap_bytes)


def why_no_heaps() -> str | None:
    """Why this system has no heaps, found by making one of a page; None if it has."""
    if sys.platform != "linux":
        return f"{sys.platform} has no memfd"
    page = mmap.PAGESIZE
    try:
        calls, heap = SystemCalls(), _Heap(page)
        calls.allocate(heap.file, 0, page)
        address = calls.reserve(page)
        calls.show(address, page, heap.file, 0)
        calls.release(address, page)
        calls.punch(heap.file, 0, page)
    except (AttributeError, OSError) as error:
        return f"this kernel cannot make heaps ({error})"
    return None


@final
class HeapRegion:
    """A region whose offset o lies in heap ``o // heap_bytes``."""

    __slots__ = (
        "__weakref__",
        "_addresses",
        "_calls",
        "_guard",
        "_heap_bytes",
        "_heaps",
        "_shown",
        "closed",
        "committed_bytes",
    )

    def __init__(self, calls: SystemCalls, guard: ForkGuard, nbytes: int, heap_bytes: int) -> None:
        self.committed_bytes = 0
        self._calls = calls
        self._guard = guard
        self._heap_bytes = heap_bytes
        self._heaps: dict[int, _Heap] = {}
        # Of the windows, not the windows: a tensor may have outlived its window.
        self._shown: weakref.WeakSet[Addresses] = weakref.WeakSet()
        self.closed = False
        self._addresses = _reserve(calls, guard, nbytes)

    @property
    def nbytes(self) -> int:
        return self._addresses.nbytes

    @property
    def num_heaps(self) -> int:
        return len(self._heaps)

    def backed_bytes(self) -> int:
        """Bytes of pages that exist, as the system counts them; however often they are seen."""
        return sum(os.fstat(heap.file).st_blocks * 512 for heap in self._heaps.values())

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._refuse()
        parts = list(self._parts(offset, nbytes, stride, count))
        try:
            for part in parts:
                heap = self._heaps.get(part.heap) or self._add_heap(part.heap)
                self._calls.allocate(heap.file, part.start, part.nbytes)
        except OSError as error:
            # The caller held none of them, so all may be given back, those not reached as well.
            for part in parts:
                self._try_to(self._calls.punch, part)
            self._drop_empty()
            raise MemoryUnavailable(
                f"the system refused pages for {count} x {format_bytes(nbytes)} ({error}) with "
                f"{format_bytes(self.committed_bytes)} of this region committed: lower the KV "
                f"budget, or free memory"
            ) from error
        for part in parts:
            self._heaps[part.heap].committed_bytes += part.nbytes
        self.committed_bytes += nbytes * count

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._refuse()
        parts = list(self._parts(offset, nbytes, stride, count))
        try:
            for part in parts:
                self._calls.punch(self._heaps[part.heap].file, part.start, part.nbytes)
        except OSError as error:
            # What has gone comes back, empty: no count has changed, and the call can be repeated.
            for part in parts:
                self._try_to(self._calls.allocate, part)
            raise MemoryUnavailable(
                f"the system did not take {count} x {format_bytes(nbytes)} back ({error}): repeat "
                f"the call, or close the region"
            ) from error
        for part in parts:
            self._heaps[part.heap].committed_bytes -= part.nbytes
        self.committed_bytes -= nbytes * count
        self._drop_empty()

    def window(self, nbytes: int) -> "HeapWindow":
        self._refuse()
        addresses = _reserve(self._calls, self._guard, nbytes)
        self._shown.add(addresses)
        return HeapWindow(self, addresses)

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        self._refuse()
        return self._addresses.tensor(dtype)

    def close(self) -> None:
        if self.closed or self._guard.inherited:
            return
        self.closed = True
        for heap in self._heaps.values():
            # A forked child may have the file open for as long as it lives.
            with contextlib.suppress(OSError):
                self._calls.punch(heap.file, 0, self._heap_bytes)
        self._heaps.clear()
        self.committed_bytes = 0
        for addresses in (*self._shown, self._addresses):
            addresses.forget()

    def show(self, addresses: Addresses, offset: int, source: int, nbytes: int) -> None:
        """Put this region's bytes from ``source`` on at ``offset`` of a range; for windows."""
        self._refuse()
        for part in self._parts(source, nbytes):
            where = offset + part.offset - source
            addresses.show(where, part.nbytes, self._heaps[part.heap].file, part.start)

    def _refuse(self) -> None:
        if self.closed:
            raise ValueError("this memory region is closed")
        if self._guard.inherited:
            raise MemoryUnavailable(
                "this memory belongs to the process that forked this one: make an own cache here"
            )

    def _parts(self, offset: int, nbytes: int, stride: int = 0, count: int = 1) -> Iterator[_Part]:
        for start in range(offset, offset + stride * count, stride) if stride else (offset,):
            stop = start + nbytes
            while start < stop:
                heap, inside = divmod(start, self._heap_bytes)
                size = min(stop - start, self._heap_bytes - inside)
                yield _Part(heap, inside, size, start)
                start += size

    def _add_heap(self, number: int) -> _Heap:
        heap = _Heap(self._heap_bytes)
        self._addresses.show(number * self._heap_bytes, self._heap_bytes, heap.file, 0)
        self._heaps[number] = heap
        return heap

    def _drop_empty(self) -> None:
        for number, heap in list(self._heaps.items()):
            if not heap.committed_bytes:
                # Where the system refuses it stays, without pages, until the next time.
                with contextlib.suppress(OSError):
                    self._addresses.hide(number * self._heap_bytes, self._heap_bytes)
                    del self._heaps[number]

    def _try_to(self, call: Callable[[int, int, int], None], part: _Part) -> None:
        """Undo: where that fails too, the piece stays as it is."""
        if (heap := self._heaps.get(part.heap)) is not None:
            with contextlib.suppress(OSError):
                call(heap.file, part.start, part.nbytes)


@final
class HeapWindow:
    """A range of addresses; the kernel's page table is its table."""

    __slots__ = ("__weakref__", "_addresses", "_closed", "_region")

    def __init__(self, region: HeapRegion, addresses: Addresses) -> None:
        self._region = region
        self._addresses = addresses
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self._addresses.nbytes

    def map(self, offset: int, source: int, nbytes: int) -> None:
        self._refuse()
        try:
            self._region.show(self._addresses, offset, source, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # then it is as it was
                self._addresses.hide(offset, nbytes)
            raise _no_mappings(f"show {format_bytes(nbytes)} at another address", error) from error

    def unmap(self, offset: int, nbytes: int) -> None:
        self._refuse()
        try:
            self._addresses.hide(offset, nbytes)
        except OSError as error:
            raise _no_mappings(f"cut {format_bytes(nbytes)} out of what is seen", error) from error

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        self._refuse()
        return self._addresses.tensor(dtype)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._addresses.forget()

    def _refuse(self) -> None:
        if self._closed or self._region.closed:
            raise ValueError("this memory window is closed")


def _no_mappings(wanted: str, error: OSError) -> MemoryUnavailable:
    return MemoryUnavailable(
        f"the system refused to {wanted} ({error}): raise vm.max_map_count, or run fewer sequences "
        f"at once (max_num_seqs)"
    )


def _reserve(calls: SystemCalls, guard: ForkGuard, nbytes: int) -> Addresses:
    try:
        return Addresses(calls, guard, nbytes)
    except OSError as error:
        raise MemoryUnavailable(
            f"the system refused {format_bytes(nbytes)} of address space ({error}): reserve less, "
            f"or raise what limits it (ulimit -v, vm.overcommit_memory)"
        ) from error
