"""Requests and answers over a connection: whole, or none, whatever comes on it."""

import asyncio
import pickle
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from fleet.replicas import until
from fleet.scripted import LAST, Scripted, piece, read
from quire import SamplingParams
from quire.engine.sequence import Request
from quire.errors import RequestError
from quire.fleet import door_connection
from quire.fleet.door_connection import ConnectedOutbox, DoorListener, Offer
from quire.fleet.placement import Load
from quire.fleet.replica import ReplicaLost, ReplicaReport
from quire.fleet.shared_stream import Inbox, Outbox
from server.asking import run

REQUEST = Request(request_id=1, prompt_token_ids=(5, 6), params=SamplingParams())
HOST = "127.0.0.1"
SHORT_S = 0.05


class Between:
    """A listener on the way, which passes bytes on. It changes or repeats one of a direction."""

    def __init__(self, change: Callable[[bytes, str], bytes] | None = None) -> None:
        self._change = change or (lambda data, _: data)
        self.writers: list[asyncio.StreamWriter] = []
        self.passed: dict[str, bytes] = {"there": b"", "back": b""}

    async def offered(self, offers: AsyncGenerator[Offer, None]) -> AsyncGenerator[Offer, None]:
        async with aclosing(offers):
            offer = await anext(offers)
            ends = asyncio.ensure_future(anext(offers, None))
            server = await asyncio.start_server(lambda r, w: self._meet(r, w, offer), HOST, 0)
            try:
                port = server.sockets[0].getsockname()[1]
                yield Offer(host=HOST, port=port, name=offer.name, key=offer.key)
                await ends
            finally:
                server.close()
                for each in self.writers:
                    each.close()
                ends.cancel()
                await asyncio.gather(ends, return_exceptions=True)

    async def _meet(self, reader: Any, writer: asyncio.StreamWriter, offer: Offer) -> None:
        from_replica, to_replica = await asyncio.open_connection(offer.host, offer.port)
        self.writers += [writer, to_replica]
        await asyncio.gather(
            self._pass(reader, to_replica, "there"), self._pass(from_replica, writer, "back")
        )

    async def _pass(self, reader: Any, writer: asyncio.StreamWriter, way: str) -> None:
        try:
            while data := await reader.read(2**16):
                self.passed[way] += data
                writer.write(self._change(data, way))
                await writer.drain()
        except OSError:
            pass
        writer.close()


@asynccontextmanager
async def joined(
    replica: Any, between: Between | None = None
) -> AsyncIterator[tuple[Inbox, Outbox, DoorListener]]:
    listener, outbox = DoorListener(HOST), Outbox(replica)

    def offered() -> AsyncGenerator[Offer, None]:
        offers = listener.serve(outbox)
        return offers if between is None else between.offered(offers)

    inbox = Inbox("it", ConnectedOutbox("it", offered))
    try:
        async with asyncio.timeout(20):
            yield inbox, outbox, listener
    finally:
        await inbox.close()
        listener.close()


def test_answers_come_whole() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, outbox, _):
            reads = [
                asyncio.ensure_future(read(inbox.generate(REQUEST, request_id=str(number))))
                for number in range(5)
            ]
            await until(lambda: len(replica.puts) == 5)
            for number in range(5):
                replica.put(str(number), piece(f"{number}", logprobs=(), num_cached_tokens=number))
                replica.put(str(number), LAST)
            for number, own in enumerate(await asyncio.gather(*reads)):
                assert "".join(each.text for each in own) == f"{number}z"
                assert own[-1].finish_reason == "length"
            assert replica.asked == dict.fromkeys("01234", REQUEST)
            await outbox.close()
            await until(lambda: inbox.lost is not None)
            assert "says no more" in str(inbox.lost)

    run(ask())


def test_reports_come_beside_answers_and_end_with_them() -> None:
    report, heard, ended = ReplicaReport(load=Load(num_running=3)), list[ReplicaReport](), []

    async def reports() -> AsyncGenerator[ReplicaReport, None]:
        try:
            yield report
            await asyncio.Event().wait()
        finally:
            ended.append("left")

    async def ask() -> None:
        replica, listener = Scripted(), DoorListener(HOST)
        offered = partial(listener.serve, Outbox(replica), reports())
        inbox = Inbox("it", ConnectedOutbox("it", offered, heard.append))
        async with asyncio.timeout(20):
            replica.put("own", LAST)
            assert await read(inbox.generate(REQUEST, request_id="own")) == [LAST]
            await until(lambda: heard == [report])
            await inbox.close()
            await until(lambda: ended == ["left"])
        listener.close()

    run(ask())


def test_all_is_said_before_the_end() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, outbox, _):
            own = inbox.generate(REQUEST, request_id="own")
            replica.put("own", piece())
            await anext(own)
            closing = asyncio.ensure_future(outbox.close())
            await asyncio.sleep(0)
            replica.put("own", piece("b" * 2**20))  # more than fits into a socket
            replica.put("own", LAST)
            await closing
            assert "".join(each.text for each in await read(own)) == "b" * 2**20 + "z"

    run(ask())


def test_a_door_that_leaves_ends_its_requests() -> None:
    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, *_):
            own = [inbox.generate(REQUEST, request_id=name) for name in ("first", "second")]
            for name, each in zip(("first", "second"), own, strict=True):
                replica.put(name, piece())
                await anext(each)
            await own[0].aclose()  # its reader alone
            await until(lambda: replica.left == ["first"])
            await inbox.close()
            await until(lambda: replica.left == ["first", "second"])
            with pytest.raises(ReplicaLost):
                await anext(own[1])

    run(ask())


def test_a_replica_that_is_gone_is_lost_at_once() -> None:
    async def ask() -> None:
        replica, between = Scripted(), Between()
        async with joined(replica, between) as (inbox, *_):
            own = inbox.generate(REQUEST, request_id="own")
            replica.put("own", piece())
            await anext(own)
            for writer in between.writers:
                writer.close()
            with pytest.raises(ReplicaLost, match="its connection has ended"):
                await anext(own)
            assert inbox.lost is not None

    run(ask())


@pytest.mark.parametrize("way", ["there", "back"])
@pytest.mark.parametrize("change", ["a size", "a body", "a tag", "repeated", "left out"])
def test_what_was_changed_on_its_way_ends_the_connection(way: str, change: str) -> None:
    """After the preface and the first message; the answer is lost and never another one."""
    num_seen = 0

    def changed(data: bytes, direction: str) -> bytes:
        nonlocal num_seen
        if direction != way or not data:
            return data
        num_seen += 1
        if num_seen != 2:
            return data
        at = {"a size": 3, "a body": 9, "a tag": -1}.get(change)
        if at is not None:
            spoiled = bytearray(data)
            spoiled[at] ^= 0x80
            return bytes(spoiled)
        return data + data if change == "repeated" else b""

    async def ask() -> None:
        replica, between = Scripted(), Between(changed)
        async with joined(replica, between) as (inbox, *_):
            await until(lambda: num_seen)  # the preface, or the first message
            await asyncio.sleep(0.01)
            own = asyncio.ensure_future(read(inbox.generate(REQUEST, request_id="own")))
            if way == "there" and change == "left out":
                await until(lambda: num_seen == 2)  # what comes next shows it
                other = asyncio.ensure_future(read(inbox.generate(REQUEST, request_id="other")))
                with pytest.raises(ReplicaLost):
                    await other
            else:
                num_bytes = len(between.passed["back"])
                replica.put("own", piece())  # which goes by itself, if it goes
                await until(lambda: len(between.passed["back"]) > num_bytes or own.done())
                replica.put("own", LAST)
            with pytest.raises(ReplicaLost):
                await own
            await until(lambda: replica.left == list(replica.asked))

    run(ask())


RAN: list[str] = []


def note_run(what: str) -> None:
    RAN.append(what)


class Planted:
    """What runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return note_run, ("it ran",)


async def said_to(offer: Offer, data: bytes) -> bytes:
    """What comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection(offer.host, offer.port)
    writer.write(data)
    try:
        return await rest(reader)
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def test_nothing_of_a_stranger_is_unpickled() -> None:
    async def ask() -> None:
        planted = pickle.dumps(Planted())
        frame = len(planted).to_bytes(4, "little") + planted + bytes(16)
        listener, outbox = DoorListener(HOST), Outbox(Scripted())
        offers = listener.serve(outbox)
        offer = await anext(offers)
        ends = asyncio.ensure_future(anext(offers, None))
        assert await said_to(offer, bytes(16) + frame) == b""  # no such offer
        assert await said_to(offer, frame) == b""
        assert not ends.done()
        await said_to(offer, offer.name + frame)  # who has seen the name has no key
        assert await ends is None
        assert await said_to(offer, offer.name + frame) == b""  # it is for one connection
        assert RAN == []
        listener.close()

    run(ask())


def test_a_frame_is_bounded_before_it_is_read() -> None:
    async def ask() -> None:
        listener, outbox = DoorListener(HOST), Outbox(Scripted())
        offers = listener.serve(outbox)
        offer = await anext(offers)
        ends = asyncio.ensure_future(anext(offers, None))
        too_many = (door_connection.MOST_BYTES + 1).to_bytes(4, "little")
        async with asyncio.timeout(20):
            await said_to(offer, offer.name + too_many)
            assert await ends is None
        listener.close()

    run(ask())


def test_strangers_who_say_nothing_keep_no_door_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_connection, "MOST_STRANGERS", 3)
    monkeypatch.setattr(door_connection, "_STRANGER_S", 3600)

    async def ask() -> None:
        replica = Scripted()
        listener, outbox = DoorListener(HOST), Outbox(replica)
        offers = listener.serve(outbox)
        offer = await anext(offers)
        strangers = [await asyncio.open_connection(offer.host, offer.port) for _ in range(5)]
        async with asyncio.timeout(20):
            for reader, _ in strangers[:2]:  # the oldest
                assert await rest(reader) == b""

        async def offered() -> AsyncGenerator[Offer, None]:
            yield offer
            await anext(offers, None)

        inbox = Inbox("it", ConnectedOutbox("it", offered))
        replica.put("own", LAST)
        assert await read(inbox.generate(REQUEST, request_id="own")) == [LAST]
        await inbox.close()
        for _, writer in strangers:
            writer.close()
        listener.close()

    run(ask())


def test_strangers_who_come_all_at_once_are_let_go_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first of them has a transport, he makes room for others."""
    monkeypatch.setattr(door_connection, "MOST_STRANGERS", 3)
    monkeypatch.setattr(door_connection, "_STRANGER_S", 3600)

    async def ask() -> None:
        listener = DoorListener(HOST)
        offers = listener.serve(Outbox(Scripted()))
        offer = await anext(offers)
        # Without a moment for the loop: it finds them all waiting.
        strangers = [socket.create_connection((offer.host, offer.port)) for _ in range(10)]
        for each in strangers:
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(20):
            for each in strangers[:7]:
                with suppress(ConnectionResetError):
                    assert await loop.sock_recv(each, 1) == b""
        for each in strangers:
            each.close()
        await offers.aclose()
        listener.close()

    run(ask())


def test_two_doors_that_come_first_at_once_find_one_listener() -> None:
    async def ask() -> None:
        listener = DoorListener(HOST)
        both = [listener.serve(Outbox(Scripted())) for _ in range(2)]
        offers = await asyncio.gather(*map(anext, both))
        assert len({offer.port for offer in offers}) == 1
        for each in both:
            await each.aclose()
        listener.close()

    run(ask())


def test_a_connection_that_outlives_its_offer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_connection, "_CLOSE_S", SHORT_S)

    async def ask() -> None:
        listener = DoorListener(HOST)
        offers = listener.serve(Outbox(Scripted()))

        async def offered() -> AsyncGenerator[Offer, None]:
            yield await anext(offers)
            await asyncio.sleep(SHORT_S)  # the call ends, and not what it has begun

        with pytest.raises(ReplicaLost, match="has ended its offer"):
            await ConnectedOutbox("it", offered).read(lambda _: None)
        await offers.aclose()
        listener.close()

    run(ask())


def test_patience_with_strangers_and_with_doors_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door_connection, "_STRANGER_S", SHORT_S)
    monkeypatch.setattr(door_connection, "_CONNECT_S", SHORT_S)

    async def ask() -> None:
        listener, outbox = DoorListener(HOST), Outbox(Scripted())
        offers = listener.serve(outbox)
        offer = await anext(offers)
        assert await said_to(offer, b"nothing much") == b""
        assert await anext(offers, None) is None  # no door has come
        listener.close()

    run(ask())


def test_an_address_where_none_listens_is_named() -> None:
    async def ask() -> None:
        listener = DoorListener(HOST)
        offers = listener.serve(Outbox(Scripted()))
        offer = await anext(offers)
        await offers.aclose()
        listener.close()

        async def offered() -> AsyncGenerator[Offer, None]:
            yield offer

        inbox = Inbox("it", ConnectedOutbox("it", offered))
        with pytest.raises(ReplicaLost, match=f"cannot be reached at tcp://{HOST}:{offer.port}"):
            await anext(inbox.generate(REQUEST, request_id="own"))
        await inbox.close()

    run(ask())


def test_what_is_too_large_is_its_requests_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_connection, "MOST_BYTES", 2**13)

    async def ask() -> None:
        replica = Scripted()
        async with joined(replica) as (inbox, *_):
            large = Request(request_id=1, prompt_token_ids=(7,) * 2**14, params=SamplingParams())
            with pytest.raises(RequestError, match="cannot be sent to a replica"):
                await anext(inbox.generate(large, request_id="large"))
            reads = {
                name: asyncio.ensure_future(read(inbox.generate(REQUEST, request_id=name)))
                for name in ("own", "other")
            }
            await until(lambda: len(replica.puts) == 2)
            replica.put("own", piece("a" * 2**14))
            replica.put("other", LAST)
            with pytest.raises(RequestError, match="its answer cannot be sent"):
                await reads["own"]
            assert await reads["other"] == [LAST]
            await until(lambda: sorted(replica.left) == ["other", "own"])

    run(ask())
