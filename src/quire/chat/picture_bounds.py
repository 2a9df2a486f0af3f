"""Pictures in messages: bytes become Pillow's pictures, under bounds.

A picture's size is known before its pixels are made, so that a small file cannot become a large
picture. So is the work of making them: a JPEG file may draw each pixel many times.
"""

import base64
import binascii
import io
import re
from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError
from quire.units import format_count

MOST_PIXELS = 2**25  # of a prompt's pictures: 96 MiB of colours
_MOST_DRAWN = 2**30  # pixels of all scans of a JPEG file; a common one has up to 10
# Of the longer side to the shorter one, as Qwen-VL has it: a processor that brings the shorter one
# to its size would make a large picture of a thin one.
_MOST_OBLONG = 200
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
_SCAN = b"\xff\xda"  # begins one; among a scan's own bytes 0xff is followed by zero


def data_of(url: object, number: int) -> bytes:
    """Return the bytes of a ``data:`` URL. Raises: RequestError for anything else."""
    head = _URL.match(url) if isinstance(url, str) else None
    if head is None:
        raise bad(
            number,
            f"is {str(url)[:40]!r}: give it as data:image/png;base64,… (JPEG, WebP, GIF and BMP "
            "too)",
        )
    try:
        return base64.b64decode(str(url)[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(number, f"is not base64: {error}") from None


def open_pictures(files: Sequence[bytes]) -> list[Any]:
    """Return the pictures of files as Pillow's, of which only the sizes have been read.

    Raises: RequestError naming the one that is no picture, of another kind, or too large;
    ModuleNotFoundError without Pillow.
    """
    from PIL import Image

    left = MOST_PIXELS
    found: list[Any] = []
    for number, data in enumerate(files):
        try:
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
        except Exception as error:  # each format has kinds of its own
            said = " ".join(str(error).split())[:120].replace(f" {io.BytesIO.__name__}", "")
            raise bad(number, f"cannot be read: {type(error).__name__}: {said}") from None
        width, height = opened.size
        left -= width * height
        if left < 0:
            raise bad(
                number,
                f"has {format_count(width)} × {format_count(height)} pixels, and all together may "
                f"have {format_count(MOST_PIXELS)}",
            )
        if max(width, height) > _MOST_OBLONG * min(width, height):
            raise bad(
                number,
                f"has {format_count(width)} × {format_count(height)} pixels, and the longer side "
                f"may have {_MOST_OBLONG} times as many as the shorter one",
            )
        scans = data.count(_SCAN) if opened.format == "JPEG" else 1
        if scans * width * height > _MOST_DRAWN:
            raise bad(
                number,
                f"draws each of its {format_count(width)} × {format_count(height)} pixels in "
                f"{format_count(scans)} scans: save it with fewer",
            )
        found.append(opened)
    return found


def bad(number: int, why: str) -> RequestError:
    """Return what to say of a picture that cannot be had."""
    return RequestError(f"image_url: number {number} {why}")
