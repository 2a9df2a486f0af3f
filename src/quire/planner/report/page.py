"""Sections as one HTML file: no network, no fonts, and readable without a script.

All text that comes from elsewhere is escaped here, and only here; what is drawn escapes its own.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from quire.planner.report.answer import answers, comparison
from quire.planner.report.content import Bar, Panel, Report, Section, Table
from quire.planner.report.generated import generated_section
from quire.planner.report.latency import latency_section, work_section
from quire.planner.report.memory import memory_section
from quire.planner.report.prefixes import prefix_section
from quire.planner.report.utilization import utilization_section
from quire.planner.report.words import duration, file_name


def render(report: Report) -> str:
    """The whole file."""
    sections = [
        memory_section(report),
        utilization_section(report),
        generated_section(report),
        latency_section(report),
        work_section(report),
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


def _table(table: Table, label: str) -> str:
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
