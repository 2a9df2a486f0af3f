"""The header of a GGUF file: what it says of a model, and where its tensors lie.

The file comes from outside. Each count, size and offset is checked against the file before it is
used, in time that grows with the header alone, and no tensor is read. So a library that reads the
same file afterwards meets nothing that could keep it busy. Source: ggml's docs/gguf.md.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import SEEK_CUR
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

from quire.errors import ModelNotLoadable
from quire.units import align_up

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_FIELDS = 65_536
_MOST_TENSORS = 65_536
_MOST_TEXTS = 4_000_000  # in all lists together: tokens and merges of the largest vocabularies, × 4
_MOST_NUMBERS = 4_000_000  # in all lists together: a score and a type for each token
_MOST_TEXT_BYTES = 2**20  # of one that is kept: a chat template has some thousand
_MOST_DIMS = 4
_LARGEST_SIDE = 2**48
_PIECE_BYTES = 2**18
_ALIGNMENT, _LEAST_ALIGNMENT, _MOST_ALIGNMENT = 32, 8, 65_536

_TEXT, _LIST = 8, 9
_NUMBERS: Mapping[int, struct.Struct] = MappingProxyType(
    {n: struct.Struct(f"<{code}") for n, code in enumerate("BbHhIif?", 0)}
    | {n: struct.Struct(f"<{code}") for n, code in ((10, "Q"), (11, "q"), (12, "d"))}
)
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# What a tensor's numbers are in: its name, the numbers of a block, and a block's bytes.
GGUF_TYPES: Final[Mapping[int, tuple[str, int, int]]] = MappingProxyType({
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
})  # fmt: skip
GGUF_KEPT: Final = frozenset({"Q8_0", "Q4_0"})  # whose codes a linear layer keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor, and where its bytes are."""

    type: str  # as ggml spells it: "Q8_0"
    shape: tuple[int, ...]  # the innermost side last, as torch has it
    begin: int  # in the file
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufList:
    """A list of the header, whose items are not kept."""

    num_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A header."""

    path: Path
    fields: Mapping[str, Any]  # numbers, texts, and a GgufList in place of each list
    tensors: Mapping[str, GgufTensor]

    @property
    def types(self) -> Mapping[str, int]:
        """Return how many of its matrices are in each type."""
        return Counter(tensor.type for tensor in self.tensors.values() if len(tensor.shape) > 1)


def is_gguf(path: Path | None) -> bool:
    """Tell whether a path is spelled as a GGUF file's."""
    return path is not None and path.suffix.lower() == ".gguf"


def read_gguf(path: Path) -> GgufFile:
    """Read and check a file's header.

    Raises: ModelNotLoadable naming the file and what is wrong with it.
    """
    try:
        with path.open("rb", buffering=_PIECE_BYTES) as opened:
            return _Header(opened, path.stat().st_size).read(path)
    except (OSError, ValueError) as error:
        raise ModelNotLoadable(f"{path} is not a whole GGUF file: {error}") from error


class _Header:
    """Goes through a header from its begin to its end. All methods raise ValueError."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file = file
        self._num_bytes = num_bytes
        self._left = num_bytes
        self._texts_left = _MOST_TEXTS
        self._numbers_left = _MOST_NUMBERS

    def read(self, path: Path) -> GgufFile:
        if (found := self._read(len(_MAGIC), "its first bytes")) != _MAGIC:
            raise ValueError(f"it begins with {found!r}, and not {_MAGIC!r}")
        version = self._count(_U32, "version", 2**32)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; versions {_VERSIONS} are read")
        num_tensors = self._count(_U64, "number of tensors", _MOST_TENSORS)
        num_fields = self._count(_U64, "number of fields", _MOST_FIELDS)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text("a field's name")
            if name in fields:
                raise ValueError(f"{name} stands in it twice")
            fields[name] = self._value(name, self._number(_U32))
        places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._text("a tensor's name")
            if name in places:
                raise ValueError(f"{name} stands in it twice")
            places[name] = self._tensor(name)
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not _LEAST_ALIGNMENT <= alignment <= _MOST_ALIGNMENT
            or alignment.bit_count() != 1
        ):
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = align_up(self._num_bytes - self._left, alignment)
        tensors = {
            name: GgufTensor(type=kind, shape=shape, begin=begin + offset, num_bytes=num_bytes)
            for name, (kind, shape, offset, num_bytes) in places.items()
        }
        self._check_places(tensors, alignment)
        return GgufFile(path=path, fields=fields, tensors=tensors)

    def _check_places(self, tensors: Mapping[str, GgufTensor], alignment: int) -> None:
        """See to it that tensors lie in the file, and none in another."""
        in_order = sorted(tensors.items(), key=lambda named: named[1].begin)
        for name, tensor in in_order:
            if tensor.begin % alignment or tensor.begin + tensor.num_bytes > self._num_bytes:
                raise ValueError(
                    f"{name} has {tensor.num_bytes:,} bytes from {tensor.begin:,} on, and the file "
                    f"has {self._num_bytes:,}: download it again"
                )
        for (name, tensor), (other, behind) in pairwise(in_order):
            if tensor.begin + tensor.num_bytes > behind.begin:
                raise ValueError(f"{name} and {other} lie in the same bytes")

    def _tensor(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        """Return its type, its shape, its offset and its bytes."""
        num_dims = self._count(_U32, f"number of sides of {name}", _MOST_DIMS)
        sides = [self._count(_U64, f"a side of {name}", _LARGEST_SIDE) for _ in range(num_dims)]
        number = self._number(_U32)
        if number not in GGUF_TYPES:
            raise ValueError(f"{name} is in a type that is not read: number {number} of ggml's")
        kind, block, block_bytes = GGUF_TYPES[number]
        if not sides or 0 in sides or sides[0] % block:
            raise ValueError(f"{name} is {sides[::-1]}, and {kind} has blocks of {block}")
        num_bytes = prod(sides) // block * block_bytes
        return kind, tuple(sides[::-1]), self._number(_U64), num_bytes

    def _value(self, name: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text(name)
        if kind != _LIST:
            raise ValueError(f"{name} is of an unknown kind, {kind}")
        inner = self._number(_U32)
        count = self._number(_U64)
        if inner in _NUMBERS:
            if count > self._numbers_left:
                raise ValueError(
                    f"{name} has {count:,} numbers, of {_MOST_NUMBERS:,} at most in all"
                )
            self._numbers_left -= count
            self._skip(count * _NUMBERS[inner].size, name)
        elif inner == _TEXT:
            if count > self._texts_left:
                raise ValueError(f"{name} has {count:,} texts, of {_MOST_TEXTS:,} at most in all")
            self._texts_left -= count
            self._skip_texts(count, name)
        else:
            raise ValueError(f"{name} is a list of items of an unknown kind, {inner}")
        return GgufList(num_items=count)

    def _skip_texts(self, count: int, what: str) -> None:
        """Go through pieces of the file: a vocabulary has 300,000 tokens and merges."""
        piece, at = b"", 0
        for _ in range(count):
            if len(piece) - at < _U64.size:
                piece, at = piece[at:] + self._read(min(_PIECE_BYTES, self._left), what), 0
                if len(piece) < _U64.size:
                    raise ValueError(f"it ends in {what}: download it again")
            at += _U64.size + _U64.unpack_from(piece, at)[0]
            if at > len(piece):
                self._skip(at - len(piece), what)
                piece, at = b"", 0
        self._skip(at - len(piece), what)  # back

    def _text(self, what: str) -> str:
        length = self._count(_U64, f"length of {what}", _MOST_TEXT_BYTES)
        return self._read(length, what).decode()  # UnicodeDecodeError is a ValueError

    def _count(self, kind: struct.Struct, what: str, most: int) -> int:
        found: int = self._number(kind)
        if found > most:
            raise ValueError(f"its {what} is {found:,}; the most that is read is {most:,}")
        return found

    def _number(self, kind: struct.Struct) -> Any:
        return kind.unpack(self._read(kind.size, "a number"))[0]

    def _read(self, num_bytes: int, what: str) -> bytes:
        found = self._file.read(num_bytes) if num_bytes <= self._left else b""
        if len(found) < num_bytes:  # or the file has become shorter
            raise ValueError(f"it ends in {what}: download it again")
        self._left -= num_bytes
        return found

    def _skip(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._left:
            raise ValueError(f"it ends in {what}: download it again")
        self._file.seek(num_bytes, SEEK_CUR)
        self._left -= num_bytes
