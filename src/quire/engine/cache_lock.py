"""The lock on a cache, which says who may use it, and from where."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypeAlias, final

Around: TypeAlias = Callable[[], AbstractContextManager[object]]


@final
class CacheLock:
    """Held during a step, and during any other use of the cache; a thread may take it again.

    ``around`` is entered by the thread that has it: on a GPU, all that is launched has to be in
    one order.
    """

    def __init__(self, around: Around = nullcontext) -> None:
        self._lock, self._around = threading.RLock(), around
        self._entered: list[AbstractContextManager[object]] = []  # by the thread that has it

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
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
