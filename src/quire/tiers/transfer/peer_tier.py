"""``PeerTier``: the records that another server has leased, as a tier.

Connections are opened when they are needed, and kept for the next question. Over TCP records come
straight into the caller's buffers, over a Unix socket from a file of memory that is sealed.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import BoundedSemaphore, Lock
from typing import TypeVar, final

from quire.tiers.tier import Deadline, Name, TierError, TierFull, TierTraits, TierUsage
from quire.tiers.transfer.peer_address import PeerAddress
from quire.tiers.transfer.peer_frames import (
    FIND_AT_ONCE,
    RECORDS_AT_ONCE,
    FrameKind,
    Hello,
    PeerConnection,
    PeerFrame,
    PeerLost,
    pack_count,
    pack_lease,
    pack_names,
    read_count,
)
from quire.tiers.transfer.peer_handshake import greet, without_file

T = TypeVar("T")

_CONNECTIONS = 2  # a loading thread and a storing one


@final
class PeerTier:
    """The leased records of the server at one address. Any thread may call."""

    traits = TierTraits(is_shared=True, is_persistent=False, batch=RECORDS_AT_ONCE)

    def __init__(self, address: PeerAddress, hello: Hello, key: bytes | None) -> None:
        """``hello``: what records are of use here; its nonce is of no use. ``key``: of both ends.

        Without a key, the peer at this address is trusted.
        """
        self.address = address
        self._hello, self._key, self._label = hello, key, str(address)
        self._vacant = BoundedSemaphore(_CONNECTIONS)
        self._lock = Lock()
        self._idle: list[PeerConnection] = []
        self._is_closed = False

    def wait(self, lease: str, wait_s: float, deadline: Deadline) -> bool:
        """Wait until the peer has all records of a lease. Return whether it has.

        ``wait_s``: seconds, of which the peer grants as many as it likes. Raises: TierError.
        """
        body = pack_lease(lease, wait_s)
        return self._count(FrameKind.AWAIT, body, 1, deadline) == 1

    def release(self, lease: str, deadline: Deadline) -> None:
        """End a lease. Raises: TierError."""
        self._count(FrameKind.RELEASE, pack_lease(lease), 0, deadline)

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        found = 0
        for start in range(0, len(names), FIND_AT_ONCE):
            several = names[start : start + FIND_AT_ONCE]
            count = self._count(FrameKind.FIND, pack_names(several), len(several), deadline)
            found += count
            if count < len(several):
                break
        return found

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        loaded = 0
        for start in range(0, len(names), RECORDS_AT_ONCE):
            several = names[start : start + RECORDS_AT_ONCE]
            buffers = into[start : start + RECORDS_AT_ONCE]

            work = partial(_loaded, names=several, into=buffers, deadline=deadline)
            count = self._with_connection(work, deadline)
            loaded += count
            if count < len(several):
                break
        return loaded

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        stored = 0
        for start in range(0, len(names), RECORDS_AT_ONCE):
            several = names[start : start + RECORDS_AT_ONCE]
            payload = records[start : start + RECORDS_AT_ONCE]
            work = partial(_stored, names=several, records=payload, deadline=deadline)
            count = self._with_connection(work, deadline)
            stored += count
            if count < len(several):
                break
        if names and not stored:
            raise TierFull(f"{self._label}: the peer has no room")
        return stored

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        """Do nothing: a peer's records are not this server's to drop, and their leases end."""

    def usage(self) -> TierUsage:
        return TierUsage()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._close_idle()

    # -- connections -------------------------------------------------------------------------------

    def _count(self, kind: FrameKind, body: bytes, most: int, deadline: Deadline) -> int:
        def ask(connection: PeerConnection) -> int:
            return _counted(connection, connection.ask(kind, body, deadline), most)

        return self._with_connection(ask, deadline)

    def _with_connection(self, work: Callable[[PeerConnection], T], deadline: Deadline) -> T:
        """Do work that may be done twice: a peer that was restarted has closed what is idle."""
        with self._connection(deadline) as (connection, is_new):
            try:
                return work(connection)
            except PeerLost:
                if is_new:
                    raise
                connection.close()
        with self._lock:
            self._close_idle()  # what has happened to this one has happened to them
        with self._connection(deadline) as (connection, _):
            return work(connection)

    @contextmanager
    def _connection(self, deadline: Deadline) -> Iterator[tuple[PeerConnection, bool]]:
        """Lend a connection, and tell whether it is new. One that failed is not lent again."""
        if not self._vacant.acquire(timeout=deadline.left_s):
            raise TierError(f"{self._label}: out of time, all connections are in use")
        try:
            with self._lock:
                if self._is_closed:
                    raise TierError(f"{self._label}: closed")
                found = self._idle.pop() if self._idle else None
            connection = found or self._connected(deadline)
            try:
                yield connection, found is None
            except BaseException:
                connection.close()  # an answer may still be on its way
                with self._lock:
                    self._close_idle()  # what has happened to this one may have happened to them
                raise
            with self._lock:
                if self._is_closed or not connection.is_open:
                    connection.close()
                else:
                    self._idle.append(connection)
        finally:
            self._vacant.release()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _connected(self, deadline: Deadline) -> PeerConnection:
        """Connect, and find out whether the peer's records are of use. Raises: TierError."""
        connection = self._reached(deadline)
        try:
            greet(connection, self._hello, self._key, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _reached(self, deadline: Deadline) -> PeerConnection:
        if not (left_s := deadline.left_s):
            raise TierError(f"{self._label}: cannot be reached: out of time")
        address, stream = self.address, None
        try:
            if address.is_unix:
                stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stream.settimeout(left_s)
                stream.connect(address.path)
            else:
                stream = socket.create_connection((address.host, address.port), timeout=left_s)
            return PeerConnection(stream, self._label)
        except (OSError, UnicodeError) as error:
            if stream is not None:
                stream.close()
            told = "out of time" if isinstance(error, TimeoutError) else str(error)
            raise TierError(f"{self._label}: cannot be reached: {told}") from None


def _loaded(
    connection: PeerConnection,
    names: Sequence[Name],
    into: Sequence[memoryview],
    deadline: Deadline,
) -> int:
    """Load records of one question. Return how many, from the first one on, have their length."""
    frame = connection.ask(FrameKind.LOAD, pack_names(names), deadline)
    told = read_count(frame.body, len(names), with_sizes=True)
    if told is None:
        without_file(frame)
        raise connection.broken("an answer without a count and sizes")
    count, sizes = told
    expected = [len(buffer) for buffer in into[:count]]
    if sizes != expected:  # to read on would cost what the peer likes
        without_file(frame)
        connection.close()
        return 0
    if count:
        connection.receive_payload(frame, into[:count], deadline)
    else:
        without_file(frame)
    return count


def _stored(
    connection: PeerConnection,
    names: Sequence[Name],
    records: Sequence[memoryview],
    deadline: Deadline,
) -> int:
    """Store as many of these records as the peer has room for, from the first one on."""
    body = pack_names(names, [len(record) for record in records])
    count = _counted(connection, connection.ask(FrameKind.STORE, body, deadline), len(names))
    if not count:
        return 0
    connection.send_payload(FrameKind.PAYLOAD, pack_count(count), records[:count], deadline)
    return _counted(connection, connection.answer(deadline), count)


def _counted(connection: PeerConnection, frame: PeerFrame, most: int) -> int:
    without_file(frame)
    told = read_count(frame.body, most)
    if told is None:
        raise connection.broken(f"an answer that is no count of at most {most}")
    return told[0]
