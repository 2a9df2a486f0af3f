"""A connection of its own between a door and a replica: requests go there, answers come back.

    preface   from the door, in clear: the name of an offer
    frame     bytes of the body, the body, and a tag of both and of how many frames came before
    body      a pickle: what is to be done there; or a message of an ``Outbox``, how busy its
              replica is, or that it was all

An offer is a name and a key for one connection. A replica draws both, and Ray carries them to the
door: who has the key could have any code run there by Ray, so a body is unpickled once its tag is
right, and not before. Until a stranger has named an offer he has a few seconds, and a few bytes.
"""

import asyncio
import hmac
import logging
import pickle
import secrets
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast, final

from quire.engine.sequence import Request
from quire.errors import QuireError, RequestError
from quire.fleet.replica import ReplicaLost, ReplicaReport
from quire.fleet.shared_stream import Message, Outbox
from quire.tiers.transfer.frame_tags import TAG_BYTES, FrameTags
from quire.tiers.transfer.peer_frames import set_tcp_options

log = logging.getLogger(__name__)

MOST_BYTES: Final = 64 * 2**20  # of a body
MOST_STRANGERS: Final = 64  # connections that have named no offer yet
_NAME_BYTES, _KEY_BYTES = 16, 32
_CONNECT_S: Final = 10.0  # from an offer to its connection, and at the door
_STRANGER_S: Final = 5.0
_CLOSE_S: Final = 5.0  # that a door has to read the end
_SIZE = struct.Struct("<I")
_DOOR, _REPLICA = b"of the door", b"of the replica"  # whose frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """How a door reaches an outbox of its own, once. It can be pickled."""

    host: str
    port: int
    name: bytes  # that tells it from others
    key: bytes = field(repr=False)


class _TooLarge(QuireError):
    """A body is larger than the other end would read."""


# -- frames ----------------------------------------------------------------------------------------


@final
class _Connection(asyncio.Protocol):
    """One end. ``over`` is done with the connection: with an error if it was lost before its end.

    It takes frames from ``begin`` on. ``named`` is called before with what it begins with, where it
    is a replica's.
    """

    def __init__(self, peer: str, named: "Callable[[_Connection, bytes], None] | None") -> None:
        """``peer``: its name in messages."""
        self._peer, self._named = peer, named
        self._transport: asyncio.Transport | None = None
        self._is_closed = False  # maybe before it has a transport
        self._buffer = bytearray()
        self._sends: FrameTags | None = None
        self._receives: FrameTags | None = None
        self._take: Callable[[Any], None] = lambda _: None
        self._flows = asyncio.Event()  # what is written
        self._flows.set()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(
        self, key: bytes, *, sends: bytes, receives: bytes, take: Callable[[Any], None]
    ) -> None:
        """Tag what is sent, and call ``take`` with each body that comes, until the end."""
        self._sends, self._receives = (
            FrameTags(hmac.digest(key, whose, "sha256")) for whose in (sends, receives)
        )
        self._take, self._named = take, None

    def send(self, what: Any) -> None:
        """Send a body. Raises: _TooLarge."""
        body = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        if len(body) > MOST_BYTES:
            raise _TooLarge(f"{len(body):,} bytes are more than {MOST_BYTES:,}")
        assert self._sends is not None, "begin() comes first"
        data = _SIZE.pack(len(body)) + body
        self.write(data + self._sends.next(data))

    def write(self, data: bytes) -> None:
        """Send bytes as they are; nothing, where there is no connection any more."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def flow(self) -> None:
        """Wait while the other end is behind."""
        await self._flows.wait()

    def end(self) -> None:
        """Send that it was all."""
        self.send(None)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close it at once, or as soon as there is something to close."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of no such class
        if self._is_closed:
            self._transport.abort()
            return
        set_tcp_options(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            if self._named is not None and len(self._buffer) >= _NAME_BYTES:
                name = bytes(self._buffer[:_NAME_BYTES])
                del self._buffer[:_NAME_BYTES]
                self._named(self, name)
            if self._receives is not None:
                self._read_frames(self._receives)
        except Exception as error:
            log.debug("%s: a frame that cannot be read", self._peer, exc_info=True)
            self._lose(f"it does not keep to the protocol: {error}")

    def _read_frames(self, tags: FrameTags) -> None:
        """Take the frames that are whole. Raises: ValueError; what ``take`` raises."""
        at, buffer = 0, self._buffer
        while len(buffer) - at >= _SIZE.size and not self.over.done():
            (num_bytes,) = _SIZE.unpack_from(buffer, at)
            if num_bytes > MOST_BYTES:
                raise ValueError(f"a frame of {num_bytes:,} bytes")
            body = at + _SIZE.size
            end = body + num_bytes
            if len(buffer) < end + TAG_BYTES:
                break
            if not hmac.compare_digest(buffer[end : end + TAG_BYTES], tags.next(buffer[at:end])):
                raise ValueError("a frame that was changed on its way")
            said = pickle.loads(memoryview(buffer)[body:end].toreadonly())
            at = end + TAG_BYTES
            if said is None:
                self._finish(None)
            else:
                self._take(said)
        del buffer[:at]

    def pause_writing(self) -> None:
        self._flows.clear()

    def resume_writing(self) -> None:
        self._flows.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._flows.set()
        why = "" if error is None else f": {getattr(error, 'strerror', None) or error}"
        self._lose(f"its connection has ended{why}")

    def _lose(self, why: str) -> None:
        self.close()
        self._finish(ReplicaLost(f"{self._peer}: {why}"))

    def _finish(self, error: ReplicaLost | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)
            self.over.exception()  # it need not be asked for


# -- at the replica --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Awaited:
    """An offer that no door has taken yet."""

    key: bytes
    outbox: Outbox
    connected: "asyncio.Future[_Connection]"


@final
class DoorListener:
    """Lets a replica's doors connect to their outboxes. It belongs to one event loop."""

    def __init__(self, host: str) -> None:
        """``host``: of this machine, as doors reach it. It is bound with the first offer."""
        self._host = host
        self._server: asyncio.Server | None = None
        self._binding = asyncio.Lock()  # two doors may come at once
        self._awaited: dict[bytes, _Awaited] = {}
        self._strangers: dict[_Connection, asyncio.TimerHandle] = {}  # the oldest first

    async def serve(
        self, outbox: Outbox, reports: AsyncIterator[ReplicaReport] | None = None
    ) -> AsyncGenerator[Offer, None]:
        """Yield an offer of this outbox, and end with its connection.

        What the outbox still runs then is ended. ``reports`` are sent as they come, too. Raises:
        OSError for a host that cannot be bound.
        """
        port = await self._listen()
        connected: asyncio.Future[_Connection] = asyncio.get_running_loop().create_future()
        offer = Offer(
            host=self._host,
            port=port,
            name=secrets.token_bytes(_NAME_BYTES),
            key=secrets.token_bytes(_KEY_BYTES),
        )
        self._awaited[offer.name] = _Awaited(offer.key, outbox, connected)
        try:
            yield offer
            async with asyncio.timeout(_CONNECT_S):
                await connected
            await _tell(outbox, connected.result(), reports)
        except TimeoutError:
            log.warning("a door has not connected to tcp://%s:%d", offer.host, offer.port)
        finally:
            self._awaited.pop(offer.name, None)
            if connected.done() and not connected.cancelled():
                connected.result().close()
            outbox.end()

    def close(self) -> None:
        """Listen no longer."""
        for stranger in list(self._strangers):
            stranger.close()
        if self._server is not None:
            self._server.close()

    async def _listen(self) -> int:
        """Return the port, which is bound with the first offer."""
        async with self._binding:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(self._let_in, self._host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def _let_in(self) -> _Connection:
        """Make the protocol of a connection that has come."""
        if len(self._strangers) >= MOST_STRANGERS:
            self._forget(next(iter(self._strangers))).close()
        stranger = _Connection("a door", self._know)
        patience = asyncio.get_running_loop().call_later(_STRANGER_S, stranger.close)
        self._strangers[stranger] = patience
        stranger.over.add_done_callback(lambda _: self._forget(stranger))
        return stranger

    def _forget(self, stranger: _Connection) -> _Connection:
        patience = self._strangers.pop(stranger, None)
        if patience is not None:
            patience.cancel()
        return stranger

    def _know(self, stranger: _Connection, name: bytes) -> None:
        """Give a door its outbox. Raises: ValueError."""
        self._forget(stranger)
        awaited = self._awaited.pop(name, None)
        if awaited is None or awaited.connected.done():
            raise ValueError("no such offer")
        take = partial(_do, awaited.outbox)
        stranger.begin(awaited.key, sends=_REPLICA, receives=_DOOR, take=take)
        awaited.connected.set_result(stranger)


def _do(outbox: Outbox, said: Any) -> None:
    """Do what a door says. Raises: ValueError."""
    match said:
        case ("begin", Request() as request, str(request_id)):
            outbox.begin(request, request_id)
        case ("leave", str(request_id)):
            outbox.leave(request_id)
        case ("read", int(count)):
            outbox.note_read(count)
        case _:
            raise ValueError("what a door does not say")


async def _tell(
    outbox: Outbox, connection: _Connection, reports: AsyncIterator[ReplicaReport] | None
) -> None:
    """Send what an outbox says, until it says no more or the door has gone."""
    telling = asyncio.create_task(_send_all(outbox, connection), name="quire-outbox")
    reporting = None
    if reports is not None:
        reporting = asyncio.create_task(_report(reports, connection), name="quire-reports")
    try:
        await asyncio.wait((telling, connection.over), return_when=asyncio.FIRST_COMPLETED)
        if telling.done():
            telling.result()
            with suppress(TimeoutError, ReplicaLost):  # the door has read all, or has gone
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.shield(connection.over)
    finally:
        tasks = [task for task in (telling, reporting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_all(outbox: Outbox, connection: _Connection) -> None:
    async with aclosing(outbox.messages()) as messages:
        async for message in messages:
            _send(outbox, connection, message)
            await connection.flow()
    connection.end()


async def _report(reports: AsyncIterator[ReplicaReport], connection: _Connection) -> None:
    """Send reports, none of which is needed: the door asks for some elsewhere, too."""
    async for report in reports:
        connection.send(report)
        await connection.flow()


def _send(outbox: Outbox, connection: _Connection, message: Message) -> None:
    """Send a message, in parts where it is too large, and an error in place of such a piece."""
    try:
        connection.send(message)
    except _TooLarge as error:
        if len(message) > 1:
            for each in message:
                _send(outbox, connection, [each])
            return
        ((request_id, _),) = message
        outbox.leave(request_id)
        connection.send([(request_id, RequestError(f"its answer cannot be sent: {error}"))])


# -- at the door -----------------------------------------------------------------------------------


@final
class ConnectedOutbox:
    """A replica's ``Outbox``, over a connection."""

    def __init__(
        self,
        name: str,
        offered: Callable[[], AsyncGenerator[Offer, None]],
        reported: Callable[[ReplicaReport], None] = lambda _: None,
    ) -> None:
        """``name``: the replica's; ``offered``: asks it for an offer, and is left in the end;
        ``reported`` is called with each report that comes.
        """
        self._name, self._offered, self._reported = name, offered, reported
        self._connection: _Connection | None = None

    async def read(self, take: Callable[[Message], None]) -> None:
        async with aclosing(self._offered()) as offers:
            try:
                offer = await anext(offers)
            except StopAsyncIteration:
                raise ReplicaLost(f"replica {self._name} offers no connection") from None
            self._connection = connection = await self._connected(offer, take)
            ended = asyncio.ensure_future(anext(offers, None))  # there; or how that has failed
            try:
                await asyncio.wait((connection.over, ended), return_when=asyncio.FIRST_COMPLETED)
                if connection.over.done():
                    connection.over.result()
                else:
                    ended.result()
                    async with asyncio.timeout(_CLOSE_S):
                        await connection.over
            except TimeoutError:
                raise ReplicaLost(
                    f"replica {self._name} has ended its offer, and not its connection within "
                    f"{_CLOSE_S} s"
                ) from None
            finally:
                connection.close()
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)

    def begin(self, request: Request, request_id: str) -> None:
        try:
            self._send(("begin", request, request_id))
        except _TooLarge as error:
            raise RequestError(f"the request cannot be sent to a replica: {error}") from None

    def leave(self, request_id: str) -> None:
        self._send(("leave", request_id))

    def note_read(self, count: int) -> None:
        self._send(("read", count))

    async def _connected(self, offer: Offer, take: Callable[[Message], None]) -> _Connection:
        """Take an offer. Raises: ReplicaLost."""
        connection = _Connection(f"replica {self._name}", None)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                await loop.create_connection(lambda: connection, offer.host, offer.port)
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or f"no answer in {_CONNECT_S:g} s"
            raise ReplicaLost(
                f"replica {self._name} cannot be reached at tcp://{offer.host}:{offer.port}, where "
                f"its doors connect: {why}"
            ) from error

        def sort(said: Any) -> None:
            if isinstance(said, ReplicaReport):
                self._reported(said)
            else:
                take(said)

        connection.begin(offer.key, sends=_DOOR, receives=_REPLICA, take=sort)
        connection.write(offer.name)
        return connection

    def _send(self, what: Any) -> None:
        if self._connection is not None:
            self._connection.send(what)
