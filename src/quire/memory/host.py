"""Host memory: private anonymous mappings, committed page by page.

On Linux an untouched private mapping takes no memory, so reserving is one ``mmap``, committing is
``MADV_POPULATE_WRITE`` and decommitting is ``MADV_DONTNEED``: one system call a piece, one mapping
a region however it is cut up. How much to commit is for others to decide: Linux rarely refuses a
page, it kills a process instead, so stay below ``probe.available_bytes``.
"""

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, final

from quire.errors import MemoryUnavailable
from quire.units import align_up, format_bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_LINUX = sys.platform == "linux"
# Linux's numbers for what Python's mmap module has no name for.
_MAP_NORESERVE = 0x4000 if _LINUX else 0
_MAP_FIXED = 0x10  # the same on macOS
_MADV_NOHUGEPAGE = 15
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23
_SLICE_BYTES = 32 * 2**20
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_PieceCall = Callable[[int, int], object]  # (offset, nbytes)


@final
class HostMemory:
    """Memory of the CPU.

    With ``portable`` it uses only what every POSIX system has: a page is committed by writing a
    zero to it and given back by mapping a fresh one over it. Slower; chosen by itself, and logged,
    where the kernel lacks the calls above: Linux before 5.14, macOS.
    """

    __slots__ = ("portable",)

    def __init__(self, *, portable: bool = False) -> None:
        self.portable = portable or not _can_populate()
        if self.portable and not portable:
            log.info("host memory commits by writing: no MADV_POPULATE_WRITE in this kernel")

    @property
    def page_bytes(self) -> int:
        return mmap.PAGESIZE

    def reserve(self, nbytes: int) -> "HostRegion":
        nbytes = align_up(nbytes, mmap.PAGESIZE)
        try:
            mapping = mmap.mmap(-1, nbytes, flags=_FLAGS)
        except (OSError, OverflowError) as error:
            raise MemoryUnavailable(
                f"the system refused {format_bytes(nbytes)} of address space ({error}): reserve "
                f"less, or raise what limits it (ulimit -v, ulimit -d, vm.overcommit_memory)"
            ) from error
        return HostRegion(mapping, portable=self.portable)


@final
class HostRegion:
    """One mapping, shared between this object (until ``close``) and the tensors over it.

    Nothing here unmaps: Python does when the last of them is gone, so no tensor can dangle.
    """

    __slots__ = ("_commit_piece", "_decommit_piece", "_mapping", "_nbytes", "committed_bytes")

    def __init__(self, mapping: mmap.mmap, *, portable: bool) -> None:
        self.committed_bytes = 0
        self._nbytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._commit_piece: _PieceCall
        self._decommit_piece: _PieceCall
        if portable:
            self._commit_piece = functools.partial(_touch, mapping)
            self._decommit_piece = _remapper(mapping)
        else:
            self._commit_piece = functools.partial(mapping.madvise, _MADV_POPULATE_WRITE)
            self._decommit_piece = functools.partial(mapping.madvise, mmap.MADV_DONTNEED)
        _set_policy(mapping, 0, self._nbytes)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        commit_piece = _whole_or_sliced(self._commit_piece, nbytes)
        starts = range(offset, offset + stride * count, stride) if stride else (offset,)
        try:
            for start in starts:
                commit_piece(start, nbytes)
        except OSError as error:
            # The piece that failed may be backed in part: it is given back with those before it.
            for done in starts[: starts.index(start) + 1]:
                self._decommit_piece(done, nbytes)
            raise MemoryUnavailable(
                f"the system refused pages for {count} x {format_bytes(nbytes)} ({error}) with "
                f"{format_bytes(self.committed_bytes)} of this region committed: lower the KV "
                f"budget, or free memory"
            ) from error
        self.committed_bytes += nbytes * count

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        decommit_piece = _whole_or_sliced(self._decommit_piece, nbytes)
        starts = range(offset, offset + stride * count, stride) if stride else (offset,)
        for start in starts:
            decommit_piece(start, nbytes)
        self.committed_bytes -= nbytes * count
        if not self.committed_bytes:
            # Page tables are memory too, 4 KiB for each 2 MiB of addresses that ever held a page,
            # and no counter shows them. The kernel frees those that lie wholly within one call.
            self._decommit_piece(0, self._nbytes)

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        import numpy as np
        import torch

        if self._mapping is None:
            _closed()
        return torch.from_numpy(np.frombuffer(self._mapping, dtype=np.uint8)).view(dtype)

    def close(self) -> None:
        if self._mapping is None:
            return
        _whole_or_sliced(self._decommit_piece, self._nbytes)(0, self._nbytes)
        self.committed_bytes = 0
        self._mapping = None
        self._commit_piece = self._decommit_piece = _closed


def _closed(*_: object) -> NoReturn:
    raise ValueError("this memory region is closed")


def _whole_or_sliced(call: _PieceCall, nbytes: int) -> _PieceCall:
    """A long piece goes in slices: madvise keeps Python's lock, and a gigabyte can take seconds."""
    if nbytes <= _SLICE_BYTES:
        return call

    def in_slices(offset: int, nbytes: int) -> None:
        stop = offset + nbytes
        for start in range(offset, stop, _SLICE_BYTES):
            call(start, min(_SLICE_BYTES, stop - start))

    return in_slices


def _can_populate() -> bool:
    """Whether the kernel can back pages on request, tried on a page of our own."""
    if not _LINUX:
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=_FLAGS)
    try:
        page.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        return False
    return True


def _set_policy(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Commit what is asked and nothing more, in this process and nowhere else.

    Huge pages are off, for one written token would back 2 MiB. A forked child sees zeros: it can
    neither write here nor keep pages alive that we give back, and our writes copy no page for its
    sake. (``MADV_DONTFORK`` would leave a hole in the child, where its own next mapping might lie
    when it collects this object and unmaps these addresses.)
    """
    for advice in (_MADV_NOHUGEPAGE, _MADV_WIPEONFORK) if _LINUX else ():
        with contextlib.suppress(OSError):  # a kernel built without huge pages refuses the first
            mapping.madvise(advice, offset, nbytes)


def _touch(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    mapping[offset : offset + nbytes : mmap.PAGESIZE] = bytes(nbytes // mmap.PAGESIZE)


def _remapper(mapping: mmap.mmap) -> _PieceCall:
    """Gives back pages by mapping fresh ones at their addresses, which Python's mmap cannot do."""
    libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    access = mmap.PROT_READ | mmap.PROT_WRITE

    def remap(offset: int, nbytes: int) -> None:
        where = address + offset
        if libc_mmap(where, nbytes, access, _FLAGS | _MAP_FIXED, -1, 0) != where:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        _set_policy(mapping, offset, nbytes)

    return remap
