"""JSON schemas that say more than their writers do: which other members an object may have.

A grammar lets a model write whatever a schema does not exclude, and a small one does so for ever.
"""

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError

# What else in a schema says which properties an object may have.
_SAY_MORE = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref"),
        *("allOf", "anyOf", "oneOf", "if"),
    )
)
# Schemas of other values than the object itself; one, or a list of them; or several by name.
_OF_PARTS = frozenset(
    (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties"),
    )
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_NO_SCHEMAS = frozenset(("enum", "const", "default", "examples"))  # whatever they look like


def arguments_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Of a tool's arguments, which are an object, whether or not the schema says it.

    It is closed: many clients leave out that there are no others than those that it names, or
    take it out. ``strict``: so is each object within, as ``closed`` does, and raises.
    """
    return {"type": "object", **(closed(schema) if strict else _without_others(schema))}


def closed(schema: Any) -> Any:
    """Each object that names properties may have no others, unless it says which.

    That is what OpenAI's ``strict`` has its clients write.
    Raises: RequestError where no text would be left, and for what is nested too deep.
    """
    try:
        return _closed(schema)
    except RecursionError:
        raise RequestError("strict: the schema is nested too deep") from None


def moved(schema: Any, root: str) -> Any:
    """A schema for another place: what it refers to within itself moves with it."""
    if isinstance(schema, list):
        return [moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    own = dict(schema)
    for keyword, inner in schema.items():
        if keyword == "$ref" and isinstance(inner, str) and inner.startswith("#"):
            own[keyword] = root + inner[1:]
        elif keyword in _BY_NAME and isinstance(inner, Mapping):
            own[keyword] = {name: moved(each, root) for name, each in inner.items()}
        elif keyword not in _NO_SCHEMAS:
            own[keyword] = moved(inner, root)
    return own


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise RequestError(
            "strict: a schema with allOf of several cannot be closed, as each would exclude what "
            "the others name: write them as one, or leave strict out"
        )
    # Others, such as if and not, say more of the same object, and exclude no property by that.
    parts = _OF_PARTS if "properties" in schema else _OF_PARTS | {"anyOf", "oneOf", "allOf"}
    own = dict(schema)
    for keyword, inner in schema.items():
        if keyword in _BY_NAME and isinstance(inner, Mapping):
            own[keyword] = {name: _closed(each) for name, each in inner.items()}
        elif keyword in parts:
            own[keyword] = _closed(inner)
    return _without_others(own)


def _without_others(schema: Mapping[str, Any]) -> dict[str, Any]:
    may_have_others = _SAY_MORE & schema.keys() or "properties" not in schema
    return {**schema, **({} if may_have_others else {"additionalProperties": False})}
