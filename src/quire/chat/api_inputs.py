"""Anthropic's messages and the Responses interface's items, as messages that templates know."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from quire.chat.conversation import ChatInput
from quire.chat.plain_json import Message, content_of, plain, text_of, tool_message
from quire.errors import RequestError

# -- Anthropic's messages --------------------------------------------------------------------------


_CHOICES = (("auto", "auto"), ("any", "required"), ("none", "none"))


def from_anthropic(
    messages: Sequence[Mapping[str, Any]],
    *,
    system: Any = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
) -> ChatInput:
    """Return the conversation of a request to ``/v1/messages``.

    An assistant's message at the end is continued. Raises: RequestError.
    """
    found: list[Message] = []
    if instructions := text_of(system, "system"):
        found.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        found += _messages(message, f"messages[{index}]", names)
    choice, parallel = _choice(tool_choice)
    continues = found[-1]["role"] == "assistant" and not found[-1].get("tool_calls")
    return ChatInput(
        messages=found,
        tools=None if tools is None else [*map(_tool, count(), tools)],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _messages(given: Mapping[str, Any], where: str, names: dict[str, str]) -> list[Message]:
    """Translate one message. ``names``: the tools called so far, by the call's id."""
    role = given.get("role")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}: the role {str(role)[:40]!r} must be user or assistant")
    content = given.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where}.content must be a string or a list of blocks")
    if role == "assistant":
        return [_assistant(content, f"{where}.content", names)]
    found: list[Message] = []
    texts: list[Any] = []
    for index, block in enumerate(content):
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            if texts:
                found.append({"role": role, "content": content_of(texts, f"{where}.content")})
                texts = []
            found.append(_result(block, f"{where}.content[{index}]", names))
        else:
            texts.append(block)
    if texts or not found:
        found.append({"role": role, "content": content_of(texts, f"{where}.content") or ""})
    return found


def _assistant(blocks: Any, where: str, names: dict[str, str]) -> Message:
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            call = plain(block, f"{where}[{index}]")
            identity, name = call.get("id"), call.get("name")
            if not isinstance(identity, str) or not isinstance(name, str):
                raise RequestError(f"{where}[{index}] must have an id and a name")
            names[identity] = name
            function = {"name": name, "arguments": call.get("input") or {}}
            calls.append({"id": identity, "type": "function", "function": function})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":  # other models cannot read it
            texts.append(block)
    message: Message = {"role": "assistant", "content": content_of(texts, where) or ""}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _result(block: Mapping[str, Any], where: str, names: dict[str, str]) -> Message:
    identity = block.get("tool_use_id")
    if not isinstance(identity, str):
        raise RequestError(f"{where} has no tool_use_id")
    return tool_message(identity, block.get("content"), f"{where}.content", names)


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(f"tools[{index}] must be a tool with a name and an input_schema")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(given: Any) -> tuple[Any, bool | None]:
    """Return ``tool_choice`` in OpenAI's words, and whether several calls may come,
    if it says so.
    """
    if given is None:
        return None, None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "tool":
        choice: Any = {"type": "function", "function": {"name": given.get("name")}}
    else:
        choice = next((ours for theirs, ours in _CHOICES if theirs == kind), None)
        if choice is None:
            raise RequestError("tool_choice must have the type auto, any, tool or none")
    alone = given.get("disable_parallel_tool_use")
    return choice, None if alone is None else not alone


# -- items of the Responses interface --------------------------------------------------------------


def from_responses(
    items: Sequence[Mapping[str, Any]],
    *,
    instructions: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
) -> ChatInput:
    """Return the conversation of a request to ``/v1/responses``.

    One message here may be several items there: an assistant's reasoning, calls and text.

    Raises: RequestError.
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]", names)
    return ChatInput(
        messages=messages,
        tools=None if tools is None else [*map(_function_tool, tools)],
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
    )


def _add(
    messages: list[Message], item: Mapping[str, Any], where: str, names: dict[str, str]
) -> None:
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
            raise RequestError(f"{where}: the type {str(kind)[:40]!r} is not supported")


def _add_message(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where} has no role")
    content = content_of(item.get("content"), f"{where}.content")
    if content is None:
        raise RequestError(f"{where} has no content")
    last = messages[-1] if messages else {}
    is_rest = last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last
    if role == "assistant" and is_rest:  # its reasoning was an item of its own
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
    """Return the reasoning's text, or its summary."""
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list | tuple) and parts:
            texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
            if not all(isinstance(text, str) for text in texts):
                raise RequestError(f"{where}.{field} must be a list of parts with a text")
            return {"reasoning_content": "\n".join(map(str, texts))}
    return {}


def _function_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put a function's fields into an object of their own. Other types are refused later."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
