"""A request in its plainest form, read in a few microseconds: whole, in one piece, nothing odd.

Nearly every client sends its request so. Whatever else may be meant by the bytes is for the parser
of HTTP to say; here it is only not plain.
"""

import re
from typing import NamedTuple

_HEAD = re.compile(
    rb"POST (/[!-~]*) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ \t]*[ -~]*\r\n)+)"
    rb"\r\n"
)
_MOST_HEAD_BYTES = 4096
# Who sends these wants more than an answer, or has more to say.
_ODD = ("transfer-encoding", "expect", "upgrade", "te", "trailer")


class PlainPost(NamedTuple):
    """``headers`` have lower case names, each once."""

    target: str
    headers: dict[str, str]


def plain_post(data: bytes) -> PlainPost | None:
    """A POST with all of its body, on a connection that stays; None: perhaps something else."""
    head = _HEAD.match(data, 0, _MOST_HEAD_BYTES)
    if head is None:
        return None
    headers: dict[str, str] = {}
    for line in head[2].decode("ascii").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name = name.lower()
        if name in headers or name in _ODD:
            return None
        headers[name] = value.strip(" \t")
    length = headers.get("content-length", "")
    stays = headers.get("connection", "keep-alive").lower() == "keep-alive"
    whole = length.isdigit() and len(length) < 12 and int(length) == len(data) - head.end()
    if not (whole and stays and "host" in headers):
        return None
    return PlainPost(head[1].decode("ascii"), headers)
