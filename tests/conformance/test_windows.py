"""What regions with heaps promise, and the windows onto them, over each provider that has them.

A region's bytes are written and read where they are shown; the system is asked for what it took.
"""

import gc
import itertools
import re
from collections.abc import Callable

import pytest
import torch

from conformance.memory_cases import CASES, GIB, SHARING_CASES, MemoryCase, sharing_case
from quire.errors import MemoryUnavailable
from quire.memory import MemoryProvider, Region, Window

pytestmark = pytest.mark.device(default=True)


@pytest.fixture(params=SHARING_CASES)
def case(request: pytest.FixtureRequest) -> MemoryCase:
    return sharing_case(request.param)


@pytest.fixture
def provider(case: MemoryCase) -> MemoryProvider:
    return case.provider


@pytest.fixture
def page(case: MemoryCase) -> int:
    return case.provider.page_bytes


@pytest.fixture
def taken(case: MemoryCase) -> Callable[[], int]:
    """Bytes that the system has in heaps since this test began."""
    gc.collect()
    before = case.in_heaps()
    return lambda: case.in_heaps() - before


def pages(seen: Region | Window, page: int) -> torch.Tensor:
    """The bytes, a row a page."""
    return seen.tensor(torch.uint8).view(-1, page)


def numbered(provider: MemoryProvider, num_pages: int) -> Region:
    """A region whose page i is full of i + 1, in heaps of 8 pages."""
    page = provider.page_bytes
    region = provider.reserve(num_pages * page, heap_bytes=8 * page)
    region.commit(0, num_pages * page)
    pages(region, page)[:num_pages] = torch.arange(1, num_pages + 1, dtype=torch.uint8)[:, None]
    return region


def test_reserving_takes_no_memory_and_whole_heaps(
    provider: MemoryProvider, page: int, taken: Callable[[], int]
) -> None:
    for num_pages, whole in ((1, 8), (8, 8), (9, 16), (2**20, 2**20)):
        region = provider.reserve(num_pages * page, heap_bytes=8 * page)
        assert region.nbytes == whole * page
        assert region.committed_bytes == taken() == 0
        window = region.window(2**20 * page)
        assert window.nbytes == 2**20 * page
        assert taken() == 0


def test_an_impossible_reservation_is_refused(provider: MemoryProvider, page: int) -> None:
    for nbytes in (2**60, 2**64 + 8 * page, 2**70):
        with pytest.raises(MemoryUnavailable, match="address space"):
            provider.reserve(nbytes, heap_bytes=8 * page)
    region = provider.reserve(8 * page, heap_bytes=8 * page)
    for nbytes in (2**60, 2**64 + 8 * page):
        with pytest.raises(MemoryUnavailable, match="address space"):
            region.window(nbytes)


def test_a_region_without_heaps_has_no_windows(provider: MemoryProvider, page: int) -> None:
    with pytest.raises(ValueError, match="heap_bytes"):
        provider.reserve(8 * page).window(page)


@pytest.mark.parametrize("name", CASES)
def test_a_provider_that_cannot_share_says_why(name: str) -> None:
    provider = CASES[name]().provider
    if provider.cannot_share is None:
        assert provider.reserve(1, heap_bytes=provider.page_bytes).committed_bytes == 0
        return
    assert provider.cannot_share
    with pytest.raises(MemoryUnavailable, match=re.escape(provider.cannot_share)):
        provider.reserve(1, heap_bytes=provider.page_bytes)


def test_committed_pages_exist_across_heaps(
    provider: MemoryProvider, page: int, taken: Callable[[], int]
) -> None:
    region = provider.reserve(64 * page, heap_bytes=8 * page)
    address = region.tensor(torch.uint8).data_ptr()
    region.commit(5 * page, 30 * page)  # the end of heap 0, three whole ones, the start of heap 4
    assert region.committed_bytes == taken() == 30 * page
    every_page = pages(region, page)
    every_page[5:35] = 7
    region.decommit(7 * page, 10 * page)
    assert region.committed_bytes == taken() == 20 * page
    assert every_page[5:7].eq(7).all()
    assert every_page[17:35].eq(7).all()
    region.commit(7 * page, 10 * page)
    assert every_page[7:17].eq(0).all()  # pages come back zeroed
    assert region.committed_bytes == taken() == 30 * page
    assert region.tensor(torch.uint8).data_ptr() == address
    region.close()
    assert region.committed_bytes == taken() == 0


def test_strided_pieces_across_heaps(
    provider: MemoryProvider, page: int, taken: Callable[[], int]
) -> None:
    region = provider.reserve(64 * page, heap_bytes=8 * page)
    region.commit(3 * page, 6 * page, stride=12 * page, count=5)
    wanted = {3 + 12 * i + j for i in range(5) for j in range(6)}
    assert region.committed_bytes == taken() == 30 * page
    for index in wanted:
        pages(region, page)[index] = 9
    assert taken() == 30 * page  # it was exactly these
    region.decommit(5 * page, 2 * page, stride=12 * page, count=5)
    assert region.committed_bytes == taken() == 20 * page
    kept = sorted(wanted - {5 + 12 * i + j for i in range(5) for j in range(2)})
    assert pages(region, page)[kept].eq(9).all()
    region.decommit(3 * page, 2 * page, stride=12 * page, count=5)
    region.decommit(7 * page, 2 * page, stride=12 * page, count=5)
    assert region.committed_bytes == taken() == 0


def test_regions_do_not_share(
    provider: MemoryProvider, page: int, taken: Callable[[], int]
) -> None:
    one, other = numbered(provider, 8), numbered(provider, 8)
    window = other.window(8 * page)
    window.map(0, 0, 8 * page)
    pages(one, page)[:] = 99
    one.close()
    assert pages(window, page)[:, 0].tolist() == list(range(1, 9))
    assert other.committed_bytes == taken() == 8 * page


def test_a_page_is_seen_wherever_it_is_shown(
    provider: MemoryProvider, page: int, taken: Callable[[], int]
) -> None:
    region = numbered(provider, 24)
    one, other = region.window(64 * page), region.window(64 * page)
    order = [3, 3, 17, 0, 8, 7, 23, 3]
    for where, source in enumerate(order):
        one.map(2 * where * page, source * page, page)
    other.map(0, 4 * page, 16 * page)  # it begins and ends in the midst of heaps
    assert pages(one, page)[: 2 * len(order) : 2, 0].tolist() == [source + 1 for source in order]
    assert pages(other, page)[:16, 0].tolist() == list(range(5, 21))

    pages(one, page)[0] = 200  # through one address, read at all others
    assert pages(region, page)[3].eq(200).all()
    assert pages(one, page)[[2, 14]].eq(200).all()
    pages(region, page)[17] = 201
    assert pages(one, page)[4].eq(201).all()
    assert pages(other, page)[13].eq(201).all()
    pages(other, page)[4, 5:] = 202
    assert pages(region, page)[8, 5:].eq(202).all()
    assert pages(one, page)[8, :5].eq(9).all()
    assert region.committed_bytes == taken() == 24 * page


def test_mapping_replaces_and_unmapping_shows_zeros(
    case: MemoryCase, provider: MemoryProvider, page: int, taken: Callable[[], int]
) -> None:
    region = numbered(provider, 16)
    window = region.window(16 * page)
    window.map(0, 0, 16 * page)
    window.map(4 * page, 10 * page, 3 * page)
    shown = pages(window, page)
    assert shown[:, 0].tolist() == [1, 2, 3, 4, 11, 12, 13, *range(8, 17)]
    window.unmap(2 * page, 3 * page)
    window.unmap(2 * page, 3 * page)  # showing nothing twice is nothing new
    if case.reads_zeros:
        assert shown[:, 0].tolist() == [1, 2, 0, 0, 0, 12, 13, *range(8, 17)]
    window.map(3 * page, 3 * page, page)
    assert shown[3].eq(4).all()
    assert pages(region, page)[:16, 0].tolist() == list(range(1, 17))  # pages themselves stay
    assert region.committed_bytes == taken() == 16 * page


def test_copy_on_write_in_place(provider: MemoryProvider, page: int) -> None:
    region = provider.reserve(32 * page, heap_bytes=8 * page)
    region.commit(0, 5 * page)
    parent, fork = region.window(8 * page), region.window(8 * page)
    for window in (parent, fork):
        window.map(0, 0, 4 * page)
    pages(parent, page)[:4] = 1
    reader = fork.tensor(torch.bfloat16)

    pages(region, page)[4] = pages(region, page)[2]
    fork.map(2 * page, 4 * page, page)
    pages(fork, page)[2, : page // 2] = 9
    assert pages(parent, page)[:4].eq(1).all()
    assert pages(fork, page)[2, : page // 2].eq(9).all()
    assert pages(fork, page)[[0, 1, 3]].eq(1).all()
    assert pages(fork, page)[2, page // 2 :].eq(1).all()
    assert reader.view(torch.uint8)[2 * page] == 9  # addresses stay: tensors need no telling


def test_reading_past_what_is_shown_takes_nothing(
    case: MemoryCase, page: int, taken: Callable[[], int]
) -> None:
    if not case.reads_zeros:
        pytest.skip("nothing may be read there")
    region = numbered(case.provider, 16)
    window = region.window(64 * 1024 * page)
    window.map(0, 0, 5 * page)
    everything = window.tensor(torch.int64)
    assert everything[5 * page // 8 :].eq(0).all()
    window.map(60_000 * page, 0, page)
    assert everything[6 * page // 8 : 60_000 * page // 8].eq(0).all()
    assert taken() == region.committed_bytes == 16 * page


def test_attention_over_reads_a_long_view(
    case: MemoryCase, page: int, taken: Callable[[], int]
) -> None:
    """30,000 tokens, of which the first pages are there: torch's kernel reads all of them."""
    if not case.reads_zeros:
        pytest.skip("nothing may be read there")
    num_heads, head_dim, num_tokens = 2, 64, 30_000
    token_bytes = 2 * num_heads * head_dim * 2
    region = case.provider.reserve(64 * page, heap_bytes=16 * page)
    region.commit(0, 64 * page)
    window = region.window(-(-num_tokens * token_bytes // page) * page)
    for index in range(45):
        window.map(index * page, (index * 7 % 64) * page, page)
    num_shown = 45 * page // token_bytes
    flat = window.tensor(torch.bfloat16)
    flat[: 45 * page // 2] = torch.randn(45 * page // 2).bfloat16()
    entries = flat[: num_tokens * token_bytes // 2].view(num_tokens, 2, num_heads, head_dim)
    keys, values = entries.permute(1, 2, 0, 3).unsqueeze(1)
    query = torch.randn(1, num_heads, 1, head_dim).bfloat16()
    mask = torch.arange(num_tokens) < num_shown

    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, keys, values, attn_mask=mask[None, None, None])
    dense = torch.zeros_like(entries)
    dense[:num_shown] = entries[:num_shown]
    dense_keys, dense_values = dense.permute(1, 2, 0, 3).unsqueeze(1)
    wanted = attend(query, dense_keys, dense_values, attn_mask=mask[None, None, None])
    assert torch.equal(out, wanted)
    assert out.isfinite().all()
    assert taken() == region.committed_bytes == 64 * page


def test_tensors_over_windows_have_64_bit_offsets(provider: MemoryProvider, page: int) -> None:
    region = provider.reserve(8 * page, heap_bytes=8 * page)
    region.commit(0, 8 * page)
    window = region.window(6 * GIB)  # more than 2**31 elements
    window.map(0, 0, page)
    window.map(6 * GIB - page, page, page)
    flat = window.tensor(torch.bfloat16)
    assert flat.numel() == 3 * GIB > 2**31
    assert flat.is_contiguous()
    num = page // 2
    values = torch.randn(num).bfloat16()
    flat[-num:] = values
    assert torch.equal(region.tensor(torch.bfloat16)[num : 2 * num], values)
    rows = flat.as_strided((2, num // 2), (flat.numel() - num, 2))
    assert torch.equal(rows[1], values[::2])
    rows[0] = 3.0
    assert region.tensor(torch.bfloat16)[:num:2].eq(3).all()
    assert region.tensor(torch.bfloat16)[1:num:2].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_tensors_over_windows_have_any_dtype(
    provider: MemoryProvider, page: int, dtype: torch.dtype
) -> None:
    region = numbered(provider, 8)
    window = region.window(8 * page)
    window.map(0, 0, 8 * page)
    flat = window.tensor(dtype)
    assert flat.dtype == dtype
    assert flat.numel() * dtype.itemsize == 8 * page
    assert torch.equal(flat.view(torch.uint8), region.tensor(torch.uint8))


def test_verbs_after_closing_a_window(provider: MemoryProvider, page: int) -> None:
    region = numbered(provider, 8)
    window, other = region.window(8 * page), region.window(8 * page)
    window.map(0, 0, page)
    other.map(0, 0, page)
    window.close()
    window.close()
    late: list[Callable[[], object]] = [
        lambda: window.map(0, 0, page),
        lambda: window.unmap(0, page),
        lambda: window.tensor(torch.uint8),
    ]
    for call in late:
        with pytest.raises(ValueError, match="closed"):
            call()
    assert pages(other, page)[0].eq(1).all()
    assert pages(region, page)[0].eq(1).all()
    region.close()


def test_verbs_after_closing_a_region(provider: MemoryProvider, page: int) -> None:
    region = numbered(provider, 8)
    window = region.window(8 * page)
    window.map(0, 0, page)
    region.close()
    region.close()
    late: list[Callable[[], object]] = [
        lambda: region.commit(0, page),
        lambda: region.decommit(0, page),
        lambda: region.window(page),
        lambda: region.tensor(torch.uint8),
        lambda: window.map(0, 0, page),
        lambda: window.unmap(0, page),
        lambda: window.tensor(torch.uint8),
    ]
    for call in late:  # a provider that checks promises may notice first that no page is committed
        with pytest.raises((ValueError, AssertionError), match=r"closed|not committed"):
            call()
    window.close()


@pytest.mark.parametrize("dropped", [(), ("window",), ("region",), ("window", "region")], ids=str)
def test_closing_the_region_under_live_tensors_leaves_zeros(
    case: MemoryCase, page: int, taken: Callable[[], int], dropped: tuple[str, ...]
) -> None:
    region = numbered(case.provider, 8)
    held: dict[str, object] = {"region": region, "window": region.window(8 * page)}
    held["window"].map(0, 0, 8 * page)
    own = region.tensor(torch.uint8)
    seen = held["window"].tensor(torch.bfloat16)[page : 2 * page].view(2, -1)
    if "window" in dropped:
        del held["window"]
    region.close()
    if "region" in dropped:
        del held["region"], region
    gc.collect()
    assert taken() == 0
    if case.reads_zeros:
        assert seen.eq(0).all()
        assert own.eq(0).all()
    assert taken() == 0
    addresses = own.data_ptr(), seen.data_ptr()
    assert all(map(case.is_reserved, addresses))
    del own, seen
    held.clear()
    region = None
    gc.collect()
    case.poll()
    assert not any(map(case.is_reserved, addresses))


def test_closing_a_window_under_a_live_tensor_leaves_zeros(case: MemoryCase, page: int) -> None:
    region = numbered(case.provider, 8)
    window, other = region.window(8 * page), region.window(8 * page)
    for each in (window, other):
        each.map(0, 0, 8 * page)
    seen = window.tensor(torch.float32)[::3]
    address = seen.data_ptr()
    window.close()
    if case.reads_zeros:
        assert seen.eq(0).all()
    assert pages(other, page)[:, 0].tolist() == list(range(1, 9))
    assert case.is_reserved(address)
    del seen, window, each
    gc.collect()
    case.poll()
    assert not case.is_reserved(address)


NAMES = ("region", "window", "own", "seen")


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="-".join)
def test_things_may_be_dropped_in_any_order(order: tuple[str, ...]) -> None:
    """Without ``close``: bytes stay as long as a tensor sees them, and no longer."""
    case = sharing_case(SHARING_CASES[0])
    page = case.provider.page_bytes
    gc.collect()
    before = case.in_heaps()
    region = numbered(case.provider, 16)
    window = region.window(16 * page)
    window.map(0, 8 * page, 8 * page)
    own, seen = region.tensor(torch.uint8), window.tensor(torch.uint8)
    addresses = {"own": own.data_ptr(), "seen": seen.data_ptr()}
    held = {"region": region, "window": window, "own": own, "seen": seen}
    del region, window, own, seen
    for name in order:
        del held[name]  # nothing waits for the collector
        case.poll()
        if "own" in held:
            assert held["own"].view(-1, page)[:, 0].tolist() == list(range(1, 17))
        if "seen" in held:
            assert held["seen"].view(-1, page)[:8, 0].tolist() == list(range(9, 17))
        if not held.keys() & {"own", "region", "window"}:
            assert not case.is_reserved(addresses["own"])
        if not held.keys() & {"seen", "window"}:
            assert not case.is_reserved(addresses["seen"])
    assert case.in_heaps() == before


def test_many_windows_come_and_go(
    provider: MemoryProvider, page: int, taken: Callable[[], int]
) -> None:
    region = numbered(provider, 8)
    windows = [region.window(8 * page) for _ in range(100)]
    for index, window in enumerate(windows):
        window.map(0, index % 8 * page, page)
    assert [int(pages(window, page)[0, 0]) for window in windows] == [
        index % 8 + 1 for index in range(100)
    ]
    for window in windows[::2]:
        window.close()
    assert all(int(pages(window, page)[0, 0]) for window in windows[1::2])
    for window in windows[1::2]:
        window.unmap(0, page)
    region.decommit(0, 8 * page)
    assert taken() == region.committed_bytes == 0
