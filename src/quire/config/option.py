"""Make the field of an option, and check values.

Every message begins with the option's name, so that the user and ``environment`` know which option
is wrong.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from math import isfinite
from types import MappingProxyType
from typing import Any, TypeVar

from quire.errors import ConfigError

T = TypeVar("T")

ADVANCED = "Advanced"  # the help panel of options that few users change


def option(default: Any, help: str, *, secret: bool = False, **extra: Any) -> Any:
    """Make a dataclass field with a description.

    ``flag_type`` is the type of the flag if it is not the field's, and ``parse`` converts it.
    ``panel`` is the heading in the help. ``short`` are further names of the flag. ``repr`` does not
    show a ``secret``.
    """
    metadata = MappingProxyType({"help": help, **extra})
    return field(default=default, repr=not secret, metadata=metadata)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest one, or all known ones."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def in_range(name: str, value: Any, least: int, most: int = 2**40) -> None:
    """Check a whole number from ``least`` to ``most``. Raises: ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be a whole number")
    if not least <= value <= most:
        raise ConfigError(f"{name}={value:,} must be from {least:,} to {most:,}")


def seconds(name: str, value: Any, *, may_be_zero: bool) -> None:
    """Check a number of seconds, up to a day. Raises: ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a number of seconds")
    if value < 0 or (value == 0 and not may_be_zero) or value > 86_400:
        least = "at least 0" if may_be_zero else "above 0"
        raise ConfigError(f"{name}={value!r} must be {least} and at most a day (86400 seconds)")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Check that a value is one of ``known``. Raises: ConfigError."""
    if value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; known: {', '.join(known)}")


def switch(name: str, value: Any) -> None:
    """Check that a value is true or false. Raises: ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be true or false")


def object_of(name: str, kind: type[T], given: Any) -> T | None:
    """Make a dataclass of a JSON object, given as text or as a mapping. None stays None.

    Raises: ConfigError, for an unknown field with the known ones; what ``kind`` raises.
    """
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{name} {given!r} is not JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r} must be a JSON object")
    known = {option.name for option in fields(kind)}  # type: ignore[arg-type]
    for own in given:
        if own not in known:
            raise ConfigError(f"{name}: unknown {own!r}{nearest(own, known)}")
    return kind(**given)
