"""Pieces of text on their way from the thread that steps to their readers in an event loop.

A reader who is behind finds what has come meanwhile as one piece for each continuation, so what
waits is bounded, and the thread that steps never does.
"""

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from typing import final

from quire.engine.outputs import TextDelta
from quire.engine.sequence import TokenLogprobs


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
class Mailbox:
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
    def ring(mailboxes: Iterable["Mailbox"]) -> None:
        """Wake the readers. Called in their event loop."""
        for mailbox in mailboxes:
            mailbox._rung.set()
