"""Make the sections on latencies, and on cache misses and repeated work."""

from collections.abc import Iterator, Sequence
from types import MappingProxyType

from quire.figures import Plot, Scale, ticks_of_powers
from quire.planner.report.content import (
    Bar,
    Panel,
    Report,
    ReportPart,
    ReportTable,
    Section,
    Variant,
    count,
    duration,
    share,
    short,
    size,
)

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 360, 12, 12, 46, 20
_LABEL = 44  # width of the name of a mark
_METRICS = MappingProxyType(
    {
        "ttft_s": "Time to the first token (TTFT)",
        "tpot_s": "Time a token after that (TPOT)",
        "e2e_s": "From arrival to end (E2E)",
        "queue_s": "In the queue",
    }
)
_DRAWN = ("ttft_s", "tpot_s", "e2e_s")
_PERCENTILES = ("p50", "p90", "p99")
# Words for the values of ``PrefixHit.shortfall``.
_REASONS = MappingProxyType(
    {
        "unknown": "never seen, or evicted",
        "strategy": "a strategy that shares nothing",
        "evicted": "evicted",
    }
)
_NUM_SHADES = 5


def latency_section(report: Report) -> Section:
    """Make the section on latencies."""
    goals = {name: goal for name, goal in report.goals.items() if goal is not None}
    wanted = " and ".join(
        f"{name.removesuffix('_s').upper()} within {duration(goal)}" for name, goal in goals.items()
    )
    text = ["Latencies of requests that finished; percentiles are within half a percent."]
    if wanted:
        text.append(f"A good request has {wanted}.")
    return Section(
        name="latency",
        title="Latencies",
        text=text,
        keys=(("p50", "median"), ("p90", "90th percentile"), ("p99", "99th percentile")),
        panels=[_panel(report, metric, goals.get(metric)) for metric in _DRAWN],
        table=ReportTable(
            head=("", "", "mean", *_PERCENTILES, "max"),
            rows=[
                [
                    variant.name,
                    metric.removesuffix("_s").upper() if metric != "queue_s" else "queue",
                    *(
                        duration(figures[part])
                        if any(variant.result.num_finished.values())
                        else "–"
                        for part in ("mean", *_PERCENTILES, "max")
                    ),
                ]
                for variant in report.variants
                for metric, figures in _known(variant)
            ],
        ),
    )


def _known(variant: Variant) -> Iterator[tuple[str, dict[str, float]]]:
    for metric in _METRICS:
        if metric in variant.result.latencies:
            yield metric, variant.result.latencies[metric]


def _panel(report: Report, metric: str, goal_s: float | None) -> Panel:
    rows = [variant.result.latencies[metric] for variant in report.variants]
    values = [row[part] for row in rows for part in _PERCENTILES if row[part] > 0]
    if goal_s is not None and goal_s > 0:
        values.append(goal_s)
    title = _METRICS[metric]
    if not values:
        return Panel(title=title, drawings=[], remark="Nothing to show: no request has ended.")
    marks = _marks(min(values), max(values))
    bottom = _TOP + _ROW * len(rows) + 4
    plot = Plot(
        width=_WIDTH,
        height=bottom + 26,
        x=Scale(low=marks[0], high=marks[-1], start=_LEFT, stop=_WIDTH - _RIGHT, logarithmic=True),
        y=Scale(low=0, high=1, start=bottom, stop=_TOP),
    )
    free_from = 0.0
    for mark in marks:
        at = plot.x(mark)
        plot.parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>')
        if mark in (marks[0], marks[-1]):
            anchor = "start" if mark == marks[0] else "end"
        elif free_from <= at <= plot.x(marks[-1]) - 1.5 * _LABEL:
            anchor = "middle"
        else:
            continue  # its name would cover another one
        free_from = at + (1.5 if mark == marks[0] else 1) * _LABEL
        plot.text(at, bottom + 18, _tick(mark), anchor=anchor, kind="tick")
    if goal_s is not None:
        at = plot.x(goal_s)
        plot.parts.append(f'<path class="mark" d="M{at:.1f} {_TOP}V{bottom}"/>')
        anchor = "start" if at < _WIDTH / 2 else "end"
        plot.text(at, _TOP - 5, f"goal {duration(goal_s)}", anchor=anchor, kind="tick")
    said = []
    for number, (variant, color, row) in enumerate(
        zip(report.variants, report.colors(), rows, strict=True)
    ):
        _row(plot, number, variant.name, color, row)
        said.append(f"{variant.name} {', '.join(f'{p} {duration(row[p])}' for p in _PERCENTILES)}")
    return Panel(title=title, drawings=[plot.svg(f"{title}: {'; '.join(said)}")])


def _row(plot: Plot, number: int, name: str, color: str, row: dict[str, float]) -> None:
    """Draw a variant's name and values, and its three percentiles below them."""
    top = _TOP + number * _ROW
    y = top + 31
    plot.text(_LEFT + 4, top + 16, short(name, 26), color=color)
    values = " · ".join(duration(row[part]) for part in _PERCENTILES) if row["p99"] else "–"
    plot.text(_WIDTH - _RIGHT - 4, top + 16, values, anchor="end", kind="tick")
    if not row["p99"]:
        return
    first, last = plot.x(row["p50"]), plot.x(row["p99"])
    plot.parts.append(
        f'<path stroke="{color}" stroke-width="2" fill="none" d="M{first:.1f} {y}H{last:.1f}"/>'
    )
    for part, fill, radius in (("p99", "var(--page)", 4), ("p90", color, 2.5), ("p50", color, 5)):
        plot.parts.append(
            f'<circle cx="{plot.x(row[part]):.1f}" cy="{y}" r="{radius}" fill="{fill}" '
            f'stroke="{color}" stroke-width="2">'
            f"<title>{part} {duration(row[part])}</title></circle>"
        )


def _marks(low: float, high: float) -> list[float]:
    """Return a few round values around [low, high]."""
    powers = ticks_of_powers(low, high)
    if len(powers) > 7:
        return powers[:: -(-len(powers) // 7)] + powers[-1:]
    for parts in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        marks = [part * power for power in powers for part in parts]
        first = max(number for number, mark in enumerate(marks) if mark <= low or not number)
        last = next((number for number, mark in enumerate(marks) if mark >= high), len(marks) - 1)
        if last - first >= 3:
            break
    return marks[first : max(last, first + 1) + 1]


def _tick(seconds: float) -> str:
    """Write a round number of seconds."""
    for least, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.999 * least:
            return f"{seconds / least:,.6g} {unit}"
    return f"{seconds:.0e} s"


def work_section(report: Report) -> Section:
    """Make the section on cache hits and misses, preemptions, swapping and copies."""
    reasons = _reasons(report.variants)
    shades = {reason: f"m{number % _NUM_SHADES}" for number, reason in enumerate(reasons)}
    return Section(
        name="work",
        title="Cache hits, and repeated work",
        text=["A bar is all prompt tokens that were looked up in the prefix cache."],
        keys=[("used", "found"), *((shades[each], _REASONS.get(each, each)) for each in reasons)],
        bars=[
            _bar(variant, color, shades)
            for variant, color in zip(report.variants, report.colors(), strict=True)
        ],
        table=ReportTable(
            head=(
                *("", "prompt tokens", "found", *(f"not: {each}" for each in reasons)),
                *("preemptions", "… by swap", "tokens computed again", "swapped", "copied"),
            ),
            rows=[_work_row(variant, reasons) for variant in report.variants],
        ),
        opens=True,
    )


def _reasons(variants: Sequence[Variant]) -> list[str]:
    """Return the reasons of misses, the commonest first."""
    total: dict[str, int] = {}
    for variant in variants:
        for reason, number in variant.result.prefix_missed_tokens.items():
            total[reason] = total.get(reason, 0) + number
    return sorted((each for each in total if total[each]), key=lambda each: -total[each])


def _bar(variant: Variant, color: str, shades: dict[str, str]) -> Bar:
    result = variant.result
    asked = result.prefix_query_tokens

    def part(kind: str, label: str, number: int) -> ReportPart:
        of_all = number / asked if asked else 0.0
        return ReportPart(
            kind=kind, label=label, share=of_all, text=f"{count(number)}, {share(of_all)}"
        )

    return Bar(
        name=variant.name,
        color=color,
        remark=f"{share(result.hit_rate)} found" if asked else "not looked up",
        parts=[
            part("used", "found", result.prefix_hit_tokens),
            *(
                part(shade, _REASONS.get(reason, reason), number)
                for reason, shade in shades.items()
                if (number := result.prefix_missed_tokens.get(reason, 0))
            ),
        ],
    )


def _work_row(variant: Variant, reasons: Sequence[str]) -> list[str]:
    result = variant.result
    asked = max(1, result.prefix_query_tokens)
    return [
        variant.name,
        count(result.prefix_query_tokens),
        share(result.hit_rate) if result.prefix_query_tokens else "not looked up",
        *(share(result.prefix_missed_tokens.get(reason, 0) / asked) for reason in reasons),
        count(result.num_preemptions),
        count(result.num_swaps),
        count(result.num_recomputed_tokens),
        size(result.saved_bytes + result.loaded_bytes),
        size(result.copied_bytes),
    ]
