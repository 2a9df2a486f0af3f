"""The tools of a request, checked and bounded."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.chat.plain_json import check_size, plain
from quire.errors import RequestError

MAX_TOOLS = 256
MAX_TOOLS_BYTES = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    declaration: Mapping[str, Any]  # all of it, for the template
    is_strict: bool = False  # OpenAI's strict: all objects within are closed

    def kinds(self, parameter: str) -> frozenset[str] | None:
        """Return the types that a parameter may have, by JSON's names; None if the schema is
        silent.
        """
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _kinds(schema, 4)


def checked_tools(given: Iterable[Any] | None) -> tuple[Tool, ...]:
    """Check a request's tools. Raises: RequestError naming the tool and what is wrong."""
    if given is None:
        return ()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise RequestError("tools must be a list of functions")
    several = list(given)
    if len(several) > MAX_TOOLS:
        raise RequestError(f"tools has {len(several)} functions and may have {MAX_TOOLS}")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(several))
    check_size([tool.declaration for tool in tools], "tools", MAX_TOOLS_BYTES)
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools[{index}] has the name {name!r} again")
    return tools


def _tool(given: Any, where: str) -> Tool:
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object with a type and a function")
    kind = given.get("type", "function")
    if kind != "function":
        raise RequestError(f"{where} is of type {str(kind)[:40]!r}: only functions can be called")
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} has no function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}: the name {str(name)[:60]!r} must be 1 to 128 letters, digits or any of _.:/-"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}: the parameters must be a JSON schema: an object")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{where}: strict={str(strict)[:40]!r} must be true or false")
    declaration = plain(given, where)
    declaration.setdefault("type", "function")
    return Tool(
        name=name,
        parameters=plain(parameters, where),
        declaration=declaration,
        is_strict=bool(strict),
    )


def _kinds(schema: Any, depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(str(one) for one in kind)
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            found = [_kinds(one, depth - 1) for one in schema[several]]
            known = [one for one in found if one is not None]
            return frozenset().union(*known) if len(known) == len(found) else None
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return frozenset(("string",))
    return None
