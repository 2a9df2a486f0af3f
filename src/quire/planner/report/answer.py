"""The answer in a few sentences, and all variants in one table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from quire.planner.report.content import Report, Table, Variant
from quire.planner.report.words import count, duration, rate, share, size, times
from quire.planner.simulation.result import SimulationResult

Figure: TypeAlias = Callable[[SimulationResult], float]


def answers(report: Report) -> list[str]:
    """Say which variant serves most, waits least and wastes least; of a single one, how it does."""
    variants = [each for each in report.variants if each.result.num_requests]
    if not variants:
        return ["No request came: there is nothing to say."]
    if len(variants) == 1:
        return list(_of_one(variants[0]))
    return list(_of_several(report, variants))


def _of_one(variant: Variant) -> Iterator[str]:
    result = variant.result
    yield (
        f"{count(_ended(result))} of {count(result.num_requests)} requests came to their end in "
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
    served = [each for each in variants if _ended(each.result)]
    if idle := [each.name for each in variants if not _ended(each.result)]:
        yield f"No request came to its end with {_listed(idle)}."
    if len(served) == 1:
        yield f"With {served[0].name}:"
        yield from _of_one(served[0])
    elif served:
        all_of = "All" if len(served) == len(variants) else "The others"
        yield from (_compared(served, question, all_of) for question in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Which variant has most of a figure, or least, and how that is said."""

    figure: Figure
    write: Callable[[float], str]
    one: str  # what the best one does
    several: str  # … if they are several
    alike: str  # what all do, if they are alike
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
    """The best, with all that look the same, and the worst."""
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


def _ended(result: SimulationResult) -> int:
    return result.num_finished.get("length", 0) + result.num_finished.get("stop", 0)


def _latency(metric: str, part: str) -> Callable[[SimulationResult], str]:
    return lambda r: duration(r.latencies[metric][part]) if _ended(r) else "–"


def comparison(report: Report) -> Table:
    """A row a figure, a column a variant."""
    rows: list[tuple[str, Callable[[SimulationResult], str]]] = [
        ("requests", lambda r: count(r.num_requests)),
        ("… that came to their end", lambda r: count(_ended(r))),
        ("… too long for model or memory", lambda r: count(r.num_refused)),
        ("requests/s", lambda r: rate(r.requests_per_s)),
        ("output tokens/s", lambda r: rate(r.output_tokens_per_s)),
        ("memory", lambda r: size(r.memory_bytes * r.num_replicas)),
        ("… committed, mean", lambda r: size(r.committed_bytes)),
        ("… used, mean", lambda r: size(r.used_bytes)),
        ("utilization", lambda r: share(r.utilization) if r.committed_bytes else "–"),
        ("running, mean", lambda r: f"{r.num_running:,.1f}"),
        ("waiting, mean", lambda r: f"{r.num_waiting:,.1f}"),
        ("prompt tokens found", lambda r: share(r.hit_rate)),
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
    return Table(
        head=("", *(variant.name for variant in report.variants)),
        rows=[[name, *(each(v.result) for v in report.variants)] for name, each in rows],
    )
