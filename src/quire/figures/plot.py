"""A frame with two axes, and marks put on it one after the other.

Colors are what SVG takes: a value, or a variable of the page that the plot is in.
"""

from collections.abc import Sequence
from html import escape
from typing import final

from quire.figures.scales import Scale

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
