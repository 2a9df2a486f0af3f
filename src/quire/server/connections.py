"""Connections that time out, and input cut for the parser of HTTP. Nothing here knows a route.

uvicorn waits without end for a request that has begun, and for a client to take the rest of an
answer: a client that sends a byte a minute, or reads none, would hold a connection and its buffers
for as long as it likes.
"""

import asyncio
import logging
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.server.logs import place_of

# -- input, cut for the parser ---------------------------------------------------------------------


MOST_HEAD_BYTES = 16 * 1024
MOST_HEAD_LINES = 100
# h11, or the code that decodes the path, takes a slow step for each of these.
_MOST_SIGNS: Mapping[str, tuple[bytes, int]] = MappingProxyType(
    {
        "lines": (b"\n", MOST_HEAD_LINES),
        "commas": (b",", 1_000),
        "percent signs": (b"%", 1_000),
        "blanks": (b" ", 2_000),
        "tabs": (b"\t", 1_000),
    }
)
_MOST_LINE_BYTES = 8_000  # the line with the path; Source: RFC 9110, section 4.1
_MOST_BODY_BYTES = 64 * 1024  # in one part
_MOST_CHUNKS = 16  # in one part
_MOST_CHUNK_LINE = 64

_BLANK_LINE = re.compile(rb"\n\r?\n")
_NOT_IN_A_HEAD = bytes((*range(9), 11, 12, *range(14, 32), 127))


class Malformed(Exception):
    """What has come is not HTTP as this server reads it. The message is for the
    client, in ASCII.
    """


@final
class Parts:
    """The input of one connection, cut so that h11 never holds the event loop for long.

    h11 reads all that it is given at once, with regular expressions that take quadratic time over
    blanks: 32 KB of them in one header took seven seconds, 64 KB of one-byte chunks an eighth of a
    second. So it gets whole, small heads without control characters, and a few chunks of a body at
    a time. After each head ``body`` must be told what follows it.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._seen = 0  # bytes without the end of a head
        self._left = 0  # bytes of a body, or of a chunk with its line end
        self._is_chunked = self._is_over = False

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes) -> None:
        """Append what has come."""
        self._data += data

    def body(self, length: int | None) -> None:
        """Expect a body of so many bytes, or of chunks (None)."""
        self._left, self._is_chunked, self._is_over = length or 0, length is None, False

    def head(self) -> bytes:
        """Take a whole head; return nothing if it has not come. Raises: Malformed."""
        found = _BLANK_LINE.search(self._data, self._seen, MOST_HEAD_BYTES)
        if found is None:
            self._seen = max(0, len(self._data) - 2)
            if len(self._data) >= MOST_HEAD_BYTES:
                raise Malformed(f"A request's head may have {MOST_HEAD_BYTES:,} bytes.")
            # What is no request at all, such as a TLS handshake, may never end.
            if self._data and self._data[0] <= 32:
                raise Malformed("Invalid HTTP request received.")
            return b""
        head = self._take(found.end())
        if head.find(b"\n") > _MOST_LINE_BYTES:
            raise Malformed(f"A request's line may have {_MOST_LINE_BYTES:,} bytes.")
        if len(head.translate(None, _NOT_IN_A_HEAD)) < len(head) or head.count(b"\r") > head.count(
            b"\r\n"
        ):
            raise Malformed("A request's head has a control character in it.")
        for what, (sign, most) in _MOST_SIGNS.items():
            if head.count(sign) > most:
                raise Malformed(f"A request's head may have {most:,} {what}.")
        return head

    def of_body(self) -> bytes:
        """Take what there is of the body, up to 64 KiB or 16 chunks. Raises: Malformed."""
        if self._is_chunked:
            return self._take(self._chunks())
        part = self._take(min(self._left, _MOST_BODY_BYTES))
        self._left -= len(part)
        return part

    def _chunks(self) -> int:
        """Return how many bytes from here on are a few chunks, or parts of some."""
        end = 0
        for _ in range(_MOST_CHUNKS):
            inside = min(self._left, len(self._data) - end, _MOST_BODY_BYTES)
            self._left -= inside
            end += inside
            if self._left:
                break
            if self._is_over:
                last = self._data[end : end + 2]
                if not b"\r\n".startswith(last):
                    raise Malformed("Trailers are not supported.")
                return end + 2 if len(last) == 2 else end
            line = self._data.find(b"\r\n", end, end + _MOST_CHUNK_LINE)
            if line < 0:
                if len(self._data) - end >= _MOST_CHUNK_LINE:
                    raise Malformed(f"The line before a chunk may have {_MOST_CHUNK_LINE} bytes.")
                break
            size = self._data[end:line].partition(b";")[0].strip(b" \t")
            if not size.isalnum() or size.translate(None, b"0123456789abcdefABCDEF"):
                raise Malformed("A chunk has no size in front of it.")
            end, self._is_over = line + 2, int(size, 16) == 0
            self._left = 0 if self._is_over else int(size, 16) + 2
        return end

    def _take(self, count: int) -> bytes:
        part = bytes(self._data[:count])
        del self._data[:count]
        if part:
            self._seen = 0
        return part


# -- connections -----------------------------------------------------------------------------------


log = logging.getLogger(__name__)

UNIX_PEER = "unix"  # the address of a client that came through a Unix socket, which has none
STEP_BYTES = 64 * 1024  # a client sends or takes so much within each timeout
_LOOKS = 4  # checks within a timeout
_SAYS_AGAIN_S = 60.0


@final
class LoopErrors:
    """An event loop's exception handler: it logs an error's place, and none of its text.

    Once a minute it says that the process has no files left for clients: Python 3.11's loop says so
    two thousand times a second, with a traceback.
    """

    def __init__(self) -> None:
        self._said_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message")).startswith("socket.accept() out of system resource"):
            what, error = str(context.get("message")), context.get("exception")
            place = place_of(error) if isinstance(error, BaseException) else "no exception"
            log.error("%s: %s", what.partition("(")[0], place)  # without a call's arguments
            return
        now_s = loop.time()
        if self._said_s is None or now_s - self._said_s >= _SAYS_AGAIN_S:
            self._said_s = now_s
            log.warning(
                "no client can connect: %s; raise the limit of open files (ulimit -n), or lower "
                "read_timeout or timeout_keep_alive",
                context.get("exception"),
            )


@dataclass(slots=True)
class StallTimer:
    """Measures how long something has stood still."""

    timeout_s: float
    since_s: float = 0.0
    mark: object = None

    def is_over(self, now_s: float, *, waits: bool, mark: object) -> bool:
        """Return whether it has stood still for ``timeout_s``. ``mark`` changes with
        all progress.
        """
        if not waits or mark != self.mark:
            self.since_s, self.mark = now_s, mark
            return False
        return now_s - self.since_s >= self.timeout_s


@final
class Connection(H11Protocol):
    """uvicorn's connection, which is closed if its client stands still.

    It uses h11 even where httptools is installed, which is 0.3 ms a request faster and takes some
    bytes that are not HTTP.

    ``read_timeout_s`` is for a request's head, and for each 64 KiB of its body; ``send_timeout_s``
    for each 64 KiB of an answer that the client is to take. Between two requests uvicorn's own
    ``timeout_keep_alive`` counts.
    """

    def __init__(self, *, read_timeout_s: float, send_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._sending, self._taking = StallTimer(read_timeout_s), StallTimer(send_timeout_s)
        self._between_looks_s = min(read_timeout_s, send_timeout_s) / _LOOKS
        self._num_received_bytes = self._num_resumed = 0
        self._next_look: asyncio.TimerHandle | None = None
        self._parts = Parts()
        self._next_turn: asyncio.Handle | None = None  # to read on

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note where the client comes from, and begin to watch it."""
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        if own is not None and own.family == socket.AF_UNIX:
            self.client = UNIX_PEER, 0
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what is scheduled for this connection."""
        for each in (self._next_look, self._next_turn):
            if each is not None:
                each.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come, and read on unless that is scheduled."""
        self._num_received_bytes += len(data)
        self._parts.add(data)
        if self._next_turn is None:
            self._read_on()

    def on_response_complete(self) -> None:
        """Read the next request if it has come already."""
        super().on_response_complete()
        if self._parts and self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._read_on)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; close the connection in the middle of an answer."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # its answer comes too late
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # in the middle of an answer
            self.transport.abort()

    def resume_writing(self) -> None:
        """Count that the client has taken something."""
        self._num_resumed += 1
        super().resume_writing()

    def _read_on(self) -> None:
        """Read a head and a part of its body; read the rest when other connections have had their
        turn.
        """
        self._next_turn = None
        if self._parts and self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        if self.transport.is_closing():
            self._parts = Parts()
            return
        try:
            if head := self._parts.head() if self.conn.their_state is h11.IDLE else b"":
                super().data_received(head)
                self._parts.body(self._length())
            body = self._parts.of_body() if self.conn.their_state is h11.SEND_BODY else b""
        except Malformed as error:
            self._parts = Parts()
            self.send_400_response(str(error))
            return
        if body:
            super().data_received(body)
        if self._parts and (head or body):
            self._next_turn = self.loop.call_soon(self._read_on)
        state = self.conn.their_state
        if state in (h11.MUST_CLOSE, h11.CLOSED, h11.ERROR):
            self._parts = Parts()
        elif self._next_turn or (self._parts and state not in (h11.IDLE, h11.SEND_BODY)):
            self.transport.pause_reading()
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def _length(self) -> int | None:
        """Return the length of the body behind the last head; None if it comes in chunks. Raises:
        Malformed for what two readers may understand differently.
        """
        headers = dict(self.headers or ())
        length = headers.get(b"content-length")
        if b"transfer-encoding" not in headers:
            return int(length or 0)
        if length is not None:
            raise Malformed("A body has either a content-length or a transfer-encoding.")
        return None

    def _look(self) -> None:
        now_s = self.loop.time()
        if self._sends_nothing(now_s) or self._takes_nothing(now_s):
            self.transport.abort()
        else:
            self._next_look = self.loop.call_later(self._between_looks_s, self._look)

    def _sends_nothing(self, now_s: float) -> bool:
        """Return whether a client that is to send, a first request or the rest of
        one, has stopped.
        """
        cycle = self.cycle
        is_between = cycle is not None and self.timeout_keep_alive_task is not None
        waits = cycle is None or cycle.more_body or (cycle.response_complete and not is_between)
        return self._sending.is_over(
            now_s,
            waits=waits and not self.flow.read_paused,
            mark=(cycle, self._num_received_bytes // STEP_BYTES),
        )

    def _takes_nothing(self, now_s: float) -> bool:
        """Return whether a client has stopped taking an answer that waits for it."""
        num_bytes = self.transport.get_write_buffer_size()
        ended = self.transport.is_closing() or (
            self.cycle is not None and self.cycle.response_complete
        )
        return self._taking.is_over(
            now_s,
            waits=num_bytes > 0 and (ended or self.flow.write_paused),
            mark=(self.cycle, self._num_resumed, num_bytes // STEP_BYTES),
        )
