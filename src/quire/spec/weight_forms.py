"""Forms in which weights are kept when a model is quantized while it is loaded, by their names.

``int8`` and ``int4`` are the usual ones. A name says more where more is wanted: ``int4-g128`` has
one scale for 128 inputs, ``int4-g32-asym`` has a zero for each scale besides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire.errors import ConfigError

_SCALE_BITS = 16
_ZERO_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """Whole numbers with a scale for a group of an output's inputs."""

    bits: int
    group_size: int
    has_zeros: bool = False  # else the numbers count from their middle: symmetric

    @property
    def name(self) -> str:
        """Its whole name, whatever is usual."""
        return f"int{self.bits}-g{self.group_size}" + "-asym" * self.has_zeros

    @property
    def bits_a_weight(self) -> float:
        """With a scale, and a zero if there is one, for each group."""
        return self.bits + (_SCALE_BITS + _ZERO_BITS * self.has_zeros) / self.group_size


_BITS, _GROUPS = (8, 4), (32, 128)
_USUAL: Final[Mapping[str, WeightForm]] = MappingProxyType(
    {
        "int8": WeightForm(bits=8, group_size=128),
        "int4": WeightForm(bits=4, group_size=32),
    }
)
WEIGHT_FORMS: Final[Mapping[str, WeightForm]] = MappingProxyType(
    {
        **_USUAL,
        **{
            form.name: form
            for bits in _BITS
            for group in _GROUPS
            for zeros in (False, True)
            for form in [WeightForm(bits=bits, group_size=group, has_zeros=zeros)]
        },
    }
)


def weight_form(name: str) -> WeightForm:
    """Find a form by its name. Raises: ConfigError."""
    if name not in WEIGHT_FORMS:
        raise ConfigError(f"quantization {name!r} is unknown; known: {', '.join(WEIGHT_FORMS)}")
    return WEIGHT_FORMS[name]
