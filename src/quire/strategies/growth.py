"""How large the next buffer of ``growing`` is: policies by name.

Source: OpenVINO ``128 + id % 64`` tokens ahead; mlx-lm steps of 256; Hugging Face's DynamicCache is
a step of 1.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from quire.strategies.base import Growth
from quire.units import align_up

# (capacity, needed, step, layer) → the next capacity, in tokens
NextCapacity = Callable[[int, int, int, int], int]


def uniform(capacity: int, needed: int, step: int, layer: int) -> int:
    """Whole steps; every layer grows at the same token."""
    return align_up(needed, step)


def doubling(capacity: int, needed: int, step: int, layer: int) -> int:
    """Twice as much until it suffices: few copies, up to half of it unused."""
    capacity = max(capacity, step)
    while capacity < needed:
        capacity *= 2
    return capacity


def staggered(capacity: int, needed: int, step: int, layer: int) -> int:
    """``step + layer % 64`` tokens ahead: no two neighbouring layers are full at the same token."""
    return needed + step + layer % 64


GROWTH: Mapping[Growth, NextCapacity] = MappingProxyType(
    {"uniform": uniform, "doubling": doubling, "staggered": staggered}
)
