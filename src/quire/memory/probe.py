"""What the operating system says about memory: of the machine, of this process, of one range.

It only reads. What may be taken of it is decided in ``budget``. Every function takes the ``root``
under which ``/proc`` and ``/sys`` lie, so that any machine can be described by a folder of files.
"""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from quire.errors import MemoryUnavailable

_ROOT = Path("/")
_CGROUP_V1_UNLIMITED = 1 << 62  # it writes the greatest multiple of a page below 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """One limit on this process, and how much of it is gone."""

    source: str  # as an administrator would look for it: "cgroup memory.max of /kube/pod"
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """This process, as the kernel counts it.

    ``rss`` counts a shared page whole, ``pss`` this process's share of it: what adds up when pages
    are aliased is ``pss``.
    """

    rss_bytes: int
    pss_bytes: int
    private_bytes: int
    swap_bytes: int


def memory_bounds(root: Path = _ROOT) -> list[MemoryBound]:
    """Every limit that holds here, the tightest first.

    Raises: MemoryUnavailable where the system does not say.
    """
    if (root / "proc/meminfo").exists():
        bounds = [_machine(root), *_cgroup_v2(root), *_cgroup_v1(root), *_process_limits(root)]
    elif sys.platform == "darwin":
        bounds = [_macos()]
    else:
        raise MemoryUnavailable(
            "the system does not say how much memory there is (no /proc/meminfo): state the KV "
            "budget in bytes"
        )
    return sorted(bounds, key=lambda bound: bound.available_bytes)


def available_bytes(root: Path = _ROOT) -> int:
    """What can be taken now, within the tightest limit.

    Raises: MemoryUnavailable where the system does not say.
    """
    return memory_bounds(root)[0].available_bytes


def total_bytes(root: Path = _ROOT) -> int:
    """The tightest limit itself: what could be taken if nothing were in use.

    Raises: MemoryUnavailable where the system does not say.
    """
    return min(bound.limit_bytes for bound in memory_bounds(root))


def process_memory(root: Path = _ROOT) -> ProcessMemory | None:
    """This process's memory; None where the kernel does not say (it is Linux that does)."""
    try:
        rollup = _table(root / "proc/self/smaps_rollup")
    except OSError:
        return None
    return ProcessMemory(
        rss_bytes=rollup["Rss"],
        pss_bytes=rollup["Pss"],
        private_bytes=rollup["Private_Clean"] + rollup["Private_Dirty"],
        swap_bytes=rollup["Swap"],
    )


def resident_bytes(address: int, nbytes: int, root: Path = _ROOT) -> int | None:
    """Bytes of private pages behind [address, address + nbytes), in memory or swapped out.

    Unlike mincore it leaves out the shared page of zeros, which appears where unbacked memory was
    read; unlike smaps it needs no mapping of its own. None where the kernel does not say.

    Source: Linux, Documentation/admin-guide/mm/pagemap.rst
    """
    swapped, present_and_private = 1 << 62, (1 << 63) | (1 << 56)
    num_pages = 0
    try:
        with (root / "proc/self/pagemap").open("rb") as pagemap:
            pagemap.seek(address // mmap.PAGESIZE * 8)
            left = -(-nbytes // mmap.PAGESIZE)
            while left:
                entries = np.frombuffer(pagemap.read(8 * min(left, 1 << 20)), dtype=np.uint64)
                mine = entries & np.uint64(present_and_private) == np.uint64(present_and_private)
                num_pages += int(np.count_nonzero(mine | (entries & np.uint64(swapped) != 0)))
                left -= len(entries)
    except OSError:
        return None
    return num_pages * mmap.PAGESIZE


def parse_vm_stat(text: str) -> int:
    """Bytes that macOS's ``vm_stat`` calls free, inactive or speculative."""
    lines = text.splitlines()
    page_bytes = int(lines[0].split("page size of ")[1].split()[0])
    pages = dict(line.split(":") for line in lines[1:])
    states = ("free", "inactive", "speculative")
    return page_bytes * sum(int(pages[f"Pages {state}"].rstrip(".")) for state in states)


def _macos() -> MemoryBound:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True).stdout
    return MemoryBound(source="vm_stat", limit_bytes=total, used_bytes=total - parse_vm_stat(said))


def _machine(root: Path) -> MemoryBound:
    meminfo = _table(root / "proc/meminfo")
    total = meminfo["MemTotal"]
    used = total - meminfo["MemAvailable"]
    return MemoryBound(source="MemAvailable", limit_bytes=total, used_bytes=used)


def _cgroup_v2(root: Path) -> Iterator[MemoryBound]:
    for name, folder in _cgroup_folders(root, "", ("sys/fs/cgroup", "sys/fs/cgroup/unified")):
        for limit in ("memory.max", "memory.high"):
            yield from _cgroup_bound(name, folder, limit, "memory.current", "inactive_file")


def _cgroup_v1(root: Path) -> Iterator[MemoryBound]:
    for name, folder in _cgroup_folders(root, "memory", ("sys/fs/cgroup/memory",)):
        yield from _cgroup_bound(
            name, folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        )


def _cgroup_folders(
    root: Path, controller: str, mounts: tuple[str, ...]
) -> Iterator[tuple[str, Path]]:
    """This process's group and its ancestors, of those that can be seen from here.

    In a container the path may be the host's while the mount shows the container's own group as its
    top: then only the top exists, and it is the right one.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        group = PurePosixPath(path)
        for mount in mounts:
            for ancestor in (group, *group.parents):
                folder = root / mount / ancestor.relative_to("/")
                if folder.is_dir():
                    yield str(ancestor), folder


def _cgroup_bound(
    name: str, folder: Path, limit: str, usage: str, reclaimable: str
) -> Iterator[MemoryBound]:
    """The group's bound, if it has one. File pages that nobody reads are as good as free."""
    try:
        text = (folder / limit).read_text().strip()
    except OSError:
        return
    if text != "max" and int(text) < _CGROUP_V1_UNLIMITED:
        used = int((folder / usage).read_text())
        used -= _table(folder / "memory.stat").get(reclaimable, 0)
        source = f"cgroup {limit} of {name}"
        yield MemoryBound(source=source, limit_bytes=int(text), used_bytes=used)


def _process_limits(root: Path) -> Iterator[MemoryBound]:
    """``ulimit -v`` and ``-d``. They count addresses: what is reserved, committed or not."""
    try:
        limits = (root / "proc/self/limits").read_text().splitlines()
        status = _table(root / "proc/self/status")
    except OSError:
        return
    for line in limits:
        for name, source, used in (
            ("Max address space", "RLIMIT_AS (ulimit -v)", "VmSize"),
            ("Max data size", "RLIMIT_DATA (ulimit -d)", "VmData"),
        ):
            if line.startswith(name):
                soft = line.removeprefix(name).split()[0]
                if soft != "unlimited":
                    yield MemoryBound(source=source, limit_bytes=int(soft), used_bytes=status[used])


def _table(path: Path) -> dict[str, int]:
    """The numbers of ``Name:   123 kB`` and ``name 123`` lines, in bytes."""
    table = {}
    for line in path.read_text().splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0].rstrip(":")] = int(fields[1]) * (1024 if fields[-1] == "kB" else 1)
    return table
