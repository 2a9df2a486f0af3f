"""Host memory: private anonymous mappings, committed page by page.

On Linux an untouched private mapping takes no memory. So to reserve is one ``mmap``, to commit is
``MADV_POPULATE_WRITE`` and to decommit is ``MADV_DONTNEED``: one system call a piece, and one
mapping a region. Linux rarely refuses a page, it kills a process instead. A caller therefore keeps
what it commits below ``probe.available_bytes``.
"""

import contextlib
import errno
import functools
import logging
import mmap
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeAlias, final

from quire.errors import MemoryUnavailable
from quire.memory.host.heaps import ForkGuard, HeapRegion, SystemCalls, why_no_heaps
from quire.memory.host.huge_pages import huge_page_bytes
from quire.memory.host.syscalls import (
    MADV_DONTNEED_LOCKED,
    MAP_FIXED,
    MAP_NORESERVE,
    address_of,
    knows_advice,
    lock,
    mapper,
    no_addresses,
    no_pages,
    not_taken_back,
    patiently,
    unlock,
    why_no_locks,
)
from quire.units import align_down, align_up, format_bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_LINUX = sys.platform == "linux"
# Linux's numbers for what Python's mmap module has no name for.
_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23
_SLICE_BYTES = 32 * 2**20
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE

_PieceCall: TypeAlias = Callable[[int, int], object]  # (offset, nbytes) of whole pages
_Starts: TypeAlias = range | tuple[int, ...]


@final
class HostMemory:
    """Memory of the CPU.

    With ``portable`` it uses only what every POSIX system has: it commits a page by writing a zero
    to it, and gives a page back by mapping a fresh one over it. That is slower. Memory is portable
    by itself, and the log says so, where the kernel lacks the calls above: Linux before 5.14,
    macOS.

    With ``huge_pages`` huge pages back as much of a piece as they cover whole: for callers that
    commit long pieces. With ``locked`` no page is ever swapped out; such memory has no heaps.

    Raises: MemoryUnavailable where pages cannot be locked, or the system refuses even one.
    """

    __slots__ = ("_heaps", "_huge_bytes", "_locked", "cannot_share", "portable")

    def __init__(
        self, *, portable: bool = False, huge_pages: bool = False, locked: bool = False
    ) -> None:
        try:
            self.portable = portable or not can_populate()
            why_unlocked = why_no_locks() if locked else None
        except OSError as error:
            raise MemoryUnavailable(
                f"the system refused a page to try what it can do ({error}): free memory, or raise "
                f"what limits it (ulimit -v, vm.max_map_count)"
            ) from error
        if locked and self.portable:
            why_unlocked = why_unlocked or "memory is portable"
        if why_unlocked is not None:
            raise MemoryUnavailable(
                f"pages cannot be locked: {why_unlocked}: use --residency prefault"
            )
        if self.portable and not portable:
            log.info("host memory commits by writing: no MADV_POPULATE_WRITE in this kernel")
        self._huge_bytes = huge_page_bytes() if huge_pages and not self.portable else 0
        self._locked = locked
        self._heaps: tuple[SystemCalls, ForkGuard] | None = None
        self.cannot_share: str | None
        if portable or locked:
            self.cannot_share = f"it is told to be {'locked' if locked else 'portable'}"
        else:
            self.cannot_share = why_no_heaps()

    @property
    def page_bytes(self) -> int:
        return mmap.PAGESIZE

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        """Ignore the stream: the CPU uses its memory on none."""

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> "HostRegion | HeapRegion":
        if heap_bytes is not None:
            return self._reserve_heaps(nbytes, heap_bytes)
        try:
            mapping: mmap.mmap = patiently(
                mmap.mmap, -1, align_up(nbytes, mmap.PAGESIZE), flags=_FLAGS
            )
            _set_policy(mapping, 0, len(mapping))
        except (OSError, OverflowError) as error:
            raise no_addresses(nbytes, error) from error
        if self._locked:
            lock(mapping)
        return HostRegion(
            mapping, portable=self.portable, huge_bytes=self._huge_bytes, locked=self._locked
        )

    def _reserve_heaps(self, nbytes: int, heap_bytes: int) -> HeapRegion:
        if self.cannot_share is not None:
            raise MemoryUnavailable(
                f"memory cannot be mapped at two addresses: {self.cannot_share}"
            )
        if self._heaps is None:
            self._heaps = SystemCalls(), ForkGuard()
        return HeapRegion(*self._heaps, align_up(nbytes, heap_bytes), heap_bytes)


@final
class HostRegion:
    """One mapping, shared between this object (until ``close``) and the tensors over it.

    Nothing here unmaps: Python does when the last of them is gone, so no tensor can dangle. A
    forked child has a region of its own, without pages; what it does there changes no other region.
    """

    __slots__ = (
        "_commit_piece",
        "_decommit_piece",
        "_locked",
        "_mapping",
        "_nbytes",
        "committed_bytes",
    )

    def __init__(
        self, mapping: mmap.mmap, *, portable: bool, huge_bytes: int, locked: bool
    ) -> None:
        self.committed_bytes = 0
        self._nbytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._locked = locked
        self._commit_piece: _PieceCall
        self._decommit_piece: _PieceCall
        if portable:
            self._commit_piece = functools.partial(_write_zeros, mapping)
            self._decommit_piece = _remapper(mapping)
            return
        advice = MADV_DONTNEED_LOCKED if locked else mmap.MADV_DONTNEED
        self._decommit_piece = functools.partial(mapping.madvise, advice)
        self._commit_piece = functools.partial(mapping.madvise, _MADV_POPULATE_WRITE)
        if huge_bytes:
            self._commit_piece = functools.partial(
                _populate_huge, mapping, address_of(mapping), huge_bytes
            )

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        starts = range(offset, offset + stride * count, stride) if stride else (offset,)
        try:
            _each(self._commit_piece, starts, nbytes)
        except OSError as error:
            # The caller held none of them, so all may be given back, those not reached as well.
            _each_that_can(self._decommit_piece, starts, nbytes)
            raise no_pages(nbytes, count, self.committed_bytes, error) from error
        self.committed_bytes += nbytes * count

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        starts = range(offset, offset + stride * count, stride) if stride else (offset,)
        try:
            _each(self._decommit_piece, starts, nbytes)
        except OSError as error:
            # What has gone comes back, empty: no count has changed, and the call can be repeated.
            _each_that_can(self._commit_piece, starts, nbytes)
            raise not_taken_back(nbytes, count, error) from error
        self.committed_bytes -= nbytes * count
        if not self.committed_bytes:
            # Page tables are memory too, 4 KiB for each 2 MiB of addresses that ever held a page,
            # and no counter shows them. The kernel frees those that lie wholly within one call.
            with contextlib.suppress(OSError):
                self._decommit_piece(0, self._nbytes)

    def window(self, nbytes: int) -> NoReturn:
        raise ValueError("only a region that was reserved with heap_bytes has windows")

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        import numpy as np
        import torch

        if self._mapping is None:
            _closed()
        return torch.from_numpy(np.frombuffer(self._mapping, dtype=np.uint8)).view(dtype)

    def close(self) -> None:
        if self._mapping is None:
            return
        # A second time where the system refuses, for the caller has no call to repeat.
        if self._cannot_empty() and (reason := self._cannot_empty()):
            log.warning(
                "a closed region keeps up to %s while tensors use it: %s",
                format_bytes(self.committed_bytes),
                reason,
            )
        self.committed_bytes = 0
        self._mapping = None
        self._commit_piece = self._decommit_piece = _closed

    def _cannot_empty(self) -> str | None:
        """Give all pages back; return in the system's words why it refuses, or None."""
        assert self._mapping is not None
        try:
            _each(self._decommit_piece, (0,), self._nbytes)
            if self._locked:
                unlock(self._mapping)
        except OSError as error:
            return str(error)
        return None


def can_populate() -> bool:
    """Return whether the kernel backs pages on request. Raises: OSError where it does not say."""
    return _LINUX and knows_advice(_MADV_POPULATE_WRITE)


def _closed(*_: object) -> NoReturn:
    raise ValueError("this memory region is closed")


def _each(call: _PieceCall, starts: _Starts, nbytes: int) -> None:
    """Call for each piece, in slices where it is long. Raises: OSError.

    madvise keeps Python's lock, and a gigabyte can take seconds.
    """
    for start in starts:
        if nbytes <= _SLICE_BYTES:
            patiently(call, start, nbytes)
            continue
        for offset in range(start, start + nbytes, _SLICE_BYTES):
            patiently(call, offset, min(_SLICE_BYTES, start + nbytes - offset))


def _each_that_can(call: _PieceCall, starts: _Starts, nbytes: int) -> None:
    """Undo what has failed; a piece for which that fails too stays as it is."""
    for start in starts:
        with contextlib.suppress(OSError):
            _each(call, (start,), nbytes)


def _populate_huge(
    mapping: mmap.mmap, address: int, huge_bytes: int, offset: int, nbytes: int
) -> None:
    """Back a piece, by huge pages where it covers them whole: never more than was asked for."""
    start = align_up(address + offset, huge_bytes) - address
    length = align_down(address + offset + nbytes, huge_bytes) - address - start
    if length <= 0:
        mapping.madvise(_MADV_POPULATE_WRITE, offset, nbytes)
        return
    # The advice is for this piece alone, and small pages do where the kernel refuses it.
    with contextlib.suppress(OSError):
        mapping.madvise(_MADV_HUGEPAGE, start, length)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, offset, nbytes)
    finally:
        mapping.madvise(_MADV_NOHUGEPAGE, start, length)


def _set_policy(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Make the kernel commit what is asked and nothing more, in this process alone.

    Huge pages are off, for one written token would back 2 MiB. A forked child sees zeros: it can
    neither write here nor keep pages alive that we give back, and our writes copy no page for its
    sake. (``MADV_DONTFORK`` would leave a hole in the child, where its own next mapping might lie
    when it collects this object and unmaps these addresses.)
    """
    for advice in (_MADV_NOHUGEPAGE, _MADV_WIPEONFORK) if _LINUX else ():
        try:
            patiently(mapping.madvise, advice, offset, nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel that does not know the advice
                raise


def _write_zeros(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    mapping[offset : offset + nbytes : mmap.PAGESIZE] = bytes(nbytes // mmap.PAGESIZE)


def _remapper(mapping: mmap.mmap) -> _PieceCall:
    """Give pages back by mapping fresh ones at their addresses, which Python's mmap cannot do."""
    map_at, address = mapper(), address_of(mapping)
    access = mmap.PROT_READ | mmap.PROT_WRITE

    def remap(offset: int, nbytes: int) -> None:
        map_at(address + offset, nbytes, access, _FLAGS | MAP_FIXED, -1, 0)
        _set_policy(mapping, offset, nbytes)

    return remap
