"""``quire hit-rates``: how much of a trace's prompts a prefix cache would find."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

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
            help="A file, folder or web address of traffic that says which prompts begin alike: "
            "Mooncake's, Bailian's, kv-cache-tester's or Quire's own.",
        ),
    ],
    *,
    cache_tokens: Annotated[
        str | None,
        typer.Option(
            help="Sizes of the cache, as 1M,4M,16M. Default: round ones, up to where nothing is "
            "evicted."
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help=f"Of {', '.join(OWN_POLICIES)}, and of other packages' eviction policies. "
            "Default: all but those."
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block. Default: what an id of the trace covers.")
    ] = None,
    whole_blocks: Annotated[
        bool, typer.Option("--whole-blocks", help="A block that is not full is not found either.")
    ] = False,
    warmup_fraction: Annotated[
        float, typer.Option(help="Of the requests, which fill the cache and are not counted.")
    ] = 0.0,
    trace_format: Annotated[
        str | None,
        typer.Option(help=f"Where its beginning does not say: {', '.join(form_names())}."),
    ] = None,
    max_skipped: Annotated[
        int, typer.Option(help="Rows that may be no requests; what is skipped is counted.")
    ] = 0,
    session_interval_s: Annotated[
        float, typer.Option(help="Between the beginnings of kv-cache-tester's conversations.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Of what a trace leaves to be drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say how much of a trace's prompts a prefix cache would find, by size and by policy.

    \b
    quire hit-rates mooncake_conversation.jsonl
    quire hit-rates mooncake_conversation.jsonl --cache-tokens 1M,4M --policies lru,optimum
    """
    console = Console(stderr=True)
    chosen = _policies(policies)
    if not 0 <= warmup_fraction < 1:
        raise ConfigError(f"--warmup-fraction {warmup_fraction} must be at least 0 and below 1")
    if max_skipped < 0:
        raise ConfigError(f"--max-skipped {max_skipped} must be at least 0")
    sizes = cache_tokens and [parse_count(size) for size in cache_tokens.split(",")]
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
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
    """All of it, for other programs."""
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
    table = Table(
        title=f"Found in a prefix cache, percent of {format_count(rates.prompt_tokens)} prompt "
        f"tokens ({escape(trace.form)}, blocks of {rates.block_tokens})",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("evicted first by")
    several = next(iter(rates.by_policy.values()))
    for each in several:
        table.add_column(_tokens(each.cache_tokens), justify="right", no_wrap=True)
    table.add_column("without end", justify="right")
    without_end = f"{100 * rates.infinite.hit_fraction:.1f}"
    for policy, found in rates.by_policy.items():
        cells = [f"{100 * each.hit_fraction:.1f}" for each in found]
        table.add_row(f"[cyan]{policy}[/]", *cells, without_end)
    return table


def _reasons(rates: HitRates) -> Table:
    policy, found = next(iter(rates.by_policy.items()))
    table = Table(
        title=f"… and why the rest was not, under {policy}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("percent of prompt tokens")
    for each in found:
        table.add_column(_tokens(each.cache_tokens), justify="right", no_wrap=True)
    for name, parts in (
        ("found", [each.hit_tokens for each in found]),
        ("asked for the first time", [each.cold_tokens for each in found]),
        ("evicted before", [each.evicted_tokens for each in found]),
        ("filled no block", [each.partial_tokens for each in found]),
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
            f"The longest prompt has {format_count(rates.longest_tokens)} tokens in blocks: "
            f"smaller caches refuse some, and these count as not found."
        )
    return notes


def _tokens(count: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)
