"""What the commands share: flags, loading a model, the look of a table.

Flags of the engine are made from ``EngineConfig``, so that an option is described once.
"""

import atexit
import gc
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from importlib import import_module
from itertools import chain
from typing import Annotated, Any, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from quire.config import ADVANCED, EngineConfig
from quire.config.keys import key_for
from quire.engine.kv_sizing import longest_tokens
from quire.http import Http
from quire.spec.model_files import find_spec

# -- options ---------------------------------------------------------------------------------------


Model = Annotated[
    str | None,
    typer.Argument(help="A local folder or a Hugging Face hub name. Default: the demo model."),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy: the likeliest token each time.")]


class ModelCommand(TyperCommand):
    """A command whose one argument is a model, which may be named by ``--model`` too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
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
    """Give a command a flag for each field of ``EngineConfig``, as ``with_options``."""
    return with_options(engine=EngineConfig)(command)


def with_options(**configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each field of these configs, in panels of their own.

    It receives those that were given as ``engine``, ``server``, …; what was not, the environment
    may say. If it wants the ``context``, it gets that too. A flag that it has itself is its own.
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
    """What typer makes a flag of; a short name that is ``taken`` stays the command's own."""
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
                help=escape(option.metadata["help"]),
                rich_help_panel=option.metadata.get("panel", panel),
            ),
        ],
    )


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def load_model(model: str | None, config: EngineConfig, console: Console) -> Any:
    """A model, its tokenizer and its spec; what its config.json rules out is said before."""
    import_engine_for(model, config)
    console.print(f"loading {model or 'the demo model'} …", highlight=False)
    # Transformers draws its own bars for what takes long: files from the hub, and many weights.
    if (num_ranks := config.tensor_parallel_size) > 1:
        from quire.engine.parallel.model_part import load_parts, refuse_options

        refuse_options(config, model)
        return load_parts(
            model,
            num_ranks,
            device=config.device,
            dtype=config.dtype,
            show_progress=model is not None,
        )
    from quire.models.loader import load

    return load(
        model,
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        show_progress=model is not None,
    )


def import_engine_for(model: str | None, config: EngineConfig) -> None:
    """Import what an engine is made of, once the model's config.json has been found to allow it.

    All of that stays, so garbage is not looked for in it, now or later: that took a sixth of a
    server's start. At the end of the process it is thawed, or C++ bindings take their own modules
    for leaks. Raises: ConfigError, ModelNotLoadable.
    """
    longest_tokens(config, *find_spec(model))
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import_module("quire.engine.async_llm")
        gc.freeze()
        atexit.register(gc.unfreeze)
    finally:
        gc.enable()


def engine_of(loaded_options: dict[str, Any]) -> dict[str, Any]:
    """The options of an engine around a model that ``load_model`` has loaded as they say."""
    return {**loaded_options, "quantization": None, "device": "auto"}


def load_llm(model: str | None, engine: dict[str, Any]) -> Any:
    """The engine's model and cache; says on standard error what it waits for."""
    console = Console(stderr=True)
    loaded = load_model(model, EngineConfig.from_options(**engine), console)
    with console.status("preparing the cache …"):
        from quire.engine.llm import LLM

        return LLM(loaded, **engine_of(engine))


def plain_table(title: str, first: str, *columns: str) -> Table:
    """A table without a frame; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


# -- client ----------------------------------------------------------------------------------------

# What commands that ask a server share: where it is, its key, and how long it may say nothing.


DEFAULT_URL = "http://127.0.0.1:8000"

Url: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="QUIRE_URL",
        help="Any server of OpenAI's API; quire serve is there by default.",
    ),
]
ApiKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="If the server wants one; @FILE reads it. Default: QUIRE_API_KEY for a server on this "
        "machine or at QUIRE_URL, OPENAI_API_KEY for that of OPENAI_BASE_URL."
    ),
]
Timeout: TypeAlias = Annotated[
    float, typer.Option(min=1, help="Seconds that the server may say nothing.")
]


def client(
    url: str, api_key: str | None, timeout_s: float, headers: dict[str, str] | None = None
) -> Http:
    """Raises: ConfigError for what is no address, or no key."""
    http = Http(url, headers, timeout_s=timeout_s)
    key = key_for(url, api_key)
    if key is not None:
        http.headers.setdefault("Authorization", f"Bearer {key}")
    return http
