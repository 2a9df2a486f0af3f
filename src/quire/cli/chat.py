"""``quire chat``: talk to a server of OpenAI's API in the terminal, or to an engine of its own."""

import asyncio
import sys
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from quire.bench.server import first_model, models_of
from quire.cli.client import DEFAULT_URL, ApiKey, Timeout, Url, client
from quire.cli.conversation import Conversation
from quire.cli.own_server import own_server
from quire.cli.talk import Talk
from quire.errors import ConfigError, RequestError
from quire.http import Http


def _flag(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel="Sampling (where not given, the server's)")


def chat(  # noqa: PLR0913 - each is a flag
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="What the server calls it; default: its first. Where no server is, a folder or a "
            "hub name; default: the demo model."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 300.0,
    system: Annotated[str | None, typer.Option(help="What the model is told beforehand.")] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Ask this, print the answer and end; - reads it from standard input."),
    ] = None,
    max_tokens: Annotated[int | None, _flag("Tokens of an answer at most.")] = None,
    temperature: Annotated[float | None, _flag("0 is greedy.")] = None,
    top_p: Annotated[float | None, _flag("Choose among the likeliest with this weight.")] = None,
    top_k: Annotated[int | None, _flag("Choose among the k likeliest; not OpenAI's.")] = None,
    min_p: Annotated[float | None, _flag("Drop what is less likely; not OpenAI's.")] = None,
    seed: Annotated[int | None, _flag("Makes sampling repeatable.")] = None,
) -> None:
    """Chat with a model: of a server, quire serve's or any other of OpenAI's API; else in here.

    Where no server is at the usual address, or it does not have that model, an engine is started
    that ends with the chat. Ctrl-C stops an answer, not the program; /help lists what else can be
    said.

    \b
    quire chat
    quire chat Qwen/Qwen3-0.6B
    quire chat big --url https://llm.example.org --system "Answer in French."
    git diff | quire chat --prompt - --system "Write a commit message." > message.txt
    """
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    console = Console(stderr=True, highlight=False)
    http, question = client(url, api_key, timeout), None
    found = _model_of(http, url, model, console)
    if prompt is not None or not sys.stdin.isatty():
        question = sys.stdin.read() if prompt in (None, "-") else prompt
        if not question or not question.strip():
            raise ConfigError("--prompt is empty: there is nothing to ask")
    with ExitStack() as stack:
        if found is None:
            where = stack.enter_context(own_server(model))
            http = client(*where, timeout)
            found = asyncio.run(first_model(http))
        conversation = Conversation(
            http=http,
            model=found,
            sampling={name: value for name, value in sampling.items() if value is not None},
            system=system,
        )
        talk = Talk(conversation, console)
        if question is None:
            talk.run(_read_line)
        elif not talk.answer(question):
            raise RequestError("there is no answer")


def _model_of(http: Http, url: str, model: str | None, console: Console) -> str | None:
    """What the server calls the model; None, with a word why, where one is to be started for it.

    Raises: ConfigError for a server that was named and does not answer.
    """
    if url != DEFAULT_URL:
        return model or asyncio.run(first_model(http))
    try:
        names = asyncio.run(models_of(http))
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        console.print(f"no server is at {url}: an engine is started for this chat", style="dim")
        return None
    if model is None or model in names:
        return model or names[0]
    console.print(
        escape(f"the server at {url} has {names[0]}: an engine is started for {model}"), style="dim"
    )
    return None


def _read_line() -> str:
    """A line, with the keys that a terminal's user expects; one that ends with \\ goes on."""
    import readline  # noqa: F401 - lines can be edited and fetched again from then on

    lines = [input("\001\033[1m\002> \001\033[0m\002")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)
