"""Calls whose arguments are literals in Python's or Gemma's notation.

Nothing is evaluated: they become JSON while they come, and may be nested as deep as JSON.
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
    """Return the format of ``[name(key="value", other=1), …]``, in marks or maybe in marks.

    Without marks a call is told from other text by its place, the beginning, and its name, which
    one of the tools must have. Source: Llama 3.2's and 4's prompt formats, vLLM's templates for
    them and for ToolACE; LFM2's card.
    """

    def calls(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from lexer.comes(opens)
        yield from lexer.blanks()
        yield from lexer.expect("[")
        is_over = False
        while not is_over:
            yield from lexer.blanks()
            yield from _call(lexer, out, tools, must_know=not has_marks)
            lexer.record()  # from here on a failure is behind the call, not in it
            is_over = yield from _ends(lexer, "]", is_first=False)
        yield from lexer.comes(closes)

    return ToolFormat(opens=(opens,) if has_marks else (), calls=calls, marks=(opens, closes))


def olmo3(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """Read ``<function_calls>`` and a call in each line. Source: Olmo 3's template.
    Raises: Broken.
    """
    yield from lexer.expect("<function_calls>")
    while True:
        yield from lexer.blanks()
        yield from _call(lexer, out, tools)
        lexer.record()
        if (yield from lexer.comes("</function_calls>")) or not (yield from lexer.peek()):
            return


def gemma(opens: str, closes: str, *, quote: str, stop: str) -> ToolFormat:
    """Return the format of ``call:NAME{key:"text",other:1}`` with ``quote`` in place of quotes.

    Keys have none, or the same. Source: the templates of FunctionGemma and of Gemma 4.
    """
    literals = _Gemma(quote)

    def calls(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from lexer.expect(opens)
        yield from lexer.blanks()
        yield from lexer.expect("call:")
        name = yield from lexer.name("{")
        yield from lexer.expect("{")
        is_doubled = yield from lexer.skip("{")  # some models write JSON's braces inside
        arguments = Arguments(out, name, tools)
        while not (yield from _ends(lexer, "}", is_first=not arguments.keys)):
            arguments.key((yield from literals.key(lexer)))
            yield from literals.value(lexer, out.arguments)
        if is_doubled:
            yield from lexer.expect("}")
        arguments.end()
        lexer.record()
        yield from lexer.comes(closes)

    return ToolFormat(opens=(opens,), calls=calls, marks=(quote,), stop=(stop,))


def _call(
    lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool], *, must_know: bool = False
) -> Reading[None]:
    name = yield from lexer.name("(")
    if must_know and name not in tools:
        raise Broken
    yield from lexer.expect("(")
    arguments, literals = Arguments(out, name, tools), _Python()
    while not (yield from _ends(lexer, ")", is_first=not arguments.keys)):
        arguments.key((yield from lexer.name("=")))
        yield from lexer.expect("=")
        yield from literals.value(lexer, out.arguments)
    arguments.end()


def _ends(lexer: IncrementalLexer, closing: str, *, is_first: bool) -> Reading[bool]:
    """Return whether a list ends here; otherwise an item comes. A comma may follow the last one.
    Raises: Broken where neither comes.
    """
    yield from lexer.blanks()
    if not is_first and not (yield from lexer.skip(",")):
        yield from lexer.expect(closing)
        return True
    return (yield from lexer.comes(closing))


class _Literals(ABC):
    """A notation for values. Lists, mappings, numbers and words are the same in both."""

    @abstractmethod
    def text(self, lexer: IncrementalLexer, put: Put) -> Reading[bool]:
        """Put a string as JSON if one comes; return whether it did. Raises: Broken."""

    @abstractmethod
    def key(self, lexer: IncrementalLexer) -> Reading[str]:
        """Return a member's key, and take the colon. Raises: Broken."""

    @abstractmethod
    def word(self, lexer: IncrementalLexer) -> Reading[str]:
        """Return a value that is neither text nor brackets, as JSON. Raises: Broken."""

    def value(self, lexer: IncrementalLexer, put: Put, depth: int = MAX_DEPTH) -> Reading[None]:
        """Put a value as JSON. Raises: Broken."""
        yield from lexer.blanks()
        first = yield from lexer.peek()
        if first not in ("[", "{"):
            if not (yield from self.text(lexer, put)):
                put((yield from self.word(lexer)))
            return
        if depth == 0:
            raise Broken
        closing, is_first = "]" if first == "[" else "}", True
        put(lexer.take(1))
        while not (yield from _ends(lexer, closing, is_first=is_first)):
            put("" if is_first else ", ")
            is_first = False
            if first == "{":
                put(json.dumps((yield from self.key(lexer)), ensure_ascii=False) + ": ")
            yield from self.value(lexer, put, depth - 1)
        put(closing)


class _Python(_Literals):
    def text(self, lexer: IncrementalLexer, put: Put) -> Reading[bool]:
        sign = yield from lexer.peek()
        if sign not in ("'", '"'):
            return False
        quote = 3 * sign if (yield from lexer.skip(3 * sign)) else lexer.take(1)
        put('"')
        while True:
            found = yield from lexer.upto(
                quote, "\\", put=lambda text: put(quoted(text)), must_come=True
            )
            if found is None:
                raise Broken
            lexer.take(len(found))
            if found == quote:
                put('"')
                return True
            put((yield from self._escaped(lexer)))

    def _escaped(self, lexer: IncrementalLexer) -> Reading[str]:
        """Return what a backslash makes of the next characters, as part of a JSON string."""
        sign = yield from lexer.peek()
        lexer.take(1)
        if sign in _ESCAPES:
            return quoted(_ESCAPES[sign])
        num_digits = _DIGITS_OF.get(sign, 0)
        digits = yield from lexer.peek(num_digits)
        if not sign or len(digits) < num_digits:
            raise Broken
        if digits and set(digits) <= set(string.hexdigits) and int(digits, 16) <= sys.maxunicode:
            lexer.take(num_digits)
            return json.dumps(chr(int(digits, 16)))[1:-1]  # may be half a surrogate pair
        return quoted(f"\\{sign}")  # as in paths and expressions

    def key(self, lexer: IncrementalLexer) -> Reading[str]:
        pieces: list[str] = []
        if not (yield from self.text(lexer, pieces.append)):
            raise Broken
        yield from lexer.blanks()
        yield from lexer.expect(":")
        return str(json.loads("".join(pieces)))

    def word(self, lexer: IncrementalLexer) -> Reading[str]:
        word = ""
        while (yield from lexer.peek()) in _OF_A_WORD and len(word) < MAX_NUMBER:
            word += lexer.take(1)
        found = _json_of(word)
        if found is None:
            raise Broken
        return found


class _Gemma(_Literals):
    def __init__(self, quote: str) -> None:
        self._quote = quote

    def text(self, lexer: IncrementalLexer, put: Put) -> Reading[bool]:
        if (yield from lexer.peek()) == '"':  # some models write JSON's quotes
            yield from lexer.value(put)
            return True
        if not (yield from lexer.skip(self._quote)):
            return False
        put('"')
        yield from lexer.upto(self._quote, put=lambda text: put(quoted(text)), must_come=True)
        yield from lexer.expect(self._quote)
        put('"')
        return True

    def key(self, lexer: IncrementalLexer) -> Reading[str]:
        pieces: list[str] = []
        if (yield from self.text(lexer, pieces.append)):
            key = str(json.loads("".join(pieces)))
            yield from lexer.blanks()
        else:
            key = yield from lexer.name(":")
            if not set(key).isdisjoint('{}[]",'):
                raise Broken
        yield from lexer.expect(":")
        return key

    def word(self, lexer: IncrementalLexer) -> Reading[str]:
        text = (yield from lexer.text_upto(",", "}", "]")).strip()
        found = _json_of(text)
        return json.dumps(text, ensure_ascii=False) if found is None else found


def _json_of(word: str) -> str | None:
    """Return a number or a word as JSON; None if it is neither."""
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
