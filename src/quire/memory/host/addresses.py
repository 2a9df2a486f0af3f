"""Address space without memory, and the system's calls that put pages of files there.

Linux on 64 bits only. Every call raises OSError and changes nothing if it does.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from quire.memory.host.calls import MAP_FIXED, MAP_NORESERVE, last_error, mapper

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Linux's numbers, of fallocate.
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
_NUM_SPARE = 8
_MAX_BYTES = 2**63 - 1  # ctypes would cut a greater number off


@final
class SystemCalls:
    """mmap with an address, munmap and fallocate."""

    __slots__ = ("_fallocate", "_map", "_munmap", "_spare")

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._map = mapper()
        self._munmap = libc.munmap
        self._munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._fallocate = libc.fallocate
        self._fallocate.argtypes = [*[ctypes.c_int] * 2, *[ctypes.c_int64] * 2]
        # At the limit of mappings the kernel refuses even a call that would lower their number, for
        # it counts before it unmaps. These are given up then, to be below the limit for a moment.
        self._spare: list[mmap.mmap] = []

    def reserve(self, nbytes: int) -> int:
        """Addresses that read as zeros and take no memory, at a place of the system's choice."""
        if nbytes > _MAX_BYTES:
            raise OSError(errno.ENOMEM, f"mmap: {os.strerror(errno.ENOMEM)}")
        self._have_spare()
        return self._map(None, nbytes, mmap.PROT_READ, _NOTHING, -1, 0)

    def release(self, address: int, nbytes: int) -> None:
        """Give addresses back, and whatever is there."""

        def unmap() -> None:
            if self._munmap(address, nbytes):
                raise last_error("munmap")

        self._at_limit(unmap)

    def show(self, address: int, nbytes: int, file: int, offset: int) -> None:
        """Put pages of a file at these addresses, in place of what was there."""
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
        self._map(address, nbytes, access, flags, file, offset)

    def hide(self, address: int, nbytes: int) -> None:
        """Make reserved addresses of these again.

        It works at the limit of mappings, except time and again in the midst of what is one.
        """
        flags = _NOTHING | MAP_FIXED
        self._at_limit(lambda: self._map(address, nbytes, mmap.PROT_READ, flags, -1, 0))

    def allocate(self, file: int, offset: int, nbytes: int) -> None:
        """Back a part of a file with zeroed pages."""
        self._retried(file, _FALLOC_KEEP_SIZE, offset, nbytes)

    def punch(self, file: int, offset: int, nbytes: int) -> None:
        """Give the pages of a part of a file back, wherever they are seen."""
        self._retried(file, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, nbytes)

    def _retried(self, file: int, mode: int, offset: int, nbytes: int) -> None:
        while self._fallocate(file, mode, offset, nbytes):
            if ctypes.get_errno() != errno.EINTR:  # a signal, handled meanwhile
                raise last_error("fallocate")

    def _at_limit(self, call: Callable[[], object]) -> None:
        try:
            while True:
                try:
                    call()
                except OSError as error:
                    if error.errno != errno.ENOMEM or not self._give_up_spare():
                        raise
                else:
                    break
        finally:
            self._have_spare()

    def _give_up_spare(self) -> bool:
        # The last one only where the kernel refuses every call. One mapping lower it refuses those
        # that cut a mapping in two; all others pass, and leave room for a spare again.
        if len(self._spare) == 1:
            with contextlib.suppress(OSError):
                mmap.mmap(-1, mmap.PAGESIZE).close()
                return False
        if self._spare:
            self._spare.pop().close()
            return True
        return False

    def _have_spare(self) -> None:
        # Shared ones, for those never merge with a neighbour: each is a mapping of its own.
        with contextlib.suppress(OSError):
            while len(self._spare) < _NUM_SPARE:
                self._spare.append(mmap.mmap(-1, mmap.PAGESIZE))


@final
class ForkGuard:
    """Keeps a forked child away from memory that it would share with its parent.

    The child finds zeros at the addresses, and may neither commit nor give back: see ``inherited``.
    """

    __slots__ = ("__weakref__", "_ranges", "inherited")

    def __init__(self) -> None:
        self.inherited = False
        self._ranges: weakref.WeakSet[Addresses] = weakref.WeakSet()
        guard = weakref.ref(self)

        def in_child() -> None:
            if (mine := guard()) is not None:
                mine._leave()

        os.register_at_fork(after_in_child=in_child)

    def watch(self, addresses: "Addresses") -> None:
        """Leave nothing of these to a child. They keep this guard."""
        self._ranges.add(addresses)

    def _leave(self) -> None:
        self.inherited = True
        for addresses in self._ranges:
            addresses.hide(0, addresses.nbytes)


@final
class Addresses:
    """A reserved range. It is given back when neither its owner nor a tensor refers to it."""

    __slots__ = ("__weakref__", "_calls", "_guard", "nbytes", "start")

    def __init__(self, calls: SystemCalls, guard: ForkGuard, nbytes: int) -> None:
        self.nbytes = nbytes
        self.start = calls.reserve(nbytes)
        self._calls = calls
        self._guard = guard
        guard.watch(self)
        # At exit the system does it, after the last thread that may still read has ended.
        weakref.finalize(self, calls.release, self.start, nbytes).atexit = False

    def show(self, offset: int, nbytes: int, file: int, file_offset: int) -> None:
        self._calls.show(self.start + offset, nbytes, file, file_offset)

    def hide(self, offset: int, nbytes: int) -> None:
        self._calls.hide(self.start + offset, nbytes)

    def forget(self) -> None:
        """Show nothing more, for good. Never fails: no caller could repeat the call."""
        try:
            self.hide(0, self.nbytes)
        except OSError as error:
            # Its text alone: an exception keeps its frames, and they the files.
            log.warning("closed memory stays mapped as long as tensors are over it: %s", str(error))

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        """A flat tensor over the whole range, which keeps it."""
        import numpy as np
        import torch

        content: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.start)
        content.owner = self  # the tensor keeps the array, the array keeps this
        return torch.from_numpy(np.frombuffer(content, dtype=np.uint8)).view(dtype)
