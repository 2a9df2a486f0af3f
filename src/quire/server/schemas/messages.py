"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.schemas.chat import MAX_MESSAGES, MAX_TOOLS
from quire.server.schemas.fields import Asked, Count, Text

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


class MessagesRequest(Asked, kw_only=True):
    messages: Turns
    max_tokens: Count
    system: System | None = None
    stop_sequences: Annotated[list[Text], Meta(max_length=64)] | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None  # for the client's own books
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What of it concerns the prompt."""

    model: Text | None = None
    messages: Turns
    system: System | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """This server signs no thoughts, and checks none that come back."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens. All of a prompt's are ``input_tokens`` and ``cache_read_input_tokens`` together."""

    input_tokens: int
    cache_creation_input_tokens: int | None = None  # no client asks or pays for that here
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct, kw_only=True):
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
    message: Message


class BlockStart(msgspec.Struct, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ContentBlock


class Delta(msgspec.Struct, kw_only=True):
    """What is new of a block: of these fields one, the one that ``type`` names."""

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
    """Nothing, so that no proxy takes the stream for dead."""

    type: Literal["ping"] = "ping"


MessageEvent: TypeAlias = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
)


class CountedTokens(msgspec.Struct, kw_only=True):
    input_tokens: int
