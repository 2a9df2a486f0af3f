"""How to make a system call, and how to find out whether the system has it."""

import ctypes
import errno
import mmap
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
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
