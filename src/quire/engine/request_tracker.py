"""Requests on their way to an engine that a thread of its own steps, and their pieces coming back.

Event loops hand requests in and read mailboxes. All that touches the engine happens in the stepping
thread, between two steps.
"""

import asyncio
import logging
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from itertools import count
from typing import TYPE_CHECKING, TypeVar, final

from quire.engine.engine_thread import EngineThread
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request, Sequence, TokenLogprobs
from quire.engine.statistics import Latencies
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.engine.llm import LLM, Observer


# -- output collector ------------------------------------------------------------------------------

# Pieces of text on their way from the thread that steps to their readers in an event loop.
#
# A reader who is behind finds what has come meanwhile as one piece for each continuation, so what
# waits is bounded, and the thread that steps never does.


@final
class Pending:
    """Pieces of one continuation that have not been read yet, as one."""

    def __init__(self) -> None:
        self._text = StringIO()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._last: TextDelta | None = None
        self._num_pieces = 0

    def add(self, delta: TextDelta) -> None:
        """Its cost does not depend on what waits already."""
        self._text.write(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._last = delta
        self._num_pieces += 1

    def take(self) -> TextDelta:
        assert self._last is not None, "nothing is pending"
        if self._num_pieces == 1:
            return self._last
        return replace(  # how it ends, if it does, the last piece says
            self._last,
            text=self._text.getvalue(),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )


@final
class OutputCollector:
    """Of one request. Made in the event loop of its reader, of whom there is one."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # held for a moment: neither side waits for the other's work
        self._pending: dict[int, Pending] = {}  # by choice
        self._error: Exception | None = None
        self._rung = asyncio.Event()

    def put(self, delta: TextDelta) -> None:
        """Leave a piece, but not after ``fail``.

        ``ring`` is called apart, for all the mailboxes of a loop at once.
        """
        with self._lock:
            if self._error is not None:
                return
            self._pending.setdefault(delta.choice, Pending()).add(delta)

    def fail(self, error: Exception) -> None:
        """Nothing comes any more: the reader gets this after what has come so far."""
        with self._lock:
            self._error = error

    async def take(self) -> list[TextDelta]:
        """What has come since the last time, a piece for each choice; waits for it.

        Raises: what ``fail`` was called with.
        """
        while True:
            self._rung.clear()
            with self._lock:
                pending, self._pending = self._pending, {}
                error = self._error
            if pending:
                return [pieces.take() for pieces in pending.values()]
            if error is not None:
                raise error
            await self._rung.wait()

    @staticmethod
    def ring(mailboxes: Iterable["OutputCollector"]) -> None:
        """Wake the readers. Called in their event loop."""
        for mailbox in mailboxes:
            mailbox._rung.set()


# -- request tracker -------------------------------------------------------------------------------


log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from the moment that it is made until its reader has left."""

    name: str
    mailbox: OutputCollector
    arrived_s: float
    sequences: list[Sequence] = field(default_factory=list)
    over: bool = False  # nothing will come of it that is not in the mailbox


@final
class RequestTracker:
    """Of one LLM, which only the desk closes. ``observe`` gets its usage after each step."""

    def __init__(self, llm: "LLM", observe: "Observer | None") -> None:
        self._llm, self._observe = llm, observe
        self._stepper = EngineThread(self._step, self._end)
        self._lock = threading.Lock()  # of the tickets
        self._tickets: dict[str, RequestState] = {}
        self._names = map(str, count(1))
        # What has come in since the last ``_ring``, by event loop. The stepping thread's own.
        self._filled: dict[AbstractEventLoop, set[OutputCollector]] = {}

    def open(self, name: str | None) -> RequestState:
        """For a reader in the running event loop.

        Raises: RequestError if the name is in use, or nothing will run any more.
        """
        self._stepper.refuse_if_over()
        with self._lock:
            if name is None:
                name = next(own for own in self._names if own not in self._tickets)
            elif name in self._tickets:
                raise RequestError(f"request_id {name!r} is in use: give each request its own")
            ticket = self._tickets[name] = RequestState(name, OutputCollector(), self._llm.now_s())
        return ticket

    def start(self, ticket: RequestState, request: Request) -> None:
        """Let a request join the next step. Raises: RequestError if there is none any more."""
        self._stepper.post(partial(self._start, ticket, request))

    def leave(self, ticket: RequestState) -> None:
        """The reader has left: what still runs of the request ends before the next step."""
        with self._lock:
            self._tickets.pop(ticket.name, None)
        if not ticket.over:
            with suppress(Exception):  # after the end there is nothing to end
                self._stepper.post(partial(self._abort, [ticket], "its reader has left"))

    def abort(self, names: Iterable[str] | None) -> "Future[None]":
        """End these requests, or all, before the next step; their readers are told."""
        with self._lock:
            several = list(self._tickets) if names is None else names
            tickets = [self._tickets[name] for name in several if name in self._tickets]
        return self._stepper.call(partial(self._abort, tickets, "aborted"), fatal=True)

    def call(self, function: Callable[[], T], *, fatal: bool | None = None) -> "Future[T]":
        """Call a function of the LLM between two steps; ``fatal``: as ``EngineThread.call``."""
        return self._stepper.call(function, fatal=fatal)

    @property
    def failure(self) -> Exception | None:
        """Why nothing runs any more; None while it does."""
        return self._stepper.reason if self._stepper.is_over else None

    def inspect(self, function: "Callable[[LLM, list[Sequence]], T]") -> "Future[T]":
        """What a function of the LLM and its unfinished sequences gives between two steps."""
        return self._stepper.call(lambda: function(self._llm, self._unfinished()))

    def close(self) -> None:
        """End what still runs, tell its readers, and close the LLM."""
        self._stepper.close()

    # -- in the stepping thread ------------------------------------------------------------------

    def _step(self) -> bool:
        more = self._llm.step()
        if not more:  # what the last ones held goes back now: there may be no next step for long
            self._llm.abandon(())
        self._ring()
        if self._observe is not None:
            self._observe(self._llm.usage())
        return more

    def _start(self, ticket: RequestState, request: Request) -> None:
        try:
            ticket.sequences = self._llm.start(
                request, partial(self._put, ticket), arrived_s=ticket.arrived_s
            )
        except RequestError as error:
            self._fail(ticket, error)
            self._ring()
            return
        if ticket.over:  # it was aborted before it could begin
            self._abort([ticket], "aborted")

    def _abort(self, tickets: list[RequestState], detail: str) -> None:
        running = [
            (ticket, sequence)
            for ticket in tickets
            for sequence in ticket.sequences
            if sequence.finish_reason is None
        ]
        self._llm.abandon([sequence for _, sequence in running])
        for ticket, sequence in running:
            if sequence.request.beam is not None:  # the search has told it
                continue
            delta = TextDelta(
                index=0,
                choice=sequence.index,
                text="",
                token_ids=(),
                finish_reason="abort",
                detail=detail,
                num_cached_tokens=sequence.num_cached_tokens,
                latencies=Latencies.of(sequence),
            )
            with suppress(Exception):  # its reader is told
                self._put(ticket, delta)
        for ticket in tickets:
            ticket.over = True
        self._ring()

    def _unfinished(self) -> list[Sequence]:
        """In the order in which they came."""
        with self._lock:
            tickets = list(self._tickets.values())
        several = (s for ticket in tickets for s in ticket.sequences if s.finish_reason is None)
        return sorted(several, key=lambda sequence: sequence.seq_id)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            tickets = list(self._tickets.values())
        if error is None:
            self._abort(tickets, "the LLM was closed")
            self._llm.close()
        else:
            log.error("the engine has failed, and every request with it", exc_info=error)
            for ticket in tickets:
                self._fail(ticket, self._stepper.reason)
            self._ring()
            self._llm.fail(str(self._stepper.reason))

    def _put(self, ticket: RequestState, delta: TextDelta) -> None:
        """Raises: what kept the piece from its reader, who is told of it and leaves."""
        if self._llm.has_failed:  # all readers get the error that the step is about to raise
            return
        try:
            ticket.mailbox.put(delta)
        except Exception as error:
            ticket.mailbox.fail(error)
            raise
        finally:
            self._fill(ticket)

    def _fill(self, ticket: RequestState) -> None:
        self._filled.setdefault(ticket.mailbox.loop, set()).add(ticket.mailbox)

    def _fail(self, ticket: RequestState, error: Exception) -> None:
        ticket.over = True
        ticket.mailbox.fail(error)
        self._fill(ticket)

    def _ring(self) -> None:
        """Wake the readers of what has come in."""
        filled, self._filled = self._filled, {}
        for loop, mailboxes in filled.items():
            try:
                loop.call_soon_threadsafe(OutputCollector.ring, mailboxes)
            except RuntimeError:  # the loop is closed, and its readers are gone
                for ticket in self._tickets_of(loop):
                    self.leave(ticket)

    def _tickets_of(self, loop: AbstractEventLoop) -> list[RequestState]:
        with self._lock:
            return [each for each in self._tickets.values() if each.mailbox.loop is loop]
