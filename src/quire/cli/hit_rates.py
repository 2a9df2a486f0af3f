"""Run ``quire hit-rates``: compute the hit rates of prefix caches on a trace."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskProgressColumn, TimeRemainingColumn
from rich.table import Table

from quire.cli.options import AsJson, in_panel, plain_table, progress_bar
from quire.cli.planned_tiers import TierSizes, TierSpeeds, tiers_table
from quire.config import EngineConfig
from quire.config.engine_config import TIERS_PANEL
from quire.engine.kv_sizing import stored_spec
from quire.errors import ConfigError
from quire.kv import DEFAULT_POLICY
from quire.planner.hardware import named_speeds, roofline
from quire.planner.hit_rates import (
    OPTIMUM,
    OWN_POLICIES,
    HitRates,
    Prompts,
    TieredHits,
    hit_rate_curve,
    kept_blocks,
    prompts_of,
    require_policies,
    round_sizes,
    tiered_hits,
)
from quire.planner.kept_records import KeptRecords
from quire.planner.planned_tiers import PlannedTier, TierTable, planned_tiers
from quire.planner.simulation.simulated_engine import prices_of
from quire.planner.subject import find_subject
from quire.traces import Trace, form_names, open_trace
from quire.units import ceil_div, format_count, parse_count

DEFAULT_DEVICE = "h100"


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
    kv_tier: Annotated[
        list[str] | None,
        in_panel(
            TIERS_PANEL,
            "A tier behind each cache, as for quire serve: memory:?size=160GiB, file:PATH, … It is "
            "not opened. May be given several times, the nearest first.",
        ),
    ] = None,
    tier_speed: TierSpeeds = None,
    tier_size: TierSizes = None,
    model: Annotated[
        str | None,
        in_panel(
            TIERS_PANEL,
            "The model whose blocks tiers hold: a folder, a name of quire plan --list, or a hub "
            "name. Default: the demo model.",
        ),
    ] = None,
    device: Annotated[
        str,
        in_panel(
            TIERS_PANEL,
            f"What computes that tiers do not find, for the seconds saved: {named_speeds()}.",
        ),
    ] = DEFAULT_DEVICE,
    as_json: AsJson = False,
) -> None:
    """Compute the hit rate of a prefix cache on a trace, by cache size and policy.

    With --kv-tier, also what tiers behind caches of these sizes find, under the first policy:
    everything is stored, and a request takes no time. quire simulate has time, and the engine's
    own choice of what is stored.

    \b
    quire hit-rates mooncake.jsonl
    quire hit-rates mooncake.jsonl --cache-tokens 1M,4M --policies lru,optimum
    quire hit-rates mooncake.jsonl --cache-tokens 400k --model Llama-3.1-8B \\
        --kv-tier 'memory:?size=200GiB' --kv-tier 'file:/kv?size=2TiB' \\
        --tier-speed file=6,3

    Raises: ConfigError, ModelNotLoadable.
    """
    console = Console(stderr=True)
    chosen = _policies(policies)
    behind = _Behind.of(kv_tier or (), tier_speed or (), tier_size or (), model, device)
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
        policy = DEFAULT_POLICY if chosen[0] == OPTIMUM else chosen[0]
        tiered = [
            tiered_hits(
                prompts,
                size,
                behind.empty(prompts.block_tokens),
                policy=policy,
                on_request=partial(_tell_tiers, progress, prompts.num_requests),
                first_counted=int(warmup_fraction * prompts.num_requests),
            )
            for size in (sizes or round_sizes(prompts))
            if behind.tiers
        ]
    if found.counts.num_skipped:
        console.print(
            f"{found.counts.num_skipped:,} rows were skipped; the first is "
            f"{found.counts.first_skipped}",
            markup=False,
        )
    if as_json:
        of_tiers = behind.as_dict(tiered, policy, prompts.block_tokens) if tiered else {}
        print(json.dumps({**as_dict(rates, found), **of_tiers}))
        return
    out = Console(highlight=False)
    for table in (_table(rates, found), _reasons(rates)):
        out.print(table)
    for table in behind.tables(tiered, policy, prompts.block_tokens) if tiered else ():
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


# -- tiers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """The tiers behind a cache, and what computing a token takes."""

    tiers: tuple[PlannedTier, ...]
    model: str
    device: str
    token_s: float

    @classmethod
    def of(
        cls,
        addresses: Sequence[str],
        speeds: Sequence[str],
        sizes: Sequence[str],
        model: str | None,
        device: str,
    ) -> "_Behind":
        """Read the options. Raises: ConfigError, ModelNotLoadable."""
        table = TierTable.of(speeds, sizes)
        config = EngineConfig.from_options(kv_tier=tuple(addresses))
        table.require_used(config.tiers)
        if not config.tiers:
            if model is not None:
                raise ConfigError(f"--model {model} is of use with --kv-tier only: leave it out")
            return cls(tiers=(), model="", device=device, token_s=0)
        subject = find_subject(model, dtype=config.dtype)
        costs = roofline(subject, subject.spec, device, 1)
        tiers = planned_tiers(
            config,
            stored_spec(config, subject.spec).groups,
            block_size=config.block_size,
            table=table,
        )
        prices = prices_of(costs, config.max_num_batched_tokens)
        return cls(
            tiers=tiers,
            model=subject.name,
            device=device,
            token_s=prices.token_s,
        )

    def empty(self, block_tokens: int) -> list[KeptRecords]:
        """Make what the tiers would keep, in the trace's blocks; there is nothing yet."""
        return [kept_blocks(tier, block_tokens) for tier in self.tiers]

    def load_s(self, number: int, found: TieredHits, block_tokens: int) -> float:
        """Return the seconds of all loads from a tier."""
        each = found.tiers[number]
        if not each.num_loads:
            return 0.0
        blocks = each.loaded_blocks * block_tokens // self.tiers[number].block_size
        return each.num_loads * self.tiers[number].load_s(ceil_div(blocks, each.num_loads))

    def saved_s(self, found: TieredHits, block_tokens: int) -> float:
        """Return the seconds to compute what tiers had, less those to load it."""
        computing_s = self.token_s * sum(tier.hit_tokens for tier in found.tiers)
        return computing_s - sum(
            self.load_s(number, found, block_tokens) for number in range(len(self.tiers))
        )

    def tables(
        self, several: Sequence[TieredHits], policy: str, block_tokens: int
    ) -> Iterator[Table]:
        """Yield a table of the tiers, and one of what they found behind each size of cache."""
        yield tiers_table(self.tiers, f"Tiers, with blocks of {self.model}")
        sizes = (_tokens(each.cache_tokens) for each in several)
        table = plain_table(f"Behind a cache with {policy}", "percent of prompt tokens", *sizes)

        def percent(num_tokens: Sequence[int]) -> list[str]:
            pairs = zip(num_tokens, several, strict=True)
            return [f"{100 * part / each.prompt_tokens:.1f}" for part, each in pairs]

        table.add_row("found in the cache", *percent([each.pool_hit_tokens for each in several]))
        for number, tier in enumerate(self.tiers):
            hits = [each.tiers[number] for each in several]
            table.add_row(f"found in {tier.name}", *percent([each.hit_tokens for each in hits]))
        table.add_row("[bold]found in all[/]", *percent([each.hit_tokens for each in several]))
        table.add_section()
        for number, tier in enumerate(self.tiers):
            hits = [each.tiers[number] for each in several]
            held = (each.num_blocks * block_tokens for each in hits)
            evicted = (each.num_evicted * block_tokens for each in hits)
            table.add_row(f"{tier.name}: tokens held at the end", *map(_tokens, held))
            table.add_row("… tokens evicted", *map(_tokens, evicted))
            seconds = (self.load_s(number, each, block_tokens) for each in several)
            table.add_row("… seconds of loading", *(f"{each:,.0f}" for each in seconds))
        saved = (f"{self.saved_s(each, block_tokens):,.0f}" for each in several)
        table.add_row(f"seconds saved on {self.device}, less loading", *saved)
        yield table

    def as_dict(
        self, several: Sequence[TieredHits], policy: str, block_tokens: int
    ) -> dict[str, Any]:
        """Return the same as a JSON object."""
        return {
            "tiers": [asdict(tier) for tier in self.tiers],
            "behind": {
                "model": self.model,
                "device": self.device,
                "policy": policy,
                "caches": [
                    {
                        **asdict(each),
                        "hit_tokens": each.hit_tokens,
                        "hit_fraction": each.hit_fraction,
                        "saved_s": self.saved_s(each, block_tokens),
                    }
                    for each in several
                ],
            },
        }


def _tell_tiers(progress: Progress, num_requests: int, done: int) -> None:
    """Show how far the replay through tiers is, in the bar of the last work."""
    task = progress.task_ids[-1]
    progress.update(task, description="with tiers", completed=done, total=num_requests)


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
