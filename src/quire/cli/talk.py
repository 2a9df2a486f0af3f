"""The turns of a chat in a terminal: lines in, answers out, and commands that begin with /."""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.markup import escape

from quire.cli.conversation import Conversation, Figures
from quire.cli.keyboard import unseen
from quire.http import RefusedByServer
from quire.units import format_count, format_seconds

HELP = """\
/reset          forget what has been said
/system TEXT    tell the model TEXT beforehand, from now on; without TEXT, show it
/save FILE      write the conversation to a file (JSON, as OpenAI's messages)
/help           this list
/exit           end; so does Ctrl-D
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""

# A model's text could move the cursor, or set a terminal's title and clipboard.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@final
class Talk:
    """One conversation at a terminal. Answers go to standard output, all else to ``console``."""

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
        """Until /exit or the end of what is read."""
        self._console.print(
            f"{escape(self._conversation.model)} at {escape(self._conversation.http.url)}; "
            "/help says what can be said, Ctrl-D ends",
            style="dim",
        )
        while True:
            try:
                text = read().strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("\nCtrl-D or /exit ends", style="dim")
                continue
            if text.startswith("/"):
                if not self.command(text):
                    return
            elif text:
                self.answer(text)

    def command(self, text: str) -> bool:
        """Do what a line with a / says; False if that is to end."""
        name, _, rest = text.partition(" ")
        if name in self._commands:
            return self._commands[name](rest.strip())
        self._console.print(f"{escape(name)} is no command: /help lists them", style="yellow")
        return True

    def answer(self, text: str) -> bool:
        """Ask, and write the answer as it comes; False if there was none."""
        had_chat = self._conversation.has_chat
        try:
            with unseen():  # else what is typed meanwhile stands in the midst of the answer
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
                "this model has no chat template: it continues the text as it is (/v1/completions)",
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
        self._console.print("forgotten", style="dim")
        return True

    def _system(self, text: str) -> bool:
        if text:
            self._conversation.system = text
        self._console.print(escape(f"system: {self._conversation.system or 'none'}"), style="dim")
        return True

    def _save(self, name: str) -> bool:
        if not name:
            self._console.print("/save needs a file's name", style="yellow")
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
    """An answer's figures in a line."""
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
