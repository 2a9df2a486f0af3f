"""A process that renders templates of clients, which may be anything, and can be killed.

It is started when the first such template comes, without the environment and its secrets, and
again after one that it did not survive.
"""

import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast, final

from quire.errors import RequestError
from quire.server.chat.child import read_frame, write_frame
from quire.server.chat.sandbox import Limits

MEMORY_BYTES = 512 * 1024 * 1024
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from quire.server.chat.child import main; main({seconds!r}, {max_chars}, {memory_bytes})"
)
_GRACE_S = 10.0  # to start on a busy machine, and to die


@final
class RenderingProcess:
    """One process, for one template at a time. Any thread may call it; ``close`` it at the end."""

    def __init__(self, limits: Limits, memory_bytes: int = MEMORY_BYTES) -> None:
        self._limits, self._memory_bytes = limits, memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None when there is no process."""
        return None if self._process is None else self._process.pid

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises: RequestError: the template is wrong, took too long or too much, or waited."""
        if not self._lock.acquire(timeout=_GRACE_S):
            raise RequestError(
                f"chat_template has waited {_GRACE_S:g} s for templates of other requests: "
                "leave it out, and the model's own is used"
            )
        try:
            reply = self._ask({"source": source, "variables": dict(variables)})
        finally:
            self._lock.release()
        if "error" in reply:
            raise RequestError(reply["error"])
        return reply["text"]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, request: dict[str, Any]) -> dict[str, str]:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._process = self._start()
        assert process.stdin is not None, "started with pipes"
        assert process.stdout is not None, "started with pipes"
        reply = None
        try:
            write_frame(cast("Any", process.stdin), request)
            waiting = select.poll()
            waiting.register(process.stdout, select.POLLIN | select.POLLHUP)
            if waiting.poll(1000 * (2 * self._limits.seconds + _GRACE_S)):
                reply = read_frame(cast("Any", process.stdout))
        except OSError:
            pass  # it died while it was written to: said below
        if reply is None:
            self._end()
            raise RequestError(
                f"chat_template was stopped: it took longer than {self._limits.seconds:g} s, "
                "or more memory than it may have"
            )
        return cast("dict[str, str]", reply)

    def _start(self) -> "subprocess.Popen[bytes]":
        code = _START.format(
            path=sys.path,
            seconds=self._limits.seconds,
            max_chars=self._limits.max_chars,
            memory_bytes=self._memory_bytes,
        )
        return subprocess.Popen(
            [sys.executable, "-E", "-s", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            close_fds=True,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # for what it was not there to read
                    stream.close()
