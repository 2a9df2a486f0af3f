"""Pictures in a request: their bytes, which come with it or are named by it, and their pixels.

A video comes as the pictures of its frames.

Requests that are under way cannot hold more pixels than the server allows.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from quire.chat.conversation import ChatInput, ChatPrompt
from quire.chat.picture_bounds import bad, count_shown, open_shown
from quire.engine.prompts import ShownPrompt
from quire.errors import RequestError
from quire.server.admission_control import BYTES_OF_PIXEL
from quire.server.request_context import RequestContext
from quire.server.wire.error_responses import Refused
from quire.server.wire.streams import while_connected

_COLOURS = 3  # bytes of a pixel


async def chat_token_ids(context: RequestContext, chat: ChatInput) -> tuple[int, ...]:
    """Return the tokens of a conversation's prompt, those of its images too.

    Raises: as ``shown_prompt``.
    """
    prompt = await context.in_text_thread(context.service.chat.prompt, chat)
    if not prompt.images:
        return prompt.token_ids
    return (await shown_prompt(context, prompt, chat)).token_ids


async def shown_prompt(context: RequestContext, prompt: ChatPrompt, chat: ChatInput) -> ShownPrompt:
    """Read a prompt's images, in threads, and return it with them.

    Their pixels are made once it is known that the server has room for them, and count until it has
    answered; so does what the processor makes of them, if that is more.
    Raises: Refused; RequestError; ClientGone.
    """
    vision = context.service.engine.facts.vision
    vision.check_numbers(*count_shown(prompt.images))
    fetched = await while_connected(context.http.receive, _fetched(context, prompt.images))
    num_bytes = sum(map(len, fetched.values()))
    pictures, videos, num_pixels = await context.in_text_thread(
        _opened, prompt.images, fetched, num_bytes=num_bytes
    )
    admission, held = context.service.admission, context.until_answered.enter_context(ExitStack())
    held.enter_context(admission.hold_pixels(num_pixels))

    def shown() -> tuple[ShownPrompt, int]:
        read = vision.read(
            prompt.text, pictures, videos, add_special_tokens=chat.add_special_tokens
        )
        return ShownPrompt(token_ids=read.token_ids, images=read), read.num_bytes

    found, num_bytes = await context.in_text_thread(shown, num_bytes=_COLOURS * num_pixels)
    # A processor may make a large picture of a small one: what it made counts as pixels would.
    made = -(-num_bytes // BYTES_OF_PIXEL)
    held.close()
    held.enter_context(admission.hold_pixels(max(num_pixels, made)))
    return found


async def _fetched(context: RequestContext, addresses: Sequence[Any]) -> dict[int, bytes]:
    """Return the bytes of pictures that are elsewhere, by number. They count as the key's bodies.

    Raises: as ``shown_prompt``.
    """
    media, caller = context.service.media, context.caller
    take = context.until_queued.enter_context(context.service.bodies.one(caller))

    async def one(number: int, url: str) -> bytes:
        try:
            return await media.read(url, caller.number, take)
        except RequestError as error:
            raise bad(number, f"cannot be had: {error}") from None

    doing = {
        number: asyncio.ensure_future(one(number, address))
        for number, address in enumerate(addresses)
        if isinstance(address, str) and media.reads(address)
    }
    try:
        return dict(zip(doing, await asyncio.gather(*doing.values()), strict=True))
    finally:
        for task in doing.values():
            task.cancel()
        await asyncio.gather(*doing.values(), return_exceptions=True)


def _opened(
    addresses: Sequence[Any], fetched: Mapping[int, bytes]
) -> tuple[list[Any], list[Any], int]:
    """Open all pictures. Raises: Refused where Pillow is not installed; RequestError."""
    try:
        return open_shown(addresses, fetched)
    except ModuleNotFoundError as error:
        raise Refused(
            501,
            f"this server cannot read pictures ({error}): its operator can pip install "
            "'quire-kv[images]'",
            code="not_installed",
        ) from error
