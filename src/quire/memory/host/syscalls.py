"""How to make a system call that Python lacks, and how to find out whether the system has it."""

import ctypes
import errno
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
# Numbers that Python's mmap module has no name for.
MAP_FIXED = 0x10  # the same on Linux and macOS
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MAX_PAUSES = 6  # 63 ms together


def patiently(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Repeat a call that a signal interrupted; and a few times one that found the kernel busy.

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
    """mmap with an address, or None: Python's own cannot say where.

    What it gives takes (address, nbytes, access, flags, file, offset), says where the mapping is,
    and raises OSError.
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
    """Why the C library's last call failed."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def knows_advice(advice: int) -> bool:
    """Whether the kernel takes an advice that can be given to any page, tried on one.

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
