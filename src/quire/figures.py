"""Draw plots as SVG.

A color is any that SVG takes: a value, or a variable of the page with the plot.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import final

# -- scales ----------------------------------------------------------------------------------------

# Steps of a time axis, in seconds; above a day, round numbers of days.
_CLOCK_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps values of [low, high] to places of [start, stop], and others to the nearer end."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False  # needs ``low`` above 0

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, value = log10(low), log10(high), log10(value)
        # The halves cannot overflow, as the span of the largest floats would.
        span = high / 2 - low / 2
        if span <= 0:  # also of the two smallest floats
            return self.start
        fraction = (value / 2 - low / 2) / span
        return self.start + fraction * (self.stop - self.start)


def ticks(highest: float, *, num_steps: int = 4, base: float = 10) -> list[float]:
    """Return round values from 0 up to at least ``highest``, in about ``num_steps`` steps.

    With ``base`` 1024, for bytes, steps are powers of two.
    """
    highest = highest if highest > 0 else 1.0
    step = _round_step(highest / num_steps, base)
    return [number * step for number in range(max(1, ceil(highest / step)) + 1)]


def ticks_of_powers(low: float, high: float) -> list[float]:
    """Return the powers of ten around [low, high]; both are above 0."""
    first, last = floor(log10(low)), ceil(log10(high))
    return [float(f"1e{power}") for power in range(first, max(last, first + 1) + 1)]


def ticks_of_time(longest_s: float) -> tuple[list[float], float, str]:
    """Return round seconds up to ``longest_s``, and the unit for their labels with its seconds."""
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
    """Move labels apart by ``gap``, in their order, with none below ``highest``."""
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
    """Return the least round step ≥ ``least``: 1, 2 or 5 times a power of ten, or a power of 2."""
    if base == 1024:
        step = 1.0
        while step < least:
            step *= 2
        return step
    if least <= sys.float_info.min:
        return sys.float_info.min
    power = float(10 ** floor(log10(least)))
    return next((m * power for m in (1, 2, 5, 10) if m * power >= least), 10 * power)


# -- plots -----------------------------------------------------------------------------------------

Points = Sequence[tuple[float, float]]


@final
class Plot:
    """A plot of ``width`` by ``height``, whose scales ``x`` and ``y`` map values to places."""

    def __init__(self, *, width: float, height: float, x: Scale, y: Scale) -> None:
        self.width, self.height, self.x, self.y = width, height, x, y
        self.parts: list[str] = []

    def y_axis(self, values: Sequence[float], labels: Sequence[str]) -> None:
        """Draw a horizontal line per value, with its label on the left."""
        left, right = self.x.start, self.x.stop
        for value, label in zip(values, labels, strict=True):
            at = self.y(value)
            self.parts.append(f'<path class="grid" d="M{left:g} {at:.1f}H{right:g}"/>')
            self.text(left - 8, at + 4, label, anchor="end", kind="tick")

    def x_axis(self, values: Sequence[float], labels: Sequence[str], name: str) -> None:
        """Draw labels below the frame, and the name of the axis."""
        for value, label in zip(values, labels, strict=True):
            self.text(self.x(value), self.y.start + 20, label, anchor="middle", kind="tick")
        middle = (self.x.start + self.x.stop) / 2
        self.text(middle, self.y.start + 38, name, anchor="middle", kind="tick")

    def line(self, points: Points, color: str, *, dashes: str = "") -> None:
        """Draw a line through points."""
        if not points:
            return
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<path fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"{dashed} '
            f'd="M{self._path(points)}"/>'
        )
        if len(points) == 1:  # a line of one point is invisible
            (x, y), *_ = points
            self.parts.append(
                f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4" fill="{color}"/>'
            )

    def area(self, points: Points, below: Points, color: str, *, opacity: float) -> None:
        """Fill the area between two lines that go from left to right."""
        if points:
            outline = self._path([*points, *reversed(below)])
            self.parts.append(f'<path fill="{color}" opacity="{opacity:g}" d="M{outline}Z"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        kind: str = "",
        color: str = "",
    ) -> None:
        """Write a text at a place, not at values."""
        shown = f' class="{kind}"' if kind else ""
        shown += f' fill="{color}"' if color else ""
        self.parts.append(
            f'<text{shown} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self, label: str) -> str:
        """Return the SVG element for a page that styles its texts; ``label`` describes it."""
        inner = "\n".join(self.parts)
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(label)}">\n{inner}\n</svg>'
        )

    def _path(self, points: Points) -> str:
        return "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)


# -- line charts -----------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 172, 64, 52
# Colors that color-blind readers can tell apart, in this order (Okabe and Ito).
COLORS = ("#d55e00", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series with equal steps along x; ``filled`` shades the area below it."""

    label: str
    values: Sequence[float]
    filled: bool = False


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    subtitle: str,
    x_label: str,
    format_value: Callable[[float], str],
    tick_base: float = 10,
) -> str:
    """Return a chart as an SVG file, light and dark; ``tick_base`` is 1024 for bytes."""
    last = max(max((len(line.values) for line in lines), default=0) - 1, 0)
    highest = max((max(line.values, default=0) for line in lines), default=0)
    marks = ticks(highest, base=tick_base)
    plot = Plot(
        width=_WIDTH,
        height=_HEIGHT,
        x=Scale(low=0, high=max(last, 1), start=_LEFT, stop=_WIDTH - _RIGHT),
        y=Scale(low=0, high=marks[-1], start=_HEIGHT - _BOTTOM, stop=_TOP),
    )
    plot.y_axis(marks, [format_value(value) for value in marks])
    indexes = [round(number * last / 4) for number in range(5)]
    plot.x_axis(indexes, [f"{index:,}" for index in indexes], x_label)
    tops = [plot.y(max(line.values, default=0)) for line in lines]
    labels = spread(tops, 17, _HEIGHT - _BOTTOM)
    color = iter(COLORS * (1 + len(lines) // len(COLORS)))
    for line, label_y in zip(lines, labels, strict=True):
        paint = "currentColor" if line.filled else next(color)
        points = list(enumerate(line.values))
        if line.filled:
            plot.area(points, [(0, 0), (max(len(points) - 1, 0), 0)], paint, opacity=0.16)
        else:
            plot.line(points, paint)
        plot.text(_WIDTH - _RIGHT + 10, label_y + 4, line.label, color=paint)
    return svg_file(plot, title=title, subtitle=subtitle)


def svg_file(plot: Plot, *, title: str, subtitle: str) -> str:
    """Return a plot as an SVG file with two lines of text above it, light and dark.

    The lines take 50 units from the top. Texts of the kind "tick" and paths of the class "grid" are
    pale, and ``currentColor`` is that of text.
    """
    head = _head(title, subtitle, plot.width, plot.height)
    return "\n".join([head, *plot.parts, "</svg>\n"])


def _head(title: str, subtitle: str, width: float, height: float) -> str:
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"
 font-family="system-ui, sans-serif" font-size="13">
<title>{escape(title)}. {escape(subtitle)}</title>
<style>
svg {{ color: #24292f; background: #ffffff }}
.tick {{ fill: #57606a; font-size: 12px }} .grid {{ stroke: #d0d7de; stroke-width: 1 }}
.head {{ fill: #24292f; font-size: 16px; font-weight: 600 }}
@media (prefers-color-scheme: dark) {{
  svg {{ color: #e6edf3; background: #0d1117 }}
  .tick {{ fill: #9198a1 }} .grid {{ stroke: #30363d }} .head {{ fill: #e6edf3 }}
}}
</style>
<text class="head" x="16" y="26">{escape(title)}</text>
<text class="tick" x="16" y="46">{escape(subtitle)}</text>"""
