"""A server elsewhere as a target: OpenAI's ``/v1/completions``, streamed."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from quire.bench.load import Piece
from quire.bench.workload import Query
from quire.errors import ConfigError
from quire.http import Http, RefusedByServer


class CompletionsServer:
    """Sends prompts as token ids; usage is asked for, so that lengths are the server's own."""

    def __init__(self, http: Http, model: str, *, temperature: float, ignore_eos: bool) -> None:
        self._http, self.model = http, model
        self._temperature, self._ignore_eos = temperature, ignore_eos

    async def answer(self, query: Query) -> AsyncIterator[Piece]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": query.token_ids,
            "max_tokens": query.max_tokens,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:  # not OpenAI's: a server that is strict is asked without it
            body["ignore_eos"] = True
        async with aclosing(self._http.events("/v1/completions", body)) as events:
            async for event in events:
                yield _piece(event)


async def first_model(http: Http) -> str:
    """What the server calls the first of its models. Raises: ConfigError."""
    return (await models_of(http))[0]


async def models_of(http: Http) -> list[str]:
    """What the server calls its models, at least one. Raises: ConfigError."""
    try:
        answer = await http.get("/v1/models")
        names: list[str] = [str(model["id"]) for model in answer["data"]]
        names[0]
    except RefusedByServer as error:
        raise ConfigError(f"--url {http.url} refuses: {error.reason}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--url {http.url}: no model can be had from /v1/models ({type(error).__name__}: "
            f"{error}). Is the server up? --model names one without asking"
        ) from error
    return names


def _piece(event: str) -> Piece:
    """Raises: ValueError for an event that is an error, or no JSON object."""
    data = json.loads(event)
    if not isinstance(data, dict) or data.get("error"):
        raise ValueError(f"the server says {event[:300]}")
    choices, usage = data.get("choices") or [], data.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Piece(
        text=(choices[0].get("text") or "") if choices else "",
        num_tokens=None if choices else 0,
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
        cached_tokens=cached or 0,
    )
