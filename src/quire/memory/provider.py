"""Address space that is reserved once and backed with pages as needed: three protocols.

A ``MemoryProvider`` reserves; a ``Region`` commits and decommits pages under addresses that never
move. A region whose physical memory comes in heaps can show its pages at further addresses, through
a ``Window``. What the bytes mean (blocks, ranges, layers) is not known here.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Region(Protocol):
    """One reserved range of addresses.

    Offsets and lengths are multiples of the provider's ``page_bytes``. A caller commits what is not
    committed and decommits what is: the region counts, and checks nothing. (The ``CheckedMemory``
    provider checks the promise, for tests and for hunting a leak.)

    ``commit`` and ``decommit`` take one piece, or ``count`` equal pieces of ``nbytes`` that begin
    ``stride`` bytes apart: the heads and layers of a head-major layout, in one call.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        ...

    @property
    def committed_bytes(self) -> int:
        """Bytes backed with pages by ``commit`` and not given back."""
        ...

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        """Back [offset + i * stride, offset + i * stride + nbytes), i < count, with zeroed pages.

        Raises: MemoryUnavailable where the system has none; then nothing has changed. ValueError
        after ``close``.
        """
        ...

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        """Give the pages of the same pieces back to the system; no window shows them any more.

        Reading them then gives zeros and takes nothing. (Not so on a GPU, nor where physical memory
        comes in heaps: what is not committed must not be read at the region's own addresses.)

        Raises: ValueError after ``close``.
        """
        ...

    def window(self, nbytes: int) -> "Window":
        """Reserve ``nbytes`` of further addresses, to see this region's pages in another order.

        Raises: MemoryUnavailable if the system refuses. ValueError for a region that was reserved
        without heaps, and after ``close``.
        """
        ...

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Return a tensor [nbytes / itemsize] over the whole region, which keeps its addresses.

        Raises: ValueError after ``close``.
        """
        ...

    def close(self) -> None:
        """Give back every page, and close the windows.

        The addresses themselves go when the last tensor over them dies. A second call does nothing.
        """
        ...


class Window(Protocol):
    """Addresses at which pages of one region are seen: the processor's page table as a block table.

    One page may be seen in any number of windows and places. On a host a read where nothing is
    shown gives zeros and takes nothing, so that a kernel may read past the end; no kernel may write
    there. A window has no pages of its own and commits none.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        ...

    def map(self, offset: int, source: int, nbytes: int) -> None:
        """Show the region's committed bytes [source, source + nbytes) from ``offset`` on.

        They replace what was shown there: to copy a page and map the copy is copy-on-write in
        place.

        Raises: MemoryUnavailable if the system refuses; what is shown there is then unknown until
        it is mapped again or unmapped. ValueError after ``close``.
        """
        ...

    def unmap(self, offset: int, nbytes: int) -> None:
        """Show nothing in [offset, offset + nbytes). It works at the system's limit of mappings.

        Raises: ValueError after ``close``.
        """
        ...

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Return a tensor [nbytes / itemsize] over the whole window, which keeps its addresses.

        Raises: ValueError after ``close``.
        """
        ...

    def close(self) -> None:
        """Show nothing more. The addresses go when the last tensor over them dies."""
        ...


class MemoryProvider(Protocol):
    """A source of regions. Providers compose: ``LimitedMemory(HostMemory(), limit_bytes=…)``."""

    @property
    def page_bytes(self) -> int:
        """The unit of commit, decommit and mapping."""
        ...

    @property
    def cannot_share(self) -> str | None:
        """Why regions cannot have heaps and windows here, in words; None if they can."""
        ...

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        """Name another stream, by its handle, that uses the memory too, or with ``ends`` no longer.

        Pages that are given back wait for its work as well. A host's memory ignores it.
        """
        ...

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> Region:
        """Take address space for ``nbytes`` (rounded up to pages); no page is committed.

        With ``heap_bytes`` (whole pages; ``nbytes`` is rounded up to whole heaps) the physical
        memory comes in heaps of that size: one is added when the first of its pages is committed
        and dropped when the last one goes. Such a region has windows.

        Raises: MemoryUnavailable if the system refuses, or ``cannot_share``.
        """
        ...
