"""One turn of a conversation being answered: what three interfaces for chats have in common."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, final

from quire.chat.conversation import ChatInput, ChatPrompt, Reader
from quire.chat.output_events import Event, ReasoningDelta
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Embedding, Request, TokenLogprobs
from quire.sampling_params import SamplingParams
from quire.server.admission_control import Permit
from quire.server.request_context import RequestContext
from quire.server.request_params import searched
from quire.server.schemas.completion_request import MAX_PROMPTS, Prompt
from quire.server.schemas.request_fields import GenerationRequest, Searching, TokenUsage
from quire.server.tracing import RequestRecord
from quire.server.wire.error_responses import Refused, broken_off
from quire.server.wire.streams import while_connected
from quire.units import format_count

# -- spans -----------------------------------------------------------------------------------------

# A span for each prompt that has come to its end, if a collector is named.


_CONTEXT = ("traceparent", "tracestate")


@final
class Traces:
    """Of one exchange. Who leaves early leaves no span."""

    def __init__(
        self, exchange: RequestContext, requests: Sequence[Request], operation: str
    ) -> None:
        self._exchange, self._requests, self._operation = exchange, requests, operation
        self._tracer = exchange.service.tracer
        self._num_tokens = [0] * len(requests)
        self._ends: list[list[TextDelta]] = [[] for _ in requests]

    def add(self, index: int, delta: TextDelta) -> None:
        if self._tracer is None:
            return
        self._num_tokens[index] += len(delta.token_ids)
        if delta.finish_reason is None:
            return
        self._ends[index].append(delta)
        if (
            len(self._ends[index]) == self._requests[index].num_choices
            and delta.latencies is not None
        ):
            self._tracer.note(self._record(index))

    def _record(self, index: int) -> RequestRecord:
        request, ends, exchange = self._requests[index], self._ends[index], self._exchange
        assert ends[-1].latencies is not None
        headers = {name: exchange.http.headers.get(name) for name in _CONTEXT}
        return RequestRecord(
            request_id=f"{exchange.id}-{index}",
            model=exchange.service.model_name,
            operation=self._operation,
            arrived_unix_s=exchange.arrived_unix_s,
            latencies=ends[-1].latencies,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=ends[-1].num_cached_tokens,
            num_generation_tokens=self._num_tokens[index],
            finish_reasons=tuple(str(end.finish_reason) for end in ends),
            n=request.num_choices,
            max_tokens=request.params.max_tokens,
            temperature=request.params.temperature,
            top_p=request.params.top_p,
            headers={name: value for name, value in headers.items() if value is not None},
        )


# -- generation ------------------------------------------------------------------------------------

# What one exchange runs: its requests, admitted, and what comes of them.


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


class UsageCounter:
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

    def usage(self) -> TokenUsage:
        return TokenUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details={"cached_tokens": self.cached_tokens},
        )


class Generation:
    """Admitted until the exchange ends.

    Raises: Refused if there is no room in the queue, or the answer would be too long.
    """

    def __init__(
        self,
        exchange: RequestContext,
        requests: Sequence[Request],
        operation: str,
        *,
        behind: "Generation | None" = None,
    ) -> None:
        """``operation``: as traces name it, chat or text_completion. ``behind``: what has ended,
        and was admitted for these too."""
        service = exchange.service
        longest = service.max_model_len * (service.config.max_logprobs + 1)
        _refuse_too_much(requests, max(MAX_LOGPROBS, longest))
        self.exchange, self.requests = exchange, requests
        self._traces = Traces(exchange, requests, operation)
        self.service = service
        self.tally = UsageCounter(requests)
        self.num_choices = requests[0].num_choices  # of each prompt
        self._passes: list[Permit] = exchange.admit(requests) if behind is None else behind._passes

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


# -- chat turns ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPiece:
    """What is new of one choice; at its end, why it has ended."""

    choice: int
    events: list[Event]
    delta: TextDelta
    finish_reason: str | None


@final
class ChatTurn:
    """Of an admitted ``work``. ``own_stops``: stop strings that no client has named."""

    def __init__(self, work: Generation, prompt: ChatPrompt, own_stops: frozenset[str]) -> None:
        self.work, self.prompt, self._own_stops = work, prompt, own_stops
        chat = work.service.chat
        self._readers: list[Reader] = [chat.reader(prompt) for _ in range(work.num_choices)]
        self._thoughts: list[list[str]] = [[] for _ in self._readers]

    async def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """As they come. Leaving it ends the request. Raises: as ``Generation.pieces``."""
        ended: set[int] = set()
        async with aclosing(self.work.pieces()) as pieces:
            async for choice, delta in pieces:
                if choice in ended:
                    continue
                if delta.stopped_by in self._own_stops:
                    delta = replace(delta, stopped_by=None)
                reader = self._readers[choice]
                events = reader.feed(delta.text)
                reason: str | None = delta.finish_reason
                if reason is not None:
                    ends_itself = reason == "stop" and delta.stopped_by is None
                    events += reader.finish(cut=not ends_itself)
                self._thoughts[choice] += (e.text for e in events if isinstance(e, ReasoningDelta))
                if reader.is_full:  # the only call that there may be: the rest is of no use
                    reason = "stop"
                if reason is not None:
                    ended.add(choice)
                yield OutputPiece(
                    choice=choice,
                    events=events,
                    delta=delta,
                    finish_reason=self._reason(reader, reason),
                )
                if len(ended) == self.work.num_choices:
                    return

    async def gather(self) -> list[list[OutputPiece]]:
        """All pieces of each choice, when all have ended. Raises: as ``pieces``; ClientGone."""
        return await while_connected(self.work.exchange.http.receive, self._gather())

    async def _gather(self) -> list[list[OutputPiece]]:
        found: list[list[OutputPiece]] = [[] for _ in self._readers]
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                found[piece.choice].append(piece)
        return found

    async def num_reasoning_tokens(self) -> int:
        """Of all choices so far, counted by their text: the tokens have no other mark."""
        exchange, number = self.work.exchange, 0
        encode = partial(exchange.service.texts.encode, add_special_tokens=False)
        for thoughts in filter(None, map("".join, self._thoughts)):
            number += len(await exchange.in_text_thread(encode, thoughts))
        return min(number, self.work.tally.completion_tokens)

    async def usage(self) -> TokenUsage:
        """What it has cost; of a model whose reasoning is read, how much was that."""
        usage = self.work.tally.usage()
        if self._readers[0].reads_reasoning:
            number = await self.num_reasoning_tokens()
            usage.completion_tokens_details = {"reasoning_tokens": number}
        return usage

    def _reason(self, reader: Reader, reason: str | None) -> str | None:
        """A call is a reason to end, unless the client has named the tool and waits for it."""
        is_call = reason == "stop" and reader.num_calls > 0 and self.prompt.choice.kind != "named"
        return "tool_calls" if is_call else reason


async def take_turn(
    exchange: RequestContext,
    chat: ChatInput,
    asked: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    within_context: bool = False,
    num_bytes: int = 0,
) -> ChatTurn:
    """Write the prompt, and join the queue.

    ``within_context``: ``max_tokens`` beyond the context are no error; it ends there.
    ``num_bytes``: of a conversation that is more than the body.
    Raises: Refused; RequestError.
    """
    service = exchange.service
    prompt = await exchange.in_text_thread(service.chat.prompt, chat, num_bytes=num_bytes)
    if not prompt.token_ids:
        raise Refused(
            400, "the chat template writes nothing for these messages: give one of them a text"
        )
    token_ids = service.shortened(list(prompt.token_ids), asked.truncate_prompt_tokens)
    room = service.room_for(len(token_ids), None)
    if within_context and max_tokens is not None:
        max_tokens = min(max_tokens, room)
    params: SamplingParams = service.params(
        asked,
        max_tokens=room if max_tokens is None else service.room_for(len(token_ids), max_tokens),
        logprobs=logprobs,
        form=prompt.structured_outputs,
    )
    if params.structured_outputs is not None:
        form = replace(params.structured_outputs, reasoning=prompt.reasoning)
        params = replace(params, structured_outputs=form)
    if prompt.stop and isinstance(asked, Searching) and asked.use_beam_search:
        raise Refused(
            400,
            f"use_beam_search: answers of this model end at a text ({prompt.stop[0][:40]!r}, of "
            "chat_stop_strings in its tokenizer_config.json), and a search looks for none",
            param="use_beam_search",
        )
    own_stops = frozenset(prompt.stop) - set(params.stop)
    params = replace(params, stop=(*params.stop, *prompt.stop))
    if asked.skip_special_tokens is None:
        params = replace(params, skip_special_tokens=prompt.skip_special_tokens)
    chosen = searched(asked, params) if isinstance(asked, Searching) else params
    request = await service.request(exchange.caller, token_ids, chosen, asked)
    return ChatTurn(Generation(exchange, [request], "chat"), prompt, own_stops)


def reasoning_kwargs(effort: str | None) -> dict[str, Any]:
    """For templates: how much the model is to think, and whether at all."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def refuse_several(asked: GenerationRequest) -> None:
    """Where an answer has one choice only. Raises: Refused."""
    if asked.n is not None and asked.n != 1:
        raise Refused(400, f"n={asked.n}: this interface gives one answer", param="n")
