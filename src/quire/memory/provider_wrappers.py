"""Providers that wrap a provider: counters, a ceiling, injected failures.

Each wrapper does one thing, so that they stack: ``CountedMemory(LimitedMemory(HostMemory(), …))``.
A region that is dropped without ``close`` stays in their counts.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from quire.errors import MemoryUnavailable
from quire.memory.provider import MemoryProvider, Region, Window
from quire.units import format_bytes, format_count

if TYPE_CHECKING:
    import torch


class WrappedMemory:
    """A provider that forwards to ``upstream`` all but ``reserve``."""

    def __init__(self, upstream: MemoryProvider) -> None:
        self._upstream = upstream

    @property
    def page_bytes(self) -> int:
        return self._upstream.page_bytes

    @property
    def cannot_share(self) -> str | None:
        return self._upstream.cannot_share

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        self._upstream.used_on(stream, ends=ends)


class WrappedRegion:
    """A region that forwards to ``upstream`` what a subclass does not do itself."""

    __slots__ = ("_upstream",)

    def __init__(self, upstream: Region) -> None:
        self._upstream = upstream

    @property
    def nbytes(self) -> int:
        return self._upstream.nbytes

    @property
    def committed_bytes(self) -> int:
        return self._upstream.committed_bytes

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._upstream.commit(offset, nbytes, stride=stride, count=count)

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._upstream.decommit(offset, nbytes, stride=stride, count=count)

    def window(self, nbytes: int) -> Window:
        return self._upstream.window(nbytes)

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        return self._upstream.tensor(dtype)

    def close(self) -> None:
        self._upstream.close()


@final
class CountedMemory(WrappedMemory):
    """Counts over all regions. ``returned_bytes`` only ever grows: all that was decommitted."""

    def __init__(self, upstream: MemoryProvider) -> None:
        super().__init__(upstream)
        self.reserved_bytes = 0
        self.committed_bytes = 0
        self.peak_committed_bytes = 0
        self.returned_bytes = 0

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> "CountedRegion":
        region = CountedRegion(self._upstream.reserve(nbytes, heap_bytes=heap_bytes), self)
        self.reserved_bytes += region.nbytes
        return region

    def add(self, num_bytes: int) -> None:
        """Count what a region has committed."""
        self.committed_bytes += num_bytes
        if self.committed_bytes > self.peak_committed_bytes:
            self.peak_committed_bytes = self.committed_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count what a region has decommitted."""
        self.committed_bytes -= num_bytes
        self.returned_bytes += num_bytes


@final
class CountedRegion(WrappedRegion):
    """Reports to its ``CountedMemory`` what has happened."""

    __slots__ = ("_counts", "_open", "_window_bytes")

    def __init__(self, upstream: Region, counts: CountedMemory) -> None:
        super().__init__(upstream)
        self._counts = counts
        self._open = True
        self._window_bytes = 0

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._upstream.commit(offset, nbytes, stride=stride, count=count)
        self._counts.add(nbytes * count)

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._upstream.decommit(offset, nbytes, stride=stride, count=count)
        self._counts.give_back(nbytes * count)

    def window(self, nbytes: int) -> Window:
        window = self._upstream.window(nbytes)
        self._window_bytes += window.nbytes
        self._counts.reserved_bytes += window.nbytes
        return window

    def close(self) -> None:
        if self._open:
            self._open = False
            self._counts.give_back(self._upstream.committed_bytes)
            self._counts.reserved_bytes -= self._upstream.nbytes + self._window_bytes
            self._upstream.close()


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one region that go together: ``count`` equal pieces, ``stride`` bytes apart."""

    region: Region
    offset: int
    nbytes: int
    stride: int = 0
    count: int = 1

    def commit(self) -> None:
        """Back them. Raises: MemoryUnavailable."""
        self.region.commit(self.offset, self.nbytes, stride=self.stride, count=self.count)

    def decommit(self) -> None:
        """Give them back to the system."""
        self.region.decommit(self.offset, self.nbytes, stride=self.stride, count=self.count)


def change_pages(pages: Sequence[Pages], *, commit: bool) -> None:
    """Commit the pages of several regions, or give them back to the system.

    Raises: MemoryUnavailable for a commit that is refused; then none of them is committed.
    """
    if not commit:
        for piece in pages:
            piece.decommit()
        return
    for index, piece in enumerate(pages):
        try:
            piece.commit()
        except MemoryUnavailable:
            for done in pages[:index]:
                done.decommit()
            raise


@final
class GuardedRegion(WrappedRegion):
    """Calls ``guard`` before each commit, with its bytes; the guard refuses by raising."""

    __slots__ = ("_guard",)

    def __init__(self, upstream: Region, guard: Callable[[int], None]) -> None:
        super().__init__(upstream)
        self._guard = guard

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        self._guard(nbytes * count)
        self._upstream.commit(offset, nbytes, stride=stride, count=count)


@final
class LimitedMemory(WrappedMemory):
    """Refuses a commit that would take all regions together past ``limit_bytes``.

    The limit may be moved at any time; what is committed above a lowered one stays.
    """

    def __init__(self, upstream: MemoryProvider, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._counted = CountedMemory(upstream)
        super().__init__(self._counted)

    @property
    def committed_bytes(self) -> int:
        """Bytes committed in all regions."""
        return self._counted.committed_bytes

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> GuardedRegion:
        region = self._counted.reserve(nbytes, heap_bytes=heap_bytes)
        return GuardedRegion(region, self._refuse_above_limit)

    def _refuse_above_limit(self, asked_bytes: int) -> None:
        committed_bytes = self._counted.committed_bytes
        if committed_bytes + asked_bytes > self.limit_bytes:
            raise MemoryUnavailable(
                f"{format_bytes(asked_bytes)} asked with {format_bytes(committed_bytes)} committed "
                f"would pass the limit of {format_bytes(self.limit_bytes)}: free memory, or raise "
                f"limit_bytes by {format_count(committed_bytes + asked_bytes - self.limit_bytes)} "
                f"bytes"
            )


@final
class FailingMemory(WrappedMemory):
    """Fails the commits whose number is in ``failing``: 1 is the first, over all regions.

    ``failing`` is any container: ``{3}``, or ``range(5, 100)`` for a system that stays full.
    """

    def __init__(self, upstream: MemoryProvider, *, failing: Container[int]) -> None:
        super().__init__(upstream)
        self.num_commits = 0
        self._failing = failing

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> GuardedRegion:
        region = self._upstream.reserve(nbytes, heap_bytes=heap_bytes)
        return GuardedRegion(region, self._fail_in_turn)

    def _fail_in_turn(self, asked_bytes: int) -> None:
        self.num_commits += 1
        if self.num_commits in self._failing:
            raise MemoryUnavailable(
                f"commit {self.num_commits} ({format_bytes(asked_bytes)}) fails, as it was told to"
            )
