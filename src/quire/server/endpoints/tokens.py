"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.chat.conversation import ChatInput
from quire.server.endpoints.answers import Json, as_json
from quire.server.pictures import chat_token_ids
from quire.server.request_context import RequestContext
from quire.server.schemas.chat_request import MAX_MESSAGES, MAX_TOOLS
from quire.server.schemas.request_fields import ModelRequest
from quire.server.wire.error_responses import Refused, invalid

# -- requests and answers --------------------------------------------------------------------------


class TokenizeRequest(ModelRequest, kw_only=True):
    """A prompt, or a chat's messages."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either prompt or messages")


class DetokenizeRequest(ModelRequest, kw_only=True):
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


# -- tokens ----------------------------------------------------------------------------------------


async def tokenize(context: RequestContext, asked: TokenizeRequest) -> Json[Tokens]:
    """Return the tokens of a text, or of a chat's prompt."""
    service = context.service
    if asked.messages is not None:
        conversation = ChatInput(
            messages=asked.messages,
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            chat_template_kwargs=asked.chat_template_kwargs or {},
            add_special_tokens=bool(asked.add_special_tokens),
        )
        token_ids = list(await chat_token_ids(context, conversation))
    else:
        special = asked.add_special_tokens is not False
        encode = partial(service.texts.encode, asked.prompt or "", add_special_tokens=special)
        token_ids = await context.in_text_thread(encode)
    texts = service.texts
    return as_json(
        context,
        Tokens(
            count=len(token_ids),
            max_model_len=service.max_model_len,
            tokens=token_ids,
            token_strs=[texts.of(i)[0] for i in token_ids] if asked.return_token_strs else None,
        ),
    )


async def detokenize(context: RequestContext, asked: DetokenizeRequest) -> Json[Detokenized]:
    """Return the text of tokens.

    Raises: Refused for ids beyond the vocabulary.
    """
    service = context.service
    known = service.engine.facts.vocab_size
    for token_id in (min(asked.tokens, default=0), max(asked.tokens, default=0)):
        if not 0 <= token_id < known:
            raise invalid(
                "tokens", f"token id {token_id} is not in the vocabulary, from 0 to {known - 1:,}"
            )
    text = await context.in_text_thread(service.texts.text_of, asked.tokens)
    return as_json(context, Detokenized(prompt=text))


async def tokenizer_info(context: RequestContext) -> Json[TokenizerInfo]:
    """Return what a client needs to know that has no tokenizer.

    Raises: Refused.
    """
    service = context.service
    tokenizer = service.engine.facts.tokenizer
    if tokenizer is None:
        raise Refused(404, "this model has no tokenizer")
    return as_json(
        context,
        TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            unk_token=tokenizer.unk_token,
            model_max_length=service.max_model_len,
            chat_template=service.chat.template.source or None,
        ),
    )
