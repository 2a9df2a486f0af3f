"""Run ``quire chat``: talk to a server with OpenAI's API, or to an engine of its own."""

import asyncio
import json
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, final

import typer
from rich.console import Console
from rich.markup import escape

from quire.bench.load import first_model, models_of
from quire.cli.keyboard import unseen
from quire.cli.options import DEFAULT_URL, ApiKey, Timeout, Url, client, in_panel
from quire.errors import ConfigError, RequestError
from quire.http import Http, RefusedByServer
from quire.units import format_count, format_seconds

# -- the conversation ------------------------------------------------------------------------------

_DEFAULT_MAX_TOKENS = 512  # of a completion, for which OpenAI's own default is 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """A piece of an answer, as it arrives."""

    text: str = ""
    reasoning: str = ""


@dataclass(slots=True, kw_only=True)
class Figures:
    """Counts and times of one answer."""

    output_tokens: int = 0
    prompt_tokens: int | None = None  # None: the server does not report it
    cached_tokens: int = 0
    ttft_s: float = 0.0
    elapsed_s: float = 0.0
    finish_reason: str | None = None  # None: the user stopped it

    @property
    def tokens_per_s(self) -> float | None:
        """Return the rate after the first token; None if there was no second."""
        took_s = self.elapsed_s - self.ttft_s
        return (self.output_tokens - 1) / took_s if self.output_tokens > 1 and took_s > 0 else None


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The messages so far, and the requests to the server.

    If the model has no chat template, later requests are completions, which continue the plain text
    of the whole conversation.
    """

    http: Http
    model: str
    sampling: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    has_chat: bool = True
    figures: Figures = field(default_factory=Figures)

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self.messages.clear()

    async def ask(self, text: str) -> AsyncGenerator[AnswerPart, None]:
        """Send a message, and yield the answer piece by piece.

        If the caller stops early, the conversation keeps the pieces so far. If an error is raised,
        it keeps neither the message nor the answer. Raises: OSError, ValueError.
        """
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        begin, self.figures = perf_counter(), Figures()
        failed = True
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if not self.figures.ttft_s:
                        self.figures.ttft_s = perf_counter() - begin
                    answer.append(piece.text)
                    yield piece
            failed = False
        except (OSError, ValueError):
            raise
        except BaseException:  # the user stopped it, which is no failure
            failed = False
            raise
        finally:
            self.figures.elapsed_s = perf_counter() - begin
            if failed:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": "".join(answer)})

    async def _pieces(self) -> AsyncGenerator[AnswerPart, None]:
        if self.has_chat:
            chat = self._events("/v1/chat/completions", {"messages": self._all()})
            try:
                async with aclosing(chat) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except RefusedByServer as error:
                if not _has_no_chat(error):
                    raise
                self.has_chat = False
        prompt = "\n".join(message["content"] for message in self._all())
        body = {"prompt": prompt, "max_tokens": _DEFAULT_MAX_TOKENS}
        async with aclosing(self._events("/v1/completions", body)) as pieces:
            async for piece in pieces:
                yield piece

    def _all(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[AnswerPart, None]:
        asked = {
            **body,
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }
        async with aclosing(self.http.events(path, asked)) as events:
            async for event in events:
                data = json.loads(event)
                if not isinstance(data, dict) or data.get("error"):
                    raise ValueError(f"the server says {event[:300]}")
                self._note(data.get("usage") or {})
                for choice in data.get("choices") or []:
                    delta = choice.get("delta") or choice
                    self.figures.finish_reason = choice.get("finish_reason")
                    text = delta.get("content") or delta.get("text") or ""
                    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
                    if text or reasoning:
                        self.figures.output_tokens += 1  # the server's usage replaces this count
                        yield AnswerPart(text=text, reasoning=reasoning)

    def _note(self, usage: dict[str, Any]) -> None:
        if not usage:
            return
        details = usage.get("prompt_tokens_details") or {}
        self.figures.prompt_tokens = usage.get("prompt_tokens")
        self.figures.cached_tokens = details.get("cached_tokens") or 0
        self.figures.output_tokens = usage.get("completion_tokens") or self.figures.output_tokens


def _has_no_chat(error: RefusedByServer) -> bool:
    """Return whether the server has no chat template or no chat route."""
    text = error.text.lower()
    if error.status == 400:
        return "chat template" in text or "chat_template" in text
    return error.status in (404, 405, 501) and "model" not in text


# -- the terminal ----------------------------------------------------------------------------------

HELP = """\
/reset          forget the conversation; the system prompt stays
/system TEXT    set the system prompt to TEXT; without TEXT, show it
/save FILE      write the conversation to a file (JSON, as OpenAI's messages)
/help           show this list
/exit, /quit    end the chat; Ctrl-D does too
A \\ at the end of a line continues it on the next one. Ctrl-C stops an answer."""

# Control characters in a model's text could move the cursor, or set the title or the clipboard.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@final
class Talk:
    """A conversation at a terminal. Answers go to standard output, all else to ``console``."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation, self._console = conversation, console
        self._commands: dict[str, Callable[[str], bool]] = {
            "/reset": self._reset,
            "/system": self._system,
            "/save": self._save,
            "/help": self._help,
            "/exit": lambda _: False,
            "/quit": lambda _: False,
        }

    def run(self, read: Callable[[], str]) -> None:
        """Answer lines and carry out commands until /exit or the end of the input."""
        self._console.print(
            f"{escape(self._conversation.model)} at {escape(self._conversation.http.url)}; "
            "/help lists the commands, Ctrl-D ends the chat",
            style="dim",
        )
        while True:
            try:
                text = read().strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("\nCtrl-D or /exit ends the chat", style="dim")
                continue
            if text.startswith("/"):
                if not self.command(text):
                    return
            elif text:
                self.answer(text)

    def command(self, text: str) -> bool:
        """Carry out a line that begins with a slash. Returns: False if the chat ends."""
        name, _, rest = text.partition(" ")
        if name in self._commands:
            return self._commands[name](rest.strip())
        self._console.print(f"{escape(name)} is not a command: /help lists them", style="yellow")
        return True

    def answer(self, text: str) -> bool:
        """Send a message, and print the answer as it arrives. Returns: False after an error."""
        had_chat = self._conversation.has_chat
        try:
            with unseen():  # echo would put the keys in the middle of the answer
                asyncio.run(self._write_answer(text))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            self._console.print("stopped", style="dim")
        except (OSError, ValueError) as error:
            said = error.reason if isinstance(error, RefusedByServer) else str(error)
            said = said or type(error).__name__
            self._console.print(f"[bold red]error:[/] {escape(said)}", soft_wrap=True)
            return False
        if had_chat and not self._conversation.has_chat:
            self._console.print(
                "this model has no chat template: it continues the plain text (/v1/completions)",
                style="yellow",
            )
        self._console.print(escape(described(self._conversation.figures)), style="dim")
        return True

    async def _write_answer(self, text: str) -> None:
        shows_all = not sys.stdout.isatty()
        async with aclosing(self._conversation.ask(text)) as pieces:
            async for piece in pieces:
                if piece.reasoning:
                    self._console.print(escape(_clean(piece.reasoning)), style="dim", end="")
                sys.stdout.write(piece.text if shows_all else _clean(piece.text))
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _reset(self, _: str) -> bool:
        self._conversation.reset()
        self._console.print("the conversation is empty again", style="dim")
        return True

    def _system(self, text: str) -> bool:
        if text:
            self._conversation.system = text
        self._console.print(escape(f"system: {self._conversation.system or 'none'}"), style="dim")
        return True

    def _save(self, name: str) -> bool:
        if not name:
            self._console.print("/save needs the name of a file", style="yellow")
            return True
        system = self._conversation.system
        said: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        found = {"model": self._conversation.model, "messages": said + self._conversation.messages}
        try:
            path = Path(name).expanduser()
            path.write_text(json.dumps(found, indent=2, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            self._console.print(escape(f"{name} cannot be written: {error.strerror}"), style="red")
            return True
        self._console.print(escape(f"{len(found['messages'])} messages are in {path}"), style="dim")
        return True

    def _help(self, _: str) -> bool:
        self._console.print(escape(HELP), style="dim")
        return True


def described(figures: Figures) -> str:
    """Return an answer's figures as one line."""
    parts = [f"{format_count(figures.output_tokens)} tokens"]
    if figures.tokens_per_s is not None:
        parts.append(f"{figures.tokens_per_s:.1f} tokens/s")
    parts.append(f"first after {format_seconds(figures.ttft_s)}")
    if figures.prompt_tokens is not None:
        cached, prompt = format_count(figures.cached_tokens), format_count(figures.prompt_tokens)
        parts.append(f"{cached} of {prompt} prompt tokens cached")
    if figures.finish_reason not in (None, "stop"):
        parts.append(f"ended by {figures.finish_reason}")
    return ", ".join(parts)


def _clean(text: str) -> str:
    return _CONTROLS.sub("", text)


# -- a server of its own ---------------------------------------------------------------------------

_LOOK_S = 0.05  # between two attempts to connect
_END_S = 10.0  # time for the server to end
# The pipe at the server's standard input closes when this process ends, however it ends.
_SERVE = """
import os, signal, threading

def end_with_parent():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from quire.cli import main
main()
"""


@contextmanager
def own_server(model: str | None) -> Iterator[tuple[str, str]]:
    """Run a server in a process of its own, on a Unix socket in a private folder.

    Yields its address and its key once it listens. The server prints progress and errors on
    standard error.

    Raises: typer.Exit with the server's exit code, if it ends before it listens.
    """
    with tempfile.TemporaryDirectory(prefix="quire-chat-") as folder:
        path, key = Path(folder) / "socket", secrets.token_urlsafe()
        key_file = Path(folder) / "key"
        key_file.write_text(key, encoding="utf-8")
        flags = ("--uds", str(path), "--api-key", f"@{key_file}", "--shutdown-timeout", "0")
        logs = ("--uvicorn-log-level", "warning", "--disable-log-stats")
        with subprocess.Popen(
            [sys.executable, "-c", _SERVE, "serve", *flags, *logs, *([model] if model else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C stops an answer and not the server
        ) as child:
            try:
                while not _is_open(path):
                    if (code := child.poll()) is not None:
                        raise typer.Exit(code or 1)
                    time.sleep(_LOOK_S)
                yield f"unix:{path}", key
            finally:
                child.terminate()
                try:
                    child.wait(_END_S)
                except subprocess.TimeoutExpired:
                    child.kill()


def _is_open(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


# -- the command -----------------------------------------------------------------------------------


_SAMPLING = "Sampling (default: the server's)"


def chat(  # noqa: PLR0913 - each is a flag
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="The server's name of the model; default: its first. Without a server: a folder "
            "or a hub name; default: the demo model."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 300.0,
    system: Annotated[str | None, typer.Option(help="System prompt. Default: none.")] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Send this text, print the answer and exit; - reads the text from standard input."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, in_panel(_SAMPLING, "Maximum number of tokens of an answer.")
    ] = None,
    temperature: Annotated[
        float | None, in_panel(_SAMPLING, "Sampling temperature; 0 is greedy.")
    ] = None,
    top_p: Annotated[
        float | None,
        in_panel(_SAMPLING, "Sample from the most likely tokens of this total probability."),
    ] = None,
    top_k: Annotated[
        int | None,
        in_panel(_SAMPLING, "Sample from the k most likely tokens (not in OpenAI's API)."),
    ] = None,
    min_p: Annotated[
        float | None,
        in_panel(
            _SAMPLING,
            "Drop tokens below this fraction of the most likely one's probability (not OpenAI's).",
        ),
    ] = None,
    seed: Annotated[
        int | None, in_panel(_SAMPLING, "Random seed, which makes sampling repeatable.")
    ] = None,
) -> None:
    """Chat with a model: on any server with OpenAI's API, or in an engine of its own.

    If no server listens on the default address, or it does not have the model, an engine is started
    that ends with the chat. Ctrl-C stops an answer, not the program; /help lists the commands of
    the chat.

    \b
    quire chat
    quire chat Qwen/Qwen3-0.6B
    quire chat big --url https://llm.example.org --system "Answer in French."
    git diff | quire chat --prompt - --system "Write a commit message."

    Raises: ConfigError, RequestError.
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
            given = "standard input" if prompt in (None, "-") else "--prompt"
            raise ConfigError(f"{given} is empty: give it a text, or start the chat in a terminal")
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
    """Return the server's name of the model; None, after a line that says why, to start an engine.

    Raises: ConfigError if a server that --url names does not answer.
    """
    if url != DEFAULT_URL:
        return model or asyncio.run(first_model(http))
    try:
        names = asyncio.run(models_of(http))
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        console.print(f"no server at {url}: starting an engine for this chat", style="dim")
        return None
    if model is None or model in names:
        return model or names[0]
    console.print(
        escape(f"the server at {url} has {names[0]}: starting an engine for {model}"), style="dim"
    )
    return None


def _read_line() -> str:
    """Read a line with readline's keys; a \\ at its end continues it on the next line."""
    import readline  # noqa: F401 - gives input() editing and a history

    lines = [input("\001\033[1m\002> \001\033[0m\002")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)
