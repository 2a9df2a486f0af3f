"""``EngineThread``: a thread that steps while requests run, and runs jobs between two steps.

Jobs run in the order in which they came. So another thread can have something done to the engine
without waiting for a lock that a step holds.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar, final

from quire.errors import MemoryUnavailable, QuireError, RequestError

Job: TypeAlias = Callable[[], None]
T = TypeVar("T")


@final
class EngineThread:
    """Calls ``step`` until it returns False, and ``end`` at last.

    ``end`` gets the error of ``step`` or of a job, or None after ``close``. The first job starts
    the thread. Steps, jobs and ``end`` never run at the same time.
    """

    def __init__(
        self, step: Callable[[], bool], end: Callable[[BaseException | None], None]
    ) -> None:
        self._step, self._end = step, end
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, Future[Any] | None]] = deque()
        self._thread: threading.Thread | None = None
        self._over = False
        self._reason: BaseException | None = None  # the error that ended the thread
        self._pid = os.getpid()

    def post(self, job: Job) -> None:
        """Run a job before the next step. An error of the job ends the thread.

        Raises: as ``refuse_if_over``.
        """
        self._take(job, None)

    def call(self, function: Callable[[], T], *, fatal: bool | None = None) -> "Future[T]":
        """Call a function between two steps. Return a future of its result.

        ``fatal``: whether its error ends the thread too; by default MemoryUnavailable does.

        Raises: as ``refuse_if_over``.
        """
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, MemoryUnavailable) if fatal is None else fatal:
                    raise

        self._take(job, future)
        return future

    def refuse_if_over(self) -> None:
        """Check that jobs still run. Raises: RequestError after ``close`` or a fork; ``reason``."""
        if os.getpid() != self._pid:  # a fork has no such thread, and its locks may stay taken
            raise RequestError(
                "this AsyncLLM belongs to the parent process: make a new one in this process"
            )
        if self._over:
            raise self.reason

    def close(self) -> None:
        """Run the jobs so far, and end. It waits for the step under way.

        A second call does nothing, and neither does a forked child's.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            was_over, self._over = self._over, True
            thread = self._thread
            self._changed.notify()
        if thread is None:
            if not was_over:
                self._end(None)
        elif thread is not threading.current_thread():
            thread.join()

    @property
    def is_over(self) -> bool:
        """Whether no job runs any more: after ``close``, an error, or a fork."""
        thread = self._thread
        return self._over or (thread is not None and not thread.is_alive())

    @property
    def reason(self) -> Exception:
        """Why no job runs any more, as an error to raise."""
        if self._reason is None:
            return RequestError("this AsyncLLM is closed: make a new one")
        if isinstance(self._reason, QuireError):
            return type(self._reason)(*self._reason.args)
        return RuntimeError(f"the engine has failed: {self._reason!r}")

    def _take(self, job: Job, future: "Future[Any] | None") -> None:
        self.refuse_if_over()
        with self._changed:
            if self._over:
                raise self.reason
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-step", daemon=True)
                self._thread.start()
            self._jobs.append((job, future))
            self._changed.notify()

    def _run(self) -> None:
        more = False
        try:
            while self._has_something_to_do(more):
                for _ in range(len(self._jobs)):
                    self._jobs.popleft()[0]()  # no name keeps the last job, and its result, alive
                more = not self._over and self._step()
        except BaseException as error:
            with self._changed:
                self._over, self._reason = True, error
            for _, future in self._jobs:
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(self.reason)
        self._end(self._reason)

    def _has_something_to_do(self, more: bool) -> bool:
        """Sleep until there is a step or a job. Return False after ``close`` and the last job."""
        with self._changed:
            while not (more or self._jobs or self._over):
                self._changed.wait()
            return bool(self._jobs) or not self._over
