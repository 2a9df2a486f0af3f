"""Follow the KV-cache events of replicas, so that a ``PrefixDirectory`` has what their caches have.

``BatchOrder`` puts one replica's batches in order and says what is missing; it knows no sockets.
``ZmqFollower`` has the sockets, for all replicas of a fleet, and one thread.

A replica numbers its batches from 0. One that is missing is asked for again. Where it cannot be
had, all that was known of the replica is forgotten: what is left out costs hits, and what is wrong
costs more. The same where numbers begin anew, since then the replica has.
"""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from quire.engine.event_format import NO_MORE, SEQUENCE_BYTES, WireEvent, decode_batch
from quire.errors import ConfigError
from quire.fleet.prefix_directory import PrefixDirectory
from quire.fleet.replica import EventEndpoints, ReplicaFacts

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

# -- the order of one replica's batches ------------------------------------------------------------

_MAX_HELD: Final = 4096  # batches that wait for missing ones before them
_MAX_HELD_BYTES: Final = 64 * 2**20


@final
class BatchOrder:
    """One replica's batches, each applied once and in order.

    ``apply`` takes the events of a batch, ``forget`` all that earlier ones have said. Batches come
    from two sides: live, in the order in which they were published though some may be missing, and
    replayed, from ``wanted`` on.
    """

    def __init__(
        self,
        apply: Callable[[list[WireEvent]], None],
        forget: Callable[[], None],
        *,
        can_ask: bool = True,
    ) -> None:
        """``can_ask``: missing batches can be asked for."""
        self.wanted: int | None = 0 if can_ask else None  # ask for batches from this number on
        self.num_gaps = 0  # that no replay has closed, and beginnings anew
        self.num_garbled = 0
        self._apply, self._forget, self._can_ask = apply, forget, can_ask
        self._next: int | None = 0 if can_ask else None  # None: whichever comes
        self._last_live = -1
        # What a replay has brought and the stream may bring again, unless the replica began anew.
        self._brought: dict[int, int] = {}  # hashes of batches, by number
        self._held: deque[tuple[int, bytes]] = deque()  # live ones behind a gap
        self._held_bytes = 0

    def live(self, number: int, payload: bytes) -> None:
        """Take a batch from the stream."""
        if number <= self._last_live or self._brought.get(number, hash(payload)) != hash(payload):
            self._begin_anew(0 if self._can_ask else number)
        self._last_live = number
        if self._next is None:
            self._next = number
        if number < self._next:
            return  # a replay has brought it
        self._brought.clear()
        if number > self._next or self._held:
            self._hold(number, payload)
        else:
            self._take(payload)

    def replayed(self, number: int, payload: bytes) -> None:
        """Take a batch that was asked for."""
        if self.wanted is None or self._next is None or number < self._next:
            return
        if number > self._next:
            self._give_up_until(number)  # the replay does not reach back so far
        if number > self._last_live:
            self._brought[number] = hash(payload)
        self._take(payload)

    def replay_ended(self) -> None:
        """Note that the replica has sent all that it still had, or does not answer."""
        if self.wanted is None:
            return
        self.wanted = None
        self._release()

    def _hold(self, number: int, payload: bytes) -> None:
        """Keep a batch behind a gap until the gap is closed, or cannot be."""
        self._held.append((number, payload))
        self._held_bytes += len(payload)
        if not self._can_ask or (len(self._held) > _MAX_HELD or self._held_bytes > _MAX_HELD_BYTES):
            self.wanted = None
            self._release()
        elif self.wanted is None:
            self.wanted = self._next

    def _release(self) -> None:
        """Take the batches that were held back; what is missing before them stays unknown."""
        held, self._held, self._held_bytes = self._held, deque(), 0
        for number, payload in held:
            assert self._next is not None, "a batch is held behind nothing"
            if number < self._next:
                continue
            if number > self._next:
                self._give_up_until(number)
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        assert self._next is not None, "a batch without a number"
        self._next += 1
        try:
            events = decode_batch(payload).events
        except msgspec.DecodeError:
            self.num_garbled += 1
            self._forget()  # what it said has happened, too
            return
        self._apply(events)

    def _give_up_until(self, number: int) -> None:
        """Forget what batches have said, since those before ``number`` cannot be had."""
        # Before the first one nothing was known, so there is nothing that could be wrong.
        if self._next:
            self.num_gaps += 1
            self._forget()
        self._next = number

    def _begin_anew(self, number: int) -> None:
        self.num_gaps += 1
        self._forget()
        self._brought.clear()
        self._held, self._held_bytes = deque(), 0
        self._next = number
        self.wanted = number if self._can_ask else None


# -- the sockets -----------------------------------------------------------------------------------

_MAX_BATCH_BYTES: Final = 64 * 2**20
_MAX_WAITING: Final = 100_000  # batches that wait to be read, of one replica
_ANSWER_S: Final = 5.0  # in which a replica must go on with a replay
_AT_ONCE: Final = 256  # batches of one socket, before the others have their turn
_JOIN_S: Final = 5.0
_BELL: Final = "inproc://bell"


@dataclass(slots=True, eq=False)
class _Followed:
    """A replica, and the sockets to it."""

    name: str
    order: BatchOrder
    stream: "zmq.Socket[bytes]"
    replay: "zmq.Socket[bytes] | None"
    asked: int | None = None  # from where on it was asked last, while the answer lasts
    answer_by_s: float = 0.0


@final
class ZmqFollower:
    """Follows replicas that publish over ZeroMQ, and tells a directory what they tell.

    The thread starts with the first replica. Any thread may call the methods.
    """

    def __init__(self, directory: PrefixDirectory) -> None:
        self._directory = directory
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._todo: SimpleQueue[tuple[str, EventEndpoints | None] | None] = SimpleQueue()
        self._bell: zmq.Socket[bytes] | None = None
        self._gaps = Counter[str]()
        # The thread's own.
        self._followed: dict[str, _Followed] = {}

    @property
    def num_gaps(self) -> Mapping[str, int]:
        """Return how many times what was known of a replica had to be forgotten, by replica."""
        return dict(self._gaps)

    def follow(self, replica: str, facts: ReplicaFacts) -> None:
        """Begin to follow a replica; what was known of it before is forgotten.

        One that publishes no events is placed by its load alone. Raises: ConfigError for blocks of
        another size than the directory's, for more replicas than it knows, and without pyzmq.
        """
        if facts.events is None:
            log.info("replica %s publishes no KV-cache events: it is chosen by its load", replica)
            return
        if facts.block_size != self._directory.block_size:
            raise ConfigError(
                f"replica {replica} has blocks of {facts.block_size} tokens, and the fleet looks "
                f"for prefixes in blocks of {self._directory.block_size}: give all one block_size"
            )
        self._directory.add(replica, facts.events.store)
        self._tell((replica, facts.events))

    def forget(self, replica: str) -> None:
        """Follow a replica no longer, and forget what it had."""
        if self._thread is None:
            self._directory.forget(replica)
        else:
            self._tell((replica, None))

    async def close(self) -> None:
        """Follow none any longer. A second call does nothing."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._tell(None)
            await asyncio.to_thread(thread.join, _JOIN_S)

    def _tell(self, what: tuple[str, EventEndpoints | None] | None) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"events of replicas are followed with pyzmq ({error}): "
                f"pip install 'quire-kv[events]'"
            ) from error
        with self._lock:
            if self._thread is None:
                self._context = zmq.Context()
                heard = self._context.socket(zmq.PAIR)
                heard.bind(_BELL)
                self._bell = self._context.socket(zmq.PAIR)
                self._bell.connect(_BELL)
                self._thread = threading.Thread(
                    target=self._run, args=(heard,), name="quire-follower", daemon=True
                )
                self._thread.start()
            assert self._bell is not None
            self._todo.put(what)
            if self._thread.is_alive():
                self._bell.send(b"")

    # -- the thread ------------------------------------------------------------------------------

    def _run(self, heard: "zmq.Socket[bytes]") -> None:
        import zmq

        assert self._context is not None
        poller = zmq.Poller()
        poller.register(heard, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._timeout_ms()))
                if heard in ready:
                    heard.recv()
                    what = self._todo.get()
                    if what is None:
                        return
                    self._change(poller, *what)
                for each in list(self._followed.values()):
                    try:
                        self._read(each, ready)
                        self._ask(each)
                    except zmq.ZMQError as error:
                        log.warning("events of replica %s: %s", each.name, error)
        except Exception:
            log.exception("events of replicas are followed no longer; requests go by load alone")
            for name in self._followed:
                self._directory.forget(name)
        finally:
            self._context.destroy(linger=0)

    def _timeout_ms(self) -> int | None:
        """Return how long to wait for news until a replay is given up; None: without end."""
        due = [each.answer_by_s for each in self._followed.values() if each.asked is not None]
        return max(0, int(1000 * (min(due) - monotonic())) + 1) if due else None

    def _change(self, poller: "zmq.Poller", name: str, endpoints: EventEndpoints | None) -> None:
        import zmq

        assert self._context is not None
        old = self._followed.pop(name, None)
        if old is not None:
            for socket in filter(None, (old.stream, old.replay)):
                poller.unregister(socket)
                socket.close(linger=0)
        self._directory.forget(name)
        if endpoints is None:
            self._gaps.pop(name, None)
            return
        self._directory.add(name, endpoints.store)
        stream = self._socket(zmq.SUB)
        stream.subscribe(endpoints.topic.encode())
        stream.connect(endpoints.endpoint)
        poller.register(stream, zmq.POLLIN)
        replay = None
        if endpoints.replay_endpoint is not None:
            replay = self._socket(zmq.DEALER)
            replay.connect(endpoints.replay_endpoint)
            poller.register(replay, zmq.POLLIN)
        order = BatchOrder(
            lambda events: self._directory.apply(name, events),
            lambda: self._directory.clear(name),
            can_ask=replay is not None,
        )
        self._followed[name] = _Followed(name, order, stream, replay)

    def _socket(self, kind: int) -> "zmq.Socket[Any]":
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.maxmsgsize = _MAX_BATCH_BYTES
        socket.rcvhwm = _MAX_WAITING
        socket.ipv6 = True
        return socket

    def _read(self, each: _Followed, ready: Mapping[Any, int]) -> None:
        import zmq

        # Replays first: they are older than what the stream brings.
        if each.replay is not None and each.replay in ready:
            for _ in range(_AT_ONCE):
                try:
                    frames = each.replay.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                each.answer_by_s = monotonic() + _ANSWER_S
                match frames:
                    case [b"", _, number, payload] if number == NO_MORE:
                        each.asked = None
                        each.order.replay_ended()
                    case [b"", _, number, payload] if len(number) == SEQUENCE_BYTES:
                        each.order.replayed(int.from_bytes(number, "big"), payload)
        if each.stream in ready:
            for _ in range(_AT_ONCE):
                try:
                    frames = each.stream.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                match frames:
                    case [_, number, payload] if len(number) == SEQUENCE_BYTES:
                        each.order.live(int.from_bytes(number, "big"), payload)
        if each.order.num_gaps != self._gaps[each.name]:
            self._gaps[each.name] = each.order.num_gaps

    def _ask(self, each: _Followed) -> None:
        """Ask for what is missing, unless that was asked already; give up what does not come."""
        import zmq

        wanted, order = each.order.wanted, each.order
        if each.asked is not None and monotonic() > each.answer_by_s:
            log.warning("replica %s does not answer for missed events", each.name)
            each.asked = None
            order.replay_ended()
        elif wanted is not None and each.asked is None and each.replay is not None:
            try:
                each.replay.send_multipart(
                    (b"", wanted.to_bytes(SEQUENCE_BYTES, "big")), zmq.NOBLOCK
                )
            except zmq.Again:
                order.replay_ended()
                return
            each.asked, each.answer_by_s = wanted, monotonic() + _ANSWER_S
