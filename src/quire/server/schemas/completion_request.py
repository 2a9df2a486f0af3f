"""``/v1/completions``."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from quire.server.schemas.request_fields import (
    KVTransferParams,
    NumLogprobs,
    PromptLogprobs,
    Searching,
    TokenUsage,
)
from quire.server.wire.error_responses import invalid

MAX_PROMPTS = 1024

Ids: TypeAlias = list[int]
Prompt: TypeAlias = str | list[str | int | Ids]


def prompts_of(given: Prompt, name: str) -> list[str | list[int]]:
    """Return one text, one list of token ids, or several of either, as a list of prompts. Raises:
    Refused naming the field ``name``.
    """
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    several = [item for item in given if isinstance(item, str | list)]
    if not given or len(several) < len(given):
        raise invalid(
            name, f"{name} must be a text, a list of token ids, or a list of texts or of such lists"
        )
    if len(several) > MAX_PROMPTS:
        raise invalid(name, f"{name} has {len(several):,} texts and may have {MAX_PROMPTS:,}")
    return several


class CompletionRequest(Searching, kw_only=True):
    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 16
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        if self.suffix:
            raise invalid("suffix", "suffix: this server only continues texts")
        prompts_of(self.prompt, "prompt")


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token, or why the text ended early
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """An answer; in a stream, each of its chunks."""

    id: str
    kind: Literal["text_completion"] = field(default="text_completion", name="object")
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
