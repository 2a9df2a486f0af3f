"""Pictures in messages: bytes become Pillow's pictures, under bounds. A video comes as its frames.

A picture's size is known before its pixels are made, so that a small file cannot become a large
picture. So is the work of making them: a JPEG file may draw each pixel many times, and a file may
have millions of parts that are no picture.
"""

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quire.chat.plain_json import VideoAddress
from quire.errors import RequestError
from quire.units import format_count

MOST_PIXELS = 2**25  # of a prompt's pictures: 96 MiB of colours
_MOST_DRAWN = 2**30  # pixels of all scans of all JPEG files; a common one has up to 10 scans
# Of the longer side to the shorter one, as Qwen-VL has it: a processor that brings the shorter one
# to its size would make a large picture of a thin one.
_MOST_OBLONG = 200
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
_FRAMES = "data:video/jpeg;base64,"  # then frames, with commas between them, as vLLM has it
_FRAMES_A_SECOND = 2.0  # as vLLM says of them
_MOST_FRAMES = 1024  # of a video: each is opened, however small
_NONE: Mapping[int, bytes] = MappingProxyType({})
_MOST_PARTS = 10_000  # of a file: each takes some microseconds, and a hundred bytes
_MOST_PARTS_TOGETHER = 64 * _MOST_PARTS
_MOST_PACKED = 64  # of all files: each is a MiB at most once it is unpacked, by Pillow's own limit
_PNG, _JPEG, _GIF = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", (b"GIF87a", b"GIF89a")
_CRUMB = 2**10  # bytes: pixels in smaller pieces take time by their pieces
_PACKED = (b"zTXt", b"iTXt", b"iCCP")
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


def count_shown(given: Sequence[Any]) -> tuple[int, int]:
    """Return how many images and videos there are."""
    videos = sum(isinstance(each, VideoAddress) for each in given)
    return len(given) - videos, videos


def open_shown(
    given: Sequence[Any], fetched: Mapping[int, bytes] = _NONE
) -> tuple[list[Any], list[Any], int]:
    """Return what a prompt's messages show: pictures, videos as ``Vision.read`` takes them, pixels.

    ``fetched`` has the bytes of pictures that are elsewhere, by number; all pictures and frames
    have their bounds together. Pictures in memory stay as they are, and have no bounds.

    Raises: as ``open_pictures``.
    """
    files: list[bytes] = []
    names: list[str] = []
    spans: list[slice] = []
    for number, each in enumerate(given):
        begin = len(files)
        if isinstance(each, VideoAddress):
            files += _frames_of(each.url, number)
            names += [f"video_url: number {number}, frame {i}" for i in range(len(files) - begin)]
        elif isinstance(each, str):
            files.append(fetched[number] if number in fetched else data_of(each, number))
            names.append(_named(number))
        spans.append(slice(begin, len(files)))
    opened = open_pictures(files, names)
    pictures: list[Any] = []
    videos: list[Any] = []
    for each, span in zip(given, spans, strict=True):
        if isinstance(each, VideoAddress):
            videos.append((opened[span], {"fps": _FRAMES_A_SECOND}))
        else:
            pictures += opened[span] if isinstance(each, str) else [each]
    return pictures, videos, sum(picture.width * picture.height for picture in opened)


def _frames_of(url: str, number: int) -> list[bytes]:
    """Return a video's frames, a file each. Raises: RequestError for a file of a video."""
    name = f"video_url: number {number}"
    if not url[: len(_FRAMES)].lower().startswith(_FRAMES):
        raise RequestError(
            f"{name} is {url[:40]!r}: no file of a video is decoded here: send its frames as "
            f"{_FRAMES}FRAME,FRAME,…, each a JPEG file in base64, two of them a second; or some of "
            "them as images"
        )
    frames = url[len(_FRAMES) :].split(",", _MOST_FRAMES)
    if len(frames) > _MOST_FRAMES:
        raise RequestError(f"{name} has more than {format_count(_MOST_FRAMES)} frames: send fewer")
    try:
        return [base64.b64decode(frame, validate=True) for frame in frames]
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name} is not base64: {error}") from None


def open_pictures(files: Sequence[bytes], names: Sequence[str] = ()) -> list[Any]:
    """Return the pictures of files as Pillow's, of which only the sizes have been read.

    ``names``: what messages call each.

    Raises: RequestError naming the one that is no picture, of another kind, or too large;
    ModuleNotFoundError without Pillow.
    """
    from PIL import Image

    left, packed, all_parts, drawn = MOST_PIXELS, 0, 0, 0
    found: list[Any] = []
    for number, data in enumerate(files):
        name = names[number] if names else _named(number)
        parts, own = _parts(data)
        packed += own
        all_parts += parts
        if parts > _MOST_PARTS or all_parts > _MOST_PARTS_TOGETHER or packed > _MOST_PACKED:
            raise bad(
                name,
                f"has more than {format_count(_MOST_PARTS)} parts beside its pixels, or all "
                f"together more than {_MOST_PACKED} that are packed: save it without comments",
            )
        try:
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
        except Exception as error:  # each format has kinds of its own
            said = " ".join(str(error).split())[:120].replace(f" {io.BytesIO.__name__}", "")
            raise bad(name, f"cannot be read: {type(error).__name__}: {said}") from None
        width, height = opened.size
        left -= width * height
        if left < 0:
            raise bad(
                name,
                f"has {format_count(width)} × {format_count(height)} pixels, and all together may "
                f"have {format_count(MOST_PIXELS)}",
            )
        if max(width, height) > _MOST_OBLONG * min(width, height):
            raise bad(
                name,
                f"has {format_count(width)} × {format_count(height)} pixels, and the longer side "
                f"may have {_MOST_OBLONG} times as many as the shorter one",
            )
        scans = data.count(_SCAN) if data.startswith(_JPEG) else 1  # of an album (MPO) too
        drawn += scans * width * height
        if drawn > _MOST_DRAWN:
            raise bad(
                name,
                f"draws each of its {format_count(width)} × {format_count(height)} pixels in "
                f"{format_count(scans)} scans: save it with fewer",
            )
        found.append(opened)
    return found


def _parts(data: bytes) -> tuple[int, int]:
    """Count a file's parts beside its pixels, and of these the packed ones; it stops at too many.

    A file that is no such file has none: it is refused when it is opened.
    """
    if data.startswith(_PNG):
        return _chunks(data)
    if data.startswith(_JPEG):
        return _segments(data), 0
    return (_blocks(data), 0) if data.startswith(_GIF) else (0, 0)


def _chunks(data: bytes) -> tuple[int, int]:
    """Count those of a PNG file, behind its pixels too; small pieces of pixels are such."""
    parts = packed = 0
    place = len(_PNG)
    while place + 8 <= len(data) and parts <= _MOST_PARTS:
        length, kind = int.from_bytes(data[place : place + 4]), data[place + 4 : place + 8]
        parts += kind != b"IDAT" or length < _CRUMB
        packed += kind in _PACKED
        place += 12 + length
    return parts, packed


def _segments(data: bytes) -> int:
    """Count those of a JPEG file before its first scan; a byte between them is one, too."""
    parts, place = 0, 2
    while place + 4 <= len(data) and parts <= _MOST_PARTS:
        parts += 1
        if data[place : place + 2] == _SCAN:
            break
        is_marker = data[place] == 0xFF and data[place + 1] not in (0x00, 0xFF)
        place += 2 + int.from_bytes(data[place + 2 : place + 4]) if is_marker else 1
    return parts


def _blocks(data: bytes) -> int:
    """Count those of a GIF file before its first picture."""
    flags = data[10] if len(data) > 10 else 0
    parts, place = 0, 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while place < len(data) and data[place] == 0x21 and parts <= _MOST_PARTS:
        place += 2
        size = 1
        while size and place < len(data) and parts <= _MOST_PARTS:
            size = data[place]
            place += 1 + size
            parts += 1
    return parts


def bad(name: int | str, why: str) -> RequestError:
    """Return what to say of a picture that cannot be had, by its number or its name."""
    return RequestError(f"{_named(name) if isinstance(name, int) else name} {why}")


def _named(number: int) -> str:
    return f"image_url: number {number}"
