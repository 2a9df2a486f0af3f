"""Where a conversation says that its beginning is to be kept in the prefix cache.

Anthropic's clients mark blocks of tools, system and messages with ``cache_control``, OpenAI's parts
of messages with ``prompt_cache_breakpoint``: what comes before the end of such a block will be
asked for again. How many tokens that is, only the template and the tokenizer know:
``Chat.num_shared_tokens``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from quire.chat.api_inputs import from_anthropic
from quire.chat.conversation import ChatInput
from quire.errors import RequestError
from quire.sampling_params import MAX_RETENTIONS

TTL_S: Final = MappingProxyType({"5m": 300.0, "1h": 3600.0})
BREAKPOINT_S: Final = MappingProxyType({"30m": 1800.0, "12h": 43_200.0})
_DEFAULT_BREAKPOINT = "30m"
_DEFAULT_TTL = "5m"
Objects = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMark:
    """The beginning of a conversation that is to be kept, and for how long."""

    seconds: float
    beginning: ChatInput | None  # None: all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How much of a request comes before the end of a marked block; None: all of them."""

    tools: int | None = None
    system: int | None = None  # blocks
    messages: int = 0  # whole ones
    blocks: int = 0  # of the message after those


def anthropic_marks(
    messages: Objects, *, system: Any = None, tools: Objects | None = None, whole: Any = None
) -> list[CacheMark]:
    """Find the marks of a request to ``/v1/messages``, in the order of the prompt.

    ``whole``: the request's own ``cache_control``, which is for its last block. Raises:
    RequestError for a mark that is none, or for too many.
    """
    found = [*_cuts(messages, system, tools)]
    if whole is not None:
        found.append((_ttl(whole, "cache_control"), None))
    if len(found) > MAX_RETENTIONS:  # before any is read as a conversation, which takes long
        raise RequestError(
            f"cache_control is on {len(found)} blocks: a request may mark {MAX_RETENTIONS} of them"
        )
    return [
        CacheMark(
            seconds=seconds,
            beginning=None if cut is None else _beginning(cut, messages, system, tools),
        )
        for seconds, cut in found
    ]


def openai_marks(
    messages: Objects, read: Callable[[list[Mapping[str, Any]]], ChatInput]
) -> list[CacheMark]:
    """Find the marks of a chat's messages or of a response's items, in the order of the prompt.

    Where more are marked than a request may keep, the last ones count: a client marks each turn
    anew. ``read`` makes a conversation of the first messages. Raises: RequestError.
    """
    found = [
        (index, place, seconds)
        for index, message in enumerate(messages)
        for place, seconds in _breakpoints(message, f"[{index}].content")
    ]
    marks = list[CacheMark]()
    for index, place, seconds in found[-MAX_RETENTIONS:]:
        is_end = index == len(messages) - 1 and place == len(messages[index]["content"])
        beginning = None if is_end else read(_first(messages, index, place))
        marks.append(CacheMark(seconds=seconds, beginning=beginning))
    return marks


def _breakpoints(message: Any, where: str) -> Iterator[tuple[int, float]]:
    """Yield after how many parts of a message a mark is, and its seconds. Raises: RequestError."""
    content = message.get("content") if isinstance(message, Mapping) else None
    for index, part in enumerate(_blocks(content)):
        given = part.get("prompt_cache_breakpoint") if isinstance(part, Mapping) else None
        if given is None:
            continue
        mode = given.get("mode") if isinstance(given, Mapping) else None
        ttl = given.get("ttl") if isinstance(given, Mapping) else None
        ttl = _DEFAULT_BREAKPOINT if ttl is None else ttl
        if mode != "explicit" or not isinstance(ttl, str) or ttl not in BREAKPOINT_S:
            raise RequestError(
                f"{where}[{index}].prompt_cache_breakpoint must be an object with the mode "
                f"explicit and, if wanted, a ttl, {' or '.join(BREAKPOINT_S)}"
            )
        yield index + 1, BREAKPOINT_S[ttl]


def _cuts(
    messages: Objects, system: Any, tools: Objects | None
) -> Iterator[tuple[float, _Cut | None]]:
    """Yield the seconds of each mark on a block, and where it is; None: at the end of all."""
    for index, tool in enumerate(tools or ()):
        if (seconds := _seconds(tool, f"tools[{index}]")) is not None:
            # Most templates write the instructions before the tools.
            yield seconds, _Cut(tools=index + 1)
    for index, block in enumerate(_blocks(system)):
        if (seconds := _seconds(block, f"system[{index}]")) is not None:
            yield seconds, _Cut(system=index + 1)
    last = len(messages) - 1
    for index, message in enumerate(messages):
        content: Any = message.get("content")
        for place, seconds in _of_content(content, f"messages[{index}].content"):
            is_end = index == last and place == len(content)
            yield seconds, None if is_end else _Cut(messages=index, blocks=place)


def _beginning(cut: _Cut, messages: Objects, system: Any, tools: Objects | None) -> ChatInput:
    return from_anthropic(
        # No conversation is without a message; the template's text of this one is not counted.
        _first(messages, cut.messages, cut.blocks) or [{"role": "user", "content": ""}],
        system=system if cut.system is None else system[: cut.system],
        tools=tools if cut.tools is None else (tools or ())[: cut.tools],
    )


def _first(messages: Objects, count: int, blocks: int) -> list[Mapping[str, Any]]:
    """List the first messages, and of the one after them the first blocks."""
    first = [*messages[:count]]
    if blocks:
        message = messages[count]
        first.append({**message, "content": message["content"][:blocks]})
    return first


def _blocks(content: Any) -> Sequence[Any]:
    """List the blocks of a content; a text has none."""
    return content if isinstance(content, list | tuple) else ()


def _of_content(content: Any, where: str) -> Iterator[tuple[int, float]]:
    """Yield after how many blocks of a message a mark is, and its seconds."""
    for index, block in enumerate(_blocks(content)):
        own = _seconds(block, f"{where}[{index}]")
        inner = block.get("content") if isinstance(block, Mapping) else None
        for place, each in enumerate(_blocks(inner)):  # of a tool's result, which holds no other
            if (seconds := _seconds(each, f"{where}[{index}].content[{place}]")) is not None:
                own = max(own or 0, seconds)
        if own is not None:
            yield index + 1, own


def _seconds(block: Any, where: str) -> float | None:
    given = block.get("cache_control") if isinstance(block, Mapping) else None
    return None if given is None else _ttl(given, f"{where}.cache_control")


def _ttl(given: Any, where: str) -> float:
    """Return the seconds of a mark. Raises: RequestError."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    ttl = given.get("ttl", _DEFAULT_TTL) if isinstance(given, Mapping) else None
    if kind != "ephemeral" or not isinstance(ttl, str) or ttl not in TTL_S:
        raise RequestError(
            f"{where} must be an object with the type ephemeral and, if wanted, a ttl, "
            f"{' or '.join(TTL_S)}"
        )
    return TTL_S[ttl]
