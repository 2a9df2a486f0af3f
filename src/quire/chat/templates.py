"""From messages to the text of a prompt, by the operator's template or the model's.

A template runs under the limits of ``template_sandbox.py``; a client sends none. The text has its
beginning-of-sequence token where the template writes one, so the tokenizer adds none.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from jinja2 import Template, TemplateSyntaxError

from quire.chat.plain_json import Message, VideoAddress, check_size, parts_of, plain, text_of
from quire.chat.template_sandbox import Sandbox, TemplateLimits, syntax_error
from quire.errors import ConfigError, RequestError

# -- messages --------------------------------------------------------------------------------------


# Names of a message's reasoning; templates read the first one first.
_REASONING = ("reasoning_content", "reasoning", "thinking")


def checked_messages(messages: Iterable[Any], images: list[Any] | None = None) -> list[Message]:
    """Check messages and return copies for a template.

    Content is text or absent, or a list of parts where it has images: their addresses are added to
    ``images``, without which they are refused. A tool call's arguments are an object, null fields
    are left out, and reasoning has the names that templates read. Other fields stay as they are.
    The template decides which roles there are, and in what order.

    Raises: RequestError naming the message and what is wrong.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError("messages must be a list of objects with a role")
    found = [_message(given, f"messages[{index}]", images) for index, given in enumerate(messages)]
    if not found:
        raise RequestError("messages is empty: give at least one message")
    return found


def _message(given: Any, where: str, images: list[Any] | None) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object with a role, not {type(given).__name__}")
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} has no role")
    others = {key: value for key, value in given.items() if key not in ("content", "tool_calls")}
    message: Message = {
        key: value for key, value in plain(others, where).items() if value is not None
    }
    said = given.get("content"), f"{where}.content"
    content = text_of(*said) if images is None else parts_of(*said, images)
    if content is not None:
        message["content"] = content
    calls = given.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise RequestError(f"{where}.tool_calls must be a list")
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
        # Some templates ask for the content of every message.
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
    """Return a tool call with its arguments, which clients write as text, as an object."""
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
    """Turn arguments into text, for templates that write them as they are."""
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
    """Split text from calls, for templates that want no text beside reasoning and calls, as
    gpt-oss'.
    """
    found: list[Message] = []
    for message in messages:
        if "tool_calls" in message and message.get("content") and "reasoning_content" in message:
            found.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": ""}
        found.append(message)
    return found


def with_parts(messages: list[Message]) -> list[Message]:
    """Turn content into a list of parts, for templates that read nothing else."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


def with_placeholders(messages: list[Message], placeholders: Mapping[str, str]) -> list[Message]:
    """Turn images, or videos, into text, for templates that do not know them.

    ``placeholders``: by kind. Parts that are all text become one.
    """
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": _written(message["content"], placeholders)}
        for message in messages
    ]


def _written(parts: list[dict[str, Any]], placeholders: Mapping[str, str]) -> Any:
    found = [
        {"type": "text", "text": placeholders[part["type"]]}
        if part["type"] in placeholders
        else part
        for part in parts
    ]
    if all(part["type"] == "text" for part in found):
        return "\n".join(part["text"] for part in found)
    return found


# -- templates -------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_MAX_KWARGS_BYTES = 64 * 1024
# Variables that a request sets by other fields, or not at all.
_RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "conversation", "chat_template", "tokenize", "self"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation", "kwargs"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("sanitize_control_tokens", "tokenizer", "tokenizer_kwargs"),
        *("range", "namespace", "dict", "raise_exception", "strftime_now"),
    )
)
NO_PLACEHOLDERS: Mapping[str, str] = MappingProxyType({})
_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
_CONTINUES = "\ufdd0continues\ufdd1"  # noncharacters, which no text has
_TRIAL = "needle"


@final
class ChatTemplate:
    """A model's way to write a conversation down. Any thread may render.

    ``template`` is the operator's, a file or the text itself; without one the tokenizer's is used,
    and where that has none every rendering is refused. ``placeholders`` are what a prompt says
    where an "image" goes, and where a "video" goes; without one they are refused.

    Raises: ConfigError where the file cannot be read, or a template is no Jinja.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | Path | None = None,
        *,
        limits: TemplateLimits | None = None,
        placeholders: Mapping[str, str] = NO_PLACEHOLDERS,
    ) -> None:
        self._placeholders = {kind: text for kind, text in placeholders.items() if text}
        self._special_tokens = _special_tokens(tokenizer)
        self._sandbox = Sandbox(limits or TemplateLimits())
        self._sources = _sources(tokenizer, template)
        self._templates = {
            name: self._compile(name, source) for name, source in self._sources.items()
        }
        self._wants_text_arguments = self._wants_parts = self._wants_texts_apart = False
        self._places: set[str] = set()  # the kinds that the template writes
        if self._templates:
            self._try_out()

    @property
    def source(self) -> str:
        """Return the text of all templates, to look for marks in it; empty without any."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Iterable[Any],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        images: list[Any] | None = None,
    ) -> str:
        """Return the prompt.

        It may take as long as the limit says, so no event loop may call it. ``kwargs`` are further
        variables of the template. ``images`` receives the addresses of the messages' images.

        Raises: RequestError for messages or variables that cannot be, a template that is missing or
        was stopped, and messages that the template rejects.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot be combined: set one of "
                "them to false"
            )
        if not self._templates:
            raise RequestError(
                "this model has no chat template: start the server with --chat-template, a file "
                "or the template itself, or use /v1/completions"
            )
        checked = checked_messages(messages, images if self._placeholders else None)
        shows_videos = any(isinstance(each, VideoAddress) for each in images or ())
        if shows_videos and "video" not in self._placeholders:
            raise RequestError(
                "video_url: this model takes no videos: send some of its frames as images"
            )
        names = self._names(kwargs)
        if continue_final_message:
            checked[-1] = _open_ended(checked[-1])
        variables = {
            **names,
            "messages": self._shaped(checked),
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        text = self._sandbox.render(self._templates[name], variables)
        if not continue_final_message:
            return text
        end = text.rfind(_CONTINUES)
        if end < 0:
            raise RequestError(
                "continue_final_message: the chat template leaves the last message out"
            )
        return text[:end]

    def _names(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a client's variables and the special tokens. Raises: RequestError."""
        given = plain(kwargs or {}, "chat_template_kwargs")
        if not isinstance(given, dict):
            raise RequestError("chat_template_kwargs must be an object")
        check_size(given, "chat_template_kwargs", _MAX_KWARGS_BYTES)
        for name in given:
            if name in _RESERVED or name in self._special_tokens or not name.isidentifier():
                raise RequestError(
                    f"chat_template_kwargs cannot set {name[:60]!r}: it takes only names of the "
                    "template's own, such as enable_thinking"
                )
        return {**self._special_tokens, **given}

    def _compile(self, name: str, source: str) -> Template:
        try:
            return self._sandbox.template(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template ({name}) is not a Jinja template: {syntax_error(error)}; "
                "--chat-template takes another one"
            ) from error
        except Exception as error:  # from Jinja's compiler: nested too deep, too large a number
            raise ConfigError(
                f"the chat template ({name}) cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _shaped(self, messages: list[Message]) -> list[Message]:
        if self._wants_texts_apart:
            messages = with_texts_apart(messages)
        if self._wants_text_arguments:
            messages = with_arguments_as_text(messages)
        missing = {
            kind: placeholder
            for kind, placeholder in self._placeholders.items()
            if kind not in self._places
        }
        messages = with_placeholders(messages, missing)
        return with_parts(messages) if self._wants_parts else messages

    def _try_out(self) -> None:
        """Find in which form this template takes content, a call's arguments, and text beside a
        call.
        """
        message = {"role": "user", "content": _TRIAL}
        self._wants_parts = not self._shows([message]) and self._shows(with_parts([message]))
        for kind, placeholder in self._placeholders.items():
            parts = [{"type": kind}, {"type": "text", "text": "?"}]
            shown = {"role": "user", "content": parts}
            if self._shows([shown], placeholder):
                self._places.add(kind)
        function = {"name": "f", "arguments": {"a": _TRIAL}}
        call = {"id": "call00000", "type": "function", "function": function}
        spoken: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "!", "tool_call_id": "call00000", "name": "f"},
        ]
        if self._wants_parts:
            spoken = with_parts(spoken)
        self._wants_text_arguments = not self._shows(spoken) and self._shows(
            with_arguments_as_text(spoken)
        )
        spoken[1] |= {"content": "?", "thinking": "?", "reasoning_content": "?"}
        self._wants_texts_apart = not self._wants_parts and (
            not self._shows(self._shaped(spoken))
            and self._shows(self._shaped(with_texts_apart(spoken)))
        )

    def _shows(self, messages: list[Message], text: str = _TRIAL) -> bool:
        """Return whether a text is in the prompt."""
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        template = self._templates.get("tool_use") or self._templates["default"]
        try:
            return text in self._sandbox.render(template, variables)
        except RequestError:
            return False


def stop_strings(tokenizer: Any) -> tuple[str, ...]:
    """Return the strings at which answers of a model without an end token end.

    They are ``chat_stop_strings`` of its tokenizer_config.json.
    """
    init = getattr(tokenizer, "init_kwargs", None) or {}
    return tuple(str(text) for text in init.get("chat_stop_strings", ()))


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    """Return ``bos_token`` and the like, which templates write."""
    given = getattr(tokenizer, "special_tokens_map", None) or {}
    return {name: str(token) for name, token in given.items() if not isinstance(token, list)}


def _sources(tokenizer: Any, template: str | Path | None) -> dict[str, str]:
    """Return templates by name; a model may have one for tools. Raises: ConfigError."""
    if template is not None:
        return {"default": _read(template)}
    own = getattr(tokenizer, "chat_template", None)
    if not own:
        return {}
    found = {"default": own} if isinstance(own, str) else {str(k): str(v) for k, v in own.items()}
    if "default" not in found:
        raise ConfigError(
            f"the tokenizer's chat templates are {', '.join(found)}, and none is the default: "
            "choose one with --chat-template"
        )
    return found


def _read(template: str | Path) -> str:
    """Read a template. Braces or line ends tell a text from a file's name, as in vLLM."""
    if isinstance(template, str) and any(sign in template for sign in "{}\n"):
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"--chat-template {str(template)[:200]}: {error}") from error


def _open_ended(message: Message) -> Message:
    """Return the last message with a mark where the model is to continue."""
    content = message.get("content")
    if not isinstance(content, str) or message.get("tool_calls"):
        raise RequestError("continue_final_message: the last message has no text to continue")
    return {**message, "content": content + _CONTINUES}
