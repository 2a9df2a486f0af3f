"""``/v1/responses``."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from quire.server.schemas.chat_request import MAX_MESSAGES, MAX_TOOLS, ChatLogprob
from quire.server.schemas.request_fields import (
    Count,
    FormatType,
    GenerationRequest,
    KVTransferParams,
    NumLogprobs,
    Text,
    refuse_several,
)
from quire.server.wire.error_responses import invalid

Items: TypeAlias = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
Label: TypeAlias = Annotated[str, Meta(max_length=512)]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)
]
_FORMATS: tuple[str, ...] = get_args(FormatType)
# All of OpenAI's; most belong to tools that this server does not run.
Include: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
]


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Text | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: Text | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(GenerationRequest, kw_only=True):
    input: str | Items
    instructions: str | None = None
    previous_response_id: Text | None = None
    max_output_tokens: Count | None = None  # what the context leaves
    max_tool_calls: Count | None = None  # of tools that a server runs; this one runs none
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    include: Annotated[list[Include], Meta(max_length=32)] | None = None
    top_logprobs: NumLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    service_tier: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: Any = None  # refused
    prompt: Any = None  # refused

    @property
    def is_kept(self) -> bool:
        """Whether the response can be asked for again."""
        return self.store is not False

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        refuse_several(self)
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise invalid(name, f"{name}: this server stores none: give input items instead")
        if self.background and not self.is_kept:
            raise invalid(
                "store",
                "background=true needs store=true: a response that is not stored cannot be found",
            )
        for index, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function":
                raise invalid(
                    "tools",
                    f"tools[{index}] is of type {str(tool.get('type'))[:60]!r}, which this server "
                    "does not run: give functions",
                )
        given = None if self.text is None else self.text.format
        if given is not None and given.type not in _FORMATS:
            raise invalid(
                "text.format",
                f"text.format: the type {given.type[:60]!r} must be one of {', '.join(_FORMATS)}",
            )
        if given is not None and given.type == "json_schema" and given.schema is None:
            raise invalid("text.format", "text.format: type json_schema needs a schema")


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought, in full: this server writes no summary."""

    id: str
    status: str
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText]


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


Item: TypeAlias = MessageItem | ReasoningItem | CallItem
Part: TypeAlias = OutputText | ReasoningText


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    id: str
    kind: Literal["response"] = field(default="response", name="object")
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event; it has those of these fields that belong to its type."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: Part | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ItemList(msgspec.Struct, kw_only=True):
    kind: Literal["list"] = field(default="list", name="object")
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    kind: Literal["response"] = field(default="response", name="object")
    deleted: bool = True
