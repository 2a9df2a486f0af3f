"""A connection that waits for its client, but not for ever. Nothing here knows what is served.

uvicorn waits without end for a request that has begun, and for what is left of an answer to be
taken: a client who sends a byte a minute, or reads none, would hold a connection and its buffers
for as long as it likes.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, final

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

STEP_BYTES = 64 * 1024  # that a client has to send or take, each time before its time is over
_LOOKS = 4  # in one such time


_SAYS_AGAIN_S = 60.0


@final
class LoopErrors:
    """An event loop's exception handler, that says once a minute that nobody can be let in.

    Without files left, Python 3.11's loop says it two thousand times a second, with a traceback.
    """

    def __init__(self) -> None:
        self._said_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message")).startswith("socket.accept() out of system resource"):
            loop.default_exception_handler(context)
            return
        now_s = loop.time()
        if self._said_s is None or now_s - self._said_s >= _SAYS_AGAIN_S:
            self._said_s = now_s
            log.warning(
                "nobody new is let in: %s; raise the limit of open files (ulimit -n), or lower "
                "read_timeout",
                context.get("exception"),
            )


@dataclass(slots=True)
class Patience:
    """How long something has stood still."""

    timeout_s: float
    since_s: float = 0.0
    mark: object = None

    def is_over(self, now_s: float, *, waits: bool, mark: object) -> bool:
        """``mark`` changes whenever there is progress."""
        if not waits or mark != self.mark:
            self.since_s, self.mark = now_s, mark
            return False
        return now_s - self.since_s >= self.timeout_s


@final
class Connection(H11Protocol):
    """uvicorn's, which is cut off if its client stands still.

    It reads by h11 also where httptools is installed, which is faster (0.3 ms a request) and takes
    some bytes that are no HTTP.

    ``read_timeout_s`` is for a request's header, and for each 64 KiB of its body;
    ``send_timeout_s`` for each 64 KiB of an answer that waits to be taken. ``turned_away`` may
    answer a request's bytes before they are parsed.
    """

    def __init__(
        self,
        *,
        read_timeout_s: float,
        send_timeout_s: float,
        turned_away: Callable[[bytes], Response | None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._turned_away = turned_away
        self._sending, self._taking = Patience(read_timeout_s), Patience(send_timeout_s)
        self._between_looks_s = min(read_timeout_s, send_timeout_s) / _LOOKS
        self._num_received_bytes = self._num_resumed = self._num_turned_away = 0
        self._next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_received_bytes += len(data)
        if self._is_between_requests and (answer := self._turned_away(data)) is not None:
            self._say(data, answer)
        else:
            super().data_received(data)

    def resume_writing(self) -> None:
        self._num_resumed += 1
        super().resume_writing()

    @property
    def _is_between_requests(self) -> bool:
        own = self.conn
        return own.our_state is own.their_state is h11.IDLE and not own.trailing_data[0]

    def _say(self, data: bytes, answer: Response) -> None:
        """A whole answer to a request that the parser will never know of."""
        self._unset_keepalive_if_required()
        self._num_turned_away += 1
        status = answer.status_code
        if self.access_log:
            method, target = data.split(b" ", 2)[:2]
            whom = "{}:{}".format(*self.client) if self.client else ""
            words = (whom, method.decode(), target.decode(), "1.1", status)
            self.access_logger.info('%s - "%s %s HTTP/%s" %d', *words)
        lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
        headers = self.server_state.default_headers + answer.raw_headers
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", answer.body]))

    def _look(self) -> None:
        now_s = self.loop.time()
        if self._sends_nothing(now_s) or self._takes_nothing(now_s):
            self.transport.abort()
        else:
            self._next_look = self.loop.call_later(self._between_looks_s, self._look)

    def _sends_nothing(self, now_s: float) -> bool:
        """Though it is for the client to send: a first request, the rest of one, the next one."""
        cycle = self.cycle
        waits = cycle is None or cycle.response_complete or cycle.more_body
        return self._sending.is_over(
            now_s,
            waits=waits and not self.flow.read_paused,
            mark=(cycle, self._num_turned_away, self._num_received_bytes // STEP_BYTES),
        )

    def _takes_nothing(self, now_s: float) -> bool:
        """Of an answer to which nothing is added until it does, or nothing at all any more."""
        num_bytes = self.transport.get_write_buffer_size()
        ended = self.transport.is_closing() or (
            self.cycle is not None and self.cycle.response_complete
        )
        return self._taking.is_over(
            now_s,
            waits=num_bytes > 0 and (ended or self.flow.write_paused),
            mark=(self.cycle, self._num_resumed, num_bytes // STEP_BYTES),
        )
