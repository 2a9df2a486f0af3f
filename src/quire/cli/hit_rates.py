"""How much of a trace's prompts a prefix cache would find, as tables or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
    HitRates,
    Prompts,
    hit_rate_curve,
    policy_names,
    prompts_of,
    round_sizes,
)
from quire.traces import Trace, open_trace
from quire.units import format_count, parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRateOptions:
    """What is asked of a trace, as flags say it."""

    trace: str
    trace_format: str | None = None
    max_skipped: int = 0
    session_interval_s: float = 60.0
    seed: int = 0
    cache_tokens: str | None = None  # "1M,4M,16M"; None: round sizes up to where nothing is evicted
    policies: str | None = None  # "choice,lru,optimum"; None: all
    block_size: int | None = None
    whole_blocks: bool = False
    warmup_fraction: float = 0.0


def show_hit_rates(options: HitRateOptions, *, as_json: bool = False) -> None:
    """Read, compute, print; progress goes to standard error. Raises: ConfigError."""
    console = Console(stderr=True)
    policies = _policies(options.policies)
    if not 0 <= options.warmup_fraction < 1:
        raise ConfigError(
            f"--warmup-fraction {options.warmup_fraction} must be at least 0 and below 1"
        )
    if options.max_skipped < 0:
        raise ConfigError(f"--max-skipped {options.max_skipped} must be at least 0")
    sizes = options.cache_tokens and [parse_count(size) for size in options.cache_tokens.split(",")]
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        trace, prompts = _read(options, progress)
        rates = hit_rate_curve(
            prompts,
            sizes or round_sizes(prompts),
            policies,
            skip_requests=int(options.warmup_fraction * prompts.num_requests),
            on_work=_teller(progress),
        )
    if trace.counts.num_skipped:
        console.print(
            f"{trace.counts.num_skipped:,} rows were skipped; the first is "
            f"{trace.counts.first_skipped}",
            markup=False,
        )
    if as_json:
        print(json.dumps(as_dict(rates, trace)))
        return
    out = Console(highlight=False)
    for table in (_table(rates, trace), _reasons(rates)):
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
    names = policy_names() if text is None else tuple(text.split(","))
    if unknown := [name for name in names if name not in policy_names()]:
        raise ConfigError(f"--policies {unknown[0]!r} is none of {', '.join(policy_names())}")
    return names


def _read(options: HitRateOptions, progress: Progress) -> tuple[Trace, Prompts]:
    task = progress.add_task(f"reading {escape(options.trace)}", total=None)
    trace = open_trace(
        options.trace,
        options.trace_format,
        max_skipped=options.max_skipped,
        session_interval_s=options.session_interval_s,
        seed=options.seed,
        on_progress=lambda done, total: progress.update(task, completed=done, total=total),
    )
    prompts = prompts_of(trace, block_tokens=options.block_size, whole_blocks=options.whole_blocks)
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
