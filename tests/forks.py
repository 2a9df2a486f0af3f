"""Processes that begin as forks of one that has imported the large libraries.

A process of its own pays four seconds for the imports of torch, Transformers and the engine. A fork
pays none. One that ``start`` began ends as any interpreter does; one that ``run_fork`` runs ends
with its last line, because to take the libraries apart takes a second. A test that is about
imports, or about what a fresh process finds, starts its process itself.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import IO, Any

LARGEST_JOB = 1 << 18  # bytes


class Fork:
    """A process that runs ``code``, with the methods of ``subprocess.Popen`` that tests need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code. Raises: subprocess.TimeoutExpired."""
        with self._server.told:
            self._server.told.wait_for(lambda: self.returncode is not None, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that has imported the libraries; it ends with the process that started it."""

    def __init__(self) -> None:
        self.told = threading.Condition()
        self._forks: dict[int, Fork] = {}
        self._num_jobs = 0
        self._started: dict[int, int] = {}  # a job's number, and its process
        self._one_at_a_time = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self,
        code: str,
        *args: str,
        stdout: int,
        stderr: int,
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        leaves: bool,
    ) -> Fork:
        """Fork a process for ``start``."""
        with self._one_at_a_time, self.told:
            self._num_jobs += 1
            number = self._num_jobs
            job = dict(
                code=code, args=args, env=dict(os.environ if env is None else env),
                cwd=os.fspath(cwd or os.getcwd()), leaves=leaves, number=number,
            )  # fmt: skip
            socket.send_fds(self._control, [json.dumps(job).encode()], [stdout, stderr])
            assert self.told.wait_for(lambda: number in self._started, timeout=120)
            return self._forks[self._started.pop(number)]

    def close(self) -> None:
        self._control.shutdown(socket.SHUT_RDWR)  # to close it is unnoticed while it is read
        self._process.wait()
        self._control.close()

    def _listen(self) -> None:
        while True:
            try:
                event, pid, number = json.loads(self._control.recv(1000))
            except (OSError, ValueError):
                return
            with self.told:
                # This thread never waits: a test that asked for a fork may have been interrupted.
                if event == "started":
                    self._started[number] = pid
                    self._forks[pid] = Fork(self, pid)
                else:
                    self._forks[pid].returncode = number
                self.told.notify_all()


@cache
def _server() -> ForkServer:
    """Return this process's own, which is started on first use."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def start(
    code: str,
    *args: str,
    stdout: int,
    stderr: int,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    leaves: bool = False,
) -> Fork | subprocess.Popen[bytes]:
    """Start a process that runs ``code`` as ``python -c`` does, with these open files.

    One that ``leaves`` is no more as soon as ``code`` has ended, without the interpreter's end.
    """
    if sys.platform == "linux":
        return _server().start(
            code, *args, stdout=stdout, stderr=stderr, env=env, cwd=cwd, leaves=leaves
        )
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, cwd=cwd)


def run_fork(
    code: str,
    *args: str,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` to its end, and return what it said. Raises: subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = start(
            code, *args, stdout=out.fileno(), stderr=err.fileno(), env=env, cwd=cwd, leaves=True
        )
        try:
            returncode = child.wait(timeout)
        finally:
            child.kill()
        return subprocess.CompletedProcess((code, *args), returncode, _text(out), _text(err))


_PROGRAM = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_program(
    path: str | os.PathLike[str],
    *args: str,
    timeout: float = 120,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a file as ``python FILE`` does, to its end. Raises: subprocess.TimeoutExpired."""
    return run_fork(_PROGRAM, os.fspath(path), *args, timeout=timeout, cwd=cwd)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


# -- in the process that forks ---------------------------------------------------------------------


def _next_job(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each job, and tell when a fork has ended: returns the job in a fork, else None."""
    children: dict[int, int] = {}  # a descriptor of each, and its pid
    while True:
        ready = select.select([control, *children], [], [])[0]
        for descriptor in ready:
            if descriptor is not control:
                pid = children.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                control.send(json.dumps(["ended", pid, code]).encode())
        if control in ready:
            data, files, *_ = socket.recv_fds(control, LARGEST_JOB, 2)
            if not data:
                return None
            pid = os.fork()
            if not pid:
                control.close()
                for descriptor in children:
                    os.close(descriptor)
                for number, file in enumerate(files, start=1):
                    os.dup2(file, number)
                    os.close(file)
                job: dict[str, Any] = json.loads(data)
                return job
            for file in files:
                os.close(file)
            children[os.pidfd_open(pid)] = pid
            control.send(json.dumps(["started", pid, json.loads(data)["number"]]).encode())


def _import_libraries() -> None:
    from quire.cli.imports import quick_imports
    from quire.config import keep_few_shapes, wait_patiently

    keep_few_shapes()  # as a command does before it imports torch
    wait_patiently()
    # A fork need not look through it, which also copies it.
    with quick_imports():
        import quire
        import quire.cli.serve
        import quire.server.app
        import quire.server.run
        from quire.models.loader import load

        for name in quire.__all__:
            getattr(quire, name)
        load()  # with all that it imports of Transformers


def _run(code: CodeType, *, leaves: bool) -> None:
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException as error:
        if not (leaves and isinstance(error, SystemExit) and isinstance(error.code, int | None)):
            raise  # the interpreter says what it is
        status = error.code or 0
    if leaves:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _import_libraries()
    job = _next_job(socket.socket(fileno=int(sys.argv[1])))
    if job is not None:
        os.environ.clear()
        os.environ.update(job["env"])
        os.chdir(job["cwd"])
        sys.argv = ["-c", *job["args"]]
        del sys.path[0]  # this folder
        _run(compile(job["code"], "<string>", "exec"), leaves=job["leaves"])
