"""Print what ``quire plan`` finds, as tables or as JSON."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire.cli.options import plain_table
from quire.cli.planned_tiers import tiers_table
from quire.cli.report import ledger_table
from quire.kv import STRATEGIES
from quire.planner.capacity import CapacityPlan, Cell
from quire.planner.first_token import FirstToken
from quire.planner.fit import OptionChange
from quire.planner.images import PlannedImages
from quire.planner.planned_tiers import PlannedTier, pays_from
from quire.planner.precision import named
from quire.planner.prefill_apart import PrefillApart, Side
from quire.planner.saturation import Saturation
from quire.planner.subject import PublishedModels as Models
from quire.planner.subject import subject_of
from quire.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    Group,
    LatentAttention,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)
from quire.spec.layer_specs import LayerSpec
from quire.spec.tensor_parallel import is_replicated
from quire.units import format_bytes, format_count, format_latency

# -- what vLLM would log ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmStartUp:
    """The two lines that vLLM logs at its start: its KV cache in tokens, and in longest requests.

    vLLM's budget is the rule ``vllm``; this is how it cuts that budget into blocks for a model
    whose layers are all alike. For other models it pads blocks and shares them between groups, and
    its two lines no longer agree with each other.

    Source: vLLM, vllm/v1/core/kv_cache_utils.py: blocks = available // (bytes of a layer's block)
    // layers; tokens = blocks × block size; concurrency = tokens / max_model_len, in whole blocks
    per request since 0.9.
    """

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Return how many requests of ``max_model_len`` fit at once."""
        return self.num_tokens / self.max_model_len

    @property
    def text(self) -> str:
        return (
            f"GPU KV cache size: {format_count(self.num_tokens)} tokens; maximum concurrency for "
            f"{format_count(self.max_model_len)} tokens per request: {self.concurrency:.2f}x"
        )


def start_up(
    spec: ModelSpec, available_bytes: int, *, max_model_len: int, block_size: int = 16
) -> VllmStartUp | None:
    """Return vLLM's figures for one rank and its KV memory in bytes; None if layers differ."""
    groups = spec.groups
    if len(groups) != 1 or not isinstance(groups[0].spec, FullAttention | LatentAttention):
        return None
    group = groups[0]
    layer_block_bytes = group.spec.block_bytes(block_size)
    return VllmStartUp(
        num_blocks=max(0, available_bytes) // layer_block_bytes // group.num_layers,
        block_size=block_size,
        max_model_len=max_model_len,
    )


# -- the report ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a plan's device computes, by ``source``; None: its speed is not known."""

    source: str = ""
    told: tuple[str, ...] = ()  # sentences on whose calibration it is
    token_s: float | None = None  # to compute a token
    first: FirstToken | None = None
    full: Saturation | None = None
    encoder_s: float | None = None  # to encode an image
    apart: PrefillApart | None = None  # a fleet with prefill replicas, against equal ones


def print_plan(
    found: CapacityPlan,
    remedies: Sequence[OptionChange],
    fitted: str | None,
    *,
    tiers: Sequence[PlannedTier] = (),
    speeds: Speeds,
    images: PlannedImages | None = None,
) -> None:
    """Print the answer, the model, bytes per token, the budget, tiers, and what to change."""
    console = Console(highlight=False)
    token_s, first = speeds.token_s, speeds.first
    console.print(_answer(found, speeds.full))
    console.print()
    for line in _subject(found, speeds.told):
        console.print(line)
    if images is not None:
        console.print(_images(images, speeds.encoder_s))
    console.print()
    console.print(_layers(found))
    console.print(ledger_table(found.subject.name, found.ledger, *_in_tokens(found)))
    for table in _tiers(found, tiers, token_s) if tiers else ():
        console.print(table)
    console.print(_comparison(found))
    if (apart := speeds.apart) is not None:
        console.print(_fleet(found, apart))
        for line in _about_fleet(found, apart):
            console.print(line)
    for line in (*_notes(found), *_first_token(found, first, speeds.source)):
        console.print(line)
    if fitted:
        console.print(f"[bold green]found[/]  {escape(fitted)}")
    if not found.fits:
        console.print(f"[bold red]does not fit[/]  {escape(_why_not(found))}")
    if remedies:
        console.print("[bold]Each of these changes alone makes it fit[/]")
        for change in remedies:
            console.print(f"  {escape(change.flag)}  [dim]{escape(change.outcome)}[/]")
    elif not found.fits:
        console.print(f"[bold]advice[/]  {escape(found.ledger.advice)}")


def print_table_of_models(models: Models, *, as_json: bool) -> None:
    """Print the bundled table of models."""
    if as_json:
        print(json.dumps(asdict(models)))
        return
    table = plain_table(
        f"{len(models.models)} models: billions of weights, GiB of them as published, context in "
        "1,024 tokens, KiB of keys and values a token, and the source (see below)",
        "model",
        "weights",
        "GiB",
        "tokens",
        "KiB",
        "",
    )
    table.columns[0].no_wrap = True
    table.pad_edge = False  # else 80 columns are two too few
    sources = models.sources
    for model in models.models:
        subject = subject_of(model.name, model.config)
        table.add_row(
            model.name,
            f"{subject.num_parameters / 1e9:,.2f}",
            f"{subject.own.weights_bytes / 2**30:,.1f}",
            f"{subject.spec.max_model_len / 1024:,.0f}k",
            f"{subject.spec.bytes_per_token / 1024:,.1f}",
            str(1 + sources.index((model.source, model.read_on))),
        )
    console = Console(highlight=False)
    console.print(table)
    for number, (source, read_on) in enumerate(sources, 1):
        console.print(f"[dim]{number}  read on {read_on} from {escape(source)}[/]")


def as_dict(
    found: CapacityPlan,
    remedies: Sequence[OptionChange],
    fitted: str | None,
    *,
    tiers: Sequence[PlannedTier] = (),
    speeds: Speeds,
    images: PlannedImages | None = None,
) -> dict[str, Any]:
    """Return the plan as a JSON object."""
    subject, token_s = found.subject, speeds.token_s
    return {
        "model": subject.name,
        "source": subject.source,
        "num_parameters": subject.num_parameters,
        "num_active_parameters": subject.num_active_parameters,
        "weights_source": subject.weights_source,
        "weights_precision": subject.precision.name,
        "weights_bytes_by_precision": dict(subject.bytes_by_precision),
        "speed": {"source": speeds.source, "told": speeds.told} if speeds.source else None,
        "first_token": None if speeds.first is None else asdict(speeds.first),
        "prefill_apart": None if speeds.apart is None else _apart(speeds.apart),
        "saturation": None if speeds.full is None else asdict(speeds.full),
        "images": None
        if images is None
        else {**asdict(images), "num_tokens": images.num_tokens, "encoder_s": speeds.encoder_s},
        "tp": found.num_ranks,
        "device": _device_name(found),
        "here": found.place.here,
        "fits": found.fits,
        "found": fitted,
        "request": asdict(found.request),
        "needs": asdict(found.needs),
        "groups": [
            {
                "kind": _kind(group.spec),
                "num_layers": group.num_layers,
                "bytes_per_token": group.bytes_per_token,
                "bytes_at_longest": group.bytes_for(found.needs.context_tokens),
                "block_bytes": group.block_bytes(found.config.block_size),
            }
            for group in found.spec.groups
        ],
        "ledger": {**asdict(found.ledger), "kv_bytes": found.ledger.kv_bytes},
        "chosen": _cell(found.cell),
        "page_table_bytes": found.page_table_bytes(max(1, found.cell.num_sequences)),
        "cells": [_cell(cell) for cell in found.cells],
        "tiers": [{**asdict(tier), **_pays(found, tier, token_s)} for tier in tiers],
        "would_fit_with": [asdict(change) for change in remedies],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "strategy": cell.strategy,
        "budget": cell.ledger.rule,
        "kv_bytes": cell.kv_bytes,
        "refusal": cell.ledger.refusal,
        "num_sequences": cell.num_sequences,
        "num_fitting": cell.num_fitting,
        "num_longest": round(cell.num_longest, 4),
        "num_tokens": cell.num_tokens,
        "sequence_bytes": cell.course.end.committed_bytes,
        "used_bytes": cell.course.end.used_bytes,
        "waste_fraction": round(cell.waste_fraction, 6),
        "sequence_peak_bytes": cell.course.peak_bytes,
        "peak_bytes": cell.peak_bytes,
    }


def _device_name(found: CapacityPlan) -> str:
    """Return what the plan is for: a device by its name, or what limits this machine."""
    machine = found.place.machine
    if machine.working_set_bytes is not None and not found.place.here:
        return machine.tightest.source  # not the part of its memory that a GPU may use
    return machine.hint[1]


def _answer(found: CapacityPlan, full: Saturation | None) -> str:
    """Say what fits and what it computes, in which precision, and what weights take in others."""
    subject, cell = found.subject, found.cell
    request = found.request
    where = _device_name(found)
    if where == "--memory":
        where = f"{format_bytes(found.place.machine.hint[0])} of memory"
    each = f"{format_count(request.input_tokens)} + {format_count(request.output_tokens)} tokens"
    ranks = f"{found.num_ranks} × " if found.num_ranks > 1 else ""
    on = f"{ranks}{escape(where)} with {escape(cell.strategy)}"
    if found.fits:
        count = format_count(cell.num_sequences)
        noun = "sequence" if cell.num_sequences == 1 else "sequences"
        said = f"[bold green]{count} {noun}[/] of {each} at once on {on}"
        if full is not None:
            said += (
                f", which make about {float(f'{full.output_tokens_per_s:.3g}'):,.0f} tokens a "
                f"second, one of each in {format_latency(full.step_s)}"
            )
    else:
        said = f"[bold red]does not fit[/] on {on}"
    others = ", ".join(
        f"{format_bytes(size)} in {named(name).name}"
        for name, size in subject.bytes_by_precision.items()
        if named(name).name != subject.precision.name
    )
    weights = f"{format_bytes(subject.own.weights_bytes)} in {escape(subject.precision.name)}"
    return f"{said}; weights {weights} ({others})"


def _first_token(found: CapacityPlan, first: FirstToken | None, source: str) -> Iterator[str]:
    """Yield what a step's limit of tokens costs the first token, where that is much."""
    if first is None or not first.saves:
        return
    yield (
        f"[dim]A prompt of {format_count(found.request.input_tokens)} tokens alone takes "
        f"{format_latency(first.seconds)} to its first token in steps of "
        f"{format_count(first.chunk_tokens)}, and {format_latency(first.better_seconds)} with "
        f"--max-num-batched-tokens {first.better_chunk_tokens} (by {escape(source)}).[/]"
    )


def _subject(found: CapacityPlan, speed: Sequence[str]) -> Iterator[str]:
    subject = found.subject
    about = "about " if subject.weights_are_estimated else ""
    active = ""
    if subject.num_experts:
        active = f", {subject.num_active_parameters / 1e9:,.2f} billion of them for a token"
    yield (
        f"[bold]{escape(subject.name)}[/]  {about}{subject.num_parameters / 1e9:,.2f} billion "
        f"parameters{active}, {subject.dtype}, context {format_count(subject.spec.max_model_len)}"
    )
    if subject.left_out:
        yield f"[dim]without {escape(subject.left_out)}[/]"
    yield f"[dim]config.json: {escape(subject.source)}[/]"
    yield f"[dim]weights: {escape(subject.weights_source)}[/]"
    total, name = found.place.machine.hint
    pages = format_bytes(found.place.page_bytes)
    where = "" if found.place.here is None else f" ({found.place.here} of this machine)"
    yield f"[dim]memory: {format_bytes(total)} in pages of {pages}, {escape(name + where)}[/]"
    if found.num_ranks > 1:
        on_rank = found.divide(subject.spec, found.num_ranks)
        keeps = is_replicated(subject.spec, on_rank, found.num_ranks)
        same = ", which keep copies of some heads" if keeps else ""
        yield f"[dim]figures are those of one of {found.num_ranks} ranks{same}[/]"
    for said in speed:
        yield f"[dim]speed: {escape(said)}[/]"


def _images(images: PlannedImages, encoder_s: float | None) -> str:
    """Say what the images of a prompt are, and where that comes from."""
    sizes, each = images.sizes, images.each
    pixels = f"{format_count(sizes.width)} × {format_count(sizes.height)} pixels"
    said = f"{sizes.count} of {pixels}: {format_count(each.num_tokens)} tokens"
    if sizes.count > 1:
        said += f" each, {format_count(images.num_tokens)} in a prompt"
    said += f" (by {escape(images.said_by)})"
    if images.num_patches:
        said += f"; {format_count(images.num_patches)} patches"
    if each.peak_bytes:
        said += f"; about {format_bytes(each.peak_bytes)} in the encoder"
    else:
        said += "; the encoder's memory is not known"
    if encoder_s is not None:
        said += f", encoded in about {format_latency(encoder_s)} by the device's data sheet"
    return f"[dim]images: {said}[/]"


def _layers(found: CapacityPlan) -> Table:
    longest = found.needs.context_tokens
    table = plain_table(
        f"KV memory of a sequence: bytes per token, per block of {found.config.block_size} "
        f"tokens, and at {format_count(longest)} tokens",
        "kind",
        "layers",
        "B/token",
        "all layers",
        "a block",
        f"at {format_count(longest)}",
    )
    table.columns[0].no_wrap = True
    for group in found.spec.groups:
        table.add_row(*_row(group, found.config.block_size, longest))
    table.add_section()
    table.add_row(
        "[bold]all[/]",
        str(found.spec.num_layers),
        "",
        f"[bold]{format_count(found.spec.bytes_per_token)}[/]",
        "",
        format_bytes(found.spec.bytes_for(longest)),
    )
    return table


def _row(group: Group, block_size: int, longest: int) -> tuple[str, ...]:
    is_whole = isinstance(group.spec, RecurrentState | CrossAttention)
    return (
        _kind(group.spec),
        str(group.num_layers),
        "" if is_whole else format_count(group.spec.bytes_per_token),
        "" if is_whole else format_count(group.bytes_per_token),
        format_bytes(group.block_bytes(block_size)),
        format_bytes(group.bytes_for(longest)),
    )


def _kind(spec: LayerSpec) -> str:
    match spec:
        case FullAttention():
            return "full attention"
        case SlidingWindow():
            return f"sliding window of {format_count(spec.window)}"
        case ChunkedAttention():
            return f"chunks of {format_count(spec.chunk)}"
        case LatentAttention():
            return "latent (MLA)"
        case RecurrentState():
            return "recurrent state"
        case CrossAttention():
            return f"source of {format_count(spec.source_tokens)}"


def _in_tokens(found: CapacityPlan) -> tuple[str, str]:
    """Say what the budget holds, and what the kernel's page tables take besides."""
    cell = found.cell
    tokens = max(0, found.ledger.kv_bytes) // max(1, found.needs.bytes_per_token)
    num_sequences = max(1, cell.num_sequences)
    besides, tables = "", found.page_table_bytes(num_sequences)
    if tables:  # a GPU's page tables belong to its driver
        besides = (
            f"; the kernel's page tables take {format_bytes(tables)} besides, for "
            f"{format_count(num_sequences)} of {format_count(cell.request.num_tokens)} tokens"
        )
    return (
        f"{format_count(tokens)} tokens while no window has passed any, or "
        f"{cell.num_longest:,.2f} sequences of {format_count(found.needs.context_tokens)}",
        besides,
    )


def _tiers(
    found: CapacityPlan, tiers: Sequence[PlannedTier], token_s: float | None
) -> Iterator[Table]:
    """Yield what each tier holds, and whether loading from it is quicker than computing."""
    yield tiers_table(tiers, "Tiers: blocks outside the KV memory")
    tokens = found.request.input_tokens
    table = plain_table(
        f"A prompt of {format_count(tokens)} tokens, loaded and computed",
        "tier",
        "holds so many KV memories",
        "loaded in",
        "computed in",
        "pays from",
    )
    for tier in tiers:
        figures = _pays(found, tier, token_s)
        pools = "" if figures["pools"] is None else f"{figures['pools']:,.1f}"
        table.add_row(
            tier.name,
            pools,
            format_latency(figures["load_s"]),
            "" if token_s is None else format_latency(figures["compute_s"]),
            _tokens_from(figures["pays_from_tokens"]) if token_s is not None else "",
        )
    yield table


def _pays(found: CapacityPlan, tier: PlannedTier, token_s: float | None) -> dict[str, Any]:
    """Return what a tier holds in KV memories, and what a typical prompt takes."""
    tokens, kv_bytes = found.request.input_tokens, found.cell.kv_bytes
    held = tier.num_tokens
    pool_tokens = kv_bytes / found.needs.bytes_per_token if kv_bytes else 0
    return {
        "tokens": held,
        "pools": None if held is None or not pool_tokens else held / pool_tokens,
        "load_s": tier.load_s(max(1, tokens // tier.block_size)),
        "compute_s": None if token_s is None else tokens * token_s,
        "pays_from_tokens": None
        if token_s is None
        else pays_from(
            tier,
            token_s,
            most_tokens=found.needs.context_tokens,
        ),
    }


def _tokens_from(tokens: int | None) -> str:
    return "never" if tokens is None else f"{format_count(tokens)} tokens"


def _apart(apart: PrefillApart) -> dict[str, Any]:
    trade = None if apart.trade is None else {**asdict(apart.trade), "pays": apart.trade.pays}
    said = {"verdict": apart.verdict, "sentence": apart.sentence, "trade": trade}
    return {**asdict(apart), **said, "move_s": apart.move.seconds}


def _fleet(found: CapacityPlan, apart: PrefillApart) -> Table:
    """Make a table of a fleet with prefill replicas beside equal ones."""
    request = found.request
    asked = f"{format_count(request.input_tokens)} + {format_count(request.output_tokens)}"
    num_equal = apart.num_replicas + apart.num_prefill
    table = plain_table(
        f"Requests of {asked} tokens by equal replicas, and with prompts computed apart",
        "",
        f"{format_count(num_equal)} equal",
        f"{format_count(apart.num_replicas)} + {format_count(apart.num_prefill)}",
    )
    table.columns[0].no_wrap = True
    sides = (apart.together, apart.apart)

    def row(name: str, figure: Callable[[Side], str]) -> None:
        table.add_row(name, *map(figure, sides))

    row("most requests/s", lambda side: f"{side.most_requests_per_s:,.3g}")
    row("sequences at once", lambda side: format_count(side.num_sequences))
    table.add_section()
    table.add_row(f"[cyan]at {apart.requests_per_s:,.3g} requests/s[/]")
    row("  between tokens", lambda side: _or_behind(side.token_s))
    row("  longest step", lambda side: _or_behind(side.longest_step_s))
    row(
        "  steps that compute prompts",
        lambda side: "" if side.prompt_steps is None else f"{side.prompt_steps:.0%}",
    )
    row("  first token", lambda side: _or_behind(side.first_token_s))
    return table


def _or_behind(seconds: float | None) -> str:
    return "falls behind" if seconds is None else format_latency(seconds)


def _about_fleet(found: CapacityPlan, apart: PrefillApart) -> Iterator[str]:
    """Yield the verdict on prefill replicas, and what moving, waiting and idling take."""
    move, trade = apart.move, apart.trade
    yield f"[bold]{escape(apart.sentence)}.[/]"
    yield (
        f"[dim]A prompt moves {format_bytes(move.num_bytes)} for {format_count(move.num_tokens)} "
        f"of its {format_count(found.request.input_tokens)} tokens, and its first token comes "
        f"{format_latency(move.seconds)} later for it: copied out "
        f"{format_latency(move.copy_out_s)}, over the link "
        f"{format_latency(move.leave_s + move.load_s)}, inserted beside steps "
        f"{format_latency(move.insert_s)}.[/]"
    )
    most = f"{apart.apart.most_requests_per_s:,.3g}"
    yield (
        f"[dim]At {most} requests/s replicas that write have no time left; prefill replicas are "
        f"idle for {apart.prefill_idle_fraction:.0%} of it, and hold no answers.[/]"
    )
    if trade is not None:
        goes = "so it goes apart" if trade.pays else "so it is computed there"
        if trade.pays and apart.share is not None and 0 < apart.share < 1:
            goes += f", until prefill replicas or links are behind: {apart.share:.0%} of them"
        yield (
            f"[dim]The door's view of a prompt at {apart.requests_per_s:,.3g} requests/s: it costs "
            f"all that wait {format_latency(trade.here_s)} where its answer is written, and "
            f"{format_latency(trade.apart_s)} apart, {goes}.[/]"
        )


def _comparison(found: CapacityPlan) -> Table:
    request = found.request
    asked = f"{format_count(request.input_tokens)} + {format_count(request.output_tokens)}"
    table = plain_table(
        f"Sequences of {asked} tokens at once, by strategy (--cache) and budget rule (--budget)",
        "by",
        "KV",
        "sequences",
        "tokens",
        "waste",
        "peak",
        f"× {format_count(found.needs.context_tokens)}",
    )
    table.columns[0].no_wrap = True
    before = None
    for cell in sorted(found.cells, key=_order):
        if before != cell.strategy:
            table.add_section()
            table.add_row(f"[cyan]{cell.strategy}[/]")
        before = cell.strategy
        table.add_row(*_figures(cell), style="bold" if cell is found.cell else "")
    return table


def _order(cell: Cell) -> tuple[int, int]:
    rules = ("given", "auto", "vllm", "mistralrs", "llamacpp", "fraction")
    own = STRATEGIES.own_names
    place = own.index(cell.strategy) if cell.strategy in own else len(own)
    return place, rules.index(cell.ledger.rule)


def _figures(cell: Cell) -> tuple[str, ...]:
    if cell.ledger.refusal is not None:
        asked = f"[red]{format_bytes(cell.ledger.kv_bytes)}[/]"
        return (f"  {cell.ledger.rule}", asked, "[red]refused[/]", "", "", "", "")
    capped = (
        "" if cell.num_fitting <= cell.max_num_seqs else " of " + format_count(cell.num_fitting)
    )
    return (
        f"  {cell.ledger.rule}",
        format_bytes(cell.kv_bytes),
        format_count(cell.num_sequences) + capped,
        format_count(cell.num_tokens),
        f"{cell.waste_fraction:.1%}",
        format_bytes(cell.peak_bytes),
        f"{cell.num_longest:,.2f}",
    )


def _notes(found: CapacityPlan) -> Iterator[str]:
    if found.cell.num_fitting > found.config.max_num_seqs:
        yield (
            f"[dim]More sequences would fit than --max-num-seqs {found.config.max_num_seqs} lets "
            "run: --fit sequences finds how many.[/]"
        )
    ledger = next((c.ledger for c in found.cells if c.ledger.rule == "vllm"), None)
    if ledger is None or ledger.refusal is not None:
        return
    said = start_up(
        found.spec,
        ledger.kv_bytes + ledger.unused_bytes,
        max_model_len=found.needs.context_tokens,
        block_size=found.config.block_size,
    )
    if said is not None:
        yield f"[dim]vLLM, with these weights and activations, would log: {said.text}[/]"


def _why_not(found: CapacityPlan) -> str:
    if found.ledger.refusal is not None:
        return found.ledger.refusal
    return (
        f"one sequence of {format_count(found.needs.context_tokens)} tokens takes "
        f"{format_bytes(found.cell.course.longest_bytes)}, and budget={found.ledger.rule} leaves "
        f"{format_bytes(found.cell.kv_bytes)}"
    )
