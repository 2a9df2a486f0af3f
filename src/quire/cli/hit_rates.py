"""Run ``quire hit-rates``: compute the hit rates of prefix caches on a trace."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskProgressColumn, TimeRemainingColumn
from rich.table import Table

from quire.cli.options import AsJson, plain_table, progress_bar
from quire.errors import ConfigError
from quire.planner.hit_rates import (
    OWN_POLICIES,
    HitRates,
    Prompts,
    hit_rate_curve,
    prompts_of,
    require_policies,
    round_sizes,
)
from quire.traces import Trace, form_names, open_trace
from quire.units import format_count, parse_count


def hit_rates(  # noqa: PLR0913 - each is a flag
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A file, folder or web address of a trace with hash ids: Mooncake's, Bailian's, "
            "kv-cache-tester's or Quire's own.",
        ),
    ],
    *,
    cache_tokens: Annotated[
        str | None,
        typer.Option(
            help="Cache sizes in tokens, e.g. 1M,4M,16M. Default: round sizes up to one that "
            "evicts nothing."
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help=f"Eviction policies: {', '.join(OWN_POLICIES)}, or one that a package adds. "
            "Default: those four."
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens per block. Default: the tokens of a hash id of the trace."),
    ] = None,
    whole_blocks: Annotated[
        bool, typer.Option("--whole-blocks", help="Cache only full blocks, as an engine does.")
    ] = False,
    warmup_fraction: Annotated[
        float,
        typer.Option(help="Fraction of the requests, 0 to 1, that only fill the cache."),
    ] = 0.0,
    trace_format: Annotated[
        str | None,
        typer.Option(help=f"Format of the trace: {', '.join(form_names())}. Default: by content."),
    ] = None,
    max_skipped: Annotated[
        int, typer.Option(help="Number of invalid rows to skip before giving up.")
    ] = 0,
    session_interval_s: Annotated[
        float,
        typer.Option(help="Mean seconds between starts of conversations in kv-cache-tester's."),
    ] = 60.0,
    seed: Annotated[
        int, typer.Option(help="Random seed for arrival times that the trace lacks.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Compute the hit rate of a prefix cache on a trace, by cache size and policy.

    \b
    quire hit-rates mooncake.jsonl
    quire hit-rates mooncake.jsonl --cache-tokens 1M,4M --policies lru,optimum

    Raises: ConfigError.
    """
    console = Console(stderr=True)
    chosen = _policies(policies)
    if not 0 <= warmup_fraction < 1:
        raise ConfigError(f"--warmup-fraction {warmup_fraction} must be at least 0 and below 1")
    if max_skipped < 0:
        raise ConfigError(f"--max-skipped {max_skipped} must be at least 0")
    sizes = cache_tokens and [parse_count(size) for size in cache_tokens.split(",")]
    with progress_bar(TaskProgressColumn(), TimeRemainingColumn(), console=console) as progress:
        found, prompts = _read(
            trace,
            progress,
            block_size,
            whole_blocks,
            form=trace_format,
            max_skipped=max_skipped,
            session_interval_s=session_interval_s,
            seed=seed,
        )
        rates = hit_rate_curve(
            prompts,
            sizes or round_sizes(prompts),
            chosen,
            skip_requests=int(warmup_fraction * prompts.num_requests),
            on_work=_teller(progress),
        )
    if found.counts.num_skipped:
        console.print(
            f"{found.counts.num_skipped:,} rows were skipped; the first is "
            f"{found.counts.first_skipped}",
            markup=False,
        )
    if as_json:
        print(json.dumps(as_dict(rates, found)))
        return
    out = Console(highlight=False)
    for table in (_table(rates, found), _reasons(rates)):
        out.print(table)
    for line in _notes(rates):
        out.print(line, markup=False, soft_wrap=True)


def as_dict(rates: HitRates, trace: Trace) -> dict[str, Any]:
    """Return the result as a JSON object."""
    return {
        "trace": str(trace.source),
        "trace_format": trace.form,
        "num_skipped": trace.counts.num_skipped,
        **{name: value for name, value in asdict(rates).items() if name != "by_policy"},
        "policies": {
            policy: [
                {
                    **asdict(each),
                    "evicted_tokens": each.evicted_tokens,
                    "hit_fraction": each.hit_fraction,
                }
                for each in several
            ]
            for policy, several in rates.by_policy.items()
        },
    }


def _policies(text: str | None) -> Sequence[str]:
    names = OWN_POLICIES if text is None else tuple(text.split(","))
    require_policies(names, "--policies")
    return names


def _read(
    source: str, progress: Progress, block_size: int | None, whole_blocks: bool, **reading: Any
) -> tuple[Trace, Prompts]:
    task = progress.add_task(f"reading {escape(source)}", total=None)
    trace = open_trace(
        source,
        **reading,
        on_progress=lambda done, total: progress.update(task, completed=done, total=total),
    )
    prompts = prompts_of(trace, block_tokens=block_size, whole_blocks=whole_blocks)
    progress.remove_task(task)
    return trace, prompts


def _teller(progress: Progress) -> Any:
    task = progress.add_task("")

    def tell(what: str, done: int, count: int) -> None:
        progress.update(task, description=what, completed=done, total=count)

    return tell


def _table(rates: HitRates, trace: Trace) -> Table:
    title = (
        f"Hit rate of a prefix cache, percent of {format_count(rates.prompt_tokens)} prompt "
        f"tokens ({escape(trace.form)}, blocks of {rates.block_tokens})"
    )
    several = next(iter(rates.by_policy.values()))
    sizes = (_tokens(each.cache_tokens) for each in several)
    table = plain_table(title, "policy", *sizes, "infinite")
    without_end = f"{100 * rates.infinite.hit_fraction:.1f}"
    for policy, found in rates.by_policy.items():
        cells = [f"{100 * each.hit_fraction:.1f}" for each in found]
        table.add_row(f"[cyan]{policy}[/]", *cells, without_end)
    return table


def _reasons(rates: HitRates) -> Table:
    policy, found = next(iter(rates.by_policy.items()))
    sizes = (_tokens(each.cache_tokens) for each in found)
    table = plain_table(f"Hits and misses under {policy}", "percent of prompt tokens", *sizes)
    for name, parts in (
        ("hit", [each.hit_tokens for each in found]),
        ("seen for the first time", [each.cold_tokens for each in found]),
        ("evicted before", [each.evicted_tokens for each in found]),
        ("in no full block", [each.partial_tokens for each in found]),
    ):
        table.add_row(name, *(f"{100 * part / rates.prompt_tokens:.1f}" for part in parts))
    return table


def _notes(rates: HitRates) -> Sequence[str]:
    least = min(each.cache_tokens for several in rates.by_policy.values() for each in several)
    notes = [
        f"{format_count(rates.num_requests)} requests. A cache of "
        f"{_tokens(rates.num_blocks * rates.block_tokens)} tokens evicts nothing."
    ]
    if least < rates.longest_tokens:
        notes.append(
            f"The longest prompt has {format_count(rates.longest_tokens)} tokens in blocks: a "
            f"smaller cache refuses such prompts, and their tokens count as misses."
        )
    return notes


def _tokens(count: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)
