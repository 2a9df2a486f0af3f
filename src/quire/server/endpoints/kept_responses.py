"""``/v1/responses/{id}``: read a response again, list what it answered, cancel or delete it."""

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from quire.server.endpoints.answers import Json, as_json, as_written
from quire.server.request_context import RequestContext
from quire.server.response_store import BackgroundRun, StoredResponse
from quire.server.schemas.response_request import DeletedResponse, ItemList, Response, ResponseEvent
from quire.server.wire.error_responses import Refused, invalid
from quire.server.wire.streams import EventStream

# -- items -----------------------------------------------------------------------------------------


Items: TypeAlias = list[dict[str, Any]]


def given_items(given: str | Items, name: str) -> Items:
    """Return what a client gave, with ids, and messages' content as parts. ``name`` is a prefix."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"{name}_{index}") for index, item in enumerate(given)]


def readable(items: Iterable[dict[str, Any]]) -> Items:
    """Return the items without calls that broke off: they have no result, and no whole JSON."""
    return [
        item
        for item in items
        if not (item.get("type") == "function_call" and item.get("status") == "incomplete")
    ]


def conversation_of(kept: StoredResponse) -> tuple[bytes, ...]:
    """Return all items up to the end of a stored response, as JSON lists."""
    return (*kept.before, encoded(json.loads(kept.response)["output"]))


def encoded(items: Items) -> bytes:
    """Return items as a JSON list."""
    return msgspec.json.encode(items)


def decoded(several: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the items of JSON lists."""
    for items in several:
        yield from json.loads(items)


def _item(item: dict[str, Any], name: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    prefix = "msg" if kind == "message" else "item"
    own = {**item, "type": kind, "id": item.get("id") or f"{prefix}_{name}"}
    if kind == "message" and isinstance(item.get("content"), str):
        text: dict[str, Any] = {"type": "input_text", "text": item["content"]}
        if item.get("role") == "assistant":
            text = {"type": "output_text", "text": item["content"], "annotations": []}
        own["content"] = [text]
    if kind == "message":
        own.setdefault("status", "completed")
    return own


# -- kept responses --------------------------------------------------------------------------------


_MOST_ITEMS, _USUAL_ITEMS = 100, 20


async def response(context: RequestContext) -> Json[Response] | EventStream[ResponseEvent]:
    """Return a response as it is now; with stream=true, the events of one in the background.

    Raises: Refused.
    """
    run, kept = _found(context)
    query = context.http.query_params
    if query.get("stream", "").lower() in ("true", "1"):
        after = context.number("starting_after", -1, -1, 2**31)
        if run is not None and run.keeps_events:
            return as_written(context, run.follow(after))
        if kept is not None and kept.events:
            return as_written(context, _again(kept.events[after + 1 :]))
        raise invalid(
            "stream",
            "this response has no stored events: it was not requested with background=true and "
            "stream=true",
        )
    if run is not None:
        return _as_it_is(context, run.now())
    assert kept is not None, "it runs or it is kept"
    return _as_it_is(context, kept.response)


async def delete(context: RequestContext) -> Json[DeletedResponse]:
    """End a response, if it still runs, and forget it."""
    run, _ = _found(context)
    if run is not None:
        await run.cancel()
    context.service.responses.drop(context.caller.number, _name(context))
    return as_json(context, DeletedResponse(id=_name(context)))


async def cancel(context: RequestContext) -> Json[Response]:
    """End a response now. One that is over stays as it is.

    Raises: Refused.
    """
    run, kept = _found(context)
    if run is not None:
        await run.cancel()
        return _as_it_is(context, run.now())
    assert kept is not None, "it runs or it is kept"
    if not kept.in_background:
        raise invalid(
            "response_id",
            "only a response with background=true can be cancelled: to end another, close its "
            "connection",
        )
    return _as_it_is(context, kept.response)


async def input_items(context: RequestContext) -> Json[ItemList]:
    """Return all items that a response answers, the last ones first.

    Earlier responses' items are among them. Raises: Refused.
    """
    run, kept = _found(context)
    limit = context.number("limit", _USUAL_ITEMS, 1, _MOST_ITEMS)
    order = context.one_of("order", ("desc", "asc"))
    before = run.before if run is not None else kept.before if kept is not None else ()
    items: Items = await context.in_text_thread(list, decoded(before))
    if order == "desc":
        items.reverse()
    after = context.http.query_params.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise invalid("after", f"after={after[:100]!r} is not the id of an item")
        items = items[places[0] + 1 :]
    page = items[:limit]
    return as_json(
        context,
        ItemList(
            data=page,
            first_id=page[0].get("id", "") if page else "",
            last_id=page[-1].get("id", "") if page else "",
            has_more=len(items) > limit,
        ),
    )


def _name(context: RequestContext) -> str:
    name: str = context.http.path_params["name"]
    return name


def _found(context: RequestContext) -> tuple[BackgroundRun | None, StoredResponse | None]:
    """Find a run or a stored response. Another caller's is not found. Raises: Refused (404)."""
    service, caller, name = context.service, context.caller.number, _name(context)
    run = service.background.get(caller, name)
    kept = None if run is not None else service.responses.get(caller, name)
    if run is None and kept is None:
        raise Refused(
            404,
            f"no response {name[:100]!r} is stored here",
            param="response_id",
            code="response_not_found",
        )
    return run, kept


def _as_it_is(context: RequestContext, data: bytes) -> Json[Response]:
    return Json(data, media_type="application/json", headers=context.headers)


async def _again(events: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for event in events:
        yield event
