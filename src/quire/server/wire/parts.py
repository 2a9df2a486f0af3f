"""What comes in, cut so that the parser of HTTP never holds the event loop for long.

h11 reads all that it is given in one go, with regular expressions that take quadratic time over
blanks: 32 KB of them in one header took seven seconds, 64 KB of one-byte chunks an eighth of one.
So it is given a head that is whole and small and has no byte in it that no head may have, and of
a body at most a few chunks at a time.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import final

MOST_HEAD_BYTES = 16 * 1024
MOST_HEAD_LINES = 100
# Each of these costs h11, or who decodes the path, a step in Python or in a slow expression.
_MOST_SIGNS: Mapping[str, tuple[bytes, int]] = MappingProxyType(
    {
        "lines": (b"\n", MOST_HEAD_LINES),
        "commas": (b",", 1_000),
        "percent signs": (b"%", 1_000),
        "blanks": (b" ", 2_000),
        "tabs": (b"\t", 1_000),
    }
)
_MOST_LINE_BYTES = 8_000  # of the line with the path; Source: RFC 9110, section 4.1
_MOST_BODY_BYTES = 64 * 1024  # in one part
_MOST_CHUNKS = 16  # in one part
_MOST_CHUNK_LINE = 64

_BLANK_LINE = re.compile(rb"\n\r?\n")
_NOT_IN_A_HEAD = bytes((*range(9), 11, 12, *range(14, 32), 127))


class Malformed(Exception):
    """What has come is no HTTP that is read here; the message is for the client, in ASCII."""


@final
class Parts:
    """Of one connection. ``body`` has to be told after each head what comes behind it."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._seen = 0  # bytes in which no end of a head was found
        self._left = 0  # of a body, or of a chunk with its line end
        self._is_chunked = self._is_over = False

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes) -> None:
        self._data += data

    def body(self, length: int | None) -> None:
        """After a head: so many bytes, or None for chunks."""
        self._left, self._is_chunked, self._is_over = length or 0, length is None, False

    def head(self) -> bytes:
        """A whole one, or nothing yet. Raises: Malformed."""
        found = _BLANK_LINE.search(self._data, self._seen, MOST_HEAD_BYTES)
        if found is None:
            self._seen = max(0, len(self._data) - 2)
            if len(self._data) >= MOST_HEAD_BYTES:
                raise Malformed(f"A request's head may have {MOST_HEAD_BYTES:,} bytes.")
            # Of what is no request at all, as of https, the end need not come.
            if self._data and self._data[0] <= 32:
                raise Malformed("Invalid HTTP request received.")
            return b""
        head = self._take(found.end())
        if head.find(b"\n") > _MOST_LINE_BYTES:
            raise Malformed(f"A request's line may have {_MOST_LINE_BYTES:,} bytes.")
        if len(head.translate(None, _NOT_IN_A_HEAD)) < len(head) or head.count(b"\r") > head.count(
            b"\r\n"
        ):
            raise Malformed("A request's head has a control character in it.")
        for what, (sign, most) in _MOST_SIGNS.items():
            if head.count(sign) > most:
                raise Malformed(f"A request's head may have {most:,} {what}.")
        return head

    def of_body(self) -> bytes:
        """What there is of it, up to so much; nothing if more has to come. Raises: Malformed."""
        if self._is_chunked:
            return self._take(self._chunks())
        part = self._take(min(self._left, _MOST_BODY_BYTES))
        self._left -= len(part)
        return part

    def _chunks(self) -> int:
        """Bytes from here on that are a few chunks, or parts of some."""
        end = 0
        for _ in range(_MOST_CHUNKS):
            inside = min(self._left, len(self._data) - end, _MOST_BODY_BYTES)
            self._left -= inside
            end += inside
            if self._left:
                break
            if self._is_over:
                last = self._data[end : end + 2]
                if not b"\r\n".startswith(last):
                    raise Malformed("Trailers are not read.")
                return end + 2 if len(last) == 2 else end
            line = self._data.find(b"\r\n", end, end + _MOST_CHUNK_LINE)
            if line < 0:
                if len(self._data) - end >= _MOST_CHUNK_LINE:
                    raise Malformed(f"The line before a chunk may have {_MOST_CHUNK_LINE} bytes.")
                break
            size = self._data[end:line].partition(b";")[0].strip(b" \t")
            if not size.isalnum() or size.translate(None, b"0123456789abcdefABCDEF"):
                raise Malformed("A chunk has no size in front of it.")
            end, self._is_over = line + 2, int(size, 16) == 0
            self._left = 0 if self._is_over else int(size, 16) + 2
        return end

    def _take(self, count: int) -> bytes:
        part = bytes(self._data[:count])
        del self._data[:count]
        if part:
            self._seen = 0
        return part
