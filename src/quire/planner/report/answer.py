"""The answer in a few sentences, and all variants in one table."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from quire.planner.report.content import Report, Table, Variant
from quire.planner.report.words import count, duration, rate, share, size, times
from quire.planner.result import SimulationResult

Figure: TypeAlias = Callable[[SimulationResult], float]


def answers(report: Report) -> list[str]:
    """Who serves most, who waits least, who wastes least; of one variant, how it does."""
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
    if any(goal is not None for goal in report.goals.values()):
        yield _compared(
            variants, lambda r: r.good_requests_per_s, "{} meets the goals most often", _a_second
        )
    yield _compared(variants, lambda r: r.output_tokens_per_s, "{} serves most", _tokens_a_second)
    yield _compared(
        variants,
        lambda r: r.latencies["ttft_s"]["p99"],
        "{} has the shortest wait for a first token at the 99th percentile",
        duration,
        least=True,
    )
    yield _compared(variants, lambda r: r.utilization, "{} uses most of what it holds", share)


def _compared(
    variants: Sequence[Variant],
    figure: Figure,
    sentence: str,
    write: Callable[[float], str],
    *,
    least: bool = False,
) -> str:
    """The best, with all that look the same, and the worst."""
    pick, other = (min, max) if least else (max, min)
    best = pick(figure(each.result) for each in variants)
    worst = other(figure(each.result) for each in variants)
    if abs(best - worst) <= 0.01 * max(abs(best), abs(worst)):
        return f"{_alike(sentence)}: {write(best)}."
    names = [each.name for each in variants if _close(figure(each.result), best)]
    last = [each.name for each in variants if _close(figure(each.result), worst)]
    ratio = (worst / best if best else 0.0) if least else (best / worst if worst else 0.0)
    how = f" ({times(ratio)})" if ratio > 1.05 and write is not share else ""
    said = sentence.format(_listed(names))
    if len(names) > 1:
        said = said.replace(" serves ", " serve ").replace(" uses ", " use ").replace(" it ", " they ")
        said = said.replace(" has ", " have ").replace(" meets ", " meet ")
    return f"{said}: {write(best)}, against {write(worst)} with {_listed(last)}{how}."


def _close(value: float, best: float) -> bool:
    return abs(value - best) <= 0.01 * abs(best)


def _alike(sentence: str) -> str:
    """All variants as the subject."""
    return sentence.format("None stands out: each").replace("most often", "as often")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _ended(result: SimulationResult) -> int:
    return result.num_finished.get("length", 0) + result.num_finished.get("stop", 0)


def _a_second(value: float) -> str:
    return f"{rate(value)} requests/s"


def _tokens_a_second(value: float) -> str:
    return f"{rate(value)} output tokens/s"


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
        ("utilization", lambda r: share(r.utilization)),
        ("running, mean", lambda r: f"{r.num_running:,.1f}"),
        ("waiting, mean", lambda r: f"{r.num_waiting:,.1f}"),
        ("prompt tokens found", lambda r: share(r.hit_rate)),
        ("preemptions", lambda r: count(r.num_preemptions)),
        ("TTFT, median", lambda r: duration(r.latencies["ttft_s"]["p50"])),
        ("TTFT, 99th percentile", lambda r: duration(r.latencies["ttft_s"]["p99"])),
        ("TPOT, median", lambda r: duration(r.latencies["tpot_s"]["p50"])),
        ("TPOT, 99th percentile", lambda r: duration(r.latencies["tpot_s"]["p99"])),
    ]
    if any(goal is not None for goal in report.goals.values()):
        rows.insert(4, ("… within the goals", lambda r: rate(r.good_requests_per_s)))
    return Table(
        head=("", *(variant.name for variant in report.variants)),
        rows=[[name, *(each(v.result) for v in report.variants)] for name, each in rows],
    )
