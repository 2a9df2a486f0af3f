"""``tool_choice``: whether the model may call tools, or must; and then a schema for its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.chat.tools.declared import Tool
from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams

# -- json schemas ----------------------------------------------------------------------------------


# Keywords that also say which properties an object may have.
_SAY_MORE = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref"),
        *("allOf", "anyOf", "oneOf", "if"),
    )
)
# Keywords with schemas of other values: one, or a list; or several by name.
_OF_PARTS = frozenset(
    (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties"),
    )
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_NO_SCHEMAS = frozenset(("enum", "const", "default", "examples"))  # even if they look like one


def arguments_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object even if it does not say so.

    The object may have no other members: many clients leave that out, and a small model then adds
    members for ever. ``strict``: the same holds for each object within, as for ``closed``.
    """
    return {"type": "object", **(closed(schema) if strict else _without_others(schema))}


def closed(schema: Any) -> Any:
    """Close each object that names properties, unless it says which others it may have.

    OpenAI's ``strict`` makes its clients write that.

    Raises: RequestError where no text would be left, and for what is nested too deep.
    """
    try:
        return _closed(schema)
    except RecursionError:
        raise RequestError("strict: the schema is nested too deep") from None


def moved(schema: Any, root: str) -> Any:
    """Return a schema for another place: its references within itself move with it."""
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
    # Other keywords, such as if and not, are about the same object and exclude no property.
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


# -- choice ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """How tools are to be called. ``name`` is that of a ``named`` one."""

    kind: Literal["none", "auto", "required", "named"]
    name: str = ""

    @property
    def is_forced(self) -> bool:
        """Return whether a grammar makes the text nothing but calls."""
        return self.kind in ("required", "named")


def allowed(given: Any, tools: Sequence[Tool]) -> tuple[Any, tuple[Tool, ...]]:
    """Return the choice and the tools of OpenAI's ``allowed_tools``.

    Chat completions have it in an object of its own, responses beside the type. Raises:
    RequestError.
    """
    if not isinstance(given, Mapping) or given.get("type") != "allowed_tools":
        return given, tuple(tools)
    own = given.get("allowed_tools", given)
    listed = own.get("tools") if isinstance(own, Mapping) else None
    names = [_name_of(tool) for tool in listed] if isinstance(listed, list) else []
    found = tuple(tool for tool in tools if tool.name in names)
    if not names or len(found) < len(set(names)) or own.get("mode") not in ("auto", "required"):
        raise RequestError(
            "tool_choice: allowed_tools has a mode, auto or required, and names some of the tools"
        )
    return own["mode"], found


def _name_of(tool: Any) -> str:
    own = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return str(own.get("name")) if isinstance(own, Mapping) else ""


def checked_choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Check a word, or OpenAI's object with a name. Raises: RequestError."""
    if given is None:
        return ToolChoice(kind="auto" if tools else "none")
    if given == "none" or (given == "auto" and not tools):
        return ToolChoice(kind="none")
    if isinstance(given, Mapping):
        return _named(given, tools)
    if given not in ("auto", "required"):
        raise RequestError(
            f"tool_choice={str(given)[:60]!r} must be none, auto, required or a function"
        )
    if not tools:
        raise RequestError(f"tool_choice={given} needs tools")
    return ToolChoice(kind="auto" if given == "auto" else "required")


def _named(given: Mapping[str, Any], tools: Sequence[Tool]) -> ToolChoice:
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else given.get("name")
    if given.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice must be {"type": "function", "function": {"name": …}} to name a tool'
        )
    if name not in [tool.name for tool in tools]:
        raise RequestError(f"tool_choice names {name[:60]!r}, which is not among the tools")
    return ToolChoice(kind="named", name=name)


def forced_form(
    choice: ToolChoice, tools: Sequence[Tool], *, parallel: bool
) -> StructuredOutputsParams | None:
    """Return the form that makes the model call; None where it need not.

    The arguments of a named tool, otherwise an array of calls.

    Raises: RequestError for a schema that cannot be written as JSON, or not be closed.
    """
    if not choice.is_forced:
        return None
    if choice.kind == "named":
        (tool,) = (tool for tool in tools if tool.name == choice.name)
        return StructuredOutputsParams(
            json=arguments_schema(tool.parameters, strict=tool.is_strict)
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(tool) for tool in tools]},
        "$defs": {
            tool.name: moved(
                arguments_schema(tool.parameters, strict=tool.is_strict),
                f"#/$defs/{_escaped(tool.name)}",
            )
            for tool in tools
        },
    }
    if not parallel:
        schema["maxItems"] = 1
    return StructuredOutputsParams(json=schema)


def _call(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [tool.name]},
            "parameters": {"$ref": f"#/$defs/{_escaped(tool.name)}"},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _escaped(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
