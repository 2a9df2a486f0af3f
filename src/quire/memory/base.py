"""Bytes: address space that is reserved once and backed with pages as needed.

``MemoryProvider`` reserves; a ``Region`` commits and decommits pages under addresses that never
move. What the bytes mean (blocks, ranges, layers) is not known here.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Region(Protocol):
    """One reserved range of addresses.

    Offsets and lengths are multiples of the provider's ``page_bytes``. A caller commits what is not
    committed and decommits what is: the region only counts, so that counting costs nothing. (The
    ``CheckedMemory`` provider verifies the promise, for tests and for hunting a leak.)

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

        Raises: MemoryUnavailable if the system has none; then nothing has changed. ValueError after
        ``close``.
        """
        ...

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        """Give the pages of the same pieces back to the system; reading them gives zeros.

        Raises: ValueError after ``close``.
        """
        ...

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        """A flat tensor over the whole region. It keeps the address range alive.

        Raises: ValueError after ``close``.
        """
        ...

    def close(self) -> None:
        """Give back every page. The addresses themselves go when the last tensor over them dies.

        A second call does nothing.
        """
        ...


class MemoryProvider(Protocol):
    """A source of regions. Providers compose: ``LimitedMemory(HostMemory(), limit_bytes=…)``."""

    @property
    def page_bytes(self) -> int:
        """The unit of commit and decommit."""
        ...

    def reserve(self, nbytes: int) -> Region:
        """Take address space for ``nbytes`` (rounded up to pages); no page is committed.

        Raises: MemoryUnavailable if the system refuses.
        """
        ...
