"""Calls with each argument in tags of its own: Qwen3-Coder, Seed-OSS, GLM 4.5, MiniMax M2.

A value is text as it is, without quotes; what it means depends on the tool's schema. Of a string
the beginning is passed on while the rest is still to come.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.server.chat.events import Events
from quire.server.chat.tape import BLANKS, Broken, Reading, Tape
from quire.server.chat.tools.declared import Tool

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


def qwen3_coder(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

    Models forget the outer tag. Source: Qwen3-Coder's template.
    """
    yield from _function(tape, out, tools, "<tool_call>", "</tool_call>", on_own_lines=True)


def seed_oss(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """The same in ``<seed:tool_call>``, with values right between their tags.

    Source: Seed-OSS' template.
    """
    outer = "<seed:tool_call>", "</seed:tool_call>"
    yield from _function(tape, out, tools, *outer, on_own_lines=False)


def _function(
    tape: Tape,
    out: Events,
    tools: Mapping[str, Tool],
    opens: str,
    closes: str,
    *,
    on_own_lines: bool,
) -> Reading[None]:
    """``on_own_lines``: a line end before a value, and one behind it, belong to the tags."""
    yield from tape.skip(opens)
    yield from tape.blanks()
    yield from tape.expect("<function=")
    name = yield from tape.name(">")
    yield from tape.expect(">")
    out.start(name)
    arguments = _Arguments(out, tools.get(name))
    while True:
        yield from tape.blanks()
        if (yield from tape.skip("</function>")):
            break
        yield from tape.expect("<parameter=")
        key = yield from tape.name(">")
        yield from tape.expect(">")
        if on_own_lines:
            yield from tape.skip("\n")
            yield from arguments.read(tape, key, "\n</parameter>", "</parameter>")
        else:
            yield from arguments.read(tape, key, "</parameter>")
    arguments.end()
    tape.record()
    yield from tape.blanks()
    yield from tape.skip(closes)


def glm45(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>``.

    Source: GLM-4.5's template.
    """
    yield from tape.expect("<tool_call>")
    name = yield from tape.name("<arg_key>", "</tool_call>")
    out.start(name)
    arguments = _Arguments(out, tools.get(name))
    while True:
        yield from tape.blanks()
        if (yield from tape.skip("</tool_call>")):
            break
        yield from tape.expect("<arg_key>")
        key = yield from tape.name("</arg_key>")
        yield from tape.expect("</arg_key>")
        yield from tape.blanks()
        yield from tape.expect("<arg_value>")
        yield from arguments.read(tape, key, "</arg_value>")
    arguments.end()


def minimax_m2(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``<invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>``.

    Several stand in ``<minimax:tool_call>``. Source: MiniMax-M2's template.
    """
    yield from tape.skip("<minimax:tool_call>")
    yield from tape.blanks()
    yield from tape.expect('<invoke name="')
    name = yield from tape.name('">')
    yield from tape.expect('">')
    out.start(name)
    arguments = _Arguments(out, tools.get(name))
    while True:
        yield from tape.blanks()
        if (yield from tape.skip("</invoke>")):
            break
        yield from tape.expect('<parameter name="')
        key = yield from tape.name('">')
        yield from tape.expect('">')
        yield from arguments.read(tape, key, "</parameter>")
    arguments.end()
    tape.record()
    yield from tape.blanks()
    yield from tape.skip("</minimax:tool_call>")


class _Arguments:
    """Writes the JSON object of one call, member by member."""

    def __init__(self, out: Events, tool: Tool | None) -> None:
        self._out, self._tool = out, tool
        self._keys: set[str] = set()

    def read(self, tape: Tape, key: str, *closing: str) -> Reading[None]:
        """A value and the tag after it. Raises: Broken, also for a key that was there before."""
        if key in self._keys:
            raise Broken
        kinds = self._tool.kinds(key) if self._tool else None
        lead = f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._keys.add(key)
        if kinds is None or kinds == _TEXT:
            self._out.arguments(lead + '"')
            found = yield from tape.upto(*closing, put=self._quote, must_come=True)
            if found is None:
                raise Broken
            self._out.arguments('"')
        else:
            text = yield from tape.text_upto(*closing)
            self._out.arguments(lead + converted(text, kinds))
            found = yield from tape.starts(*closing)
        yield from tape.expect(found or closing[0])

    def end(self) -> None:
        self._out.arguments("}" if self._keys else "{}")
        self._out.end()

    def _quote(self, text: str) -> None:
        self._out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def converted(text: str, kinds: frozenset[str]) -> str:
    """As JSON of one of these types, if it can be read so; otherwise as a string."""
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
