"""Devices by name."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError
from quire.memory.machine import unified_memory_cap
from quire.planner.hardware import (
    DEVICES,
    SPEEDS,
    device,
    device_key,
    known_speed,
    machine_of,
    machine_with,
)


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


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("a100-80gb", "a100"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA A10G", "a10g"),
        ("RTX 6000 Pro", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("M4 Max 128GB", "apple-m4-max-128gb"),
        ("GB200", "gb200"),
    ],
)
def test_a_name_is_read_as_drivers_and_makers_write_it(name: str, key: str) -> None:
    assert device_key(name) == key


@pytest.mark.parametrize(
    ("name", "key", "word"),
    [
        ("NVIDIA H100 PCIe", "h100", "pcie"),
        ("NVIDIA H100 NVL", "h100", "nvl"),
        ("H200 NVL", "h200", "nvl"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090", "laptop"),
        ("RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000", "maxq"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-40gb", "mig"),
    ],
)
def test_a_slower_card_of_the_same_name_is_refused(name: str, key: str, word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word} makes it another card than '{key}'"):
        device_key(name)


def test_the_beginning_of_several_names_is_none() -> None:
    with pytest.raises(ConfigError, match=r"several begin so: apple-m4-max-36gb, apple-m4-max-48g"):
        device("apple-m4-max")


@pytest.mark.parametrize("name", sorted(SPEEDS))
def test_narrow_products_are_never_slower(name: str) -> None:
    assert name in DEVICES
    four, eight, sixteen = (SPEEDS[name].flops_in(bits) for bits in (4, 8, 16))
    assert four >= eight >= sixteen > 0
    assert SPEEDS[name].link_bytes_per_s >= SPEEDS[name].host_bytes_per_s > 0


def test_speeds_are_known_but_of_apples_older_sizes() -> None:
    unknown = [name for name in DEVICES if known_speed(name) is None]
    assert all(name.startswith("apple-") and name.count("-") == 1 for name in unknown)


def test_a_gpu_that_shares_memory_gets_its_share() -> None:
    machine = machine_with(device("apple-36gb"))
    assert machine.hint == (unified_memory_cap(36 << 30), "recommended working set")
    assert machine_of(1 << 30).hint[0] == 1 << 30
