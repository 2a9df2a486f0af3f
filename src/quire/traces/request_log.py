"""Write Quire's own trace: a line of JSON per request, without any text.

The first line has the version and the tokens of a hash id::

    {"quire_trace": 1, "id_tokens": 16}
    {"at_s": 0.0, "input_tokens": 37, "output_tokens": 120, "hash_ids": [5121…, 902…, 77…]}
    {"at_s": 0.8, "input_tokens": 52, "output_tokens": 9, "hash_ids": […], "session": "a"}

A hash id is 63 bits of a chained hash over the token ids of a block and all blocks before it. Its
random key is of this file alone and is thrown away. So the file shows equal prefixes, but neither
what they are, nor whether another file has them. ``trace_formats`` reads it.
"""

from collections.abc import Sequence
from hashlib import blake2b
from secrets import token_bytes
from typing import IO, Final, final

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from msgspec.json import encode

from quire.traces.trace import TraceRequest

VERSION: Final = 1


class LogHead(Struct):
    """The first line."""

    quire_trace: int
    id_tokens: int

    def __post_init__(self) -> None:
        if self.quire_trace != VERSION:
            raise ValueError(f"quire_trace {self.quire_trace} is unknown; known: {VERSION}")
        if self.id_tokens < 1:
            raise ValueError(f"id_tokens {self.id_tokens} must be at least 1")


class LogRow(Struct):
    """Each line after it."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str | int | UnsetType = UNSET

    def request(self, id_tokens: int) -> TraceRequest:
        """Return the row as a request."""
        return TraceRequest(
            at_s=self.at_s,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            hash_ids=self.hash_ids,
            id_tokens=id_tokens if self.hash_ids else 0,
            session=None if self.session is UNSET else self.session,
        )


@final
class RequestLog:
    """Writes requests to a binary file in the order of their arrival.

    It writes a request once that and all earlier ones have ended.
    """

    def __init__(self, file: IO[bytes], *, id_tokens: int = 16) -> None:
        self._file, self._id_tokens = file, id_tokens
        self._key = token_bytes(32)
        self._num_begun = self._num_written = 0
        self._under_way: dict[int, LogRow] = {}
        self._ended: dict[int, LogRow] = {}
        file.write(encode(LogHead(quire_trace=VERSION, id_tokens=id_tokens)) + b"\n")

    def begin(
        self,
        at_s: float,
        token_ids: Sequence[int],
        session: str | int | None = None,
        *,
        apart: str = "",
    ) -> int:
        """Add a request that has arrived. Returns: its number, for ``end``.

        Prompts with different ``apart`` have no hash ids in common.
        """
        number = self._num_begun
        self._num_begun += 1
        self._under_way[number] = LogRow(
            at_s=at_s,
            input_tokens=len(token_ids),
            output_tokens=0,
            hash_ids=self._ids(token_ids, apart),
            session=UNSET if session is None else session,
        )
        return number

    def end(self, number: int, output_tokens: int) -> None:
        """End a request that generated ``output_tokens``."""
        row = self._ended[number] = self._under_way.pop(number)
        row.output_tokens = output_tokens
        while (following := self._ended.pop(self._num_written, None)) is not None:
            self._file.write(encode(following) + b"\n")
            self._num_written += 1

    def write(
        self,
        at_s: float,
        token_ids: Sequence[int],
        output_tokens: int,
        session: str | int | None = None,
    ) -> None:
        """Write a request that has ended."""
        self.end(self.begin(at_s, token_ids, session), output_tokens)

    def _ids(self, token_ids: Sequence[int], apart: str) -> tuple[int, ...]:
        data = np.asarray(token_ids, np.int32).tobytes()
        size = 4 * self._id_tokens
        digest = blake2b(apart.encode(), digest_size=16, key=self._key).digest()
        ids = []
        for start in range(0, len(data), size):
            block = data[start : start + size]
            digest = blake2b(digest + block, digest_size=16, key=self._key).digest()
            ids.append(int.from_bytes(digest[:8], "little") >> 1)
        return tuple(ids)
