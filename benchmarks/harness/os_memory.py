"""What Linux says of this process: smaps of given mappings, smaps_rollup, page tables, peak.

No figure here is a counter of ours or of an allocator. Page tables are kept apart because neither
Rss nor Pss contains them, and a sparse layout can spend more on them than one would think.
"""

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) [-rwxsp]{4} ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """The whole process. Differences of two are what happened between."""

    private_bytes: int  # smaps_rollup, Private_Dirty: written pages that no other process maps
    pss_bytes: int  # smaps_rollup, Pss
    rss_bytes: int  # smaps_rollup, Rss
    page_table_bytes: int  # status, VmPTE: page tables of all levels

    def since(self, before: "ProcessFigures") -> dict[str, int]:
        return {name: getattr(self, name) - getattr(before, name) for name in self.__slots__}


def process() -> ProcessFigures:
    rollup = _kilobytes((_PROC / "smaps_rollup").read_text())
    return ProcessFigures(
        private_bytes=rollup["Private_Dirty"],
        pss_bytes=rollup["Pss"],
        rss_bytes=rollup["Rss"],
        page_table_bytes=_kilobytes((_PROC / "status").read_text())["VmPTE"],
    )


def mappings(ranges: Iterable[tuple[int, int]]) -> dict[str, int]:
    """smaps summed over the mappings in which address ranges (start, stop) lie: Size, Pss, ….

    The kernel merges neighbours, so a mapping may hold several ranges. AssertionError if the
    mappings hold anything but the ranges: then their figures would not be ours.
    """
    wanted = sorted(ranges)
    totals = {"Size": 0, "Rss": 0, "Pss": 0, "Private_Dirty": 0, "Mappings": 0}
    inside = False
    for line in (_PROC / "smaps").read_text().splitlines():
        if head := _MAPPING.match(line):
            start, stop = int(head[1], 16), int(head[2], 16)
            inside = any(start < last and first < stop for first, last in wanted)
            totals["Mappings"] += inside
        elif inside:
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0]) * 1024
    asked = sum(last - first for first, last in wanted)
    assert totals["Size"] == asked, f"mappings of {totals['Size']} bytes hold {asked} bytes of ours"
    return totals


def reset_peak() -> int:
    """Begin a new high-water mark of Rss. Returns: Rss now."""
    (_PROC / "clear_refs").write_text("5")
    return process().rss_bytes


def peak_rss() -> int:
    """The most Rss since ``reset_peak`` (VmHWM), within a few pages a core."""
    return _kilobytes((_PROC / "status").read_text())["VmHWM"]


def available_bytes() -> int:
    """MemAvailable of the machine."""
    return _kilobytes(Path("/proc/meminfo").read_text())["MemAvailable"]


def machine() -> str:
    """Processor, cores, memory and kernel, in one line."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = _kilobytes(Path("/proc/meminfo").read_text())["MemTotal"]
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", huge.read_text()) if huge.exists() else None
    return (
        f"{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{memory / 2**30:.1f} GiB RAM, Linux {platform.release().split('-')[0]}, "
        f"transparent huge pages {chosen[1] if chosen else 'absent'}"
    )


def _kilobytes(text: str) -> dict[str, int]:
    """The ``Name:  123 kB`` lines, in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(value) * 1024 for name, value in found}
