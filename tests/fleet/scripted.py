"""A replica that says what a test puts in."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request


def piece(text: str = "a", **more: Any) -> TextDelta:
    return TextDelta(**{"index": 0, "text": text, "token_ids": (1,), "finish_reason": None, **more})


async def read(pieces: AsyncGenerator[TextDelta, None]) -> list[TextDelta]:
    return [delta async for delta in pieces]


LAST = piece("z", finish_reason="length")


class Scripted:
    """A replica that says what a test puts in, of each request."""

    name = "scripted"

    def __init__(self) -> None:
        self.puts: dict[str, asyncio.Queue[TextDelta | Exception]] = {}
        self.asked: dict[str, Request] = {}
        self.left: list[str] = []

    async def generate(
        self, request: Request, *, request_id: str
    ) -> AsyncGenerator[TextDelta, None]:
        self.asked[request_id] = request
        own = self.puts.setdefault(request_id, asyncio.Queue())
        try:
            while True:
                said = await own.get()
                if isinstance(said, Exception):
                    raise said
                yield said
                if said.finish_reason is not None:
                    return
        finally:
            self.left.append(request_id)

    def put(self, request_id: str, said: TextDelta | Exception) -> None:
        self.puts.setdefault(request_id, asyncio.Queue()).put_nowait(said)
