"""System calls that Python lacks, what the kernel has of them, and what its refusals mean."""

import ctypes
import errno
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from quire.errors import MemoryUnavailable
from quire.units import ceil_div, format_bytes

P = ParamSpec("P")
T = TypeVar("T")
# Numbers that Python's mmap module has no name for.
MAP_FIXED = 0x10  # the same on Linux and macOS
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MAX_PAUSES = 6  # 63 ms together


def patiently(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Repeat a call that a signal interrupted, and a few times one that found the kernel busy.

    Raises: OSError, the call's own.
    """
    pauses = 0
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue  # Python has handled the signal: a handler that raises ends this
        except BlockingIOError:
            if pauses == _MAX_PAUSES:
                raise
            time.sleep(0.001 * 2**pauses)
            pauses += 1


def mapper() -> Callable[[int | None, int, int, int, int, int], int]:
    """Return the system's mmap, which takes an address; Python's own takes none.

    Its parameters are (address or None, nbytes, access, flags, file, offset). It returns the
    mapping's address, and raises OSError.
    """
    libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *[ctypes.c_int] * 3,
        ctypes.c_int64,
    ]
    failed = ctypes.c_void_p(-1).value

    def map_at(
        address: int | None, nbytes: int, access: int, flags: int, file: int, offset: int
    ) -> int:
        where: int = libc_mmap(address, nbytes, access, flags, file, offset)
        if where == failed:
            raise last_error("mmap")
        return where

    return map_at


def last_error(call: str) -> OSError:
    """Return why the C library's last call failed."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def address_of(mapping: mmap.mmap) -> int:
    """Return the address at which a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def knows_advice(advice: int) -> bool:
    """Return whether the kernel takes an advice about any page; it is tried on one.

    Raises: OSError where it refuses for another reason.
    """
    with patiently(
        mmap.mmap, -1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as page:
        try:
            patiently(page.madvise, advice)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True


def no_addresses(nbytes: int, error: Exception) -> MemoryUnavailable:
    """Return the error of a refused reservation of ``nbytes``."""
    return MemoryUnavailable(
        f"the system refused {format_bytes(nbytes)} of address space ({error}): reserve less, or "
        f"raise what limits it (ulimit -v, ulimit -d, vm.overcommit_memory)"
    )


def no_pages(nbytes: int, count: int, committed_bytes: int, error: OSError) -> MemoryUnavailable:
    """Return the error of a refused commit: ``count`` pieces of ``nbytes``."""
    return MemoryUnavailable(
        f"the system refused pages for {count} x {format_bytes(nbytes)} ({error}) with "
        f"{format_bytes(committed_bytes)} of this region committed: lower the KV budget, or free "
        f"memory"
    )


def not_taken_back(nbytes: int, count: int, error: OSError) -> MemoryUnavailable:
    """Return the error of a refused decommit: ``count`` pieces of ``nbytes``."""
    return MemoryUnavailable(
        f"the system did not take {count} x {format_bytes(nbytes)} back ({error}): repeat the "
        f"call, or close the region"
    )


# -- locked pages ----------------------------------------------------------------------------------

# Pages that the system may not swap out, for servers that own their machine.

MADV_DONTNEED_LOCKED = 24  # since Linux 5.18; MADV_DONTNEED refuses what is locked
_MLOCK_ONFAULT = 1


def lock(mapping: mmap.mmap) -> None:
    """Lock each page of a mapping from the moment that it is committed.

    One call locks the whole range: locked one by one, pieces would become mappings of their own,
    and a process may not have many. The price is that the limit counts addresses, committed or not.

    Raises: MemoryUnavailable where the system refuses, with the limit that must be raised.
    """
    try:
        patiently(_call, "mlock2", address_of(mapping), len(mapping), _MLOCK_ONFAULT)
    except OSError as error:
        raise MemoryUnavailable(_refusal(len(mapping), error)) from error


def unlock(mapping: mmap.mmap) -> None:
    """Unlock the pages of a mapping. Raises: OSError."""
    patiently(_call, "munlock", address_of(mapping), len(mapping))


def check_lockable(nbytes: int) -> None:
    """Ask the system whether ``nbytes`` may be locked, without committing a page.

    Raises: MemoryUnavailable where they may not.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        mapping: mmap.mmap = patiently(mmap.mmap, -1, nbytes, flags=flags)
    except OSError as error:
        raise MemoryUnavailable(_refusal(nbytes, error)) from error
    with mapping:
        lock(mapping)


def why_no_locks() -> str | None:
    """Say why this system cannot lock pages, tried on one; None if it can.

    A limit that is too low is no such reason: ``lock`` names it.

    Raises: OSError where the system does not say.
    """
    if sys.platform != "linux":
        return f"{sys.platform} cannot lock pages that are committed later"
    if not knows_advice(MADV_DONTNEED_LOCKED):
        return "this kernel cannot give locked pages back (Linux before 5.18)"
    return None


def _call(name: str, *args: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int][: len(args)]
    if call(*args):
        raise last_error(name)


def _refusal(nbytes: int, error: OSError) -> str:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    held = _locked_bytes()
    need = held + nbytes
    says = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    return (
        f"the system refused to lock {format_bytes(nbytes)} ({error}): RLIMIT_MEMLOCK is {says} "
        f"and {format_bytes(need)} are needed, {format_bytes(held)} of them locked already: raise "
        f"it (ulimit -l {ceil_div(need, 1024)}, in a systemd unit LimitMEMLOCK={need}), give the "
        f"process CAP_IPC_LOCK, or use --residency prefault"
    )


def _locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:"))
