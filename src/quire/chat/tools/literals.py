"""Calls whose arguments are literals of another kind than JSON's: Python's, and Gemma's.

Nothing is evaluated: they become JSON as they come, and may be nested as deep as JSON.
"""

import json
import math
import string
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from quire.chat.lexer import MAX_DEPTH, MAX_NUMBER, NUMBER, Broken, IncrementalLexer, Put, Reading
from quire.chat.output_events import Events
from quire.chat.tools.declared import Tool
from quire.chat.tools.json_objects import quoted
from quire.chat.tools.tagged import Arguments
from quire.chat.tools.tool_format import ToolFormat

_WORDS = MappingProxyType(
    {"True": "true", "False": "false", "None": "null"}
    | {word: word for word in ("true", "false", "null")}
)
_OF_A_WORD = frozenset(string.ascii_letters + string.digits + "_+-.")
_ESCAPES = MappingProxyType(
    {"\\": "\\", "'": "'", '"': '"', "\n": "", "0": "\0", "a": "\a", "b": "\b"}
    | {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
)
_DIGITS_OF = MappingProxyType({"x": 2, "u": 4, "U": 8})


def pythonic(opens: str, closes: str, *, has_marks: bool) -> ToolFormat:
    """``[name(key="value", other=1), …]``, in marks or maybe in marks.

    Without any a call is told from other text by its place, which is the beginning, and its name,
    which one of the tools must have. Source: Llama 3.2's and 4's prompt formats, vLLM's templates
    for them and for ToolACE; LFM2's card.
    """

    def calls(tape: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from tape.comes(opens)
        yield from tape.blanks()
        yield from tape.expect("[")
        is_over = False
        while not is_over:
            yield from tape.blanks()
            yield from _call(tape, out, tools, must_know=not has_marks)
            tape.record()  # what breaks from here on is after a call, not in it
            is_over = yield from _ends(tape, "]", is_first=False)
        yield from tape.comes(closes)

    return ToolFormat(opens=(opens,) if has_marks else (), calls=calls, marks=(opens, closes))


def olmo3(tape: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``<function_calls>`` and a call in each line. Source: Olmo 3's template."""
    yield from tape.expect("<function_calls>")
    while True:
        yield from tape.blanks()
        yield from _call(tape, out, tools)
        tape.record()
        if (yield from tape.comes("</function_calls>")) or not (yield from tape.peek()):
            return


def gemma(opens: str, closes: str, *, quote: str, stop: str) -> ToolFormat:
    """``call:NAME{key:"text",other:1}`` between marks, with a mark instead of quotes.

    Keys have none, or the same. Source: the templates of FunctionGemma and of Gemma 4.
    """
    literals = _Gemma(quote)

    def calls(tape: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from tape.expect(opens)
        yield from tape.blanks()
        yield from tape.expect("call:")
        name = yield from tape.name("{")
        yield from tape.expect("{")
        is_doubled = yield from tape.skip("{")  # as models write that have seen JSON between them
        arguments = Arguments(out, name, tools)
        while not (yield from _ends(tape, "}", is_first=not arguments.keys)):
            arguments.key((yield from literals.key(tape)))
            yield from literals.value(tape, out.arguments)
        if is_doubled:
            yield from tape.expect("}")
        arguments.end()
        tape.record()
        yield from tape.comes(closes)

    return ToolFormat(opens=(opens,), calls=calls, marks=(quote,), stop=(stop,))


def _call(
    tape: IncrementalLexer, out: Events, tools: Mapping[str, Tool], *, must_know: bool = False
) -> Reading[None]:
    name = yield from tape.name("(")
    if must_know and name not in tools:
        raise Broken
    yield from tape.expect("(")
    arguments, literals = Arguments(out, name, tools), _Python()
    while not (yield from _ends(tape, ")", is_first=not arguments.keys)):
        arguments.key((yield from tape.name("=")))
        yield from tape.expect("=")
        yield from literals.value(tape, out.arguments)
    arguments.end()


def _ends(tape: IncrementalLexer, closing: str, *, is_first: bool) -> Reading[bool]:
    """Whether a list ends here; otherwise an item comes. Behind the last may be a comma.

    Raises: Broken where neither comes.
    """
    yield from tape.blanks()
    if not is_first and not (yield from tape.skip(",")):
        yield from tape.expect(closing)
        return True
    return (yield from tape.comes(closing))


class _Literals(ABC):
    """Lists, mappings, numbers and words are alike."""

    @abstractmethod
    def text(self, tape: IncrementalLexer, put: Put) -> Reading[bool]:
        """Put a string as JSON if one comes; whether it did. Raises: Broken."""

    @abstractmethod
    def key(self, tape: IncrementalLexer) -> Reading[str]:
        """What stands before a member's value, with the colon. Raises: Broken."""

    @abstractmethod
    def word(self, tape: IncrementalLexer) -> Reading[str]:
        """What is neither text nor brackets, as JSON. Raises: Broken."""

    def value(self, tape: IncrementalLexer, put: Put, depth: int = MAX_DEPTH) -> Reading[None]:
        """Put it as JSON. Raises: Broken."""
        yield from tape.blanks()
        first = yield from tape.peek()
        if first not in ("[", "{"):
            if not (yield from self.text(tape, put)):
                put((yield from self.word(tape)))
            return
        if depth == 0:
            raise Broken
        closing, is_first = "]" if first == "[" else "}", True
        put(tape.take(1))
        while not (yield from _ends(tape, closing, is_first=is_first)):
            put("" if is_first else ", ")
            is_first = False
            if first == "{":
                put(json.dumps((yield from self.key(tape)), ensure_ascii=False) + ": ")
            yield from self.value(tape, put, depth - 1)
        put(closing)


class _Python(_Literals):
    def text(self, tape: IncrementalLexer, put: Put) -> Reading[bool]:
        sign = yield from tape.peek()
        if sign not in ("'", '"'):
            return False
        quote = 3 * sign if (yield from tape.skip(3 * sign)) else tape.take(1)
        put('"')
        while True:
            found = yield from tape.upto(
                quote, "\\", put=lambda text: put(quoted(text)), must_come=True
            )
            if found is None:
                raise Broken
            tape.take(len(found))
            if found == quote:
                put('"')
                return True
            put((yield from self._escaped(tape)))

    def _escaped(self, tape: IncrementalLexer) -> Reading[str]:
        """What a backslash makes of what comes, as part of a JSON string; maybe nothing."""
        sign = yield from tape.peek()
        tape.take(1)
        if sign in _ESCAPES:
            return quoted(_ESCAPES[sign])
        num_digits = _DIGITS_OF.get(sign, 0)
        digits = yield from tape.peek(num_digits)
        if not sign or len(digits) < num_digits:
            raise Broken
        if digits and set(digits) <= set(string.hexdigits) and int(digits, 16) <= sys.maxunicode:
            tape.take(num_digits)
            return json.dumps(chr(int(digits, 16)))[1:-1]  # half a pair too, which UTF-8 lacks
        return quoted(f"\\{sign}")  # as in paths and expressions

    def key(self, tape: IncrementalLexer) -> Reading[str]:
        pieces: list[str] = []
        if not (yield from self.text(tape, pieces.append)):
            raise Broken
        yield from tape.blanks()
        yield from tape.expect(":")
        return str(json.loads("".join(pieces)))

    def word(self, tape: IncrementalLexer) -> Reading[str]:
        word = ""
        while (yield from tape.peek()) in _OF_A_WORD and len(word) < MAX_NUMBER:
            word += tape.take(1)
        found = _json_of(word)
        if found is None:
            raise Broken
        return found


class _Gemma(_Literals):
    def __init__(self, quote: str) -> None:
        self._quote = quote

    def text(self, tape: IncrementalLexer, put: Put) -> Reading[bool]:
        if (yield from tape.peek()) == '"':  # which models write in spite of their marks
            yield from tape.value(put)
            return True
        if not (yield from tape.skip(self._quote)):
            return False
        put('"')
        yield from tape.upto(self._quote, put=lambda text: put(quoted(text)), must_come=True)
        yield from tape.expect(self._quote)
        put('"')
        return True

    def key(self, tape: IncrementalLexer) -> Reading[str]:
        pieces: list[str] = []
        if (yield from self.text(tape, pieces.append)):
            key = str(json.loads("".join(pieces)))
            yield from tape.blanks()
        else:
            key = yield from tape.name(":")
            if not set(key).isdisjoint('{}[]",'):
                raise Broken
        yield from tape.expect(":")
        return key

    def word(self, tape: IncrementalLexer) -> Reading[str]:
        text = (yield from tape.text_upto(",", "}", "]")).strip()
        found = _json_of(text)
        return json.dumps(text, ensure_ascii=False) if found is None else found


def _json_of(word: str) -> str | None:
    """A number or a word as JSON has it; None if it is neither."""
    if word in _WORDS:
        return _WORDS[word]
    if len(word) >= MAX_NUMBER:
        return None
    if NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word) if "." in word else math.nan
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None
