"""The budget rules: golden numbers of the seeds, and what must hold on every machine.

The property: whatever a rule gives fits the machine; where it refuses and names a flag, that flag
makes it say yes on the same machine; where it names none, no number of bytes would fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from quire.errors import ConfigError
from quire.memory.budget import BUDGETS, headroom_bytes, make_ledger
from quire.memory.budget.ledger import Ledger, Needs
from quire.memory.machine import DeviceMemory, Machine, read_machine, unified_memory_cap
from quire.memory.machine.probe import MemoryBound
from quire.units import parse_bytes

KIB, MIB, GIB = 2**10, 2**20, 2**30
MACHINES = Path(__file__).parent / "machines"

TOKEN = 147_456  # Qwen3-4B in bfloat16: 36 layers of 8 heads of 128, seed 0


def machine_of(ram: int, used: int, *limits: tuple[int, int], ours: int = 0) -> Machine:
    bounds = [MemoryBound(source="MemAvailable", limit_bytes=ram, used_bytes=used)]
    for index, (limit, gone) in enumerate(limits):
        name = f"cgroup memory.max of /{index}"
        bounds.append(MemoryBound(source=name, limit_bytes=limit, used_bytes=gone))
    bounds.sort(key=lambda bound: bound.available_bytes)
    return Machine(bounds=tuple(bounds), ram_bytes=ram, ram_used_bytes=used, process_bytes=ours)


def needs_of(**changes: Any) -> Needs:
    needs = Needs(
        weights_bytes=8 * GIB,
        activation_bytes=GIB,
        bytes_per_token=TOKEN,
        context_tokens=8192,
        least_bytes=128 * TOKEN,
    )
    return replace(needs, **changes)


def applied(ledger: Ledger, machine: Machine, needs: Needs, options: dict[str, Any]) -> Ledger:
    """The ledger after doing what the refusal says."""
    assert ledger.remedy is not None
    option, value = ledger.remedy.option, ledger.remedy.value
    if option == "max_model_len":
        return make_ledger(machine, replace(needs, context_tokens=int(value)), **options)
    changed: dict[str, Any] = {
        "memory_utilization": lambda: {"utilization": float(value)},
        "memory_mode": lambda: {"mode": value},
        "kv_cache_memory_bytes": lambda: {"kv_cache_memory_bytes": parse_bytes(value)},
    }[option]()
    return make_ledger(machine, needs, **{**options, **changed})


# -- golden numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(("ram", "cap"), [(36, 24), (64, 48), (18, 12), (128, 96)])
def test_ram_cap_of_mistralrs(ram: int, cap: int) -> None:
    """Seed 1: two thirds of system RAM up to 36 GB, three quarters otherwise."""
    assert unified_memory_cap(ram * GIB) == cap * GIB


@pytest.mark.parametrize(("ram", "share"), [(16, 0.60), (36, 0.60), (64, 0.675), (512, 0.675)])
def test_effective_ceiling_of_mistralrs(ram: int, share: float) -> None:
    """Seed 1: the cap and the utilization of 0.9 leave 60-68 % of RAM, before weights."""
    needs = needs_of(weights_bytes=0, activation_bytes=0)
    ledger = make_ledger(machine_of(ram * GIB, 0), needs, budget="mistralrs")
    assert ledger.kv_bytes / (ram * GIB) == pytest.approx(share, abs=1e-6)
    assert 0.60 <= round(ledger.kv_bytes / (ram * GIB), 6) <= 0.68


def test_vllm_claims_a_share_of_the_total_and_refuses_if_it_is_not_free() -> None:
    """Seed 1: total x utilization - weights - peak; fails if more than what is actually free."""
    needs = needs_of()
    ledger = make_ledger(machine_of(80 * GIB, 4 * GIB), needs, budget="vllm")
    assert ledger.kv_bytes == 72 * GIB - 8 * GIB - GIB
    busy = make_ledger(machine_of(80 * GIB, 20 * GIB), needs, budget="vllm")
    assert busy.refusal is not None
    assert (
        busy.advice == "set --memory-utilization 0.73"
    )  # 60 GiB are free, and 2 % of KV less is said


def test_fraction_is_of_ram_and_says_which_fraction_would_fit() -> None:
    """Seed 1: it reports the available memory and the fraction that the user would need to set."""
    confined = machine_of(64 * GIB, 4 * GIB, (32 * GIB, 2 * GIB))
    ledger = make_ledger(confined, needs_of(), budget="fraction")
    assert ledger.terms[0].num_bytes == 64 * GIB
    with pytest.raises(ConfigError, match=r"21\.00 GiB \(cgroup .*set --memory-utilization 0\.46"):
        ledger.require()
    assert make_ledger(confined, needs_of(), budget="fraction", utilization=0.46).require()


def test_llamacpp_commits_the_context_whole() -> None:
    """Seed 1: KV at a user-given capacity, under hint - allocated; others' use is invisible."""
    ledger = make_ledger(machine_of(32 * GIB, 4 * GIB), needs_of(), budget="llamacpp")
    assert ledger.kv_bytes == 8192 * TOKEN
    assert ledger.committed_whole
    long = make_ledger(
        machine_of(32 * GIB, 4 * GIB), needs_of(context_tokens=262_144), budget="llamacpp"
    )
    assert long.advice == f"lower it, set --max-model-len {19 * GIB * 49 // 50 // TOKEN}"


def test_auto_leaves_headroom_and_needs_no_number_for_either_of_seed_1s_cases() -> None:
    desk = machine_of(24 * GIB, 6 * GIB)
    shared = make_ledger(desk, needs_of())
    dedicated = make_ledger(desk, needs_of(), mode="dedicated")
    assert shared.kv_bytes == (24 - 6 - 4 - 8 - 1) * GIB
    assert dedicated.kv_bytes == (24 - 6 - 8 - 1) * GIB - 512 * MIB
    assert shared.bound == "MemAvailable"


@pytest.mark.parametrize(
    ("total", "shared", "dedicated"),
    [
        (1 * GIB, 256 * MIB, 256 * MIB),
        (8 * GIB, 2 * GIB, 512 * MIB),
        (24 * GIB, 4 * GIB, 512 * MIB),
        (512 * GIB, 512 * GIB * 15 // 100, 512 * GIB * 2 // 100),
    ],
)
def test_headroom(total: int, shared: int, dedicated: int) -> None:
    assert headroom_bytes(total, "shared") == shared
    assert headroom_bytes(total, "dedicated") == dedicated


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", BUDGETS)
def test_weights_are_counted_once_whether_loaded_or_not(rule: str) -> None:
    """Before loading, after loading into memory, and mapped from a file: the same answer."""
    before = machine_of(64 * GIB, 6 * GIB, ours=GIB)
    after = machine_of(64 * GIB, 14 * GIB, ours=9 * GIB)
    mapped = machine_of(64 * GIB, 6 * GIB, ours=GIB)  # the kernel calls mapped pages available
    options: dict[str, Any] = {"budget": rule, "utilization": 0.8}
    to_come = make_ledger(before, needs_of(), **options)
    loaded = make_ledger(after, needs_of(counted_weights_bytes=8 * GIB), **options)
    of_file = make_ledger(mapped, needs_of(), **options)
    assert to_come.refusal is None
    assert to_come.kv_bytes == loaded.kv_bytes == of_file.kv_bytes
    assert to_come.room_bytes == loaded.room_bytes == of_file.room_bytes


def test_weights_of_mistralrs_need_headroom_of_their_own() -> None:
    ledger = make_ledger(
        machine_of(16 * GIB, 0), needs_of(weights_bytes=16 * GIB - 400 * MIB), budget="mistralrs"
    )
    assert "headroom" in (ledger.refusal or "")


# -- what the user says ----------------------------------------------------------------------------


def test_bytes_override_every_rule_but_not_the_machine() -> None:
    machine = machine_of(24 * GIB, 4 * GIB, (16 * GIB, 2 * GIB))
    for rule in BUDGETS:
        given_bytes = {"budget": rule, "kv_cache_memory_bytes": 2 * GIB}
        assert make_ledger(machine, needs_of(), **given_bytes).require() == 2 * GIB
    too_much = make_ledger(machine, needs_of(), kv_cache_memory_bytes=6 * GIB)
    assert too_much.room_bytes == 5 * GIB
    with pytest.raises(ConfigError) as refused:
        too_much.require()
    said = str(refused.value)
    assert "kv_cache_memory_bytes=6.00 GiB is more than the machine has available, 5.00 GiB" in said
    assert "cgroup memory.max of /0" in said
    assert "lower it, set --kv-cache-memory-bytes 5017MiB" in said


def test_more_than_can_be_used_is_a_line_of_its_own() -> None:
    ledger = make_ledger(machine_of(64 * GIB, 0), needs_of(most_bytes=3 * GIB))
    assert ledger.kv_bytes == 3 * GIB
    assert ledger.terms[-1].label == "never usable"
    assert ledger.bound == "max_num_seqs × max_model_len"
    asked = make_ledger(
        machine_of(64 * GIB, 0), needs_of(most_bytes=GIB), kv_cache_memory_bytes=2 * GIB
    )
    assert asked.kv_bytes == 2 * GIB


def test_a_refusal_prints_the_ledger() -> None:
    machine = machine_of(16 * GIB, 10 * GIB)
    with pytest.raises(ConfigError) as refused:
        make_ledger(machine, needs_of(), budget="vllm").require()
    text = str(refused.value)
    for word in ("hint", "not claimed", "weights", "activations", "MemAvailable", "-8.00 GiB"):
        assert word in text
    assert "no budget makes room here" in text


def test_a_device_is_counted_by_itself() -> None:
    device = DeviceMemory(name="H200", total_bytes=140 * GIB, free_bytes=138 * GIB)
    machine = replace(machine_of(128 * GIB, 100 * GIB), device=device)
    for rule in ("vllm", "fraction", "mistralrs"):
        ledger = make_ledger(machine, needs_of(), budget=rule)
        assert ledger.kv_bytes == 126 * GIB - 9 * GIB
        assert "H200" in ledger.bound


@pytest.mark.parametrize("name", sorted(path.name for path in MACHINES.iterdir()))
@pytest.mark.parametrize("rule", BUDGETS)
def test_on_recorded_machines_it_fits_or_says_what_would(name: str, rule: str) -> None:
    machine = read_machine(MACHINES / name)
    needs = needs_of(weights_bytes=GIB, activation_bytes=256 * MIB)
    options: dict[str, Any] = {"budget": rule}
    ledger = make_ledger(machine, needs, **options)
    if ledger.refusal is not None:
        assert ledger.remedy is not None
        assert applied(ledger, machine, needs, options).refusal is None


def test_a_limit_on_addresses_counts_what_is_only_reserved() -> None:
    limit = MemoryBound(source="RLIMIT_AS (ulimit -v)", limit_bytes=20 * GIB, used_bytes=2 * GIB)
    machine = replace(machine_of(64 * GIB, 0), bounds=(limit, *machine_of(64 * GIB, 0).bounds))
    needs = needs_of(address_bytes=GIB, addresses_per_byte=2)
    ledger = make_ledger(machine, needs)
    assert ledger.room_bytes == (20 - 2 - 8 - 1 - 1) * GIB // 2
    assert ledger.kv_bytes == ledger.room_bytes  # no headroom: no other takes its addresses
    assert ledger.terms[-1].label == "addresses"
    assert ledger.bound == limit.source


def test_addresses_are_left_where_headroom_leaves_less_memory() -> None:
    """There are addresses for 8 GiB and memory for 9, of which 4 stay free for others."""
    limit = MemoryBound(source="RLIMIT_AS (ulimit -v)", limit_bytes=30 * GIB, used_bytes=13 * GIB)
    desk = machine_of(24 * GIB, 6 * GIB)
    ledger = make_ledger(replace(desk, bounds=(limit, *desk.bounds)), needs_of())
    assert ledger.room_bytes == (30 - 13 - 8 - 1) * GIB
    assert ledger.kv_bytes == (24 - 6 - 4 - 8 - 1) * GIB
    assert ledger.bound == "MemAvailable"


# -- on any machine --------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Machine, Needs, dict[str, Any]]:
    def size(most: int, least: int = 0) -> int:
        return draw(st.integers(least, most))

    ram = size(2**43, 2**26)
    limits = []
    for _ in range(size(3)):
        limit = size(ram, 2**20)
        limits.append((limit, size(limit + limit // 4)))
    used = size(ram)
    machine = machine_of(ram, used, *limits, ours=size(used))
    if draw(st.booleans()):
        limit = size(ram, 2**20)
        bound = MemoryBound(
            source="RLIMIT_AS (ulimit -v)", limit_bytes=limit, used_bytes=size(limit)
        )
        bounds = sorted((*machine.bounds, bound), key=lambda bound: bound.available_bytes)
        machine = replace(machine, bounds=tuple(bounds))
    if draw(st.integers(0, 4)) == 0:
        total = size(2**40, 2**28)
        device = DeviceMemory(name="device", total_bytes=total, free_bytes=size(total))
        machine = replace(machine, device=device)
    token, context = size(2**20, 1), size(2**20, 2)
    weights = size(machine.available_bytes + machine.available_bytes // 8)
    needs = Needs(
        weights_bytes=weights,
        counted_weights_bytes=size(min(weights, machine.process_bytes)),
        activation_bytes=size(machine.available_bytes // 4),
        bytes_per_token=token,
        address_bytes=size(2**30),
        addresses_per_byte=size(4, 1),
        context_tokens=context,
        least_bytes=token * size(min(context, 128), 1),
        most_bytes=draw(st.none() | st.integers(token * context, 2**44)),
    )
    options = {
        "budget": draw(st.sampled_from(sorted(BUDGETS))),
        "utilization": draw(st.none() | st.floats(0.01, 1)),
        "mode": draw(st.sampled_from(["shared", "dedicated"])),
        "kv_cache_memory_bytes": draw(st.none() | st.integers(1, 2**44)),
    }
    return machine, needs, options


def room_of(machine: Machine, needs: Needs) -> int:
    """The room, said once more in other words."""
    besides = needs.weights_to_come_bytes + needs.activation_bytes
    if machine.device is not None:
        return machine.device.free_bytes - besides
    rooms = []
    for bound in machine.bounds:
        room = max(0, bound.limit_bytes - bound.used_bytes) - besides
        if "ulimit" in bound.source:
            room = (room - needs.address_bytes) // needs.addresses_per_byte
        rooms.append(room)
    return min(rooms)


@settings(max_examples=examples(200, of=800), deadline=None)
@given(cases())
def test_it_fits_or_names_what_would(case: tuple[Machine, Needs, dict[str, Any]]) -> None:
    machine, needs, options = case
    ledger = make_ledger(machine, needs, **options)
    room = room_of(machine, needs)
    assert ledger.room_bytes == room
    if ledger.refusal is None:
        assert ledger.require() == ledger.kv_bytes == sum(t.num_bytes for t in ledger.terms) <= room
        asked = options["kv_cache_memory_bytes"]
        assert ledger.kv_bytes == asked or ledger.kv_bytes >= needs.least_bytes
        return
    with pytest.raises(ConfigError) as refused:
        ledger.require()
    if ledger.remedy is None:
        assert room < needs.least_bytes
        assert "no budget makes room" in str(refused.value)
        return
    assert ledger.remedy.flag in str(refused.value)
    after = applied(ledger, machine, needs, options)
    assert after.refusal is None, ledger.remedy
    assert needs.least_bytes <= after.kv_bytes <= room


@settings(max_examples=examples(80, of=300), deadline=None)
@given(cases(), st.integers(0, 2**36))
def test_less_memory_never_gives_more(
    case: tuple[Machine, Needs, dict[str, Any]], taken: int
) -> None:
    """A neighbour that takes memory can only lower what ``auto`` gives, byte for byte."""
    machine, needs, options = case
    options = {**options, "budget": "auto", "kv_cache_memory_bytes": None}
    if machine.device is not None:
        return
    poorer = replace(
        machine,
        bounds=tuple(
            sorted(
                (replace(bound, used_bytes=bound.used_bytes + taken) for bound in machine.bounds),
                key=lambda bound: bound.available_bytes,
            )
        ),
    )
    before, after = (make_ledger(m, needs, **options) for m in (machine, poorer))
    if after.refusal is None:
        assert before.refusal is None
        assert after.kv_bytes <= before.kv_bytes
