"""From values to places on a plot: scales, round ticks, and labels that keep apart."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

# Steps of a clock, in seconds; above a day, days in round numbers.
_CLOCK_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values from ``low`` to ``high`` lie from ``start`` to ``stop``; others at the nearer end."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False  # then ``low`` is above 0

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, value = log10(low), log10(high), log10(value)
        if high <= low:
            return self.start
        # Halves: the span of all floats is none.
        fraction = (value / 2 - low / 2) / (high / 2 - low / 2)
        return self.start + fraction * (self.stop - self.start)


def ticks(highest: float, *, num_steps: int = 4, base: float = 10) -> list[float]:
    """Round values from 0 on, the last one not below ``highest``; about so many steps.

    ``base`` is 1024 where values are bytes: then steps are powers of two.
    """
    highest = highest if highest > 0 else 1.0
    step = _round_step(highest / num_steps, base)
    return [number * step for number in range(max(1, ceil(highest / step)) + 1)]


def ticks_of_powers(low: float, high: float) -> list[float]:
    """1, 10, 100 … from not above ``low`` to not below ``high``; both are above 0."""
    first, last = floor(log10(low)), ceil(log10(high))
    return [float(f"1e{power}") for power in range(first, max(last, first + 1) + 1)]


def ticks_of_time(longest_s: float) -> tuple[list[float], float, str]:
    """Round seconds within ``longest_s``, and the unit in which a person would read them."""
    least = max(longest_s, sys.float_info.min) / 6
    if longest_s <= 120:
        step, unit_s, unit = _round_step(least, 10), 1.0, "seconds"
    elif longest_s <= 6 * 86_400:
        step = next((float(each) for each in _CLOCK_S if each >= least), 86_400.0)
        unit_s, unit = (60.0, "minutes") if longest_s <= 7200 else (3600.0, "hours")
    else:
        step, unit_s, unit = 86_400 * _round_step(least / 86_400, 10), 86_400.0, "days"
    return [number * step for number in range(floor(longest_s / step) + 1)], unit_s, unit


def spread(positions: Sequence[float], gap: float, highest: float) -> list[float]:
    """Move labels apart so that none covers another, in their order, none below ``highest``."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    result = list(positions)
    floor_y = highest - gap * (len(order) - 1)
    for rank, index in enumerate(order):
        result[index] = max(
            min(positions[index], floor_y + rank * gap),
            result[order[rank - 1]] + gap if rank else -1e9,
        )
    return result


def _round_step(least: float, base: float) -> float:
    """The smallest round step that is not below ``least``: 1, 2 or 5 times a power of ten, or for
    bytes a power of two.
    """
    if base == 1024:
        step = 1.0
        while step < least:
            step *= 2
        return step
    if least <= sys.float_info.min:
        return sys.float_info.min
    power = float(10 ** floor(log10(least)))
    return next((m * power for m in (1, 2, 5, 10) if m * power >= least), 10 * power)
