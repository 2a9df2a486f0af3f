"""Run ``quire compare``: the same prompts under all four strategies, and their memory."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quire.cli.options import (
    AsJson,
    MaxTokens,
    Model,
    Temperature,
    check_folder,
    engine_of,
    load_model,
    plain_table,
    with_engine_options,
)
from quire.config import EngineConfig
from quire.sampling_params import SamplingParams


@with_engine_options
def compare(
    *,
    model: Model = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt. May be given several times. Default: a few built-in prompts."),
    ] = None,
    max_tokens: MaxTokens = 240,
    temperature: Temperature = 0.0,
    output: Annotated[Path, typer.Option(help="File for the plot (SVG).")] = Path("quire.svg"),
    as_json: AsJson = False,
    engine: dict[str, Any],
) -> None:
    """Run the same prompts under all four strategies, and draw their memory.

    \b
    quire compare
    quire compare --model Qwen/Qwen3-0.6B --max-model-len 8192 --output memory.svg
    quire compare --cache mine   # beside them a strategy of another package
    """
    from quire.compare import PROMPTS, lengths, picture
    from quire.compare import compare as run_all

    config = EngineConfig.from_options(**engine)
    check_folder("--output", output)
    prompts = prompt or list(PROMPTS)
    console = Console(stderr=True)
    loaded = load_model(model, config, console)
    params = [
        SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True)
        for length in lengths(len(prompts), max_tokens)
    ]
    with console.status("…") as status:
        runs = run_all(
            loaded,
            prompts,
            params,
            report=lambda name: status.update(f"{len(prompts)} prompts under {name} …"),
            **engine_of(engine),
        )
    subtitle = (
        f"{loaded.name} model, context {config.max_model_len or loaded.spec.max_model_len:,}; "
        f"{len(prompts)} prompts, continued by {params[0].max_tokens} to {max_tokens} tokens"
    )
    output.write_text(picture(runs, subtitle=subtitle), encoding="utf-8")
    num_same = sum(len(set(texts)) == 1 for texts in zip(*(run.texts for run in runs), strict=True))
    if as_json:
        same = num_same == len(prompts)
        found: dict[str, Any] = {"same_text": same, "batch_invariant": not runs[0].not_invariant}
        print(json.dumps(found | {"runs": [_as_dict(run) for run in runs]}))
        return
    is_exact = loaded.model.dtype.itemsize > 2 or not runs[0].not_invariant
    said = said_of_texts(num_same, len(prompts), is_exact=is_exact)
    if num_same < len(prompts) and not is_exact:
        console.print(runs[0].not_invariant, highlight=False, markup=False)
    _print_comparison(loaded.name, runs, prompts, said=said, output=output)


def _print_comparison(
    name: str, runs: list[Any], prompts: list[str], *, said: str, output: Path
) -> None:
    console = Console()
    console.print(f"The {name} model continues the first of {len(prompts)} prompts:\n")
    sys.stdout.write("    " + (prompts[0] + runs[0].texts[0]).replace("\n", "\n    ") + "\n\n")
    unit, unit_bytes = _common_unit(max(run.peak.committed_bytes for run in runs))
    columns = ("reserved", "committed", "used", "wasted", "returned", "left", "tok/s")
    table = plain_table(f"KV memory at each run's peak, in {unit}", "strategy", *columns)
    for run in runs:
        peak = run.peak
        sizes = (run.reserved_bytes, peak.committed_bytes, peak.used_bytes, peak.wasted_bytes)
        table.add_row(
            run.strategy,
            *(f"{size / unit_bytes:,.2f}" for size in (*sizes, run.returned_bytes, run.left_bytes)),
            f"{run.tokens_per_s:.0f}",
        )
    console.print(table)
    console.print(f"Same text under all {len(runs)} strategies: {said}")
    console.print(f"Picture: {output}", highlight=False)


def said_of_texts(num_same: int, num_prompts: int, *, is_exact: bool) -> str:
    """Say for how many prompts all strategies generate the same text, and why not for all.

    Strategies run batches of different sizes. If they are not batch-invariant, products in 16 bits
    round differently for each.
    """
    if num_same == num_prompts:
        return "yes"
    some = f"for {num_same} of {num_prompts} prompts"
    if is_exact:
        return f"NO, only {some}"
    return (
        f"{some}; the strategies run batches of different sizes, which round differently in 16 "
        f"bits, so a near tie between two tokens can change the text (--dtype float32 compares "
        f"exactly)"
    )


def _common_unit(num_bytes: int) -> tuple[str, int]:
    """Choose one unit for all sizes of a table."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return unit, size
    return "B", 1


def _as_dict(run: Any) -> dict[str, Any]:
    peak = run.peak
    return {
        "strategy": run.strategy,
        "reserved_bytes": run.reserved_bytes,
        "peak_committed_bytes": run.peak_committed_bytes,
        "used_bytes": peak.used_bytes,
        "wasted_bytes": peak.wasted_bytes,
        "returned_bytes": run.returned_bytes,
        "left_bytes": run.left_bytes,
        "tokens_per_s": round(run.tokens_per_s, 1),
        "texts": list(run.texts),
    }
