"""What the commands share: flags, loading a model, the look of a table.

Flags of the engine are made from ``EngineConfig``, so that an option is described once.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quire.config import EngineConfig

Model = Annotated[
    str | None,
    typer.Option(help="A local folder or a Hugging Face hub name. Default: the demo model."),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy: the likeliest token each time.")]


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each field of ``EngineConfig``.

    It receives those that were given as ``engine``; what was not, the environment may say.
    """
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

    def run(context: typer.Context, **values: Any) -> None:
        engine = {name: values.pop(name) for name in names}
        typed = {name: value for name, value in engine.items() if _was_typed(context, name)}
        command(**values, engine=typed)

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *own, *flags]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def load_model(model: str | None, dtype: str, console: Console) -> Any:
    """A model, its tokenizer and its spec."""
    console.print(f"loading {model or 'the demo model'} …", highlight=False)
    from quire.models.loader import load

    # Transformers draws its own bars for what takes long: files from the hub, and many weights.
    return load(model, dtype=dtype, show_progress=model is not None)


def load_llm(model: str | None, engine: dict[str, Any]) -> Any:
    """The engine's model and cache; says on standard error what it waits for."""
    console = Console(stderr=True)
    loaded = load_model(model, EngineConfig.from_options(**engine).dtype, console)
    with console.status("preparing the cache …"):
        from quire.engine.llm import LLM

        return LLM(loaded, **engine)


def plain_table(title: str, first: str, *columns: str) -> Table:
    """A table without a frame; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
