"""The governor's policy: what goes, when, and that several of them settle beside each other."""

import mmap
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.memory.budget import headroom_bytes
from quire.memory.governor import Decision, Governor, Reading
from quire.memory.machine import readings

GIB = 1 << 30
TOTAL = 24 * GIB
HEADROOM = 4 * GIB
CALM = Reading(
    now_s=0.0,
    total_bytes=TOTAL,
    available_bytes=20 * GIB,
    capacity_bytes=12 * GIB,
    ceiling_bytes=12 * GIB,
    committed_bytes=3 * GIB,
)
SHORT = replace(CALM, available_bytes=3 * GIB)


def test_the_headroom_needs_no_number_from_the_user() -> None:
    assert headroom_bytes(TOTAL, "shared") == HEADROOM
    assert headroom_bytes(8 * GIB, "shared") == 2 * GIB
    assert headroom_bytes(100 * GIB, "shared") == 15 * GIB
    assert headroom_bytes(100 * GIB, "dedicated") == 2 * GIB
    assert headroom_bytes(8 * GIB, "dedicated") == GIB // 2


def test_with_plenty_all_of_the_capacity_may_be_used() -> None:
    for mode in ("shared", "dedicated"):
        decision = Governor(mode).decide(CALM)
        assert (decision.ceiling_bytes, decision.event) == (12 * GIB, "")
        assert not decision.drop_cached


def test_under_pressure_what_is_missing_goes_at_once_and_what_is_only_cached_with_it() -> None:
    shared, dedicated = Governor("shared").decide(SHORT), Governor("dedicated").decide(SHORT)
    assert (shared.ceiling_bytes, shared.event, shared.drop_cached) == (2 * GIB, "pressure", True)
    assert "3.00 GiB is available" in shared.reason
    assert "1.00 GiB is missing" in shared.reason
    assert dedicated.event == ""
    assert dedicated.ceiling_bytes > 5 * GIB
    shorter = replace(SHORT, available_bytes=GIB // 4)
    dedicated = Governor("dedicated").decide(shorter)
    assert (dedicated.event, dedicated.drop_cached) == ("pressure", False)
    assert dedicated.ceiling_bytes == 3 * GIB - GIB // 4


def test_a_cache_that_is_too_small_to_help_is_left_alone() -> None:
    decision = Governor("shared").decide(replace(SHORT, committed_bytes=HEADROOM // 64))
    assert (decision.event, decision.drop_cached) == ("", False)
    assert decision.ceiling_bytes >= HEADROOM // 64


def test_it_grows_again_after_a_while_by_and_by_and_only_with_room_to_spare() -> None:
    governor = Governor("shared")
    now, ceiling = CALM, governor.decide(SHORT).ceiling_bytes
    ceilings = []
    for step in range(1, 200):
        now = replace(CALM, now_s=step / 5, ceiling_bytes=ceiling, committed_bytes=0)
        ceiling = governor.decide(now).ceiling_bytes
        ceilings.append(ceiling)
    assert set(ceilings[:24]) == {2 * GIB}  # 5 s
    assert ceilings == sorted(ceilings)
    assert ceilings[25] < 3 * GIB
    assert ceilings[-1] == 12 * GIB
    tight = replace(now, now_s=50.0, available_bytes=HEADROOM * 5 // 4, ceiling_bytes=GIB)
    assert governor.decide(tight).ceiling_bytes < GIB


def test_waiting_tasks_bring_pressure_sooner() -> None:
    now = replace(CALM, available_bytes=HEADROOM * 9 // 8)
    for stalled_s, event in ((0.005, ""), (0.05, "pressure")):
        governor = Governor("shared")
        assert governor.decide(now).event == ""
        later = governor.decide(replace(now, now_s=0.2, stalled_s=stalled_s))
        assert later.event == event
        assert ("tasks wait" in later.reason) == bool(event)
    plenty = Governor("shared")
    plenty.decide(CALM)
    assert plenty.decide(replace(CALM, now_s=0.2, stalled_s=0.2)).event == ""


def test_idle_gives_the_cache_back_once_and_keeps_the_ceiling() -> None:
    governor = Governor("shared")
    events = []
    for second in range(60):
        decision = governor.decide(replace(CALM, now_s=float(second), idle_s=float(second)))
        assert decision.ceiling_bytes == CALM.ceiling_bytes
        assert decision.drop_cached == (decision.event == "idle")
        events.append(decision.event)
    assert events.index("idle") <= 30
    assert events.count("idle") == 1
    governor.decide(replace(CALM, now_s=60.0))
    assert governor.decide(replace(CALM, now_s=90.0, idle_s=30.0)).event == "idle"
    assert Governor("dedicated").decide(replace(CALM, idle_s=1000.0)).event == ""


@settings(max_examples=200)
@given(
    mode=st.sampled_from(["shared", "dedicated"]),
    total=st.integers(1, 2**45),
    shares=st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=20),
)
def test_no_reading_makes_it_ask_for_nonsense(
    mode: str, total: int, shares: list[tuple[float, ...]]
) -> None:
    governor, now_s = Governor(mode), 0.0
    for elapsed, available, capacity, committed in shares:
        now_s += elapsed
        most = round(total * capacity)
        ceiling = round(most * max(committed, elapsed))
        now = Reading(
            now_s=now_s,
            total_bytes=total,
            available_bytes=round(total * available),
            stalled_s=now_s * elapsed,
            capacity_bytes=most,
            ceiling_bytes=ceiling,
            committed_bytes=round(ceiling * committed),
            idle_s=40 * elapsed,
        )
        decision = governor.decide(now)
        assert 0 <= decision.ceiling_bytes <= max(most, ceiling)
        headroom = headroom_bytes(total, mode)
        if decision.event == "pressure":
            assert decision.ceiling_bytes <= ceiling
        elif now.available_bytes < headroom:  # nothing to gain, or it would be pressure
            assert now.committed_bytes <= headroom // 64
        if now.available_bytes < headroom:
            assert decision.ceiling_bytes <= max(ceiling, headroom // 64)


# -- several on one machine ----------------------------------------------------------------------


@dataclass
class Process:
    """A cache of which everything is only cached, and that fills as fast as it may."""

    governor: Governor
    phase: int  # of its readings, in ticks
    fill_bytes: int  # a tick
    used: int = 0
    ceiling: int = 20 * GIB
    seen: list[int] = field(default_factory=list)

    def act(self, now_s: float, available: int) -> Decision:
        now = replace(
            CALM,
            now_s=now_s,
            available_bytes=max(0, available),
            capacity_bytes=20 * GIB,
            ceiling_bytes=self.ceiling,
            committed_bytes=self.used,
        )
        decision = self.governor.decide(now)
        self.ceiling = decision.ceiling_bytes
        self.used = 0 if decision.drop_cached else min(self.used, self.ceiling)
        return decision


def simulate(processes: list[Process], others: list[int], *, seconds: int) -> list[int]:
    """What is available at each tick; ``others`` is what the rest takes, for equal times each."""
    available, num_ticks = [], seconds * 20
    for tick in range(num_ticks):
        taken = others[tick * len(others) // num_ticks]
        for process in processes:
            free = TOTAL - taken - sum(p.used for p in processes)
            if tick % 4 == process.phase:
                process.act(tick / 20, free)
            room = min(process.ceiling, process.used + process.fill_bytes) - process.used
            process.used += max(0, min(room, free))
            process.seen.append(process.used)
        available.append(TOTAL - taken - sum(p.used for p in processes))
    return available


@settings(max_examples=30)
@given(
    phases=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    fill=st.integers(10, 100),
    others=st.lists(st.integers(1, 16), max_size=3),
    last=st.integers(1, 12),
)
def test_several_settle_with_equal_shares_and_leave_the_headroom(
    phases: list[int], fill: int, others: list[int], last: int
) -> None:
    """Neighbours come and go; a minute after the last change nothing moves any more."""
    processes = [
        Process(governor=Governor("shared"), phase=phase, fill_bytes=fill << 20) for phase in phases
    ]
    processes[0].used = 6 * GIB  # it was here before the others
    simulate(processes, [size * GIB for size in others or [1]], seconds=60)
    for process in processes:
        process.seen.clear()
        process.governor = Governor("shared")  # the clock begins again
    available = simulate(processes, [last * GIB], seconds=90)
    assert min(available[-400:]) >= HEADROOM
    shares = [process.used for process in processes]
    assert max(shares) <= 1.25 * min(shares), "somebody has more than its share"
    for process in processes:
        quiet = process.seen[-400:]
        assert max(quiet) - min(quiet) <= TOTAL // 200, "it swings"
    spare = TOTAL - last * GIB - HEADROOM * 5 // 4
    assert sum(shares) >= 0.85 * spare, "much is left unused"


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_filling_up_puts_no_pressure_on_anybody(num_processes: int) -> None:
    """As fast as memory can be written, and without anything being thrown away again."""
    processes = [
        Process(governor=Governor("shared"), phase=phase, fill_bytes=100 << 20)
        for phase in range(num_processes)
    ]
    assert min(simulate(processes, [GIB], seconds=60)) >= HEADROOM
    for process in processes:
        assert process.used >= max(process.seen) - TOTAL // 5


def test_a_neighbour_gets_what_it_takes_and_the_cache_recovers() -> None:
    process = Process(governor=Governor("shared"), phase=0, fill_bytes=200 << 20)
    available = simulate([process], [GIB, 13 * GIB, GIB], seconds=180)
    before, during, after = (process.seen[tick * 1200 - 1] for tick in (1, 2, 3))
    assert before > 14 * GIB
    assert during < 6.5 * GIB
    assert after > 14 * GIB
    low = [tick for tick, size in enumerate(available) if size < HEADROOM]
    assert low == [] or max(low) - min(low) <= 20, "for more than a second there was too little"


# -- readings ------------------------------------------------------------------------------------


def machine(root: Path, *, free: int = 5 << 30, psi: str | None = None, zones: str = "") -> Path:
    for folder in ("proc/self", "proc/pressure"):
        (root / folder).mkdir(parents=True)
    kib = free >> 10
    (root / "proc/meminfo").write_text(f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {kib} kB\n")
    (root / "proc/zoneinfo").write_text(zones)
    if psi is not None:
        (root / "proc/pressure/memory").write_text(psi)
    return root


def test_pages_that_processors_keep_are_free(tmp_path: Path) -> None:
    zones = "Node 0, zone Normal\n  pagesets\n    cpu: 0\n              count:    1000\n"
    zones += "              high:     2000\n    cpu: 1\n              count: 24\n"
    gauge = readings.HostGauge(machine(tmp_path, zones=zones))
    assert gauge.read().available_bytes == (5 << 30) + 1024 * mmap.PAGESIZE
    assert gauge.read().total_bytes == TOTAL


def test_limits_on_addresses_do_not_count(tmp_path: Path) -> None:
    root = machine(tmp_path)
    (root / "proc/self/limits").write_text("Max address space  4096  unlimited  bytes\n")
    (root / "proc/self/status").write_text("VmSize: 100 kB\nVmData: 1 kB\n")
    assert readings.HostGauge(root).read().source == "MemAvailable"


@pytest.mark.parametrize(
    ("psi", "stalled_s"),
    [
        ("some avg10=1.00 avg60=0 avg300=0 total=2500000\nfull avg10=0 total=7\n", 2.5),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_time_lost_for_memory(tmp_path: Path, psi: str | None, stalled_s: float) -> None:
    root = machine(tmp_path, psi=psi)
    assert readings.HostGauge(root).read().stalled_s == stalled_s
    assert readings.stalled_s(root) == stalled_s


def test_this_machine_can_be_read() -> None:
    gauge = readings.HostGauge()
    first, reading, second = gauge.now_s(), gauge.read(), gauge.now_s()
    assert first <= second
    assert 0 < reading.available_bytes <= reading.total_bytes
