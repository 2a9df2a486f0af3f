"""What the operating system says about memory: of the machine, of this process, of one range.

``budget`` decides what may be taken of it. Every function takes the ``root`` under which ``/proc``
and ``/sys`` lie, so that a folder of files can describe any machine.
"""

import mmap
import os
import re
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from quire.errors import MemoryUnavailable
from quire.memory.machine.procfs import numa_nodes, read_number, read_table, read_text

_ROOT = Path("/")
# Of /proc/self/maps: addresses, permissions, offset, device, an inode that is not 0, a path.
_FILE_MAPPING = re.compile(
    r"^(\w+)-(\w+) \S+ \w+ \w+:\w+ +[1-9]\d* +(?!/memfd:|/dev/|/SYSV)\S", re.MULTILINE
)
_CGROUP_V1_UNLIMITED = 1 << 62  # it writes the greatest multiple of a page below 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """One limit on this process, and how much of it is gone."""

    source: str  # as an administrator would look for it: "cgroup memory.max of /kube/pod"
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int = 0  # more that the kernel finds before it kills: file pages, swap

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def kills(self) -> bool:
        """Whether the kernel ends a process for it. ``memory.high`` only slows them down."""
        return not (self.counts_addresses or "memory.high" in self.source)

    @property
    def counts_addresses(self) -> bool:
        """It counts what is reserved, backed with pages or not."""
        return self.source.startswith("RLIMIT")


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


def tells_memory(root: Path = _ROOT) -> bool:
    """Return whether the system says how much memory there is."""
    return sys.platform == "darwin" or (root / "proc/meminfo").exists()


def memory_bounds(root: Path = _ROOT) -> list[MemoryBound]:
    """Read every limit that holds for this process, the tightest first.

    Raises: MemoryUnavailable where the system does not say.
    """
    if (root / "proc/meminfo").exists():
        groups = (*_cgroup_v2(root), *_cgroup_v1(root))
        bounds = [_machine(root), *groups, *_cpuset(root), *_process_limits(root)]
    elif sys.platform == "darwin":
        bounds = [_macos()]
    else:
        raise MemoryUnavailable(
            "the system does not say how much memory there is (no /proc/meminfo)"
        )
    return sorted(bounds, key=lambda bound: bound.available_bytes)


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that can be taken now, within the tightest limit.

    Raises: MemoryUnavailable where the system does not say.
    """
    return memory_bounds(root)[0].available_bytes


def bytes_before_kill(bounds: Iterable[MemoryBound]) -> int:
    """Return the bytes that can be taken before the kernel ends a process."""
    return min(b.available_bytes + b.reclaimable_bytes for b in bounds if b.kills)


def total_bytes(root: Path = _ROOT) -> int:
    """Return the tightest limit in bytes: what could be taken if nothing were in use.

    Raises: MemoryUnavailable where the system does not say.
    """
    return min(bound.limit_bytes for bound in memory_bounds(root))


def free_on_processors(root: Path = _ROOT) -> int:
    """Return the bytes that processors keep free for themselves; MemAvailable leaves them out.

    Each keeps up to an eighth of a zone: pages that a process gives back lie there for seconds.

    Source: Linux, mm/page_alloc.c (``pcp->high_max``), /proc/zoneinfo.
    """
    counts = re.findall(r"^ +count: +(\d+)$", read_text(root / "proc/zoneinfo"), re.MULTILINE)
    return sum(map(int, counts)) * mmap.PAGESIZE


def process_memory(root: Path = _ROOT) -> ProcessMemory | None:
    """Read this process's memory; None where the kernel does not say (Linux does)."""
    rollup = read_table(root / "proc/self/smaps_rollup")
    if not {"Rss", "Pss", "Private_Clean", "Private_Dirty"} <= set(rollup):
        return None
    return ProcessMemory(
        rss_bytes=rollup["Rss"],
        pss_bytes=rollup["Pss"],
        private_bytes=rollup["Private_Clean"] + rollup["Private_Dirty"],
        swap_bytes=rollup.get("Swap", 0),
    )


def resident_bytes(address: int, nbytes: int, root: Path = _ROOT) -> int | None:
    """Count the bytes of private pages behind [address, address + nbytes), swapped out or not.

    Unlike mincore this leaves out the shared page of zeros, which appears where unbacked memory was
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
    """Read the bytes that macOS's ``vm_stat`` calls free, inactive or speculative."""
    lines = text.splitlines()
    page_bytes = int(lines[0].split("page size of ")[1].split()[0])
    pages = dict(line.split(":") for line in lines[1:])
    states = ("free", "inactive", "speculative")
    return page_bytes * sum(int(pages[f"Pages {state}"].rstrip(".")) for state in states)


def _macos() -> MemoryBound:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True).stdout
    return MemoryBound(source="vm_stat", limit_bytes=total, used_bytes=total - parse_vm_stat(said))


def mapping_limit(root: Path = _ROOT) -> int | None:
    """Read how many mappings a process may have (``vm.max_map_count``); None without a limit."""
    return read_number(root / "proc/sys/vm/max_map_count")


def spare_mappings(root: Path = _ROOT) -> int | None:
    """Return how many more mappings this process may make: within four fifths of its limit."""
    limit = mapping_limit(root)
    return None if limit is None else max(0, limit * 4 // 5 - num_mappings(root))


def num_mappings(root: Path = _ROOT) -> int:
    """Count the mappings of this process; 0 where the kernel does not say."""
    return read_text(root / "proc/self/maps").count("\n")


def mapped_from_files(addresses: Iterable[int], root: Path = _ROOT) -> frozenset[int]:
    """Find the addresses that lie in a mapping of a file.

    The kernel counts such pages as available, since it could drop them and read them again.
    """
    spans = _FILE_MAPPING.findall(read_text(root / "proc/self/maps"))
    starts, ends = [int(start, 16) for start, _ in spans], [int(end, 16) for _, end in spans]
    found = ((address, bisect_right(starts, address) - 1) for address in addresses)
    return frozenset(address for address, i in found if i >= 0 and address < ends[i])


def _machine(root: Path) -> MemoryBound:
    meminfo = read_table(root / "proc/meminfo")
    total = meminfo.get("MemTotal", 0)
    # Kernels before 3.14 do not say what is available.
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0) + meminfo.get("Cached", 0))
    used = max(0, total - available - free_on_processors(root))
    return MemoryBound(
        source="MemAvailable",
        limit_bytes=total,
        used_bytes=used,
        reclaimable_bytes=meminfo.get("SwapFree", 0),
    )


def _cpuset(root: Path) -> Iterator[MemoryBound]:
    """Yield the bound of the nodes that this process may use, where it may not use all."""
    nodes = numa_nodes(root)
    allowed = [node for node in nodes if node.allowed]
    if 0 < len(allowed) < len(nodes):
        total = sum(node.total_bytes for node in allowed)
        available = sum(node.available_bytes for node in allowed)
        names = ", ".join(str(node.node_id) for node in allowed)
        source = f"cpuset.mems (NUMA node {names})"
        yield MemoryBound(source=source, limit_bytes=total, used_bytes=total - available)


def _cgroup_v2(root: Path) -> Iterator[MemoryBound]:
    for name, folder in cgroup_folders(root, "", ("sys/fs/cgroup", "sys/fs/cgroup/unified")):
        for limit in ("memory.max", "memory.high"):
            yield from _cgroup_bound(root, name, folder, limit, "memory.current", "")


def _cgroup_v1(root: Path) -> Iterator[MemoryBound]:
    for name, folder in cgroup_folders(root, "memory", ("sys/fs/cgroup/memory",)):
        yield from _cgroup_bound(
            root, name, folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        )


def cgroup_folders(
    root: Path, controller: str, mounts: tuple[str, ...]
) -> Iterator[tuple[str, Path]]:
    """Yield the names and folders of this process's group and its ancestors, if they are seen here.

    ``controller`` is empty for v2. In a container the path may be the host's while the mount shows
    the container's own group as its top: then only the top exists, and it is the right one.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path.startswith("/") or controller not in controllers.split(","):
            continue
        # "/../x" is a group beside the top of what this namespace shows: only the top is seen.
        group = PurePosixPath("/" if ".." in path.split("/") else path)
        for mount in mounts:
            for ancestor in (group, *group.parents):
                folder = root / mount / ancestor.relative_to("/")
                if folder.is_dir():
                    yield str(ancestor), folder


def _cgroup_bound(
    root: Path, name: str, folder: Path, limit: str, usage: str, prefix: str
) -> Iterator[MemoryBound]:
    """Yield the group's bound, if it has one. Inactive file pages are as good as free."""
    limit_bytes, used = read_number(folder / limit), read_number(folder / usage)
    if limit_bytes is not None and used is not None and limit_bytes < _CGROUP_V1_UNLIMITED:
        stat = read_table(folder / "memory.stat")
        swap = _cgroup_swap(root, folder, limit_bytes, used)
        yield MemoryBound(
            source=f"cgroup {limit} of {name}",
            limit_bytes=limit_bytes,
            used_bytes=max(0, used - stat.get(f"{prefix}inactive_file", 0)),
            reclaimable_bytes=stat.get(f"{prefix}active_file", 0) + swap,
        )


def _cgroup_swap(root: Path, folder: Path, limit_bytes: int, used_bytes: int) -> int:
    """Return the bytes that a group may still swap out.

    v2 limits swap by itself; v1 limits memory and swap together, so that less is left where memory
    is not used up either.
    """
    free = read_table(root / "proc/meminfo").get("SwapFree", 0)
    if not free:
        return 0
    most, used = (read_number(folder / f"memory.swap.{name}") for name in ("max", "current"))
    if most is None:
        both, used = (
            read_number(folder / f"memory.memsw.{name}_in_bytes") for name in ("limit", "usage")
        )
        if both is None or used is None:
            return free
        return max(0, min(free, both - used - max(0, limit_bytes - used_bytes)))
    return max(0, min(free, most - (used or 0)))


def _process_limits(root: Path) -> Iterator[MemoryBound]:
    """Yield ``ulimit -v`` and ``-d``, which count reserved addresses, committed or not."""
    status = read_table(root / "proc/self/status")
    for name, source, used in (
        ("Max address space", "RLIMIT_AS (ulimit -v)", "VmSize"),
        ("Max data size", "RLIMIT_DATA (ulimit -d)", "VmData"),
    ):
        soft = soft_limit(name, root)
        if soft is not None:
            yield MemoryBound(source=source, limit_bytes=soft, used_bytes=status.get(used, 0))


def soft_limit(name: str, root: Path = _ROOT) -> int | None:
    """Read a limit of this process as /proc/self/limits names it; None if it is unlimited."""
    for line in read_text(root / "proc/self/limits").splitlines():
        if line.startswith(name):
            soft = (line.removeprefix(name).split() or [""])[0]
            return int(soft) if soft.isdigit() else None
    return None
