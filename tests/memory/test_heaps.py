"""What is particular to heaps on the host: files, mappings and their limit, forks."""

import ctypes
import gc
import mmap
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conformance.memory_cases import heap_files, memfd_bytes, rollup_bytes, run_alone
from quire.errors import MemoryUnavailable
from quire.memory import HostMemory

pytestmark = [
    pytest.mark.skipif(HostMemory().cannot_share is not None, reason="no heaps here"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
PAGE = mmap.PAGESIZE


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


def test_heaps_are_added_when_first_needed_and_dropped_when_empty() -> None:
    gc.collect()
    before = len(heap_files())
    region = HostMemory().reserve(64 * PAGE, heap_bytes=8 * PAGE)

    def num_heaps() -> int:
        assert region.num_heaps == len(heap_files()) - before
        assert region.backed_bytes() == region.committed_bytes
        return region.num_heaps

    assert num_heaps() == 0
    region.commit(20 * PAGE, PAGE)
    assert num_heaps() == 1
    region.commit(21 * PAGE, PAGE)
    assert num_heaps() == 1
    region.commit(7 * PAGE, 2 * PAGE)  # across a border
    assert num_heaps() == 3
    region.commit(30 * PAGE, PAGE, stride=8 * PAGE, count=4)
    assert num_heaps() == 7
    region.decommit(20 * PAGE, PAGE)
    assert num_heaps() == 7
    region.decommit(21 * PAGE, PAGE)
    assert num_heaps() == 6
    region.decommit(30 * PAGE, PAGE, stride=8 * PAGE, count=4)
    assert num_heaps() == 2
    region.commit(21 * PAGE, PAGE)  # a heap comes back, empty
    assert region.tensor(torch.uint8).view(-1, PAGE)[21].eq(0).all()
    assert num_heaps() == 3
    region.close()
    assert num_heaps() == 0


def test_a_region_dropped_without_close_leaks_no_file() -> None:
    gc.collect()
    files, bytes_, mappings = len(heap_files()), memfd_bytes(), num_mappings()
    memory = HostMemory()
    for _ in range(20):
        region = memory.reserve(32 * PAGE, heap_bytes=8 * PAGE)
        region.commit(0, 32 * PAGE)
        window = region.window(32 * PAGE)
        for place in range(16):
            window.map(2 * place * PAGE, place * PAGE, PAGE)
        del region, window  # by counting references: no cycle waits for the collector
    assert len(heap_files()) == files
    assert memfd_bytes() == bytes_
    del memory
    gc.collect()
    assert num_mappings() <= mappings + 10


def test_a_shown_page_survives_a_dropped_heap_file() -> None:
    """A dropped region's file is closed; what a tensor sees stays, until the tensor goes."""
    region = HostMemory().reserve(8 * PAGE, heap_bytes=8 * PAGE)
    region.commit(0, PAGE)
    window = region.window(PAGE)
    window.map(0, 0, PAGE)
    seen = window.tensor(torch.uint8)
    seen.fill_(5)
    del region, window
    gc.collect()
    assert seen.eq(5).all()


def test_reading_takes_no_resident_memory() -> None:
    region = HostMemory().reserve(8 * PAGE, heap_bytes=8 * PAGE)
    region.commit(0, 8 * PAGE)
    window = region.window(256 * 2**20)
    window.map(0, 0, 8 * PAGE)
    everything = window.tensor(torch.int64)
    int(everything[:PAGE].sum())
    before = rollup_bytes("Rss"), rollup_bytes("Pss_Shmem")
    assert torch.count_nonzero(everything) == 0
    assert rollup_bytes("Rss") - before[0] < 2**20
    assert rollup_bytes("Pss_Shmem") == before[1]
    assert region.backed_bytes() == 8 * PAGE


def test_a_page_seen_often_counts_once() -> None:
    region = HostMemory().reserve(256 * PAGE, heap_bytes=256 * PAGE)
    before = rollup_bytes("Pss_Shmem")
    region.commit(0, 256 * PAGE)
    region.tensor(torch.uint8).fill_(1)
    windows = [region.window(256 * PAGE) for _ in range(16)]
    for window in windows:
        window.map(0, 0, 256 * PAGE)
        assert int(window.tensor(torch.uint8).view(256, PAGE)[:, 0].sum()) == 256
    assert region.backed_bytes() == region.committed_bytes == 256 * PAGE
    assert abs(rollup_bytes("Pss_Shmem") - before - 256 * PAGE) <= PAGE


def test_neighbours_are_one_mapping() -> None:
    region = HostMemory().reserve(64 * PAGE, heap_bytes=64 * PAGE)
    region.commit(0, 64 * PAGE)
    window = region.window(128 * PAGE)
    first = window.tensor(torch.uint8).data_ptr()

    def of_pages() -> int:
        """Mappings in the window that lead to pages: other threads of this process map too."""
        found = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, rights = int(line.partition("-")[0], 16), line.split()[1]
            found += first <= start < first + 128 * PAGE and rights.startswith("rw")
        return found

    assert of_pages() == 0
    for place in range(64):
        window.map(place * PAGE, place * PAGE, PAGE)
    assert of_pages() == 1
    window.map(32 * PAGE, 0, PAGE)
    assert of_pages() == 3
    window.map(32 * PAGE, 32 * PAGE, PAGE)  # as it was: one again
    assert of_pages() == 1


def test_a_refused_commit_gives_back_heaps_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    region = HostMemory().reserve(64 * PAGE, heap_bytes=8 * PAGE)
    region.commit(0, 4 * PAGE)
    region.tensor(torch.uint8)[: 4 * PAGE] = 3
    create = os.memfd_create
    made = []

    def run_out(*arguments: object) -> int:
        if len(made) == 3:
            raise OSError(24, "Too many open files")
        made.append(create(*arguments))
        return made[-1]

    monkeypatch.setattr(os, "memfd_create", run_out)
    with pytest.raises(MemoryUnavailable, match=r"refused pages .* 16\.00 KiB of this region"):
        region.commit(4 * PAGE, 60 * PAGE)
    monkeypatch.undo()
    assert region.num_heaps == 1
    assert region.backed_bytes() == region.committed_bytes == 4 * PAGE
    assert region.tensor(torch.uint8)[: 4 * PAGE].eq(3).all()
    region.commit(4 * PAGE, 60 * PAGE)
    assert region.backed_bytes() == region.committed_bytes == 64 * PAGE


AT_THE_LIMIT = """
    from pathlib import Path
    from quire.errors import MemoryUnavailable
    from quire.memory import HostMemory
    PAGE, LIMIT = HostMemory().page_bytes, int(Path("/proc/sys/vm/max_map_count").read_text())

    def num_mappings():
        with Path("/proc/self/maps").open() as maps:  # a whole text might find no address
            return sum(1 for _ in maps)

    def refused(call, *arguments):
        try:
            call(*arguments)
        except MemoryUnavailable as error:
            return str(error)
        raise AssertionError("not refused")

    memory = HostMemory()
    region = memory.reserve(4096 * PAGE, heap_bytes=512 * PAGE)
    region.commit(0, 4096 * PAGE)
    runs = [region.window(64 * PAGE) for _ in range(16)]
    for run in runs:
        run.map(0, 0, 64 * PAGE)
    scattered = region.window(2 * LIMIT * PAGE)

    def fill():
        for place in range(LIMIT):
            scattered.map(2 * place * PAGE, place % 4096 * PAGE, PAGE)

    text = refused(fill)
    assert "vm.max_map_count" in text and "4.00 KiB" in text and "max_num_seqs" in text, text
    full = num_mappings()
    assert LIMIT - 20 < full <= LIMIT + 2, full
"""


def at_the_limit(code: str) -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 300_000:
        pytest.skip(f"the limit is far away: vm.max_map_count is {limit}")
    run_alone(AT_THE_LIMIT, code)


def test_everything_is_given_back_at_the_limit_of_mappings() -> None:
    at_the_limit(
        """
        scattered.unmap(0, PAGE)  # one mapping whole, which the kernel refuses at first
        scattered.unmap(100 * PAGE, 200 * PAGE)
        assert num_mappings() < full - 150
        refused(fill)
        region.decommit(512 * PAGE, 512 * PAGE)  # a whole heap: its file goes too
        assert region.num_heaps == 7 and region.backed_bytes() == 3584 * PAGE
        region.decommit(0, PAGE, stride=2 * PAGE, count=64)
        assert region.backed_bytes() == region.committed_bytes == 3520 * PAGE
        region.commit(0, PAGE, stride=2 * PAGE, count=64)
        assert num_mappings() <= full
        scattered.close()
        assert num_mappings() < 1000
        region.close()
        assert num_mappings() < 1000 and region.committed_bytes == 0
        """
    )


def test_closing_the_region_at_the_limit_of_mappings() -> None:
    at_the_limit(
        """
        region.close()
        assert num_mappings() < 1000
        """
    )


def test_cutting_at_the_limit_of_mappings_ends_with_an_error_and_spoils_nothing() -> None:
    """Each unmap in the midst of a run takes mappings; without any, the rest still works."""
    at_the_limit(
        """
        num_cut = 0
        try:
            for run in runs:
                run.unmap(20 * PAGE, PAGE)
                num_cut += 1
        except MemoryUnavailable as error:
            assert "vm.max_map_count" in str(error) and "cut" in str(error), error
        assert 0 < num_cut < 16, num_cut
        text = refused(runs[-1].map, 30 * PAGE, 0, PAGE)  # copy-on-write in the midst
        assert "vm.max_map_count" in text
        assert "address space" in refused(region.window, PAGE)
        for place in range(0, 40, 2):
            scattered.unmap(2 * place * PAGE, PAGE)
        del run, runs[3:8]  # windows dropped, the addresses go
        scattered.unmap(1000 * PAGE, 1000 * PAGE)
        assert num_mappings() < full - 900
        runs[-1].unmap(30 * PAGE, PAGE)
        scattered.close()
        region.close()
        assert num_mappings() < 1000
        """
    )


class Forked:
    """A region and a window of this process, and what a child of it must and must not do."""

    def __init__(self) -> None:
        self.region = HostMemory().reserve(32 * PAGE, heap_bytes=8 * PAGE)
        self.region.commit(0, 32 * PAGE)
        self.window = self.region.window(64 * PAGE)
        self.window.map(0, 0, 16 * PAGE)
        self.flat = self.region.tensor(torch.uint8).fill_(5)
        self.seen = self.window.tensor(torch.uint8)

    def child_reads_zeros(self) -> None:
        for tensor in (self.flat, self.seen):  # without torch, whose threads do not survive a fork
            assert not any(ctypes.string_at(tensor.data_ptr(), tensor.numel()))

    def child_is_refused(self) -> None:
        self.child_reads_zeros()
        for call in (
            lambda: self.region.commit(0, PAGE),
            lambda: self.region.decommit(0, PAGE),
            lambda: self.region.window(PAGE),
            lambda: self.region.tensor(torch.uint8),
            lambda: self.window.map(0, 0, PAGE),
        ):
            with pytest.raises(MemoryUnavailable, match="belongs to the parent process"):
                call()
        self.window.unmap(0, PAGE)
        self.region.close()
        self.window.close()

    def child_forgets(self) -> None:
        del self.region, self.window, self.flat, self.seen
        gc.collect()

    def check_parent(self) -> None:
        assert self.flat.eq(5).all()
        assert self.seen[: 16 * PAGE].eq(5).all()
        assert self.region.committed_bytes == self.region.backed_bytes() == 32 * PAGE
        assert self.region.num_heaps == 4


def in_child(check: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_touches_nothing() -> None:
    forked = Forked()
    in_child(forked.child_reads_zeros)
    in_child(forked.child_is_refused)
    in_child(forked.child_forgets)
    in_child(lambda: (forked.child_is_refused(), forked.child_forgets()))
    in_child(lambda: in_child(forked.child_is_refused))  # a grandchild
    forked.check_parent()
    forked.region.decommit(0, PAGE)
    forked.region.commit(0, PAGE)
    forked.window.map(16 * PAGE, 31 * PAGE, PAGE)
    assert forked.flat[:PAGE].eq(0).all()
    assert forked.flat[PAGE:].eq(5).all()
    assert forked.seen[16 * PAGE : 17 * PAGE].eq(5).all()


def test_a_child_of_multiprocessing_touches_nothing() -> None:
    forked = Forked()
    for target in (forked.child_is_refused, forked.child_forgets):
        child = multiprocessing.get_context("fork").Process(target=target)
        child.start()
        child.join()
        assert child.exitcode == 0
        forked.check_parent()


def test_a_child_that_ends_as_programs_do_touches_nothing() -> None:
    run_alone(
        """
        import os, sys
        from quire.memory import HostMemory
        memory = HostMemory()
        PAGE = memory.page_bytes
        region = memory.reserve(32 * PAGE, heap_bytes=8 * PAGE)
        region.commit(0, 32 * PAGE)
        window = region.window(64 * PAGE)
        window.map(0, 0, 16 * PAGE)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert region.committed_bytes == region.backed_bytes() == 32 * PAGE
        """
    )


def test_a_child_reads_zeros_though_only_tensors_were_kept() -> None:
    forked = Forked()
    del forked.region, forked.window
    gc.collect()
    in_child(forked.child_reads_zeros)
    assert forked.flat.eq(5).all()
    assert forked.seen[: 16 * PAGE].eq(5).all()


def test_what_the_parent_gives_back_a_child_does_not_keep() -> None:
    forked = Forked()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    forked.region.decommit(PAGE, 6 * PAGE)  # of a heap that stays
    assert forked.region.committed_bytes == forked.region.backed_bytes() == 26 * PAGE
    os.write(go[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for end in (*ready, *go):
        os.close(end)


def test_a_child_makes_memory_of_its_own() -> None:
    def make() -> None:
        own = HostMemory().reserve(8 * PAGE, heap_bytes=8 * PAGE)
        own.commit(0, 8 * PAGE)
        window = own.window(8 * PAGE)
        window.map(0, PAGE, PAGE)
        seen = window.tensor(torch.uint8)
        ctypes.memset(seen.data_ptr(), 6, PAGE)
        assert ctypes.string_at(own.tensor(torch.uint8).data_ptr() + PAGE, PAGE) == b"\6" * PAGE
        assert own.backed_bytes() == own.committed_bytes == 8 * PAGE

    forked = Forked()
    in_child(make)
    forked.check_parent()


def test_the_room_loads_no_torch_with_heaps() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from quire.memory import HostMemory\n"
        "memory = HostMemory()\n"
        "region = memory.reserve(1, heap_bytes=memory.page_bytes)\n"
        "region.commit(0, region.nbytes)\n"
        "window = region.window(region.nbytes)\n"
        "window.map(0, 0, region.nbytes)\n"
        "region.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
