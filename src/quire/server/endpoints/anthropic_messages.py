"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: conversations as in Anthropic's API."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.chat.api_inputs import from_anthropic
from quire.chat.cache_marks import TTL_S, anthropic_marks
from quire.chat.conversation import ChatInput
from quire.server.endpoints.answer_blocks import Begun, Block, Blocks, Change, Grown
from quire.server.endpoints.answers import Json, as_events, as_json
from quire.server.endpoints.generation import (
    ChatTurn,
    OutputPiece,
    reasoning_kwargs,
    take_turn,
)
from quire.server.pictures import chat_token_ids
from quire.server.request_context import RequestContext
from quire.server.schemas.chat_request import MAX_MESSAGES, MAX_TOOLS
from quire.server.schemas.request_fields import (
    Count,
    GenerationRequest,
    JsonSchema,
    ModelRequest,
    ResponseFormat,
    Text,
    refuse_several,
)
from quire.server.wire.error_responses import Refused, invalid
from quire.server.wire.streams import MESSAGES, EventStream

# -- requests and answers --------------------------------------------------------------------------


Objects: TypeAlias = list[dict[str, Any]]
System: TypeAlias = str | Annotated[Objects, Meta(max_length=MAX_MESSAGES)]
Turns: TypeAlias = Annotated[Objects, Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools: TypeAlias = Annotated[Objects, Meta(max_length=MAX_TOOLS)]


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Text | None = None
    format: OutputFormat | None = None


def _refuse_tools_of_others(tools: list[dict[str, object]] | None) -> None:
    """Refuse tools that Anthropic runs, and this server does not. Raises: Refused."""
    for index, tool in enumerate(tools or ()):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise invalid(
                "tools",
                f"tools[{index}] is of type {str(kind)[:60]!r}, which this server does not "
                "run: give tools with a name and an input_schema",
            )


class MessagesRequest(GenerationRequest, kw_only=True):
    messages: Turns
    max_tokens: Count
    system: System | None = None
    stop_sequences: Annotated[list[Text], Meta(max_length=64)] | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # of the last block
    metadata: dict[str, Any] | None = None  # ignored: for the client's own records
    chat_template_kwargs: dict[str, Any] | None = None

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        refuse_several(self)
        _refuse_tools_of_others(self.tools)


class CountTokensRequest(ModelRequest, kw_only=True):
    """What of a request concerns the prompt."""

    messages: Turns
    system: System | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        _refuse_tools_of_others(self.tools)


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning. This server signs none, and checks no signature that comes back."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class CacheCreation(msgspec.Struct, kw_only=True):
    """Tokens that the cache keeps for a while and had not, by the time that was asked for."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens. A prompt has those of the three fields of input together; none of them costs."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStart(msgspec.Struct, kw_only=True):
    type: Literal["message_start"] = "message_start"
    message: AnthropicMessage


class BlockStart(msgspec.Struct, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ContentBlock


class Delta(msgspec.Struct, kw_only=True):
    """What is new of a block, in the one field that ``type`` names."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class BlockDelta(msgspec.Struct, kw_only=True):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Delta


class BlockStop(msgspec.Struct, kw_only=True):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class Stop(msgspec.Struct, kw_only=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True):
    type: Literal["message_delta"] = "message_delta"
    delta: Stop
    usage: MessageUsage


class MessageStop(msgspec.Struct, kw_only=True):
    type: Literal["message_stop"] = "message_stop"


class Ping(msgspec.Struct, kw_only=True):
    """An empty event, so that no proxy takes the stream for dead."""

    type: Literal["ping"] = "ping"


MessageEvent: TypeAlias = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
)


class CountedTokens(msgspec.Struct, kw_only=True):
    input_tokens: int


# -- messages --------------------------------------------------------------------------------------


async def messages(
    context: RequestContext, asked: MessagesRequest
) -> Json[AnthropicMessage] | EventStream[MessageEvent]:
    """Answer a conversation, as Anthropic does."""
    if asked.thinking is not None and asked.thinking.budget_tokens is not None:
        context.ignore("thinking.budget_tokens")
    if asked.stop_sequences:
        asked.stop = asked.stop_sequences
    if asked.output_config is not None and asked.output_config.format is not None:
        schema = JsonSchema(schema=asked.output_config.format.schema)
        asked.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    # Clients ask for more than a small context has, and are told where it ended.
    turn = await take_turn(
        context,
        _conversation(asked),
        asked,
        max_tokens=asked.max_tokens,
        within_context=True,
        marks=anthropic_marks(
            asked.messages, system=asked.system, tools=asked.tools, whole=asked.cache_control
        ),
    )
    answering = _AnsweringMessages(turn, asked)
    if asked.stream:
        return as_events(context, answering.events(), MESSAGES)
    return as_json(context, await answering.whole())


async def count_tokens(context: RequestContext, asked: CountTokensRequest) -> Json[CountedTokens]:
    """Count the tokens of a prompt."""
    token_ids = await chat_token_ids(context, _conversation(asked))
    return as_json(context, CountedTokens(input_tokens=len(token_ids)))


def _conversation(asked: MessagesRequest | CountTokensRequest) -> ChatInput:
    """Return what of a request concerns the prompt. Raises: RequestError."""
    chat = from_anthropic(
        asked.messages, system=asked.system, tools=asked.tools, tool_choice=asked.tool_choice
    )
    kwargs = dict(asked.chat_template_kwargs or {})
    if asked.thinking is not None:
        kwargs.setdefault("enable_thinking", asked.thinking.type != "disabled")
    effort = None if asked.output_config is None else asked.output_config.effort
    return replace(chat, chat_template_kwargs={**reasoning_kwargs(effort), **kwargs})


def so_far(arguments: str) -> str:
    """Close an object that breaks off, without the member in which it does."""
    closing = ""
    found = "{}"
    in_string = escaped = False
    for place, letter in enumerate(arguments):
        if in_string:
            in_string = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            closing = ("}" if letter == "{" else "]") + closing
            found = arguments[: place + 1] + closing
        elif letter in "}]":
            closing = closing[1:]
            found = arguments[: place + 1] + closing
        elif letter == ",":
            found = arguments[:place] + closing
    return found


class _AnsweringMessages:
    """The answer to one request."""

    def __init__(self, turn: ChatTurn, asked: MessagesRequest) -> None:
        self._turn, self._asked, self._context = turn, asked, turn.context
        self._blocks = Blocks()
        thinking = asked.thinking
        self._omits_thoughts = thinking is not None and thinking.display == "omitted"

    async def whole(self) -> AnthropicMessage:
        (pieces,) = await self._turn.gather_pieces()
        for piece in pieces:
            self._blocks.add(piece.events)
        stop = self._end(pieces[-1])[1]
        message = self._message()
        # The text of a broken call is a block of its own.
        shown = [block for block in self._blocks.all if not block.given_up]
        message.content = [self._content(block, block.text) for block in shown]
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        return message

    async def events(self) -> AsyncGenerator[MessageEvent, None]:
        """Yield the events, from the first piece on: before it the cached tokens are not known."""
        has_begun = False
        async with aclosing(self._turn.pieces()) as pieces:
            async for piece in pieces:
                if not has_begun:
                    has_begun = True
                    yield MessageStart(message=self._message(output_tokens=0))
                for change in self._blocks.add(piece.events):
                    for event in self._events(change):
                        yield event
                if piece.finish_reason is not None:
                    changes, stop = self._end(piece)
                    for change in changes:
                        for event in self._events(change):
                            yield event
                    yield MessageDelta(delta=stop, usage=self._usage())
                    yield MessageStop()

    def _events(self, change: Change) -> list[BlockStart | BlockDelta | BlockStop]:
        block = change.block
        if isinstance(change, Begun):
            return [BlockStart(index=block.index, content_block=self._content(block, ""))]
        if isinstance(change, Grown):
            delta = self._delta(block, change.text)
            return [] if delta is None else [BlockDelta(index=block.index, delta=delta)]
        last: list[BlockStart | BlockDelta | BlockStop] = [BlockStop(index=block.index)]
        if block.kind == "reasoning":
            signature = Delta(type="signature_delta", signature="")
            last.insert(0, BlockDelta(index=block.index, delta=signature))
        return last

    def _delta(self, block: Block, text: str) -> Delta | None:
        match block.kind:
            case "reasoning":
                if self._omits_thoughts:
                    return None
                return Delta(type="thinking_delta", thinking=text)
            case "text":
                return Delta(type="text_delta", text=text)
            case "call":
                return Delta(type="input_json_delta", partial_json=text)

    def _content(self, block: Block, text: str) -> ContentBlock:
        """Return the block with this text."""
        match block.kind:
            case "reasoning":
                return ThinkingBlock(thinking="" if self._omits_thoughts else text)
            case "text":
                return TextBlock(text=text)
            case "call":
                arguments = json.loads(text if block.is_whole else so_far(text)) if text else {}
                return ToolUseBlock(id=block.call_id, name=block.name, input=arguments)

    def _end(self, last: OutputPiece) -> tuple[list[Change], Stop]:
        """Return the last changes and why the answer ends. Raises: Refused for an answer that only
        the server has ended.
        """
        reason, stopped_by = last.finish_reason, last.delta.stopped_by
        changes = self._blocks.end(is_whole=reason != "length")
        if reason == "length":
            is_all = self._turn.completion_tokens >= self._asked.max_tokens
            said = "max_tokens" if is_all else "model_context_window_exceeded"
            return changes, Stop(stop_reason=said, stop_sequence=None)
        if reason not in ("stop", "tool_calls"):
            raise Refused(503, last.delta.detail or "the server has ended this answer")
        if self._blocks.num_calls:
            return changes, Stop(stop_reason="tool_use", stop_sequence=None)
        if isinstance(stopped_by, str):
            return changes, Stop(stop_reason="stop_sequence", stop_sequence=stopped_by)
        return changes, Stop(stop_reason="end_turn", stop_sequence=None)

    def _message(self, *, output_tokens: int | None = None) -> AnthropicMessage:
        usage = self._usage()
        if output_tokens is not None:
            usage.output_tokens = output_tokens
        return AnthropicMessage(
            id=f"msg_{self._context.id}",
            model=self._asked.model or self._context.service.model_name,
            content=[],
            usage=usage,
        )

    def _usage(self) -> MessageUsage:
        turn = self._turn
        cached, created = turn.cached_tokens, turn.cache_write_tokens
        # The longest of these beginnings has the others in it.
        longer = (
            num_tokens
            for num_tokens, seconds in turn.requests[0].retained_tokens
            if seconds > TTL_S["5m"]
        )
        in_1h = min(created, max(0, max(longer, default=0) - cached))
        return MessageUsage(
            input_tokens=turn.prompt_tokens - cached - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=created - in_1h, ephemeral_1h_input_tokens=in_1h
            ),
            output_tokens=turn.completion_tokens,
        )
