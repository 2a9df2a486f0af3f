"""Many answers as one stream: each reader gets its own, whole, and no message waits for another."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import pytest

from fleet.replicas import engine, until
from fleet.scripted import LAST, Scripted, piece, read
from quire import SamplingParams
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.errors import RequestError, RequestTooLong
from quire.fleet import shared_stream
from quire.fleet.replica import LocalReplica, ReplicaLost, ReplicaRefused
from quire.fleet.shared_stream import Inbox, Message, Outbox, packed, unpacked
from server.asking import run

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [f"def f{n}(x):\n    return " for n in range(6)]


class Wire:
    """An outbox as far away as pickles are. It keeps messages, and can break."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.sent: list[Message] = []
        self.breaks = asyncio.Event()
        self.hears = True  # what the door tells

    async def read(self, take: Callable[[Message], None]) -> None:
        broken = asyncio.ensure_future(self.breaks.wait())
        passing = asyncio.ensure_future(self._pass(take))
        try:
            await asyncio.wait({passing, broken}, return_when="FIRST_COMPLETED")
            if broken.done():
                raise ReplicaLost("the wire broke")
        finally:
            passing.cancel()
            broken.cancel()
            await asyncio.gather(passing, broken, return_exceptions=True)

    async def _pass(self, take: Callable[[Message], None]) -> None:
        async with aclosing(self._outbox.messages()) as messages:
            async for message in messages:
                self.sent.append(message)
                take(pickle.loads(pickle.dumps(message)))

    def begin(self, request: Request, request_id: str) -> None:
        self._outbox.begin(pickle.loads(pickle.dumps(request)), request_id)

    def leave(self, request_id: str) -> None:
        self._outbox.leave(request_id)

    def note_read(self, count: int) -> None:
        if self.hears:
            self._outbox.note_read(count)


@asynccontextmanager
async def joined(replica: Any) -> AsyncIterator[tuple[Inbox, Wire, Outbox]]:
    outbox = Outbox(replica)
    wire = Wire(outbox)
    inbox = Inbox("it", wire)
    try:
        yield inbox, wire, outbox
    finally:
        await inbox.close()


async def request(prompt: str = PROMPTS[0], params: SamplingParams = GREEDY) -> Request:
    return await engine("alone").request(prompt, params)


def test_answers_are_the_engines_own() -> None:
    async def ask() -> None:
        requests = [await request(prompt) for prompt in PROMPTS]
        local = LocalReplica("it", engine("alone"))
        async with joined(local) as (inbox, wire, _):
            want, found = [
                await asyncio.gather(
                    *(
                        read(generate(each, request_id=f"{way}{number}"))
                        for number, each in enumerate(requests)
                    )
                )
                for way, generate in (("alone", local.generate), ("joined", inbox.generate))
            ]
            texts = [["".join(each.text for each in own) for own in way] for way in (want, found)]
            assert texts[0] == texts[1]
            assert [own[-1].finish_reason for own in found] == ["length"] * len(PROMPTS)
            # A step's pieces go together: far fewer messages than pieces.
            assert len(wire.sent) < len(PROMPTS) * GREEDY.max_tokens / 2

    run(ask())


def test_a_piece_of_tokens_alone_travels_without_its_other_fields() -> None:
    plain = {
        "text": "ab",
        "token_ids": (7, 8),
        "choice": 2,
        "num_cached_tokens": 3,
        "num_retained_tokens": 1,
    }
    own = TextDelta(index=0, finish_reason=None, **plain)
    assert set(packed(own)) == set(plain.values())
    assert unpacked(packed(own)) == own
    for each in {one.name for one in fields(TextDelta)} - plain.keys():
        whole = replace(own, **{each: "something"})
        assert packed(whole) is whole, each


def test_a_piece_waits_for_no_other() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, *_):
            asked = await request()
            first, second = (inbox.generate(asked, request_id=name) for name in ("first", "second"))
            reads = [asyncio.ensure_future(anext(each)) for each in (first, second)]
            await until(lambda: len(replica.puts) == 2)
            replica.put("second", piece("now"))
            assert (await reads[1]).text == "now"
            assert not reads[0].done()
            replica.put("first", LAST)
            assert (await reads[0]).text == "z"
            await first.aclose()
            await second.aclose()
            await until(lambda: replica.left == ["first", "second"])

    run(ask())


def test_a_reader_that_leaves_ends_its_request_alone() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, *_):
            stays = asyncio.ensure_future(read(inbox.generate(await request(), request_id="stays")))
            leaves = asyncio.ensure_future(read(inbox.generate(await request(), request_id="goes")))
            await until(lambda: len(replica.puts) == 2)
            leaves.cancel()
            await until(lambda: replica.left == ["goes"])
            replica.put("stays", LAST)
            assert await stays == [LAST]

    run(ask())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ReplicaRefused("it drains"), ReplicaRefused),
        (RequestTooLong("too long"), RequestError),
        (OSError("no device"), ReplicaLost),
    ],
)
def test_an_error_is_its_requests_own(error: Exception, kind: type[Exception]) -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, *_):
            replica.put("other", piece())
            other = inbox.generate(await request(), request_id="other")
            await anext(other)
            replica.put("wrong", error)
            with pytest.raises(kind, match=str(error)):
                await read(inbox.generate(await request(), request_id="wrong"))
            replica.put("other", LAST)
            assert await read(other) == [LAST]

    run(ask())


def test_all_readers_are_told_of_a_stream_that_breaks() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, wire, outbox):
            several = [inbox.generate(await request(), request_id=str(n)) for n in range(3)]
            for number in range(3):
                replica.put(str(number), piece())
            for each in several:
                await anext(each)
            wire.breaks.set()
            for each in several:
                with pytest.raises(ReplicaLost, match="the wire broke"):
                    await anext(each)
            with pytest.raises(ReplicaLost, match="the wire broke"):
                await anext(inbox.generate(await request(), request_id="late"))
            assert inbox.lost is not None
            # What was asked for through it ends there, and nothing more is begun.
            await until(lambda: len(replica.left) == 3)
            outbox.begin(await request(), "later")
            await asyncio.sleep(0)
            assert "later" not in replica.puts

    run(ask())


def test_a_slow_reader_finds_its_pieces_as_one() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, *_):
            slow = inbox.generate(await request(), request_id="slow")
            replica.put("slow", piece())
            assert (await anext(slow)).text == "a"
            for number in range(50):
                replica.put("slow", piece(f"{number} "))
                await asyncio.sleep(0)
            replica.put("slow", LAST)
            await until(lambda: replica.left)
            for _ in range(100):  # turns of the loop, in which the last message comes
                await asyncio.sleep(0)
            (rest,) = await read(slow)
            assert rest.text == "".join(f"{number} " for number in range(50)) + "z"
            assert len(rest.token_ids) == 51

    run(ask())


def test_a_door_that_is_behind_gets_few_messages_and_then_all_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_stream, "_MOST_UNREAD", 3)

    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, wire, outbox):
            wire.hears = False
            reads = asyncio.ensure_future(read(inbox.generate(await request(), request_id="own")))
            for number in range(20):
                replica.put("own", piece(str(number)))
                await asyncio.sleep(0.001)
            replica.put("own", LAST)
            await asyncio.sleep(0.01)
            assert len(wire.sent) == 3
            assert not reads.done()
            wire.hears = True
            outbox.note_read(1000)
            text = "".join(each.text for each in await reads)
            assert text == "".join(map(str, range(20))) + "z"

    run(ask())


def test_a_door_that_reads_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_stream, "_MOST_UNREAD", 4)
    monkeypatch.setattr(shared_stream, "_TOLD_AT", 2)

    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, *_):
            own = inbox.generate(await request(), request_id="own")
            for number in range(20):
                replica.put("own", piece(str(number)))
                assert (await anext(own)).text == str(number)
            await own.aclose()

    run(ask())


def test_an_outbox_that_closes_says_all_before() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, _, outbox):
            own = inbox.generate(await request(), request_id="own")
            replica.put("own", piece())
            await anext(own)
            closing = asyncio.ensure_future(outbox.close())
            await asyncio.sleep(0)
            replica.put("own", LAST)
            assert await read(own) == [LAST]
            await closing
            await until(lambda: inbox.lost is not None)
            assert "says no more" in str(inbox.lost)

    run(ask())


def test_one_that_has_closed_refuses_what_comes_late() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, _, outbox):
            first = inbox.generate(await request(), request_id="first")
            replica.put("first", piece())
            await anext(first)
            closing = asyncio.ensure_future(outbox.close())
            await asyncio.sleep(0)
            with pytest.raises(ReplicaRefused, match="answers this door no longer"):
                await anext(inbox.generate(await request(), request_id="late"))
            replica.put("first", LAST)
            assert await read(first) == [LAST]
            await closing

    run(ask())
