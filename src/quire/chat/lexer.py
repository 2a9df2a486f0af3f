"""An incremental lexer: it reads a text that comes in pieces as if all of it were there.

A reader is a generator that yields where it needs more text. Its result cannot depend on how the
text was cut, as long as it decides by what it asked for and never by what has come so far.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar, final

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Put: TypeAlias = Callable[[str], None]  # receives the text that is read

BLANKS = " \t\r\n"
MAX_DEPTH = 64
_MAX_NAME = 256  # characters
MAX_NUMBER = 256  # characters; Python refuses to read integers of several thousand
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")


class Broken(Exception):
    """The text breaks the form that its beginning promised, or ends within it."""


@final
class IncrementalLexer:
    """Text that is added at one end and taken from the other."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._was_cut = False
        self._ran_out = False
        self._taken: list[str] | None = None

    def add(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, *, cut: bool = False) -> None:
        """Note that no more text comes. ``cut``: its writer had not come to an end."""
        self._ended, self._was_cut = True, cut

    @property
    def breaks_off(self) -> bool:
        """Return whether a reader has asked for more of a text that was cut."""
        return self._was_cut and self._ran_out

    def drop(self) -> None:
        """Forget all text that has not been taken."""
        self._at = len(self._text)

    def record(self) -> None:
        """Remember the text that is taken from now on."""
        self._taken = []

    def recorded(self) -> str:
        """Return the text that was taken since ``record``, and forget it."""
        taken, self._taken = "".join(self._taken or ()), None
        return taken

    def take(self, count: int) -> str:
        """Take the next characters, which must have been seen."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._taken is not None:
            self._taken.append(taken)
        return taken

    def rest(self) -> str:
        """Take all text that has come."""
        return self.take(len(self._text) - self._at)

    def peek(self, count: int = 1) -> Reading[str]:
        """Return the next characters, fewer at the end."""
        while len(self._text) - self._at < count:
            if self._ended:
                self._ran_out = True
                break
            yield
        return self._text[self._at : self._at + count]

    def starts(self, *marks: str) -> Reading[str | None]:
        """Return which of the marks comes next. No mark may begin with another."""
        while True:
            for mark in marks:
                if self._text.startswith(mark, self._at):
                    return mark
            rest = self._text[self._at : self._at + max(map(len, marks))]
            if not any(mark.startswith(rest) for mark in marks):
                return None
            if self._ended:
                self._ran_out = True
                return None
            yield

    def skip(self, mark: str) -> Reading[bool]:
        """Take a mark if it comes next; return whether it did."""
        if (yield from self.starts(mark)) is None:
            return False
        self.take(len(mark))
        return True

    def comes(self, mark: str) -> Reading[bool]:
        """Take blanks, and the mark behind them if it comes; return whether it did."""
        yield from self.blanks()
        return (yield from self.skip(mark))

    def expect(self, mark: str) -> Reading[None]:
        """Take a mark that must come next. Raises: Broken."""
        if not (yield from self.skip(mark)):
            raise Broken

    def blanks(self) -> Reading[str]:
        """Take blanks and line ends."""
        taken = []
        while (next_one := (yield from self.peek())) and next_one in BLANKS:
            taken.append(self.take(1))
        return "".join(taken)

    def upto(self, *marks: str, put: Put, must_come: bool = False) -> Reading[str | None]:
        """Put all text before the first of the marks; return the mark, which is left, or None.

        ``must_come``: at the end of a text that was cut, what may begin a mark is not put.
        """
        while True:
            start = self._at
            place, found = self._first(marks)
            # The earlier of two marks counts, and it may only have begun to come.
            may_begin = not self._ended or (must_come and self._was_cut)
            sure = len(self._text) - (self._overhang(marks) if may_begin else 0)
            if found is not None and (place <= sure):
                if place > start:
                    put(self.take(place - start))
                return found
            if sure > start:
                put(self.take(sure - start))
            if self._ended:
                self._ran_out = True
                return None
            yield

    def _first(self, marks: tuple[str, ...]) -> tuple[int, str | None]:
        """Find the first of the marks; return -1 and None if none has come.

        It doubles its range, so that a mark far away is not searched for at each one nearby.
        """
        begin, size, longest = self._at, 256, max(map(len, marks), default=0)
        while begin < len(self._text):
            end = begin + size
            places = [(self._text.find(mark, begin, end + longest), mark) for mark in marks]
            near = [(place, mark) for place, mark in places if 0 <= place < end]
            if near:
                return min(near)
            begin, size = end, 2 * size
        return -1, None

    def _overhang(self, marks: tuple[str, ...]) -> int:
        """Return how many characters at the end may begin a mark."""
        longest = 0
        for mark in marks:
            for length in range(min(len(mark) - 1, len(self._text) - self._at), longest, -1):
                if self._text.endswith(mark[:length]):
                    longest = length
                    break
        return longest

    def text_upto(self, *marks: str) -> Reading[str]:
        """Return all text before the first of the marks. Raises: Broken if none comes."""
        pieces: list[str] = []
        if (yield from self.upto(*marks, put=pieces.append)) is None:
            raise Broken
        return "".join(pieces)

    def name(self, *marks: str) -> Reading[str]:
        """Return a name before the first of the marks, in one line. Raises: Broken."""
        name = ""
        while not (yield from self.starts(*marks)):
            if len(name) == _MAX_NAME or not (yield from self.peek()):
                raise Broken
            name += self.take(1)
        name = name.strip(BLANKS)
        if not name or "\n" in name:
            raise Broken
        return name

    # -- JSON --------------------------------------------------------------------------------------

    def value(self, put: Put, depth: int = MAX_DEPTH) -> Reading[None]:
        """Put a JSON value as it is written, while it comes. Raises: Broken."""
        first = yield from self.peek()
        if first == "{":
            yield from self._several("}", put, depth, keys=True)
        elif first == "[":
            yield from self._several("]", put, depth, keys=False)
        elif first == '"':
            yield from self._string(put)
        elif first and first in "-0123456789":
            yield from self._number(put)
        else:
            word = yield from self.starts(*_WORDS)
            if word is None:
                raise Broken
            put(self.take(len(word)))

    def text_value(self) -> Reading[str]:
        """Return a JSON value as it is written. Raises: Broken."""
        pieces: list[str] = []
        yield from self.value(pieces.append)
        return "".join(pieces)

    def string(self) -> Reading[str]:
        """Return the content of a JSON string. Raises: Broken."""
        if (yield from self.peek()) != '"':
            raise Broken
        return str(json.loads((yield from self.text_value())))

    def _several(self, closing: str, put: Put, depth: int, *, keys: bool) -> Reading[None]:
        """Put the members of an object or an array, with both brackets."""
        if depth == 0:
            raise Broken
        put(self.take(1))
        put((yield from self.blanks()))
        if (yield from self.peek()) == closing:
            put(self.take(1))
            return
        while True:
            if keys:
                if (yield from self.peek()) != '"':
                    raise Broken
                yield from self._string(put)
                put((yield from self.blanks()))
                yield from self.expect(":")
                put(":")
                put((yield from self.blanks()))
            yield from self.value(put, depth - 1)
            put((yield from self.blanks()))
            separator = yield from self.peek()
            if separator not in (",", closing) or not separator:
                raise Broken
            put(self.take(1))
            if separator == closing:
                return
            put((yield from self.blanks()))

    def _string(self, put: Put) -> Reading[None]:
        """Put a string with its quotes. Line ends, which models write and JSON forbids, are
        escaped.
        """
        put(self.take(1))
        while True:
            first = yield from self.peek()
            if not first:
                raise Broken
            if first == '"':
                put(self.take(1))
                return
            if first == "\\":
                escape = yield from self.peek(2)
                if escape == "\\u":
                    escape = yield from self.peek(6)
                    if not re.fullmatch(r"\\u[0-9a-fA-F]{4}", escape):
                        raise Broken
                elif len(escape) < 2 or escape[1] not in '"\\/bfnrt':
                    raise Broken
                put(self.take(len(escape)))
            elif match := _PLAIN.match(self._text, self._at):
                put(self.take(match.end() - self._at))
            else:
                put(json.dumps(self.take(1))[1:-1])

    def _number(self, put: Put) -> Reading[None]:
        """Put a number when it is complete."""
        length = 0
        while True:
            seen = yield from self.peek(length + 1)
            if len(seen) == length or seen[-1] not in "+-.eE0123456789":
                break
            length += 1
            if length > MAX_NUMBER:
                raise Broken
        if not NUMBER.fullmatch(seen[:length]):
            raise Broken
        put(self.take(length))
