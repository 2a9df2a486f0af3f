"""The OpenAPI document, made from the operations and the structs that they take and give.

Source: OpenAPI 3.1.1, https://spec.openapis.org/oas/v3.1.1.html
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from quire.server.api_keys import Access
from quire.server.routes import Operation
from quire.server.schemas.request_fields import Upload
from quire.server.wire.error_responses import AnthropicErrorAnswer, Dialect, ErrorAnswer
from quire.version import VERSION

Json: TypeAlias = dict[str, Any]

_ERRORS: Mapping[Dialect, type[msgspec.Struct]] = MappingProxyType(
    {"openai": ErrorAnswer, "anthropic": AnthropicErrorAnswer}
)
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_TEXT: Mapping[str, str] = MappingProxyType({"type": "string"})
_HEADERS: Mapping[str, Json] = MappingProxyType(
    {
        "x-request-id": {
            "description": "the client's own, if it sent one; else the server's",
            "schema": {"type": "string"},
        },
        "x-ignored-fields": {
            "description": "names in the body that mean nothing here, with commas between them",
            "schema": {"type": "string"},
        },
        "retry-after": {
            "description": "seconds after which it is worth asking again",
            "schema": {"type": "integer", "minimum": 1},
        },
    }
)


def document(
    operations: Sequence[Operation], *, needs_key: Callable[[Access], bool], root_path: str
) -> Json:
    """Return the OpenAPI document.

    ``needs_key``: whether a caller without a key is refused where that access is needed.
    ``root_path`` precedes all paths.
    """
    taken = _unique(each.takes for each in operations if each.takes is not None)
    given = _unique(kind for each in operations for kind in (*each.gives, *each.streams))
    kinds = _unique((*taken, *given, *(_ERRORS[each.dialect] for each in operations)))
    refs, schemas = _schemas(kinds, taken)
    paths: dict[str, Json] = {}
    for each in operations:
        item = paths.setdefault(_PARAMETER.sub(r"{\1}", each.path), {})
        for method in each.methods:
            item[method.lower()] = _operation(each, method, refs, needs_key=needs_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": VERSION,
            "description": "OpenAI's API, with vLLM's fields, and Anthropic's messages.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": {name: dict(header) for name, header in _HEADERS.items()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _schemas(
    kinds: Sequence[type[msgspec.Struct]], taken: Sequence[type[msgspec.Struct]]
) -> tuple[dict[Any, Json], Json]:
    """Return a reference to each kind, and the schemas by name."""
    template = "#/components/schemas/{name}"
    found, schemas = msgspec.json.schema_components(kinds, ref_template=template)
    _, of_requests = msgspec.json.schema_components(taken, ref_template=template)
    for name in schemas.keys() - of_requests.keys():
        _require_what_is_always_sent(schemas[name])
    for kind in taken:
        if issubclass(kind, Upload):  # base64 in JSON, raw bytes in a form
            schemas[kind.__name__]["properties"]["file"]["contentEncoding"] = "binary"
    return dict(zip(kinds, found, strict=True)), schemas


def _require_what_is_always_sent(schema: Json) -> None:
    """Mark fields with a default as required: answers have them. Optional ones have no default."""
    fields = schema.get("properties", {})
    required = set(schema.get("required", ()))
    schema["required"] = [
        name for name, own in fields.items() if name in required or "default" in own
    ]


def _operation(
    each: Operation, method: str, refs: Mapping[Any, Json], *, needs_key: Callable[[Access], bool]
) -> Json:
    said: Json = {
        "operationId": _id(each, method),
        "summary": (each.endpoint.__doc__ or each.name).strip().split("\n")[0],
        "responses": {
            "200": _answer(each, refs),
            **{str(status): _refusal(each, status, refs) for status in each.errors},
        },
    }
    if parameters := [
        *(_parameter(name, "path") for name in _PARAMETER.findall(each.path)),
        *(_parameter(name, "query") for name in each.queries),
    ]:
        said["parameters"] = parameters
    if each.takes is not None:
        kind = "multipart/form-data" if each.is_form else "application/json"
        content = {kind: {"schema": refs[each.takes]}}
        said["requestBody"] = {"required": True, "content": content}
    if each.access != "open":
        keys: list[Json] = [{"bearer": []}, {"x-api-key": []}]
        said["security"] = keys if needs_key(each.access) else [*keys, {}]
    return said


def _parameter(name: str, place: str) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": dict(_TEXT)}


def _id(each: Operation, method: str) -> str:
    """Return a unique name, which programs made from the document give the operation."""
    words = re.findall(r"\w+", _PARAMETER.sub(r"by \1", each.path))
    return "_".join((method.lower(), *(words or ["root"])))


def _answer(each: Operation, refs: Mapping[Any, Json]) -> Json:
    content: Json = {}
    if each.gives:
        content["application/json"] = {"schema": _any_of([refs[kind] for kind in each.gives])}
    if each.streams:
        events = [*(refs[kind] for kind in each.streams), refs[_ERRORS[each.dialect]]]
        named = all("type" in kind.__struct_fields__ for kind in each.streams)
        content["text/event-stream"] = {"schema": _event(events, named=named)}
    if each.media_type is not None:
        is_text = each.media_type not in ("application/json", "text/event-stream")
        content[each.media_type] = {"schema": dict(_TEXT) if is_text else {"type": "object"}}
    headers = ["x-request-id", *(["x-ignored-fields"] if each.takes is not None else [])]
    answer: Json = {"description": "done", "headers": _headers(headers)}
    return {**answer, "content": content} if content else answer


def _event(kinds: list[Json], *, named: bool) -> Json:
    """Return the schema of one event of a stream. Its data is JSON, except a last [DONE]."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _any_of(kinds),
    }
    if named:
        properties: Json = {"event": dict(_TEXT), "data": data}
    else:
        properties = {"data": {"anyOf": [{"const": "[DONE]"}, data]}}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _refusal(each: Operation, status: int, refs: Mapping[Any, Json]) -> Json:
    headers = ["retry-after"] if status in (429, 503) else []
    return {
        "description": HTTPStatus(status).phrase.lower(),
        "headers": _headers(headers),
        "content": {"application/json": {"schema": refs[_ERRORS[each.dialect]]}},
    }


def _headers(names: Iterable[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _any_of(schemas: list[Json]) -> Json:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _unique(kinds: Iterable[type[msgspec.Struct]]) -> tuple[type[msgspec.Struct], ...]:
    return tuple(dict.fromkeys(kinds))
