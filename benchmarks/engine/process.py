"""The side of the engine benchmark that starts workers, asks them, and watches what they take.

A worker is at work or stopped: engines whose threads wait by spinning would else take the
processors from the one that is measured. What a worker takes is that of its whole process group.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.quiet import machine_busy_s

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class WorkerFailed(RuntimeError):
    """The worker gave no answer; the message says what it said last."""


class Worker:
    """A process that holds one engine. Stopped between the calls of its methods."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path, *, limit_s: float
    ) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.about = self._answer(limit_s)
        except BaseException:  # an interrupt too: no caller has it yet
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, order: Mapping[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Its answer, with ``peak_bytes`` and ``others``.

        The latter is the share of the processors' time that other processes took meanwhile.
        Raises: WorkerFailed; then it is closed.
        """
        assert self._process.stdin is not None
        for pid in self._members():
            with contextlib.suppress(OSError):
                (_PROC / str(pid) / "clear_refs").write_text("5")
        with self._awake():
            own_s, all_s, begun = self._processor_s(), machine_busy_s(), time.monotonic()
            try:
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
                answer = self._answer(limit_s)
            except (WorkerFailed, OSError) as error:
                self.close()
                raise WorkerFailed(str(error)) from error
            own_s, all_s = self._processor_s() - own_s, machine_busy_s() - all_s
            capacity_s = (time.monotonic() - begun) * (os.cpu_count() or 1)
            answer["others"] = max(0.0, all_s - own_s) / capacity_s
            answer["peak_bytes"] = self._status_bytes("VmHWM")
        return answer

    def resident_bytes(self) -> int:
        return self._status_bytes("VmRSS")

    def wake(self) -> None:
        """Let it do what it does when it has nothing to do, until it is asked again."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise WorkerFailed(f"no answer in {limit_s:.0f} s") from None
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise WorkerFailed(f"it ended: {said[-1][:300] if said else 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _members(self) -> list[int]:
        """Of its process group."""
        return [
            int(entry.name)
            for entry in _PROC.iterdir()
            if entry.name.isdigit() and (stat := _stat(entry)) and int(stat[2]) == self._process.pid
        ]

    def _status_bytes(self, name: str) -> int:
        total = 0
        for pid in self._members():
            with contextlib.suppress(OSError):
                for line in (_PROC / str(pid) / "status").read_text().splitlines():
                    if line.startswith(f"{name}:"):
                        total += int(line.split()[1]) * 1024
        return total

    def _processor_s(self) -> float:
        """Of processes that run, and of children that these have seen the end of."""
        stats = [_stat(_PROC / str(pid)) for pid in self._members()]
        return sum(sum(map(int, stat[11:15])) for stat in stats if stat) * _TICK_S


def _stat(process: Path) -> list[str]:
    """/proc/PID/stat from its third field on; empty if the process has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
