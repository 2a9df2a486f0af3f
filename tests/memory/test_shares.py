"""Several processes alike on one machine: what one of them may look at as its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.memory.budget import make_ledger
from quire.memory.budget.ledger import Needs
from quire.memory.machine import DeviceMemory, Machine
from quire.memory.machine.probe import MemoryBound
from quire.memory.machine.readings import MemoryReading, SharedGauge

GIB = 1 << 30
NEEDS = Needs(weights_bytes=0, bytes_per_token=1, context_tokens=1, least_bytes=1)


def machine(*, limit: int, used: int, address_space: int | None = None) -> Machine:
    bounds = [MemoryBound(source="MemAvailable", limit_bytes=limit, used_bytes=used)]
    if address_space is not None:
        bounds.append(MemoryBound(source="RLIMIT_AS", limit_bytes=address_space, used_bytes=0))
    bounds.sort(key=lambda bound: bound.available_bytes)
    return Machine(bounds=tuple(bounds), ram_bytes=limit, ram_used_bytes=used)


@given(
    limit=st.integers(GIB, 2**45),
    used=st.floats(0, 1),
    count=st.integers(1, 64),
    mode=st.booleans(),
)
def test_all_of_them_together_take_no_more_than_one_would(
    limit: int, used: float, count: int, mode: bool
) -> None:
    """The headroom of small shares is larger, not smaller: no other process pays for the ranks."""
    whole = machine(limit=limit, used=int(limit * used))
    words = "dedicated" if mode else "shared"
    alone = make_ledger(whole, NEEDS, mode=words)
    each = make_ledger(whole.share(count), NEEDS, mode=words)
    assert count * each.kv_bytes <= alone.kv_bytes + 2 * count  # rounded
    if count == 1:
        assert each == alone


def test_an_address_space_is_each_ones_own() -> None:
    share = machine(limit=8 * GIB, used=0, address_space=3 * GIB).share(4)
    by_source = {bound.source: bound.limit_bytes for bound in share.bounds}
    assert by_source == {"1/4 of MemAvailable": 2 * GIB, "RLIMIT_AS": 3 * GIB}
    assert share.tightest.source == "1/4 of MemAvailable"
    assert share.ram_bytes == 2 * GIB


def test_a_device_is_not_shared() -> None:
    card = DeviceMemory(name="card", total_bytes=GIB, free_bytes=GIB)
    whole = machine(limit=8 * GIB, used=0)
    assert Machine(bounds=whole.bounds, ram_bytes=1, device=card).share(2).device == card


class Told:
    def now_s(self) -> float:
        return 7.0

    def read(self) -> MemoryReading:
        return MemoryReading(total_bytes=101, available_bytes=51, stalled_s=0.5, source="RAM")


@pytest.mark.parametrize("count", [2, 5])
def test_a_gauge_shows_a_share(count: int) -> None:
    gauge = SharedGauge(Told(), count)
    assert gauge.now_s() == 7.0
    assert gauge.read() == MemoryReading(
        total_bytes=101 // count,
        available_bytes=51 // count,
        stalled_s=0.5,
        source=f"1/{count} of RAM",
    )
