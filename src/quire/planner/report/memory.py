"""Memory over time, a variant beside the other on one scale, and who ran and waited below it."""

from collections.abc import Iterator, Sequence

from quire.figures import Plot, Scale, ticks, ticks_of_time
from quire.planner.report.content import Hover, Panel, Report, Section, Table, Variant
from quire.planner.report.series import Series, series_of
from quire.planner.report.words import axis_of_bytes, axis_of_counts, duration, size

_NUM_SPANS, _NUM_ROWS = 180, 24  # of the plots, and of the table behind them
_WIDTH, _LEFT, _RIGHT = 360, 58, 10
# How dark each part is, from the bottom up; the page's swatches and bars are the same.
USED, EMPTY, CACHED = 0.95, 0.24, 0.5
_KEYS = (
    ("used", "used: tokens that are still read"),
    ("empty", "empty: held, and no token's"),
    ("cached", "cached: of no sequence, kept for prompts that begin alike"),
    ("solid", "requests running"),
    ("dashed", "requests waiting"),
)


def memory_section(report: Report) -> Section:
    duration_s = max((each.result.duration_s for each in report.variants), default=0.0)
    several = [
        series_of(variant.result, _NUM_SPANS, duration_s=duration_s) for variant in report.variants
    ]
    title, name = "Memory over time", "memory"
    if duration_s <= 0:
        return Section(name=name, title=title, text=["No time has passed: nothing ran."])
    memory = max(variant.result.memory_bytes * variant.result.num_replicas
                 for variant in report.variants)  # fmt: skip
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
            "What is committed, from the bottom up: used, empty, cached. All plots have one scale, "
            f"and each point is the mean of {duration(several[0].span_s)}."
        ],
        keys=_KEYS,
        panels=panels,
        table=Table(head=_HEAD, rows=list(_rows(report.variants, duration_s))),
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
    memory = variant.result.memory_bytes * variant.result.num_replicas
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
    """A point in the middle of each span up to ``own_s``, and the ends of the line."""
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
