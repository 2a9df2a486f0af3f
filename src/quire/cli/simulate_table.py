"""Print what ``quire simulate`` has found: a column for each simulation, a row for each figure."""

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import TypeAlias

from rich.console import Console

from quire.cli.options import plain_table
from quire.planner.simulation.result import (
    PrefillFigures,
    SimulationResult,
    TierFigures,
    TierTotals,
)
from quire.units import format_bytes, format_count

Named: TypeAlias = tuple[str, SimulationResult]
Figure: TypeAlias = Callable[[SimulationResult], str]
Row: TypeAlias = tuple[str, Figure]


def print_results(several: Sequence[Named], *, notes: Sequence[str]) -> None:
    """Print a table with a column for each simulation and a row for each figure."""
    console = Console(highlight=False)
    table = plain_table("", "", *(name for name, _ in several))
    table.columns[0].no_wrap = True
    results = [result for _, result in several]
    for title, rows in (
        ("requests served", _SERVED),
        ("prompts computed apart", list(_apart(results))),
        ("memory held, mean over time", _HELD),
        ("prefix cache, and repeated work", [*_misses(results), *_TWICE]),
        ("tiers", list(_tiers(results))),
        ("latencies", list(_latencies())),
    ):
        if not rows:
            continue
        table.add_section()
        table.add_row(f"[bold]{title}[/]")
        for label, figure in rows:
            table.add_row(f"  {label}", *map(figure, results))
    console.print(table)
    for note in notes:
        console.print(f"[dim]{note}[/]", soft_wrap=True)


def _good(result: SimulationResult) -> str:
    return f"{result.good_requests_per_s:,.3g}" if any(result.goals.values()) else ""


_SERVED: tuple[Row, ...] = (
    ("requests", lambda r: format_count(r.num_requests)),
    ("… finished", lambda r: format_count(r.num_ended)),
    ("… refused as too long", lambda r: format_count(r.num_refused)),
    ("virtual time", lambda r: f"{r.duration_s:,.1f} s"),
    ("requests/s", lambda r: f"{r.requests_per_s:,.3g}"),
    ("… within the goals", _good),
    ("output tokens/s", lambda r: f"{r.output_tokens_per_s:,.1f}"),
    ("tokens per step", lambda r: f"{r.num_scheduled_tokens / max(1, r.num_steps):,.1f}"),
)

_HELD: tuple[Row, ...] = (
    ("memory of all replicas", lambda r: format_bytes(r.fleet_bytes)),
    ("committed", lambda r: format_bytes(round(r.committed_bytes))),
    ("… only cached", lambda r: format_bytes(round(r.cached_bytes))),
    ("… used", lambda r: format_bytes(round(r.used_bytes))),
    ("utilization", lambda r: f"{r.utilization:.1%}"),
    ("peak of one replica", lambda r: format_bytes(r.peak_committed_bytes)),
    ("sequences running", lambda r: f"{r.num_running:,.1f}"),
    ("… peak of one replica", lambda r: format_count(r.most_running)),
    ("… waiting", lambda r: f"{r.num_waiting:,.1f}"),
)

_TWICE: tuple[Row, ...] = (
    ("preemptions", lambda r: format_count(r.num_preemptions)),
    ("… by swapping", lambda r: format_count(r.num_swaps)),
    ("tokens computed again", lambda r: format_count(r.num_recomputed_tokens)),
    ("bytes swapped", lambda r: format_bytes(r.saved_bytes + r.loaded_bytes)),
    ("bytes copied", lambda r: format_bytes(r.copied_bytes)),
)


def _apart(results: Sequence[SimulationResult]) -> Iterator[Row]:
    """Yield what prefill replicas did for the others, where there are some."""
    if not any(result.prefill for result in results):
        return

    def of(figure: Callable[[PrefillFigures], str]) -> Figure:
        return lambda r: "" if r.prefill is None else figure(r.prefill)

    yield "by prefill replicas", of(lambda p: format_count(p.num_prompts["apart"]))
    yield "… where the answer is", of(lambda p: format_count(p.num_prompts["here"]))
    yield "… there for lack of room", of(lambda p: format_count(p.num_prompts["failed"]))
    yield "moved", of(lambda p: format_bytes(p.moved_bytes))
    yield "prefill replicas idle", of(lambda p: f"{1 - p.busy_fraction:.1%}")
    yield "other replicas idle", lambda r: f"{1 - r.busy_fraction:.1%}"


def _misses(results: Sequence[SimulationResult]) -> Iterator[Row]:
    """Yield rows with the share of prompt tokens that were cached, and why others were not."""
    yield (
        "prompt tokens cached",
        lambda r: f"{r.hit_rate:.1%}" if r.prefix_query_tokens else "not looked up",
    )
    reasons = dict.fromkeys(
        reason
        for result in results
        for reason, count in result.prefix_missed_tokens.items()
        if count
    )

    def missed(reason: str) -> Callable[[SimulationResult], str]:
        return lambda r: (
            f"{r.prefix_missed_tokens.get(reason, 0) / r.prefix_query_tokens:.1%}"
            if r.prefix_query_tokens
            else ""
        )

    for reason in reasons:
        yield f"… not: {_WORDS.get(reason, reason)}", missed(reason)


# What the table says for a value of ``PrefixHit.shortfall``.
_WORDS = MappingProxyType({"unknown": "never seen", "strategy": "strategy has no cache"})


def _tiers(results: Sequence[SimulationResult]) -> Iterator[Row]:
    """Yield what tiers were asked for, found, saved and wasted, and then what each one did."""
    known = [each.tiers for each in results if each.tiers is not None]
    if not known:
        return

    def of_all(figure: Callable[[SimulationResult, TierTotals], str]) -> Figure:
        return lambda r: "" if r.tiers is None else figure(r, r.tiers)

    def of_one(number: int, figure: Callable[[SimulationResult, TierFigures], str]) -> Figure:
        return of_all(lambda r, t: figure(r, t.tiers[number]))

    yield "prompt tokens asked for", of_all(lambda r, t: _of_prompts(t.queried_tokens, r))
    yield "… that came in time", of_all(lambda r, t: _of_prompts(t.hit_tokens, r))
    yield "seconds of computing saved", of_all(lambda r, t: f"{t.saved_s:,.1f} s")
    yield "loads that came too late", of_all(lambda r, t: format_count(t.num_late))
    yield "tokens loaded for nothing", of_all(lambda r, t: format_count(t.wasted_tokens))
    yield "… evicted before their use", of_all(lambda r, t: format_count(t.evicted_tokens))
    yield "blocks stored", of_all(lambda r, t: format_count(t.stored_blocks))
    yield "… evicted before that", of_all(lambda r, t: format_count(t.dropped_blocks))
    for number, tier in enumerate(known[0].tiers):
        name = tier.name
        yield f"{name}: holds", of_one(number, lambda _, t: format_bytes(t.used_bytes))
        yield "… found", of_one(number, lambda r, t: _of_prompts(t.hit_tokens, r))
        yield "… records evicted", of_one(number, lambda _, t: format_count(t.num_evicted))
        yield "… read", of_one(number, lambda _, t: format_bytes(t.read_bytes))
        yield "… written", of_one(number, lambda _, t: format_bytes(t.written_bytes))


def _of_prompts(num_tokens: int, result: SimulationResult) -> str:
    return f"{num_tokens / max(1, result.prefix_query_tokens):.1%}"


def _latencies() -> Iterator[Row]:
    def figure(key: str, part: str) -> Callable[[SimulationResult], str]:
        return lambda r: _duration(r.latencies[key][part])

    for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
        for part in ("p50", "p90", "p99"):
            yield f"{name} {part}", figure(key, part)


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:,.1f} ms"
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
