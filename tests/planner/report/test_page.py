"""The page: well-formed, by itself, with the result's own figures, whatever the names and sizes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import pytest

from planner.reports import HOSTILE, STRATEGIES, report
from quire.planner.report import Report, render
from quire.planner.report.content import count, duration, rate, share, size
from quire.planner.simulation.timeline import TimelinePoint

VOID = {"meta", "br", "hr", "img", "input", "link"}
LEAVES_OPEN = {"path", "rect", "circle"}


@dataclass
class Page(HTMLParser):
    """What a browser would make of a file."""

    open: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    _rows: list[list[str]] = field(default_factory=list)
    _label: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "div" and dict(attrs).get("class") == "scrolls":
            self._label = dict(attrs)["aria-label"] or ""
        if tag == "tr":
            self.tables.setdefault(self._label, []).append([])
        if tag in ("td", "th"):
            self.tables[self._label][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> ends nothing"
        assert self.open[-1] == tag, f"<{self.open[-1]}> is ended by </{tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self._label][-1][-1] += data

    @property
    def svgs(self) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == "svg"]


def page_of(made: Report) -> tuple[str, Page]:
    text = render(made)
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    return text, page


def column(table: list[list[str]], name: str) -> list[str]:
    return [row[table[0].index(name)] for row in table[1:]]


def test_it_is_a_whole_page_that_needs_nothing_else() -> None:
    text, page = page_of(report())
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 1_000_000
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base"), tag
        assert not {"src", "href", "srcset", "action"} & set(attrs), (tag, attrs)
    assert not re.search(r"https?://|@import|url\(|//cdn", text)
    assert sum(tag == "h1" for tag, _ in page.tags) == 1


def test_what_comes_from_files_is_text() -> None:
    text, page = page_of(report())
    assert "<script>alert" not in text
    assert "</style>.jsonl" not in text
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert any(HOSTILE in said for said in page.texts)


def test_every_plot_has_words_and_numbers() -> None:
    _, page = page_of(report())
    # Memory and requests of each variant; one sequence and a batch; three latencies; hit rates.
    assert len(page.svgs) == 2 * len(STRATEGIES) + 2 + 3 + 1
    for attrs in page.svgs:
        assert attrs["role"] == "img"
        assert len(attrs["aria-label"] or "") > 20
    assert len([1 for tag, _ in page.tags if tag == "details"]) == 6
    for rows in page.tables.values():
        assert len({len(row) for row in rows}) == 1
        assert len(rows) > 1


def test_tables_say_what_the_results_say() -> None:
    made = report()
    _, page = page_of(made)
    results = [variant.result for variant in made.variants]
    compared = {row[0]: row[1:] for row in page.tables["All variants"]}
    assert compared[""] == list(STRATEGIES)
    assert compared["requests"] == [count(r.num_requests) for r in results]
    assert compared["requests/s"] == [rate(r.requests_per_s) for r in results]
    assert compared["… within the goals"] == [rate(r.good_requests_per_s) for r in results]
    assert compared["utilization"] == [share(r.utilization) for r in results]
    assert compared["preemptions"] == [count(r.num_preemptions) for r in results]
    used = page.tables["What memory was used for"]
    assert column(used, "used") == [size(r.used_bytes) for r in results]
    assert column(used, "cached") == [size(r.cached_bytes) for r in results]
    assert column(used, "utilization") == [share(r.utilization) for r in results]
    took = page.tables["Latencies"]
    assert took[1][:2] == ["contiguous", "TTFT"]
    ttft = results[0].latencies["ttft_s"]
    assert took[1][2:] == [duration(ttft[part]) for part in ("mean", "p50", "p90", "p99", "max")]
    work = page.tables["Cache hits, and repeated work"]
    assert column(work, "found") == [share(r.hit_rate) for r in results]
    assert column(work, "copied") == [size(r.copied_bytes) for r in results]


def test_the_hit_rates_and_what_is_held_are_those_that_were_given() -> None:
    made = report()
    _, page = page_of(made)
    rates = made.hit_rates[0][1]
    expected = [
        [policy, count(each.cache_tokens), share(each.hit_fraction)]
        for policy, several in rates.by_policy.items()
        for each in several
    ]
    shown = page.tables["Hit rate of a prefix cache, by its size"][1:]
    assert [row[1:4] for row in shown[:-1]] == expected
    assert shown[-1][1:4:2] == ["infinite", share(rates.infinite.hit_fraction)]
    held = page.tables["Bytes held against tokens generated"][1:]
    first = made.one[0]
    assert held[0][1:] == [
        first.strategy,
        count(first.num_tokens[0]),
        size(first.committed_bytes[0]),
        size(first.used_bytes[0]),
    ]
    last = made.batch[-1]
    assert held[-1][1:4] == [
        last.strategy,
        count(last.num_tokens[-1]),
        size(last.committed_bytes[-1]),
    ]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    made = report()
    text, _ = page_of(made)
    widths = [
        float(width) for width in re.findall(r'class="part used" style="width: ([\d.]+)%', text)
    ]
    expected = [100 * v.result.used_bytes / v.result.memory_bytes for v in made.variants]
    expected += [100 * v.result.hit_rate for v in made.variants]
    assert widths == pytest.approx(expected, abs=0.001)


def test_the_answer_names_the_best() -> None:
    _, page = page_of(report())
    said = " ".join(page.texts)
    best = max(report().variants, key=lambda variant: variant.result.utilization)
    assert re.search(rf"{best.name}[^.]* most of what (it|they) holds?: ", said)


def variants_of(made: Report) -> Iterator[Report]:
    """What a report may be of, at its edges."""
    one = made.variants[:1]
    yield replace(made, variants=one)
    yield replace(made, one=(), batch=(), hit_rates=(), bytes_per_token=0)
    point = TimelinePoint(0.0, 1.0, (1.0, 2.0, 0.0, 1.0, 0.0), 2)
    yield replace(
        made,
        variants=tuple(
            replace(v, result=replace(v.result, timelines=((point,),), duration_s=1.0)) for v in one
        ),
    )
    yield replace(
        made,
        variants=tuple(
            replace(
                v,
                result=replace(
                    v.result,
                    memory_bytes=2**70,
                    used_bytes=2.0**69,
                    committed_bytes=2.0**69,
                    num_requests=10**18,
                    duration_s=1e12,
                    timelines=(
                        (TimelinePoint(0.0, 1e12, (2.0**69, 2.0**69, 0, 1e9, 1e12), 2**69),),
                    ),
                    latencies={
                        name: dict.fromkeys(figures, 1e11)
                        for name, figures in v.result.latencies.items()
                    },
                ),
            )
            for v in made.variants
        ),
    )
    yield replace(
        made, variants=tuple(replace(v, result=replace(v.result, timelines=((), ()))) for v in one)
    )
    yield replace(made, variants=tuple(replace(v, name=f"{'x' * 200}{v.name}") for v in one * 12))


def test_there_is_a_page_of_anything() -> None:
    for made in [
        *variants_of(report()),
        *variants_of(report(1)),
        report(0),
        report(0, "t", ("paged",)),
    ]:
        text, page = page_of(made)
        assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan", "", text.lower())
        assert not re.search(r"[ \"]-?inf[ \",]", text)
        assert page.tables


def test_no_request_says_so() -> None:
    text, _ = page_of(report(0))
    assert "The trace has no requests" in text
    text, _ = page_of(replace(report(), variants=()))
    assert "The trace has no requests" in text


def test_who_ended_nothing_is_not_the_fastest() -> None:
    made = report()
    idle = made.variants[0]
    none_ended = replace(
        idle,
        result=replace(
            idle.result,
            num_finished={},
            latencies={name: dict.fromkeys(f, 0.0) for name, f in idle.result.latencies.items()},
        ),
    )
    _, page = page_of(replace(made, variants=(none_ended, *made.variants[1:])))
    said = " ".join(page.texts)
    assert f"No request finished with {idle.name}." in said
    assert not re.search(rf"{idle.name}[^.]* waits? least", said)
    compared = {row[0]: row[1:] for row in page.tables["All variants"]}
    assert compared["TTFT, median"][0] == "–"
