"""A conversation with a server of OpenAI's API: what was said, and the answer as it comes."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from quire.http import Http, RefusedByServer

_DEFAULT_MAX_TOKENS = 512  # where there is no chat: OpenAI's own default is 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A piece of an answer."""

    text: str = ""
    reasoning: str = ""


@dataclass(slots=True, kw_only=True)
class Figures:
    """Of one answer. Units: seconds."""

    output_tokens: int = 0
    prompt_tokens: int | None = None  # None: the server does not say
    cached_tokens: int = 0
    ttft_s: float = 0.0
    elapsed_s: float = 0.0
    finish_reason: str | None = None  # None: it was stopped here

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None where there was no second."""
        took_s = self.elapsed_s - self.ttft_s
        return (self.output_tokens - 1) / took_s if self.output_tokens > 1 and took_s > 0 else None


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What has been said, and how more is asked for.

    A server whose model has no chat template is asked for completions from then on: it continues
    the text of the whole conversation, with nothing around it.
    """

    http: Http
    model: str
    sampling: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    has_chat: bool = True
    figures: Figures = field(default_factory=Figures)

    def reset(self) -> None:
        """Forget what has been said; the system prompt stays."""
        self.messages.clear()

    async def ask(self, text: str) -> AsyncGenerator[Said, None]:
        """The answer, piece by piece; what has come of it is kept when it is left early.

        Raises: OSError, ValueError; then nothing of it is kept.
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
        except BaseException:  # stopped here: that is no failure
            failed = False
            raise
        finally:
            self.figures.elapsed_s = perf_counter() - begin
            if failed:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": "".join(answer)})

    async def _pieces(self) -> AsyncGenerator[Said, None]:
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

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Said, None]:
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
                        self.figures.output_tokens += 1  # until the server says how many
                        yield Said(text=text, reasoning=reasoning)

    def _note(self, usage: dict[str, Any]) -> None:
        if not usage:
            return
        details = usage.get("prompt_tokens_details") or {}
        self.figures.prompt_tokens = usage.get("prompt_tokens")
        self.figures.cached_tokens = details.get("cached_tokens") or 0
        self.figures.output_tokens = usage.get("completion_tokens") or self.figures.output_tokens


def _has_no_chat(error: RefusedByServer) -> bool:
    """Whether who refuses to chat cannot: it has no template, or no such route."""
    text = error.text.lower()
    if error.status == 400:
        return "chat template" in text or "chat_template" in text
    return error.status in (404, 405, 501) and "model" not in text
