"""``Fingerprint``: all that gives the bytes of a record their meaning, as named fields.

Two engines with equal fingerprints may read each other's records; any difference is another
namespace of the same tier, and so a miss. The fields are kept as text beside the records, so that
a person can be told why a folder's records fit no engine. Who makes the fields is not said here.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from math import isfinite
from typing import Any, NoReturn, TypeAlias, final

from quire.errors import QuireError

# What JSON has, with finite numbers.
Field: TypeAlias = "str | int | float | bool | list[Field] | dict[str, Field] | None"

NAMESPACE_DIGITS = 16  # hex digits of the digest, which name a namespace
LARGEST_DESCRIPTION_BYTES = 2**16  # a model's with the longest lists of layers has a quarter
MOST_DIFFERENCES = 8  # that are told
_LONGEST_VALUE = 60  # characters of a value in a message
_LONGEST_PATH = 120  # … of a field's name
_DEEPEST = 16  # levels of fields within fields
_KEPT_BEFORE = 12  # … of one before the first that differs
_MORE = "..."
_ABSENT = "nothing"
_INNER = re.compile(r"(?<!\\)[.\[]")  # in the path of a field within a field


class BadDescription(QuireError):
    """A text is not the description of a fingerprint."""


@final
@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Named fields that shape keys, values and states. Equal fields are equal fingerprints.

    ``description`` is their canonical JSON: sorted names, no spaces, ASCII.
    """

    description: str

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Fingerprint":
        """Make a fingerprint of fields.

        Tuples are written as lists; names, and numbers that are not finite, as text.

        Raises: TypeError for a value that JSON cannot have; its message names the field.
        """
        return cls(_canonical(_plain(fields, "")))

    @classmethod
    def parse(cls, text: bytes) -> "Fingerprint":
        """Read a description that anyone may have written. Raises: BadDescription."""
        if len(text) > LARGEST_DESCRIPTION_BYTES:
            raise BadDescription(
                f"a description of {len(text):,} bytes: at most {LARGEST_DESCRIPTION_BYTES:,}"
            )
        try:
            fields = json.loads(text, parse_constant=_refuse)
            if not isinstance(fields, dict):
                raise BadDescription("a description is a JSON object")
            return cls.of(fields)
        except (ValueError, TypeError, RecursionError) as error:
            # A message of the parser may quote what was written: its type says enough.
            raise BadDescription(
                f"a description that cannot be read: {type(error).__name__}"
            ) from None

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 of the description: 32 bytes."""
        return sha256(self.description.encode()).digest()

    @property
    def namespace(self) -> str:
        """Return the name under which a tier keeps records of this fingerprint: 16 hex digits."""
        return self.digest.hex()[:NAMESPACE_DIGITS]

    @property
    def fields(self) -> dict[str, Field]:
        """Return a copy of the fields."""
        fields: dict[str, Field] = json.loads(self.description)
        return fields

    @property
    def leaves(self) -> dict[str, str]:
        """Return each value as JSON, by the names that lead to it: ``config.hidden_size``.

        A list without fields in it is one value. All is ASCII.
        """
        return dict(_leaves(self.fields))

    def difference(self, other: "Fingerprint", most: int = MOST_DIFFERENCES) -> list[str]:
        """Say which fields of ``other`` differ from this one's, one a line.

        Returns: at most ``most`` lines, those of whole fields first, and one that counts the rest;
        none for equal fields. They are printable ASCII, whatever ``other`` holds.
        """
        here, there = self.leaves, other.leaves
        several = sorted(
            (path for path in here.keys() | there.keys() if here.get(path) != there.get(path)),
            key=lambda path: (is_inner(path), path),
        )
        lines = []
        for path in several[:most]:
            theirs, ours = _cut_alike(there.get(path, _ABSENT), here.get(path, _ABSENT))
            lines.append(f"{_cut(path, _LONGEST_PATH)}: {theirs} there, {ours} here")
        if len(several) > most:
            lines.append(f"and {len(several) - most:,} more")
        return lines


def is_inner(path: str) -> bool:
    """Tell whether a path leads to a field within a field."""
    return _INNER.search(path) is not None


def _canonical(value: Field) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any, path: str, depth: int = 0) -> Any:
    """Return a value as JSON has it. Raises: TypeError."""
    if depth > _DEEPEST:
        raise TypeError(f"{path} lies more than {_DEEPEST} levels deep")
    if isinstance(value, Mapping):
        fields = {
            str(name): _plain(each, f"{path}.{name}".lstrip("."), depth + 1)
            for name, each in value.items()
        }
        if len(fields) != len(value):
            raise TypeError(f"{path} has two names that are written alike")
        return fields
    if isinstance(value, list | tuple):
        return [_plain(each, f"{path}[{at}]", depth + 1) for at, each in enumerate(value)]
    if isinstance(value, Enum):
        return _plain(value.value, path, depth + 1)
    if isinstance(value, float) and not isfinite(value):
        return f"{value} (a number)"  # which JSON lacks
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(f"{path or 'the whole'} is a {type(value).__name__}, which has no name as text")


def _leaves(value: Field, path: str | None = None) -> Iterator[tuple[str, str]]:
    """List each value by the names that lead to it; a list without fields in it is one value."""
    if isinstance(value, dict) and value:
        for name, inside in value.items():
            yield from _leaves(inside, _ascii(name) if path is None else f"{path}.{_ascii(name)}")
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for at, each in enumerate(value):
            yield from _leaves(each, f"{path}[{at}]")
    elif path is not None:  # no fields at all have no leaves
        yield path, _canonical(value)


def _ascii(name: str) -> str:
    """Return a name as JSON writes it, without the quotes: its own dots are no levels."""
    return json.dumps(name)[1:-1].replace(".", "\\.").replace("[", "\\[")


def _cut(text: str, most: int) -> str:
    """Return printable ASCII of at most ``most`` characters."""
    text = text.replace("\x7f", "\\u007f")  # the one control character that JSON does not escape
    return text if len(text) <= most else f"{text[: most - len(_MORE)]}{_MORE}"


def _cut_alike(one: str, other: str) -> tuple[str, str]:
    """Cut two texts so that they are seen to differ: what both begin with goes first."""
    if max(len(one), len(other)) <= _LONGEST_VALUE:
        return _cut(one, _LONGEST_VALUE), _cut(other, _LONGEST_VALUE)
    pairs = enumerate(zip(one, other, strict=False))
    alike = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, alike - _KEPT_BEFORE)
    before = _MORE if start else ""
    return (
        before + _cut(one[start:], _LONGEST_VALUE - len(before)),
        before + _cut(other[start:], _LONGEST_VALUE - len(before)),
    )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
