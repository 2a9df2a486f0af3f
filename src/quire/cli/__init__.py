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

from quire.cli.help_text import HelpfulCommand, HelpfulGroup
from quire.cli.imports import quick_imports
from quire.errors import QuireError
from quire.server.stop import StopSignals
from quire.version import VERSION

# The first line of each command's help. The command is in the module ``quire.cli.<name>``.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "serve": "Serve a model over HTTP with OpenAI's and Anthropic's API, metrics and a memory "
        "page.",
        "fleet": "Serve a model with several replicas behind one address, on Ray Serve.",
        "chat": "Chat with a model: on any server with OpenAI's API, or in an engine of its own.",
        "generate": "Continue a text, and show how much memory its KV cache took.",
        "compare": "Run the same prompts under all four strategies, and draw their memory.",
        "plan": "Plan what fits: bytes per token, the budget, and sequences per strategy and rule.",
        "simulate": "Simulate traffic with the engine's own scheduler and accounting, without a "
        "model.",
        "hit-rates": "Compute the hit rate of a prefix cache on a trace, by cache size and policy.",
        "bench": "Measure throughput and latency, and print the table of vllm bench serve.",
        "top": "Watch a server's KV memory: its sequences, their blocks, and tokens per second.",
        "doctor": "Show this machine's memory, how much of it the KV cache may take, and why.",
        "cache": "List, check, prune and export the blocks that a folder keeps (--kv-tier "
        "file:PATH).",
    }
)


# Commands that have commands of their own, which their function makes.
GROUPS = frozenset({"cache"})


class _Commands(HelpfulGroup):
    """Import a listed command when shell completion asks for its options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in COMMANDS and not self.commands[name].params:
            made = typer.main.get_command(command_line([name]))
            assert isinstance(made, TyperGroup)
            self.commands[name] = made.commands[name]
        return super().resolve_command(ctx, args)


def command_line(names: Collection[str] = tuple(COMMANDS)) -> typer.Typer:
    """Make a command line that runs the commands in ``names`` and lists all others."""
    app = typer.Typer(
        cls=_Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="KV-cache memory for LLM inference: four strategies behind one interface, with every "
        "byte accounted for.",
        epilog="Start with quire serve or quire compare. An environment variable QUIRE_<OPTION> "
        "sets any option of the engine or the server, e.g. QUIRE_BUDGET=vllm.",
    )
    app.callback()(_quire)
    for name, help in COMMANDS.items():
        if name not in names:
            app.command(name, help=help)(_listed)
            continue
        module = import_module(f"quire.cli.{name.replace('-', '_')}")
        if name in GROUPS:
            app.add_typer(getattr(module, name)(), name=name, help=help)
            continue
        command: Callable[..., None] = getattr(module, name.replace("-", "_"))
        app.command(name, cls=_class_of(name), help=help_of(command))(command)
    return app


def help_of(command: Callable[..., None]) -> str:
    """Return the help that a command's docstring is.

    A paragraph is one line, so that the terminal and not the source decides where lines break.
    """
    return "\n\n".join(
        each.replace("\b\n", "\b\nExamples:\n") if "\b" in each else each.replace("\n", " ")
        for each in cleandoc(command.__doc__ or "").split("\n\n")
        if not each.startswith("Raises:")
    )


def _class_of(name: str) -> type[TyperCommand]:
    """Return the parser of a command that takes vLLM's flags, or ``--model`` for its argument."""
    if name in ("serve", "fleet"):
        from quire.cli.vllm import VllmCommand

        return VllmCommand
    if name in ("chat", "compare", "plan", "bench", "doctor"):
        from quire.cli.options import ModelCommand

        return ModelCommand
    return HelpfulCommand


def main() -> None:
    """Run the command line, and print any error on standard error.

    The exit code is 1 after an error, and 2 if the command line could not be parsed.
    """
    named = [argument for argument in sys.argv[1:2] if argument in COMMANDS]
    # SIGTERM ends a server with exit code 0, also while it still imports its modules.
    with StopSignals() if named in (["serve"], ["fleet"]) else nullcontext():
        _run(named)


def _run(named: list[str]) -> None:
    try:
        with quick_imports():
            if named:
                from quire.config import keep_few_shapes, wait_patiently

                wait_patiently()
                keep_few_shapes()
            run = command_line(named)
        arguments = sys.argv[1:]
        if not arguments or (len(arguments) == 1 and arguments[0] in GROUPS):
            arguments = [*arguments, "--help"]
        code = run(arguments, prog_name="quire", standalone_mode=False)
    except typer.TyperException as error:
        _say(f"{error.format_message()} ({' '.join(['quire', *named])} -h lists all options)")
        code = error.exit_code
    except QuireError as error:
        _say(str(error))
        code = 1
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        # The one dependency whose build a user chooses.
        _say(
            f"torch cannot be imported ({error}): install its build for this machine, as "
            "https://pytorch.org/get-started/locally/ shows"
        )
        code = 1
    except KeyboardInterrupt:  # during an import; typer handles it everywhere else
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of standard output has gone
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
        typer.echo(f"quire {VERSION}")
        raise typer.Exit


def _quire(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def _listed() -> None:
    """Stand in for a command that is listed but not run."""
