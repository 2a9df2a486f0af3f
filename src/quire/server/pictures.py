"""Pictures in a request: ``data:`` URLs, read with Pillow under bounds.

A picture's size is known before its pixels are made, so that a small file cannot become a large
picture, and requests that are under way cannot hold more pixels than the server allows. Nothing is
fetched from elsewhere.
"""

import base64
import binascii
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quire.chat.conversation import ChatInput, ChatPrompt
from quire.engine.prompts import ShownPrompt
from quire.server.request_context import RequestContext
from quire.server.wire.error_responses import Refused
from quire.units import format_count

MOST_PICTURES = 64  # in a request
MOST_PIXELS = 2**25  # of all of them: 96 MiB of colours
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


async def shown_prompt(context: RequestContext, prompt: ChatPrompt, chat: ChatInput) -> ShownPrompt:
    """Read a prompt's images, in a thread, and return it with them.

    Their pixels are made once it is known that the server has room for them, until it has answered.
    Raises: Refused; RequestError.
    """
    vision = context.service.engine.facts.vision
    opened = await context.in_text_thread(open_pictures, prompt.image_urls)
    num_pixels = sum(picture.width * picture.height for picture in opened)
    context.until_answered.enter_context(context.service.admission.hold_pixels(num_pixels))

    def shown() -> ShownPrompt:
        pictures = in_colours(opened)
        read = vision.read(prompt.text, pictures, add_special_tokens=chat.add_special_tokens)
        return ShownPrompt(token_ids=read.token_ids, images=read)

    return await context.in_text_thread(shown)


def open_pictures(urls: Sequence[str]) -> list[Any]:
    """Return the pictures of ``data:`` URLs as Pillow's, of which only the sizes have been read.

    Raises: Refused for what is no picture, of another kind, or too large (400), and where Pillow is
    not installed (501).
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise Refused(
            501,
            f"this server cannot read pictures ({error}): its operator can pip install "
            "'quire[images]'",
            code="not_installed",
        ) from error
    if len(urls) > MOST_PICTURES:
        raise _bad(f"there are {len(urls)} and may be {MOST_PICTURES}")
    left = MOST_PIXELS
    found: list[Any] = []
    for number, url in enumerate(urls):
        data = _data(url, number)
        with _readable(number):
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = opened.size
        left -= width * height
        if left < 0:
            raise _bad(
                f"number {number} has {format_count(width)} × {format_count(height)} "
                f"pixels, and all together may have {format_count(MOST_PIXELS)}"
            )
        found.append(opened)
    return found


def in_colours(opened: Sequence[Any]) -> list[Any]:
    """Make the pixels of pictures: in colours, and the right way up. Raises: Refused (400)."""
    from PIL import ImageOps

    found: list[Any] = []
    for number, picture in enumerate(opened):
        with _readable(number), picture:
            found.append(ImageOps.exif_transpose(picture).convert("RGB"))
    return found


@contextmanager
def _readable(number: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each format has kinds of its own
        said = " ".join(str(error).split())[:120].replace(f" {io.BytesIO.__name__}", "")
        raise _bad(f"number {number} cannot be read: {type(error).__name__}: {said}") from None


def _data(url: str, number: int) -> bytes:
    head = _URL.match(url)
    if head is None:
        raise _bad(
            f"number {number} is {url[:40]!r}: give it as data:image/png;base64,… (JPEG, WebP, GIF "
            "and BMP too), for this server fetches nothing"
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(f"number {number} is not base64: {error}") from None


def _bad(why: str) -> Refused:
    return Refused(400, f"image_url: {why}", code="bad_image")
