"""``EventPublisher``: tells routers which blocks an engine's prefix cache has, over ZeroMQ.

The thread that steps puts what the cache has noted into a bounded queue, and goes on. A thread of
the publisher's own encodes it, sends it and answers who has missed a batch. Neither a subscriber
that hangs nor a full queue delays a step: the oldest batch goes, and the gap in the numbers tells
subscribers so.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from quire.config import KVEventsConfig
from quire.engine.event_format import KEY_BYTES, NO_MORE, SEQUENCE_BYTES, EventEncoder
from quire.errors import ConfigError
from quire.kv import Accounting
from quire.kv.interface import BlockEventSource
from quire.kv.prefix_index import AllBlocksCleared, BlockEvent

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

_LINGER_MS = 500  # that a message may wait for a slow subscriber once the publisher is closed
_CLOSE_S = 1.0  # in which the queue is emptied then
_JOIN_S = _CLOSE_S + 2 * _LINGER_MS / 1000
_SHORTEST_SECRET, _LONGEST_SECRET = 16, 4096  # bytes of a file with the key of names
_MAX_ASKED_BYTES = 64  # of a frame that asks for a replay; its number has 8


class AccountedCache(Protocol):
    """A cache whose accounting is replaced where the cache begins anew."""

    @property
    def accounting(self) -> Accounting:
        """The one in use."""
        ...


@final
class EventPublisher:
    """Publishes the events of an engine's cache, as ``config`` says.

    ``open`` takes the addresses, ``start`` begins to publish. ``num_published`` and ``num_dropped``
    count batches, and any thread may read them.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._stream: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self.endpoint = config.endpoint  # of the stream, with the port that was taken for port 0
        self.replay_endpoint = config.replay_endpoint
        self._name_key: bytes | None = None
        self._encoder: EventEncoder | None = None
        self._thread: threading.Thread | None = None
        self._accounting: Accounting | None = None  # that events were taken from last …
        self._source: BlockEventSource | None = None  # … and what notes them in it
        # What both threads use.
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, float, list[BlockEvent]]] = deque()
        self._next_number = 0
        self._wake: int | None = None  # an eventfd: something waits, or the publisher is closed
        self._is_closed = False
        self.num_dropped = 0
        # The publisher's thread alone.
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self.num_published = 0

    @classmethod
    def of(cls, config: KVEventsConfig | None) -> "EventPublisher | None":
        """Open a publisher, or None where the options want none. Raises: as ``open``."""
        if config is None or not config.publishes:
            return None
        publisher = cls(config)
        publisher.open()
        return publisher

    def open(self) -> None:
        """Take the addresses, before a model is loaded in vain.

        Raises: ConfigError for an address that cannot be taken, for a key that cannot be read, and
        without the package pyzmq.
        """
        try:
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"kv_events_config: events are published with pyzmq ({error}): "
                "pip install 'quire-kv[events]'"
            ) from error
        config = self._config
        key = config.name_key
        self._name_key = read_name_key(key) if isinstance(key, str) else key
        self._context = zmq.Context()
        self._context.linger = _LINGER_MS  # of each socket: it bounds the end of the process too
        try:
            self._stream = self._context.socket(zmq.PUB)
            self._stream.set_hwm(config.hwm)
            self.endpoint = _attach(self._stream, "endpoint", config.endpoint, binds=config.binds)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # A reader's unread messages count until half of them are read: one whole replay
                # always has room.
                self._replay.sndhwm = 2 * (config.buffer_steps + 1)
                self._replay.maxmsgsize = _MAX_ASKED_BYTES
                self.replay_endpoint = _attach(
                    self._replay, "replay_endpoint", config.replay_endpoint, binds=True
                )
        except BaseException:
            self.close()
            raise

    def start(self, accounting: Accounting, block_size: int) -> None:
        """Start the thread, for a cache with blocks of ``block_size`` tokens.

        Raises: ConfigError where the cache notes no events.
        """
        self._accounting, self._source = accounting, _source(accounting)
        self._encoder = EventEncoder(accounting.groups, block_size, key=self._name_key)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(self._wake,), name="quire-events", daemon=True
        )
        self._thread.start()
        log.info(
            "KV-cache events are published at %s; %s",
            self.endpoint,
            f"missed ones can be asked for at {self.replay_endpoint}"
            if self.replay_endpoint
            else "missed ones cannot be asked for (replay_endpoint)",
        )
        if self._config.open_endpoints:
            log.warning(
                "kv_events_config: %s can be reached from other machines, and asks for no key: "
                "whoever connects learns the token ids of every prompt. Keep it in a private "
                "network, or use tcp://127.0.0.1",
                " and ".join(self._config.open_endpoints),
            )

    def take_from(self, cache: AccountedCache, of_tiers: Iterable[BlockEvent] = ()) -> None:
        """Queue what a cache has noted since the last call, between two steps, and what tiers have.

        Another accounting than the last call's began with an empty cache.
        """
        begun = cache.accounting is not self._accounting
        if begun:
            self._accounting, self._source = cache.accounting, _source(cache.accounting)
        assert self._source is not None, "start() comes first"
        events = [*of_tiers, *self._source.take_events()]
        if begun:
            events.insert(0, AllBlocksCleared())
        if not events:
            return
        with self._lock:
            if self._wake is None or self._is_closed:
                return
            if len(self._waiting) >= self._config.max_queue_size:
                self._waiting.popleft()
                self.num_dropped += 1
                is_first = self.num_dropped == 1
            else:
                is_first = False
            if not self._waiting:
                os.eventfd_write(self._wake, 1)
            self._waiting.append((self._next_number, time.time(), events))
            self._next_number += 1
        if is_first:
            log.warning(
                "KV-cache events come faster than they can be sent: the oldest of %d batches are "
                "dropped (max_queue_size), and subscribers see a gap. Later drops are counted only",
                self._config.max_queue_size,
            )

    def close(self) -> None:
        """Send what waits, for a moment, and give the addresses back. A second call does nothing.

        It takes two seconds at most, whatever subscribers do.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)
        if self._thread is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                log.warning("the publisher of KV-cache events has not ended in %g s", _JOIN_S)

    # -- the publisher's thread ------------------------------------------------------------------

    def _run(self, wake: int) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        more = False
        try:
            while not self._is_closed:
                ready = dict(poller.poll(0 if more else None))
                if wake in ready:
                    os.eventfd_read(wake)
                if self._replay in ready:
                    self._answer()
                more = self._send_next()
            until_s = time.monotonic() + _CLOSE_S
            while time.monotonic() < until_s and self._send_next():
                pass
        except Exception:
            log.exception("KV-cache events are published no longer")
        finally:
            self._end()

    def _send_next(self) -> bool:
        """Send the batch that has waited longest. Return False if none waits."""
        with self._lock:
            if not self._waiting:
                return False
            number, at_s, events = self._waiting.popleft()
        assert self._encoder is not None
        assert self._stream is not None
        sequence = number.to_bytes(SEQUENCE_BYTES, "big")
        payload = self._encoder.encode(at_s, events)
        # Without waiting: what a subscriber does not read is dropped beyond its high-water mark.
        self._stream.send_multipart((self._topic, sequence, payload))
        self._sent.append((sequence, payload))
        self.num_published += 1
        return True

    def _answer(self) -> None:
        """Send a subscriber the batches from a number on that are still kept, and the end mark.

        What is no such question is ignored.
        """
        assert self._replay is not None
        match self._replay.recv_multipart():
            case [reader, b"", first] if len(first) == SEQUENCE_BYTES:
                for sequence, payload in self._sent:
                    if sequence >= first:  # big-endian numbers have their bytes' order
                        self._replay.send_multipart((reader, b"", self._topic, sequence, payload))
                self._replay.send_multipart((reader, b"", b"", NO_MORE, b""))
            case frames:
                log.debug("no question for a replay: %d frames", len(frames))

    def _end(self) -> None:
        with self._lock:
            self._is_closed = True
            wake, self._wake = self._wake, None
            if wake is not None:
                os.close(wake)
        if self._context is not None:
            self._context.destroy(linger=_LINGER_MS)


def read_name_key(path: str, option: str = "kv_events_config: name_key") -> bytes:
    """Read the key of names from a file with a secret, which ``option`` names. Raises: ConfigError.

    A fleet's directory takes the same key.
    """
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_LONGEST_SECRET + 1)
    except OSError as error:
        raise ConfigError(f"{option}={path!r} cannot be read: {error.strerror}") from None
    if not _SHORTEST_SECRET <= len(secret) <= _LONGEST_SECRET:
        raise ConfigError(
            f"{option}={path!r} has {min(len(secret), _LONGEST_SECRET + 1):,} bytes; a secret has "
            f"{_SHORTEST_SECRET} to {_LONGEST_SECRET:,}"
        )
    return blake2b(secret, digest_size=KEY_BYTES, person=b"quire names").digest()


def _source(accounting: Accounting) -> BlockEventSource:
    """Return what notes events in an accounting. Raises: ConfigError where nothing does."""
    if isinstance(accounting, BlockEventSource):
        return accounting
    raise ConfigError(
        "kv_events_config: this cache keeps no blocks that could be announced: use cache=paged, or "
        "cache=virtual with enable_prefix_caching where the memory can share pages"
    )


def _attach(socket: "zmq.Socket[Any]", name: str, endpoint: str, *, binds: bool) -> str:
    """Bind or connect a socket. Returns: the address, with its port. Raises: ConfigError."""
    import zmq

    socket.ipv6 = "[" in endpoint
    address = endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:")
    try:
        if not binds:
            socket.connect(address)
            return endpoint
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events_config: {name}={endpoint!r} cannot be {'bound' if binds else 'used'}: "
            f"{error.strerror}"
        ) from error
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
