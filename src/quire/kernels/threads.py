"""Kernels on torch's own threads: one pool in the process, and Python's lock free meanwhile.

torch's CPU build brings a GNU OpenMP library, and that library's entry for compiled code starts any
function on its pool. A second pool (numba's, or one of ours) would make both slower. Where there is
no such library a call runs on its own thread.
"""

import ctypes
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import torch

log = logging.getLogger(__name__)


class KernelCall(NamedTuple):
    """A worker's address, the frame that it is given, and on how many threads."""

    worker: int
    frame: bytes
    num_threads: int


class Threads:
    """Runs a worker on several threads at once.

    Not in a forked child: the pool's threads do not exist there and waiting for them never ends.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._parallel = _gomp_parallel()
        self._listener = 0  # the thread whose calls are noted, if any are
        self._heard: list[KernelCall] = []

    @property
    def most(self) -> int:
        """The number of threads that torch would use."""
        return torch.get_num_threads() if self._parallel is not None else 1

    def run(self, worker: int, frame: bytes, num_threads: int) -> None:
        """Call the function at an address with a frame's, on that many threads, and wait.

        Raises: RuntimeError in a forked child.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the kernels were first used in process {self._pid}, and this is a fork of it, in "
                f"which its threads do not exist: start processes by spawn "
                f'(multiprocessing.set_start_method("spawn")), or build the engine in the child'
            )
        if self._listener and self._listener == get_ident():
            # A worker counts in its frame, so a copy is kept.
            self._heard.append(KernelCall(worker, bytes(bytearray(frame)), num_threads))
        if num_threads == 1 or self._parallel is None:
            _WORKER(worker)(frame)
        else:
            self._parallel(worker, frame, num_threads, 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the calls of this thread, and of no other, for a while: see ``take_heard``.

        Raises: RuntimeError if another thread listens.
        """
        if self._listener:
            raise RuntimeError("these calls are being listened to already")
        self._listener, self._heard = get_ident(), []
        try:
            yield
        finally:
            self._listener, self._heard = 0, []

    def take_heard(self) -> list[KernelCall]:
        """Take the calls since the last time."""
        heard, self._heard = self._heard, []
        return heard


@cache
def team_size() -> int:
    """Return the address of what tells a thread how many run its worker; 0: it is alone."""
    library = _gomp()
    return 0 if library is None else _address(library.omp_get_num_threads)


@cache
def yielding() -> int:
    """Return the address of what lets other threads have the processor."""
    return _address(ctypes.CDLL(None).sched_yield)


def _address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


class Scratch:
    """Memory that calls work in, lent and taken back: it stays in the caches from layer to layer.

    Calls on several threads of a program each get their own.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Lend u8[n], n at least ``nbytes``."""
        try:
            found = self._free.pop()
        except IndexError:
            return torch.empty(nbytes, dtype=torch.uint8)
        return found if found.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, memory: torch.Tensor) -> None:
        """Take lent memory, u8[n], back."""
        self._free.append(memory)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Lend new memory for a while, which is not lent again afterwards."""
        own, self._free = self._free, []
        try:
            yield
        finally:
            self._free = own


_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@cache
def _gomp() -> ctypes.CDLL | None:
    """Load the library that torch has loaded; None, and a log line, if there is none."""
    path = _loaded_gomp()
    if path is None:
        log.warning("kernels run on one thread: torch brings no GNU OpenMP library here")
        return None
    return ctypes.CDLL(path)


@cache
def _gomp_parallel():  # type: ignore[no-untyped-def]
    if (library := _gomp()) is None:
        return None
    start = library.GOMP_parallel
    start.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start


def _loaded_gomp() -> str | None:
    """Find that library. torch must be imported, or another copy might be loaded first."""
    with suppress(OSError):  # another system, or a Linux that shows no /proc
        for line in Path("/proc/self/maps").read_text().splitlines():
            found = re.search(r"(/\S*libgomp[^/\s]*\.so\S*)", line)
            if found:
                return found[1]
    beside = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return str(beside[0]) if beside else None
