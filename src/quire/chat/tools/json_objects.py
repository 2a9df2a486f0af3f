"""Calls that are JSON objects with a name and arguments: Hermes, Llama 3, Granite, Phi 4."""

import json
from collections.abc import Container, Mapping

from quire.chat.lexer import Broken, IncrementalLexer, Reading
from quire.chat.output_events import Events
from quire.chat.tools.declared import Tool
from quire.chat.tools.tool_format import ToolFormat

_ARGUMENTS = ("arguments", "parameters")


def call_object(
    lexer: IncrementalLexer, out: Events, known: Container[str] | None = None
) -> Reading[None]:
    """Read one call. ``known``: the names that it may have, where only the name tells it from text.

    The call begins with its name; from then on its arguments are streamed. Raises: Broken.
    """
    yield from lexer.expect("{")
    name: str | None = None
    arguments: str | None = None
    has_arguments = False
    while True:
        yield from lexer.blanks()
        key = yield from lexer.string()
        yield from lexer.blanks()
        yield from lexer.expect(":")
        yield from lexer.blanks()
        if key == "name":
            if name is not None:
                raise Broken
            name = yield from _name(lexer, known)
            out.start(name)
            out.arguments(arguments or "")
        elif key in _ARGUMENTS:
            if has_arguments:
                raise Broken
            has_arguments = True
            if name is None:
                arguments = yield from _arguments_text(lexer)
            else:
                yield from _arguments(lexer, out)
        else:  # an id or a type, which is not needed
            yield from lexer.text_value()
        if not (yield from lexer.comes(",")):
            break
    yield from lexer.expect("}")
    if name is None:
        raise Broken
    if not has_arguments:
        out.arguments("{}")
    out.end()


def called(
    lexer: IncrementalLexer, out: Events, name: str, given_id: str | None = None
) -> Reading[None]:
    """Begin a call by that name and read its arguments. Raises: Broken."""
    if (yield from lexer.peek()) not in ("{", '"', "n"):
        raise Broken
    out.start(name, given_id)
    yield from _arguments(lexer, out)


def _arguments(lexer: IncrementalLexer, out: Events) -> Reading[None]:
    """Read the arguments of the open call. Raises: Broken."""
    if (yield from lexer.peek()) == "{":
        yield from lexer.value(out.arguments)
    else:
        out.arguments((yield from _arguments_text(lexer)))


def _arguments_text(lexer: IncrementalLexer) -> Reading[str]:
    """Read a JSON object, which some models write as a string, or null. Raises: Broken."""
    first = yield from lexer.peek()
    if first == "{":
        return (yield from lexer.text_value())
    if first == '"':
        return _within((yield from lexer.string()))
    yield from lexer.expect("null")
    return "{}"


def _within(text: str) -> str:
    inner = IncrementalLexer()
    inner.add(text.strip())
    inner.end()
    pieces: list[str] = []
    try:
        for _ in inner.value(pieces.append):
            raise AssertionError("an ended lexer waits for nothing")
    except Broken:
        pieces = []
    found = "".join(pieces)
    if not found.startswith("{") or len(found) < len(text.strip()):
        raise Broken
    return found


def _name(lexer: IncrementalLexer, known: Container[str] | None) -> Reading[str]:
    name = yield from lexer.string()
    if not name or (known is not None and name not in known):
        raise Broken
    return name


def call_list(lexer: IncrementalLexer, out: Events) -> Reading[None]:
    """Read a JSON array of calls, maybe empty. Raises: Broken."""
    yield from lexer.expect("[")
    if (yield from lexer.comes("]")):
        return
    while True:
        yield from lexer.blanks()
        yield from call_object(lexer, out)
        lexer.record()  # from here on a failure is behind the call, not in it
        if not (yield from lexer.comes(",")):
            yield from lexer.expect("]")
            return


def marked(*opens: str, closes: str) -> ToolFormat:
    """Return the format of an object behind a mark, or an array of objects.

    ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` is Qwen2.5's, and
    ``<|tool_call|>[{"name": …, "arguments": {…}}, …]`` Granite 3's. Phi-4-mini was trained for an
    array in ``<|tool_call|>`` and ``<|/tool_call|>``; vLLM's template asks it for ``functools[…]``.
    Source: the models' templates, vLLM's for Phi-4-mini, and that model's card.
    """

    def calls(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        mark = (yield from lexer.starts(*opens)) or opens[0]
        yield from lexer.expect(mark.removesuffix("["))
        yield from lexer.blanks()
        if (yield from lexer.peek()) == "[":
            yield from call_list(lexer, out)
        else:
            yield from call_object(lexer, out)
        lexer.record()
        yield from lexer.comes(closes)

    return ToolFormat(opens=opens, calls=calls)


def llama(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """Read ``{"name": …, "parameters": {…}}``, several with ``;`` between them, and nothing else.

    A call is told from other JSON by its name, which one of the tools must have. ``<|python_tag|>``
    may precede it. Source: Llama 3.1's template. Raises: Broken.
    """
    while True:
        yield from lexer.comes("<|python_tag|>")
        yield from lexer.blanks()
        yield from call_object(lexer, out, tools)
        lexer.record()
        if not (yield from lexer.comes(";")):
            return


def required(lexer: IncrementalLexer, out: Events) -> Reading[None]:
    """Read the JSON array of calls that the grammar for tool_choice "required"
    makes: no content.
    """
    try:
        yield from lexer.blanks()
        yield from call_list(lexer, out)
    except Broken:
        out.cut()


def arguments_of(name: str, lexer: IncrementalLexer, out: Events) -> Reading[None]:
    """Read a JSON object, the arguments of the tool that the request has named: no content."""
    try:
        yield from lexer.blanks()
        yield from called(lexer, out, name)
        out.end()
    except Broken:
        out.cut()


def quoted(text: str) -> str:
    """Return a piece of a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
