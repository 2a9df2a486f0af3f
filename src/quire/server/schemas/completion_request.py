"""``/v1/completions``."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from quire.server.schemas.request_fields import NumLogprobs, PromptLogprobs, Searching, TokenUsage

MAX_PROMPTS = 1024

Ids: TypeAlias = list[int]
Prompt: TypeAlias = str | list[str | int | Ids]


class CompletionRequest(Searching, kw_only=True):
    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 16
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token; or why it ended early
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Of a stream, each of its chunks."""

    id: str
    kind: Literal["text_completion"] = field(default="text_completion", name="object")
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET
