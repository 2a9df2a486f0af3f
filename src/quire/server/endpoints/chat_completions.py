"""``POST /v1/chat/completions``: answer a conversation."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from msgspec import UNSET

from quire.chat.cache_marks import openai_marks
from quire.chat.conversation import ChatInput
from quire.chat.output_events import (
    ArgumentsDelta,
    CallBroken,
    CallStarted,
    ContentDelta,
    Event,
    ReasoningDelta,
    reply,
)
from quire.engine.sequence import TokenLogprobs
from quire.server.endpoints.answers import Json, as_events, as_json
from quire.server.endpoints.generation import (
    ChatTurn,
    OutputPiece,
    TurnRequest,
    one_by_one,
    reasoning_kwargs,
    stop_reason,
    turn_request,
)
from quire.server.endpoints.logprobs import of_chat, of_prompt
from quire.server.request_context import RequestContext
from quire.server.schemas.chat_request import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    FunctionCall,
    Message,
    ToolCall,
)
from quire.server.wire.streams import EventStream


async def chat_completions(
    context: RequestContext, asked: ChatRequest
) -> Json[ChatCompletion] | EventStream[ChatChunk]:
    """Answer a conversation."""
    made = await chat_request(context, asked)
    turn = ChatTurn(context, made.request, made.prompt, made.own_stops)
    answering = _Answering(turn, asked)
    if asked.stream:
        return as_events(context, answering.chunks())
    return as_json(context, await answering.whole())


async def chat_request(context: RequestContext, asked: ChatRequest) -> TurnRequest:
    """Write the prompt, and make the engine's request. Raises: Refused; RequestError."""
    chat = conversation(asked)
    return await turn_request(
        context,
        chat,
        asked,
        max_tokens=asked.max_tokens
        if asked.max_completion_tokens is None
        else asked.max_completion_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        marks=openai_marks(asked.messages, lambda first: replace(chat, messages=first)),
    )


def conversation(asked: ChatRequest) -> ChatInput:
    """Return what of a request concerns the prompt."""
    kwargs = {**reasoning_kwargs(asked.reasoning_effort), **(asked.chat_template_kwargs or {})}
    return ChatInput(
        messages=asked.messages,
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        # A continued message needs no new one.
        add_generation_prompt=not asked.continue_final_message
        if asked.add_generation_prompt is None
        else asked.add_generation_prompt,
        continue_final_message=bool(asked.continue_final_message),
        chat_template_kwargs=kwargs,
        add_special_tokens=bool(asked.add_special_tokens),
    )


class _Answering:
    """The answer to one request."""

    def __init__(self, turn: ChatTurn, asked: ChatRequest) -> None:
        self._turn, self._asked = turn, asked
        self._context, self._service = turn.context, turn.service
        self._model = asked.model or self._service.model_name
        self._shows_reasoning = asked.include_reasoning is not False
        self._shows_ids = bool(asked.return_token_ids)

    async def whole(self) -> ChatCompletion:
        several = await self._turn.gather_pieces()
        choices = await one_by_one(self._choice, several)
        prompt = self._turn.requests[0].prompt_token_ids
        asks_prompt = self._asked.prompt_logprobs is not None
        return ChatCompletion(
            id=f"chatcmpl-{self._context.id}",
            created=self._context.created,
            model=self._model,
            choices=choices,
            usage=await self._turn.whole_usage(),
            prompt_logprobs=of_prompt(self._service.texts, several[0][0].delta.prompt_logprobs)
            if asks_prompt
            else None,
            prompt_token_ids=list(prompt) if self._shows_ids else UNSET,
            kv_transfer_params=self._turn.kv_transfer_params,
        )

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        options = self._asked.stream_options
        every_usage = options is not None and bool(options.continuous_usage_stats)
        begun: set[int] = set()
        async with aclosing(self._turn.pieces()) as pieces:
            async for piece in pieces:
                for choice in self._chunk_choices(piece, is_first=piece.choice not in begun):
                    yield self._chunk([choice], with_usage=every_usage)
                begun.add(piece.choice)
        if options is not None and options.include_usage:
            last = self._chunk([], with_usage=True)
            last.usage = await self._turn.whole_usage()
            yield last

    def _choice(self, index: int, pieces: list[OutputPiece]) -> ChatChoice:
        whole = reply(event for piece in pieces for event in piece.events)
        calls = [
            ToolCall(
                id=call.id,
                type="function",
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for call in whole.calls
        ]
        thoughts = whole.reasoning if self._shows_reasoning and whole.reasoning else UNSET
        ids = [token_id for piece in pieces for token_id in piece.delta.token_ids]
        last = pieces[-1]
        return ChatChoice(
            index=index,
            message=Message(
                role="assistant",
                content=whole.content if calls else whole.content or "",
                reasoning=thoughts,
                reasoning_content=thoughts,
                tool_calls=calls or UNSET,
                refusal=None,
            ),
            logprobs=self._logprobs([own for piece in pieces for own in piece.delta.logprobs]),
            finish_reason=last.finish_reason,
            stop_reason=stop_reason(last.delta),
            token_ids=ids if self._shows_ids else UNSET,
        )

    def _chunk_choices(self, piece: OutputPiece, *, is_first: bool) -> list[ChatChunkChoice]:
        """Return the chunks of a piece: reasoning and content apart, calls one by one."""
        messages = [message for event in piece.events if (message := self._message(event))]
        if not messages and not (is_first or piece.finish_reason or piece.delta.logprobs):
            return []
        messages = messages or [Message()]
        if is_first:
            messages[0].role = "assistant"
            if messages[0].content is UNSET:
                # Clients expect content, if empty, where a text begins.
                is_call = self._turn.prompt.choice.is_forced or messages[0].tool_calls is not UNSET
                messages[0].content = None if is_call else ""
        choices = [ChatChunkChoice(index=piece.choice, delta=message) for message in messages]
        choices[0].logprobs = self._logprobs(piece.delta.logprobs)
        if self._shows_ids:
            choices[0].token_ids = list(piece.delta.token_ids)
        choices[-1].finish_reason = piece.finish_reason
        if piece.finish_reason is not None:
            choices[-1].stop_reason = stop_reason(piece.delta)
        return choices

    def _message(self, event: Event) -> Message | None:
        """Return an event in a client's form; None for an event that clients are not told."""
        match event:
            case ReasoningDelta(text=text):
                if not self._shows_reasoning:
                    return None
                return Message(reasoning=text, reasoning_content=text)
            case ContentDelta(text=text) | CallBroken(text=text):
                return Message(content=text)
            case CallStarted(index=index, id=id, name=name):
                function = FunctionCall(name=name, arguments="")
                return Message(
                    tool_calls=[ToolCall(index=index, id=id, type="function", function=function)]
                )
            case ArgumentsDelta(index=index, text=text):
                return Message(
                    tool_calls=[ToolCall(index=index, function=FunctionCall(arguments=text))]
                )
        return None

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._asked.logprobs or not tokens:
            return None
        return of_chat(
            self._service.texts,
            tokens,
            self._asked.top_logprobs or 0,
            as_ids=bool(self._asked.return_tokens_as_token_ids),
        )

    def _chunk(self, choices: list[ChatChunkChoice], *, with_usage: bool) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._context.id}",
            created=self._context.created,
            model=self._model,
            choices=choices,
            usage=self._turn.usage() if with_usage else UNSET,
            kv_transfer_params=self._turn.kv_transfer_params,
        )
