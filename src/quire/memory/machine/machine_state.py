"""One snapshot of the machine's memory, so that all figures of a ledger are of the same moment.

``probe`` and ``procfs`` read single files; ``budget`` decides what may be taken.
"""

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from quire.memory.machine.gpu import DeviceMemory
from quire.memory.machine.probe import (
    MemoryBound,
    cgroup_folders,
    mapping_limit,
    memory_bounds,
    num_mappings,
    process_memory,
    soft_limit,
)
from quire.memory.machine.procfs import NumaNode, numa_nodes, read_number, read_table, read_text
from quire.units import ceil_div

_ROOT = Path("/")

CgroupVersion: TypeAlias = Literal["none", "v1", "v2", "hybrid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Time lost waiting for memory, in percent. Source: Linux, Documentation/accounting/psi.rst"""

    some_avg10: float = 0.0  # some task waited, over the last 10 s
    some_avg60: float = 0.0
    full_avg10: float = 0.0  # all tasks waited
    full_avg60: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePages:
    """The kernel's rules for pages of 2 MiB, in its own words, e.g. ``madvise``."""

    anonymous: str = ""
    shared: str = ""  # memfd
    pool_bytes: int = 0  # set aside for MAP_HUGETLB


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory that there is, the limits on it, and its use."""

    bounds: tuple[MemoryBound, ...]  # the tightest first; at least that of the machine itself
    ram_bytes: int
    ram_used_bytes: int = 0
    process_bytes: int = 0  # of this process
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0
    nodes: tuple[NumaNode, ...] = ()
    cgroup: CgroupVersion = "none"
    pressure: Pressure | None = None  # of the whole system
    cgroup_pressure: Pressure | None = None
    max_mappings: int | None = None  # vm.max_map_count
    num_mappings: int = 0
    memlock_bytes: int | None = None  # None: unlimited
    huge_pages: HugePages = HugePages()
    device: DeviceMemory | None = None  # where KV goes, if not into the host's memory
    working_set_bytes: int | None = None  # what macOS recommends that a GPU's process uses

    @property
    def tightest(self) -> MemoryBound:
        """The bound with the least left: of the device, where KV goes there."""
        if self.device is None:
            return self.bounds[0]
        total = self.device.total_bytes
        used = total - self.device.free_bytes
        return MemoryBound(source=self.device.name, limit_bytes=total, used_bytes=used)

    @property
    def available_bytes(self) -> int:
        """Bytes that can be taken now."""
        return self.tightest.available_bytes

    @property
    def hint(self) -> tuple[int, str]:
        """The most that a process should use, whatever others use; and what says so."""
        if self.device is not None:
            return self.device.total_bytes, self.device.name
        if self.working_set_bytes is not None:
            return self.working_set_bytes, "recommended working set"
        least = min(self.bounds, key=lambda bound: bound.limit_bytes)
        return least.limit_bytes, "RAM" if least.source == "MemAvailable" else least.source

    def share(self, num_processes: int) -> "Machine":
        """Return one process's part of the limits that ``num_processes`` alike share.

        Each process has its own limit on addresses.
        """
        if num_processes == 1:
            return self
        bounds = (
            bound
            if bound.counts_addresses
            else MemoryBound(
                source=f"1/{num_processes} of {bound.source}",
                limit_bytes=bound.limit_bytes // num_processes,
                used_bytes=ceil_div(bound.used_bytes, num_processes),
            )
            for bound in self.bounds
        )
        return replace(
            self,
            bounds=tuple(sorted(bounds, key=lambda bound: bound.available_bytes)),
            ram_bytes=self.ram_bytes // num_processes,
            ram_used_bytes=ceil_div(self.ram_used_bytes, num_processes),
        )

    @property
    def own_bytes(self) -> int:
        """Bytes that this process has, where KV goes."""
        return self.process_bytes if self.device is None else self.device.own_bytes

    @property
    def others_bytes(self) -> int:
        """RAM that other processes and the system use."""
        return max(0, self.ram_used_bytes - self.process_bytes)


def read_limits(root: Path = _ROOT, *, device: DeviceMemory | None = None) -> Machine:
    """Read what limits memory now, in a millisecond: enough for most rules.

    What a process has (``smaps_rollup``) is left out: the kernel counts it page by page, which
    takes tens of milliseconds in a process with gigabytes.

    Raises: MemoryUnavailable where the system does not say.
    """
    bounds = tuple(memory_bounds(root))
    ram = next(bound for bound in bounds if bound.source in ("MemAvailable", "vm_stat"))
    return Machine(
        bounds=bounds,
        ram_bytes=ram.limit_bytes,
        ram_used_bytes=ram.used_bytes,
        device=device,
        working_set_bytes=_macos_working_set(ram.limit_bytes) if sys.platform == "darwin" else None,
    )


def read_machine(root: Path = _ROOT, *, device: DeviceMemory | None = None) -> Machine:
    """Read the machine now. Raises: MemoryUnavailable where the system does not say."""
    meminfo = read_table(root / "proc/meminfo")
    own = process_memory(root)
    return replace(
        read_limits(root, device=device),
        process_bytes=0 if own is None else own.pss_bytes,
        swap_total_bytes=meminfo.get("SwapTotal", 0),
        swap_free_bytes=meminfo.get("SwapFree", 0),
        nodes=numa_nodes(root),
        cgroup=cgroup_version(root),
        pressure=read_pressure(root / "proc/pressure/memory"),
        cgroup_pressure=_cgroup_pressure(root),
        max_mappings=mapping_limit(root),
        num_mappings=num_mappings(root),
        memlock_bytes=soft_limit("Max locked memory", root),
        huge_pages=_huge_pages(root),
    )


def read_pressure(path: Path) -> Pressure | None:
    """Read a ``memory.pressure`` file; None where the kernel does not keep it."""
    found = dict(re.findall(r"(some|full) (.*)", read_text(path)))
    if "some" not in found:
        return None
    values = {
        f"{kind}_{window}": float(value)
        for kind, text in found.items()
        for window, value in re.findall(r"(avg10|avg60)=(\d+(?:\.\d+)?)", text)
    }
    return Pressure(**values)


def cgroup_version(root: Path = _ROOT) -> CgroupVersion:
    """Tell the version of this process's control groups (hybrid: v1 may limit memory)."""
    lines = [line.split(":", 2) for line in read_text(root / "proc/self/cgroup").splitlines()]
    v2 = any(line[:2] == ["0", ""] for line in lines)
    v1 = any(len(line) == 3 and line[1] for line in lines)
    if v1 and v2:
        return "hybrid"
    return "v1" if v1 else "v2" if v2 else "none"


def unified_memory_cap(ram_bytes: int) -> int:
    """Return the bytes that the system can spare where a processor and a GPU share memory.

    Source: mistral.rs, which takes two thirds of RAM up to 36 GB and three quarters above.
    """
    return ram_bytes * 2 // 3 if ram_bytes <= 36 << 30 else ram_bytes * 3 // 4


def working_set(wired_limit_mb: str, ram_bytes: int) -> int:
    """Return macOS's ``recommendedMaxWorkingSetSize`` in bytes, from ``iogpu.wired_limit_mb``.

    0, or no answer, means the system's own choice, which is close to the cap above. This has not
    run on macOS: it follows what mistral.rs and llama.cpp do.
    """
    limit = wired_limit_mb.strip()
    return int(limit) << 20 if limit.isdigit() and int(limit) else unified_memory_cap(ram_bytes)


def _macos_working_set(ram_bytes: int) -> int:
    command = ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return working_set(said, ram_bytes)


def _cgroup_pressure(root: Path) -> Pressure | None:
    """Read the pressure of the innermost group that has it."""
    for _, folder in cgroup_folders(root, "", ("sys/fs/cgroup", "sys/fs/cgroup/unified")):
        pressure = read_pressure(folder / "memory.pressure")
        if pressure is not None:
            return pressure
    return None


def _huge_pages(root: Path) -> HugePages:
    folder = root / "sys/kernel/mm"

    def chosen(name: str) -> str:  # of "always [madvise] never"
        found = re.search(r"\[(\w+)\]", read_text(folder / "transparent_hugepage" / name))
        return found[1] if found else ""

    pool = read_number(folder / "hugepages/hugepages-2048kB/nr_hugepages") or 0
    return HugePages(
        anonymous=chosen("enabled"), shared=chosen("shmem_enabled"), pool_bytes=pool << 21
    )
