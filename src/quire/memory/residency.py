"""Residency: whether KV pages are taken as tokens come, all at the start, or locked too.

On the host ``prefault`` is a ``PageCacheMemory``, over huge pages where it pays; ``lock`` is the
same over pages that cannot be swapped out. ``KeepAlive`` reads pages that can be swapped out, so
that they do not look idle. ``memory.cuda.resident`` is for a GPU's pages.
"""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, final

from quire.memory.host.memory import HostMemory
from quire.memory.host.syscalls import check_lockable
from quire.memory.page_cache import PageCacheMemory
from quire.memory.provider import MemoryProvider
from quire.units import format_bytes

log = logging.getLogger(__name__)

Residency: TypeAlias = Literal["on-demand", "prefault", "lock"]


def trim_allocator() -> bool:
    """Make the C allocator return free memory to the system; False where it cannot (not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


# What the C allocator keeps of what is freed, by glibc's own names. Of itself it keeps twice its
# largest piece, and a step frees and takes several of them in each layer: each time the system
# gave it zeroed pages anew, 1.9 million of them in a prompt of 8,192 tokens.
_M_TRIM_THRESHOLD, _KEPT_BYTES = -1, 2**28
_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES = -3, 2**25


def keep_freed_memory() -> bool:
    """Let the C allocator keep what steps free, up to 256 MiB, until ``trim_allocator``.

    Return False where it cannot (not glibc), or its user has set it by the environment.
    """
    asked = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if asked or "_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    setter = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if setter is None:
        return False
    settings = (_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return all(setter(name, value) for name, value in settings)


def host_memory(residency: Residency) -> HostMemory:
    """Make memory of the CPU, with huge pages only where long pieces are committed.

    Raises: MemoryUnavailable where this system cannot lock.
    """
    return HostMemory(huge_pages=residency != "on-demand", locked=residency == "lock")


def resident_memory(
    upstream: MemoryProvider, residency: Residency, capacity_bytes: int
) -> PageCacheMemory | None:
    """Make memory that keeps up to ``capacity_bytes`` of pages; None for ``on-demand``.

    Raises: MemoryUnavailable where so much may not be locked.
    """
    if residency == "on-demand":
        return None
    if residency == "lock":
        check_lockable(capacity_bytes)
    return PageCacheMemory(upstream, limit_bytes=capacity_bytes)


class Resident(Protocol):
    """One cache's memory with the residency that was asked for; ``on-demand`` asks for nothing."""

    @property
    def provider(self) -> MemoryProvider:
        """The cache reserves from it. After that, ``prefault`` backs the capacity."""
        ...

    def prefault(self) -> None:
        """Back the capacity with pages. Raises: MemoryUnavailable."""
        ...

    @property
    def prepares(self) -> bool:
        """Whether ``prepare`` does anything."""
        ...

    def prepare(self) -> None:
        """Have pages ready for what is committed next, if the memory is there."""
        ...

    def watch(self) -> None:
        """Start to keep pages from looking idle, where the system may swap them out."""
        ...

    def follow(self, ceiling_bytes: int) -> None:
        """Keep no page beyond the ceiling. Raises: MemoryUnavailable if it cannot be given back."""
        ...

    def rest(self, *, short: bool) -> None:
        """Give back what is kept around the cache, as it is idle or memory is short."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes of pages that are not committed and not given back."""
        ...

    def close(self) -> None:
        """Stop keeping pages."""
        ...


@final
class HostResident:
    """One cache's memory on the CPU: a ``Resident``.

    Raises: MemoryUnavailable where so much may not be locked.
    """

    def __init__(self, upstream: MemoryProvider, residency: Residency, capacity_bytes: int) -> None:
        self._kept = resident_memory(upstream, residency, capacity_bytes)
        keep_freed_memory()
        self.provider: MemoryProvider = upstream if self._kept is None else self._kept
        self._keep_alive: KeepAlive | None = None
        if self._kept is not None and residency == "prefault":
            self._keep_alive = KeepAlive(self._kept.touch)

    def prefault(self) -> None:
        if self._kept is not None:
            self._kept.prefault(Milestones("KV memory backed at the start"))

    @property
    def prepares(self) -> bool:
        return False

    def prepare(self) -> None:
        """Do nothing: the host has pages at once."""

    def watch(self) -> None:
        if self._keep_alive is not None:
            self._keep_alive.start()

    def follow(self, ceiling_bytes: int) -> None:
        if self._kept is not None and self._kept.limit_bytes != ceiling_bytes:
            self._kept.move_limit(ceiling_bytes)

    def rest(self, *, short: bool) -> None:
        if not short:  # it takes its time
            trim_allocator()

    @property
    def kept_bytes(self) -> int:
        return 0 if self._kept is None else self._kept.kept_bytes

    def close(self) -> None:
        if self._keep_alive is not None:
            self._keep_alive.stop()


@final
class Milestones:
    """Logs a line for each tenth of what takes long."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tenths = 0

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        tenths = 10 * done_bytes // all_bytes
        if tenths > self._tenths:
            self._tenths = tenths
            log.info("%s: %s of %s", self._what, format_bytes(done_bytes), format_bytes(all_bytes))


@final
class KeepAlive:
    """Calls ``touch`` every ``interval_s`` seconds in a thread, from ``start`` to ``stop``.

    Source: llama.cpp asks macOS every 500 ms to keep its buffers, ggml-metal.
    """

    def __init__(self, touch: Callable[[], None], *, interval_s: float = 0.5) -> None:
        self._touch = touch
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. A second call does nothing."""
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="quire-keep-alive", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for the touch under way. A second call does nothing."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "KeepAlive":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._touch()
