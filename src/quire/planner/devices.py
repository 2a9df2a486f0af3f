"""Devices by name, and the machine that a plan is made for.

A device's memory is what its driver reports where a public listing of that was read, else the size
that its maker states. Nothing of it is taken for used: what a driver, a display or another process
has, is not known before buying.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from quire.errors import ConfigError
from quire.memory.machine import DeviceMemory, Machine, MemoryBound, unified_memory_cap

_MIB, _GIB = 1 << 20, 1 << 30
_APPLE_PAGE, _CUDA_PAGE = 16 << 10, 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Memory that can be bought."""

    name: str
    total_bytes: int
    source: str
    is_unified: bool = False  # the processor and its GPU share it

    @property
    def page_bytes(self) -> int:
        """What physical memory comes in."""
        return _APPLE_PAGE if self.is_unified else _CUDA_PAGE


def _reported(name: str, mib: int) -> Device:
    return Device(name=name, total_bytes=mib * _MIB, source=f"nvidia-smi reports {mib:,} MiB")


def _stated(name: str, gib: int) -> Device:
    return Device(name=name, total_bytes=gib * _GIB, source=f"the maker states {gib} GB")


def _apple(gib: int) -> Device:
    return Device(
        name=f"Apple silicon, {gib} GB",
        total_bytes=gib * _GIB,
        source="Apple's size, unified memory",
        is_unified=True,
    )


# docs/reference/planning.md says where each was read, and when.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "t4": _reported("NVIDIA T4 16 GB", 15_360),
        "a10": _reported("NVIDIA A10 24 GB", 23_028),
        "l4": _reported("NVIDIA L4 24 GB", 23_034),
        "l40s": _reported("NVIDIA L40S 48 GB", 46_068),
        "rtx-a6000": _reported("NVIDIA RTX A6000 48 GB", 49_140),
        "rtx3090": _reported("NVIDIA RTX 3090 24 GB", 24_576),
        "rtx4090": _reported("NVIDIA RTX 4090 24 GB", 24_564),
        "rtx5090": _reported("NVIDIA RTX 5090 32 GB", 32_607),
        "a100-40gb": _reported("NVIDIA A100 40 GB", 40_960),
        "a100": _reported("NVIDIA A100 80 GB", 81_920),
        "h100": _reported("NVIDIA H100 80 GB", 81_559),
        "h200": _reported("NVIDIA H200 141 GB", 143_771),
        "mi300x": _stated("AMD MI300X", 192),
        **{f"apple-{gib}gb": _apple(gib) for gib in (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 512)},
    }
)


def device(name: str) -> Device:
    """Raises: ConfigError with the nearest name."""
    key = name.lower().replace(" ", "").replace("_", "-")
    if key not in DEVICES:
        near = get_close_matches(key, DEVICES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"device {name!r} is unknown; {hint}known: {', '.join(DEVICES)}. "
            "For another, give its size: --memory 80GB"
        )
    return DEVICES[key]


def machine_with(found: Device) -> Machine:
    """A machine whose KV memory is this device's; unified memory has a cap for its GPU."""
    bound = MemoryBound(source=found.name, limit_bytes=found.total_bytes, used_bytes=0)
    if found.is_unified:
        return Machine(
            bounds=(bound,),
            ram_bytes=found.total_bytes,
            working_set_bytes=unified_memory_cap(found.total_bytes),
        )
    memory = DeviceMemory(
        name=found.name, total_bytes=found.total_bytes, free_bytes=found.total_bytes
    )
    return Machine(bounds=(bound,), ram_bytes=found.total_bytes, device=memory)


def machine_of(memory_bytes: int) -> Machine:
    """A machine of so much memory, none of it used: its processor runs the model."""
    bound = MemoryBound(source="--memory", limit_bytes=memory_bytes, used_bytes=0)
    return Machine(bounds=(bound,), ram_bytes=memory_bytes)
