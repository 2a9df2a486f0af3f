"""What one exchange runs: its requests, admitted, and what comes of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Embedding, Request, TokenLogprobs
from quire.server.endpoints.traces import Traces
from quire.server.exchange import Exchange
from quire.server.guard.gate import Pass
from quire.server.schemas.completions import MAX_PROMPTS, Prompt
from quire.server.schemas.fields import Usage
from quire.server.wire.errors import Refused, broken_off
from quire.server.wire.streams import while_connected
from quire.units import format_count

T = TypeVar("T")
R = TypeVar("R")

MAX_CONTINUATIONS = 1024  # of all prompts of a request
MAX_LOGPROBS = 2**20  # of all its tokens; or as many as one continuation may have


@dataclass(slots=True, eq=False)
class Gathered:
    """All of one continuation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    embedding: Embedding | None = None


class Tally:
    """What several prompts have cost so far, in tokens."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}  # by prompt

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def add(self, index: int, delta: TextDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        self._cached[index] = delta.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details={"cached_tokens": self.cached_tokens},
        )


class Work:
    """Admitted until the exchange ends.

    Raises: Refused if there is no room in the queue, or the answer would be too long.
    """

    def __init__(
        self,
        exchange: Exchange,
        requests: Sequence[Request],
        operation: str,
        *,
        behind: "Work | None" = None,
    ) -> None:
        """``operation``: as traces name it, chat or text_completion. ``behind``: what has ended,
        and was admitted for these too."""
        service = exchange.service
        longest = service.max_model_len * (service.config.max_logprobs + 1)
        _refuse_too_much(requests, max(MAX_LOGPROBS, longest))
        self.exchange, self.requests = exchange, requests
        self._traces = Traces(exchange, requests, operation)
        self.service = service
        self.tally = Tally(requests)
        self.num_choices = requests[0].num_choices  # of each prompt
        self._passes: list[Pass] = exchange.admit(requests) if behind is None else behind._passes

    async def pieces(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """(number of the choice, among those of all prompts, piece). Leaving it ends the requests.

        Raises: Refused for a continuation that the engine could not compute.
        """
        async with aclosing(self.service.run(self.requests, self._passes)) as pieces:
            async for index, delta in pieces:
                self.tally.add(index, delta)
                self._traces.add(index, delta)
                if delta.finish_reason == "error":
                    raise broken_off(delta.detail, delta.fault)
                # OpenAI has no word for KV memory that ran out; the detail says which it was.
                if delta.finish_reason == "capacity":
                    delta = replace(delta, finish_reason="length")
                yield index * self.num_choices + delta.choice, delta

    async def gather(self) -> list[Gathered]:
        """All choices, when all have ended. Raises: as ``pieces``; ClientGone."""
        return await while_connected(self.exchange.http.receive, self._gather())

    async def _gather(self) -> list[Gathered]:
        choices = [Gathered() for _ in range(len(self.requests) * self.num_choices)]
        texts: list[list[str]] = [[] for _ in choices]
        async with aclosing(self.pieces()) as pieces:
            async for number, delta in pieces:
                own = choices[number]
                texts[number].append(delta.text)
                own.token_ids += delta.token_ids
                own.logprobs += delta.logprobs
                own.prompt_logprobs = own.prompt_logprobs or delta.prompt_logprobs
                own.finish_reason, own.stop_reason = delta.finish_reason, stop_reason(delta)
                own.embedding = delta.embedding
        for own, parts in zip(choices, texts, strict=True):
            own.text = "".join(parts)
        return choices


def prompts_of(given: Prompt, name: str = "prompt") -> list[str | list[int]]:
    """One text, one list of token ids, or several of either. Raises: Refused."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    several = [item for item in given if isinstance(item, str | list)]
    if not given or len(several) < len(given):
        raise Refused(
            400,
            f"{name} must be a text, a list of token ids, or a list of texts or of such lists",
            param=name,
        )
    if len(several) > MAX_PROMPTS:
        raise Refused(
            400, f"{name} has {len(several):,} texts and may have {MAX_PROMPTS:,}", param=name
        )
    return several


async def one_by_one(make: Callable[[int, T], R], several: Iterable[T]) -> list[R]:
    """Of each with its number. Others go on in between: choices may have 10⁴ logprobs each."""
    made = []
    for number, each in enumerate(several):
        made.append(make(number, each))
        await asyncio.sleep(0)
    return made


def _refuse_too_much(requests: Sequence[Request], most_logprobs: int) -> None:
    """Each field has its bound, and so have their products. Raises: Refused."""
    num_continuations = sum(request.params.n for request in requests)
    if num_continuations > MAX_CONTINUATIONS:
        raise Refused(
            400,
            f"{format_count(len(requests))} prompts with n={requests[0].params.n} are "
            f"{format_count(num_continuations)} continuations, and a request may have "
            f"{format_count(MAX_CONTINUATIONS)}: ask in several",
            param="n",
        )
    num_logprobs = sum(map(_num_logprobs, requests))
    if num_logprobs > most_logprobs:
        raise Refused(
            400,
            f"{format_count(num_logprobs)} logprobs are asked for (of prompts × n × max_tokens), "
            f"and a request may have {format_count(most_logprobs)}: ask for fewer, or in several",
            param="logprobs",
        )


def _num_logprobs(request: Request) -> int:
    params, number = request.params, 0
    if request.beam is not None:  # those of the tokens that are chosen, at the end
        return request.num_choices * params.max_tokens
    if params.logprobs is not None:
        number += params.n * params.max_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        number += len(request.prompt_token_ids) * (params.prompt_logprobs + 1)
    return number


def stop_reason(delta: TextDelta) -> str | int | None:
    """vLLM's field: what the client had named to stop at, or why it ended early, in words."""
    return delta.detail or None if delta.stopped_by is None else delta.stopped_by
