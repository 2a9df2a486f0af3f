"""How ``quire simulate`` looks on a terminal: one table a question, a row a variant."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from quire.cli.options import plain_table
from quire.planner.result import SimulationResult
from quire.units import format_bytes, format_count, format_seconds

Named = tuple[str, SimulationResult]


def print_results(several: Sequence[Named], *, notes: Sequence[str]) -> None:
    """Tables side by side would be too wide: what is held, what is found, how long it takes."""
    console = Console(highlight=False)
    for table in (_traffic(several), _memory(several), _cache(several), _latency(several)):
        console.print(table)
    for note in notes:
        console.print(f"[dim]{note}[/]", soft_wrap=True)


def _traffic(several: Sequence[Named]) -> Table:
    table = plain_table(
        "What was served", "", "requests", "ended", "refused", "virtual", "req/s", "output tok/s",
        "good req/s",
    )  # fmt: skip
    for name, result in several:
        done = result.num_finished.get("length", 0) + result.num_finished.get("stop", 0)
        table.add_row(
            name,
            format_count(result.num_requests),
            format_count(done),
            format_count(result.num_refused + result.num_finished.get("capacity", 0)),
            format_seconds(result.duration_s),
            f"{result.requests_per_s:,.2f}",
            f"{result.output_tokens_per_s:,.1f}",
            f"{result.good_requests_per_s:,.2f}" if any(result.goals.values()) else "",
        )
    return table


def _memory(several: Sequence[Named]) -> Table:
    table = plain_table(
        "What was held, in the mean over time", "", "memory", "committed", "cached", "used",
        "utilization", "running", "most", "waiting",
    )  # fmt: skip
    for name, result in several:
        sizes = (
            result.memory_bytes * result.num_replicas,
            round(result.committed_bytes),
            round(result.cached_bytes),
            round(result.used_bytes),
        )
        table.add_row(
            name,
            *map(format_bytes, sizes),
            f"{result.utilization:.1%}",
            f"{result.num_running:,.1f}",
            format_count(result.most_running),
            f"{result.num_waiting:,.1f}",
        )
    return table


def _cache(several: Sequence[Named]) -> Table:
    table = plain_table(
        "What was found, and what was done twice", "", "hit", "why the rest was not",
        "preempted", "recomputed", "swapped", "copied",
    )  # fmt: skip
    for name, result in several:
        reasons = sorted(result.prefix_missed_tokens.items(), key=lambda pair: -pair[1])
        asked = max(1, result.prefix_query_tokens)
        why = ", ".join(f"{reason} {count / asked:.1%}" for reason, count in reasons if count)
        table.add_row(
            name,
            f"{result.hit_rate:.1%}",
            why,
            format_count(result.num_preemptions),
            f"{format_count(result.num_recomputed_tokens)} tokens",
            format_bytes(result.saved_bytes + result.loaded_bytes),
            format_bytes(result.copied_bytes),
        )
    return table


def _latency(several: Sequence[Named]) -> Table:
    table = plain_table(
        "How long it took", "", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "E2E p50",
        "p99",
    )  # fmt: skip
    for name, result in several:
        ttft, tpot, e2e = (result.latencies[key] for key in ("ttft_s", "tpot_s", "e2e_s"))
        figures = (
            *(ttft[p] for p in ("p50", "p90", "p99")),
            *(tpot[p] for p in ("p50", "p90", "p99")),
            *(e2e[p] for p in ("p50", "p99")),
        )
        table.add_row(name, *map(format_seconds, figures))
    return table
