"""The command line: ``quire generate`` and ``quire compare``.

Flags of the engine are made from ``EngineConfig``, so that an option is described once. Nothing
heavy is imported before a command runs: ``quire --help`` answers at once.
"""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quire.config import EngineConfig, wait_patiently
from quire.engine.sequence import SamplingParams
from quire.errors import ConfigError, QuireError
from quire.strategies import Usage
from quire.units import format_bytes, format_seconds

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cache memory for LLM inference: four strategies, one interface, accounted in bytes.",
    epilog="Start with: quire compare",
)

DEFAULT_PROMPT = 'def read_lines(path):\n    """Return the lines of a file as a list."""\n'

Model = Annotated[
    str | None,
    typer.Option(help="A local folder or a Hugging Face hub name. Default: the demo model."),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy: the likeliest token each time.")]
TopK = Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest with this weight together.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the text.")]


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each field of ``EngineConfig``; it receives them as ``engine``."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "engine"]
    flags = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if option.default is MISSING else option.default,
            annotation=Annotated[
                option.metadata.get("flag_type", option.type),
                typer.Option(help=option.metadata["help"], rich_help_panel="Engine"),
            ],
        )
        for option in fields(EngineConfig)
    ]
    names = {flag.name for flag in flags}

    def run(**given: Any) -> None:
        engine = {name: value for name, value in given.items() if name in names}
        command(**{n: v for n, v in given.items() if n not in names}, engine=engine)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
    return run


@app.command()
@with_engine_options
def generate(  # noqa: PLR0913 - each is a flag
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from standard input.")
    ] = None,
    model: Model = None,
    max_tokens: MaxTokens = 120,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    ignore_eos: IgnoreEos = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    engine: dict[str, Any],
) -> None:
    """Continue a text, and say what its KV cache took.

    \b
    quire generate "def quicksort(items):"
    quire generate --cache virtual --temperature 0.8 --seed 7 "class Queue:"
    quire generate --model ./my-model --max-model-len 4096 - < prompt.txt
    """
    text = sys.stdin.read() if prompt == "-" else DEFAULT_PROMPT if prompt is None else prompt
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    config = EngineConfig.from_options(**engine)
    llm = _load_llm(model, engine)
    history: list[Usage] = []
    pieces: list[str] = []
    reason, num_tokens, begin = "", 0, perf_counter()
    if not as_json:
        sys.stdout.write(text)
    for delta in llm.stream(text, params, observe=history.append):
        pieces.append(delta.text)
        num_tokens += delta.token_id is not None
        reason = delta.finish_reason or reason
        if not as_json:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    elapsed_s = perf_counter() - begin
    peak = max(history, key=lambda usage: usage.committed_bytes)
    llm.close()
    figures = {
        "strategy": config.cache,
        "reserved_bytes": peak.reserved_bytes,
        "committed_bytes": peak.committed_bytes,
        "used_bytes": peak.used_bytes,
        "wasted_bytes": peak.wasted_bytes,
        "returned_bytes": llm.memory.returned_bytes,
        "left_bytes": llm.memory.committed_bytes,
        "output_tokens": num_tokens,
        "elapsed_s": round(elapsed_s, 3),
        "tokens_per_s": round(num_tokens / elapsed_s, 1),
    }
    if as_json:
        result = {"model": llm.name, "prompt": text, "text": "".join(pieces)}
        print(json.dumps({**result, "finish_reason": reason, "kv": figures}))
        return
    sys.stdout.write("\n")
    table = _table("KV cache at its peak", "", "bytes")
    for name in ("reserved", "committed", "used", "wasted", "returned", "left"):
        table.add_row(_MEANING[name], format_bytes(float(figures[f"{name}_bytes"])))
    Console().print(table)
    Console().print(
        f"{config.cache}: {num_tokens} tokens in {format_seconds(elapsed_s)}, "
        f"{figures['tokens_per_s']} tokens/s; ended by {reason}",
        highlight=False,
    )


@app.command()
@with_engine_options
def compare(
    *,
    model: Model = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be given more than once.")
    ] = None,
    max_tokens: MaxTokens = 240,
    temperature: Temperature = 0.0,
    output: Annotated[Path, typer.Option(help="Where the picture goes (SVG).")] = Path("quire.svg"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    engine: dict[str, Any],
) -> None:
    """Run the same prompts under all four strategies: a table and a picture of their memory.

    \b
    quire compare
    quire compare --model Qwen/Qwen3-0.6B --max-model-len 8192 --output memory.svg
    """
    from quire.compare import PROMPTS, lengths, picture
    from quire.compare import compare as run_all

    EngineConfig.from_options(**engine)
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: no such folder")
    prompts = prompt or list(PROMPTS)
    console = Console(stderr=True)
    loaded = _load_model(model, engine["dtype"], console)
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
            **engine,
        )
    subtitle = (
        f"{loaded.name} model, context {engine['max_model_len'] or loaded.spec.max_model_len:,}; "
        f"{len(prompts)} prompts, continued by {params[0].max_tokens} to {max_tokens} tokens"
    )
    output.write_text(picture(runs, subtitle=subtitle), encoding="utf-8")
    same = all(run.texts == runs[0].texts for run in runs)
    if as_json:
        print(json.dumps({"same_text": same, "runs": [_as_dict(run) for run in runs]}))
        return
    _print_comparison(loaded.name, runs, prompts, same=same, output=output)


_MEANING = MappingProxyType(
    {
        "reserved": "reserved  (address space)",
        "committed": "committed (backed with pages)",
        "used": "used      (tokens that can be read)",
        "wasted": "wasted    (committed, not used)",
        "returned": "given back to the system",
        "left": "left",
    }
)


def _print_comparison(
    name: str, runs: list[Any], prompts: list[str], *, same: bool, output: Path
) -> None:
    console = Console()
    console.print(f"The {name} model continues the first of {len(prompts)} prompts:\n")
    sys.stdout.write("    " + (prompts[0] + runs[0].texts[0]).replace("\n", "\n    ") + "\n\n")
    unit, unit_bytes = _common_unit(max(run.peak.committed_bytes for run in runs))
    columns = ("reserved", "committed", "used", "wasted", "returned", "left", "tok/s")
    table = _table(f"KV memory at each run's peak, in {unit}", "strategy", *columns)
    for run in runs:
        peak = run.peak
        sizes = (run.reserved_bytes, peak.committed_bytes, peak.used_bytes, peak.wasted_bytes)
        table.add_row(
            run.strategy,
            *(f"{size / unit_bytes:,.2f}" for size in (*sizes, run.returned_bytes, run.left_bytes)),
            f"{run.tokens_per_s:.0f}",
        )
    console.print(table)
    console.print(f"Same text under all four strategies: {'yes' if same else 'NO'}")
    console.print(f"Picture: {output}", highlight=False)


def _common_unit(num_bytes: int) -> tuple[str, int]:
    """The unit in which a table's sizes are easiest to compare."""
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


def _load_model(model: str | None, dtype: str, console: Console) -> Any:
    console.print(f"loading {model or 'the demo model'} …", highlight=False)
    from quire.models.loader import load

    # Transformers draws its own bars for what takes long: files from the hub, and many weights.
    return load(model, dtype=dtype, show_progress=model is not None)


def _load_llm(model: str | None, engine: dict[str, Any]) -> Any:
    console = Console(stderr=True)
    loaded = _load_model(model, engine["dtype"], console)
    with console.status("preparing the cache …"):
        from quire.engine.llm import LLM

        return LLM(loaded, **engine)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def main() -> None:
    """Run the command line; a Quire error is one line on standard error and exit code 1."""
    wait_patiently()
    try:
        app()
    except QuireError as error:
        message = f"[bold red]error:[/] {_escape(str(error))}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:  # the reader left: nothing to say to anyone
        sys.stderr.close()
        sys.exit(1)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
