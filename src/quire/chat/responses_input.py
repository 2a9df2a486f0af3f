"""Items of the Responses interface as the plain messages that templates know.

What is one message here may be several items there: reasoning, calls and text of an assistant.
"""

from collections.abc import Mapping
from typing import Any

from quire.chat.conversation import ChatInput
from quire.chat.plain_json import Message, plain, text_of, tool_message
from quire.errors import RequestError


def from_responses(body: Mapping[str, Any]) -> ChatInput:
    """Of a request to ``/v1/responses`` what concerns the conversation. Raises: RequestError."""
    messages: list[Message] = []
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise RequestError("instructions must be a string")
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list | tuple) and given:
        names: dict[str, str] = {}
        for index, item in enumerate(given):
            _add(messages, item, f"input[{index}]", names)
    else:
        raise RequestError("input must be a string, or a list with at least one item")
    return ChatInput(
        messages=messages,
        tools=_tools(body.get("tools")),
        tool_choice=body.get("tool_choice"),
        parallel_tool_calls=body.get("parallel_tool_calls"),
    )


def _add(messages: list[Message], item: Any, where: str, names: dict[str, str]) -> None:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} must be an object")
    kind = item.get("type", "message")
    match kind:
        case "message":
            _add_message(messages, item, where)
        case "reasoning":
            messages.append({"role": "assistant", "content": "", **_reasoning(item, where)})
        case "function_call":
            _add_call(messages, item, where, names)
        case "function_call_output":
            identity = item.get("call_id")
            if not isinstance(identity, str):
                raise RequestError(f"{where} has no call_id")
            messages.append(tool_message(identity, item.get("output"), f"{where}.output", names))
        case _:
            raise RequestError(f"{where} is of type {str(kind)[:40]!r}, which cannot be read here")


def _add_message(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where} has no role")
    content = text_of(item.get("content"), f"{where}.content")
    if content is None:
        raise RequestError(f"{where} has no content")
    last = messages[-1] if messages else {}
    is_rest = last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last
    if role == "assistant" and is_rest:  # of a message whose reasoning was an item of its own
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_call(
    messages: list[Message], item: Mapping[str, Any], where: str, names: dict[str, str]
) -> None:
    identity, name = item.get("call_id"), item.get("name")
    if not isinstance(identity, str) or not isinstance(name, str):
        raise RequestError(f"{where} must have a call_id and a name")
    names[identity] = name
    function = {"name": name, "arguments": plain(item.get("arguments"), where) or {}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": identity, "type": "function", "function": function})


def _reasoning(item: Mapping[str, Any], where: str) -> Message:
    """The text of it, or its summary."""
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list | tuple) and parts:
            texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
            if not all(isinstance(text, str) for text in texts):
                raise RequestError(f"{where}.{field} must be a list of parts with a text")
            return {"reasoning_content": "\n".join(map(str, texts))}
    return {}


def _tools(given: Any) -> list[dict[str, Any]] | None:
    """Theirs have the function's fields beside the type; other types are refused further on."""
    if given is None:
        return None
    if not isinstance(given, list | tuple):
        raise RequestError("tools must be a list")
    tools = []
    for tool in given:
        if isinstance(tool, Mapping) and tool.get("type") == "function" and "function" not in tool:
            fields = {key: value for key, value in tool.items() if key != "type"}
            tools.append({"type": "function", "function": fields})
        else:
            tools.append(tool)
    return tools
