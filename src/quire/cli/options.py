"""Provide what several commands share: flags, loading a model, tables and progress bars.

Flags of the engine and the server are made from their configs, which describe each option once.
"""

import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from importlib import import_module
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from quire.cli.help_text import HelpfulCommand
from quire.cli.imports import quick_imports
from quire.config import ADVANCED, EngineConfig
from quire.config.keys import key_for
from quire.engine.kv_sizing import longest_tokens
from quire.errors import ConfigError
from quire.http import Http
from quire.planner.precision import NAMED
from quire.spec.model_files import find_spec

# -- flags -----------------------------------------------------------------------------------------

MODEL_HELP = "A local folder or a Hugging Face hub name. Default: the demo model."
Model: TypeAlias = Annotated[str | None, typer.Argument(help=MODEL_HELP)]
MaxTokens: TypeAlias = Annotated[int, typer.Option(help="Maximum number of tokens to generate.")]
Temperature: TypeAlias = Annotated[
    float, typer.Option(help="Sampling temperature; 0 is greedy: always the most likely token.")
]
Weights: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Count the weights as a checkpoint of this precision has them: published (as the "
        f"model's own files say), {', '.join(NAMED)}."
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.")
]


def in_panel(panel: str, help: str, *names: str) -> Any:
    """Make a flag that the help lists under the heading ``panel``."""
    return typer.Option(*names, help=help, rich_help_panel=panel)


_MOST_REPLICAS = 4096  # of a fleet that is computed, not run


def require_replicas(replicas: int, prefill: int) -> None:
    """Check the numbers of engines of a planned fleet. Raises: ConfigError."""
    if not 1 <= replicas <= _MOST_REPLICAS:
        raise ConfigError(f"--replicas {replicas} must be from 1 to {_MOST_REPLICAS:,}")
    if not 0 <= prefill <= _MOST_REPLICAS:
        raise ConfigError(f"--prefill-replicas {prefill} must be from 0 to {_MOST_REPLICAS:,}")


class ModelCommand(HelpfulCommand):
    """A command whose one argument is a model, which ``--model`` may name too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``--model NAME`` as the argument ``NAME``."""
        words = list(args)
        for place, word in enumerate(args):
            if word == "--":
                break
            if word == "--model" and place + 1 < len(args):
                words[place : place + 2] = [args[place + 1]]
                break
            if word.startswith("--model="):
                words[place] = word.removeprefix("--model=")
                break
        parsed: list[str] = super().parse_args(ctx, words)
        return parsed


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each field of ``EngineConfig``, as ``with_options`` does."""
    return with_options(engine=EngineConfig)(command)


def with_options(**configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each field of these configs, in one help panel per config.

    The command receives a dictionary per config (``engine``, ``server``) with the flags that the
    command line has; a config takes the others from the environment. A command with a parameter
    ``context`` receives typer's context. A parameter of the command replaces a flag of its name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command).parameters.values()
        takes_context = any(parameter.name == "context" for parameter in signature)
        own = [p for p in signature if p.name not in configs and p.name != "context"]
        taken = {parameter.name for parameter in own}
        flags = {
            name: [
                _flag(option, taken, panel=name.capitalize())
                for option in fields(config)
                if option.name not in taken
            ]
            for name, config in configs.items()
        }
        rare = [
            option.name
            for config in configs.values()
            for option in fields(config)
            if option.metadata.get("panel") == ADVANCED
        ]

        def run(context: typer.Context, **values: Any) -> None:
            for name, several in flags.items():
                given = {flag.name: values.pop(flag.name) for flag in several}
                values[name] = {
                    flag: value for flag, value in given.items() if _was_typed(context, flag)
                }
            command(**values, **({"context": context} if takes_context else {}))

        context = inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )
        every = sorted(chain.from_iterable(flags.values()), key=lambda flag: flag.name in rare)
        parameters = [context, *own, *every]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _flag(option: Any, taken: Collection[str], *, panel: str) -> inspect.Parameter:
    """Make the parameter from which typer makes a flag, without a short name in ``taken``."""
    short = [name for name in option.metadata.get("short", ()) if name.lstrip("-") not in taken]
    kind = option.metadata.get("flag_type", option.type)
    default = None if option.default in (MISSING, ()) else option.default
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[
            kind,
            typer.Option(
                *([f"--{option.name.replace('_', '-')}", *short] if short else []),
                help=option.metadata["help"],
                rich_help_panel=option.metadata.get("panel", panel),
            ),
        ],
    )


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_folder(flag: str, path: Path) -> None:
    """Check that the folder of an output file exists. Raises: ConfigError."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: no such folder")


# -- a model and its engine ------------------------------------------------------------------------


def load_model(model: str | None, config: EngineConfig, console: Console) -> Any:
    """Load a model, its tokenizer and its spec, after a check of its config.json.

    Raises: ConfigError, ModelNotLoadable, UnsupportedModel.
    """
    import_engine_for(model, config)
    console.print(f"loading {model or 'the demo model'} …", highlight=False)
    # Transformers shows its own progress bars for downloads and for large files of weights.
    from quire.engine.build import load_named
    from quire.engine.parallel.model_part import refuse_options

    refuse_options(config, model)
    return load_named(model, config, show_progress=model is not None)


def import_engine_for(model: str | None, config: EngineConfig) -> None:
    """Check the model's config.json, and then import the modules of the engine.

    Raises: ConfigError, ModelNotLoadable.
    """
    longest_tokens(config, *find_spec(model))
    if "torch" in sys.modules:
        return
    with quick_imports():
        import_module("quire.engine.async_llm")


def engine_of(loaded_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for an engine whose model ``load_model`` has loaded with them."""
    return {**loaded_options, "quantization": None, "tokenizer": None, "device": "auto"}


def load_llm(model: str | None, engine: dict[str, Any]) -> Any:
    """Make an engine for a model; progress goes to standard error.

    By the model's name, so that tiers know the model by its files, as a server's do.

    Raises: ConfigError, ModelNotLoadable, UnsupportedModel.
    """
    import_engine_for(model, EngineConfig.from_options(**engine))
    from quire.engine.llm import LLM

    Console(stderr=True).print(f"loading {model or 'the demo model'} …", highlight=False)
    return LLM(model, show_progress=model is not None, **engine)


# -- tables and progress ---------------------------------------------------------------------------


_HEAD_WIDTH = 8


def plain_table(title: str, first: str, *columns: str) -> Table:
    """Make a table without a frame, in which all columns but the first hold numbers.

    A number is never cut. A head of several words takes several lines, so that 80 columns suffice.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        head = fill(column, _HEAD_WIDTH, break_long_words=False, break_on_hyphens=False)
        table.add_column(head, justify="right", no_wrap=True)
    return table


def facts_table() -> Table:
    """Make a table of names and values, without a head."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def progress_bar(*columns: ProgressColumn, console: Console | None = None) -> Progress:
    """Make a bar that disappears at its end: a description, the bar, ``columns``, and the time."""
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn()),
        console=console or Console(stderr=True),
        transient=True,
    )


# -- client of a server ----------------------------------------------------------------------------

DEFAULT_URL = "http://127.0.0.1:8000"

Url: TypeAlias = Annotated[
    str, typer.Option(envvar="QUIRE_URL", help="Address of a server with OpenAI's API.")
]
ApiKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The server's API key; @FILE reads it from a file. Default: QUIRE_API_KEY for a "
        "server on this machine or at QUIRE_URL, OPENAI_API_KEY for one at OPENAI_BASE_URL."
    ),
]
Timeout: TypeAlias = Annotated[
    float, typer.Option(min=1, help="Seconds without a byte from the server before giving up.")
]


def client(
    url: str, api_key: str | None, timeout_s: float, headers: dict[str, str] | None = None
) -> Http:
    """Make a client of a server. Raises: ConfigError for an invalid address or key."""
    http = Http(url, headers, timeout_s=timeout_s)
    key = key_for(url, api_key)
    if key is not None:
        http.headers.setdefault("Authorization", f"Bearer {key}")
    return http
