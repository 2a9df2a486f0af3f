"""A result's figures over time, in equal spans, of all its replicas together."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.planner.simulation.result import SimulationResult
from quire.planner.simulation.timeline import FIGURES, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Means of equal spans from 0 on. Shapes: each of ``figures`` [N]."""

    span_s: float
    figures: dict[str, list[float]]  # by the names of ``FIGURES``

    @property
    def num_spans(self) -> int:
        return len(self.figures[FIGURES[0]])

    @property
    def middles_s(self) -> list[float]:
        return [(number + 0.5) * self.span_s for number in range(self.num_spans)]

    @property
    def empty_bytes(self) -> list[float]:
        """Held, and no token's."""
        return [
            max(0.0, committed - used - cached)
            for committed, used, cached in zip(
                self.figures["committed_bytes"],
                self.figures["used_bytes"],
                self.figures["cached_bytes"],
                strict=True,
            )
        ]


def series_of(result: SimulationResult, num_spans: int, *, duration_s: float) -> Series:
    """Over ``duration_s``, which may be longer than the result's own; nothing is held then."""
    if duration_s <= 0:
        return Series(span_s=0.0, figures={name: [] for name in FIGURES})
    span_s = duration_s / num_spans
    figures = {name: [0.0] * num_spans for name in FIGURES}
    for points in result.timelines:
        _add(figures, points, span_s, num_spans)
    return Series(span_s=span_s, figures=figures)


def _add(
    figures: dict[str, list[float]], points: Sequence[Point], span_s: float, num_spans: int
) -> None:
    for point in points:
        first = min(int(point.start_s / span_s), num_spans - 1)
        last = min(int(point.stop_s / span_s), num_spans - 1)
        for number in range(first, last + 1):
            start = max(point.start_s, number * span_s)
            stop = point.stop_s if number == last else (number + 1) * span_s
            part = (min(stop, point.stop_s) - start) / span_s
            if part > 0:
                for name, mean in zip(FIGURES, point.means, strict=True):
                    figures[name][number] += mean * part
