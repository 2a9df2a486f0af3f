"""The items of a conversation: what a request brings, and what was kept of it before."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from quire.server.response_store import StoredResponse

Items: TypeAlias = list[dict[str, Any]]


def given_items(given: str | Items, name: str) -> Items:
    """What a client gave, with ids, and the content of messages as parts. ``name`` is a prefix."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"{name}_{index}") for index, item in enumerate(given)]


def readable(items: Iterable[dict[str, Any]]) -> Items:
    """Without calls that broke off: there is no result of them, and no JSON in them."""
    return [
        item
        for item in items
        if not (item.get("type") == "function_call" and item.get("status") == "incomplete")
    ]


def conversation_of(kept: StoredResponse) -> tuple[bytes, ...]:
    """All items up to the end of a kept response, as it keeps them."""
    return (*kept.before, encoded(json.loads(kept.response)["output"]))


def encoded(items: Items) -> bytes:
    return msgspec.json.encode(items)


def decoded(several: Iterable[bytes]) -> Iterator[dict[str, Any]]:
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
