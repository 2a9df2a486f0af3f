"""What is particular to HostMemory: how the kernel refuses, forks, and maps."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch

from forks import run_fork
from quire.errors import MemoryUnavailable
from quire.memory import HostMemory, Region
from quire.memory.machine.probe import resident_bytes

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own files are Linux's")
PAGE = mmap.PAGESIZE


def resident(region: Region) -> int | None:
    return resident_bytes(region.tensor(torch.uint8).data_ptr(), region.nbytes)


def protect(region: Region, page: int, access: int) -> None:
    """Make one page unwritable, so that the kernel refuses to back it."""
    address = region.tensor(torch.uint8).data_ptr() + page * PAGE
    mprotect = ctypes.CDLL(None).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert mprotect(address, PAGE, access) == 0


@linux
def test_pieces_before_the_one_that_the_kernel_refuses_are_given_back() -> None:
    memory = HostMemory()
    if memory.portable:
        pytest.skip("this kernel cannot refuse: it has no MADV_POPULATE_WRITE")
    region = memory.reserve(64 * PAGE)
    region.commit(60 * PAGE, PAGE)
    protect(region, 40, mmap.PROT_READ)

    for asked in (
        {"offset": 0, "nbytes": 2 * PAGE, "stride": 8 * PAGE, "count": 7},  # the sixth piece
        {"offset": 36 * PAGE, "nbytes": 8 * PAGE},  # the middle of the only piece
        {"offset": 40 * PAGE, "nbytes": PAGE, "stride": PAGE, "count": 3},  # the first piece
    ):
        with pytest.raises(MemoryUnavailable, match=r"refused pages .* 4\.00 KiB of this region"):
            region.commit(**asked)
        assert region.committed_bytes == resident(region) == PAGE

    protect(region, 40, mmap.PROT_READ | mmap.PROT_WRITE)
    region.commit(0, 2 * PAGE, stride=8 * PAGE, count=7)
    assert region.committed_bytes == resident(region) == 15 * PAGE


@linux
@pytest.mark.parametrize("portable", [False, True])
def test_a_long_piece_is_backed_to_its_last_page(portable: bool) -> None:
    region = HostMemory(portable=portable).reserve(128 * 2**20)
    region.commit(PAGE, 65 * 2**20)  # longer than two slices, and no multiple of one
    assert region.committed_bytes == resident(region) == 65 * 2**20
    region.decommit(2 * PAGE, 65 * 2**20 - PAGE)
    assert region.committed_bytes == resident(region) == PAGE


@linux
def test_address_space_can_run_out() -> None:
    run(
        """
        import resource
        from quire.errors import MemoryUnavailable
        from quire.memory import HostMemory
        from quire.memory.machine.probe import available_bytes, memory_bounds
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, -1))
        assert "RLIMIT_AS (ulimit -v)" in [bound.source for bound in memory_bounds()]
        room = available_bytes()
        assert room < 8 << 30
        try:
            HostMemory().reserve(9 << 30)
        except MemoryUnavailable as error:
            assert "9.00 GiB of address space" in str(error) and "ulimit -v" in str(error), error
        else:
            raise AssertionError("not refused")
        region = HostMemory().reserve(1 << 30)
        assert available_bytes() <= room - (1 << 30) + (64 << 20)
        """
    )


@linux
def test_a_forked_child_sees_zeros_and_shares_no_page() -> None:
    run(
        """
        import os, torch
        from quire.memory import HostMemory
        from quire.memory.machine.probe import resident_bytes
        region = HostMemory().reserve(1 << 20)
        region.commit(0, 1 << 20)
        flat = region.tensor(torch.uint8)
        torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
        flat[:] = 5
        child = os.fork()
        if child == 0:
            untouched = resident_bytes(flat.data_ptr(), 1 << 20) == 0
            zeros = int(flat.sum()) == 0
            flat[:] = 6
            os._exit(0 if untouched and zeros else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert flat.eq(5).all()
        """
    )


@pytest.mark.full
@linux
def test_what_a_forked_child_does_changes_nothing_here() -> None:
    run(
        """
        import os, torch
        from quire.errors import MemoryUnavailable
        from quire.memory import CountedMemory, HostMemory
        from quire.memory.machine.probe import resident_bytes

        def in_child(memory, region, flat):
            region.commit(1 << 19, 1 << 18)
            flat[1 << 19] = 6
            region.decommit(0, 1 << 18)
            assert not flat[: 1 << 18].any()
            region.close()
            memory.reserve(1 << 20).commit(0, 1 << 20)

        for options in ({}, {"portable": True}, {"huge_pages": True}, {"locked": True}):
            try:
                memory = CountedMemory(HostMemory(**options))
                region = memory.reserve(1 << 20)
            except MemoryUnavailable:
                assert "locked" in options  # it needs the right to
                continue
            region.commit(0, 1 << 19)
            flat = region.tensor(torch.uint8).numpy()
            flat[: 1 << 19] = 5
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    in_child(memory, region, flat)
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert (flat[: 1 << 19] == 5).all() and not flat[1 << 19 :].any()
            assert region.committed_bytes == memory.committed_bytes == 1 << 19
            assert resident_bytes(flat.ctypes.data, 1 << 20) == 1 << 19
            region.close()
            assert memory.committed_bytes == 0
        """
    )


@linux
def test_a_forked_child_has_no_part_in_heaps() -> None:
    if (why := HostMemory().cannot_share) is not None:
        pytest.skip(f"no heaps: {why}")
    run(
        """
        import os, sys, torch
        from quire.errors import MemoryUnavailable
        from quire.memory import HostMemory
        PAGE = HostMemory().page_bytes
        region = HostMemory().reserve(16 * PAGE, heap_bytes=4 * PAGE)
        region.commit(0, 10 * PAGE)
        window = region.window(8 * PAGE)
        window.map(0, 2 * PAGE, 4 * PAGE)
        flat, seen = region.tensor(torch.uint8).numpy(), window.tensor(torch.uint8).numpy()
        flat[: 10 * PAGE] = 5

        def backed():
            files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
            heaps = [file for file in files
                     if os.path.exists(file) and "memfd:quire" in os.readlink(file)]
            return sum(os.stat(file).st_blocks * 512 for file in heaps)

        assert backed() == region.committed_bytes == 10 * PAGE
        closed, (wait, go) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert not flat.any() and not seen.any()
                for verb, arguments in (
                    (region.commit, (12 * PAGE, PAGE)),
                    (region.decommit, (0, PAGE)),
                    (region.window, (PAGE,)),
                    (window.map, (4 * PAGE, 0, PAGE)),
                ):
                    try:
                        verb(*arguments)
                    except MemoryUnavailable as error:
                        assert "parent process" in str(error)
                    else:
                        raise AssertionError(f"{verb} is not refused")
                window.unmap(0, PAGE)
                window.close()
                region.close()
                own = HostMemory().reserve(4 * PAGE, heap_bytes=4 * PAGE)
                own.commit(0, PAGE)
                own.close()
                os.write(closed[1], b"!")
                os.read(wait, 1)  # until its parent has closed the region
                assert backed() == 0  # and no page lives on here
                code = 0
            finally:
                os._exit(code)
        assert os.read(closed[0], 1) == b"!"
        assert (flat[: 10 * PAGE] == 5).all() and (seen[: 4 * PAGE] == 5).all()
        assert backed() == region.committed_bytes == 10 * PAGE
        region.close()
        os.write(go, b"!")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


@linux
def test_a_region_stays_one_mapping_without_huge_pages() -> None:
    region = HostMemory().reserve(2**30)
    address = region.tensor(torch.uint8).data_ptr()
    region.commit(0, PAGE, stride=2 * PAGE, count=500)
    region.decommit(0, PAGE, stride=4 * PAGE, count=250)

    inside = False
    flags: list[list[str]] = []
    with Path("/proc/self/smaps").open() as smaps:
        for line in smaps:
            head = line.split()[0]
            if "-" in head:
                start, stop = (int(edge, 16) for edge in head.split("-"))
                inside = start < address + 2**30 and stop > address
            elif inside and head == "VmFlags:":
                flags.append(line.split()[1:])
    assert len(flags) == 1
    assert "nh" in flags[0] or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_an_old_kernel_gets_portable_memory_and_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert HostMemory(portable=True).portable
    assert not caplog.records
    monkeypatch.setattr("quire.memory.host.memory.can_populate", lambda: False)
    assert HostMemory().portable
    assert "MADV_POPULATE_WRITE" in caplog.text


def run(code: str) -> None:
    lines = code.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    done = run_fork("\n".join(line[indent:] for line in lines))
    assert done.returncode == 0, done.stderr


@linux
def test_an_empty_region_keeps_no_page_tables() -> None:
    """They are memory that no count of pages shows: 4 KiB for each 2 MiB that ever held a page."""
    apart = 4 << 20
    region = HostMemory().reserve(1000 * apart)
    before = page_table_bytes()
    region.commit(0, PAGE, stride=apart, count=1000)
    held = page_table_bytes()
    region.decommit(0, PAGE, stride=apart, count=999)
    kept = page_table_bytes()
    region.decommit(999 * apart, PAGE)
    if page_table_bytes() >= kept:
        pytest.skip("this kernel frees page tables only with the mapping (before Linux 6.14)")
    assert held - before >= 1000 * PAGE
    assert page_table_bytes() - before < 100 * PAGE


def page_table_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPTE"))
