"""The command line: ``quire serve``, ``chat``, ``generate``, ``compare``, ``plan``,
``simulate``, ``hit-rates``, ``bench``, ``top`` and ``doctor``.

Nothing heavy is imported before a command runs: ``quire --help`` answers at once.
"""

import sys

import typer
from rich.console import Console
from rich.markup import escape

from quire.cli.bench import bench
from quire.cli.chat import chat
from quire.cli.compare import compare
from quire.cli.doctor import doctor
from quire.cli.generate import generate
from quire.cli.hit_rates import hit_rates
from quire.cli.plan import plan
from quire.cli.serve import serve
from quire.cli.simulate import simulate
from quire.cli.top import top
from quire.cli.vllm import VllmCommand
from quire.config import keep_few_shapes, wait_patiently
from quire.errors import QuireError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cache memory for LLM inference: four strategies, one interface, accounted in bytes.",
    epilog="Start with: quire serve, or quire compare. Any option of engine and server may also be "
    "set as QUIRE_<OPTION>, e.g. QUIRE_BUDGET=vllm.",
)

app.command(cls=VllmCommand)(serve)
for _command in (chat, generate, compare, plan, simulate, hit_rates, bench, top, doctor):
    app.command()(_command)


def main() -> None:
    """Run the command line; a Quire error is said on standard error, with exit code 1."""
    wait_patiently()
    keep_few_shapes()
    try:
        app()
    except QuireError as error:
        message = f"[bold red]error:[/] {escape(str(error))}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:  # the reader left: nothing to say to anyone
        sys.stderr.close()
        sys.exit(1)
