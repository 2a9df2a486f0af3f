"""What an option is made of: its field and description, and the checks that several need.

Every message begins with the option's name: so its reader, and ``environment``, know which option
was wrong.
"""

from collections.abc import Iterable
from dataclasses import field
from difflib import get_close_matches
from math import isfinite
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError

ADVANCED = "Advanced"  # the panel of options that are rarely changed


def option(default: Any, help: str, *, secret: bool = False, **extra: Any) -> Any:
    """A field and its description.

    ``flag_type`` is what a flag takes, if not the field's type; ``parse`` reads it then. ``panel``
    is where the help has it, ``ADVANCED`` if it is rarely changed; ``short`` are other names of the
    flag. A ``secret`` is not shown by ``repr``.
    """
    metadata = MappingProxyType({"help": help, **extra})
    return field(default=default, repr=not secret, metadata=metadata)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that refuses an unknown name."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def in_range(name: str, value: Any, least: int, most: int = 2**40) -> None:
    """Raises: ConfigError for what is no whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be a whole number")
    if not least <= value <= most:
        raise ConfigError(f"{name}={value:,} must be from {least:,} to {most:,}")


def seconds(name: str, value: Any, *, may_be_zero: bool) -> None:
    """Raises: ConfigError for what is no finite number of seconds, up to a day."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a number of seconds")
    if value < 0 or (value == 0 and not may_be_zero) or value > 86_400:
        least = "at least 0" if may_be_zero else "above 0"
        raise ConfigError(f"{name}={value!r} must be {least} and at most a day (86400 seconds)")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises: ConfigError for what is none of them."""
    if value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; known: {', '.join(known)}")
