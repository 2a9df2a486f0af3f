"""``POST /v1/responses``: answer a conversation, whole, in pieces, or without a connection."""

from bisect import bisect_left
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from quire.chat.api_inputs import from_responses
from quire.chat.cache_marks import CacheMark, openai_marks
from quire.chat.conversation import Chat, ChatInput
from quire.chat.plain_json import has_images
from quire.errors import RequestTooLong
from quire.server.endpoints.answers import Json, as_events, as_json, as_written
from quire.server.endpoints.generation import ChatTurn, reasoning_kwargs, take_turn
from quire.server.endpoints.kept_responses import (
    conversation_of,
    decoded,
    encoded,
    given_items,
    readable,
)
from quire.server.endpoints.response_events import Responding
from quire.server.request_context import RequestContext
from quire.server.response_store import BackgroundRun, StoredResponse
from quire.server.schemas.request_fields import JsonSchema, ResponseFormat
from quire.server.schemas.response_request import (
    ReasoningOptions,
    Response,
    ResponseEvent,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)
from quire.server.service import Service
from quire.server.wire.error_responses import Refused, invalid
from quire.server.wire.streams import RESPONSES, EventStream, all_of

_LOGPROBS = "message.output_text.logprobs"


async def responses(
    context: RequestContext, asked: ResponsesRequest
) -> Json[Response] | EventStream[ResponseEvent]:
    """Answer a conversation, whole, in pieces, or while no client is connected.

    Raises: Refused, the error that made a response fail.
    """
    _say_what_is_ignored(context, asked)
    if asked.text is not None and asked.text.format is not None:
        given = asked.text.format
        schema = (
            JsonSchema(schema=given.schema, strict=given.strict)
            if given.schema is not None
            else None
        )
        asked.response_format = ResponseFormat(type=given.type, json_schema=schema)  # type: ignore[arg-type]
    before = (*_continued(context, asked), encoded(given_items(asked.input, context.id)))
    if asked.background:
        return await _in_background(context, asked, before)
    responding = await _responding(context, asked, before)
    if asked.stream:
        return as_events(context, responding.events(), RESPONSES)
    await all_of(context.http.receive, responding.events())
    if responding.error is not None:
        raise responding.error
    return as_json(context, responding.response)


async def _responding(
    context: RequestContext, asked: ResponsesRequest, before: tuple[bytes, ...]
) -> Responding:
    """Return a response that is admitted. Raises: Refused; RequestError."""
    num_top = asked.top_logprobs
    if num_top is None and _LOGPROBS in (asked.include or ()):
        num_top = 0
    num_bytes = sum(map(len, before))
    chat, marks = await context.in_text_thread(
        _conversation, context.service, asked, before, num_bytes=num_bytes
    )
    turn = await take_turn(
        context,
        chat,
        asked,
        max_tokens=asked.max_output_tokens,
        logprobs=num_top,
        num_bytes=num_bytes,
        marks=marks,
    )
    keep = partial(_keep, context, before) if asked.is_kept else _forget
    return Responding(
        turn,
        _response(turn, asked),
        num_top=num_top,
        says_ids=bool(asked.return_tokens_as_token_ids),
        shows_broken=bool(asked.stream),
        end=_forget if asked.background else keep,
    )


async def _in_background(
    context: RequestContext, asked: ResponsesRequest, before: tuple[bytes, ...]
) -> Json[Response] | EventStream[ResponseEvent]:
    """Start a response that runs without its client. Raises: Refused; RequestError."""
    service, caller = context.service, context.caller.number
    service.background.refuse_if_full()
    with ExitStack() as stack:
        own = context.without_client(stack)
        responding = await _responding(own, asked, before)
        response = responding.response

        def now() -> bytes:
            responding.fill()
            return msgspec.json.encode(response)

        def end(run: BackgroundRun) -> None:
            if run.was_cancelled:
                responding.cancel()
            service.background.forget(caller, response.id)
            _keep(own, before, response, tuple(run.events))

        run = BackgroundRun(
            _written(responding),
            stack.pop_all(),
            before=before,
            now=now,
            end=end,
            keeps_events=bool(asked.stream),
        )
        service.background.start(caller, response.id, run)
    if asked.stream:
        return as_written(context, run.follow())
    return as_json(context, response)


async def _written(responding: Responding) -> AsyncGenerator[bytes, None]:
    async with aclosing(responding.events()) as events:
        async for event in events:
            yield RESPONSES.event(event)


# -- what is kept ----------------------------------------------------------------------------------


def _keep(
    context: RequestContext,
    before: tuple[bytes, ...],
    response: Response,
    events: tuple[bytes, ...] = (),
) -> None:
    kept = StoredResponse(
        response=msgspec.json.encode(response),
        before=before,
        events=events,
        in_background=response.background,
    )
    context.service.responses.put(context.caller.number, response.id, kept)


def _forget(_: Response) -> None:
    """Keep nothing: the response is the client's alone."""


def _continued(context: RequestContext, asked: ResponsesRequest) -> tuple[bytes, ...]:
    """Return the items of the conversation that continues. Raises: Refused."""
    name = asked.previous_response_id
    if name is None:
        return ()
    kept = context.service.responses.get(context.caller.number, name)
    if kept is None:
        raise Refused(
            404,
            f"previous_response_id: {name[:100]!r} is not stored, or still runs: give the whole "
            "conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return conversation_of(kept)


# -- from the request's fields ---------------------------------------------------------------------


def _conversation(
    service: Service, asked: ResponsesRequest, before: tuple[bytes, ...]
) -> tuple[ChatInput, list[CacheMark]]:
    """Return what of a request concerns the prompt, and what of it is to be kept in the cache.

    It may take a while. Raises: RequestError.
    """
    effort = None if asked.reasoning is None else asked.reasoning.effort
    kwargs = {**reasoning_kwargs(effort), **(asked.chat_template_kwargs or {})}

    def read(items: Sequence[Mapping[str, Any]]) -> ChatInput:
        chat = from_responses(
            items,
            instructions=asked.instructions,
            tools=asked.tools,
            tool_choice=asked.tool_choice,
            parallel_tool_calls=asked.parallel_tool_calls,
        )
        return replace(chat, chat_template_kwargs=kwargs)

    items = readable(decoded(before))
    chat, marks = read(items), openai_marks(items, read)
    if asked.truncation == "auto":
        if any(has_images(message.get("content")) for message in chat.messages):
            raise invalid(
                "truncation",
                "truncation: a conversation with images is not cut: leave truncation out, and drop "
                "what is not needed",
            )
        most = service.max_model_len - (asked.max_output_tokens or 1)
        num_messages = len(list(chat.messages))
        chat = _shortened(service.chat, chat, most)
        if len(list(chat.messages)) < num_messages:  # what was marked is no beginning of it
            marks = []
    return chat, marks


def _shortened(chat: Chat, asked: ChatInput, most_tokens: int) -> ChatInput:
    """Return as much of the conversation's end as fits, from a user's message on; instructions
    stay.

    Where not even the last turn fits, that one is left and will be refused for its length. It
    renders as often as halving takes. Raises: RequestError.
    """
    messages = list(asked.messages)
    is_user = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not is_user:
        return asked
    head = messages[: is_user[0]]

    def of(start: int) -> ChatInput:
        return replace(asked, messages=[*head, *messages[start:]])

    def fits(start: int) -> bool:
        try:
            return len(chat.prompt(of(start)).token_ids) <= most_tokens
        except RequestTooLong:
            return False

    place = bisect_left(is_user, True, key=fits)
    return of(is_user[min(place, len(is_user) - 1)])


def _response(turn: ChatTurn, asked: ResponsesRequest) -> Response:
    """Return the response as it is before the model has answered."""
    context, params = turn.context, turn.requests[0].params
    text = asked.text or TextConfig()
    return Response(
        id=f"resp_{context.id}",
        created_at=context.created,
        status="queued" if asked.background else "in_progress",
        background=bool(asked.background),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        metadata=asked.metadata or {},
        model=asked.model or context.service.model_name,
        parallel_tool_calls=turn.prompt.parallel,
        previous_response_id=asked.previous_response_id,
        prompt_cache_key=asked.prompt_cache_key,
        reasoning=asked.reasoning or ReasoningOptions(),
        safety_identifier=asked.safety_identifier,
        store=asked.is_kept,
        temperature=params.temperature,
        text=TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice=asked.tool_choice or "auto",
        tools=asked.tools or [],
        top_logprobs=asked.top_logprobs or 0,
        top_p=params.top_p,
        truncation=asked.truncation or "disabled",
        user=asked.user,
    )


def _say_what_is_ignored(context: RequestContext, asked: ResponsesRequest) -> None:
    context.ignore(*(f"include.{name}" for name in asked.include or () if name != _LOGPROBS))
    if asked.reasoning is not None and asked.reasoning.summary is not None:
        context.ignore("reasoning.summary")
    if asked.text is not None and asked.text.verbosity is not None:
        context.ignore("text.verbosity")
    if asked.service_tier not in (None, "auto", "default"):
        context.ignore("service_tier")
