"""The governor's policy: what goes, when, and that several of them settle beside each other."""

import mmap
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from quire.memory.budget import Needs, headroom_bytes, make_ledger
from quire.memory.controller import ControllerReading, Decision, MemoryController
from quire.memory.machine import Machine, readings
from quire.memory.machine.probe import MemoryBound

GIB = 1 << 30
TOTAL = 24 * GIB
HEADROOM = 4 * GIB
CALM = ControllerReading(
    now_s=0.0,
    total_bytes=TOTAL,
    available_bytes=20 * GIB,
    capacity_bytes=12 * GIB,
    ceiling_bytes=12 * GIB,
    committed_bytes=3 * GIB,
)
SHORT = replace(CALM, available_bytes=2 * GIB, committed_bytes=4 * GIB)


def test_the_headroom_needs_no_number_from_the_user() -> None:
    assert headroom_bytes(TOTAL, "shared") == HEADROOM
    assert headroom_bytes(8 * GIB, "shared") == 2 * GIB
    assert headroom_bytes(100 * GIB, "shared") == 15 * GIB
    assert headroom_bytes(100 * GIB, "dedicated") == 2 * GIB
    assert headroom_bytes(8 * GIB, "dedicated") == GIB // 2


def test_with_plenty_all_of_the_capacity_may_be_used() -> None:
    for mode in ("shared", "dedicated"):
        decision = MemoryController(mode).decide(CALM)
        assert (decision.ceiling_bytes, decision.event) == (12 * GIB, "")
        assert not decision.drop_cached


def test_under_pressure_what_is_missing_goes_at_once_and_what_is_only_cached_with_it() -> None:
    shared, dedicated = (
        MemoryController("shared").decide(SHORT),
        MemoryController("dedicated").decide(SHORT),
    )
    assert (shared.ceiling_bytes, shared.event, shared.drop_cached) == (2 * GIB, "pressure", True)
    assert "2.00 GiB is available, of which 4.00 GiB is for others" in shared.reason
    assert "2.00 GiB is missing" in shared.reason
    assert dedicated.event == ""
    assert dedicated.ceiling_bytes > 5 * GIB
    shorter = replace(SHORT, available_bytes=GIB // 4)
    dedicated = MemoryController("dedicated").decide(shorter)
    assert (dedicated.event, dedicated.drop_cached) == ("pressure", False)
    assert dedicated.ceiling_bytes == 4 * GIB - GIB // 4


def test_others_may_take_a_quarter_of_the_headroom_before_they_are_answered() -> None:
    at_the_edge = replace(CALM, available_bytes=HEADROOM * 3 // 4)
    for mode in ("shared", "dedicated"):
        assert MemoryController(mode).decide(at_the_edge).event == ""
    beyond = replace(at_the_edge, available_bytes=HEADROOM * 3 // 4 - 1)
    assert MemoryController("shared").decide(beyond).ceiling_bytes == 3 * GIB - HEADROOM // 4 - 1


def test_what_a_step_takes_stays_free_where_lack_of_it_kills() -> None:
    calm = replace(CALM, available_bytes=5 * GIB, step_bytes=6 * GIB)
    decision = MemoryController("dedicated").decide(calm)
    assert decision.event == "pressure"
    assert decision.ceiling_bytes == 3 * GIB - (6 * GIB + GIB // 8 - 5 * GIB)
    assert "is for a step" in decision.reason
    assert MemoryController("dedicated").decide(replace(calm, step_bytes=5 * GIB)).event == ""


@settings(max_examples=examples(25, of=60), deadline=None)
@given(
    limit=st.integers(1, 256),
    stated=st.floats(0.01, 1),
    taken_later=st.floats(0, 0.5),
    mode=st.sampled_from(["shared", "dedicated"]),
)
def test_a_stated_budget_is_used_where_no_other_process_wants_memory(
    limit: int, stated: float, taken_later: float, mode: str
) -> None:
    """However little it leaves, and though this process takes up to half of that later."""
    room = limit * GIB * 3 // 4
    needs = Needs(weights_bytes=0, bytes_per_token=1, context_tokens=1, least_bytes=1)
    bound = MemoryBound(source="MemAvailable", limit_bytes=limit * GIB, used_bytes=limit * GIB // 4)
    machine = Machine(bounds=(bound,), ram_bytes=limit * GIB)
    size = int(room * stated)
    ledger = make_ledger(machine, needs, mode=mode, kv_cache_memory_bytes=size)
    assert ledger.spare_bytes == room - size
    governor = MemoryController(mode, room_bytes=room)
    own_bytes = int((room - size) * taken_later)
    used, ceiling = 0, size
    for tick in range(900):
        now = ControllerReading(
            now_s=tick / 5,
            total_bytes=limit * GIB,
            available_bytes=room - own_bytes - used,
            capacity_bytes=size,
            ceiling_bytes=ceiling,
            committed_bytes=used,
        )
        assert governor.headroom_bytes(now) == ledger.headroom_bytes
        decision = governor.decide(now)
        assert decision.event == "", "there is no neighbour"
        ceiling = decision.ceiling_bytes
        used = min(ceiling, used + size // 50)
    assert used >= 0.95 * size


def test_a_cache_that_is_too_small_to_help_is_left_alone() -> None:
    decision = MemoryController("shared").decide(replace(SHORT, committed_bytes=HEADROOM // 64))
    assert (decision.event, decision.drop_cached) == ("", False)
    assert decision.ceiling_bytes >= HEADROOM // 64


def test_it_grows_again_after_a_while_by_and_by_and_only_with_room_to_spare() -> None:
    governor = MemoryController("shared")
    now, ceiling = CALM, governor.decide(SHORT).ceiling_bytes
    ceilings = []
    for step in range(1, 500):
        now = replace(CALM, now_s=step / 5, ceiling_bytes=ceiling, committed_bytes=0)
        ceiling = governor.decide(now).ceiling_bytes
        ceilings.append(ceiling)
    assert set(ceilings[:24]) == {2 * GIB}  # 5 s
    assert ceilings == sorted(ceilings)
    assert ceilings[25] < 3 * GIB
    assert ceilings[-1] == 12 * GIB
    tight = replace(now, now_s=150.0, available_bytes=HEADROOM, ceiling_bytes=GIB)
    assert governor.decide(tight).ceiling_bytes < GIB


def test_waiting_tasks_bring_pressure_sooner() -> None:
    now = replace(CALM, available_bytes=HEADROOM * 7 // 8)
    for stalled_s, event in ((0.005, ""), (0.05, "pressure")):
        governor = MemoryController("shared")
        assert governor.decide(now).event == ""
        later = governor.decide(replace(now, now_s=0.2, stalled_s=stalled_s))
        assert later.event == event
        assert ("tasks wait" in later.reason) == bool(event)
    plenty = MemoryController("shared")
    plenty.decide(CALM)
    assert plenty.decide(replace(CALM, now_s=0.2, stalled_s=0.2)).event == ""


def test_idle_gives_the_cache_back_once_and_keeps_the_ceiling() -> None:
    governor = MemoryController("shared")
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
    assert MemoryController("dedicated").decide(replace(CALM, idle_s=1000.0)).event == ""


@settings(max_examples=examples(70, of=200))
@given(
    mode=st.sampled_from(["shared", "dedicated"]),
    total=st.integers(1, 2**45),
    shares=st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=20),
)
def test_no_reading_makes_it_ask_for_nonsense(
    mode: str, total: int, shares: list[tuple[float, ...]]
) -> None:
    governor, now_s = MemoryController(mode), 0.0
    for elapsed, available, capacity, committed in shares:
        now_s += elapsed
        most = round(total * capacity)
        ceiling = round(most * max(committed, elapsed))
        now = ControllerReading(
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
        elif (
            now.available_bytes < headroom - headroom // 4
        ):  # nothing to gain, or it would be pressure
            assert now.committed_bytes <= headroom // 64
        if now.available_bytes < headroom:
            assert decision.ceiling_bytes <= max(ceiling, headroom // 64)


# -- several on one machine ----------------------------------------------------------------------


@dataclass
class Process:
    """A cache of which everything is only cached, and that fills as fast as it may."""

    governor: MemoryController
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
        Process(governor=MemoryController("shared"), phase=phase, fill_bytes=fill << 20)
        for phase in phases
    ]
    processes[0].used = 6 * GIB  # it was here before the others
    simulate(processes, [size * GIB for size in others or [1]], seconds=60)
    for process in processes:
        process.seen.clear()
        process.governor = MemoryController("shared")  # the clock begins again
    available = simulate(processes, [last * GIB], seconds=90)
    assert min(available[-400:]) >= HEADROOM
    shares = [process.used for process in processes]
    assert max(shares) <= 1.25 * min(shares), "a process has more than its share"
    for process in processes:
        quiet = process.seen[-400:]
        assert max(quiet) - min(quiet) <= TOTAL // 200, "it swings"
    spare = TOTAL - last * GIB - HEADROOM
    assert sum(shares) >= 0.95 * spare, "much is left unused"


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_filling_up_puts_no_pressure_on_others(num_processes: int) -> None:
    """As fast as memory can be written, and without anything being thrown away again."""
    processes = [
        Process(governor=MemoryController("shared"), phase=phase, fill_bytes=100 << 20)
        for phase in range(num_processes)
    ]
    available = simulate(processes, [GIB], seconds=60)
    assert min(available) >= HEADROOM * 3 // 4
    assert available[-1] >= HEADROOM
    for process in processes:
        assert process.used >= max(process.seen) - TOTAL // 5


def test_a_neighbour_gets_what_it_takes_and_the_cache_recovers() -> None:
    process = Process(governor=MemoryController("shared"), phase=0, fill_bytes=200 << 20)
    available = simulate([process], [GIB, 13 * GIB, GIB], seconds=180)
    before, during, after = (process.seen[tick * 1200 - 1] for tick in (1, 2, 3))
    assert before > 18 * GIB
    assert during < 7 * GIB
    assert after > 17 * GIB
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


def test_what_is_left_before_the_system_kills(tmp_path: Path) -> None:
    """File pages in use, and swap, come before a kill; memory.high only slows down."""
    root = machine(tmp_path)
    group = root / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/box\n")
    (group / "memory.max").write_text(str(2 * GIB))
    (group / "memory.high").write_text(str(GIB))
    (group / "memory.current").write_text(str(GIB * 3 // 2))
    stat = f"anon 1\ninactive_file {GIB // 4}\nactive_file {GIB // 8}\n"
    (group / "memory.stat").write_text(stat)
    reading = readings.HostGauge(root).read()
    assert reading.total_bytes == GIB
    assert reading.available_bytes == 0
    assert reading.source.startswith("cgroup memory.high")
    assert reading.left_bytes == 2 * GIB - GIB * 5 // 4 + GIB // 8
    with (root / "proc/meminfo").open("a") as meminfo:
        meminfo.write(f"SwapTotal: {GIB >> 10} kB\nSwapFree: {GIB >> 10} kB\n")
    assert readings.HostGauge(root).read().left_bytes == reading.left_bytes + GIB
    (group / "memory.swap.max").write_text(str(GIB // 2))
    (group / "memory.swap.current").write_text(str(GIB // 4))
    assert readings.HostGauge(root).read().left_bytes == reading.left_bytes + GIB // 4


def test_v1_limits_memory_and_swap_together(tmp_path: Path) -> None:
    root = machine(tmp_path)
    group = root / "sys/fs/cgroup/memory/box"
    group.mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("4:memory:/box\n")
    with (root / "proc/meminfo").open("a") as meminfo:
        meminfo.write(f"SwapFree: {GIB >> 10} kB\n")
    (group / "memory.stat").write_text(f"active_file 7\ntotal_active_file {GIB // 8}\n")
    for name, limit, usage in (("", 2 * GIB, GIB), ("memsw.", 2 * GIB, GIB)):
        (group / f"memory.{name}limit_in_bytes").write_text(str(limit))
        (group / f"memory.{name}usage_in_bytes").write_text(str(usage))
    assert readings.HostGauge(root).read().left_bytes == GIB + GIB // 8
    (group / "memory.memsw.limit_in_bytes").write_text(str(2 * GIB + GIB // 4))
    assert readings.HostGauge(root).read().left_bytes == GIB + GIB // 8 + GIB // 4


def test_the_peak_of_this_process_is_measured() -> None:
    peak = readings.HostPeak()
    peak.begin()
    if peak.peak_bytes() is None:
        pytest.skip("the kernel does not keep it")
    # Mapped, for malloc may have as much that is free, and resident since another test.
    with mmap.mmap(-1, 64 << 20) as taken:
        np.frombuffer(taken, np.uint8)[:] = 1
    assert (peak.peak_bytes() or 0) >= 60 << 20
    peak.begin()
    assert (peak.peak_bytes() or 0) < 32 << 20


def test_without_the_files_no_peak_is_known(tmp_path: Path) -> None:
    peak = readings.HostPeak(tmp_path)
    peak.begin()
    assert peak.peak_bytes() is None


def test_this_machine_can_be_read() -> None:
    gauge = readings.HostGauge()
    first, reading, second = gauge.now_s(), gauge.read(), gauge.now_s()
    assert first <= second
    assert 0 < reading.available_bytes <= reading.total_bytes
