"""A line chart as an SVG file that explains itself, light and dark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from quire.figures.plot import Plot
from quire.figures.scales import Scale, spread, ticks

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
