"""``PeerServer``: lets other servers find, load and store leased records, and end their leases.

A thread serves each connection, of which there is a bounded number. A peer that breaks the
protocol, or is slow in the middle of a frame, loses its connection, and nothing else happens.
"""

import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import final

from quire.errors import ConfigError
from quire.tiers.tier import Deadline, TierError
from quire.tiers.transfer.leased_records import LeasedRecords
from quire.tiers.transfer.peer_address import PeerAddress
from quire.tiers.transfer.peer_frames import (
    FIND_AT_ONCE,
    RECORDS_AT_ONCE,
    FrameKind,
    Hello,
    PeerConnection,
    PeerFrame,
    pack_count,
    read_lease,
    read_names,
)
from quire.tiers.transfer.peer_handshake import PeerUnlike, let_in, without_file

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
LONGEST_AWAIT_S = 1.0  # that a peer waits for the rest of a lease's records
_HANDSHAKE_S = 5.0
_FRAME_S = 30.0  # for a frame and its payload, once it has begun
_IDLE_S = 300.0  # after which a connection without questions is closed
_MOST_REFUSALS = 16  # that the log has
_TICK_S = 0.2  # between two looks at leases that end
_CLOSE_S = 5.0  # that threads may take to end
_SOCKET_MODE = 0o600


@final
class PeerServer:
    """Listens at an address from ``start`` to ``close``."""

    def __init__(
        self,
        address: PeerAddress,
        records: LeasedRecords,
        hello: Hello,  # its nonce is of no use
        key: bytes | None,  # that peers have, too; None: who can connect is trusted
        *,
        frame_s: float = _FRAME_S,
        note_stored: Callable[[], None] = lambda: None,  # a peer has left records here
    ) -> None:
        """Bind the address. Raises: ConfigError."""
        self._records, self._hello, self._key = records, hello, key
        self._frame_s, self._note_stored = frame_s, note_stored
        self._sizes = frozenset(hello.sizes)
        self._listener, self.address = _bound(address)
        self._lock = threading.Lock()
        # Whether it has shaken hands; the oldest first.
        self._connections: dict[PeerConnection, bool] = {}
        self._threads: set[threading.Thread] = set()
        self._refusals: set[str] = set()  # that the log has
        self._is_closed = False
        self._accepting = threading.Thread(
            target=self._accept, name="quire-transfer-listen", daemon=True
        )

    def start(self) -> None:
        """Let peers in."""
        self._listener.listen(MOST_CONNECTIONS)
        self._listener.settimeout(_TICK_S)
        self._accepting.start()

    def close(self) -> None:
        """End all connections and threads, and remove a Unix socket's name."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            connections, threads = list(self._connections), list(self._threads)
        if self.address.is_unix:  # while it still listens: later it may be another server's
            with suppress(OSError):
                Path(self.address.path).unlink()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for peers
        for connection in connections:
            connection.close()
        if self._accepting.ident is not None:
            threads.append(self._accepting)
        deadline = Deadline.after(_CLOSE_S)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.left_s)
        self._listener.close()

    # -- connections -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed:
            self._records.expire()
            try:
                stream, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._is_closed:  # no file is left: the next one may find one
                    log.warning("%s: a peer cannot be let in: %s", self.address, error.strerror)
                    threading.Event().wait(_TICK_S)
                continue
            try:
                self._let_in(stream)
            except OSError as error:  # it has left already
                log.debug("%s: %s", self.address, error)
                stream.close()

    def _let_in(self, stream: socket.socket) -> None:
        connection = PeerConnection(stream, f"a peer at {self.address}")
        with self._lock:
            if len(self._connections) >= MOST_CONNECTIONS:
                self._make_room()
            is_full = len(self._connections) >= MOST_CONNECTIONS
            if not (is_full or self._is_closed):
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="quire-transfer", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no thread left
                    log.warning("%s: a peer cannot be served: %s", self.address, error)
                    connection.close()
                    return
                self._connections[connection] = False
                self._threads.add(thread)
                return
        with suppress(TierError):
            connection.refuse(
                f"there are {MOST_CONNECTIONS} connections already", Deadline.after(_TICK_S)
            )
        connection.close()

    def _make_room(self) -> None:
        """Close the oldest connection that has not shaken hands: it keeps no peer out."""
        for connection, is_known in self._connections.items():
            if not is_known:
                connection.close()
                del self._connections[connection]
                return

    def _serve(self, connection: PeerConnection) -> None:
        try:
            let_in(connection, self._hello, self._key, Deadline.after(_HANDSHAKE_S))
            with self._lock:
                if connection not in self._connections:
                    return
                self._connections[connection] = True
            while connection.wait(_IDLE_S):
                deadline = Deadline.after(self._frame_s)
                self._answer(connection, connection.receive(deadline), deadline)
        except PeerUnlike as error:
            self._note_unlike(str(error))
        except TierError as error:
            log.debug("%s: %s", self.address, error)
        except Exception:
            log.exception("%s: a peer's connection ends", self.address)
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)
                self._threads.discard(threading.current_thread())

    def _note_unlike(self, words: str) -> None:
        """Tell an operator once why peers are refused: they are not the last to try."""
        with self._lock:
            if words in self._refusals or len(self._refusals) >= _MOST_REFUSALS:
                return
            self._refusals.add(words)
        log.warning("refused: %s", words)

    # -- questions ---------------------------------------------------------------------------------

    def _answer(self, connection: PeerConnection, frame: PeerFrame, deadline: Deadline) -> None:
        """Answer a question. Raises: TierError, with which the connection ends."""
        if frame.kind == FrameKind.STORE:
            self._store(connection, frame, deadline)
            return
        frame = without_file(frame)
        match frame.kind:
            case FrameKind.AWAIT:
                self._await(connection, frame, deadline)
            case FrameKind.FIND:
                asked = read_names(frame.body, FIND_AT_ONCE)
                if asked is None:
                    raise connection.broken("FIND without names")
                count = self._records.find(asked[0], deadline)
                connection.send(FrameKind.ANSWER, pack_count(count), deadline)
            case FrameKind.LOAD:
                self._load(connection, frame, deadline)
            case FrameKind.RELEASE:
                lease = read_lease(frame.body)
                if lease is None:
                    raise connection.broken("RELEASE without a lease")
                self._records.release(lease[0])
                connection.send(FrameKind.ANSWER, pack_count(0), deadline)
            case _:
                raise connection.broken(f"{frame.kind.name} in place of a question")

    def _await(self, connection: PeerConnection, frame: PeerFrame, deadline: Deadline) -> None:
        asked = read_lease(frame.body)
        if asked is None:
            raise connection.broken("AWAIT without a lease")
        lease, wait_s = asked
        is_whole = self._records.wait(lease, min(wait_s, LONGEST_AWAIT_S))
        connection.send(FrameKind.ANSWER, pack_count(int(is_whole)), deadline)

    def _load(self, connection: PeerConnection, frame: PeerFrame, deadline: Deadline) -> None:
        asked = read_names(frame.body, RECORDS_AT_ONCE)
        if asked is None:
            raise connection.broken("LOAD without names")
        found = self._records.take(asked[0])
        body = pack_count(len(found), [len(record) for record in found])
        if found:
            connection.send_payload(FrameKind.ANSWER, body, found, deadline)
        else:
            connection.send(FrameKind.ANSWER, body, deadline)

    def _store(self, connection: PeerConnection, frame: PeerFrame, deadline: Deadline) -> None:
        """Keep records that a peer leaves here: as many as there is room for before they come."""
        asked = read_names(without_file(frame).body, RECORDS_AT_ONCE, with_sizes=True)
        if asked is None or not self._sizes.issuperset(asked[1]):
            raise connection.broken("STORE without names, or with records of another size")
        names, sizes = asked
        lease, count = self._records.lease([[size] for size in sizes])
        connection.send(FrameKind.ANSWER, pack_count(count), deadline)
        if not count:
            return
        num_kept = 0
        try:
            frame = connection.receive(deadline)
            if frame.kind != FrameKind.PAYLOAD or frame.body != pack_count(count):
                without_file(frame)
                raise connection.broken("no PAYLOAD after STORE")
            buffers = [bytearray(size) for size in sizes[:count]]
            connection.receive_payload(frame, [memoryview(each) for each in buffers], deadline)
            for name, buffer in zip(names, buffers, strict=False):
                num_kept += self._records.keep(lease, name, memoryview(buffer), is_own=True)
        finally:
            if not num_kept:
                self._records.release(lease)
        self._note_stored()
        connection.send(FrameKind.ANSWER, pack_count(num_kept), deadline)


def _bound(address: PeerAddress) -> tuple[socket.socket, PeerAddress]:
    """Bind a socket. Return it, and the address with the port that it has. Raises: ConfigError."""
    try:
        if address.is_unix:
            _make_way(address)
            own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                os.fchmod(own.fileno(), _SOCKET_MODE)  # on Linux the path gets this mode
                own.bind(address.path)
                Path(address.path).chmod(_SOCKET_MODE)
            except BaseException:
                own.close()
                raise
            return own, address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        own = socket.create_server((address.host, address.port), family=family)
        return own, replace(address, port=own.getsockname()[1])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"kv_transfer_config: listen={str(address)!r} cannot be bound: {reason}"
        ) from None


def _make_way(address: PeerAddress) -> None:
    """Remove a socket that a server which has ended left behind. Raises: ConfigError, OSError."""
    path = Path(address.path)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"kv_transfer_config: listen={str(address)!r} exists and is not a socket: remove it, "
            f"or choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_TICK_S)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(
        f"kv_transfer_config: listen={str(address)!r} is in use: another process listens there"
    )
