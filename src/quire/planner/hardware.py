"""Describe devices by name: their memory and speed, and the machine that a plan is made for.

A device's memory is the size that its driver reports, if a public listing of that was found, else
the size that its maker states. All of it counts as free, since the use by a driver, a display or
another process is not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from quire.errors import ConfigError
from quire.memory.machine import DeviceMemory, Machine, MemoryBound, unified_memory_cap
from quire.planner.simulation.cost_model import RooflineCosts
from quire.planner.subject import Subject
from quire.spec import ModelSpec

# -- devices ---------------------------------------------------------------------------------------


_MIB, _GIB = 1 << 20, 1 << 30
_APPLE_PAGE, _CUDA_PAGE = 16 << 10, 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that a plan can name, and its memory."""

    name: str
    total_bytes: int
    source: str
    is_unified: bool = False  # the CPU and the GPU share the memory

    @property
    def page_bytes(self) -> int:
        """Return the size of a page of physical memory."""
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


# docs/reference/planning.md has the source of each, and its date.
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
    """Find a device by its name. Raises: ConfigError with the nearest name."""
    key = name.lower().replace(" ", "").replace("_", "-")
    if key not in DEVICES:
        near = get_close_matches(key, DEVICES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"device {name!r} is unknown; {hint}known: {', '.join(DEVICES)}. "
            "For another device, give its size: --memory 80GB"
        )
    return DEVICES[key]


def machine_with(found: Device) -> Machine:
    """Make a machine with this device; unified memory has a limit for the GPU's part."""
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
    """Make a machine that runs the model on its CPU, with this many bytes of free memory."""
    bound = MemoryBound(source="--memory", limit_bytes=memory_bytes, used_bytes=0)
    return Machine(bounds=(bound,), ram_bytes=memory_bytes)


# -- speeds ----------------------------------------------------------------------------------------

# The share of the published peaks that serving reaches, and the engine's own time per step. These
# are assumptions and not measurements: large products reach more, small ones less. For figures of
# a machine that you have, calibrate on it.
COMPUTE_FRACTION, BANDWIDTH_FRACTION = 0.6, 0.8
STEP_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A device's peaks: dense products in 16 bits, memory bandwidth, and the link to the host."""

    flops_per_s: float
    bytes_per_s: float
    host_bytes_per_s: float


def _speed(teraflops: float, gigabytes: float, host_gigabytes: float) -> Speed:
    return Speed(
        flops_per_s=teraflops * 1e12,
        bytes_per_s=gigabytes * 1e9,
        host_bytes_per_s=host_gigabytes * 1e9,
    )


# Teraflops without sparsity, with sums in 32 bits; PCIe in one direction. The sources
# are in docs/concepts/simulator.md.
SPEEDS: Mapping[str, Speed] = MappingProxyType(
    {
        "t4": _speed(65, 320, 16),
        "l4": _speed(121, 300, 32),
        "l40s": _speed(362, 864, 32),
        "rtx4090": _speed(165, 1008, 32),
        "a100-40gb": _speed(312, 1555, 32),
        "a100": _speed(312, 2039, 32),
        "h100": _speed(989, 3350, 64),
        "h200": _speed(989, 4800, 64),
        "mi300x": _speed(1307, 5300, 64),
    }
)


def roofline(subject: Subject, on_rank: ModelSpec, name: str, num_ranks: int) -> RooflineCosts:
    """Make a cost model of a named device, or of ``num_ranks`` of them that share the heads.

    It assumes queries as wide as the hidden states, and no time for communication between ranks.

    Raises: ConfigError for a device of unknown speed.
    """
    if name not in SPEEDS:
        raise ConfigError(
            f"the speed of {name!r} is unknown; known: {', '.join(SPEEDS)}. For another machine, "
            f"calibrate on it: quire bench --calibrate OUT.json, then --calibration OUT.json"
        )
    speed = SPEEDS[name]
    return RooflineCosts(
        flops_per_s=COMPUTE_FRACTION * speed.flops_per_s,
        bytes_per_s=BANDWIDTH_FRACTION * speed.bytes_per_s,
        host_bytes_per_s=BANDWIDTH_FRACTION * speed.host_bytes_per_s,
        step_s=STEP_S,
        weights_bytes=subject.own.weights_bytes // num_ranks,
        flops_per_token=2 * subject.num_active_parameters / num_ranks,
        flops_per_pair=4 * subject.own.hidden_size * subject.spec.num_layers / num_ranks,
        entry_bytes=on_rank.bytes_per_token,
    )
