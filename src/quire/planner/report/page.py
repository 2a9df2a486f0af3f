"""Render a report as one HTML file, which needs no network and is readable without its script.

All texts are escaped here and only here, except those in plots, which ``figures`` escapes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TypeAlias

from quire.figures import Plot, Scale, spread, ticks
from quire.planner.report.content import (
    Bar,
    Held,
    Hover,
    Panel,
    Report,
    ReportTable,
    Section,
    Variant,
    axis_of_bytes,
    axis_of_counts,
    count,
    duration,
    file_name,
    rate,
    share,
    size,
    strategy_color,
    times,
)
from quire.planner.report.latency_section import latency_section, work_section
from quire.planner.report.memory_section import memory_section, utilization_section
from quire.planner.report.prefix_section import prefix_section
from quire.planner.report.tier_section import tier_section
from quire.planner.simulation.result import SimulationResult

# -- the answer ------------------------------------------------------------------------------------

Figure: TypeAlias = Callable[[SimulationResult], float]


def answers(report: Report) -> list[str]:
    """Write sentences on which variant serves most, waits least and wastes least."""
    variants = [each for each in report.variants if each.result.num_requests]
    if not variants:
        return ["The trace has no requests."]
    if len(variants) == 1:
        return list(_of_one(variants[0]))
    return list(_of_several(report, variants))


def _of_one(variant: Variant) -> Iterator[str]:
    result = variant.result
    yield (
        f"{count(result.num_ended)} of {count(result.num_requests)} requests finished in "
        f"{duration(result.duration_s)}: {rate(result.requests_per_s)} requests and "
        f"{rate(result.output_tokens_per_s)} output tokens a second."
    )
    ttft = result.latencies["ttft_s"]
    yield (
        f"The first token came after {duration(ttft['p50'])} in the median and "
        f"{duration(ttft['p99'])} at the 99th percentile."
    )
    yield (
        f"{share(result.utilization)} of the memory that sequences held was used; "
        f"{share(result.hit_rate)} of prompt tokens were found cached."
    )


def _of_several(report: Report, variants: Sequence[Variant]) -> Iterator[str]:
    asked = [*_QUESTIONS]
    if any(goal is not None for goal in report.goals.values()):
        asked.insert(0, _GOOD)
    served = [each for each in variants if each.result.num_ended]
    if idle := [each.name for each in variants if not each.result.num_ended]:
        yield f"No request finished with {_listed(idle)}."
    if len(served) == 1:
        yield f"With {served[0].name}:"
        yield from _of_one(served[0])
    elif served:
        all_of = "All" if len(served) == len(variants) else "The others"
        yield from (_compared(served, question, all_of) for question in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A figure to compare variants by, and the words for the result."""

    figure: Figure
    write: Callable[[float], str]
    one: str  # verb phrase for one best variant
    several: str  # verb phrase for several
    alike: str  # verb phrase if all are equal
    least: bool = False
    has_ratio: bool = True


_GOOD = _Question(
    figure=lambda r: r.good_requests_per_s,
    write=lambda value: f"{rate(value)} requests/s",
    one="meets the goals most often",
    several="meet the goals most often",
    alike="meet the goals as often",
)
_QUESTIONS = (
    _Question(
        figure=lambda r: r.output_tokens_per_s,
        write=lambda value: f"{rate(value)} output tokens/s",
        one="serves most",
        several="serve most",
        alike="serve as much",
    ),
    _Question(
        figure=lambda r: r.latencies["ttft_s"]["p99"],
        write=duration,
        one="waits least for a first token (99th percentile)",
        several="wait least for a first token (99th percentile)",
        alike="wait as long for a first token (99th percentile)",
        least=True,
    ),
    _Question(
        figure=lambda r: r.utilization,
        write=share,
        one="uses most of what it holds",
        several="use most of what they hold",
        alike="use as much of what they hold",
        has_ratio=False,
    ),
)


def _compared(variants: Sequence[Variant], question: _Question, all_of: str) -> str:
    """Compare the best variants with the worst ones."""
    figures = [question.figure(each.result) for each in variants]
    write = question.write
    low, high = min(figures), max(figures)
    if _close(low, high):
        return f"{all_of} {question.alike}: {write(high)}."
    best, worst = (low, high) if question.least else (high, low)
    first = [v.name for v, figure in zip(variants, figures, strict=True) if _close(figure, best)]
    last = [v.name for v, figure in zip(variants, figures, strict=True) if _close(figure, worst)]
    does = question.one if len(first) == 1 else question.several
    ratio = f" ({times(high / low)})" if question.has_ratio and low > 0 else ""
    against = f"{write(worst)} with {_listed(last)}{ratio}"
    return f"{_listed(first)} {does}: {write(best)}, against {against}."


def _close(value: float, other: float) -> bool:
    return abs(value - other) <= 0.01 * max(abs(value), abs(other))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _latency(metric: str, part: str) -> Callable[[SimulationResult], str]:
    return lambda r: duration(r.latencies[metric][part]) if r.num_ended else "–"


def comparison(report: Report) -> ReportTable:
    """Make a table with a row per figure and a column per variant."""
    rows: list[tuple[str, Callable[[SimulationResult], str]]] = [
        ("requests", lambda r: count(r.num_requests)),
        ("… finished", lambda r: count(r.num_ended)),
        ("… too long for model or memory", lambda r: count(r.num_refused)),
        ("requests/s", lambda r: rate(r.requests_per_s)),
        ("output tokens/s", lambda r: rate(r.output_tokens_per_s)),
        ("memory", lambda r: size(r.fleet_bytes)),
        ("… committed, mean", lambda r: size(r.committed_bytes)),
        ("… used, mean", lambda r: size(r.used_bytes)),
        ("utilization", lambda r: share(r.utilization) if r.committed_bytes else "–"),
        ("running, mean", lambda r: f"{r.num_running:,.1f}"),
        ("waiting, mean", lambda r: f"{r.num_waiting:,.1f}"),
        ("prompt tokens cached", lambda r: share(r.hit_rate)),
        ("preemptions", lambda r: count(r.num_preemptions)),
        ("TTFT, median", _latency("ttft_s", "p50")),
        ("TTFT, 99th percentile", _latency("ttft_s", "p99")),
        ("TPOT, median", _latency("tpot_s", "p50")),
        ("TPOT, 99th percentile", _latency("tpot_s", "p99")),
        ("E2E, median", _latency("e2e_s", "p50")),
        ("E2E, 99th percentile", _latency("e2e_s", "p99")),
    ]
    if any(goal is not None for goal in report.goals.values()):
        rows.insert(4, ("… within the goals", lambda r: rate(r.good_requests_per_s)))
    return ReportTable(
        head=("", *(variant.name for variant in report.variants)),
        rows=[[name, *(each(v.result) for v in report.variants)] for name, each in rows],
    )


# -- bytes against tokens --------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 360, 260, 58, 76
_NUM_ROWS = 12


def generated_section(report: Report) -> Section | None:
    """Make the section on bytes held against tokens generated."""
    groups = [
        ("One sequence up to the full context", report.one),
        (f"The trace's first {report.num_batch:,} requests, all at once", report.batch),
    ]
    shown = [(title, held) for title, held in groups if held]
    if not shown:
        return None
    return Section(
        name="generated",
        title="Bytes held against tokens generated",
        text=[
            "Counted by each strategy's accounting, with enough memory for all sequences. The gap "
            "between a line and the grey area is held and empty.",
        ],
        keys=(("needed", "the tokens' own bytes"),),
        panels=[_held_panel(title, held) for title, held in shown],
        table=ReportTable(
            head=("", "", "tokens generated", "held", "used"),
            rows=[row for title, held in shown for row in _rows(title, held)],
        ),
    )


def _held_panel(title: str, several: Sequence[Held]) -> Panel:
    last = max(each.num_tokens[-1] for each in several)
    highest = max(max(each.committed_bytes) for each in several)
    tops = ticks(highest, base=1024)
    plot = Plot(
        width=_WIDTH,
        height=_HEIGHT,
        x=Scale(low=0, high=max(last, 1), start=_LEFT, stop=_WIDTH - _RIGHT),
        y=Scale(low=0, high=tops[-1], start=_HEIGHT - 48, stop=12),
    )
    plot.y_axis(tops, axis_of_bytes(tops))
    marks = [mark for mark in ticks(last, num_steps=4) if mark <= last]
    plot.x_axis(marks, axis_of_counts(marks), "tokens generated by each")
    needed = list(zip(several[-1].num_tokens, several[-1].used_bytes, strict=True))
    plot.area(needed, [(x, 0) for x, _ in needed], "var(--ink)", opacity=0.16)
    for each in several:
        points = list(zip(each.num_tokens, each.committed_bytes, strict=True))
        # Dashes show both of two lines that coincide.
        plot.line(points, strategy_color(each.strategy), dashes=_dashes(each, several))
    # Lines that all end at one value are labelled at their peaks.
    tails = [each.committed_bytes[-1] for each in several]
    places = tails if len(set(tails)) > 1 else [max(each.committed_bytes) for each in several]
    labels = spread([plot.y(place) for place in places], 15, _HEIGHT - 48)
    for each, y in zip(several, labels, strict=True):
        color = strategy_color(each.strategy)
        plot.text(_WIDTH - _RIGHT + 6, y + 4, each.strategy, color=color)
    said = "; ".join(f"{each.strategy} up to {size(max(each.committed_bytes))}" for each in several)
    return Panel(title=title, drawings=[plot.svg(f"{title}. {said}")], hover=_hover(several, plot))


def _dashes(each: Held, several: Sequence[Held]) -> str:
    before = several[: [other.strategy for other in several].index(each.strategy)]
    alike = any(
        other.num_tokens == each.num_tokens
        and all(
            abs(a - b) <= 0.02 * max(a, b, 1)
            for a, b in zip(each.committed_bytes, other.committed_bytes, strict=True)
        )
        for other in before
    )
    return "4 5" if alike else ""


def _hover(several: Sequence[Held], plot: Plot) -> Hover:
    tokens = several[0].num_tokens
    return Hover(
        at=[plot.x(each) / _WIDTH for each in tokens],
        titles=[f"{count(each)} tokens" for each in tokens],
        series=[
            *((each.strategy, [size(value) for value in each.committed_bytes]) for each in several),
            ("tokens' own", [size(value) for value in several[-1].used_bytes]),
        ],
    )


def _rows(title: str, several: Sequence[Held]) -> list[list[str]]:
    rows = []
    for each in several:
        last = len(each.num_tokens) - 1
        for number in sorted({round(at * last / _NUM_ROWS) for at in range(_NUM_ROWS + 1)}):
            rows.append(
                [
                    title,
                    each.strategy,
                    count(each.num_tokens[number]),
                    size(each.committed_bytes[number]),
                    size(each.used_bytes[number]),
                ]
            )
    return rows


# -- the page --------------------------------------------------------------------------------------


def render(report: Report) -> str:
    """Return the page as an HTML file."""
    sections = [
        memory_section(report),
        utilization_section(report),
        generated_section(report),
        latency_section(report),
        work_section(report),
        tier_section(report),
        prefix_section(report),
    ]
    shown = [each for each in sections if each is not None] if report.variants else []
    title = f"{', '.join(map(file_name, report.traces))} on {report.model}"
    own = files("quire") / "planner" / "report"
    style = (own / "page.css").read_text(encoding="utf-8")
    script = (own / "page.js").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            f"<title>{escape(title)}: simulated by Quire</title>",
            f"<style>\n{style}</style>\n</head>\n<body>",
            *_head(report, title),
            *(part for section in shown for part in _section(section)),
            f"<footer>Quire {escape(report.version)}. This file needs no network.</footer>",
            f"<script>\n{script}</script>\n</body>\n</html>\n",
        ]
    )


def _head(report: Report, title: str) -> Iterator[str]:
    yield f"<header>\n<h1>{escape(title)}</h1>"
    yield (
        '<p class="soft">Simulated: the engine\'s own scheduler and accounting on a virtual '
        "clock, without a model.</p>"
    )
    yield '<ul class="answers">'
    yield from (f"<li>{escape(each)}</li>" for each in answers(report))
    yield "</ul>"
    facts = [*(("trace", source) for source in report.traces)]
    facts += [("model", report.model), ("machine", report.machine)]
    facts += [("goals", _goals(report))] if _goals(report) else []
    facts += [("note", note) for note in report.notes]
    yield "<dl>"
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    yield f"<dt>again</dt><dd><pre>{escape(report.command)}</pre></dd>\n</dl>"
    if report.variants:
        yield _table(comparison(report), "All variants")
    yield "</header>"


def _goals(report: Report) -> str:
    several = ((name, goal) for name, goal in report.goals.items() if goal is not None)
    return ", ".join(
        f"{name.removesuffix('_s').upper()} {duration(goal)}" for name, goal in several
    )


def _section(section: Section) -> Iterator[str]:
    yield f'<section aria-labelledby="{section.name}">'
    yield f'<h2 id="{section.name}">{escape(section.title)}</h2>'
    yield from (f"<p>{escape(text)}</p>" for text in section.text)
    if section.keys:
        yield '<ul class="keys">'
        for kind, meaning in section.keys:
            yield f'<li><span class="swatch {kind}"></span>{escape(meaning)}</li>'
        yield "</ul>"
    if section.panels:
        pairs = " by2" if len(section.panels) in (2, 4) else ""
        yield f'<div class="plots{pairs}">'
        yield from map(_panel, section.panels)
        yield "</div>"
    if section.bars:
        yield '<div class="bars">'
        yield from map(_bar, section.bars)
        yield "</div>"
    if section.table is not None:
        opened = " open" if section.opens else ""
        yield f"<details{opened}>\n<summary>The numbers</summary>"
        yield _table(section.table, section.title)
        yield "</details>"
    yield "</section>"


def _panel(panel: Panel) -> str:
    hover = ""
    if panel.hover is not None:
        of = panel.hover
        data = {
            "at": [round(each, 4) for each in of.at],
            "titles": of.titles,
            "series": [[name, texts] for name, texts in of.series],
        }
        plain = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
        hover = f' data-hover="{escape(plain)}"'
    style = f' style="color: {panel.color}"' if panel.color else ""
    remark = f'<span class="remark">{escape(panel.remark)}</span>' if panel.remark else ""
    drawings = "\n".join(panel.drawings)
    return (
        f"<figure{hover}>\n<figcaption><h3{style}>{escape(panel.title)}</h3>{remark}</figcaption>\n"
        f'<div class="drawings">\n{drawings}\n</div>\n</figure>'
    )


def _bar(bar: Bar) -> str:
    parts = "".join(
        f'<span class="part {part.kind}" style="width: {100 * part.share:.3f}%" '
        f'title="{escape(part.label)}: {escape(part.text)}"></span>'
        for part in bar.parts
    )
    said = "; ".join(f"{part.label}: {part.text}" for part in bar.parts)
    return (
        f'<div class="bar"><div><span style="color: {bar.color}">{escape(bar.name)}</span>'
        f'<span class="remark">{escape(bar.remark)}</span></div>\n'
        f'<div class="whole" style="color: {bar.color}" role="img" '
        f'aria-label="{escape(f"{bar.name}. {said}")}">{parts}</div></div>'
    )


def _table(table: ReportTable, label: str) -> str:
    return "\n".join(
        [
            f'<div class="scrolls" role="region" tabindex="0" aria-label="{escape(label)}"><table>',
            f"<thead><tr>{_cells(table.head, 'col')}</tr></thead>\n<tbody>",
            *(_row(row) for row in table.rows),
            "</tbody></table></div>",
        ]
    )


def _row(row: Sequence[str]) -> str:
    cells = "".join(f"<td>{escape(text)}</td>" for text in row[1:])
    return f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'


def _cells(texts: Iterable[str], scope: str) -> str:
    return "".join(f'<th scope="{scope}">{escape(text)}</th>' for text in texts)
