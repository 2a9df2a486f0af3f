"""Reading text that comes in pieces: as though it came at once; and JSON as Python reads it."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chat.answers import pieces
from quire.chat.lexer import Broken, IncrementalLexer, Reading

cuts = st.lists(st.integers(0, 10**6), max_size=12)


def read(text: str, at: list[int], reader: Callable[[IncrementalLexer], Reading[Any]]) -> Any:
    """What a reader gives for a text that is cut at these places; Broken as a value."""
    lexer = IncrementalLexer()
    reading = reader(lexer)
    try:
        for piece in pieces(text, at):
            next(reading)
            lexer.add(piece)
        next(reading)
        lexer.end()
        next(reading)
    except StopIteration as done:
        return done.value
    except Broken:
        return Broken
    raise AssertionError("an ended lexer waits for nothing")


def no_prefixes(marks: list[str]) -> bool:
    return not any(a != b and b.startswith(a) for a in marks for b in marks)


@given(
    text=st.text("ab<", max_size=30),
    marks=st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=3).filter(
        no_prefixes
    ),
    at=cuts,
)
def test_the_first_mark_is_the_first_in_the_whole_text(
    text: str, marks: list[str], at: list[int]
) -> None:
    before: list[str] = []
    found = read(text, at, lambda lexer: lexer.upto(*marks, put=before.append))
    places = [(text.find(mark), mark) for mark in marks if mark in text]
    place, mark = min(places, default=(len(text), None))
    assert (found, "".join(before)) == (mark, text[:place])


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def of_json(text: str) -> Any:
    """The value that all of a text is; Broken if it is none. Line ends in strings are allowed."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    if text[:1] in (" ", "\t", "\r", "\n"):
        return Broken  # a value begins at once
    try:
        return json.loads(text, strict=False, parse_constant=refuse)
    except ValueError:
        return Broken


def value_of(lexer: IncrementalLexer) -> Reading[Any]:
    """As the lexer reads it, with blanks after it and nothing more."""
    text = yield from lexer.text_value()
    yield from lexer.blanks()
    if (yield from lexer.peek()):
        raise Broken
    return json.loads(text)


@given(value=values, indent=st.sampled_from([None, 2]), is_ascii=st.booleans(), at=cuts)
def test_json_is_read_as_it_is(
    value: Any, indent: int | None, is_ascii: bool, at: list[int]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert read(text, at, IncrementalLexer.text_value) == text


@given(
    value=values,
    edits=st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.integers(0, 2),
            st.text('[]{}",:\\u0n-.eE+ \n1tfa', max_size=3),
        ),
        max_size=2,
    ),
    at=cuts,
)
def test_what_is_json_is_what_python_takes_for_it(value: Any, edits: Any, at: list[int]) -> None:
    text = json.dumps(value)
    for place, length, instead in edits:
        place %= len(text) + 1
        text = text[:place] + instead + text[place + length :]
    assert read(text, at, value_of) == of_json(text)
