"""The command line.

A command's module is imported when that command is named: ``quire --help`` answers at once, and no
command waits for what only another one needs.
"""

import signal
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from importlib import import_module
from inspect import cleandoc
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from quire.errors import QuireError
from quire.server.stop import StopSignals

# What each does: the first line of its own help, and the module ``quire.cli.<name>``.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "serve": "Serve a model over HTTP: OpenAI's and Anthropic's API, metrics, and a page of "
        "its memory.",
        "chat": "Chat with a model: of a server, quire serve's or any other of OpenAI's API; else "
        "in here.",
        "generate": "Continue a text, and say what its KV cache took.",
        "compare": "Run the same prompts under all four strategies: a table and a picture of their "
        "memory.",
        "plan": "Say what fits: bytes per token, the budget, and sequences per strategy and rule.",
        "simulate": "Say what traffic would meet: the engine's own scheduler and accounting, and "
        "no model.",
        "hit-rates": "Say how much of a trace's prompts a prefix cache would find, by size and by "
        "policy.",
        "bench": "Measure throughput and latency: the figures and the table of vllm bench serve.",
        "top": "Watch a server's memory: who holds which cells, what is shared and cached, how "
        "fast it goes.",
        "doctor": "Say what this machine has, what the KV cache may take of it, and why.",
    }
)


class _Commands(TyperGroup):
    """Those that were only listed are made when a shell that completes asks for their options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in COMMANDS and not self.commands[name].params:
            made = typer.main.get_command(command_line([name]))
            assert isinstance(made, TyperGroup)
            self.commands[name] = made.commands[name]
        return super().resolve_command(ctx, args)


def command_line(names: Collection[str] = tuple(COMMANDS)) -> typer.Typer:
    """Make the command line in which the commands of these names work; the others are listed."""
    app = typer.Typer(
        cls=_Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="KV-cache memory for LLM inference: four strategies, one interface, accounted in "
        "bytes.",
        epilog="Start with: quire serve, or quire compare. Any option of engine and server may "
        "also be set as QUIRE_<OPTION>, e.g. QUIRE_BUDGET=vllm.",
    )
    app.callback()(_quire)
    for name, help in COMMANDS.items():
        if name not in names:
            app.command(name, help=help)(_listed)
            continue
        module = import_module(f"quire.cli.{name.replace('-', '_')}")
        command: Callable[..., None] = getattr(module, name.replace("-", "_"))
        app.command(name, cls=_class_of(name), help=_help_of(command))(command)
    return app


def _help_of(command: Callable[..., None]) -> str:
    """Its docstring with a line for each paragraph, which the terminal breaks where it ends."""
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(
        each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs
    )


def _class_of(name: str) -> type[TyperCommand] | None:
    """How a command reads its line: all vLLM's flags, or --model for its one argument."""
    if name == "serve":
        from quire.cli.vllm import VllmCommand

        return VllmCommand
    if name in ("chat", "compare", "plan", "bench", "doctor"):
        from quire.cli.options import ModelCommand

        return ModelCommand
    return None


def main() -> None:
    """Run the command line; an error is said on standard error, in the same way wherever it is.

    The exit code is 1, but 2 where the command line cannot be read.
    """
    named = [argument for argument in sys.argv[1:2] if argument in COMMANDS]
    # A server that is told to stop ends with 0, also while its modules are still imported.
    with StopSignals() if named == ["serve"] else nullcontext():
        _run(named)


def _run(named: list[str]) -> None:
    try:
        if named:
            from quire.config import keep_few_shapes, wait_patiently

            wait_patiently()
            keep_few_shapes()
        run = command_line(named)
        code = run(sys.argv[1:] or ["--help"], prog_name="quire", standalone_mode=False)
    except typer.TyperException as error:
        _say(f"{error.format_message()} ({' '.join(['quire', *named])} -h lists what there is)")
        code = error.exit_code
    except QuireError as error:
        _say(str(error))
        code = 1
    except KeyboardInterrupt:  # while modules were imported; elsewhere typer says the same
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader left, and there is nothing left to say
        sys.stderr.close()
        code = 1
    if code:
        sys.exit(code)


def _say(error: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    message = f"[bold red]error:[/] {escape(error)}"
    Console(stderr=True).print(message, highlight=False, soft_wrap=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # takes as long as the rest of --help

        typer.echo(f"quire {version('quire')}")
        raise typer.Exit


def _quire(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print it and end.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


def _listed() -> None:
    """Stand for a command that was not named, and so is not run."""
