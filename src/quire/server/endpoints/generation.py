"""From a request's fields to the engine, and back: what a chat, a text or a recording generates.

``sampling`` and ``engine_request`` make the engine's requests. A ``Generation`` admits them to the
queue and yields what the engine generates. A ``ChatTurn`` is a generation whose text is read as
reasoning, content and tool calls.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, final

import msgspec
from msgspec import UNSET, UnsetType

from quire.chat.cache_marks import CacheMark
from quire.chat.conversation import ChatInput, ChatPrompt, Reader
from quire.chat.output_events import Event, ReasoningDelta
from quire.engine.outputs import TextDelta
from quire.engine.prompts import Prompt, ShownPrompt
from quire.engine.sequence import Embedding, Request, TokenLogprobs
from quire.errors import RequestError
from quire.sampling_params import (
    MAX_RETENTIONS,
    CacheRetention,
    Params,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.server.admission_control import Permit
from quire.server.pictures import shown_prompt
from quire.server.request_context import RequestContext
from quire.server.request_params import sampling_params, searched
from quire.server.schemas.request_fields import (
    Addressed,
    GenerationRequest,
    KVTransferParams,
    Routed,
    Sampling,
    Searching,
    TokenUsage,
)
from quire.server.tracing import RequestSpans
from quire.server.wire.error_responses import Refused, broken_off, invalid
from quire.server.wire.streams import all_of, while_connected
from quire.units import format_count

T = TypeVar("T")
R = TypeVar("R")

MAX_CONTINUATIONS = 1024  # of all prompts of a request
MAX_LOGPROBS = 2**20  # of all its tokens; or as many as one continuation may have
SESSION_HEADER = "x-session-id"


# -- from fields to the engine's requests ----------------------------------------------------------


async def prompt_ids(
    context: RequestContext, prompt: str | list[int], asked: Addressed, *, leaves: int = 1
) -> list[int]:
    """Return a prompt's token ids, cut to the last ``truncate_prompt_tokens``.

    ``leaves``: tokens of the context that stay free for the continuation.

    Raises: RequestError for a text that cannot be tokenized, or is longer than the context.
    """
    if isinstance(prompt, str):
        special = asked.add_special_tokens is not False
        encode = partial(context.service.texts.encode, prompt, add_special_tokens=special)
        prompt = await context.in_text_thread(encode)
    return _truncated(context, prompt, asked, leaves)


def room_for(context: RequestContext, num_prompt_tokens: int, max_tokens: int | None) -> int:
    """Return how many tokens may be generated: ``max_tokens``, or what the context leaves. Raises:
    Refused where ``max_tokens`` is more than the context leaves.
    """
    max_model_len = context.service.max_model_len
    left = max_model_len - num_prompt_tokens
    if max_tokens is None:
        return max(1, left)
    if left >= 1 and max_tokens > left:
        raise Refused(
            400,
            f"max_tokens={format_count(max_tokens)} is too large: the prompt has "
            f"{format_count(num_prompt_tokens)} tokens, together "
            f"{format_count(num_prompt_tokens + max_tokens)}, and the context ends at "
            f"{format_count(max_model_len)} (max_model_len): ask for up to "
            f"{format_count(left)}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return max_tokens


def sampling(
    context: RequestContext,
    asked: Sampling,
    *,
    max_tokens: int,
    logprobs: int | None,
    form: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Return the engine's parameters for a request's fields, with the server's defaults. Raises:
    Refused; RequestError.
    """
    searches = isinstance(asked, Searching) and asked.use_beam_search
    return sampling_params(
        asked,
        defaults={} if searches else context.service.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=logprobs,
        max_logprobs=context.service.config.max_logprobs,
        form=form,
    )


async def engine_request(
    context: RequestContext, prompt: Prompt, params: Params, asked: Routed
) -> Request:
    """Return the engine's request, which the engine has checked. Raises: Refused (503) where the
    engine has failed or sleeps; RequestError.
    """
    service = context.service
    service.refuse_without_engine()
    try:
        request = await service.engine.request(
            prompt,
            params,
            priority=asked.priority or 0,
            keys=context.caller.keys(asked.cache_salt),
            kv_transfer_params=_transfer(context, asked),
        )
    except RequestError:
        service.refuse_without_engine()  # the client is not at fault
        if service.admission.sleeping:
            raise service.admission.refused("sleeping") from None
        raise
    session = _session(context, asked)
    return request if session is None else replace(request, session=session)


def _session(context: RequestContext, asked: Routed) -> str | None:
    """Return what stands for the conversation of a request, as its client names it: the nearest
    name that is given. vLLM's router reads the same header.
    """
    names = [context.http.headers.get(SESSION_HEADER)]
    if isinstance(asked, GenerationRequest):
        names += [asked.prompt_cache_key, asked.safety_identifier]
    given = next((name for name in (*names, asked.user) if name), None)
    return None if given is None else context.caller.session(given)


def _transfer(context: RequestContext, asked: Routed) -> dict[str, Any] | None:
    """Return what a request says of blocks of other servers, where there are such."""
    given = asked.kv_transfer_params if isinstance(asked, GenerationRequest) else None
    if given is None:
        return None
    if not context.service.engine.facts.takes_blocks:
        context.ignore("kv_transfer_params")
        return None
    said: dict[str, Any] = msgspec.to_builtins(given)
    return said


def _truncated(
    context: RequestContext, token_ids: list[int], asked: Addressed, leaves: int
) -> list[int]:
    most = asked.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:  # vLLM's word for as many as the context takes
        most = context.service.max_model_len - leaves
    return token_ids[max(0, len(token_ids) - most) :]


# -- generation ------------------------------------------------------------------------------------


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


class Generation:
    """The engine's requests of one HTTP request: admitted to the queue, run and counted.

    ``operation`` is the name in traces, such as text_completion. ``after`` is a generation that has
    ended and whose permits these requests take over.

    Raises: Refused where the queue has no room, or the answer would be too long.
    """

    def __init__(
        self,
        context: RequestContext,
        requests: Sequence[Request],
        operation: str,
        *,
        after: "Generation | None" = None,
    ) -> None:
        service = context.service
        refuse_too_much(context, requests)
        self.context, self.service, self.requests = context, service, requests
        self.num_choices = requests[0].num_choices  # of each prompt
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.completion_tokens = 0
        # What a server that goes on is to be asked with, once a choice has ended.
        self.kv_transfer_params: KVTransferParams | UnsetType = UNSET
        self._cached_tokens: dict[int, int] = {}  # by prompt
        self._retained_tokens: dict[int, int] = {}
        self._spans = None
        if service.tracer is not None:
            self._spans = RequestSpans(
                service.tracer,
                requests,
                operation=operation,
                request_id=context.id,
                model=service.model_name,
                arrived_unix_s=context.arrived_unix_s,
                headers=context.http.headers,
            )
        self._permits: list[Permit]
        if after is not None:
            self._permits = after._permits
            return
        context.until_queued.close()
        sizes = [(request.params.n, len(request.prompt_token_ids)) for request in requests]
        admitted = service.admission.admit(context.caller, sizes)
        self._permits = context.until_answered.enter_context(admitted)

    @property
    def cached_tokens(self) -> int:
        """Return how many prompt tokens the prefix cache had."""
        return sum(self._cached_tokens.values())

    @property
    def cache_write_tokens(self) -> int:
        """Return how many prompt tokens the cache keeps for a while that it had not."""
        return sum(
            max(0, count - self._cached_tokens[index])
            for index, count in self._retained_tokens.items()
        )

    def usage(self) -> TokenUsage:
        """Return the tokens that the requests have cost so far."""
        details = {"cached_tokens": self.cached_tokens}
        if any(request.params.retentions for request in self.requests):
            details["cache_write_tokens"] = self.cache_write_tokens
        return TokenUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=details,
        )

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield each choice's number, among those of all prompts, and what is new of it.

        Closing the generator ends the requests. Raises: Refused for a continuation that the engine
        could not compute; what the engine failed with.
        """
        running = [self._run(index) for index in range(len(self.requests))]
        return running[0] if len(running) == 1 else _merged(running)

    async def gather(self) -> list[Gathered]:
        """Return all choices when all have ended. Raises: as ``deltas``; ClientGone."""
        return await while_connected(self.context.http.receive, self._gather())

    async def _gather(self) -> list[Gathered]:
        choices = [Gathered() for _ in range(len(self.requests) * self.num_choices)]
        texts: list[list[str]] = [[] for _ in choices]
        async with aclosing(self.deltas()) as deltas:
            async for number, delta in deltas:
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

    async def _run(self, index: int) -> AsyncGenerator[tuple[int, TextDelta], None]:
        request, permit, admission = (
            self.requests[index],
            self._permits[index],
            self.service.admission,
        )
        log = self.service.request_log
        noted = None if log is None else log.begin(request)
        try:
            async with aclosing(self.service.engine.generate(request)) as pieces:
                async for delta in pieces:
                    # A beam search's first delta is the first of all its beams.
                    begun = (delta.choice,) if request.beam is None else range(permit.num_sequences)
                    for choice in begun:
                        admission.note_piece(permit, choice)
                    if noted is not None:
                        noted.add(delta)
                    self.completion_tokens += len(delta.token_ids)
                    self._cached_tokens[index] = delta.num_cached_tokens
                    self._retained_tokens[index] = max(
                        delta.num_retained_tokens, self._retained_tokens.get(index, 0)
                    )
                    if delta.kv_transfer_params is not None and not index:  # as vLLM: of the first
                        self.kv_transfer_params = msgspec.convert(
                            dict(delta.kv_transfer_params), KVTransferParams
                        )
                    if self._spans is not None:
                        self._spans.add(index, delta)
                    if delta.finish_reason == "error":
                        raise broken_off(delta.detail, delta.fault)
                    # OpenAI has no word for KV memory that ran out; the detail says which it was.
                    if delta.finish_reason == "capacity":
                        delta = replace(delta, finish_reason="length")
                    yield index * self.num_choices + delta.choice, delta
        finally:
            if noted is not None:
                noted.end()


async def _merged(several: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all generators as they come. None computes ahead of its reader."""
    asking: dict[asyncio.Task[T], AsyncGenerator[T, None]] = {
        asyncio.ensure_future(anext(each)): each for each in several
    }
    try:
        while asking:
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = asking.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item
                asking[asyncio.ensure_future(anext(source))] = source
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for source in several:
            await source.aclose()


async def one_by_one(make: Callable[[int, T], R], several: Iterable[T]) -> list[R]:
    """Return what ``make`` gives for each item and its number; other tasks run in between.

    A choice may have 10⁴ logprobs.
    """
    made = []
    for number, each in enumerate(several):
        made.append(make(number, each))
        await asyncio.sleep(0)
    return made


def refuse_too_much(context: RequestContext, requests: Sequence[Request]) -> None:
    """Bound the products of fields that are bounded one by one. Raises: Refused."""
    longest = context.service.max_model_len * (context.service.config.max_logprobs + 1)
    most_logprobs = max(MAX_LOGPROBS, longest)
    num_continuations = sum(request.params.n for request in requests)
    if num_continuations > MAX_CONTINUATIONS:
        raise invalid(
            "n",
            f"{format_count(len(requests))} prompts with n={requests[0].params.n} are "
            f"{format_count(num_continuations)} continuations, and a request may have "
            f"{format_count(MAX_CONTINUATIONS)}: ask in several",
        )
    num_logprobs = sum(map(_num_logprobs, requests))
    if num_logprobs > most_logprobs:
        raise invalid(
            "logprobs",
            f"{format_count(num_logprobs)} logprobs are asked for (of prompts × n × max_tokens), "
            f"and a request may have {format_count(most_logprobs)}: ask for fewer, or in several",
        )


def _num_logprobs(request: Request) -> int:
    params, number = request.params, 0
    if request.beam is not None:  # a search has logprobs of the chosen tokens alone
        return request.num_choices * params.max_tokens
    if params.logprobs is not None:
        number += params.n * params.max_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        number += len(request.prompt_token_ids) * (params.prompt_logprobs + 1)
    return number


def stop_reason(delta: TextDelta) -> str | int | None:
    """Return vLLM's field: the client's stop string or token, or in words why it ended early."""
    return delta.detail or None if delta.stopped_by is None else delta.stopped_by


# -- chat turns ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPiece:
    """What is new of one choice; the last piece says why the choice has ended."""

    choice: int
    events: list[Event]
    delta: TextDelta
    finish_reason: str | None


@final
class ChatTurn(Generation):
    """The generation of one answer in a conversation, read as events.

    ``own_stops``: stop strings that the model needs and the client has not named.

    Raises: as ``Generation``.
    """

    def __init__(
        self,
        context: RequestContext,
        request: Request,
        prompt: ChatPrompt,
        own_stops: frozenset[str],
    ) -> None:
        super().__init__(context, [request], "chat")
        self.prompt, self._own_stops = prompt, own_stops
        chat = self.service.chat
        self._readers: list[Reader] = [chat.reader(prompt) for _ in range(self.num_choices)]
        self._thoughts: list[list[str]] = [[] for _ in self._readers]

    async def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """Yield pieces as they come. Closing it ends the request. Raises: as ``deltas``."""
        ended: set[int] = set()
        async with aclosing(self.deltas()) as deltas:
            async for choice, delta in deltas:
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
                if reader.is_full:  # the one call that is allowed has come
                    reason = "stop"
                if reason is not None:
                    ended.add(choice)
                yield OutputPiece(
                    choice=choice,
                    events=events,
                    delta=delta,
                    finish_reason=self._reason(reader, reason),
                )
                if len(ended) == self.num_choices:
                    return

    async def gather_pieces(self) -> list[list[OutputPiece]]:
        """Return the pieces of each choice when all have ended.

        Raises: as ``deltas``; ClientGone.
        """
        found: list[list[OutputPiece]] = [[] for _ in self._readers]
        for piece in await all_of(self.context.http.receive, self.pieces()):
            found[piece.choice].append(piece)
        return found

    async def num_reasoning_tokens(self) -> int:
        """Count the tokens of all reasoning so far, by its text: tokens carry no other mark."""
        number = 0
        encode = partial(self.service.texts.encode, add_special_tokens=False)
        for thoughts in filter(None, map("".join, self._thoughts)):
            number += len(await self.context.in_text_thread(encode, thoughts))
        return min(number, self.completion_tokens)

    async def whole_usage(self) -> TokenUsage:
        """Return the usage, with the tokens of reasoning where the model's reasoning is read."""
        usage = self.usage()
        if self._readers[0].reads_reasoning:
            number = await self.num_reasoning_tokens()
            usage.completion_tokens_details = {"reasoning_tokens": number}
        return usage

    def _reason(self, reader: Reader, reason: str | None) -> str | None:
        """A call is a reason to end, unless the client has named the tool and waits for it."""
        is_call = reason == "stop" and reader.num_calls > 0 and self.prompt.choice.kind != "named"
        return "tool_calls" if is_call else reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A conversation as the engine is asked to continue it."""

    request: Request
    prompt: ChatPrompt
    own_stops: frozenset[str]  # stop strings that the model needs and the client has not named


async def take_turn(
    context: RequestContext,
    chat: ChatInput,
    asked: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    within_context: bool = False,
    num_bytes: int = 0,
    marks: Sequence[CacheMark] = (),
) -> ChatTurn:
    """Write the prompt of a conversation and join the queue.

    Arguments are those of ``turn_request``. Raises: Refused; RequestError.
    """
    made = await turn_request(
        context,
        chat,
        asked,
        max_tokens=max_tokens,
        logprobs=logprobs,
        within_context=within_context,
        num_bytes=num_bytes,
        marks=marks,
    )
    return ChatTurn(context, made.request, made.prompt, made.own_stops)


async def turn_request(
    context: RequestContext,
    chat: ChatInput,
    asked: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    within_context: bool = False,
    num_bytes: int = 0,
    marks: Sequence[CacheMark] = (),
) -> TurnRequest:
    """Write the prompt of a conversation, and make the engine's request.

    ``within_context``: cut ``max_tokens`` to the context instead of refusing it. ``num_bytes``: the
    size of a conversation that is longer than the body. ``marks``: what of it is to be kept in the
    cache, if the request says nothing else of that.

    Raises: Refused; RequestError.
    """
    prompt = await context.in_text_thread(context.service.chat.prompt, chat, num_bytes=num_bytes)
    if not prompt.token_ids:
        raise Refused(
            400, "the chat template writes nothing for these messages: give one of them a text"
        )
    shown: ShownPrompt | None = None
    if prompt.images:
        if asked.truncate_prompt_tokens is not None:
            raise invalid(
                "truncate_prompt_tokens",
                "truncate_prompt_tokens: a prompt with images cannot be cut, for that could be "
                "within one",
            )
        shown = await shown_prompt(context, prompt, chat)
        token_ids = list(shown.token_ids)
    else:
        token_ids = _truncated(context, list(prompt.token_ids), asked, leaves=1)
    room = room_for(context, len(token_ids), None)
    if within_context and max_tokens is not None:
        max_tokens = min(max_tokens, room)
    params = sampling(
        context,
        asked,
        max_tokens=room if max_tokens is None else room_for(context, len(token_ids), max_tokens),
        logprobs=logprobs,
        form=prompt.structured_outputs,
    )
    if params.structured_outputs is not None:
        form = replace(params.structured_outputs, reasoning=prompt.reasoning)
        params = replace(params, structured_outputs=form)
    if prompt.stop and isinstance(asked, Searching) and asked.use_beam_search:
        raise invalid(
            "use_beam_search",
            f"use_beam_search: answers of this model end at a text ({prompt.stop[0][:40]!r}, of "
            "chat_stop_strings in its tokenizer_config.json), and a search looks for none",
        )
    # Of a prompt that is cut, another beginning is left.
    if marks and asked.cache_hint is None and asked.truncate_prompt_tokens is None:
        whole = params.cache_hint  # OpenAI's fields ask for all of a prompt
        kept: tuple[CacheRetention, ...] = (whole,) if isinstance(whole, CacheRetention) else ()
        last = marks[len(kept) - MAX_RETENTIONS :]
        kept += await _retentions(context, prompt, last)
        params = replace(params, cache_hint=kept)
    own_stops = frozenset(prompt.stop) - set(params.stop)
    params = replace(params, stop=(*params.stop, *prompt.stop))
    if asked.skip_special_tokens is None:
        params = replace(params, skip_special_tokens=prompt.skip_special_tokens)
    chosen = searched(asked, params) if isinstance(asked, Searching) else params
    request = await engine_request(context, token_ids if shown is None else shown, chosen, asked)
    return TurnRequest(request=request, prompt=prompt, own_stops=own_stops)


async def _retentions(
    context: RequestContext, prompt: ChatPrompt, marks: Sequence[CacheMark]
) -> tuple[CacheRetention, ...]:
    """Return what of a prompt its marks ask to be kept. Raises: RequestError."""
    found = list[CacheRetention]()
    for mark in marks:
        num_tokens = None
        if mark.beginning is not None:
            count = context.service.chat.num_shared_tokens
            num_tokens = await context.in_text_thread(count, prompt, mark.beginning)
        if num_tokens != 0:
            found.append(CacheRetention(seconds=mark.seconds, num_tokens=num_tokens))
    return tuple(found)


def reasoning_kwargs(effort: str | None) -> dict[str, Any]:
    """Return the template's variables for how much the model is to think, and whether at all."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
