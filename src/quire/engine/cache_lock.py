"""The lock on a cache: one thread at a time uses it."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypeAlias, final

Around: TypeAlias = Callable[[], AbstractContextManager[object]]


@final
class CacheLock:
    """A lock that a thread holds during a step or another use of the cache. It may nest.

    The thread that holds it has entered ``around``: on a GPU all kernels must be launched in one
    order, which is that of one stream.
    """

    def __init__(self, around: Around = nullcontext) -> None:
        self._lock, self._around = threading.RLock(), around
        self._entered: list[AbstractContextManager[object]] = []  # by the thread that holds it

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock. Return False if ``timeout`` seconds pass, or at once without blocking."""
        if not self._lock.acquire(blocking, timeout):
            return False
        try:
            around = self._around()
            around.__enter__()
        except BaseException:
            self._lock.release()
            raise
        self._entered.append(around)
        return True

    def release(self) -> None:
        """Give the lock back, once for each time that it was taken."""
        try:
            self._entered.pop().__exit__(None, None, None)
        finally:
            self._lock.release()

    @property
    def is_nested(self) -> bool:
        """Whether the thread that holds the lock has taken it more than once."""
        return len(self._entered) > 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
