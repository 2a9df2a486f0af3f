"""The probe over recorded trees of machines: what limits them, what else is known, what is odd.

Each folder of ``machines`` holds the files of /proc and /sys that matter, as such a machine shows
them: a batch job under v1, a pod under v2, a hybrid one, a container that sees the host's path, a
service with MemoryHigh, one without control groups, and one of two sockets.
"""

import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.memory.machine import (
    DeviceMemory,
    HugePages,
    Machine,
    Pressure,
    cuda_memory,
    read_machine,
    read_pressure,
    unified_memory_cap,
    working_set,
)
from quire.memory.machine.probe import mapped_from_files, mapping_limit, num_mappings
from quire.memory.machine.procfs import NumaNode, read_list, read_number, read_table, read_text

MACHINES = Path(__file__).parent / "machines"
MIB, GIB = 2**20, 2**30

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="reads /proc")


def gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 2)


@pytest.mark.parametrize(
    ("name", "cgroup", "bounds"),
    [
        (
            "v1",
            "v1",
            [
                ("cgroup memory.limit_in_bytes of /slurm/uid_1001/job_77/step_0", 32, 24),
                ("cgroup memory.limit_in_bytes of /slurm/uid_1001/job_77", 32, 24),
                ("MemAvailable", 125.5, 96),
            ],
        ),
        (
            "v2-nested",
            "v2",
            [
                ("cgroup memory.max of …/kubepods-burstable-pod3f2a.slice", 12, 7),
                ("cgroup memory.max of …/cri-containerd-9c1e.scope", 16, 12),
                ("MemAvailable", 251.6, 180),
                ("cgroup memory.max of …/kubepods.slice", 240, 180),
            ],
        ),
        (
            "hybrid",
            "hybrid",
            [
                ("cgroup memory.limit_in_bytes of /user/1000", 6, 4.5),
                ("MemAvailable", 23.6, 21),
            ],
        ),
        (
            "docker-host-path",
            "hybrid",
            [("cgroup memory.limit_in_bytes of /", 4, 2), ("MemAvailable", 62.7, 50)],
        ),
        (
            "systemd-high",
            "v2",
            [
                ("cgroup memory.high of …/quire.service", 8, 5.5),
                ("cgroup memory.max of …/quire.service", 10, 7.5),
                ("cgroup memory.high of …/system.slice", 20, 10),
                ("MemAvailable", 31.2, 26),
                ("RLIMIT_AS (ulimit -v)", 64, 61.71),
            ],
        ),
        ("no-cgroup", "none", [("MemAvailable", 8, 6)]),
        (
            "numa-cpuset",
            "v2",
            [("cpuset.mems (NUMA node 1)", 125.8, 60), ("MemAvailable", 251.6, 200)],
        ),
    ],
)
def test_what_limits_it(name: str, cgroup: str, bounds: list[tuple[str, float, float]]) -> None:
    machine = read_machine(MACHINES / name)
    found = []
    for bound in machine.bounds:
        what, of, path = bound.source.partition(" of /")
        short = (
            f"{what} of …/{path.split('/')[-1]}" if name in ("v2-nested", "systemd-high") else ""
        )
        source = short if of and short else bound.source
        found.append((source, gib(bound.limit_bytes), gib(bound.available_bytes)))
    assert found == bounds
    assert machine.cgroup == cgroup
    assert machine.tightest == machine.bounds[0]
    assert machine.available_bytes == machine.bounds[0].available_bytes
    assert machine.hint[0] == min(bound.limit_bytes for bound in machine.bounds)


def test_what_else_a_pod_knows() -> None:
    machine = read_machine(MACHINES / "v2-nested")
    assert machine.pressure == Pressure(some_avg60=0.12)
    assert machine.cgroup_pressure == Pressure(
        some_avg10=3.41, some_avg60=1.2, full_avg10=0.88, full_avg60=0.0
    )
    assert machine.process_bytes == 480_000 * 1024
    assert machine.others_bytes == machine.ram_used_bytes - machine.process_bytes
    assert (machine.max_mappings, machine.num_mappings) == (65530, 0)
    assert machine.memlock_bytes == 8 * MIB
    assert machine.swap_total_bytes == 0


def test_swap_and_locked_memory() -> None:
    machine = read_machine(MACHINES / "systemd-high")
    assert (machine.swap_total_bytes, machine.swap_free_bytes) == (16 * GIB, 15 * GIB)
    assert machine.pressure == Pressure(some_avg10=12.5, some_avg60=4, full_avg10=2.25)
    assert read_machine(MACHINES / "v1").memlock_bytes is None


def test_two_sockets_and_huge_pages() -> None:
    machine = read_machine(MACHINES / "numa-cpuset")
    sizes = {"total_bytes": int(125.8 * MIB) * 1024}
    assert machine.nodes == (
        NumaNode(node_id=0, available_bytes=120 * GIB, allowed=False, **sizes),
        NumaNode(node_id=1, available_bytes=60 * GIB, allowed=True, **sizes),
    )
    assert machine.huge_pages == HugePages(anonymous="madvise", shared="never", pool_bytes=GIB)


def test_an_old_kernel_says_little_and_that_is_enough() -> None:
    machine = read_machine(MACHINES / "no-cgroup")
    assert machine.pressure is None
    assert machine.cgroup_pressure is None
    assert machine.process_bytes == 0
    assert machine.max_mappings is None
    assert machine.nodes == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(path.name for path in MACHINES.iterdir()))
def test_any_file_may_vanish_or_be_odd(name: str, tmp_path: Path) -> None:
    """But for /proc/meminfo, whose absence means that this is no such system."""
    root = tmp_path / name
    shutil.copytree(MACHINES / name, root)
    for file in sorted(root.rglob("*")):
        if file.is_file() and file.name != "meminfo":
            text = file.read_bytes()
            for odd in (
                None,
                b"",
                b"max\n",
                b"\xff\xfe\x00",
                b"-1\n:::\n0\n",
                text[: len(text) // 2],
            ):
                if odd is None:
                    file.unlink()
                else:
                    file.write_bytes(odd)
                assert read_machine(root).available_bytes >= 0
            file.write_bytes(text)


@given(st.binary(max_size=200))
def test_nothing_in_a_file_is_an_error(content: bytes) -> None:
    path = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    file = path / f"quire-procfs-{id(content)}"
    file.write_bytes(content)
    try:
        read_text(file), read_number(file), read_table(file), read_pressure(file)
    finally:
        file.unlink()


@given(st.text(alphabet="0123456789,- x", max_size=12))
def test_lists_of_ids_are_read_or_left_out(text: str) -> None:
    assert all(number >= 0 for number in read_list(text))


def test_a_list_of_ids() -> None:
    assert read_list("0-2,5, 7-7\n") == {0, 1, 2, 5, 7}
    assert read_list("") == frozenset()


def test_a_group_beside_the_namespace_is_the_top(tmp_path: Path) -> None:
    shutil.copytree(MACHINES / "no-cgroup", tmp_path, dirs_exist_ok=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/../../other\n")
    top = tmp_path / "sys/fs/cgroup"
    top.mkdir(parents=True)
    (top / "memory.max").write_text(f"{3 * GIB}\n")
    (top / "memory.current").write_text(f"{GIB}\n")
    assert read_machine(tmp_path).bounds[0].source == "cgroup memory.max of /"
    assert read_machine(tmp_path).available_bytes == 2 * GIB


def test_a_device_has_limits_of_its_own() -> None:
    device = DeviceMemory(name="H200", total_bytes=140 * GIB, free_bytes=100 * GIB)
    machine = read_machine(MACHINES / "v1", device=device)
    assert machine.available_bytes == 100 * GIB
    assert machine.hint == (140 * GIB, "H200")
    assert machine.tightest.used_bytes == 40 * GIB


def test_cuda_says_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_memory() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (5 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"fake {index}")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: GIB)
    assert cuda_memory(1) == DeviceMemory(
        name="fake 1", total_bytes=8 * GIB, free_bytes=5 * GIB, index=1, own_bytes=GIB
    )


def test_a_mac_recommends_a_working_set() -> None:
    assert working_set("0\n", 64 * GIB) == 48 * GIB
    assert working_set("", 36 * GIB) == 24 * GIB  # no such sysctl
    assert working_set("16384\n", 64 * GIB) == 16 * GIB
    machine = Machine(
        bounds=read_machine(MACHINES / "no-cgroup").bounds,
        ram_bytes=8 * GIB,
        working_set_bytes=unified_memory_cap(8 * GIB),
    )
    assert machine.hint == (8 * GIB * 2 // 3, "recommended working set")


def test_which_addresses_are_of_files(tmp_path: Path) -> None:
    maps = tmp_path / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(
        "1000-3000 rw-p 00000000 08:01 77 /models/model.safetensors\n"
        "3000-4000 rw-p 00000000 00:00 0 \n"
        "4000-5000 rw-s 00000000 00:01 9 /memfd:quire (deleted)\n"
        "5000-6000 rw-p 00000000 00:00 0 [heap]\n"
        "7000-8000 r--p 00000000 08:01 78 /models/a file (deleted)\n"
    )
    asked = [0xFFF, 0x1000, 0x2FFF, 0x3000, 0x4800, 0x5000, 0x7001, 0x8000]
    assert mapped_from_files(asked, tmp_path) == {0x1000, 0x2FFF, 0x7001}
    assert num_mappings(tmp_path) == 5
    assert mapping_limit(tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine() -> None:
    machine = read_machine()
    assert 0 < machine.available_bytes <= machine.ram_bytes
    assert machine.process_bytes > 0
    assert machine.num_mappings > 10
    assert machine.others_bytes <= machine.ram_used_bytes
