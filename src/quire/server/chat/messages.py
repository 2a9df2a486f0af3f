"""OpenAI's messages as templates want them: plain, their content one text, arguments as objects.

Which roles there are, and in what order they may come, is for the template to say.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quire.errors import RequestError
from quire.server.chat.plain import Message, plain, text_of

# What a message's reasoning has been called, the name that templates read first.
_REASONING = ("reasoning_content", "reasoning", "thinking")


def checked_messages(messages: Iterable[Any]) -> list[Message]:
    """Copies that a template may be given.

    Content is text or absent, a tool call's arguments are an object, what is null is left out, and
    reasoning has the names that templates know it by. Other fields stay as they are.
    Raises: RequestError naming the message and what is wrong with it.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError("messages must be a list of objects with a role")
    found = [_message(given, f"messages[{index}]") for index, given in enumerate(messages)]
    if not found:
        raise RequestError("messages is empty: give at least one message")
    return found


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object with a role, not {type(given).__name__}")
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} has no role")
    others = {key: value for key, value in given.items() if key not in ("content", "tool_calls")}
    message: Message = {
        key: value for key, value in plain(others, where).items() if value is not None
    }
    content = text_of(given.get("content"), f"{where}.content")
    if content is not None:
        message["content"] = content
    calls = given.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise RequestError(f"{where}.tool_calls must be a list")
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
        # Templates that ask for the content of every message are given one.
        message.setdefault("content", "")
    elif content is None and role != "assistant":
        raise RequestError(f"{where} has no content")
    else:
        message.setdefault("content", "")
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _call(given: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments, which clients write as text, are an object."""
    call: Any = plain(given, where)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments is not JSON: {error}") from error
        plain(arguments, f"{where}.function.arguments")  # no deeper than the rest may be
    if arguments is not None and not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments must be a JSON object")
    call["function"] = {**function, "arguments": arguments or {}}
    call.setdefault("type", "function")
    return dict(call)


def with_arguments_as_text(messages: list[Message]) -> list[Message]:
    """For templates that put a call's arguments into the prompt as they are."""
    return [
        {
            **message,
            "tool_calls": [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def with_texts_apart(messages: list[Message]) -> list[Message]:
    """For templates that take no text beside reasoning in a message with calls, as gpt-oss'."""
    found: list[Message] = []
    for message in messages:
        if "tool_calls" in message and message.get("content") and "reasoning_content" in message:
            found.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": ""}
        found.append(message)
    return found


def with_parts(messages: list[Message]) -> list[Message]:
    """For templates that take no text as content, only a list of parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
