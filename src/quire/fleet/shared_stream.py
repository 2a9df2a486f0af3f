"""Many answers as one stream, from a replica to a door.

What a step of the replica's engine has generated for a door travels as one message, so that a
token does not cost one. ``Outbox`` runs a door's requests beside the engine and gathers their
pieces; ``Inbox`` gives each reader in the door its own. A piece waits for no other one: what is
there is sent. While the door is behind, nothing is sent, and pieces wait at the engine, where those
of a continuation become one.

How messages travel is left to a ``RemoteOutbox``. What is sent can be pickled.
"""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import fields
from operator import attrgetter
from typing import Final, Protocol, TypeAlias, final

from quire.engine.outputs import TextDelta
from quire.engine.request_tracker import OutputCollector
from quire.engine.sequence import Request
from quire.errors import QuireError, one_line
from quire.fleet.replica import ReplicaHandle, ReplicaLost, ReplicaRefused, to_send

# A piece of nothing but tokens, as it travels: a TextDelta takes 20 times as long to be pickled.
Plain: TypeAlias = tuple[str, tuple[int, ...], int, int, int]

# What has come of which request: a piece, what it ended with, or None where all has been said.
Said: TypeAlias = TextDelta | Plain | QuireError | None
Message: TypeAlias = list[tuple[str, Said]]

_MOST_UNREAD: Final = 32  # messages that a door has not told to have read
_TOLD_AT: Final = 16  # read messages are told of so many at once


_PLAIN = ("text", "token_ids", "choice", "num_cached_tokens", "num_retained_tokens")
# The end comes first: a piece that is not plain mostly has one, and arrays are not compared then.
_OTHERS = sorted({each.name for each in fields(TextDelta)} - {*_PLAIN}, key="finish_reason".__ne__)
_NO_TEXT = TextDelta(index=0, text="", token_ids=(), finish_reason=None)
_plain_of, _others_of = attrgetter(*_PLAIN), attrgetter(*_OTHERS)
_NO_OTHERS = _others_of(_NO_TEXT)


def packed(delta: TextDelta) -> TextDelta | Plain:
    """Return a piece as it travels: its tokens, where it has nothing else."""
    plain: Plain = _plain_of(delta)
    return plain if _others_of(delta) == _NO_OTHERS else delta


def unpacked(plain: Plain) -> TextDelta:
    """Return a piece of nothing but tokens as it was."""
    text, token_ids, choice, num_cached_tokens, num_retained_tokens = plain
    return TextDelta(
        index=0,
        choice=choice,
        text=text,
        token_ids=token_ids,
        finish_reason=None,
        num_cached_tokens=num_cached_tokens,
        num_retained_tokens=num_retained_tokens,
    )


class RemoteOutbox(Protocol):
    """A replica's ``Outbox``, as its door reaches it."""

    async def read(self, take: Callable[[Message], None]) -> None:
        """Call ``take`` with each message, an empty one first, until the replica says no more.

        Leaving it before ends all requests there. Raises: ReplicaLost.
        """
        ...

    def begin(self, request: Request, request_id: str) -> None:
        """Have a request run there, once the first message has come.

        Raises: RequestError for one that is too large to be sent.
        """
        ...

    def leave(self, request_id: str) -> None:
        """End a request whose reader has gone."""
        ...

    def note_read(self, count: int) -> None:
        """Tell that so many more messages have been read."""
        ...


# -- at the replica --------------------------------------------------------------------------------


@final
class Outbox:
    """The requests of one door at a replica, and what is to be said of them."""

    def __init__(self, replica: ReplicaHandle) -> None:
        self._replica = replica
        self._running: dict[str, asyncio.Task[None]] = {}
        self._said: Message = []
        self._filled, self._has_room = asyncio.Event(), asyncio.Event()
        self._num_unread = 0
        self._is_closed = False

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Yield what is said, an empty message first, until ``close``.

        Leaving it before ends all requests.
        """
        self._has_room.set()
        self._filled.set()  # the first message says that it is open
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                said, self._said = self._said, []
                if self._is_closed and not said and not self._running:
                    return
                self._num_unread += 1
                if self._num_unread >= _MOST_UNREAD and not self._is_closed:
                    self._has_room.clear()
                yield said
        finally:
            self.end()

    def begin(self, request: Request, request_id: str) -> None:
        """Run a request. Once it is closed, say that it is refused."""
        if self._is_closed:
            name = self._replica.name
            refused = ReplicaRefused(f"replica {name} answers this door no longer")
            self._said.append((request_id, refused))
            self._filled.set()
            return
        run = self._run(request, request_id)
        self._running[request_id] = asyncio.create_task(run, name="quire-request")

    def leave(self, request_id: str) -> None:
        """End a request whose reader has gone."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    def note_read(self, count: int) -> None:
        """Note that the door has read so many more messages."""
        self._num_unread = max(0, self._num_unread - count)
        if self._num_unread < _MOST_UNREAD:
            self._has_room.set()

    async def close(self) -> None:
        """End ``messages`` once all requests have ended and all is said."""
        self._is_closed = True
        self._has_room.set()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._filled.set()

    def end(self) -> None:
        """End all requests: there is no door any more."""
        self._is_closed = True
        for task in self._running.values():
            task.cancel()

    async def _run(self, request: Request, request_id: str) -> None:
        try:
            end: QuireError | None = None
            try:
                pieces = self._replica.generate(request, request_id=request_id)
                async with aclosing(pieces):
                    async for delta in pieces:
                        await self._say(request_id, packed(delta))
            except Exception as error:
                end = self._as_sent(error)
            await self._say(request_id, end)
        finally:
            self._running.pop(request_id, None)

    async def _say(self, request_id: str, said: Said) -> None:
        await self._has_room.wait()  # which does not suspend while there is room
        self._said.append((request_id, said))
        self._filled.set()

    def _as_sent(self, error: Exception) -> QuireError:
        """Return an error that a door can read."""
        if isinstance(error, QuireError):
            with suppress(Exception):
                pickle.loads(pickle.dumps(error))
                return error
        return ReplicaLost(f"replica {self._replica.name} has failed: {one_line(error)}")


# -- at the door -----------------------------------------------------------------------------------


class _Over(Exception):
    """All pieces of a request have come."""


@final
class _Reader:
    def __init__(self) -> None:
        self.collector = OutputCollector()
        self.is_over = False  # at the replica

    def end(self, error: Exception) -> None:
        """Let its reader have what has come, and then this."""
        if not self.is_over:
            self.is_over = True
            self.collector.fail(error)


@final
class Inbox:
    """One replica's answers to this door's requests, for their readers. It belongs to a loop.

    A slow reader finds its unread pieces as one, so what waits here is bounded by the answers.
    """

    def __init__(self, name: str, remote: RemoteOutbox) -> None:
        self._name, self._remote = name, remote
        self._readers: dict[str, _Reader] = {}
        self._num_read = 0  # messages that the replica has not been told of
        self._lost: Exception | None = None
        self._opened = asyncio.Event()
        self._reading = asyncio.create_task(self._read(), name="quire-inbox")

    async def generate(
        self, request: Request, *, request_id: str
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt at the replica, as ``ReplicaHandle.generate`` does."""
        await self.opened()
        self._remote.begin(to_send(request), request_id)
        reader = self._readers[request_id] = _Reader()
        try:
            while True:
                for delta in await reader.collector.take():
                    yield delta
        except _Over:
            return
        finally:
            del self._readers[request_id]
            if not reader.is_over:
                self._remote.leave(request_id)

    async def opened(self) -> None:
        """Wait until the replica can be asked. Raises: why it cannot be."""
        await self._opened.wait()
        if self._lost is not None:
            raise self._lost

    @property
    def lost(self) -> Exception | None:
        """Why nothing is read any more; None while it is."""
        return self._lost

    async def close(self) -> None:
        """Read no longer, which ends at the replica what still runs."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._fail(ReplicaLost(f"replica {self._name} is not asked any more"))

    async def _read(self) -> None:
        """Read until the replica says no more."""
        error: Exception = ReplicaLost(f"replica {self._name} says no more")
        try:
            await self._remote.read(self._take)
        except Exception as raised:
            error = raised
        self._fail(error)

    def _take(self, message: Message) -> None:
        self._opened.set()
        filled = []
        for request_id, said in message:
            reader = self._readers.get(request_id)
            if reader is None:  # it has left
                continue
            if isinstance(said, tuple):
                reader.collector.put(unpacked(said))
            elif isinstance(said, TextDelta):
                reader.collector.put(said)
            else:
                reader.end(_Over() if said is None else said)
            filled.append(reader.collector)
        OutputCollector.ring(filled)
        self._num_read += 1
        if self._num_read == _TOLD_AT:
            self._remote.note_read(self._num_read)
            self._num_read = 0

    def _fail(self, error: Exception) -> None:
        self._lost = self._lost or error
        self._opened.set()
        for reader in self._readers.values():
            reader.end(error)
        OutputCollector.ring([each.collector for each in self._readers.values()])
