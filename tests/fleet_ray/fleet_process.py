"""``quire fleet`` in a process of its own, with a Ray of its own, asked over its socket."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

COMMAND = "from quire.cli import main; main()"
REPLICA, CONTROLLER = "ServeReplica:quire:Replica", "ServeController"
MOST_S = 120.0  # for anything that is waited for


class FleetProcess:
    """A fleet under way. ``log`` is what it has said so far."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._log = folder / f"fleet-{time.monotonic_ns()}.log"
        with self._log.open("wb") as writes:
            self.child = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "fleet", "--port", "0", *flags],
                stdout=subprocess.DEVNULL,
                stderr=writes,
                start_new_session=True,  # a signal to it is one to Ray's processes too, as Ctrl-C
            )
        self._known: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        found = re.search(r"http://\S+:\d+", self.log)
        assert found is not None
        return found[0]

    def wait_for(self, text: str) -> None:
        self.until(lambda: text in self.log or self.child.poll() is not None)
        assert text in self.log, self.log

    def until(self, comes: Callable[[], bool]) -> None:
        end_s = time.monotonic() + MOST_S
        while not comes():
            assert time.monotonic() < end_s, f"not in {MOST_S:g} s\n{self.log}"
            time.sleep(0.1)

    def processes(self, title: str) -> list[psutil.Process]:
        """Those of this fleet whose title has this text."""
        found = []
        for each in psutil.Process(self.child.pid).children(recursive=True):
            self._known[each.pid] = each
            try:
                if title in " ".join(each.cmdline()):
                    found.append(each)
            except psutil.Error:
                continue
        return found

    def replicas(self) -> list[psutil.Process]:
        return [each for each in self.processes(REPLICA) if each.status() != "zombie"]

    def busiest(self) -> psutil.Process:
        """The replica that computes: streams run there."""
        used = {each: each.cpu_times().user for each in self.replicas()}
        time.sleep(0.1)
        return max(used, key=lambda each: each.cpu_times().user - used[each])

    def end(self, asked: signal.Signals | None = None) -> int:
        """Its exit code, once it has ended; no process of its Ray is left then."""
        self.processes("")
        if asked is not None:
            self.child.send_signal(asked)
        code = self.child.wait(MOST_S)
        _, left = psutil.wait_procs(list(self._known.values()), timeout=10)
        assert not left, [" ".join(each.cmdline()) for each in left]
        return code

    def kill(self) -> None:
        if self.child.poll() is None:
            self.processes("")
            self.child.kill()
            self.child.wait()
        for each in self._known.values():
            try:
                each.kill()
            except psutil.Error:
                continue


@contextmanager
def fleet(folder: Path, *flags: str) -> Iterator[FleetProcess]:
    """One that lets clients in, and is no more in the end."""
    process = FleetProcess(folder, *flags)
    try:
        process.wait_for("clients")
        yield process
    finally:
        process.kill()
