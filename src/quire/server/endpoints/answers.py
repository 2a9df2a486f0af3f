"""Answers: JSON at once, or events as they come."""

import logging
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response

from quire.server.logs import place_of
from quire.server.request_context import RequestContext
from quire.server.wire.error_responses import refusal
from quire.server.wire.streams import COMPLETIONS, EventForm, EventStream

log = logging.getLogger(__name__)

T = TypeVar("T")


class Json(Response, Generic[T]):
    """An answer of a ``T`` in JSON."""


def as_json(context: RequestContext, answer: T) -> Json[T]:
    """Return an answer in JSON."""
    return Json(msgspec.json.encode(answer), media_type="application/json", headers=context.headers)


def as_events(
    context: RequestContext, chunks: AsyncGenerator[T, None], form: EventForm = COMPLETIONS
) -> EventStream[T]:
    """Return a stream in which each chunk is an event, as is an error on the way."""
    return as_written(context, _events(chunks, form), ping=form.ping)


def as_written(
    context: RequestContext, events: AsyncGenerator[bytes, None], *, ping: bytes = b""
) -> EventStream[Any]:
    """Return a stream of events that are bytes already."""
    return EventStream(
        events,
        send_timeout_s=context.service.config.send_timeout,
        headers=context.headers,
        ping=ping,
    )


async def _events(
    chunks: AsyncGenerator[object, None], form: EventForm
) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield form.event(chunk)
    except Exception as error:
        refused = refusal(error)
        if refused.status == 500:  # 503: the server ends it on purpose
            log.error("a stream ended early: %s", place_of(error))
        yield form.error(refused)
    finally:
        await chunks.aclose()
    if form.end:
        yield form.end
