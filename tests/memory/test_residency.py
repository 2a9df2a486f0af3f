"""Kept pages, prefaulting, locking and keeping alive: counted, and as the kernel counts."""

import mmap
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import quire
from conformance.covering import only
from forks import run_fork
from quire.errors import MemoryUnavailable
from quire.memory import CheckedMemory, CountedMemory, FailingMemory, HostMemory, Region
from quire.memory.machine.probe import resident_bytes
from quire.memory.page_cache import PageCacheMemory
from quire.memory.residency import KeepAlive, host_memory, keep_freed_memory, resident_memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own files are Linux's")
PAGE = mmap.PAGESIZE
HUGE = 2**21


def resident(region: Region) -> int | None:
    return resident_bytes(region.tensor(torch.uint8).data_ptr(), region.nbytes)


def run(code: str, *before: str) -> None:
    """Run a script in a process of its own; ``before`` is a command that starts it."""
    code = textwrap.dedent(code)
    done = (
        subprocess.run(
            [*before, sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )
        if before
        else run_fork(code)
    )
    assert done.returncode == 0, done.stderr


# -- keeping


def test_what_is_given_back_is_kept_and_given_out_again_as_zeros() -> None:
    counted = CountedMemory(HostMemory())
    kept = PageCacheMemory(counted, limit_bytes=8 * PAGE)
    region = kept.reserve(100 * PAGE)
    every_page = region.tensor(torch.uint8).view(100, PAGE)

    region.commit(10 * PAGE, 4 * PAGE)
    every_page[10:14] = 7
    region.decommit(10 * PAGE, 4 * PAGE)
    assert (region.committed_bytes, kept.kept_bytes, kept.backed_bytes) == (0, 4 * PAGE, 4 * PAGE)
    assert resident(region) in (4 * PAGE, None)
    assert every_page.eq(0).all()
    assert counted.returned_bytes == 0

    region.commit(11 * PAGE, PAGE, stride=2 * PAGE, count=2)
    assert (region.committed_bytes, kept.kept_bytes) == (2 * PAGE, 2 * PAGE)
    assert every_page[11].eq(0).all()
    assert counted.peak_committed_bytes == 4 * PAGE  # nothing was asked of the system again


def test_a_piece_may_be_kept_in_part() -> None:
    kept = PageCacheMemory(CheckedMemory(HostMemory()), limit_bytes=100 * PAGE)
    region = kept.reserve(100 * PAGE)
    region.commit(3 * PAGE, 2 * PAGE, stride=10 * PAGE, count=3)
    region.decommit(3 * PAGE, 2 * PAGE, stride=10 * PAGE, count=3)
    region.commit(0, 8 * PAGE, stride=10 * PAGE, count=4)
    assert (region.committed_bytes, kept.kept_bytes) == (32 * PAGE, 0)
    assert resident(region) in (32 * PAGE, None)


def test_no_more_is_kept_than_the_limit_allows() -> None:
    kept = PageCacheMemory(HostMemory(), limit_bytes=4 * PAGE)
    region = kept.reserve(100 * PAGE)
    region.commit(0, 10 * PAGE)  # the limit is on keeping: it refuses nothing
    for start in (0, 3 * PAGE):  # six pages above the limit, then three
        region.decommit(start, 3 * PAGE)
    assert (kept.kept_bytes, kept.backed_bytes) == (0, 4 * PAGE)
    region.decommit(6 * PAGE, 4 * PAGE)
    assert (kept.kept_bytes, kept.backed_bytes) == (4 * PAGE, 4 * PAGE)

    assert kept.move_limit(2 * PAGE) == 2 * PAGE
    assert resident(region) in (2 * PAGE, None)


def test_kept_pages_make_room_for_pages_elsewhere() -> None:
    kept = PageCacheMemory(HostMemory(), limit_bytes=4 * PAGE)
    one, other = kept.reserve(10 * PAGE), kept.reserve(10 * PAGE)
    one.commit(0, 4 * PAGE)
    one.decommit(0, 3 * PAGE)
    other.commit(0, 2 * PAGE)
    assert kept.backed_bytes <= 4 * PAGE
    assert one.committed_bytes + other.committed_bytes + kept.kept_bytes == kept.backed_bytes

    # Those that are about to be used stay, though they are kept when room is made.
    one.decommit(3 * PAGE, PAGE)
    other.decommit(0, PAGE)
    other.commit(5 * PAGE, PAGE)
    other.commit(0, PAGE)
    assert other.committed_bytes == 3 * PAGE
    assert resident(other) in (3 * PAGE + other.kept_bytes, None)


def test_a_refused_commit_has_changed_nothing() -> None:
    failing = FailingMemory(HostMemory(), failing={2, 4, 5})
    kept = PageCacheMemory(failing, limit_bytes=100 * PAGE)
    region = kept.reserve(100 * PAGE)
    region.commit(4 * PAGE, 4 * PAGE)
    region.decommit(4 * PAGE, 4 * PAGE)
    for asked in (
        {"offset": 0, "nbytes": 8 * PAGE},  # commit 2: the missing half is refused
        {"offset": 2 * PAGE, "nbytes": 8 * PAGE},  # 3 and 4: what follows the kept ones is
        {"offset": 20 * PAGE, "nbytes": PAGE},  # 5: none of it is kept
    ):
        with pytest.raises(MemoryUnavailable):
            region.commit(**asked)
        assert (region.committed_bytes, kept.kept_bytes, kept.backed_bytes) == (
            0,
            4 * PAGE,
            4 * PAGE,
        )
        assert resident(region) in (4 * PAGE, None)
    region.commit(0, 12 * PAGE)
    assert resident(region) in (12 * PAGE, None)


def test_closing_gives_back_what_is_kept() -> None:
    kept = PageCacheMemory(HostMemory(), limit_bytes=100 * PAGE)
    region, other = kept.reserve(10 * PAGE), kept.reserve(10 * PAGE)
    region.commit(0, 8 * PAGE)
    region.decommit(0, 4 * PAGE)
    other.commit(0, PAGE)
    address = region.tensor(torch.uint8).data_ptr()
    kept_tensor = region.tensor(torch.uint8)
    region.close()
    region.close()
    assert (region.committed_bytes, kept.kept_bytes, kept.backed_bytes) == (0, 0, PAGE)
    assert resident_bytes(address, 10 * PAGE) in (0, None)
    assert kept_tensor.eq(0).all()
    for late in (region.commit, region.decommit):
        with pytest.raises(ValueError, match="closed"):
            late(0, PAGE)


def test_heaps_are_kept_too() -> None:
    host = HostMemory()
    if host.cannot_share is not None:
        pytest.skip(f"no heaps: {host.cannot_share}")
    kept = PageCacheMemory(host, limit_bytes=100 * PAGE)
    region = kept.reserve(16 * PAGE, heap_bytes=4 * PAGE)
    window = region.window(4 * PAGE)
    region.commit(2 * PAGE, 4 * PAGE)
    region.tensor(torch.uint8)[2 * PAGE : 6 * PAGE] = 3
    window.map(0, 5 * PAGE, PAGE)
    assert window.tensor(torch.uint8)[0] == 3
    window.unmap(0, PAGE)
    region.decommit(2 * PAGE, 4 * PAGE)
    assert kept.kept_bytes == 4 * PAGE
    region.commit(5 * PAGE, PAGE)
    window.map(PAGE, 5 * PAGE, PAGE)
    assert window.tensor(torch.uint8)[PAGE : 2 * PAGE].eq(0).all()
    assert kept.release_kept() == 3 * PAGE
    window.unmap(PAGE, PAGE)
    region.close()


# -- prefaulting


@linux
def test_prefaulting_backs_the_capacity_and_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    memory = resident_memory(host_memory("prefault"), "prefault", 160 * 2**20)
    assert memory is not None
    regions = [memory.reserve(80 * 2**20) for _ in range(2)]
    seen: list[tuple[int, int]] = []
    assert memory.prefault(lambda done, total: seen.append((done, total))) == 160 * 2**20
    assert [resident(region) for region in regions] == [80 * 2**20] * 2
    assert memory.kept_bytes == 160 * 2**20
    assert [region.committed_bytes for region in regions] == [0, 0]
    assert seen[-1] == (160 * 2**20, 160 * 2**20)
    assert len(seen) == 4
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert "160.0 MiB of KV memory are backed at the start" in caplog.text
    memory.prefault()  # what is backed is backed
    assert memory.backed_bytes == 160 * 2**20

    regions[0].commit(0, 5 * HUGE + PAGE)
    assert memory.backed_bytes == 160 * 2**20
    regions[0].decommit(0, 5 * HUGE + PAGE)
    assert memory.release_kept() == 160 * 2**20
    assert [resident(region) for region in regions] == [0, 0]


def test_where_addresses_exceed_the_capacity_each_region_gets_its_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    kept = PageCacheMemory(HostMemory(), limit_bytes=32 * PAGE)
    one, other = kept.reserve(300 * PAGE), kept.reserve(100 * PAGE)
    kept.prefault()
    assert (one.kept_bytes, other.kept_bytes) == (24 * PAGE, 8 * PAGE)
    assert "other pages take their place" in caplog.text
    other.commit(50 * PAGE, 32 * PAGE)  # elsewhere than was guessed
    assert (kept.kept_bytes, kept.backed_bytes) == (0, 32 * PAGE)


def test_prefaulting_never_passes_the_limit() -> None:
    kept = PageCacheMemory(HostMemory(), limit_bytes=10 * PAGE)
    region = kept.reserve(20 * PAGE)
    region.commit(15 * PAGE, 5 * PAGE)
    kept.prefault()
    assert kept.backed_bytes <= 10 * PAGE


def test_prefaulting_that_is_refused_leaves_true_counts() -> None:
    kept = PageCacheMemory(FailingMemory(HostMemory(), failing={2}), limit_bytes=100 * PAGE)
    one, other = kept.reserve(10 * PAGE), kept.reserve(10 * PAGE)
    with pytest.raises(MemoryUnavailable):
        kept.prefault()
    assert kept.kept_bytes == kept.backed_bytes == 10 * PAGE
    assert {resident(one), resident(other)} in ({0, 10 * PAGE}, {None})
    kept.prefault()
    assert kept.backed_bytes == 20 * PAGE


def test_regions_are_asked_in_the_order_in_which_they_came() -> None:
    """Where they lie decides nothing, so that what is done again goes as it went."""
    memory = FailingMemory(HostMemory(), failing={16})
    kept = PageCacheMemory(memory, limit_bytes=100 * PAGE)
    regions = [kept.reserve(PAGE) for _ in range(30)]
    del regions[10:20]
    regions += [kept.reserve(PAGE) for _ in range(10)]  # some of them where the others lay
    with pytest.raises(MemoryUnavailable):
        kept.prefault()
    assert [region.kept_bytes for region in regions] == [PAGE] * 15 + [0] * 15


@linux
def test_huge_pages_never_back_more_than_was_asked_for() -> None:
    region = HostMemory(huge_pages=True).reserve(16 * HUGE)
    region.commit(PAGE, 4 * HUGE)
    assert region.committed_bytes == resident(region) == 4 * HUGE
    region.decommit(2 * PAGE, HUGE)
    region.commit(10 * HUGE, PAGE)
    region.tensor(torch.uint8)[10 * HUGE] = 1
    assert region.committed_bytes == resident(region) == 3 * HUGE + PAGE
    region.close()


# -- locking


@linux
def test_locked_memory_is_locked_and_counts_as_ever() -> None:
    run(
        """
        import torch
        from quire.memory.machine.probe import resident_bytes
        from quire.memory.residency import host_memory, resident_memory
        from quire.memory.host.syscalls import _locked_bytes as locked
        memory = resident_memory(host_memory("lock"), "lock", 4 << 20)
        assert locked() == 0
        assert memory.cannot_share == "it is told to be locked"
        region = memory.reserve(4 << 20)
        assert locked() == 4 << 20
        address = region.tensor(torch.uint8).data_ptr()
        count = lambda: resident_bytes(address, 4 << 20)
        assert count() == 0
        memory.prefault()
        assert count() == 4 << 20
        region.commit(0, 2 << 20)
        region.decommit(0, 1 << 20)
        memory.release_kept()
        assert count() == region.committed_bytes == 1 << 20
        kept = region.tensor(torch.uint8)
        region.close()
        assert locked() == 0 == count()
        assert kept.eq(0).all()
        """
    )


UNPRIVILEGED = """
    import ctypes, os, resource
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    if os.getuid() == 0:  # who may do anything is not limited
        os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # or /proc/self would not be ours
"""


@linux
def test_a_limit_on_locking_is_named_before_anything_is_taken() -> None:
    run(
        textwrap.dedent(
            """
            from quire.errors import MemoryUnavailable
            from quire.memory.residency import host_memory, resident_memory
            """
        )
        + textwrap.dedent(UNPRIVILEGED)
        + textwrap.dedent(
            """
            host = host_memory("lock")
            one = host.reserve(1 << 19)
            for refused in (
                lambda: host.reserve(1 << 20),
                lambda: resident_memory(host, "lock", 1 << 20),
            ):
                try:
                    refused()
                except MemoryUnavailable as error:
                    message = str(error)
                    for words in (
                        "refused to lock 1.00 MiB",
                        "RLIMIT_MEMLOCK is 1.00 MiB and 1.50 MiB are needed, 512.0 KiB of them",
                        "ulimit -l 1536", "LimitMEMLOCK=1572864", "CAP_IPC_LOCK",
                        "--residency prefault",
                    ):
                        assert words in message, message
                else:
                    raise AssertionError("not refused")
            one.commit(0, 1 << 19)
            one.close()
            assert resident_memory(host, "lock", 1 << 20) is not None
            """
        )
    )


def test_where_pages_cannot_be_locked_it_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryUnavailable, match=r"portable.*--residency prefault"):
        HostMemory(portable=True, locked=True)
    monkeypatch.setattr("quire.memory.host.syscalls.sys.platform", "darwin")
    with pytest.raises(MemoryUnavailable, match=r"darwin cannot lock.*--residency prefault"):
        HostMemory(locked=True)


def test_on_demand_keeps_nothing() -> None:
    assert resident_memory(host_memory("on-demand"), "on-demand", 2**30) is None


# -- keeping alive


def test_keep_alive_touches_until_it_is_stopped() -> None:
    touched, enough = 0, threading.Event()

    def touch() -> None:
        nonlocal touched
        touched += 1
        if touched == 3:
            enough.set()

    def num_threads() -> int:  # others of this process begin and end as they like
        return sum(each.name == "quire-keep-alive" for each in threading.enumerate())

    alive = KeepAlive(touch, interval_s=0.001)
    before = num_threads()
    alive.stop()
    alive.start()
    alive.start()
    assert num_threads() == before + 1
    assert enough.wait(30)
    alive.stop()
    alive.stop()
    assert num_threads() == before
    after = touched
    with alive:
        assert num_threads() == before + 1
    assert touched >= after


def test_touching_backs_nothing_and_changes_nothing() -> None:
    host = HostMemory()
    kept = PageCacheMemory(host, limit_bytes=10 * PAGE)
    regions = [kept.reserve(100 * PAGE)]
    if host.cannot_share is None:
        regions.append(kept.reserve(100 * PAGE, heap_bytes=10 * PAGE))
    for region in regions:
        region.commit(3 * PAGE, PAGE, stride=20 * PAGE, count=4)
        region.tensor(torch.uint8)[3 * PAGE] = 9
        region.decommit(63 * PAGE, PAGE)
    kept.touch()
    assert resident(regions[0]) in (4 * PAGE, None)
    assert [region.tensor(torch.uint8)[3 * PAGE] for region in regions] == [9] * len(regions)
    for region in regions:
        region.close()
    kept.touch()


def test_touching_beside_work_loses_no_page() -> None:
    kept = PageCacheMemory(HostMemory(), limit_bytes=20 * PAGE)
    region = kept.reserve(200 * PAGE)
    with KeepAlive(kept.touch, interval_s=0.0001):
        for round_ in range(300):
            first = round_ % 180
            region.commit(first * PAGE, 10 * PAGE)
            region.decommit(first * PAGE, 10 * PAGE)
            if round_ % 7 == 0:
                kept.release_kept()
    assert resident(region) in (kept.kept_bytes, None)
    kept.release_kept()
    assert resident(region) in (0, None)


@pytest.mark.full
@linux
@pytest.mark.parametrize("heap_bytes", only([None, 1 << 16], 1 << 16))
def test_a_forked_child_keeps_nothing_and_takes_nothing(heap_bytes: int | None) -> None:
    run(
        f"""
        import os, torch
        from quire.errors import MemoryUnavailable
        from quire.memory import HostMemory
        from quire.memory.page_cache import PageCacheMemory
        from quire.memory.residency import KeepAlive
        host = HostMemory()
        heap_bytes = {heap_bytes}
        if heap_bytes and host.cannot_share:
            raise SystemExit
        memory = PageCacheMemory(host, limit_bytes=1 << 20)
        region = memory.reserve(1 << 20, heap_bytes=heap_bytes)
        region.commit(0, 1 << 19)
        flat = region.tensor(torch.uint8)
        flat[: 1 << 19].numpy()[:] = 5
        region.decommit(0, 1 << 18)
        before = (region.committed_bytes, memory.kept_bytes, memory.backed_bytes)
        alive = KeepAlive(memory.touch, interval_s=0.0001)
        alive.start()
        for _ in range(20):  # one of them may meet the thread while it reads
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    alive.stop()
                    memory.touch()
                    assert memory.kept_bytes == 0
                    assert memory.release_kept() == 0
                    for verb in (region.commit, region.decommit):
                        try:
                            verb(0 if verb == region.commit else 1 << 18, 1 << 12)
                        except MemoryUnavailable as error:
                            assert heap_bytes and "parent process" in str(error)
                    assert not flat.numpy()[1 << 18 : 1 << 19].any()
                    region.close()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        alive.stop()
        assert (region.committed_bytes, memory.kept_bytes, memory.backed_bytes) == before
        assert (flat[1 << 18 : 1 << 19].numpy() == 5).all()
        """
    )


# -- under the engine


@pytest.mark.full
@pytest.mark.parametrize("strategy", only(["paged", "contiguous", "virtual"], "paged"))
def test_an_engine_over_prefaulted_memory_asks_the_system_for_nothing_more(strategy: str) -> None:
    prompts = ["def add(a, b):\n", "import os\n", "def add(a, c):\n"]
    params = quire.SamplingParams(max_tokens=40, temperature=0)
    options = {"cache": strategy, "max_model_len": 128, "max_num_seqs": 3}
    with quire.LLM(**options, kv_cache_memory_bytes=2**24) as llm:
        wanted = [completion.token_ids for completion in llm.generate(prompts, params)]
        limit_bytes = max(2**24, llm.memory.reserved_bytes)

    system = CountedMemory(HostMemory(huge_pages=True))
    kept = PageCacheMemory(system, limit_bytes=limit_bytes)
    with quire.LLM(**options, kv_cache_memory_bytes=2**24, provider=kept) as llm:
        kept.prefault()
        backed = system.committed_bytes
        assert 0 < backed <= limit_bytes
        for _ in range(2):
            assert [done.token_ids for done in llm.generate(prompts, params)] == wanted
            assert system.committed_bytes == backed
            assert system.returned_bytes == 0
        assert kept.backed_bytes == llm.memory.committed_bytes + kept.kept_bytes
    assert system.committed_bytes == 0


# -- everything at once

NUM_PAGES = 40


class KeptMachine(RuleBasedStateMachine):
    """Two regions under one limit against dictionaries: page → its value."""

    @initialize(limit=st.integers(0, 2 * NUM_PAGES), heaps=st.booleans())
    def reserve(self, limit: int, heaps: bool) -> None:
        self.failing: set[int] = set()
        self.host = HostMemory()
        self.failer = FailingMemory(self.host, failing=self.failing)
        self.counted = CountedMemory(CheckedMemory(self.failer))
        self.kept = PageCacheMemory(self.counted, limit_bytes=limit * PAGE)
        heap_bytes = 8 * PAGE if heaps and self.host.cannot_share is None else None
        self.regions = [
            self.kept.reserve(NUM_PAGES * PAGE, heap_bytes=given) for given in (None, heap_bytes)
        ]
        self.bytes = [region.tensor(torch.uint8).view(NUM_PAGES, PAGE) for region in self.regions]
        self.models: list[dict[int, int]] = [{}, {}]

    def pieces(
        self, data: st.DataObject, wanted: Callable[[int], bool]
    ) -> tuple[list[int], dict[str, int]] | None:
        candidates = [i for i in range(NUM_PAGES) if wanted(i)]
        if not candidates:
            return None
        first = data.draw(st.sampled_from(candidates))
        run = next((i for i in range(first, NUM_PAGES) if not wanted(i)), NUM_PAGES) - first
        length = data.draw(st.integers(1, run))
        stride = data.draw(st.integers(length, NUM_PAGES))
        pages: list[int] = []
        for start in range(first, NUM_PAGES - length + 1, stride):
            if not all(map(wanted, range(start, start + length))):
                break
            pages += range(start, start + length)
        return pages, {
            "offset": first * PAGE,
            "nbytes": length * PAGE,
            "stride": stride * PAGE,
            "count": len(pages) // length,
        }

    @rule(data=st.data(), number=st.integers(0, 1), fails=st.booleans())
    def commit(self, data: st.DataObject, number: int, fails: bool) -> None:
        model = self.models[number]
        if (drawn := self.pieces(data, lambda page: page not in model)) is None:
            return
        pages, asked = drawn
        before = self.regions[number].committed_bytes
        if fails:
            self.failing.add(self.failer.num_commits + 1)
        try:
            self.regions[number].commit(**asked)
        except MemoryUnavailable:
            assert fails
            assert self.regions[number].committed_bytes == before
        else:
            model.update(dict.fromkeys(pages, 0))
            for page in pages:
                assert not self.bytes[number][page].any()
        self.failing.clear()

    @precondition(lambda self: any(self.models))
    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        number = data.draw(st.sampled_from([i for i in (0, 1) if self.models[i]]))
        page = data.draw(st.sampled_from(sorted(self.models[number])))
        self.bytes[number][page] = value
        self.models[number][page] = value

    @rule(data=st.data(), number=st.integers(0, 1))
    def decommit(self, data: st.DataObject, number: int) -> None:
        model = self.models[number]
        if (drawn := self.pieces(data, lambda page: page in model)) is None:
            return
        pages, asked = drawn
        self.regions[number].decommit(**asked)
        for page in pages:
            del model[page]

    @rule(pages=st.one_of(st.none(), st.integers(0, NUM_PAGES)))
    def release_kept(self, pages: int | None) -> None:
        kept = self.kept.kept_bytes
        wanted = kept if pages is None else min(kept, pages * PAGE)
        assert wanted <= self.kept.release_kept(None if pages is None else pages * PAGE) <= kept

    @rule(limit=st.integers(0, 2 * NUM_PAGES))
    def move_the_limit(self, limit: int) -> None:
        backed = self.kept.backed_bytes
        assert self.kept.move_limit(limit * PAGE) == backed - self.kept.backed_bytes

    @rule()
    def prefault(self) -> None:
        self.kept.prefault()

    @rule()
    def touch(self) -> None:
        self.kept.touch()

    @invariant()
    def counts_agree(self) -> None:
        committed = [len(model) * PAGE for model in self.models]
        assert [region.committed_bytes for region in self.regions] == committed
        backed = self.kept.backed_bytes
        assert backed == self.counted.committed_bytes == sum(committed) + self.kept.kept_bytes
        assert not self.kept.kept_bytes or backed <= self.kept.limit_bytes
        exists = resident_bytes(self.bytes[0].data_ptr(), NUM_PAGES * PAGE)
        assert exists in (committed[0] + self.regions[0].kept_bytes, None)

    @invariant()
    def contents_agree(self) -> None:
        for number, model in enumerate(self.models):
            for page, value in model.items():
                assert self.bytes[number][page].eq(value).all()

    def teardown(self) -> None:
        if hasattr(self, "regions"):
            for region in self.regions:
                region.close()
            assert self.kept.backed_bytes == self.kept.kept_bytes == 0
            assert self.counted.committed_bytes == 0


TestKept = KeptMachine.TestCase
TestKept.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# -- what the C allocator keeps


@linux
def test_what_steps_free_is_kept_until_it_is_trimmed() -> None:
    run(
        """
        import resource
        import torch
        from quire.memory.residency import keep_freed_memory, trim_allocator

        PAGES = 8 * 5 * 2**20 // resource.getpagesize()

        def step():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            pieces = [torch.ones(5 * 2**20, dtype=torch.uint8) for _ in range(8)]
            del pieces
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        if not keep_freed_memory():
            raise SystemExit(0)  # no glibc here, or the tests' own environment sets it
        # The first ones find the places where all of a step fits.
        later = min(step() for _ in range(6))
        assert later < PAGES // 10, f"steps fault what those before freed: {later} of {PAGES}"
        assert trim_allocator()
        assert step() > PAGES // 2, "trimming kept what was free"
        """
    )


@linux
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_a_users_own_thresholds_stay(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert keep_freed_memory() is False
