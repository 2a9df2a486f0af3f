"""Forms with a file in them (multipart/form-data): their parts, all numbers of them bounded.

python-multipart cuts them. Parts are counted before, as each takes it steps in Python. Source: RFC
7578, RFC 2046 section 5.1.
"""

from collections.abc import Callable
from typing import Any, final

from starlette.datastructures import Headers

from quire.server.wire.error_responses import Refused

_MOST_PARTS = 64
_MOST_BOUNDARY = 70  # characters; Source: RFC 2046, section 5.1.1
_UNPACKED = ("", "7bit", "8bit", "binary")


def boundary_of(headers: Headers) -> bytes:
    """Return the boundary between the parts of a body. Raises: Refused for another kind of body
    (415), for a form without a boundary (400), and where python-multipart is not installed (501).
    """
    try:
        from python_multipart.multipart import parse_options_header
    except ImportError as error:
        raise not_installed(error) from error
    given = headers.get("content-type", "")
    kind, options = parse_options_header(given)
    if kind != b"multipart/form-data":
        raise Refused(
            415,
            f"the body must be a form with a file in it (multipart/form-data), and its "
            f"content-type is {given[:60]!r}",
            code="unsupported_content_type",
        )
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise _bad(
            f"its content-type has no boundary=…, of up to {_MOST_BOUNDARY} characters, which "
            "stands between its parts: let the client's library write that header"
        )
    return boundary


def parse_form(data: bytes, boundary: bytes) -> dict[str, Any]:
    """Return files as bytes and other fields as texts; all of a name that ends with []. Raises:
    Refused (400) saying what is wrong.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser

    if data.count(b"--" + boundary) > _MOST_PARTS + 1:
        raise _bad(f"it may have {_MOST_PARTS} parts")
    if any(b"--" + boundary + blank in data for blank in (b" ", b"\t")):
        raise _bad(
            "blanks stand behind a boundary"
        )  # each costs the parser a step, and no client writes them
    reading = _Reading()
    try:
        MultipartParser(boundary, reading.callbacks()).write(data)
    except FormParserError as error:
        raise _bad(str(error)) from None
    if not reading.is_over:
        raise _bad("its end is missing: two hyphens behind the last boundary")
    return reading.fields


def not_installed(error: ImportError) -> Refused:
    """Return the refusal where a package of the extra is missing."""
    return Refused(
        501,
        f"this server cannot read audio ({error}): its operator can pip install 'quire-kv[audio]'",
        code="not_installed",
    )


def _bad(why: str) -> Refused:
    return Refused(400, f"the form cannot be read: {why}", code="bad_form")


@final
class _Reading:
    """What the parser has found so far."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.is_over = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""  # of a header
        self._data: list[bytes] = []

    def callbacks(self) -> Any:
        """Return the callbacks by the parser's names for them."""
        found: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._end,
            "on_end": self._over,
        }
        return found

    def _begin(self) -> None:
        self._headers, self._data = {}, []

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def _over(self) -> None:
        self.is_over = True

    def _end(self) -> None:
        """Raises: Refused."""
        name, is_file = self._described()
        data = b"".join(self._data)
        value: bytes | str = data
        if not is_file:
            try:
                value = data.decode()
            except UnicodeDecodeError as error:
                raise _bad(f"{name[:40]!r} is no text in UTF-8: {error.reason}") from None
        if name == "file" and not is_file:  # msgspec would read a text as base64
            raise _bad("'file' is a text: send it as a file, with a filename")
        if name.endswith("[]"):
            self.fields.setdefault(name, []).append(value)
        elif name in self.fields:
            raise _bad(f"{name[:40]!r} is there twice")
        else:
            self.fields[name] = value

    def _described(self) -> tuple[str, bool]:
        """Return the name of the part, and whether it is a file. Raises: Refused."""
        from python_multipart.multipart import parse_options_header

        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        try:
            name = options.get(b"name", b"").decode()
        except UnicodeDecodeError:
            name = ""
        if kind != b"form-data" or not name:
            raise _bad("a part has no content-disposition: form-data with a name")
        if self._headers.get(b"content-type", b"").lower().startswith(b"multipart/"):
            raise _bad(f"{name[:40]!r} is a form within the form: send its parts one by one")
        packed = self._headers.get(b"content-transfer-encoding", b"").decode(errors="replace")
        if packed.strip().lower() not in _UNPACKED:
            raise _bad(f"{name[:40]!r} is packed ({packed[:20]!r}): send it as it is")
        return name, b"filename" in options
