"""``quire chat``: talk to a server of OpenAI's API, in the terminal."""

import asyncio
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from quire.bench.server import first_model
from quire.cli.client import DEFAULT_URL, ApiKey, Timeout, Url, client
from quire.cli.conversation import Conversation
from quire.cli.talk import Talk
from quire.errors import ConfigError, RequestError
from quire.http import Http


def _flag(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel="Sampling (where not given, the server's)")


def chat(  # noqa: PLR0913 - each is a flag
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 300.0,
    model: Annotated[
        str | None, typer.Option(help="What the server calls it. Default: its first.")
    ] = None,
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
    """Chat with a model that a server has: quire serve's, or any other of OpenAI's API.

    Ctrl-C stops an answer, not the program; /help lists what else can be said.

    \b
    quire chat
    quire chat --url https://llm.example.org --model big --system "Answer in French."
    git diff | quire chat --prompt - --system "Write a commit message." > message.txt
    """
    http = client(url, api_key, timeout)
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    conversation = Conversation(
        http=http,
        model=model or _first_model(http, url),
        sampling={name: value for name, value in sampling.items() if value is not None},
        system=system,
    )
    talk = Talk(conversation, Console(stderr=True, highlight=False))
    if prompt is not None or not sys.stdin.isatty():
        text = sys.stdin.read() if prompt in (None, "-") else prompt
        if not text or not text.strip():
            raise ConfigError("--prompt is empty: there is nothing to ask")
        if not talk.answer(text):
            raise RequestError("there is no answer")
        return
    talk.run(_read_line)


def _first_model(http: Http, url: str) -> str:
    try:
        return asyncio.run(first_model(http))
    except ConfigError as error:
        if url == DEFAULT_URL and isinstance(error.__cause__, OSError):
            raise ConfigError(
                f"no server answers at {url} ({error.__cause__}): start one with quire serve, or "
                "say with --url where one is"
            ) from None
        raise


def _read_line() -> str:
    """A line, with the keys that a terminal's user expects; one that ends with \\ goes on."""
    import readline  # noqa: F401 - lines can be edited and fetched again from then on

    lines = [input("\001\033[1m\002> \001\033[0m\002")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)
