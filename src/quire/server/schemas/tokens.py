"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.server.schemas.chat import MAX_MESSAGES, MAX_TOOLS
from quire.server.schemas.fields import Text


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt, or a chat's messages."""

    model: Text | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: Text | None = None
    tokens: Annotated[list[int], Meta(max_length=2**22)]


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """For a client that would have loaded the tokenizer; ``chat_template`` is this server's."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    model_max_length: int
    chat_template: str | None
