"""Run ``quire plan --validate``: compare planned bytes with those that an engine takes.

One engine per strategy runs one prompt, without a prefix cache. The plan reads only the model's
files; the engine's figures come from the loaded model, its accounting and its memory provider.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from quire.cli.options import plain_table
from quire.config import EngineConfig
from quire.engine.kv_sizing import stored_spec
from quire.kv import STRATEGIES
from quire.planner.capacity import PlanTarget, plan, sizes_of
from quire.planner.sequence_memory import PlannedLengths, moments, tables_after
from quire.planner.subject import Subject
from quire.units import format_count

if TYPE_CHECKING:
    from quire.kv import Usage
    from quire.memory import MemoryProvider
    from quire.memory.budget import Ledger
    from quire.models.loader import LoadedModel

_FIXED = (
    "max_num_seqs × max_model_len",
    "kv_cache_memory_bytes",
    "max_model_len",
)  # bounds that options fix
_MOST_TOKENS = 96  # of the prompt and of the answer: enough for windows to pass and blocks to fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One figure, planned and measured."""

    what: str
    planned: int
    actual: int
    explained: int = 0  # part of the difference that is expected
    why: str = ""

    @property
    def holds(self) -> bool:
        return self.actual - self.planned == self.explained


def validate(
    loaded: "LoadedModel",
    subject: Subject,
    config: EngineConfig,
    place: PlanTarget,
    request: PlannedLengths,
    *,
    strategies: Iterable[str] | None = None,  # None: Quire's own, and the option's
    provider: "MemoryProvider | None" = None,  # None: this machine's
    report: Callable[[str], None] = lambda _: None,
) -> list[Check]:
    """Plan and run one sequence per strategy, without prefix caching, which a plan leaves out.

    Raises: ConfigError, RequestError.
    """
    config = replace(config, max_num_seqs=1, enable_prefix_caching=False)
    request = _short(request)
    checks = list(_model(subject, loaded, config))
    for strategy in strategies or dict.fromkeys((*STRATEGIES.own_names, config.cache)):
        report(f"running {strategy} …")
        own = replace(config, cache=strategy)
        checks += _runs(subject, loaded, own, place, request, provider)
    return checks


def print_checks(name: str, checks: Sequence[Check]) -> bool:
    """Print a table of checks. Returns: whether all hold."""
    table = plain_table(
        f"Planned and actual figures of {escape(name)}",
        "",
        "planned",
        "actual",
        "difference",
    )
    table.add_column("", style="dim")
    for check in checks:
        apart = check.actual - check.planned
        style = "green" if check.holds else "bold red"
        table.add_row(
            check.what,
            format_count(check.planned),
            format_count(check.actual),
            f"[{style}]{format_count(apart)}[/]",
            escape(check.why) if apart else "",
        )
    console = Console(highlight=False)
    console.print(table)
    wrong = sum(not check.holds for check in checks)
    if wrong:
        console.print(f"[bold red]{wrong} of {len(checks)} differ without a reason[/]")
    else:
        console.print(f"[bold green]all {len(checks)} agree to the byte[/], or give the reason")
    return not wrong


def _model(subject: Subject, loaded: "LoadedModel", config: EngineConfig) -> Iterator[Check]:
    """Check bytes per token of each group, and the model's own memory."""
    from quire.models.footprint import footprint

    planned = stored_spec(config, subject.spec)
    actual = stored_spec(config, loaded.spec)
    yield Check(what="groups of layers", planned=len(planned.groups), actual=len(actual.groups))
    for index, (ours, theirs) in enumerate(zip(planned.groups, actual.groups, strict=False)):
        yield Check(
            what=f"bytes a token, group {index}",
            planned=ours.bytes_per_token,
            actual=theirs.bytes_per_token,
        )
        yield Check(
            what=f"bytes of a block, group {index}",
            planned=ours.block_bytes(config.block_size),
            actual=theirs.block_bytes(config.block_size),
        )
    own, tokens = footprint(loaded.model), config.max_num_batched_tokens
    weights = subject.own.weights_bytes, own.weights_bytes
    activations = subject.own.activation_bytes(tokens, 1), own.activation_bytes(tokens, 1)
    what = f"activations of {format_count(tokens)} tokens"
    if subject.weights_are_estimated:
        yield _estimated("weights", *weights)
        yield _estimated(what, *activations)
        return
    yield Check(
        what="weights",
        planned=weights[0],
        actual=weights[1],
        explained=_in_no_file(loaded.model),
        why="buffers that no file holds",
    )
    yield Check(what=what, planned=activations[0], actual=activations[1])


def _estimated(what: str, planned: int, actual: int) -> Check:
    return Check(
        what=what, planned=planned, actual=actual, explained=actual - planned, why="an estimate"
    )


def _in_no_file(model: Any) -> int:
    """Return the bytes of buffers that a model computes, such as rotary frequencies."""
    kept = set(model.state_dict())
    return sum(tensor.nbytes for name, tensor in model.named_buffers() if name not in kept)


def _runs(
    subject: Subject,
    loaded: "LoadedModel",
    config: EngineConfig,
    place: PlanTarget,
    request: PlannedLengths,
    provider: "MemoryProvider | None",
) -> Iterator[Check]:
    """Check the budget, and the bytes after each step of one sequence."""
    from quire.engine.llm import LLM
    from quire.sampling_params import SamplingParams

    strategy = config.cache
    found = plan(subject, config, place, request=request, compare=False)
    with LLM(loaded, provider=provider, **_options(config)) as llm:
        yield Check(
            what=f"{strategy}: KV memory",
            planned=found.ledger.kv_bytes,
            actual=llm.ledger.kv_bytes,
            explained=_moved(found.ledger, llm.ledger),
            why=f"bound by {llm.ledger.bound}, read twice",
        )
        sizes = sizes_of(config, subject.spec, place, llm.ledger.kv_bytes)
        taken: list[tuple[int, int, int]] = []
        tables = 0

        def observe(usage: "Usage") -> None:
            nonlocal tables
            if usage.num_sequences:
                taken.append((usage.num_tokens, usage.committed_bytes, llm.memory.committed_bytes))
                tables = usage.page_table_bytes or 0

        params = SamplingParams(max_tokens=request.output_tokens, temperature=0, ignore_eos=True)
        llm.generate([_prompt(loaded, request)], params, observe=observe)
    each = [num_tokens for num_tokens, _, _ in taken]
    kept, most = stored_spec(config, subject.spec), request.input_tokens + request.output_tokens
    expected = list(moments(strategy, kept, sizes, each, most))
    held = [moment.committed_bytes for moment in expected]
    steps = f"worst of {len(each)} steps"
    counted = [committed for _, committed, _ in taken]
    yield _worst(f"{strategy}: committed, {steps}", held, counted)
    yield _worst(f"{strategy}: in pages, {steps}", held, [in_pages for _, _, in_pages in taken])
    yield Check(
        what=f"{strategy}: page tables at the end",
        planned=tables_after(strategy, kept, sizes, each, most) or 0,
        actual=tables,
    )


def _worst(what: str, planned: list[int], actual: list[int]) -> Check:
    """Check the pair of figures that is farthest apart; the last one if all are equal."""
    pairs = list(zip(planned, actual, strict=True))[::-1]
    ours, theirs = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return Check(what=what, planned=ours, actual=theirs)


def _moved(planned: "Ledger", actual: "Ledger") -> int:
    """Return the difference of two readings of a machine, if its memory is the bound."""
    if planned.bound == actual.bound and actual.bound in _FIXED:
        return 0
    return actual.kv_bytes - planned.kv_bytes


def _options(config: EngineConfig) -> dict[str, Any]:
    """Return an engine's options without those of loading."""
    said = {field.name: getattr(config, field.name) for field in fields(config)}
    of_loading = {"dtype": "auto", "quantization": None, "tokenizer": None, "device": "auto"}
    return {**said, **of_loading}


def _short(request: PlannedLengths) -> PlannedLengths:
    return PlannedLengths(
        input_tokens=min(request.input_tokens, _MOST_TOKENS),
        output_tokens=min(request.output_tokens, _MOST_TOKENS),
    )


def _prompt(loaded: "LoadedModel", request: PlannedLengths) -> Any:
    """Return token ids that every vocabulary has."""
    return [3 + index % max(1, loaded.vocab_size - 3) for index in range(request.input_tokens)]
