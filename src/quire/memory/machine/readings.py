"""Gauges: how much memory there is now and how long tasks waited for it, in about a millisecond.

``machine_state`` reads all that is known of a machine.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.memory.machine.probe import bytes_before_kill, cgroup_folders, memory_bounds
from quire.memory.machine.procfs import read_table, read_text

_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """How much there is at one moment."""

    total_bytes: int  # the tightest limit
    available_bytes: int  # in the bound that has least left
    left_bytes: int | None = None  # until the system kills a process; None: it kills none
    stalled_s: float = 0.0  # since the system started: some task waited for memory
    source: str = ""


class Gauge(Protocol):
    """Tells the time and how much memory there is."""

    def now_s(self) -> float:
        """Return the seconds of a clock that never goes back."""
        ...

    def read(self) -> MemoryReading:
        """Read the memory now. Raises: MemoryUnavailable where the system does not say."""
        ...


class HostGauge:
    """This machine, within the limits of this process."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root

    def now_s(self) -> float:
        return time.monotonic()

    def read(self) -> MemoryReading:
        # A limit on addresses is no help: giving pages back does not give addresses back.
        bounds = [b for b in memory_bounds(self._root) if not b.source.startswith("RLIMIT")]
        return MemoryReading(
            total_bytes=min(bound.limit_bytes for bound in bounds),
            available_bytes=bounds[0].available_bytes,
            left_bytes=bytes_before_kill(bounds),
            stalled_s=stalled_s(self._root),
            source=bounds[0].source,
        )


class SharedGauge:
    """Reads one process's part of a machine that several processes alike share."""

    def __init__(self, whole: Gauge, num_processes: int) -> None:
        self._whole, self._num_processes = whole, num_processes

    def now_s(self) -> float:
        return self._whole.now_s()

    def read(self) -> MemoryReading:
        whole = self._whole.read()
        left = whole.left_bytes
        return MemoryReading(
            total_bytes=whole.total_bytes // self._num_processes,
            available_bytes=whole.available_bytes // self._num_processes,
            left_bytes=None if left is None else left // self._num_processes,
            stalled_s=whole.stalled_s,
            source=f"1/{self._num_processes} of {whole.source}",
        )


class HostPeak:
    """The most memory that this process has had, above where it began; file pages apart."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._own = root / "proc/self"
        self._begin: tuple[int, int] | None = None

    def begin(self) -> None:
        """Begin to measure, from what this process has now."""
        self._begin = None
        try:
            (self._own / "clear_refs").write_text("5")  # the high-water mark begins anew
        except OSError:
            return
        now = read_table(self._own / "status")
        if {"VmHWM", "VmRSS", "RssFile"} <= set(now):
            self._begin = now["VmRSS"], now["RssFile"]

    def peak_bytes(self) -> int | None:
        """Return the most bytes since ``begin``; None where the system does not say.

        Source: Linux, proc(5), ``clear_refs``.
        """
        if self._begin is None:
            return None
        resident, of_files = self._begin
        now = read_table(self._own / "status")
        return max(0, now["VmHWM"] - resident - max(0, now["RssFile"] - of_files))


def stalled_s(root: Path = _ROOT) -> float:
    """Return the seconds in which a task waited for memory: of this group if told, else of all."""
    groups = cgroup_folders(root, "", ("sys/fs/cgroup", "sys/fs/cgroup/unified"))
    files = [folder / "memory.pressure" for _, folder in groups]
    for path in (*files[:1], root / "proc/pressure/memory"):
        found = re.search(r"^some .*total=(\d+)", read_text(path), re.MULTILINE)
        if found:
            return int(found[1]) / 1e6
    return 0.0
