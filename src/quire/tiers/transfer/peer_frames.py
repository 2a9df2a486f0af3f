"""``PeerConnection``: frames between two servers, over a Unix socket or TCP.

    frame      magic, kind, number of files (0 or 1), bytes of the body
    body       what the kind says: names, sizes, a count, or words
    tag        where both ends have a key: of the frame, its body, and how many came before it
    payload    whole records one behind the other: behind the frame over TCP; over a Unix socket in
               a sealed file of memory, whose descriptor comes with the frame

    HELLO → WELCOME → PROOF → ANSWER     ``peer_handshake``
    AWAIT    a lease: answered when all of its records are there, or after so many milliseconds
    FIND     names: how many of them, from the first one on, are there
    LOAD     names: the sizes of the first ones that are there, and their payload
    STORE    names and sizes: for how many there is room
    PAYLOAD  these records, after STORE: how many are kept
    RELEASE  a lease, which is over
    REFUSED  words, in place of an answer

Neither end believes the other: what a frame announces is compared with a bound, and with what the
receiver has room for, before a byte of it is read; and each call has a deadline. A frame that was
changed, repeated, left out or put in on its way ends the connection. A payload has no tag: each of
its records is checked by who loads it.
"""

import array
import fcntl
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from select import POLLIN, poll
from typing import TYPE_CHECKING, final

from quire.tiers.tier import NAME_BYTES, Deadline, Name, TierError
from quire.tiers.transfer.frame_tags import TAG_BYTES, FrameTags

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

VERSION = 1
FIND_AT_ONCE = 1024  # names
RECORDS_AT_ONCE = 16  # that are loaded or stored
MOST_GROUPS = 64
NONCE_BYTES = PROOF_BYTES = 32
LONGEST_LEASE_BYTES = 64

_MAGIC = b"QKVT"
_FRAME = struct.Struct("<4sBBI")
_MOST_BODY_BYTES = 64 * 1024
_HELLO = struct.Struct(f"<HBB32s{NONCE_BYTES}s")  # version, sealed, groups, fingerprint, nonce
_SIZE = struct.Struct("<Q")
_COUNT = struct.Struct("<H")
_WAIT = struct.Struct("<IB")  # milliseconds, bytes of the lease
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SHOWN_CHARACTERS = 300  # of a refusal
# The end of an answer waits for nothing; and a machine that is gone without a word is noticed in a
# minute, where no question is under way.
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FD_BYTES = array.array("i").itemsize


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    PROOF = 3
    AWAIT = 4
    FIND = 5
    LOAD = 6
    STORE = 7
    RELEASE = 8
    ANSWER = 9
    REFUSED = 10
    PAYLOAD = 11


class PeerLost(TierError):
    """The peer closed the connection, or broke the protocol."""


class PeerRefused(TierError):
    """The peer answered with a refusal. The connection can be used further."""


@dataclass(frozen=True, slots=True)
class PeerFrame:
    """A frame as it came. Who reads it closes the file."""

    kind: FrameKind
    body: bytes
    file: int | None = None  # a descriptor


@final
class PeerConnection:
    """One end of a connection. One thread at a time may use it."""

    def __init__(self, stream: socket.socket, peer: str) -> None:
        """``stream``: connected, and now the connection's own. ``peer``: its name in messages.

        Raises: OSError for a stream that has ended already.
        """
        self._stream, self.peer = stream, peer
        self.passes_files = stream.family == socket.AF_UNIX
        if not self.passes_files:
            set_tcp_options(stream)
        self.is_open = True
        self._sends: FrameTags | None = None  # None: frames have no tags
        self._receives: FrameTags | None = None

    def close(self) -> None:
        """Close it, whatever is under way in another thread."""
        self.is_open = False
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for bytes
        self._stream.close()

    def check_user(self) -> None:
        """Check that the process at the other end is of this process's user.

        It is for Unix sockets. Raises: PeerLost.
        """
        data = self._stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(data)
        own = os.geteuid()
        if uid != own:
            self.close()
            raise PeerLost(f"{self.peer}: it is of user {uid}, and this process of {own}")

    def authenticate(self, own_key: bytes, other_key: bytes) -> None:
        """Tag each frame that is sent from now on, and expect tags of those that come."""
        self._sends, self._receives = FrameTags(own_key), FrameTags(other_key)

    def wait(self, seconds: float) -> bool:
        """Wait so long for bytes. Return whether some have come, or the end."""
        waiting = poll()
        with suppress(OSError, ValueError):
            waiting.register(self._stream, POLLIN)
            return bool(waiting.poll(seconds * 1000))
        return False

    # -- out ---------------------------------------------------------------------------------------

    def send(
        self, kind: FrameKind, body: bytes, deadline: Deadline, *, file: int | None = None
    ) -> None:
        """Send a frame. Raises: TierError."""
        assert len(body) <= _MOST_BODY_BYTES, "a body that the peer would refuse"
        data = _FRAME.pack(_MAGIC, kind, int(file is not None), len(body)) + body
        if self._sends is not None:
            data += self._sends.next(data)
        try:
            sent = 0
            self._limit(deadline)
            if file is not None:
                sent = socket.send_fds(self._stream, [data], [file])
            self._limit(deadline)
            self._stream.sendall(data[sent:])
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise PeerLost(f"{self.peer}: {error.strerror or error}") from None

    def send_payload(
        self, kind: FrameKind, body: bytes, payload: Sequence[memoryview], deadline: Deadline
    ) -> None:
        """Send a frame and its payload. Raises: TierError."""
        if self.passes_files:
            try:
                file = _sealed(payload)
            except OSError as error:
                self.close()
                raise PeerLost(f"{self.peer}: no file of memory: {error.strerror}") from None
            try:
                self.send(kind, body, deadline, file=file)
            finally:
                os.close(file)
            return
        self.send(kind, body, deadline)
        try:
            for view in payload:
                self._limit(deadline)
                self._stream.sendall(view)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise PeerLost(f"{self.peer}: {error.strerror or error}") from None

    # -- in ----------------------------------------------------------------------------------------

    def receive(self, deadline: Deadline) -> PeerFrame:
        """Receive a frame. Raises: TierError, after which the connection is of no more use."""
        files: list[int] = []
        try:
            head = self._header(files, deadline)
            magic, number, num_files, num_bytes = _FRAME.unpack(head)
            is_known = magic == _MAGIC and number in FrameKind.__members__.values()
            if not is_known or num_files > 1 or num_bytes > _MOST_BODY_BYTES:
                raise self.broken(f"a frame that begins with {bytes(head[:8])!r}")
            if num_files != len(files):
                raise self.broken("a frame without the file that it announces, or with another")
            body = bytearray(num_bytes)
            self.fill(memoryview(body), deadline)
            if self._receives is not None:
                tag = bytearray(TAG_BYTES)
                self.fill(memoryview(tag), deadline)
                if not hmac.compare_digest(tag, self._receives.next(head + body)):
                    raise self.broken("a frame that was changed on its way")
        except BaseException:
            for file in files:
                os.close(file)
            self.close()
            raise
        return PeerFrame(FrameKind(number), bytes(body), files[0] if files else None)

    def ask(self, kind: FrameKind, body: bytes, deadline: Deadline) -> PeerFrame:
        """Send a frame and receive its answer. Raises: PeerRefused; TierError."""
        self.send(kind, body, deadline)
        return self.answer(deadline)

    def answer(self, deadline: Deadline, kind: FrameKind = FrameKind.ANSWER) -> PeerFrame:
        """Receive an answer. Raises: PeerRefused; TierError."""
        frame = self.receive(deadline)
        if frame.kind == kind:
            return frame
        if frame.file is not None:
            os.close(frame.file)
        if frame.kind == FrameKind.REFUSED:
            text = frame.body[:_SHOWN_CHARACTERS].decode("ascii", "replace")
            shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in text)
            raise PeerRefused(f"{self.peer}: {shown}")
        raise self.broken(f"a frame of the kind {frame.kind.name}")

    def refuse(self, words: str, deadline: Deadline) -> None:
        """Say why there is no answer. Raises: TierError."""
        text = words.encode("ascii", "replace")[:_SHOWN_CHARACTERS]
        self.send(FrameKind.REFUSED, text, deadline)

    def receive_payload(
        self, frame: PeerFrame, into: Sequence[memoryview], deadline: Deadline
    ) -> None:
        """Fill buffers with a frame's payload, and close its file. Raises: TierError.

        ``into``: writable views of bytes, as long as the records that the frame announces.
        """
        if not self.passes_files:
            for view in into:
                self.fill(view, deadline)
            return
        if frame.file is None:
            raise self.broken("no file with the payload")
        try:
            flaw = _filled(frame.file, into)
        finally:
            os.close(frame.file)
        if flaw:
            raise self.broken(flaw)

    def fill(self, buffer: memoryview, deadline: Deadline) -> None:
        """Receive exactly as many bytes as the buffer has. Raises: TierError."""
        done = 0
        while done < len(buffer):
            self._limit(deadline)
            try:
                got = self._stream.recv_into(buffer[done:])
            except TimeoutError:
                raise self._late() from None
            except OSError as error:
                raise PeerLost(f"{self.peer}: {error.strerror or error}") from None
            if not got:
                raise PeerLost(f"{self.peer}: it closed the connection")
            done += got

    def broken(self, what: str) -> PeerLost:
        """Close the connection, and return an error that says what came in place of an answer."""
        self.close()
        return PeerLost(f"{self.peer}: it does not keep to the protocol: {what}")

    def _header(self, files: list[int], deadline: Deadline) -> bytes:
        """Receive the fixed part of a frame, and the descriptor that may come with it."""
        if not self.passes_files:
            head = bytearray(_FRAME.size)
            self.fill(memoryview(head), deadline)
            return bytes(head)
        data = b""
        while len(data) < _FRAME.size:
            self._limit(deadline)
            try:
                # There is room for one descriptor; the system closes any others.
                got, ancillary, _, _ = self._stream.recvmsg(
                    _FRAME.size - len(data), socket.CMSG_LEN(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError:
                raise self._late() from None
            except OSError as error:
                raise PeerLost(f"{self.peer}: {error.strerror or error}") from None
            for level, kind, passed in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    own = array.array("i")
                    own.frombytes(passed[: len(passed) - len(passed) % own.itemsize])
                    files += own
            if not got:
                raise PeerLost(f"{self.peer}: it closed the connection")
            data += got
        return data

    def _limit(self, deadline: Deadline) -> None:
        left_s = deadline.left_s
        if not left_s or not self.is_open:
            raise TierError(f"{self.peer}: {'closed' if left_s else 'out of time'}")
        self._stream.settimeout(left_s)

    def _late(self) -> TierError:
        return TierError(f"{self.peer}: out of time")


def set_tcp_options(stream: "socket.socket | TransportSocket") -> None:
    """Have a connection send at once, and notice a peer that is gone without a word."""
    for level, option, value in _TCP_OPTIONS:
        stream.setsockopt(level, option, value)


# -- files of memory -------------------------------------------------------------------------------


def _sealed(payload: Sequence[memoryview]) -> int:
    """Write records into a file of memory that never changes again. Return its descriptor."""
    file = os.memfd_create("quire-records", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for view in payload:
            done = 0
            while done < len(view):
                done += os.write(file, view[done:])
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file


def _filled(file: int, into: Sequence[memoryview]) -> str:
    """Fill buffers from a peer's file, which is read and never mapped. Return what is wrong.

    Only a file of memory has seals, and only with these it cannot change while records are checked.
    """
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return "a file that is not sealed"
        if os.fstat(file).st_size != sum(map(len, into)):
            return "a file of another size than its records"
        at = 0
        for view in into:
            done = 0
            while done < len(view):
                got = os.preadv(file, [view[done:]], at + done)
                if not got:
                    return "a file that ends early"
                done += got
            at += len(view)
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
    return ""


# -- bodies ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What an end says of itself first: the records that it reads, and a nonce."""

    fingerprint: bytes  # 32 bytes
    sizes: tuple[int, ...]  # of each group's records, in bytes
    is_sealed: bool
    nonce: bytes
    version: int = VERSION

    def packed(self) -> bytes:
        """Return the body."""
        head = _HELLO.pack(
            self.version, self.is_sealed, len(self.sizes), self.fingerprint, self.nonce
        )
        return head + b"".join(map(_SIZE.pack, self.sizes))

    @classmethod
    def read(cls, body: bytes) -> "Hello | None":
        """Read a body. Return None for one that is none."""
        if len(body) < _HELLO.size:
            return None
        version, is_sealed, num_groups, fingerprint, nonce = _HELLO.unpack_from(body)
        rest = body[_HELLO.size :]
        if num_groups > MOST_GROUPS or len(rest) != num_groups * _SIZE.size:
            return None
        return cls(
            version=version,
            is_sealed=bool(is_sealed),
            sizes=tuple(size for (size,) in _SIZE.iter_unpack(rest)),
            fingerprint=fingerprint,
            nonce=nonce,
        )

    def difference(self, other: "Hello") -> str:
        """Say why records of the other end are of no use here; empty if they are."""
        if other.version != self.version:
            return f"it speaks version {other.version} of the protocol, and this {self.version}"
        if other.fingerprint != self.fingerprint:
            return (
                "its records are of another fingerprint (model, dtype, block size, ...): "
                f"{other.fingerprint.hex()[:16]}, and here {self.fingerprint.hex()[:16]}"
            )
        if other.is_sealed != self.is_sealed:
            return "one end has records sealed by kv_tier_key, and the other has not"
        if other.sizes != self.sizes:
            return f"its records have {other.sizes[:4]} bytes, and here {self.sizes[:4]}"
        return ""


def pack_count(count: int, sizes: Sequence[int] = ()) -> bytes:
    """Return the body of an answer: a count, and the sizes of records."""
    return _COUNT.pack(count) + b"".join(map(_SIZE.pack, sizes))


def read_count(body: bytes, most: int, *, with_sizes: bool = False) -> tuple[int, list[int]] | None:
    """Read the body of an answer. Return None for one that is none, or counts above ``most``."""
    if len(body) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(body)
    rest = body[_COUNT.size :]
    if count > most or len(rest) != with_sizes * count * _SIZE.size:
        return None
    return count, [size for (size,) in _SIZE.iter_unpack(rest)]


def pack_names(names: Sequence[Name], sizes: Sequence[int] = ()) -> bytes:
    """Return the body of a question for records: their names, and the sizes of those to come."""
    return b"".join([_COUNT.pack(len(names)), *names, *map(_SIZE.pack, sizes)])


def read_names(
    body: bytes, most: int, *, with_sizes: bool = False
) -> tuple[list[Name], list[int]] | None:
    """Read the body of a question for records. Return None for one that is none."""
    if len(body) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(body)
    end = _COUNT.size + count * NAME_BYTES
    if count > most or len(body) != end + with_sizes * count * _SIZE.size:
        return None
    names = [body[at : at + NAME_BYTES] for at in range(_COUNT.size, end, NAME_BYTES)]
    return names, [size for (size,) in _SIZE.iter_unpack(body[end:])]


def pack_lease(lease: str, wait_s: float = 0.0) -> bytes:
    """Return the body of a question about a lease."""
    name = lease.encode("ascii", "replace")[:LONGEST_LEASE_BYTES]
    return _WAIT.pack(max(0, int(wait_s * 1000)), len(name)) + name


def read_lease(body: bytes) -> tuple[str, float] | None:
    """Read the body of a question about a lease: its name, and seconds. None for one that is none.

    The seconds are as the peer likes: bound them.
    """
    if len(body) < _WAIT.size:
        return None
    milliseconds, length = _WAIT.unpack_from(body)
    name = body[_WAIT.size :]
    if len(name) != length or length > LONGEST_LEASE_BYTES or not name.isascii():
        return None
    return name.decode("ascii"), milliseconds / 1000
