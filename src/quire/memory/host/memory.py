"""Host memory: private anonymous mappings, committed page by page.

On Linux an untouched private mapping takes no memory, so reserving is one ``mmap``, committing is
``MADV_POPULATE_WRITE`` and decommitting is ``MADV_DONTNEED``: one system call a piece, one mapping
a region however it is cut up. How much to commit is for others to decide: Linux rarely refuses a
page, it kills a process instead, so stay below ``probe.available_bytes``.
"""

import contextlib
import logging
import mmap
from typing import TYPE_CHECKING, NoReturn, final

from quire.errors import MemoryUnavailable
from quire.memory.host import backing as pieces
from quire.memory.host.heaps import HeapRegion, Heaps, why_no_heaps
from quire.memory.host.syscalls import lock, unlock, why_no_locks
from quire.units import align_up, format_bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@final
class HostMemory:
    """Memory of the CPU.

    With ``portable`` it uses only what every POSIX system has: a page is committed by writing a
    zero to it and given back by mapping a fresh one over it. Slower; chosen by itself, and logged,
    where the kernel lacks the calls above: Linux before 5.14, macOS.

    With ``huge_pages`` a piece is backed by huge pages as far as it covers them whole: for callers
    that commit long pieces. With ``locked`` no page is ever swapped out; such memory has no heaps.

    Raises: MemoryUnavailable where pages cannot be locked, or not one can be had.
    """

    __slots__ = ("_heaps", "_huge_bytes", "_locked", "cannot_share", "portable")

    def __init__(
        self, *, portable: bool = False, huge_pages: bool = False, locked: bool = False
    ) -> None:
        try:
            self.portable = portable or not pieces.can_populate()
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
        self._huge_bytes = pieces.huge_page_bytes() if huge_pages and not self.portable else 0
        self._locked = locked
        self._heaps: Heaps | None = None
        self.cannot_share: str | None
        if portable or locked:
            self.cannot_share = f"it is told to be {'locked' if locked else 'portable'}"
        else:
            self.cannot_share = why_no_heaps()

    @property
    def page_bytes(self) -> int:
        return mmap.PAGESIZE

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        """Nothing that the CPU does is on a stream."""

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> "HostRegion | HeapRegion":
        if heap_bytes is not None:
            return self._reserve_heaps(nbytes, heap_bytes)
        nbytes = align_up(nbytes, mmap.PAGESIZE)
        try:
            mapping = pieces.reserve(nbytes)
        except (OSError, OverflowError) as error:
            raise MemoryUnavailable(
                f"the system refused {format_bytes(nbytes)} of address space ({error}): reserve "
                f"less, or raise what limits it (ulimit -v, ulimit -d, vm.overcommit_memory)"
            ) from error
        if self._locked:
            lock(mapping)
        return HostRegion(
            mapping, portable=self.portable, huge_bytes=self._huge_bytes, locked=self._locked
        )

    def _reserve_heaps(self, nbytes: int, heap_bytes: int) -> HeapRegion:
        if self.cannot_share is not None:
            raise MemoryUnavailable(f"memory cannot be seen at two addresses: {self.cannot_share}")
        if self._heaps is None:
            self._heaps = Heaps()
        return self._heaps.reserve(nbytes, heap_bytes)


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
        self._commit_piece: pieces.PieceCall = pieces.committer(
            mapping, portable=portable, huge_bytes=huge_bytes
        )
        self._decommit_piece: pieces.PieceCall = pieces.decommitter(
            mapping, portable=portable, locked=locked
        )

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        starts = range(offset, offset + stride * count, stride) if stride else (offset,)
        try:
            pieces.each(self._commit_piece, starts, nbytes)
        except OSError as error:
            # The caller held none of them, so all may be given back, those not reached as well.
            pieces.each_that_can(self._decommit_piece, starts, nbytes)
            raise MemoryUnavailable(
                f"the system refused pages for {count} x {format_bytes(nbytes)} ({error}) with "
                f"{format_bytes(self.committed_bytes)} of this region committed: lower the KV "
                f"budget, or free memory"
            ) from error
        self.committed_bytes += nbytes * count

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        starts = range(offset, offset + stride * count, stride) if stride else (offset,)
        try:
            pieces.each(self._decommit_piece, starts, nbytes)
        except OSError as error:
            # What has gone comes back, empty: no count has changed, and the call can be repeated.
            pieces.each_that_can(self._commit_piece, starts, nbytes)
            raise MemoryUnavailable(
                f"the system did not take {count} x {format_bytes(nbytes)} back ({error}): repeat "
                f"the call, or close the region"
            ) from error
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
                "a closed region keeps up to %s while there are tensors over it: %s",
                format_bytes(self.committed_bytes),
                reason,
            )
        self.committed_bytes = 0
        self._mapping = None
        self._commit_piece = self._decommit_piece = _closed

    def _cannot_empty(self) -> str | None:
        """Why the pages do not go, in the system's words; None if they have gone."""
        assert self._mapping is not None
        try:
            pieces.each(self._decommit_piece, (0,), self._nbytes)
            if self._locked:
                unlock(self._mapping)
        except OSError as error:
            return str(error)
        return None


def _closed(*_: object) -> NoReturn:
    raise ValueError("this memory region is closed")
