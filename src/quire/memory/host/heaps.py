"""Host memory whose pages can be seen at several addresses: heaps of physical memory, and windows.

A heap is an anonymous file (memfd), so that the offset of a page in it plays the part of a physical
address: to see a page somewhere is to map that offset there. Holes in the file take no memory. The
number of mappings is limited (``probe.mapping_limit``); neighbours in a heap that are seen as
neighbours are one mapping.

Other systems call a heap a placement heap, and a window a sparse buffer. Linux on 64 bits only.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from quire.errors import MemoryUnavailable
from quire.memory.host.syscalls import (
    MAP_FIXED,
    MAP_NORESERVE,
    last_error,
    mapper,
    no_addresses,
    no_pages,
    not_taken_back,
)
from quire.units import format_bytes

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

# Linux's numbers, of fallocate.
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
_NUM_SPARE = 8
_MAX_BYTES = 2**63 - 1  # ctypes would cut a greater number off

# -- addresses -------------------------------------------------------------------------------------


@final
class SystemCalls:
    """mmap with an address, munmap and fallocate: each raises OSError, and has changed nothing."""

    __slots__ = ("_fallocate", "_map", "_munmap", "_spare")

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._map = mapper()
        self._munmap = libc.munmap
        self._munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._fallocate = libc.fallocate
        self._fallocate.argtypes = [*[ctypes.c_int] * 2, *[ctypes.c_int64] * 2]
        # At the limit of mappings the kernel refuses even a call that would lower their number, for
        # it counts before it unmaps. These are given up then, to be below the limit for a moment.
        self._spare: list[mmap.mmap] = []

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes`` of addresses that read as zeros and take no memory; return the first.

        Raises: OSError.
        """
        if nbytes > _MAX_BYTES:
            raise OSError(errno.ENOMEM, f"mmap: {os.strerror(errno.ENOMEM)}")
        self._have_spare()
        return self._map(None, nbytes, mmap.PROT_READ, _NOTHING, -1, 0)

    def release(self, address: int, nbytes: int) -> None:
        """Give addresses back, and whatever is there."""

        def unmap() -> None:
            if self._munmap(address, nbytes):
                raise last_error("munmap")

        self._at_limit(unmap)

    def show(self, address: int, nbytes: int, file: int, offset: int) -> None:
        """Put pages of a file at these addresses, in place of what was there."""
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
        self._map(address, nbytes, access, flags, file, offset)

    def hide(self, address: int, nbytes: int) -> None:
        """Make these addresses reserved ones again, without pages.

        It works at the limit of mappings too, unless it cuts a mapping in two.
        """
        flags = _NOTHING | MAP_FIXED
        self._at_limit(lambda: self._map(address, nbytes, mmap.PROT_READ, flags, -1, 0))

    def allocate(self, file: int, offset: int, nbytes: int) -> None:
        """Back a part of a file with zeroed pages."""
        self._retried(file, _FALLOC_KEEP_SIZE, offset, nbytes)

    def punch(self, file: int, offset: int, nbytes: int) -> None:
        """Give the pages of a part of a file back, wherever they are seen."""
        self._retried(file, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, nbytes)

    def _retried(self, file: int, mode: int, offset: int, nbytes: int) -> None:
        while self._fallocate(file, mode, offset, nbytes):
            if ctypes.get_errno() != errno.EINTR:  # a signal, handled meanwhile
                raise last_error("fallocate")

    def _at_limit(self, call: Callable[[], object]) -> None:
        try:
            while True:
                try:
                    call()
                except OSError as error:
                    if error.errno != errno.ENOMEM or not self._give_up_spare():
                        raise
                else:
                    break
        finally:
            self._have_spare()

    def _give_up_spare(self) -> bool:
        # The last one only where the kernel refuses every call. One mapping lower it refuses those
        # that cut a mapping in two; all others pass, and leave room for a spare again.
        if len(self._spare) == 1:
            with contextlib.suppress(OSError):
                mmap.mmap(-1, mmap.PAGESIZE).close()
                return False
        if self._spare:
            self._spare.pop().close()
            return True
        return False

    def _have_spare(self) -> None:
        # Shared ones, for those never merge with a neighbour: each is a mapping of its own.
        with contextlib.suppress(OSError):
            while len(self._spare) < _NUM_SPARE:
                self._spare.append(mmap.mmap(-1, mmap.PAGESIZE))


@final
class ForkGuard:
    """Keeps a forked child away from memory that it would share with its parent.

    The child finds zeros at the addresses. Where ``inherited`` is set, as in a child, a region
    neither commits nor gives back.
    """

    __slots__ = ("__weakref__", "_ranges", "inherited")

    def __init__(self) -> None:
        self.inherited = False
        self._ranges: weakref.WeakSet[Addresses] = weakref.WeakSet()
        guard = weakref.ref(self)

        def in_child() -> None:
            if (mine := guard()) is not None:
                mine._leave()

        os.register_at_fork(after_in_child=in_child)

    def watch(self, addresses: "Addresses") -> None:
        """Hide these addresses in a forked child. They keep this guard alive."""
        self._ranges.add(addresses)

    def _leave(self) -> None:
        self.inherited = True
        for addresses in self._ranges:
            addresses.hide(0, addresses.nbytes)


@final
class Addresses:
    """A reserved range. It is given back when neither its owner nor a tensor refers to it."""

    __slots__ = ("__weakref__", "_calls", "_guard", "nbytes", "start")

    def __init__(self, calls: SystemCalls, guard: ForkGuard, nbytes: int) -> None:
        self.nbytes = nbytes
        self.start = calls.reserve(nbytes)
        self._calls = calls
        self._guard = guard
        guard.watch(self)
        # At exit the system does it, after the last thread that may still read has ended.
        weakref.finalize(self, calls.release, self.start, nbytes).atexit = False

    def show(self, offset: int, nbytes: int, file: int, file_offset: int) -> None:
        """Put pages of a file at an offset in bytes."""
        self._calls.show(self.start + offset, nbytes, file, file_offset)

    def hide(self, offset: int, nbytes: int) -> None:
        """Show no pages in [offset, offset + nbytes)."""
        self._calls.hide(self.start + offset, nbytes)

    def forget(self) -> None:
        """Hide the whole range for good; a refusal is logged, for no caller repeats the call."""
        try:
            self.hide(0, self.nbytes)
        except OSError as error:
            # Its text alone: an exception keeps its frames, and they the files.
            log.warning("closed memory stays mapped while tensors use it: %s", str(error))

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Return a tensor [bytes / itemsize] over the whole range, which keeps it."""
        import numpy as np
        import torch

        content: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.start)
        content.owner = self  # the tensor keeps the array, the array keeps this
        return torch.from_numpy(np.frombuffer(content, dtype=np.uint8)).view(dtype)


# -- heaps -----------------------------------------------------------------------------------------


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
    """The part of a piece that lies in one heap."""

    heap: int  # its number
    start: int  # in the heap
    nbytes: int
    offset: int  # in the region


def why_no_heaps() -> str | None:
    """Say why this system has no heaps, tried with one of a page; None if it has."""
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
        # The windows' addresses, not the windows: a tensor may outlive its window.
        self._shown: weakref.WeakSet[Addresses] = weakref.WeakSet()
        self.closed = False
        self._addresses = _reserve(calls, guard, nbytes)

    @property
    def nbytes(self) -> int:
        return self._addresses.nbytes

    @property
    def num_heaps(self) -> int:
        """Heaps that exist."""
        return len(self._heaps)

    def backed_bytes(self) -> int:
        """Return the bytes of pages that exist, as the system counts them: each page once."""
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
            raise no_pages(nbytes, count, self.committed_bytes, error) from error
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
            raise not_taken_back(nbytes, count, error) from error
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
                "this memory belongs to the parent process: make a new cache in this process"
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
        raise no_addresses(nbytes, error) from error
