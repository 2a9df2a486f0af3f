"""Memory in huge pages for what stays, and file pages that are not needed any more.

Unlike a provider's regions this is never given back in part, and a forked child sees it.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.errors import MemoryUnavailable
from quire.memory.host.calls import address_of
from quire.memory.host.pieces import huge_page_bytes
from quire.units import align_down, align_up, format_bytes

if TYPE_CHECKING:
    from torch import Tensor

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
