"""How a piece of a private mapping is backed with pages and gives them back, system by system.

The calls raise OSError. A piece is whole pages: (offset, nbytes).
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from quire.errors import MemoryUnavailable
from quire.memory.host.syscalls import (
    MADV_DONTNEED_LOCKED,
    MAP_FIXED,
    MAP_NORESERVE,
    address_of,
    knows_advice,
    mapper,
    patiently,
)
from quire.units import align_down, align_up, format_bytes

if TYPE_CHECKING:
    from torch import Tensor


# -- pieces ----------------------------------------------------------------------------------------


_LINUX = sys.platform == "linux"
# Linux's numbers for what Python's mmap module has no name for.
_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23
_SLICE_BYTES = 32 * 2**20
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE

PieceCall: TypeAlias = Callable[[int, int], object]  # (offset, nbytes)


def reserve(nbytes: int) -> mmap.mmap:
    """Addresses that take no memory yet."""
    mapping: mmap.mmap = patiently(mmap.mmap, -1, nbytes, flags=_FLAGS)
    _set_policy(mapping, 0, nbytes)
    return mapping


def committer(mapping: mmap.mmap, *, portable: bool, huge_bytes: int) -> PieceCall:
    """Backs a piece; with ``huge_bytes`` by pages of that size where the piece covers them whole.

    So huge pages never back more than was asked for.
    """
    if portable:
        return functools.partial(_touch, mapping)
    if huge_bytes:
        return functools.partial(_populate_huge, mapping, address_of(mapping), huge_bytes)
    return functools.partial(mapping.madvise, _MADV_POPULATE_WRITE)


def decommitter(mapping: mmap.mmap, *, portable: bool, locked: bool) -> PieceCall:
    """Gives the pages of a piece back."""
    if portable:
        return _remapper(mapping)
    advice = MADV_DONTNEED_LOCKED if locked else mmap.MADV_DONTNEED
    return functools.partial(mapping.madvise, advice)


def each(call: PieceCall, starts: range | tuple[int, ...], nbytes: int) -> None:
    """Call for each piece, in slices where it is long.

    For madvise keeps Python's lock, and a gigabyte can take seconds.
    """
    for start in starts:
        if nbytes <= _SLICE_BYTES:
            patiently(call, start, nbytes)
            continue
        for offset in range(start, start + nbytes, _SLICE_BYTES):
            patiently(call, offset, min(_SLICE_BYTES, start + nbytes - offset))


def each_that_can(call: PieceCall, starts: range | tuple[int, ...], nbytes: int) -> None:
    """The same to undo what has failed: a piece for which that fails too stays as it is."""
    for start in starts:
        with contextlib.suppress(OSError):
            each(call, (start,), nbytes)


def can_populate() -> bool:
    """Whether the kernel can back pages on request. Raises: OSError where it does not say."""
    return _LINUX and knows_advice(_MADV_POPULATE_WRITE)


def huge_page_bytes() -> int:
    """Size of this machine's transparent huge pages; 0 if it has none."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    try:
        never = "[never]" in (folder / "enabled").read_text()
        return 0 if never else int((folder / "hpage_pmd_size").read_text())
    except OSError:
        return 0


def _populate_huge(
    mapping: mmap.mmap, address: int, huge_bytes: int, offset: int, nbytes: int
) -> None:
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
    """Commit what is asked and nothing more, in this process and nowhere else.

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


def _touch(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    mapping[offset : offset + nbytes : mmap.PAGESIZE] = bytes(nbytes // mmap.PAGESIZE)


def _remapper(mapping: mmap.mmap) -> PieceCall:
    """Gives back pages by mapping fresh ones at their addresses, which Python's mmap cannot do."""
    map_at, address = mapper(), address_of(mapping)
    access = mmap.PROT_READ | mmap.PROT_WRITE

    def remap(offset: int, nbytes: int) -> None:
        map_at(address + offset, nbytes, access, _FLAGS | MAP_FIXED, -1, 0)
        _set_policy(mapping, offset, nbytes)

    return remap


# -- huge ------------------------------------------------------------------------------------------

# Memory in huge pages for what stays, and file pages that are not needed any more.
#
# Unlike a provider's regions this is never given back in part, and a forked child sees it.


__all__ = ["huge_page_bytes", "huge_pieces", "let_go"]

_LINE_BYTES = 64  # of the cache


def huge_pieces(sizes: Sequence[int]) -> "list[Tensor]":
    """A u8 tensor of each size, side by side in huge pages; unmapped with the last of them.

    Raises: MemoryUnavailable where the system has no huge pages or no addresses.
    """
    import torch

    page, total = huge_page_bytes(), sum(align_up(size, _LINE_BYTES) for size in sizes)
    if not page:
        raise MemoryUnavailable("this system has no transparent huge pages")
    try:
        memory = mmap.mmap(-1, align_up(total, page) + page, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        raise MemoryUnavailable(
            f"the system refused {format_bytes(total)} of address space ({error})"
        ) from error
    start = -address_of(memory) % page
    pieces = []
    for size in sizes:  # each keeps the mapping
        pieces.append(torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start))
        start += align_up(size, _LINE_BYTES)
    return pieces


def let_go(address: int, nbytes: int) -> None:
    """Pages of a file that are mapped and not written to: the next access reads the file again."""
    start, stop = align_up(address, mmap.PAGESIZE), align_down(address + nbytes, mmap.PAGESIZE)
    if stop > start:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
