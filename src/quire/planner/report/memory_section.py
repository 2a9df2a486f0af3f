"""Make the sections on memory over time, and on what memory was used for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.figures import Plot, Scale, ticks, ticks_of_time
from quire.planner.report.content import (
    Bar,
    Hover,
    Panel,
    Report,
    ReportPart,
    ReportTable,
    Section,
    Variant,
    axis_of_bytes,
    axis_of_counts,
    duration,
    share,
    size,
)
from quire.planner.simulation.result import SimulationResult
from quire.planner.simulation.timeline import FIGURES, TimelinePoint

# -- series ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A result's figures of all replicas together, as means of equal spans from 0 on."""

    span_s: float
    figures: dict[str, list[float]]  # by the names of ``FIGURES``, a value per span

    @property
    def num_spans(self) -> int:
        return len(self.figures[FIGURES[0]])

    @property
    def middles_s(self) -> list[float]:
        return [(number + 0.5) * self.span_s for number in range(self.num_spans)]

    @property
    def empty_bytes(self) -> list[float]:
        """Return the bytes that are held and that no token uses."""
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
    """Compute a result's series over ``duration_s``, of which its end may be empty."""
    if duration_s <= 0:
        return Series(span_s=0.0, figures={name: [] for name in FIGURES})
    span_s = duration_s / num_spans
    figures = {name: [0.0] * num_spans for name in FIGURES}
    for points in result.timelines:
        _add(figures, points, span_s, num_spans)
    return Series(span_s=span_s, figures=figures)


def _add(
    figures: dict[str, list[float]], points: Sequence[TimelinePoint], span_s: float, num_spans: int
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


# -- memory over time ------------------------------------------------------------------------------

_NUM_SPANS, _NUM_ROWS = 180, 24  # points of a plot, and rows of its table per variant
_WIDTH, _LEFT, _RIGHT = 360, 58, 10
# Opacity of each part, as in page.css.
USED, EMPTY, CACHED = 0.95, 0.24, 0.5
_KEYS = (
    ("used", "used: tokens that later ones still read"),
    ("empty", "empty: held, without a token"),
    ("cached", "cached: held by no sequence, kept for later prompts"),
    ("solid", "requests running"),
    ("dashed", "requests waiting"),
)


def memory_section(report: Report) -> Section:
    """Make the section on memory over time."""
    duration_s = max((each.result.duration_s for each in report.variants), default=0.0)
    several = [
        series_of(variant.result, _NUM_SPANS, duration_s=duration_s) for variant in report.variants
    ]
    title, name = "Memory over time", "memory"
    if duration_s <= 0:
        return Section(name=name, title=title, text=["No time has passed: nothing ran."])
    memory = max(variant.result.fleet_bytes for variant in report.variants)
    highest = max(max(each.figures["committed_bytes"]) for each in several)
    shows_memory = memory <= 1.6 * highest
    tops = ticks(memory if shows_memory else highest, num_steps=3, base=1024)
    most = max(max(each.figures[which]) for each in several for which in _REQUESTS)
    panels = [
        _panel(variant, color, series, tops, ticks(most, num_steps=2), shows_memory=shows_memory)
        for variant, color, series in zip(report.variants, report.colors(), several, strict=True)
    ]
    return Section(
        name=name,
        title=title,
        text=[
            "Committed memory, from the bottom up: used, empty, cached. All plots have one scale, "
            f"and each point is the mean of {duration(several[0].span_s)}."
        ],
        keys=_KEYS,
        panels=panels,
        table=ReportTable(head=_HEAD, rows=list(_rows(report.variants, duration_s))),
    )


_REQUESTS = ("num_running", "num_waiting")
_HEAD = ("", "from", "committed", "used", "empty", "cached", "running", "waiting")


def _panel(
    variant: Variant,
    color: str,
    series: Series,
    tops: Sequence[float],
    counts: Sequence[float],
    *,
    shows_memory: bool,
) -> Panel:
    memory = variant.result.fleet_bytes
    end_s, own_s = series.span_s * series.num_spans, variant.result.duration_s
    across = Scale(low=0, high=end_s, start=_LEFT, stop=_WIDTH - _RIGHT)
    upper = Plot(
        width=_WIDTH, height=176, x=across, y=Scale(low=0, high=tops[-1], start=164, stop=12)
    )
    upper.y_axis(tops, axis_of_bytes(tops))
    parts = (
        (series.figures["used_bytes"], USED),
        (series.empty_bytes, EMPTY),
        (series.figures["cached_bytes"], CACHED),
    )
    below = [0.0] * series.num_spans
    for values, opacity in parts:
        above = [low + value for low, value in zip(below, values, strict=True)]
        lower = _spans(series, own_s, below)
        upper.area(_spans(series, own_s, above), lower, color, opacity=opacity)
        below = above
    if shows_memory:
        upper.line([(0, memory), (end_s, memory)], "var(--muted)", dashes="2 4")
        upper.text(_WIDTH - _RIGHT, upper.y(memory) - 4, "memory", anchor="end", kind="tick")
    lower_plot = Plot(
        width=_WIDTH, height=136, x=across, y=Scale(low=0, high=counts[-1], start=88, stop=8)
    )
    lower_plot.y_axis(counts, axis_of_counts(counts))
    moments, unit_s, unit = ticks_of_time(end_s)
    labels = [f"{moment / unit_s:,g}" for moment in moments]
    lower_plot.x_axis(moments, labels, f"{unit} since the trace began")
    waiting = _spans(series, own_s, series.figures["num_waiting"])
    lower_plot.line(waiting, "var(--ink)", dashes="5 3")
    lower_plot.line(_spans(series, own_s, series.figures["num_running"]), color)
    said = f"{variant.name}: {size(variant.result.committed_bytes)} committed in the mean"
    who = f"{variant.name}: {variant.result.num_running:,.1f} requests ran in the mean"
    remark = "" if shows_memory else f"of {size(memory)} in all"
    return Panel(
        title=variant.name,
        color=color,
        drawings=[upper.svg(f"Memory over time. {said}"), lower_plot.svg(f"Requests. {who}")],
        remark=remark,
        hover=_hover(series, across),
    )


def _spans(series: Series, own_s: float, values: Sequence[float]) -> list[tuple[float, float]]:
    """Return a point in the middle of each span up to ``own_s``, and both ends of the line."""
    points = [
        (min(middle_s, own_s), value)
        for middle_s, value in zip(series.middles_s, values, strict=True)
        if middle_s < own_s + series.span_s / 2
    ]
    return [(0.0, points[0][1]), *points, (own_s, points[-1][1])]


def _hover(series: Series, across: Scale) -> Hover:
    middles = series.middles_s
    bytes_of = (
        ("committed", series.figures["committed_bytes"]),
        ("used", series.figures["used_bytes"]),
        ("empty", series.empty_bytes),
        ("cached", series.figures["cached_bytes"]),
    )
    requests = (
        ("running", series.figures["num_running"]),
        ("waiting", series.figures["num_waiting"]),
    )
    return Hover(
        at=[across(middle) / _WIDTH for middle in middles],
        titles=[f"at {duration(middle)}" for middle in middles],
        series=[
            *((name, [size(value) for value in values]) for name, values in bytes_of),
            *((name, [f"{value:,.1f}" for value in values]) for name, values in requests),
        ],
    )


def _rows(variants: Sequence[Variant], duration_s: float) -> Iterator[list[str]]:
    for variant in variants:
        series = series_of(variant.result, _NUM_ROWS, duration_s=duration_s)
        figures = series.figures
        for number, empty in enumerate(series.empty_bytes):
            yield [
                variant.name,
                duration(number * series.span_s),
                size(figures["committed_bytes"][number]),
                size(figures["used_bytes"][number]),
                size(empty),
                size(figures["cached_bytes"][number]),
                f"{figures['num_running'][number]:,.1f}",
                f"{figures['num_waiting'][number]:,.1f}",
            ]


# -- utilization -----------------------------------------------------------------------------------

_USES = (
    ("used", "used"),
    ("later", "empty, and filled later"),
    ("empty", "empty, and never filled (internal fragmentation)"),
    ("cached", "cached"),
    ("pieces", "not committed, in pieces too small for the next sequence (external fragmentation)"),
    ("free", "not committed"),
)


def utilization_section(report: Report) -> Section:
    """Make the section on what memory was used for."""
    colors = report.colors()
    return Section(
        name="utilization",
        title="What memory was used for",
        text=[
            "Means over time. Utilization is the used share of the memory that sequences hold. "
            "Cached blocks do not count, since a sequence can take them. Empty memory is either "
            "filled later, before its sequence ends, or never. The PagedAttention paper (Kwon et "
            "al. 2023) measured 20 to 38 % where the maximum is reserved, and 96 % in blocks."
        ],
        keys=_USES,
        bars=[_bar(each, color) for each, color in zip(report.variants, colors, strict=True)],
        table=ReportTable(
            head=("", "memory", *(meaning for _, meaning in _USES), "utilization"),
            rows=[
                [
                    variant.name,
                    size(variant.result.fleet_bytes),
                    *(size(number) for _, _, number in _parts(variant)),
                    share(variant.result.utilization),
                ]
                for variant in report.variants
            ],
        ),
    )


def _bar(variant: Variant, color: str) -> Bar:
    memory = variant.result.fleet_bytes
    return Bar(
        name=variant.name,
        color=color,
        remark=f"utilization {share(variant.result.utilization)}",
        parts=[
            ReportPart(
                kind=kind,
                label=label,
                share=number / memory if memory else 0.0,
                text=f"{size(number)}, {share(number / memory if memory else 0.0)} of the memory",
            )
            for kind, label, number in _parts(variant)
        ],
    )


def _parts(variant: Variant) -> list[tuple[str, str, float]]:
    """Divide the memory into its uses, which sum to all of it."""
    result = variant.result
    empty = max(0.0, result.committed_bytes - result.used_bytes - result.cached_bytes)
    free = max(0.0, result.fleet_bytes - result.committed_bytes)
    later, pieces = result.later_fraction or 0.0, result.pieces_fraction or 0.0
    numbers = (
        *(result.used_bytes, later * empty, (1 - later) * empty, result.cached_bytes),
        *(pieces * free, (1 - pieces) * free),
    )
    return [(kind, label, each) for (kind, label), each in zip(_USES, numbers, strict=True)]
