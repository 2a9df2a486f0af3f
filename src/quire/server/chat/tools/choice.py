"""``tool_choice``: whether the model may call tools, or must; and then a schema for its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.engine.params import StructuredOutputsParams
from quire.errors import RequestError
from quire.server.chat.json_schemas import arguments_schema, moved
from quire.server.chat.tools.declared import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """``named`` has the tool's ``name``; the others have none."""

    kind: Literal["none", "auto", "required", "named"]
    name: str = ""

    @property
    def is_forced(self) -> bool:
        """Whether the text will be nothing but calls, by a grammar."""
        return self.kind in ("required", "named")


def allowed(given: Any, tools: Sequence[Tool]) -> tuple[Any, tuple[Tool, ...]]:
    """OpenAI's ``allowed_tools``: the choice that its mode is, and the tools that it names.

    Chat completions have it in an object of its own, responses beside the type.
    Raises: RequestError.
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
    """A name, or OpenAI's object with one. Raises: RequestError."""
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
    """The form that makes the model call; None where it need not.

    Of a named tool the text is the arguments, otherwise an array of calls.
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
    """As part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
