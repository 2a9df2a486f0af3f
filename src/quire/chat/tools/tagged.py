"""Calls with each argument in tags of its own: Qwen3-Coder, Seed-OSS, GLM, MiniMax, DeepSeek V3.2.

A value is plain text without quotes; the tool's schema says what it means. A string is passed on
while the rest of it is still to come.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.chat.lexer import BLANKS, Broken, IncrementalLexer, Reading
from quire.chat.output_events import Events
from quire.chat.tools.declared import Tool
from quire.chat.tools.json_objects import quoted
from quire.chat.tools.tool_format import ToolFormat

_TEXT = frozenset(("string",))
_PYTHON_WORDS = (("True", "true"), ("False", "false"), ("None", "null"))
_KINDS: tuple[tuple[type, str], ...] = (
    (type(None), "null"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
_ALL = frozenset(kind for _, kind in _KINDS)


def functions(opens: str, closes: str, *, on_own_lines: bool) -> ToolFormat:
    """Return the format of ``<function=NAME><parameter=KEY>VALUE</parameter>…</function>`` in outer
    tags.

    Models forget those. ``on_own_lines``: a line end before a value, and one behind it, belong to
    the tags. Source: the templates of Qwen3-Coder and Seed-OSS.
    """
    closing = ("\n</parameter>", "</parameter>") if on_own_lines else ("</parameter>",)

    def calls(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from lexer.skip(opens)
        yield from lexer.blanks()
        yield from lexer.expect("<function=")
        name = yield from lexer.name(">")
        yield from lexer.expect(">")
        arguments = Arguments(out, name, tools)
        while not (yield from lexer.comes("</function>")):
            yield from lexer.expect("<parameter=")
            key = yield from lexer.name(">")
            yield from lexer.expect(">")
            if on_own_lines:
                yield from lexer.skip("\n")
            yield from arguments.read(lexer, key, *closing)
        arguments.end()
        lexer.record()
        yield from lexer.comes(closes)

    return ToolFormat(opens=(opens, "<function="), calls=calls)


def glm45(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """Read ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>``.

    Source: GLM-4.5's template.
    """
    yield from lexer.expect("<tool_call>")
    name = yield from lexer.name("<arg_key>", "</tool_call>")
    arguments = Arguments(out, name, tools)
    while not (yield from lexer.comes("</tool_call>")):
        yield from lexer.expect("<arg_key>")
        key = yield from lexer.name("</arg_key>")
        yield from lexer.expect("</arg_key>")
        yield from lexer.blanks()
        yield from lexer.expect("<arg_value>")
        yield from arguments.read(lexer, key, "</arg_value>")
    arguments.end()


def invokes(outer: str, prefix: str = "") -> ToolFormat:
    """Return the format of ``<invoke name="NAME"><parameter
    name="KEY">VALUE</parameter>…</invoke>``.

    Several stand in one outer tag. DeepSeek's tags have a prefix, and its parameters say
    ``string="true"`` or, where the value is JSON, ``string="false"``. Source: the template of
    MiniMax-M2, and the encoding that comes with DeepSeek-V3.2.
    """
    opens, invoke = f"<{prefix}{outer}>", f'<{prefix}invoke name="'
    parameter, closing = f'<{prefix}parameter name="', f"</{prefix}parameter>"

    def calls(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from lexer.skip(opens)
        yield from lexer.blanks()
        yield from lexer.expect(invoke)
        name = yield from lexer.name('">')
        yield from lexer.expect('">')
        arguments = Arguments(out, name, tools)
        while not (yield from lexer.comes(f"</{prefix}invoke>")):
            yield from lexer.expect(parameter)
            key = yield from lexer.name('"')
            kind = yield from lexer.starts('">', '" string="true">', '" string="false">')
            yield from lexer.expect(kind or '">')
            is_string = None if kind == '">' else kind == '" string="true">'
            yield from arguments.read(lexer, key, closing, is_string=is_string)
        arguments.end()
        lexer.record()
        yield from lexer.comes(f"</{prefix}{outer}>")

    return ToolFormat(opens=(opens, invoke), calls=calls)


class Arguments:
    """Starts one call, and writes the JSON object of its arguments, member by member."""

    def __init__(self, out: Events, name: str, tools: Mapping[str, Tool]) -> None:
        self._out, self._tool = out, tools.get(name)
        self.keys: set[str] = set()
        out.start(name)

    def key(self, key: str) -> None:
        """Write a key. Raises: Broken if it was there before."""
        if key in self.keys:
            raise Broken
        lead = ", " if self.keys else "{"
        self.keys.add(key)
        self._out.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")

    def read(
        self, lexer: IncrementalLexer, key: str, *closing: str, is_string: bool | None = None
    ) -> Reading[None]:
        """Read a value as text, and the tag after it. ``is_string`` None: the schema decides.
        Raises: Broken.
        """
        self.key(key)
        kinds = self._tool.kinds(key) if self._tool else None
        if is_string is None:
            is_string = kinds is None or kinds == _TEXT
        if is_string:
            self._out.arguments('"')
            found = yield from lexer.upto(*closing, put=self._quote, must_come=True)
            if found is None:
                raise Broken
            self._out.arguments('"')
        else:
            text = yield from lexer.text_upto(*closing)
            self._out.arguments(converted(text, kinds or _ALL))
            found = yield from lexer.starts(*closing)
        yield from lexer.expect(found or closing[0])

    def end(self) -> None:
        """End the object, and the call."""
        self._out.arguments("}" if self.keys else "{}")
        self._out.end()

    def _quote(self, text: str) -> None:
        self._out.arguments(quoted(text))


def converted(text: str, kinds: frozenset[str]) -> str:
    """Return a text as JSON of one of these types if possible, otherwise as a string."""
    bare = text.strip(BLANKS)
    for python, word in _PYTHON_WORDS:
        if bare == python:
            bare = word
    try:
        value: Any = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = next(name for python, name in _KINDS if type(value) is python)
    if kind in kinds or (kind == "integer" and "number" in kinds):
        return json.dumps(value, ensure_ascii=False)
    if kind == "number" and "integer" in kinds and value.is_integer():
        return str(int(value))
    return json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
