"""What every MemoryProvider promises, over each of them and over stacks of them.

The counters are held against the system's own. Heaps and windows have a suite of their own.
"""

import gc
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance.memory_cases import CASES, GIB, MemoryCase, private_bytes
from quire.errors import MemoryUnavailable
from quire.memory import (
    CheckedMemory,
    CountedMemory,
    FailingMemory,
    HostMemory,
    LimitedMemory,
    MemoryProvider,
    Region,
)
from quire.memory.machine.probe import process_memory, resident_bytes

pytestmark = pytest.mark.device(default=True)

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> MemoryCase:
    return CASES[request.param]()


@pytest.fixture
def provider(case: MemoryCase) -> MemoryProvider:
    return case.provider


Resident = Callable[[Region], int]


@pytest.fixture
def resident(case: MemoryCase) -> Resident:
    """Bytes of a region that the system has backed."""
    return lambda region: case.resident(region.tensor(torch.uint8).data_ptr(), region.nbytes)


def test_reserving_takes_no_memory(provider: MemoryProvider, resident: Resident) -> None:
    before = process_memory()
    region = provider.reserve(64 * GIB)
    after = process_memory()

    assert region.nbytes == 64 * GIB
    assert region.committed_bytes == 0
    assert resident(region) == 0
    if before and after:
        assert after.rss_bytes - before.rss_bytes < 2**20


def test_a_reservation_is_rounded_up_to_pages(provider: MemoryProvider) -> None:
    page = provider.page_bytes
    assert provider.reserve(1).nbytes == page
    assert provider.reserve(page).nbytes == page
    assert provider.reserve(page + 1).nbytes == 2 * page


def test_an_impossible_reservation_is_refused(provider: MemoryProvider) -> None:
    for nbytes in (2**60, 2**70):
        with pytest.raises(MemoryUnavailable, match="address space"):
            provider.reserve(nbytes)


def test_committed_pages_exist_and_decommitted_ones_do_not(
    case: MemoryCase, provider: MemoryProvider, resident: Resident
) -> None:
    page = provider.page_bytes
    region = provider.reserve(1000 * page)
    every_byte = region.tensor(torch.uint8)

    region.commit(10 * page, 5 * page)
    region.commit(700 * page, 300 * page)
    assert region.committed_bytes == resident(region) == 305 * page

    every_byte[10 * page : 15 * page] = 7
    region.decommit(12 * page, page)
    assert region.committed_bytes == resident(region) == 304 * page
    assert every_byte[10 * page : 12 * page].eq(7).all()
    if case.reads_zeros:
        assert every_byte[12 * page : 13 * page].eq(0).all()
    assert every_byte[13 * page : 15 * page].eq(7).all()

    region.commit(12 * page, page)
    assert every_byte[12 * page : 13 * page].eq(0).all()
    assert region.committed_bytes == resident(region) == 305 * page


def test_reading_what_is_not_committed_gives_zeros_and_takes_nothing(
    case: MemoryCase, provider: MemoryProvider, resident: Resident
) -> None:
    if not case.reads_zeros:
        pytest.skip("nothing may be read there")
    region = provider.reserve(2**20)
    assert region.tensor(torch.int64).eq(0).all()
    assert region.committed_bytes == resident(region) == 0


def test_addresses_never_move(provider: MemoryProvider) -> None:
    page = provider.page_bytes
    region = provider.reserve(64 * page)
    address = region.tensor(torch.uint8).data_ptr()
    for offset in range(0, 64 * page, page):
        region.commit(offset, page)
    region.decommit(0, 64 * page)
    region.commit(32 * page, page)
    assert region.tensor(torch.bfloat16).data_ptr() == address
    assert address % page == 0


@pytest.mark.sampled(26)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_reach_the_whole_region(
    provider: MemoryProvider, resident: Resident, dtype: torch.dtype
) -> None:
    page = provider.page_bytes
    region = provider.reserve(16 * GIB)
    region.commit(0, page)
    region.commit(16 * GIB - 2 * page, 2 * page)
    flat = region.tensor(dtype)

    assert flat.dtype == dtype
    assert flat.shape == (16 * GIB // dtype.itemsize,)
    assert flat.is_contiguous()
    num = page // dtype.itemsize
    values = torch.randint(0, 2, (num,)).to(dtype)
    flat[:num] = values
    flat[-num:] = values
    assert torch.equal(flat[:num].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(flat[-num:].view(torch.uint8), values.view(torch.uint8))
    if dtype.itemsize <= 2:  # 64-bit offsets: a head's rows may begin beyond 2**31 elements
        assert flat.numel() - num > 2**31
        rows = flat.as_strided((2, num), (flat.numel() - num, 1))
        assert torch.equal(rows[1].view(torch.uint8), values.view(torch.uint8))
    assert region.committed_bytes == resident(region) == 3 * page


def test_tensors_see_the_same_bytes(provider: MemoryProvider) -> None:
    region = provider.reserve(1)
    region.commit(0, region.nbytes)
    region.tensor(torch.float32)[3] = 1.0
    assert region.tensor(torch.int32)[3] == 0x3F800000


def test_strided_pieces_are_committed_and_nothing_between(
    case: MemoryCase, provider: MemoryProvider, resident: Resident
) -> None:
    page = provider.page_bytes
    region = provider.reserve(100 * page)
    every_page = region.tensor(torch.uint8).view(100, page)

    region.commit(3 * page, 2 * page, stride=12 * page, count=8)
    assert region.committed_bytes == resident(region) == 16 * page
    wanted = {3 + 12 * i + j for i in range(8) for j in range(2)}
    for index in wanted:
        every_page[index] = 9
    assert resident(region) == 16 * page  # it was exactly these

    region.decommit(3 * page, 2 * page, stride=12 * page, count=4)
    assert region.committed_bytes == resident(region) == 8 * page
    wanted = {index for index in wanted if index >= 3 + 12 * 4}
    read = range(100) if case.reads_zeros else sorted(wanted)
    assert {index for index in read if every_page[index].any()} == wanted

    region.decommit(3 * page + 48 * page, page, stride=12 * page, count=4)
    region.decommit(4 * page + 48 * page, page, stride=12 * page, count=4)
    assert region.committed_bytes == resident(region) == 0


def test_pieces_may_touch(provider: MemoryProvider, resident: Resident) -> None:
    page = provider.page_bytes
    region = provider.reserve(8 * page)
    region.commit(0, 2 * page, stride=2 * page, count=4)
    assert region.committed_bytes == resident(region) == 8 * page


def test_closing_under_a_live_tensor_takes_the_pages_and_leaves_the_addresses(
    case: MemoryCase, provider: MemoryProvider
) -> None:
    region = provider.reserve(256 * provider.page_bytes)
    region.commit(0, region.nbytes)
    kept = region.tensor(torch.bfloat16)[1000:2000].view(10, 100)
    kept.fill_(2.0)
    address = kept.data_ptr()

    region.close()
    assert region.committed_bytes == 0
    assert case.resident(address, 64 * provider.page_bytes) == 0
    if case.reads_zeros:
        assert kept.eq(0).all()
    region.close()
    for late in (
        lambda: region.commit(0, provider.page_bytes),
        lambda: region.tensor(torch.uint8),
    ):
        with pytest.raises(ValueError, match="closed"):
            late()

    del late  # it holds the region
    if sys.platform == "linux":
        assert case.is_reserved(address)
        del kept, region
        gc.collect()
        case.poll()
        assert not case.is_reserved(address)


def test_a_tensor_outlives_a_region_that_was_only_dropped(provider: MemoryProvider) -> None:
    region = provider.reserve(256 * provider.page_bytes)
    region.commit(0, region.nbytes)
    kept = region.tensor(torch.float32)[5:10]
    kept.fill_(3.0)
    del region
    gc.collect()
    assert kept.eq(3).all()


def test_closing_without_tensors_unmaps(case: MemoryCase, provider: MemoryProvider) -> None:
    region = provider.reserve(256 * provider.page_bytes)
    address = region.tensor(torch.uint8).data_ptr()
    region.commit(0, region.nbytes)
    region.close()
    gc.collect()
    case.poll()
    if sys.platform == "linux":
        assert not case.is_reserved(address)


def test_regions_do_not_share(
    case: MemoryCase, provider: MemoryProvider, resident: Resident
) -> None:
    page = provider.page_bytes
    one, other = provider.reserve(4 * page), provider.reserve(4 * page)
    one.commit(0, 4 * page)
    other.commit(page, page)
    one.tensor(torch.uint8).fill_(1)
    readable = slice(None) if case.reads_zeros else slice(page, 2 * page)
    assert other.tensor(torch.uint8)[readable].eq(0).all()
    one.close()
    assert other.committed_bytes == resident(other) == page


@pytest.mark.parametrize("name", ["limited", "failing"])
def test_a_refusal_changes_nothing(name: str) -> None:
    page = HostMemory().page_bytes
    refusing: MemoryProvider
    if name == "limited":
        refusing = LimitedMemory(HostMemory(), limit_bytes=5 * page)
    else:
        refusing = FailingMemory(HostMemory(), failing={2, 3})
    region = refusing.reserve(100 * page)
    region.commit(0, 4 * page)
    region.tensor(torch.uint8)[0] = 1
    with pytest.raises(MemoryUnavailable):
        region.commit(10 * page, 2 * page)
    with pytest.raises(MemoryUnavailable):
        region.commit(10 * page, page, stride=4 * page, count=2)
    bytes_ = private_bytes(region.tensor(torch.uint8).data_ptr(), region.nbytes)
    assert region.committed_bytes == bytes_ == 4 * page
    assert region.tensor(torch.uint8)[0] == 1
    region.commit(10 * page, page)
    assert region.committed_bytes == 5 * page


def test_importing_the_room_loads_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import quire.memory, quire.memory.machine.probe\n"
        "region = quire.memory.CountedMemory(quire.memory.HostMemory()).reserve(1)\n"
        "region.commit(0, region.nbytes)\n"
        "region.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


NUM_PAGES = 48


class RegionMachine(RuleBasedStateMachine):
    """Random commits, refusals, writes and decommits against a dictionary: page → its value."""

    @initialize(portable=st.booleans())
    def reserve(self, portable: bool) -> None:
        self.limited = LimitedMemory(HostMemory(portable=portable), limit_bytes=GIB)
        self.counted = CountedMemory(self.limited)
        provider = CheckedMemory(self.counted)
        self.page = provider.page_bytes
        self.model: dict[int, int] = {}
        self.returned_pages = self.peak_pages = 0
        self.region = provider.reserve(NUM_PAGES * self.page)
        self.every_page = self.region.tensor(torch.uint8).view(NUM_PAGES, self.page)

    def pieces(
        self, data: st.DataObject, wanted: Callable[[int], bool]
    ) -> tuple[list[int], dict[str, int]]:
        """Pages, and how to ask for them: pieces of equal length and stride, all as wanted."""
        first = data.draw(st.sampled_from([i for i in range(NUM_PAGES) if wanted(i)]))
        run = next((i for i in range(first, NUM_PAGES) if not wanted(i)), NUM_PAGES) - first
        length = data.draw(st.integers(1, run))
        stride = data.draw(st.integers(length, NUM_PAGES))
        pages: list[int] = []
        for start in range(first, NUM_PAGES - length + 1, stride):
            piece = range(start, start + length)
            if not all(map(wanted, piece)):
                break
            pages += piece
        return pages, {
            "offset": first * self.page,
            "nbytes": length * self.page,
            "stride": stride * self.page,
            "count": len(pages) // length,
        }

    @precondition(lambda self: len(self.model) < NUM_PAGES)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        pages, asked = self.pieces(data, lambda index: index not in self.model)
        self.region.commit(**asked)
        self.model |= dict.fromkeys(pages, 0)
        self.peak_pages = max(self.peak_pages, len(self.model))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def decommit(self, data: st.DataObject) -> None:
        pages, asked = self.pieces(data, lambda index: index in self.model)
        self.region.decommit(**asked)
        self.returned_pages += len(pages)
        for index in pages:
            del self.model[index]

    @precondition(lambda self: len(self.model) < NUM_PAGES)
    @rule(data=st.data())
    def be_refused(self, data: st.DataObject) -> None:
        pages, asked = self.pieces(data, lambda index: index not in self.model)
        room = data.draw(st.integers(0, len(pages) - 1))
        self.limited.limit_bytes = (len(self.model) + room) * self.page
        with pytest.raises(MemoryUnavailable, match="limit"):
            self.region.commit(**asked)
        self.limited.limit_bytes = GIB

    @precondition(lambda self: self.model)
    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        index = data.draw(st.sampled_from(sorted(self.model)))
        self.every_page[index] = value
        self.model[index] = value

    @rule()
    def read(self) -> None:
        values = [self.model.get(index, 0) for index in range(NUM_PAGES)]
        wanted = torch.tensor(values, device="cpu")  # the host's memory, wherever others lie
        assert torch.equal(self.every_page, wanted.to(torch.uint8)[:, None].expand(-1, self.page))

    @invariant()
    def counts_agree(self) -> None:
        bytes_ = len(self.model) * self.page
        assert self.region.committed_bytes == bytes_
        assert self.limited.committed_bytes == self.counted.committed_bytes == bytes_
        assert self.counted.peak_committed_bytes == self.peak_pages * self.page
        assert self.counted.returned_bytes == self.returned_pages * self.page
        assert resident_bytes(self.every_page.data_ptr(), self.region.nbytes) in (bytes_, None)
        self.region.check()

    def teardown(self) -> None:
        if hasattr(self, "region"):
            self.region.close()
            assert self.every_page.eq(0).all()
            assert self.counted.committed_bytes == self.counted.reserved_bytes == 0


TestRegion = RegionMachine.TestCase
TestRegion.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
