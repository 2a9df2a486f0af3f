"""A line chart as an SVG file that explains itself: no library, no fonts, light and dark.

What is drawn, and where the numbers come from, the caller knows.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

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
    count = max((len(line.values) for line in lines), default=0)
    highest = max((max(line.values, default=0) for line in lines), default=0) or 1.0
    step = _tick(highest / 4, tick_base)
    top = ceil(highest / step) * step

    def x(index: int) -> float:
        return _LEFT + index * (_WIDTH - _LEFT - _RIGHT) / max(count - 1, 1)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_head(title, subtitle)]
    for number in range(round(top / step) + 1):
        at = y(number * step)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">'
            f"{escape(format_value(number * step))}</text>"
        )
    for number in range(5):
        index = round(number * max(count - 1, 0) / 4)
        parts.append(
            f'<text class="tick" x="{x(index):.1f}" y="{_HEIGHT - _BOTTOM + 20}" '
            f'text-anchor="middle">{index:,}</text>'
        )
    parts.append(
        f'<text class="tick" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    labels = _spread([y(max(line.values, default=0)) for line in lines], 17)
    color = iter(_COLORS * (1 + len(lines) // len(_COLORS)))
    for line, label_y in zip(lines, labels, strict=True):
        paint = "currentColor" if line.filled else next(color)
        path = "L".join(f"{x(i):.1f} {y(value):.1f}" for i, value in enumerate(line.values))
        if line.filled:
            parts.append(
                f'<path fill="{paint}" opacity=".16" d="M{x(0):.1f} {y(0):.1f}L{path}'
                f'L{x(len(line.values) - 1):.1f} {y(0):.1f}Z"/>'
            )
        else:
            parts.append(f'<path fill="none" stroke="{paint}" stroke-width="2" d="M{path}"/>')
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{label_y + 4:.1f}" fill="{paint}">'
            f"{escape(line.label)}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


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


def _tick(least: float, base: float) -> float:
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
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least)


def _spread(positions: list[float], gap: float) -> list[float]:
    """Move labels apart so that none covers another, in their order from top to bottom."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    result = positions.copy()
    floor_y = _HEIGHT - _BOTTOM - gap * (len(order) - 1)
    for rank, index in enumerate(order):
        result[index] = max(
            min(positions[index], floor_y + rank * gap),
            result[order[rank - 1]] + gap if rank else -1e9,
        )
    return result
