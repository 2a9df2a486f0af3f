"""Harmony, the format of gpt-oss: messages with a channel, some of which are calls.

``<|start|>assistant<|channel|>analysis<|message|>…<|end|>`` is reasoning, the channel ``final`` has
the answer, and ``commentary`` has text before calls, and the calls themselves:
``to=functions.NAME``, in whichever part of the header. The prompt has begun the first header.
Source: the format's description in openai/harmony, and gpt-oss' template.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.chat.lexer import Broken, IncrementalLexer, Reading
from quire.chat.output_events import Events
from quire.chat.tools.declared import Tool
from quire.chat.tools.json_objects import called
from quire.chat.tools.tool_format import ToolFormat

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_FUNCTIONS = "functions."
_MOST_OF_A_HEADER = 512  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What precedes a message: empty where the header says nothing."""

    channel: str = ""
    recipient: str = ""

    @property
    def is_answer(self) -> bool:
        """Return whether the message is for the user, not for the model or one of its tools."""
        return not self.recipient and self.channel in ("", "final", "commentary")

    def function(self, tools: Mapping[str, Tool]) -> str:
        """Return the request's tool that the message calls; empty if it calls none."""
        is_function = self.recipient.startswith(_FUNCTIONS) and bool(tools)
        name = self.recipient.removeprefix(_FUNCTIONS)
        return name if is_function or name in tools else ""


def read(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """Read all of a text. Messages of one kind are joined with line ends."""
    messages = _Messages(lexer, out)
    while (yield from lexer.peek()):
        header = yield from _header(lexer)
        if isinstance(header, str):
            yield from messages.read(is_answer=True, begun=header)
        elif name := header.function(tools):
            yield from _call(lexer, out, name)
        else:
            yield from messages.read(is_answer=header.is_answer)


def read_thoughts(lexer: IncrementalLexer, out: Events) -> Reading[None]:
    """Read the messages of reasoning, and the header of the next message."""
    messages = _Messages(lexer, out)
    while (yield from lexer.peek()):
        header = yield from _header(lexer)
        if isinstance(header, str) or header.is_answer or header.recipient:
            return
        yield from messages.read(is_answer=False)


class _Messages:
    def __init__(self, lexer: IncrementalLexer, out: Events) -> None:
        self._lexer, self._out = lexer, out
        self._have_come: set[bool] = set()

    def read(self, *, is_answer: bool, begun: str = "") -> Reading[None]:
        """A message's text, up to a mark."""
        is_mark = yield from self._lexer.starts(*_MARKS)
        if not begun and (is_mark or not (yield from self._lexer.peek())):
            return
        put = self._out.content if is_answer else self._out.reasoning
        put(("\n" if is_answer in self._have_come else "") + begun)
        self._have_come.add(is_answer)
        yield from self._lexer.upto(*_MARKS, put=put)
        (self._out.end_of_content if is_answer else self._out.end_of_reasoning)()


def _header(lexer: IncrementalLexer) -> Reading[Header | str]:
    """Read the next message's header with its marks; or return the text where there is none.

    A header that ends without a message is dropped. One that is too long is text.
    """
    parts: dict[str, str] = {}
    part, length, is_begun = "", 0, False
    while True:
        if not is_begun:
            yield from lexer.blanks()
        mark = yield from lexer.starts(*_MARKS)
        if mark is None:
            is_text = not is_begun and not (yield from lexer.starts("to="))
            if is_text or not (yield from lexer.peek()):
                return ""
            if length == _MOST_OF_A_HEADER:
                return parts.get(part, "")
            parts[part] = parts.get(part, "") + lexer.take(1)
            length, is_begun = length + 1, True
            continue
        lexer.take(len(mark))
        if mark == MESSAGE:
            words = f"{parts.get('', '')} {parts.get(CHANNEL, '')}".split()
            to = (word.removeprefix("to=") for word in words if word.startswith("to="))
            channel = parts.get(CHANNEL, "").split()
            return Header(channel=channel[0] if channel else "", recipient=next(to, ""))
        if mark in (CHANNEL, CONSTRAIN):
            part, is_begun = mark, True
        else:  # another message begins, or can begin
            parts, part, length, is_begun = {}, "", 0, mark == START


def _call(lexer: IncrementalLexer, out: Events, name: str) -> Reading[None]:
    """Read a message with arguments: JSON, or nothing. A mark ends it, even within a string."""
    body = IncrementalLexer()
    body.record()
    reading = _arguments(body, out, name)
    is_over = False

    def more(text: str) -> None:
        nonlocal is_over
        if not is_over:
            body.add(text)
            is_over = next(reading, True) is True

    try:
        mark = yield from lexer.upto(*_MARKS, put=more, must_come=True)
        body.end(cut=mark is None and lexer.breaks_off)
        more("")
    except Broken:
        if body.breaks_off:
            out.cut()
        else:
            body.rest()
            out.give_up(body.recorded())
    if lexer.breaks_off:
        lexer.drop()
    yield from lexer.upto(*_MARKS, put=out.content)


def _arguments(body: IncrementalLexer, out: Events, name: str) -> Reading[None]:
    yield from body.blanks()
    if (yield from body.peek()):
        yield from called(body, out, name)
    elif body.breaks_off:
        return
    else:
        out.start(name)
        out.arguments("{}")
    out.end()


HARMONY = ToolFormat(opens=(), calls=read, marks=_MARKS, stop=(CALL, RETURN), is_all=True)
