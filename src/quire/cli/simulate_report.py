"""How ``quire simulate`` looks on a terminal: a column a variant, a row a figure."""

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import TypeAlias

from rich.console import Console

from quire.cli.options import plain_table
from quire.planner.simulation.result import SimulationResult
from quire.units import format_bytes, format_count

Named = tuple[str, SimulationResult]
Row: TypeAlias = tuple[str, Callable[[SimulationResult], str]]


def print_results(several: Sequence[Named], *, notes: Sequence[str]) -> None:
    """Four sections: what was served, held and found, and how long it took."""
    console = Console(highlight=False)
    table = plain_table("", "", *(name for name, _ in several))
    table.columns[0].no_wrap = True
    results = [result for _, result in several]
    for title, rows in (
        ("served", _SERVED),
        ("held, in the mean over time", _HELD),
        ("found, and done twice", [*_misses(results), *_TWICE]),
        ("how long it took", list(_latencies())),
    ):
        table.add_section()
        table.add_row(f"[bold]{title}[/]")
        for label, figure in rows:
            table.add_row(f"  {label}", *map(figure, results))
    console.print(table)
    for note in notes:
        console.print(f"[dim]{note}[/]", soft_wrap=True)


def _ended(result: SimulationResult) -> str:
    return format_count(result.num_finished.get("length", 0) + result.num_finished.get("stop", 0))


def _good(result: SimulationResult) -> str:
    return f"{result.good_requests_per_s:,.3g}" if any(result.goals.values()) else ""


_SERVED: tuple[Row, ...] = (
    ("requests", lambda r: format_count(r.num_requests)),
    ("… that ended", _ended),
    ("… longer than could be", lambda r: format_count(r.num_refused)),
    ("virtual time", lambda r: f"{r.duration_s:,.1f} s"),
    ("requests/s", lambda r: f"{r.requests_per_s:,.3g}"),
    ("… within the goals", _good),
    ("output tokens/s", lambda r: f"{r.output_tokens_per_s:,.1f}"),
    ("tokens a step", lambda r: f"{r.num_scheduled_tokens / max(1, r.num_steps):,.1f}"),
)

_HELD: tuple[Row, ...] = (
    ("memory of all replicas", lambda r: format_bytes(r.memory_bytes * r.num_replicas)),
    ("committed", lambda r: format_bytes(round(r.committed_bytes))),
    ("… only cached", lambda r: format_bytes(round(r.cached_bytes))),
    ("… used", lambda r: format_bytes(round(r.used_bytes))),
    ("used of what is held", lambda r: f"{r.utilization:.1%}"),
    ("most committed by one", lambda r: format_bytes(r.peak_committed_bytes)),
    ("sequences running", lambda r: f"{r.num_running:,.1f}"),
    ("… most, in one", lambda r: format_count(r.most_running)),
    ("… waiting", lambda r: f"{r.num_waiting:,.1f}"),
)

_TWICE: tuple[Row, ...] = (
    ("preemptions", lambda r: format_count(r.num_preemptions)),
    ("… by swapping", lambda r: format_count(r.num_swaps)),
    ("tokens computed again", lambda r: format_count(r.num_recomputed_tokens)),
    ("bytes swapped", lambda r: format_bytes(r.saved_bytes + r.loaded_bytes)),
    ("bytes copied", lambda r: format_bytes(r.copied_bytes)),
)


def _misses(results: Sequence[SimulationResult]) -> Iterator[Row]:
    """Shares of the prompts' tokens: hits, and why the rest was not found."""
    yield "prompt tokens found", lambda r: f"{r.hit_rate:.1%}"
    reasons = dict.fromkeys(
        reason
        for result in results
        for reason, count in result.prefix_missed_tokens.items()
        if count
    )

    def missed(reason: str) -> Callable[[SimulationResult], str]:
        return lambda r: (
            f"{r.prefix_missed_tokens.get(reason, 0) / max(1, r.prefix_query_tokens):.1%}"
        )

    for reason in reasons:
        yield f"… not: {_WORDS.get(reason, reason)}", missed(reason)


# Of ``PrefixHit.shortfall``, for people.
_WORDS = MappingProxyType({"unknown": "never seen", "strategy": "none are kept"})


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
