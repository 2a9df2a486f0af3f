"""Parse and format numbers of bytes, tokens and seconds, and round them to blocks and pages.

Bytes are written in powers of 1024 (``KiB``, ``MiB``, ``GiB``). When parsed, ``16GB`` is 16 *
10**9, and ``16GiB`` (or ``16G``, as users type it) is 16 * 2**30.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from quire.errors import ConfigError

_UNITS: Mapping[str, int] = MappingProxyType(
    {
        "": 1,
        "b": 1,
        "k": 2**10,
        "kib": 2**10,
        "kb": 10**3,
        "m": 2**20,
        "mib": 2**20,
        "mb": 10**6,
        "g": 2**30,
        "gib": 2**30,
        "gb": 10**9,
        "t": 2**40,
        "tib": 2**40,
        "tb": 10**12,
    }
)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)


def align_up(value: int, step: int) -> int:
    """Return the least multiple of ``step`` that is at least ``value``."""
    return ceil_div(value, step) * step


def align_down(value: int, step: int) -> int:
    """Return the greatest multiple of ``step`` that is at most ``value``."""
    return value // step * step


def parse_bytes(text: str | int) -> int:
    """Read ``"1.5GiB"``, ``"16GB"``, ``"512m"`` or a plain number of bytes.

    Raises: ConfigError for anything else.
    """
    if isinstance(text, int):
        return text
    match = _BYTES.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size: write e.g. 512MiB, 16GB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_count(text: str | int) -> int:
    """Read ``"4M"``, ``"2.5k"``, ``"1G"`` or a plain number of tokens: powers of 1000.

    Raises: ConfigError for anything else.
    """
    match = _BYTES.fullmatch(str(text).strip())
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a count: write e.g. 4M, 500k or a plain number")
    return round(float(match[1]) * factor)


def format_bytes(num_bytes: float) -> str:
    """Write bytes with three or four significant digits: ``14.06 MiB``."""
    sign, value = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            digits = 0 if unit == "B" or value >= 1000 else 1 if value >= 100 else 2
            return f"{sign}{value:.{digits}f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_count(count: int) -> str:
    """Write a count with thousands separators: ``40,960``."""
    return f"{count:,}"


def format_number_of(count: int, name: str) -> str:
    """Write a count with what is counted: ``1 record``, ``2,000 records``."""
    return f"{format_count(count)} {name}{'s' * (count != 1)}"


def format_seconds(seconds: float) -> str:
    """Write a duration in a fitting unit: ``12 ms``, ``3.4 s``, ``2 m 05 s``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} m {seconds % 60:02.0f} s"


def format_latency(seconds: float) -> str:
    """Write seconds in three digits, as milliseconds where they are less than one: ``12.3 ms``."""
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
