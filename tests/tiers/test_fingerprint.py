"""A fingerprint: any field changes it, and hostile descriptions are refused."""

import json
import string
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.tiers.fingerprint import (
    LARGEST_DESCRIPTION_BYTES,
    MOST_DIFFERENCES,
    BadDescription,
    Fingerprint,
)

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=90)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = st.dictionaries(st.text(max_size=9), VALUES, max_size=6)


@given(FIELDS)
def test_a_description_gives_the_fingerprint_again(fields: dict[str, Any]) -> None:
    own = Fingerprint.of(fields)
    assert own.fields == fields
    spaced = json.dumps(dict(reversed(fields.items())), indent=1)
    for text in (own.description, spaced):
        again = Fingerprint.parse(text.encode())
        assert again == own
        assert again.digest == own.digest
    assert own.difference(own) == []
    assert (len(own.digest), len(own.namespace)) == (32, 16)


@example({}, {"": {}})
@example({"": {"a": 1}}, {"a": 1})
@given(FIELDS, FIELDS)
def test_only_equal_fields_have_no_difference(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = Fingerprint.of(one), Fingerprint.of(other)
    lines = first.difference(second)
    assert (lines == []) == (first.digest == second.digest) == (first == second)
    assert len(lines) <= MOST_DIFFERENCES + 1
    for line in lines:
        assert set(line) <= set(string.printable) - set("\n\r\x0b\x0c\t"), "it goes to a terminal"
        assert len(line) < 300


@given(FIELDS, st.text(max_size=9), LEAVES, LEAVES)
def test_one_changed_field_is_the_one_that_is_named(
    fields: dict[str, Any], name: str, was: Any, now: Any
) -> None:
    first = Fingerprint.of({**fields, name: was})
    second = Fingerprint.of({**fields, name: now})
    if json.dumps(was) == json.dumps(now):
        assert first == second
    else:
        assert first.namespace != second.namespace
        (line,) = first.difference(second)
        assert [line] != second.difference(first), "both are shown alike"


def test_the_order_of_names_says_nothing_and_that_of_lists_does() -> None:
    assert Fingerprint.of({"a": 1, "b": 2}) == Fingerprint.of({"b": 2, "a": 1})
    assert Fingerprint.of({"a": (1, 2)}) == Fingerprint.of({"a": [1, 2]})
    assert Fingerprint.of({"a": [1, 2]}) != Fingerprint.of({"a": [2, 1]})
    assert Fingerprint.of({"a": 1}) != Fingerprint.of({"a": True})
    assert Fingerprint.of({"a": float("inf")}) != Fingerprint.of({"a": float("-inf")})


def test_a_difference_says_the_field_and_both_values() -> None:
    own = Fingerprint.of({"config": {"rope_theta": 1e6, "heads": 8}, "block_size": 16})
    other = Fingerprint.of({"config": {"rope_theta": 1e4, "heads": 8}, "rank": 1})
    assert own.difference(other) == [
        "block_size: nothing there, 16 here",
        "rank: 1 there, nothing here",
        "config.rope_theta: 10000.0 there, 1000000.0 here",
    ]
    assert own.difference(other, most=1) == ["block_size: nothing there, 16 here", "and 2 more"]


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", {"1": 0, 1: 0}], ids=range(4))
def test_a_value_without_a_text_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"config\.inner"):
        Fingerprint.of({"config": {"inner": value}})


@pytest.mark.parametrize(
    "text",
    [
        lambda: b"",
        lambda: b"\xff\xfe",
        lambda: b"[]",
        lambda: b'{"a": NaN}',
        lambda: b'{"a": Infinity}',
        lambda: b'{"a": ' + b"9" * 5000 + b"}",
        lambda: b'{"a": ' + b"[" * 100_000,
        lambda: b'{"a": ' + b'{"a": ' * 100 + b"1" + b"}" * 101,
        lambda: b'{"a": "' + b"x" * LARGEST_DESCRIPTION_BYTES + b'"}',
        lambda: b'{"a": 1e999}{',
    ],
    ids=range(10),
)
def test_what_is_no_description_is_refused(text: Callable[[], bytes]) -> None:
    with pytest.raises(BadDescription):
        Fingerprint.parse(text())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_description_or_refused(text: bytes) -> None:
    with suppress(BadDescription):
        assert isinstance(Fingerprint.parse(text).fields, dict)
