"""How fast named devices compute and read, as published, and what of it is reached.

The sizes of their memory are ``devices``' matter. A roofline is no measurement: for figures of a
machine that is there, calibrate on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.errors import ConfigError
from quire.planner.simulation.costs import RooflineCosts
from quire.planner.subjects.subject import Subject
from quire.spec import ModelSpec

# What serving reaches of the peaks, and what a step takes besides. Assumptions, not measurements:
# large products reach more, small ones less.
COMPUTE_FRACTION, BANDWIDTH_FRACTION = 0.6, 0.8
STEP_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Peaks of a device: dense products in 16 bits, its memory, and its link to the host."""

    flops_per_s: float
    bytes_per_s: float
    host_bytes_per_s: float


def _speed(teraflops: float, gigabytes: float, host_gigabytes: float) -> Speed:
    return Speed(
        flops_per_s=teraflops * 1e12,
        bytes_per_s=gigabytes * 1e9,
        host_bytes_per_s=host_gigabytes * 1e9,
    )


# Teraflops without sparsity, with sums in 32 bits; PCIe in one direction. Where these are from is
# in docs/concepts/simulator.md.
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
    """What a step takes on a device that is named, or on so many that share the heads.

    Queries are taken to be as wide as the hidden states. What ranks tell each other takes no time
    here. Raises: ConfigError for a device whose speed is not known.
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
