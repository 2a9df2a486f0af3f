"""A frame with two axes, and marks put on it one after the other.

Colors are what SVG takes: a value, or a variable of the page that the plot is in.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import final

# -- scales ----------------------------------------------------------------------------------------

# From values to places on a plot: scales, round ticks, and labels that keep apart.


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


# -- plot ------------------------------------------------------------------------------------------


Points = Sequence[tuple[float, float]]


@final
class Plot:
    """Marks in their order. ``x`` and ``y`` give places within ``width`` by ``height``."""

    def __init__(self, *, width: float, height: float, x: Scale, y: Scale) -> None:
        self.width, self.height, self.x, self.y = width, height, x, y
        self.parts: list[str] = []

    def y_axis(self, values: Sequence[float], labels: Sequence[str]) -> None:
        """Lines across, each with its label on the left."""
        left, right = self.x.start, self.x.stop
        for value, label in zip(values, labels, strict=True):
            at = self.y(value)
            self.parts.append(f'<path class="grid" d="M{left:g} {at:.1f}H{right:g}"/>')
            self.text(left - 8, at + 4, label, anchor="end", kind="tick")

    def x_axis(self, values: Sequence[float], labels: Sequence[str], name: str) -> None:
        """Labels below the frame, and what they are of."""
        for value, label in zip(values, labels, strict=True):
            self.text(self.x(value), self.y.start + 20, label, anchor="middle", kind="tick")
        middle = (self.x.start + self.x.stop) / 2
        self.text(middle, self.y.start + 38, name, anchor="middle", kind="tick")

    def line(self, points: Points, color: str, *, dashes: str = "") -> None:
        if not points:
            return
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<path fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"{dashed} '
            f'd="M{self._path(points)}"/>'
        )
        if len(points) == 1:  # a line of one point is not seen
            self.dot(*points[0], color)

    def area(self, points: Points, below: Points, color: str, *, opacity: float) -> None:
        """Between two lines from left to right."""
        if points:
            outline = self._path([*points, *reversed(below)])
            self.parts.append(f'<path fill="{color}" opacity="{opacity:g}" d="M{outline}Z"/>')

    def dot(self, x: float, y: float, color: str, *, title: str = "", filled: bool = True) -> None:
        fill = color if filled else "var(--page)"
        self.parts.append(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4" fill="{fill}" '
            f'stroke="{color}" stroke-width="2">{_title(title)}</circle>'
        )

    def box(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        fill: str,
        *,
        opacity: float = 1,
        title: str = "",
    ) -> None:
        """From value to value."""
        left, right = sorted(map(self.x, x))
        top, bottom = sorted(map(self.y, y))
        self.parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{bottom - top:.1f}" fill="{fill}" fill-opacity="{opacity:g}">'
            f"{_title(title)}</rect>"
        )

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
        """At a place, not at values."""
        shown = f' class="{kind}"' if kind else ""
        shown += f' fill="{color}"' if color else ""
        self.parts.append(
            f'<text{shown} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self, label: str, *, extra: str = "") -> str:
        """For a page, which says how texts look. ``label`` is for those who do not see it."""
        inner = "\n".join(self.parts)
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(label)}"{extra}>\n{inner}\n</svg>'
        )

    def _path(self, points: Points) -> str:
        return "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


# -- lines -----------------------------------------------------------------------------------------

# A line chart as an SVG file that explains itself, light and dark.


_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 172, 64, 52
# Told apart by people who do not see red and green alike (Okabe and Ito), in this order.
_COLORS = ("#d55e00", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series. Equal steps along x; ``filled`` shades the area below it."""

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
    """The chart as SVG text. ``tick_base`` is 1024 where values are bytes, for round ticks."""
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
    color = iter(_COLORS * (1 + len(lines) // len(_COLORS)))
    for line, label_y in zip(lines, labels, strict=True):
        paint = "currentColor" if line.filled else next(color)
        points = list(enumerate(line.values))
        if line.filled:
            plot.area(points, [(0, 0), (max(len(points) - 1, 0), 0)], paint, opacity=0.16)
        else:
            plot.line(points, paint)
        plot.text(_WIDTH - _RIGHT + 10, label_y + 4, line.label, color=paint)
    return "\n".join([_head(title, subtitle), *plot.parts, "</svg>\n"])


def _head(title: str, subtitle: str) -> str:
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"
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
