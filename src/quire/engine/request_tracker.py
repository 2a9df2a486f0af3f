"""``RequestTracker``: requests of event loops, and their outputs from the engine's thread.

Event loops hand requests in and read collectors. The engine's thread alone touches the engine.
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


@final
class Pending:
    """Unread pieces of one continuation, as one piece."""

    def __init__(self) -> None:
        self._text = StringIO()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._last: TextDelta | None = None
        self._num_pieces = 0

    def add(self, delta: TextDelta) -> None:
        """Add a piece, at a cost that does not depend on the unread ones."""
        self._text.write(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._last = delta
        self._num_pieces += 1

    def take(self) -> TextDelta:
        """Return all pieces as one."""
        assert self._last is not None, "nothing is pending"
        if self._num_pieces == 1:
            return self._last
        return replace(
            self._last,  # which says how the continuation ends
            text=self._text.getvalue(),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )


@final
class OutputCollector:
    """The outputs of one request, from the engine's thread to a reader in an event loop.

    A slow reader finds its unread pieces as one for each continuation. So what waits is bounded,
    and the engine's thread never waits. The collector is made in the reader's event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # held for a moment
        self._pending: dict[int, Pending] = {}  # by choice
        self._error: Exception | None = None
        self._rung = asyncio.Event()

    def put(self, delta: TextDelta) -> None:
        """Put a piece in, unless the request has failed. ``ring`` wakes the reader."""
        with self._lock:
            if self._error is not None:
                return
            self._pending.setdefault(delta.choice, Pending()).add(delta)

    def fail(self, error: Exception) -> None:
        """Raise an error in the reader, after the pieces so far."""
        with self._lock:
            self._error = error

    async def take(self) -> list[TextDelta]:
        """Wait for new pieces, and return one for each choice. Raises: the error of ``fail``."""
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
    def ring(collectors: Iterable["OutputCollector"]) -> None:
        """Wake the readers. The caller is in their event loop."""
        for collector in collectors:
            collector._rung.set()


# -- request tracker -------------------------------------------------------------------------------


log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RequestState:
    """A request until its reader has left."""

    name: str
    collector: OutputCollector
    arrived_s: float
    sequences: list[Sequence] = field(default_factory=list)
    over: bool = False  # the collector has the last pieces


@final
class RequestTracker:
    """Tracks the requests of one LLM, and closes it. ``observe`` gets its usage after each step."""

    def __init__(self, llm: "LLM", observe: "Observer | None") -> None:
        self._llm, self._observe = llm, observe
        self._thread = EngineThread(self._step, self._end)
        self._lock = threading.Lock()  # of the requests
        self._requests: dict[str, RequestState] = {}
        self._names = map(str, count(1))
        # The collectors with new pieces, by event loop. Only the engine's thread uses it.
        self._filled: dict[AbstractEventLoop, set[OutputCollector]] = {}

    def open(self, name: str | None) -> RequestState:
        """Track a request for a reader in the running event loop.

        Raises: RequestError if the name is in use; or why the engine has ended.
        """
        self._thread.refuse_if_over()
        with self._lock:
            if name is None:
                name = next(own for own in self._names if own not in self._requests)
            elif name in self._requests:
                raise RequestError(f"request_id {name!r} is in use: give each request its own")
            state = self._requests[name] = RequestState(name, OutputCollector(), self._llm.now_s())
        return state

    def start(self, state: RequestState, request: Request) -> None:
        """Queue a request for the next step. Raises: RequestError after ``close``."""
        self._thread.post(partial(self._start, state, request))

    def leave(self, state: RequestState) -> None:
        """Forget a request whose reader has left, and end it before the next step."""
        with self._lock:
            self._requests.pop(state.name, None)
        if not state.over:
            with suppress(Exception):  # the engine may have ended
                self._thread.post(partial(self._abort, [state], "its reader has left"))

    def abort(self, names: Iterable[str] | None) -> "Future[None]":
        """End these requests, or all, before the next step, and tell their readers."""
        with self._lock:
            several = list(self._requests) if names is None else names
            states = [self._requests[name] for name in several if name in self._requests]
        return self._thread.call(partial(self._abort, states, "aborted"), fatal=True)

    def call(self, function: Callable[[], T], *, fatal: bool | None = None) -> "Future[T]":
        """Call a function of the LLM between two steps. ``fatal`` is that of ``EngineThread``."""
        return self._thread.call(function, fatal=fatal)

    @property
    def failure(self) -> Exception | None:
        """Why no request runs any more; None while requests can run."""
        return self._thread.reason if self._thread.is_over else None

    def inspect(self, function: "Callable[[LLM, list[Sequence]], T]") -> "Future[T]":
        """Call a function of the LLM and its unfinished sequences between two steps."""
        return self._thread.call(lambda: function(self._llm, self._unfinished()))

    def close(self) -> None:
        """End what still runs, tell the readers, and close the LLM."""
        self._thread.close()

    # -- in the engine's thread ------------------------------------------------------------------

    def _step(self) -> bool:
        more = self._llm.step()
        if not more:  # free what the last ones held: the next step may be far
            self._llm.abandon(())
        self._ring()
        if self._observe is not None:
            self._observe(self._llm.usage())
        return more

    def _start(self, state: RequestState, request: Request) -> None:
        try:
            state.sequences = self._llm.start(
                request, partial(self._put, state), arrived_s=state.arrived_s
            )
        except RequestError as error:
            self._fail(state, error)
            self._ring()
            return
        if state.over:  # aborted before it began
            self._abort([state], "aborted")

    def _abort(self, states: list[RequestState], detail: str) -> None:
        running = [
            (state, sequence)
            for state in states
            for sequence in state.sequences
            if sequence.finish_reason is None
        ]
        self._llm.abandon([sequence for _, sequence in running])
        for state, sequence in running:
            if sequence.request.beam is not None:  # the search has told its reader
                continue
            delta = TextDelta(
                index=0,
                choice=sequence.index,
                text="",
                token_ids=(),
                finish_reason="abort",
                detail=detail,
                num_cached_tokens=sequence.num_cached_tokens,
                num_retained_tokens=sequence.num_retained_tokens,
                latencies=Latencies.of(sequence),
            )
            with suppress(Exception):  # ``_put`` tells the reader
                self._put(state, delta)
        for state in states:
            state.over = True
        self._ring()

    def _unfinished(self) -> list[Sequence]:
        """Return the unfinished sequences in the order of arrival."""
        with self._lock:
            states = list(self._requests.values())
        several = (s for state in states for s in state.sequences if s.finish_reason is None)
        return sorted(several, key=lambda sequence: sequence.seq_id)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            states = list(self._requests.values())
        if error is None:
            self._abort(states, "the LLM was closed")
            self._llm.close()
        else:
            log.error("the engine has failed, and all its requests fail", exc_info=error)
            for state in states:
                self._fail(state, self._thread.reason)
            self._ring()
            self._llm.fail(str(self._thread.reason))

    def _put(self, state: RequestState, delta: TextDelta) -> None:
        """Put a piece in. Raises: an error of the collector, which its reader gets too."""
        if self._llm.has_failed:  # all readers get the error that the step raises next
            return
        try:
            state.collector.put(delta)
        except Exception as error:
            state.collector.fail(error)
            raise
        finally:
            self._fill(state)

    def _fill(self, state: RequestState) -> None:
        self._filled.setdefault(state.collector.loop, set()).add(state.collector)

    def _fail(self, state: RequestState, error: Exception) -> None:
        state.over = True
        state.collector.fail(error)
        self._fill(state)

    def _ring(self) -> None:
        """Wake the readers of new pieces."""
        filled, self._filled = self._filled, {}
        for loop, collectors in filled.items():
            try:
                loop.call_soon_threadsafe(OutputCollector.ring, collectors)
            except RuntimeError:  # the loop is closed
                for state in self._requests_of(loop):
                    self.leave(state)

    def _requests_of(self, loop: AbstractEventLoop) -> list[RequestState]:
        with self._lock:
            return [each for each in self._requests.values() if each.collector.loop is loop]
