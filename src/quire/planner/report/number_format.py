"""How numbers are written in a report: a unit once an axis, and cells of tables."""

from collections.abc import Sequence

from quire.units import format_bytes, format_count

_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_CLOCK = ((86_400, "d"), (3600, "h"), (60, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_COUNTS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def axis_of_bytes(values: Sequence[float]) -> list[str]:
    """Labels of an axis: the unit only at its top."""
    size, unit = next((each for each in _BYTES if values[-1] >= each[0]), (1, "B"))
    return _labels(values, size, f" {unit}")


def axis_of_counts(values: Sequence[float]) -> list[str]:
    size, unit = next((each for each in _COUNTS if values[-1] >= 10 * each[0]), (1, ""))
    return [f"{value / size:,g}{unit if value else ''}" for value in values]


def axis_of_powers(values: Sequence[float]) -> list[str]:
    """Each with its own unit: 100k, 1M, 10M."""
    labels = []
    for value in values:
        least, unit = next((each for each in _COUNTS if value >= each[0]), (1, ""))
        labels.append(f"{value / least:,g}{unit}")
    return labels


def axis_of_shares(values: Sequence[float]) -> list[str]:
    return [f"{100 * value:g}%" for value in values]


def duration(seconds: float) -> str:
    """Three digits, in a unit that a person would use."""
    if seconds <= 0:
        return "0"
    for size, unit in _CLOCK:
        value = seconds / size
        if value >= (10 if unit == "min" else 0.9995):
            return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{seconds:.1e} s"


def rate(value: float) -> str:
    """A number a second: three digits, and never a power of ten where people read it."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"


def share(value: float) -> str:
    return f"{value:.1%}"


def size(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))


def file_name(source: str) -> str:
    """Without the folders or the address that it lies in."""
    return source.rstrip("/").rsplit("/", 1)[-1] or source


def count(number: float) -> str:
    return format_count(round(number))


def times(ratio: float) -> str:
    """How many times as much."""
    return f"{ratio:,.0f}\N{NO-BREAK SPACE}×" if ratio >= 100 else f"{ratio:.3g}\N{NO-BREAK SPACE}×"


def short(text: str, longest: int) -> str:
    """With an ellipsis where it is too long."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _labels(values: Sequence[float], size: float, unit: str) -> list[str]:
    last = len(values) - 1
    return [f"{value / size:,g}{unit if at == last else ''}" for at, value in enumerate(values)]
