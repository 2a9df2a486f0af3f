"""A system that refuses: any one call, all calls from one on, and its real limits.

Afterwards the counts are the system's, the same call works when it is repeated, and nothing is
left. A call that only asks to be repeated is.
"""

import errno
import gc
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from conformance.memory_cases import heap_files, is_mapped, memfd_bytes_from_now
from forks import run_fork
from memory.faults import Faults, install
from quire.errors import MemoryUnavailable
from quire.memory import HostMemory, Region, Window
from quire.memory.machine.probe import resident_bytes
from quire.memory.page_cache import PageCacheMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts by the kernel's own files")
PAGE = HostMemory().page_bytes
HUGE = 2**21


@dataclass(slots=True)
class Scene:
    """A provider's life in steps. Each either happens or raises MemoryUnavailable."""

    make: Callable[[], Any]
    in_heaps: bool = False
    provider: Any = None
    region: Region | None = None
    window: Window | None = None
    address: int = 0
    heap_bytes: Callable[[], int] = field(default_factory=memfd_bytes_from_now)

    def steps(self) -> Iterator[tuple[str, Callable[[], None], int]]:
        """(name, what to do, bytes committed after it)."""
        yield "make", self.build, 0
        yield "reserve", self.reserve, 0
        yield "commit a piece", lambda: self.verb("commit", 0, 3), 3
        yield "commit pieces", lambda: self.verb("commit", 5, 2, 4, 5), 13
        yield "decommit from the middle", lambda: self.verb("decommit", 5, 1, 8, 3), 10
        if self.in_heaps:
            yield "open a window", self.open, 10
            yield "map", lambda: self.seen.map(0, PAGE, 2 * PAGE), 10
            yield "map elsewhere", lambda: self.seen.map(5 * PAGE, 0, PAGE), 10
            yield "map over", lambda: self.seen.map(PAGE, 0, PAGE), 10
            yield "unmap", lambda: self.seen.unmap(0, PAGE), 10
            yield "close the window", lambda: self.seen.close(), 10
        yield "commit it again", lambda: self.verb("commit", 5, 1, 8, 3), 13
        yield "decommit the rest", lambda: self.verb("decommit", 5, 2, 4, 5), 3
        yield "decommit all", lambda: self.verb("decommit", 0, 3), 0
        many = 20 if self.in_heaps else 3 * HUGE // PAGE
        yield "commit a long piece", lambda: self.verb("commit", 1, many), many
        yield "close", lambda: self.open_region.close(), 0

    @property
    def open_region(self) -> Region:
        assert self.region is not None
        return self.region

    @property
    def seen(self) -> Window:
        assert self.window is not None
        return self.window

    def build(self) -> None:
        self.provider = self.make()

    def reserve(self) -> None:
        heap_bytes = 8 * PAGE if self.in_heaps else None
        self.region = self.provider.reserve(4 * HUGE, heap_bytes=heap_bytes)
        self.address = self.region.tensor(torch.uint8).data_ptr()

    def open(self) -> None:
        self.window = self.open_region.window(16 * PAGE)

    def verb(self, name: str, first: int, pages: int, stride: int = 0, count: int = 1) -> None:
        call = getattr(self.open_region, name)
        call(first * PAGE, pages * PAGE, stride=stride * PAGE, count=count)

    def exists(self) -> int | None:
        """Bytes of pages, by the system's count."""
        if self.in_heaps:
            return self.heap_bytes()
        return resident_bytes(self.address, 4 * HUGE) if is_mapped(self.address) else 0

    def counted(self) -> int:
        if self.region is None:
            return 0
        if isinstance(self.provider, PageCacheMemory):
            assert self.provider.kept_bytes + self.region.committed_bytes == (
                self.provider.backed_bytes
            )
            return self.provider.backed_bytes
        return self.region.committed_bytes

    def leave(self) -> None:
        self.provider = self.region = self.window = None


SCENES: dict[str, Callable[[], Scene]] = {
    "host": lambda: Scene(HostMemory),
    "portable": lambda: Scene(lambda: HostMemory(portable=True)),
    "huge": lambda: Scene(lambda: HostMemory(huge_pages=True)),
    "locked": lambda: Scene(lambda: HostMemory(locked=True)),
    "kept": lambda: Scene(lambda: PageCacheMemory(HostMemory(), limit_bytes=6 * PAGE)),
    "heaps": lambda: Scene(HostMemory, in_heaps=True),
    "kept heaps": lambda: Scene(
        lambda: PageCacheMemory(HostMemory(), limit_bytes=6 * PAGE), in_heaps=True
    ),
}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    gc.collect()
    gc.disable()  # collecting others' memory in the midst of a scene would count as its calls
    yield install(monkeypatch)
    gc.enable()


@pytest.fixture(params=SCENES)
def name(request: pytest.FixtureRequest) -> str:
    try:
        scene = SCENES[request.param]()
        provider = scene.make()
        region = provider.reserve(4 * HUGE)
    except MemoryUnavailable as refused:
        pytest.skip(f"not on this machine: {refused}")
    region.close()
    if scene.in_heaps and provider.cannot_share is not None:
        pytest.skip(f"no heaps: {provider.cannot_share}")
    return request.param


def calls_of(name: str, faults: Faults) -> list[str]:
    """The system's calls in a scene where all goes well."""
    scene = SCENES[name]()
    faults.disarm()
    for _, act, committed in scene.steps():
        act()
        check(scene, committed)
    calls = list(faults.calls)
    scene.leave()
    return calls


def check(scene: Scene, committed: int) -> None:
    assert scene.region is None or scene.region.committed_bytes == committed * PAGE
    assert scene.exists() in (scene.counted(), None)


def play(scene: Scene, faults: Faults, *, lasting: bool = False) -> list[str]:
    """All steps, each repeated if it is refused; the names of those that were."""
    refused: list[str] = []
    messages: list[str] = []
    committed = 0
    for name, act, after in scene.steps():
        try:
            act()
        except MemoryUnavailable as error:
            refused.append(name)
            messages.append(str(error))
            if lasting:
                faults.disarm()
            else:
                check(scene, committed)
            act()
        if name == "make" and scene.in_heaps and scene.provider.cannot_share is not None:
            faults.disarm()
            scene.build()  # it says why it has no heaps; the next one has
        check(scene, after)
        committed = after
    assert all("Errno" in message for message in messages)
    return refused


# Which calls the system lets be interrupted, or asks to be repeated later.
REPEATED = {
    errno.EINTR: {"madvise", "mlock2", "munlock", "fallocate"},
    errno.EAGAIN: {"madvise", "mlock2", "munlock"},
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("number", [errno.ENOMEM, *REPEATED], ids=errno.errorcode.get)
def test_one_call_fails(name: str, number: int, faults: Faults) -> None:
    files = heap_files()
    calls = calls_of(name, faults)
    assert len(calls) > 15
    for first, call in enumerate(calls, 1):
        if number in REPEATED and call not in REPEATED[number]:
            continue
        scene = SCENES[name]()
        faults.arm(first, number)
        refused = play(scene, faults)
        assert len(refused) <= 1
        if number in REPEATED:
            assert not refused, f"{call}, call {first}, was not repeated"
        leave(scene, faults, files)


@pytest.mark.sampled(3)
def test_all_calls_fail_from_one_on(
    name: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even undoing works. When the system is itself again, the same call puts all right."""
    caplog.set_level("CRITICAL")  # a record of an error keeps what the error's frames hold
    files = heap_files()
    for first in range(1, len(calls_of(name, faults)) + 1):
        scene = SCENES[name]()
        # A range of our own is always unmapped whole: that fails at the limit of mappings only.
        faults.arm(first, errno.ENOMEM, lasting=True, except_for="munmap")
        assert len(play(scene, faults, lasting=True)) <= 1
        leave(scene, faults, files)


def leave(scene: Scene, faults: Faults, files: list[int]) -> None:
    """Go, and leave nothing behind."""
    address = scene.address
    faults.disarm()
    scene.leave()
    assert not is_mapped(address)
    assert heap_files() == files


def test_a_region_that_cannot_be_emptied_says_so_when_it_is_closed(
    faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    region = HostMemory().reserve(PAGE)
    region.commit(0, PAGE)
    kept = region.tensor(torch.uint8)
    faults.arm(1, errno.ENOMEM, lasting=True)
    region.close()
    assert "keeps up to 4.00 KiB" in caplog.text
    assert region.committed_bytes == 0
    assert kept.eq(0).all()


# -- the system's own limits


def run(code: str) -> None:
    done = run_fork(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


FILL = """
    import mmap, torch
    from quire.errors import MemoryUnavailable
    from quire.memory import HostMemory
    from quire.memory.page_cache import PageCacheMemory
    from quire.memory.machine.probe import resident_bytes

    PAGE = mmap.PAGESIZE

    def fill():
        "Take every mapping that this process may have."
        room = [bytearray(512) for _ in range(20_000)]  # for small objects later
        taken = []
        try:
            while True:
                taken.append(mmap.mmap(-1, PAGE))  # shared ones, which never become one
        except OSError:
            return taken

    def refused(call, *words):
        try:
            call()
        except MemoryUnavailable as error:
            for word in words:
                assert word in str(error), error
            return True
        return False
"""


@pytest.mark.full
def test_private_memory_works_at_the_limit_of_mappings() -> None:
    run(
        textwrap.dedent(FILL)
        + textwrap.dedent(
            """
            regions = [HostMemory(huge_pages=huge).reserve(64 << 20) for huge in (False, True)]
            kept = PageCacheMemory(HostMemory(huge_pages=True), limit_bytes=16 << 20)
            regions.append(kept.reserve(64 << 20))
            addresses = [region.tensor(torch.uint8).data_ptr() for region in regions]
            host = HostMemory()
            taken = fill()
            assert refused(lambda: host.reserve(PAGE), "address space")
            assert refused(HostMemory, "vm.max_map_count")
            for region, address in zip(regions, addresses):
                region.commit(PAGE, 5 << 20)
                region.commit(32 << 20, PAGE, stride=2 * PAGE, count=100)
                region.decommit(PAGE, 1 << 20, stride=2 << 20, count=2)
                backed = region.committed_bytes + (2 << 20 if region is regions[2] else 0)
                assert resident_bytes(address, 64 << 20) == backed
            kept.release_kept()
            for region, address in zip(regions, addresses):
                region.close()
                assert resident_bytes(address, 64 << 20) == 0
            taken.clear()
            host.reserve(PAGE).close()
            """
        )
    )


@pytest.mark.full
def test_windows_reach_the_limit_of_mappings_and_come_back_from_it() -> None:
    if (why := HostMemory().cannot_share) is not None:
        pytest.skip(f"no heaps: {why}")
    run(
        textwrap.dedent(FILL)
        + textwrap.dedent(
            """
            import os
            host = HostMemory()
            region = host.reserve(64 * PAGE, heap_bytes=16 * PAGE)
            region.commit(0, 64 * PAGE)
            window = region.window(100_000 * PAGE)
            flat = window.tensor(torch.uint8)
            taken = fill()
            for _ in range(2000):
                taken.pop()
            shown = []
            while not refused(
                lambda: window.map(2 * len(shown) * PAGE, 3 * PAGE, PAGE), "vm.max_map_count"
            ):
                shown.append(2 * len(shown))
            assert 900 < len(shown) < 2010, len(shown)
            # Releasing works at the limit, in any order.
            for page in shown[::2] + shown[1::2]:
                window.unmap(page * PAGE, PAGE)
            window.map(0, 0, 64 * PAGE)
            taken += fill()
            region.decommit(32 * PAGE, 32 * PAGE)
            region.close()
            assert region.committed_bytes == 0
            assert not flat[: 64 * PAGE].numpy().any()
            left = [name for name in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{name}")
                    and os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:quire")]
            assert not left, left
            """
        )
    )


def test_addresses_run_out_and_come_back() -> None:
    """As under ``prlimit --as``: it counts what is reserved."""
    if (why := HostMemory().cannot_share) is not None:
        pytest.skip(f"no heaps: {why}")
    run(
        textwrap.dedent(FILL)
        + textwrap.dedent(
            """
            import gc, resource
            host = HostMemory()
            kept = PageCacheMemory(host, limit_bytes=1 << 20)
            region = host.reserve(1 << 30, heap_bytes=1 << 20)
            torch.zeros(1), region.tensor(torch.uint8), gc.collect()
            used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status")
                        if line.startswith("VmSize:"))
            resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), -1))
            window = region.window(2 << 30)
            for reserve in (
                lambda: region.window(2 << 30),
                lambda: host.reserve(2 << 30),
                lambda: host.reserve(2 << 30, heap_bytes=1 << 20),
                lambda: kept.reserve(2 << 30),
            ):
                assert refused(reserve, "2.00 GiB of address space", "ulimit -v")
            region.commit(0, 3 << 20)  # what is reserved works on
            window.map(0, 1 << 20, 1 << 20)
            window.close()
            del window
            kept.reserve(2 << 30).commit(1 << 30, 1 << 20)
            """
        )
    )
