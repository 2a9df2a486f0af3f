"""Memory in transparent huge pages, for tensors that stay, and file pages that may go.

A provider's regions give pages back one by one and hide them from a forked child. This memory is
given back as a whole, and a child sees it.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import MemoryUnavailable
from quire.memory.host.syscalls import address_of
from quire.units import align_down, align_up, format_bytes

if TYPE_CHECKING:
    from torch import Tensor

_CACHE_LINE_BYTES = 64


def huge_page_bytes() -> int:
    """Return the size of this machine's transparent huge pages in bytes; 0 if it has none."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    with contextlib.suppress(OSError):
        if "[never]" not in (folder / "enabled").read_text():
            return int((folder / "hpage_pmd_size").read_text())
    return 0


def huge_pieces(sizes: Sequence[int]) -> "list[Tensor]":
    """Make a tensor u8[size] for each size in bytes, side by side in huge pages.

    The memory is unmapped with the last of them.

    Raises: MemoryUnavailable where the system has no huge pages or no addresses.
    """
    import torch

    page, total = huge_page_bytes(), sum(align_up(size, _CACHE_LINE_BYTES) for size in sizes)
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
        start += align_up(size, _CACHE_LINE_BYTES)
    return pieces


def drop_file_pages(address: int, nbytes: int) -> None:
    """Drop whole pages, of ``nbytes``, that a file is mapped to and that are not written to.

    The next access reads the file again.
    """
    start, stop = align_up(address, mmap.PAGESIZE), align_down(address + nbytes, mmap.PAGESIZE)
    if stop > start:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
