"""Devices by name."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError
from quire.memory.machine import unified_memory_cap
from quire.planner.hardware import DEVICES, device, machine_of, machine_with


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_is_a_machine(name: str) -> None:
    found = device(name)
    machine = machine_with(found)
    assert machine.available_bytes == found.total_bytes
    assert found.source
    assert (machine.device is None) == found.is_unified


def test_a_name_is_read_as_people_write_it() -> None:
    assert device("H100") is device("h100")
    assert device("RTX 4090") is device("rtx4090")
    with pytest.raises(ConfigError, match=r"did you mean 'h100'.*--memory 80GB"):
        device("h1000")


def test_a_gpu_that_shares_memory_gets_its_share() -> None:
    machine = machine_with(device("apple-36gb"))
    assert machine.hint == (unified_memory_cap(36 << 30), "recommended working set")
    assert machine_of(1 << 30).hint[0] == 1 << 30
