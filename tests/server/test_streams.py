"""Streams of events: pings while nothing comes, and nothing left behind."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from quire.server.wire.streams import EventStream
from server.asking import run


def stream(events: AsyncGenerator[bytes, None], **options: Any) -> EventStream[bytes]:
    defaults: dict[str, Any] = {"send_timeout_s": 10.0, "headers": {}, "ping": b"<ping>"}
    return EventStream(events, **{**defaults, **options})


async def stays() -> Any:
    """A client that never leaves."""
    await asyncio.Event().wait()


def test_pings_fill_the_silence_and_change_nothing_else() -> None:
    async def ask() -> None:
        goes_on = asyncio.Event()
        sent: list[bytes] = []

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"1"
            await goes_on.wait()
            yield b"2"

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if sent.count(b"<ping>") == 3:
                goes_on.set()

        await stream(events(), ping_s=0.001)({}, stays, send)
        assert [data for data in sent if data != b"<ping>"] == [b"", b"1", b"2", b""]
        assert sent[1:5] == [b"1", b"<ping>", b"<ping>", b"<ping>"]
        num_sent = len(sent)
        await asyncio.sleep(0.01)
        assert len(sent) == num_sent  # none after the end

    run(ask())


def test_a_ping_waits_for_an_event_that_is_being_sent() -> None:
    async def ask() -> None:
        reads, pinged, under_way = asyncio.Event(), asyncio.Event(), 0
        sent: list[bytes] = []

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"1"
            await pinged.wait()

        async def send(message: Any) -> None:
            nonlocal under_way
            under_way += 1
            assert under_way == 1
            if message.get("body") == b"1":
                asyncio.get_running_loop().call_later(0.02, reads.set)
                await reads.wait()
            sent.append(message.get("body", b""))
            if sent[-1] == b"<ping>":
                pinged.set()
            under_way -= 1

        await stream(events(), ping_s=0.001)({}, stays, send)
        assert sent[:3] == [b"", b"1", b"<ping>"]
        assert sent[-1] == b""

    run(ask())


def test_leaving_ends_what_is_waited_for() -> None:
    async def ask() -> None:
        tasks = asyncio.all_tasks()
        ended: list[str] = []
        pinged = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                yield b"1"
                await asyncio.Event().wait()
            finally:
                ended.append("left")

        async def receive() -> Any:
            await pinged.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body") == b"<ping>":
                pinged.set()

        try:
            await stream(events(), ping_s=0.001)({}, receive, send)
        except Exception as gone:
            ended.append(type(gone).__name__)
        assert ended == ["left", "ClientGone"]
        assert asyncio.all_tasks() == tasks

    run(ask())
