"""``/v1/completions/render`` and ``/v1/chat/completions/render``: requests as the engine gets them.

A router asks for the token ids of a prompt before it chooses a server. Nothing is computed, and no
place in the queue is taken; everything else is checked as by the paths without ``/render``, in the
same code. Names and shapes of the answers are vLLM's.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from quire.engine.sequence import Request
from quire.sampling_params import SamplingParams
from quire.server.endpoints.answers import Json, as_json
from quire.server.endpoints.chat_completions import chat_request
from quire.server.endpoints.completions import completion_requests
from quire.server.endpoints.generation import refuse_too_much
from quire.server.request_context import RequestContext
from quire.server.schemas.chat_request import ChatRequest
from quire.server.schemas.completion_request import CompletionRequest
from quire.server.schemas.request_fields import GenerationRequest


class RenderedRequest(msgspec.Struct, kw_only=True):
    """A prompt and its parameters. Defaults of the engine are left out of ``sampling_params``."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | None
    priority: int


async def render_completion(
    context: RequestContext, asked: CompletionRequest
) -> Json[list[RenderedRequest]]:
    """Return the token ids of one text or several, as they would be continued."""
    requests = await completion_requests(context, asked)
    refuse_too_much(context, requests)
    name = f"cmpl-{context.id}"
    names = [name] if len(requests) == 1 else [f"{name}-{at}" for at in range(len(requests))]
    rendered = [_rendered(context, *each, asked) for each in zip(names, requests, strict=True)]
    return as_json(context, rendered)


async def render_chat(context: RequestContext, asked: ChatRequest) -> Json[RenderedRequest]:
    """Return the token ids of a conversation, as it would be answered."""
    request = (await chat_request(context, asked)).request
    refuse_too_much(context, [request])
    return as_json(context, _rendered(context, f"chatcmpl-{context.id}", request, asked))


def _rendered(
    context: RequestContext, name: str, request: Request, asked: GenerationRequest
) -> RenderedRequest:
    plain, params = SamplingParams(), dict[str, Any]()
    for own in fields(plain):
        value = getattr(request.params, own.name)
        if value != getattr(plain, own.name):
            params[own.name] = dict(value) if isinstance(value, Mapping) else value
    return RenderedRequest(
        request_id=name,
        token_ids=list(request.prompt_token_ids),
        sampling_params=params,
        model=asked.model or context.service.model_name,
        stream=bool(asked.stream),
        cache_salt=asked.cache_salt,
        priority=request.priority,
    )
