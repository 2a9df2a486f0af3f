"""``RespConnection``: one connection to a server that speaks RESP2, such as Redis or Valkey.

Values are read straight into the caller's buffers and sent straight out of them. What a server
announces is compared with what the caller has room for before a byte of it is read, so a wrong or
hostile server costs no more than the deadline. Which commands are sent, and how many connections
there are, ``redis`` says.
"""

import socket
from typing import TypeAlias, final

from quire.tiers.tier import Deadline, TierError

# RESP2, https://redis.io/docs/latest/develop/reference/protocol-spec/
_CRLF = b"\r\n"
_LONGEST_LINE_BYTES = 2048  # an error's text; other lines have at most 23
_MOST_DIGITS = 19  # of i64
_INBOX_BYTES = 4096  # lines, and the beginning of a value, which is copied from here
_COPIED_BYTES = 8192  # a longer word is sent from where it lies
_SHOWN_CHARACTERS = 120  # of an error's text
_MOST_KEYS = 2**16  # of a page

Reply: TypeAlias = int | bytes  # a number, or the text of a status


class ConnectionLost(TierError):
    """The server closed the connection, or broke the protocol."""


class ServerRefused(TierError):
    """The server answered with an error. The connection can be used further."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code  # its first word: "OOM"


@final
class RespConnection:
    """Requests go out in order, and each has one reply. One thread at a time may use it."""

    def __init__(self, stream: socket.socket, peer: str) -> None:
        """``stream``: connected, and now the connection's own. ``peer``: its name in messages."""
        self._stream, self._peer = stream, peer
        self._inbox = bytearray(_INBOX_BYTES)  # bytes [start, stop) are still to be read
        self._start = self._stop = 0
        self._outbox = bytearray()
        self._num_due = 0  # replies
        self.is_open = True

    @property
    def is_idle(self) -> bool:
        """Return whether the next reply can only be that to the next request."""
        clean = not (self._num_due or self._outbox or self._stop - self._start)
        return self.is_open and clean

    def close(self) -> None:
        """Close it, whatever is under way."""
        self.is_open = False
        self._stream.close()

    def ask(self, *words: bytes | memoryview, deadline: Deadline) -> None:
        """Send a request. Short ones wait for the next ``read`` and leave together.

        Raises: TierError.
        """
        self._num_due += 1
        self._outbox += b"*%d\r\n" % len(words)
        for word in words:
            self._outbox += b"$%d\r\n" % len(word)
            if len(word) <= _COPIED_BYTES:
                self._outbox += word
            else:
                self._flush(deadline)
                self._send(word, deadline)
            self._outbox += _CRLF

    def read(self, deadline: Deadline) -> Reply:
        """Read the reply to a request that is answered by a number or a status.

        Raises: ServerRefused; TierError, after which the connection is of no more use.
        """
        line = self._first_line(deadline)
        if line[:1] == b"+":
            reply: Reply = line[1:]
        elif line[:1] == b":":
            reply = self._number(line[1:])
        else:
            raise self._broken(f"a reply that begins with {line[:1]!r}")
        self._num_due -= 1
        return reply

    def read_into(self, buffer: memoryview, deadline: Deadline) -> bool:
        """Read the reply to a request for a value into a writable buffer u8[n].

        Returns: whether there is a value and it has the buffer's length. One that is longer ends
        the connection. Raises: as ``read``.
        """
        line = self._first_line(deadline)
        if line[:1] != b"$":
            raise self._broken(f"a reply that begins with {line[:1]!r}")
        num_bytes = self._number(line[1:])
        if num_bytes > len(buffer):  # to read on would cost what the server likes
            self.close()
            return False
        if num_bytes >= 0:
            self._fill(buffer[:num_bytes], deadline)
            if self._line(deadline):
                raise self._broken("a value that is longer than was announced")
        elif num_bytes != -1:
            raise self._broken(f"a value of {num_bytes} bytes")
        self._num_due -= 1
        return num_bytes == len(buffer)

    def read_page(self, longest: int, deadline: Deadline) -> tuple[bytes, list[bytes]]:
        """Read the reply to a request for a page of keys: where the next one begins, and the keys.

        ``longest``: bytes of a key. Raises: as ``read``.
        """
        if self._first_line(deadline) != b"*2":
            raise self._broken("a reply that is no page of keys")
        cursor = self._word(_MOST_DIGITS + 1, deadline)  # a number of 64 bits without a sign
        num_keys = self._size(b"*", _MOST_KEYS, deadline)
        keys = [self._word(longest, deadline) for _ in range(num_keys)]
        self._num_due -= 1
        return cursor, keys

    # -- replies -----------------------------------------------------------------------------------

    def _word(self, longest: int, deadline: Deadline) -> bytes:
        word = bytearray(self._size(b"$", longest, deadline))
        self._fill(memoryview(word), deadline)
        if self._line(deadline):
            raise self._broken("a word that is longer than was announced")
        return bytes(word)

    def _size(self, kind: bytes, most: int, deadline: Deadline) -> int:
        """Read how many bytes, or words, follow."""
        line = self._line(deadline)
        size = self._number(line[1:]) if line[:1] == kind else -1
        if not 0 <= size <= most:
            raise self._broken(f"{line[:_MOST_DIGITS]!r} for at most {most:,}")
        return size

    def _first_line(self, deadline: Deadline) -> bytes:
        self._flush(deadline)
        line = self._line(deadline)
        if line[:1] == b"-":
            self._num_due -= 1
            text = line[1:].decode("ascii", "replace")
            code = text.partition(" ")[0]
            shown = "".join(c if c.isprintable() else "?" for c in text[:_SHOWN_CHARACTERS])
            raise ServerRefused(code, shown)
        return line

    def _number(self, text: bytes) -> int:
        digits = text.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > _MOST_DIGITS:
            raise self._broken(f"{text[:_MOST_DIGITS]!r} for a number")
        return int(text)

    def _line(self, deadline: Deadline) -> bytes:
        """Read up to the end of a line, which is left out."""
        while (end := self._inbox.find(_CRLF, self._start, self._stop)) < 0:
            unread = self._stop - self._start
            if unread > _LONGEST_LINE_BYTES:
                break
            if self._stop == len(self._inbox):
                self._inbox[:unread] = self._inbox[self._start : self._stop]
                self._start, self._stop = 0, unread
            self._stop += self._receive(memoryview(self._inbox)[self._stop :], deadline)
        if not 0 <= end - self._start <= _LONGEST_LINE_BYTES:
            raise self._broken(f"a line of more than {_LONGEST_LINE_BYTES:,} bytes")
        line = bytes(self._inbox[self._start : end])
        self._start = end + len(_CRLF)
        if self._start == self._stop:
            self._start = self._stop = 0
        return line

    def _fill(self, buffer: memoryview, deadline: Deadline) -> None:
        """Read exactly as many bytes as the buffer has."""
        done = min(len(buffer), self._stop - self._start)
        buffer[:done] = memoryview(self._inbox)[self._start : self._start + done]
        self._start += done
        while done < len(buffer):
            done += self._receive(buffer[done:], deadline)

    # -- bytes -------------------------------------------------------------------------------------

    def _receive(self, into: memoryview, deadline: Deadline) -> int:
        self._limit(deadline)
        try:
            got = self._stream.recv_into(into)
        except TimeoutError:
            raise TierError(f"{self._peer}: out of time") from None
        except OSError as error:
            raise ConnectionLost(f"{self._peer}: {error.strerror or error}") from None
        if not got:
            raise ConnectionLost(f"{self._peer}: the server closed the connection")
        return got

    def _flush(self, deadline: Deadline) -> None:
        if self._outbox:
            self._send(self._outbox, deadline)
            self._outbox = bytearray()

    def _send(self, data: bytes | bytearray | memoryview, deadline: Deadline) -> None:
        self._limit(deadline)
        try:
            self._stream.sendall(data)
        except TimeoutError:
            raise TierError(f"{self._peer}: out of time") from None
        except OSError as error:
            raise ConnectionLost(f"{self._peer}: {error.strerror or error}") from None

    def _limit(self, deadline: Deadline) -> None:
        left_s = deadline.left_s
        if not left_s or not self.is_open:
            raise TierError(f"{self._peer}: {'closed' if left_s else 'out of time'}")
        self._stream.settimeout(left_s)

    def _broken(self, what: str) -> ConnectionLost:
        self.close()
        return ConnectionLost(f"{self._peer}: no answer in RESP2: {what}")
