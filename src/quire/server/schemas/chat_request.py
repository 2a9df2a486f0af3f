"""``/v1/chat/completions``."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from quire.server.schemas.request_fields import (
    Count,
    KVTransferParams,
    NumLogprobs,
    PromptLogprobs,
    Searching,
    Text,
    TokenUsage,
)
from quire.server.wire.error_responses import invalid

MAX_MESSAGES = 4096
MAX_TOOLS = 256


class ChatRequest(Searching, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None  # what the context leaves
    max_tokens: Count | None = None  # its former name
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs=true")


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool call. In a stream its first part has the id and the name, the others
    have arguments.
    """

    index: int | UnsetType = UNSET  # only in streams
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True):
    """An answer; in a stream, what is new of it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET  # its former name
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: str | UnsetType | None = UNSET


class LikelyToken(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(LikelyToken, kw_only=True):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each token."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    kind: Literal["chat.completion"] = field(default="chat.completion", name="object")
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    kind: Literal["chat.completion.chunk"] = field(default="chat.completion.chunk", name="object")
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
