"""The probe over folders of files that describe machines, and once over this one."""

import sys
from pathlib import Path

import pytest

from quire.errors import MemoryUnavailable
from quire.memory.machine.probe import (
    MemoryBound,
    available_bytes,
    memory_bounds,
    parse_vm_stat,
    process_memory,
    resident_bytes,
    tells_memory,
    total_bytes,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Machine:
    """A folder that looks like / to the probe: 64 GiB, of which 40 are available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal:       {64 * MIB} kB\n"
            f"MemFree:        {2 * MIB} kB\n"
            f"MemAvailable:   {40 * MIB} kB\n"
            "HugePages_Total:       0\n",
        )

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def cgroup_v2(self, folder: str, **values: object) -> None:
        for name, value in values.items():
            self.write(f"sys/fs/cgroup/{folder}/memory.{name}", value)

    def cgroup_v1(self, folder: str, limit: object, usage: int, inactive_file: int) -> None:
        where = f"sys/fs/cgroup/memory/{folder}"
        self.write(f"{where}/memory.limit_in_bytes", limit)
        self.write(f"{where}/memory.usage_in_bytes", usage)
        self.write(
            f"{where}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\n"
        )

    def sources(self) -> list[str]:
        return [bound.source for bound in memory_bounds(self.root)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_limits(machine: Machine) -> None:
    assert memory_bounds(machine.root) == [
        MemoryBound(source="MemAvailable", limit_bytes=64 * GIB, used_bytes=24 * GIB)
    ]
    assert available_bytes(machine.root) == 40 * GIB
    assert total_bytes(machine.root) == 64 * GIB


def test_cgroup_v2_takes_the_tightest_of_the_group_and_its_ancestors(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/kube/pod/box")
    unlimited = {"max": "max", "high": "max", "current": 3 * GIB, "stat": "inactive_file 0"}
    machine.cgroup_v2("kube/pod/box", **unlimited)
    stat = f"anon 5\ninactive_file {1 * GIB}\nactive_file 7"
    machine.cgroup_v2("kube/pod", max=16 * GIB, high="max", current=7 * GIB, stat=stat)
    machine.cgroup_v2("kube", max=32 * GIB, high=30 * GIB, current=29 * GIB, stat=stat)

    assert machine.sources() == [
        "cgroup memory.high of /kube",
        "cgroup memory.max of /kube",
        "cgroup memory.max of /kube/pod",
        "MemAvailable",
    ]
    available = [bound.available_bytes for bound in memory_bounds(machine.root)]
    assert available == [2 * GIB, 4 * GIB, 10 * GIB, 40 * GIB]
    assert available_bytes(machine.root) == 2 * GIB
    assert total_bytes(machine.root) == 16 * GIB


def test_cgroup_v2_of_a_container_that_sees_only_itself(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.cgroup_v2("", max=8 * GIB, current=1 * GIB, stat="inactive_file 0")
    assert machine.sources() == ["cgroup memory.max of /", "MemAvailable"]
    assert available_bytes(machine.root) == 7 * GIB


def test_cgroup_v1(machine: Machine) -> None:
    machine.write(
        "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n1:cpuset:/x\n0::/"
    )
    machine.cgroup_v1("docker/abc", 4 * GIB, 3 * GIB, 1 * GIB)
    machine.cgroup_v1("", 9223372036854771712, 20 * GIB, 0)
    assert machine.sources() == ["cgroup memory.limit_in_bytes of /docker/abc", "MemAvailable"]
    assert available_bytes(machine.root) == 2 * GIB
    assert total_bytes(machine.root) == 4 * GIB


def test_cgroup_v1_of_a_container_whose_path_is_the_hosts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/docker/not-visible-in-here")
    machine.cgroup_v1("", 4 * GIB, 1 * GIB, 0)
    assert machine.sources() == ["cgroup memory.limit_in_bytes of /", "MemAvailable"]


def test_a_hybrid_machine_has_both(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/a\n0::/b")
    machine.cgroup_v1("a", 6 * GIB, 1 * GIB, 0)
    machine.cgroup_v2("unified/b", max=5 * GIB, current=1 * GIB, stat="inactive_file 0")
    assert machine.sources() == [
        "cgroup memory.max of /b",
        "cgroup memory.limit_in_bytes of /a",
        "MemAvailable",
    ]


def test_a_group_above_its_limit_has_nothing_rather_than_less(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.cgroup_v2("", max=1 * GIB, current=2 * GIB, stat="inactive_file 0")
    assert available_bytes(machine.root) == 0


def test_limits_of_the_process(machine: Machine) -> None:
    machine.write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max data size             {20 * GIB}          unlimited            bytes\n"
        "Max stack size            8388608              unlimited            bytes\n"
        f"Max address space         {10 * GIB}          {12 * GIB}           bytes\n",
    )
    machine.write(
        "proc/self/status",
        f"Name:\tpython 3\nVmSize:\t {4 * MIB} kB\nVmData:\t {1 * MIB} kB\nVmRSS:\t 5 kB\n",
    )
    assert memory_bounds(machine.root)[:2] == [
        MemoryBound(source="RLIMIT_AS (ulimit -v)", limit_bytes=10 * GIB, used_bytes=4 * GIB),
        MemoryBound(source="RLIMIT_DATA (ulimit -d)", limit_bytes=20 * GIB, used_bytes=1 * GIB),
    ]
    assert total_bytes(machine.root) == 10 * GIB


def test_no_limits_are_no_bounds(machine: Machine) -> None:
    machine.write(
        "proc/self/limits",
        "Max address space         unlimited            unlimited            bytes",
    )
    machine.write("proc/self/status", "VmSize:\t 1 kB")
    assert machine.sources() == ["MemAvailable"]


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS says it in another way")
def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert not tells_memory(tmp_path)
    with pytest.raises(MemoryUnavailable, match="does not say how much memory there is"):
        available_bytes(tmp_path)
    assert process_memory(tmp_path) is None
    assert resident_bytes(0, 4096, tmp_path) is None


def test_process_memory(machine: Machine) -> None:
    machine.write(
        "proc/self/smaps_rollup",
        "55d0-7fff ---p 00000000 00:00 0                          [rollup]\n"
        "Rss:                1000 kB\nPss:                 400 kB\nPss_Dirty:            90 kB\n"
        "Private_Clean:        30 kB\nPrivate_Dirty:       110 kB\nSwap:                  8 kB\n",
    )
    memory = process_memory(machine.root)
    assert memory is not None
    assert memory.rss_bytes == 1000 * KIB
    assert memory.pss_bytes == 400 * KIB
    assert memory.private_bytes == 140 * KIB
    assert memory.swap_bytes == 8 * KIB


def test_macos_vm_stat() -> None:
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10000.\n"
        "Pages active:                            300000.\n"
        "Pages inactive:                           20000.\n"
        "Pages speculative:                         5000.\n"
        "Pages throttled:                              0.\n"
        '"Translation faults":                 123456789.\n'
    )
    assert parse_vm_stat(text) == 35000 * 16384


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine() -> None:
    assert 0 < available_bytes() <= total_bytes()
    memory = process_memory()
    assert memory is not None
    assert 0 < memory.private_bytes <= memory.rss_bytes
    assert memory.pss_bytes <= memory.rss_bytes
