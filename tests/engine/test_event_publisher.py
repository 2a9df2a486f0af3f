"""Events over ZeroMQ: numbered, replayed where some were missed, and never in a step's way."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine.test_event_format import chain
from engine.test_llm import GREEDY, model_of, prompts, small
from engine.test_offloading import kind, made, offload, texts
from kv.caches import FULL, SIZE, Cache, span
from ports import held_port
from quire import LLM
from quire.config import KVEventsConfig
from quire.engine.event_format import (
    NO_MORE,
    ClearedBlocks,
    EventBatch,
    EventEncoder,
    RemovedBlocks,
    StoredBlocks,
    decode_batch,
)
from quire.engine.event_publisher import EventPublisher
from quire.errors import ConfigError
from quire.fleet.replica import facts_of
from quire.kv import PrefixKeys
from quire.tiers.host_memory import HostMemoryTier

zmq = pytest.importorskip("zmq")

ANY_PORT = "tcp://127.0.0.1:0"
HERE: dict[str, Any] = dict(
    enable_kv_cache_events=True, endpoint=ANY_PORT, replay_endpoint=ANY_PORT
)
PATIENCE_MS = 10_000


class World:
    """A cache whose events are published, and a context for those who read them."""

    def __init__(self, **options: Any) -> None:
        self.cache = Cache(FULL, num_blocks=64, keep_events=True)
        self.kv = SimpleNamespace(accounting=self.cache.blocks)
        self.publisher = EventPublisher(KVEventsConfig(**{**HERE, **options}))
        self.publisher.open()
        self.publisher.start(self.cache.blocks, SIZE)
        self.context = zmq.Context()
        self.sockets: list[Any] = []
        self.next_id = 0

    def note(self) -> None:
        """One new block is found; it is announced."""
        at = self.next_id * 2 * SIZE
        self.cache.start(self.next_id, span(at, at + SIZE))
        self.cache.free(self.next_id)
        self.next_id += 1
        self.publisher.take_from(self.kv)

    def subscriber(self, *, topic: bytes = b"", **options: int) -> Any:
        """A socket that has been heard of: an event comes through."""
        found = self.socket(zmq.SUB, **options)
        found.connect(self.publisher.endpoint)
        found.subscribe(topic)
        return found

    def heard(self, subscriber: Any) -> int:
        """Announce until a batch comes through; its number."""
        until_s = time.monotonic() + PATIENCE_MS / 1000
        while time.monotonic() < until_s:
            self.note()
            if subscriber.poll(50):
                return read(subscriber)[1]
        raise AssertionError("no batch came")

    def asker(self) -> Any:
        found = self.socket(zmq.DEALER)
        found.connect(self.publisher.replay_endpoint)
        return found

    def socket(self, kind: int, **options: int) -> Any:
        """It is closed with the others."""
        found = self.context.socket(kind)
        for name, value in {"rcvtimeo": PATIENCE_MS, **options}.items():
            setattr(found, name, value)
        self.sockets.append(found)
        return found


@contextmanager
def world(**options: Any) -> Iterator[World]:
    own = World(**options)
    try:
        yield own
    finally:
        own.publisher.close()
        own.context.destroy(linger=0)


def read(subscriber: Any) -> tuple[bytes, int, EventBatch]:
    topic, number, payload = subscriber.recv_multipart()
    return topic, int.from_bytes(number, "big"), decode_batch(payload)


def replay(asker: Any, first: int) -> dict[int, EventBatch]:
    asker.send_multipart((b"", first.to_bytes(8, "big")))
    found: dict[int, EventBatch] = {}
    while True:
        empty, _, number, payload = asker.recv_multipart()
        assert empty == b""
        if number == NO_MORE:
            return found
        found[int.from_bytes(number, "big")] = decode_batch(payload)


def wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_MS / 1000
    while not holds():
        assert time.monotonic() < until_s, "it does not come true"
        time.sleep(0.005)


def test_batches_are_numbered_and_in_order() -> None:
    with world(topic="kv@pod@demo") as own:
        subscriber = own.subscriber(topic=b"kv@")
        at = own.heard(subscriber)
        last = own.next_id - 1
        for number in range(at + 1, last + 1):
            assert read(subscriber)[1] == number
        own.note()
        topic, number, batch = read(subscriber)
        assert (topic, number) == (b"kv@pod@demo", last + 1)
        assert abs(batch.ts - time.time()) < PATIENCE_MS / 1000
        (stored,) = batch.events
        assert isinstance(stored, StoredBlocks)
        assert stored.token_ids == span(2 * SIZE * number, 2 * SIZE * number + SIZE)


def test_nothing_new_is_no_batch() -> None:
    with world() as own:
        own.publisher.take_from(own.kv)
        own.note()
        own.publisher.take_from(own.kv)
        wait_until(lambda: own.publisher.num_published == 1)


def test_a_replay_fills_a_gap() -> None:
    with world() as own:
        for _ in range(5):
            own.note()
        wait_until(lambda: own.publisher.num_published == 5)
        subscriber, asker = own.subscriber(), own.asker()
        first = own.heard(subscriber)
        assert first >= 5
        missed = replay(asker, 0)
        assert [*missed][: first + 1] == [*range(first + 1)]
        for number, batch in missed.items():
            (stored,) = batch.events
            assert isinstance(stored, StoredBlocks)
            assert stored.token_ids[0] == 2 * SIZE * number
        assert [*replay(asker, 3)] == [*missed][3:]
        assert replay(asker, 10**6) == {}


def test_a_replay_has_no_more_than_is_kept() -> None:
    with world(buffer_steps=3) as own:
        for _ in range(9):
            own.note()
        wait_until(lambda: own.publisher.num_published == 9)
        assert [*replay(own.asker(), 0)] == [6, 7, 8]


def test_what_is_no_question_is_ignored() -> None:
    with world() as own:
        own.note()
        wait_until(lambda: own.publisher.num_published == 1)
        asker = own.asker()
        for frames in ((b"",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), bytes(8))):
            asker.send_multipart(frames)
        large = own.asker()
        large.send_multipart((b"", bytes(10**6)))
        assert [*replay(asker, 0)] == [0]


def test_a_subscriber_that_hangs_slows_nothing() -> None:
    """It misses batches beyond the high-water mark; who reads gets all, and the end is bounded."""
    number, blocks = 1000, chain(400)  # 8 MB: more than a socket's own buffers take
    with world(hwm=2) as own:
        hangs = own.subscriber(rcvhwm=1, rcvbuf=4096)
        first = own.heard(hangs)
        loud = SimpleNamespace(take_events=lambda: [*blocks])
        begun_s = time.monotonic()
        for _ in range(number):
            own.publisher.take_from(SimpleNamespace(accounting=loud))
        all_of_them = own.next_id + number
        wait_until(lambda: own.publisher.num_published == all_of_them)
        assert own.publisher.num_dropped == 0
        assert len(replay(own.asker(), all_of_them - 100)) == 100
        own.publisher.close()
        assert time.monotonic() - begun_s < PATIENCE_MS / 1000
        heard = [first]
        while hangs.poll(200):
            heard.append(read(hangs)[1])
        assert heard == sorted(heard)
        assert len(heard) < all_of_them - first, "it did not hang"


def test_a_full_queue_loses_its_oldest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No step waits for it; the numbers tell who reads that something is missing."""
    may_go, encode = threading.Event(), EventEncoder.encode

    def slow(*given: Any) -> bytes:
        assert may_go.wait(PATIENCE_MS / 1000)
        return encode(*given)

    monkeypatch.setattr(EventEncoder, "encode", slow)
    with world(max_queue_size=3) as own, caplog.at_level(logging.WARNING):
        own.note()
        wait_until(lambda: not own.publisher._waiting)  # the thread has it, and waits
        for _ in range(8):
            own.note()
        may_go.set()
        wait_until(lambda: own.publisher.num_published == 4)
        assert own.publisher.num_dropped == 5
        assert [*replay(own.asker(), 0)] == [0, 6, 7, 8]
    assert len([each for each in caplog.records if "max_queue_size" in each.message]) == 1


def test_another_accounting_begins_with_nothing() -> None:
    with world() as own:
        own.note()
        other = Cache(FULL, num_blocks=9, keep_events=True)
        other.start(0, span(0, SIZE))
        own.kv.accounting = other.blocks
        own.publisher.take_from(own.kv)
        wait_until(lambda: own.publisher.num_published == 2)
        cleared, stored = replay(own.asker(), 1)[1].events
        assert isinstance(cleared, ClearedBlocks)
        assert isinstance(stored, StoredBlocks)


def test_closing_sends_what_waits_and_takes_no_more() -> None:
    with world() as own:
        subscriber = own.subscriber()
        own.heard(subscriber)
        for _ in range(20):
            own.note()
        own.publisher.close()
        own.publisher.close()
        own.note()
        assert own.publisher.num_published == own.next_id - 1
        while read(subscriber)[1] < own.next_id - 2:
            pass
        assert not any(thread.name == "quire-events" for thread in threading.enumerate())


def test_a_publisher_that_is_never_started_closes() -> None:
    publisher = EventPublisher(KVEventsConfig(**HERE))
    publisher.close()
    publisher = EventPublisher(KVEventsConfig(**HERE))
    publisher.open()
    assert publisher.endpoint != publisher.replay_endpoint != ANY_PORT
    publisher.close()


def test_an_address_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for name in ("endpoint", "replay_endpoint"):
            publisher = EventPublisher(KVEventsConfig(**{**HERE, name: address}))
            with pytest.raises(
                ConfigError, match=f"{name}='{address}' cannot be bound: Address already in use"
            ):
                publisher.open()


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-kv\[events\]'"):
        EventPublisher(KVEventsConfig(**HERE)).open()


def test_a_socket_in_a_folder(tmp_path: Any) -> None:
    with world(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/r") as own:
        assert own.heard(own.subscriber()) >= 0
        assert 0 in replay(own.asker(), 0)


def test_other_machines_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        with world():
            pass
        assert "asks for no key" not in caplog.text
        with world(endpoint="tcp://there.invalid:5557", replay_endpoint=None) as own:
            own.note()  # nothing is there; nothing waits for it
            wait_until(lambda: own.publisher.num_published == 1)
    assert "tcp://there.invalid:5557 can be reached from other machines" in caplog.text
    assert "missed ones cannot be asked for" in caplog.text


# -- an engine's -----------------------------------------------------------------------------------


class Mirror:
    """What a router knows of one engine: nothing but its messages."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int, ...]] = {}  # of all before a block, and its own
        self.number = 0

    def read(self, llm: LLM) -> None:
        assert llm.kv_events is not None
        wait_until(lambda: llm.kv_events.num_published == llm.kv_events._next_number)
        context = zmq.Context()
        asker = context.socket(zmq.DEALER)
        asker.rcvtimeo = PATIENCE_MS
        asker.connect(llm.kv_events.replay_endpoint)
        for number, batch in replay(asker, self.number).items():
            assert number == self.number
            self.number += 1
            for event in batch.events:
                self._follow(event)
        context.destroy(linger=0)

    def _follow(self, event: Any) -> None:
        match event:
            case StoredBlocks():
                above = self.tokens[event.parent_block_hash] if event.parent_block_hash else ()
                for at, name in enumerate(event.block_hashes):
                    size = event.block_size
                    above = (*above, *event.token_ids[at * size : (at + 1) * size])
                    self.tokens[name] = above
            case RemovedBlocks():
                for name in event.block_hashes:
                    del self.tokens[name]
            case ClearedBlocks():
                self.tokens.clear()


def whole_blocks(completions: Any, size: int) -> set[tuple[int, ...]]:
    """Of all tokens but the last, whose entry is never computed."""
    found = set()
    for each in completions:
        tokens = (*each.prompt_token_ids, *each.token_ids)[:-1]
        found |= {tokens[:stop] for stop in range(size, len(tokens) + 1, size)}
    return found


@pytest.mark.parametrize("strategy", ["paged", "virtual"])
def test_a_router_knows_what_an_engine_has(strategy: str) -> None:
    mirror = Mirror()
    with small(cache=strategy, kv_events_config=HERE) as llm:
        done = llm.generate(prompts(), GREEDY)
        mirror.read(llm)
        assert set(mirror.tokens.values()) == whole_blocks(done, llm.config.block_size)
        assert llm.reset_prefix_cache()
        mirror.read(llm)
        assert not mirror.tokens
        llm.generate(prompts(), GREEDY)
        mirror.read(llm)
        assert len(mirror.tokens) > 0
        llm.engine.begin_anew()  # as after an error
        done = llm.generate(prompts()[:1], GREEDY)
        mirror.read(llm)
        assert set(mirror.tokens.values()) == whole_blocks(done, llm.config.block_size)
        assert llm.accounting.resize(0, for_now=True) == 0  # as the machine runs out of memory
        wait_until(lambda: mirror.read(llm) or not mirror.tokens)
        llm.sleep()
        llm.wake_up()
        llm.generate(prompts()[:1], GREEDY)
        llm.resize(llm.ledger.kv_bytes // 2**16)
        mirror.read(llm)
        assert not mirror.tokens


def test_salted_prompts_are_followed_too() -> None:
    mirror = Mirror()
    with small(kv_events_config=HERE) as llm:
        requests = [
            llm.request(prompts()[2], GREEDY, keys=PrefixKeys(salt=salt)) for salt in ("", "x", "y")
        ]
        llm._completions(requests, None)
        mirror.read(llm)
        assert len(mirror.tokens) == 3 * len({*mirror.tokens.values()}) > 0


class Places:
    """Which blocks lie where, by the messages of one engine."""

    def __init__(self) -> None:
        self.names: dict[str | None, set[tuple[int, int | None]]] = {}  # medium → (hash, group)
        self.removed: list[str | None] = []  # media
        self.number = 0

    def read(self, llm: LLM) -> None:
        assert llm.kv_events is not None
        wait_until(lambda: llm.kv_events.num_published == llm.kv_events._next_number)
        context = zmq.Context()
        asker = context.socket(zmq.DEALER)
        asker.rcvtimeo = PATIENCE_MS
        asker.connect(llm.kv_events.replay_endpoint)
        for batch in replay(asker, self.number).values():
            self.number += 1
            for event in batch.events:
                self._follow(event)
        context.destroy(linger=0)

    def _follow(self, event: Any) -> None:
        if isinstance(event, ClearedBlocks):
            self.names.clear()
            return
        there = self.names.setdefault(event.medium, set())
        names = {(name, event.group_idx) for name in event.block_hashes}
        if isinstance(event, StoredBlocks):
            there |= names
        else:
            assert names <= there
            there -= names
            self.removed += [event.medium] * len(names)

    def agree(self, llm: LLM) -> bool:
        """Whether all that memory holds is known, and nothing else."""
        self.read(llm)
        return len(self.names.get("CPU", ())) == llm.tiers.tiers[0].num_records > 0


def test_a_router_knows_what_tiers_have(tmp_path: Any) -> None:
    places = Places()
    tiers = ("memory:?size=256KiB", f"file:{tmp_path}/records?size=64MiB&reserve=0")
    with made(kv_tier=tiers, kv_events_config=HERE) as llm:

        def settle() -> None:
            wait_until(lambda: not offload(llm).has_more)
            wait_until(lambda: places.agree(llm))

        texts(llm, (100, 75))
        llm._completions([llm.request(prompts()[2], GREEDY, keys=PrefixKeys(salt="x"))], None)
        settle()
        assert len(places.names["STORAGE"]) == llm.tiers.tiers[1].num_stored > 0
        assert places.names["CPU"] <= places.names["STORAGE"] <= places.names["GPU"]
        texts(llm, (97, 80, 64, 101))  # more than the memory holds
        settle()
        assert llm.tiers.tiers[0].num_stored > llm.tiers.tiers[0].num_records
        assert places.names["CPU"] < places.names["STORAGE"]
        llm.reset_prefix_cache(reset_external=True)
        places.read(llm)
        assert not any(places.names.values())
        texts(llm, (100,))
        settle()
        llm.reset_prefix_cache()  # that is told of all media; a copy is told again when it is used
        texts(llm, (100,))
        assert llm.tiers.counts.hit_tokens > 0
        wait_until(lambda: places.read(llm) or bool(places.names.get("CPU")))
        assert places.names["CPU"] <= places.names["GPU"]


@pytest.mark.parametrize("cache", ["paged", "virtual"])
def test_a_message_has_the_tokens_of_its_blocks(cache: str) -> None:
    """Also where a block has more than the option says, since it fills whole pages."""
    options: dict[str, Any] = dict(cache=cache, kv_cache_dtype="int8_per_token_head")
    with made(kv_events_config=HERE, **options) as llm:
        texts(llm, (100,))
        size = llm.accounting.index.block_size  # type: ignore[attr-defined]
        assert (size > llm.config.block_size) is (cache == "virtual")
        assert facts_of(llm).block_size == size
        assert llm.kv_events is not None
        wait_until(lambda: llm.kv_events.num_published == llm.kv_events._next_number > 0)
        context = zmq.Context()
        asker = context.socket(zmq.DEALER)
        asker.rcvtimeo = PATIENCE_MS
        asker.connect(llm.kv_events.replay_endpoint)
        events = [event for batch in replay(asker, 0).values() for event in batch.events]
        context.destroy(linger=0)
        stored = [event for event in events if isinstance(event, StoredBlocks)]
        assert stored
        for event in stored:
            assert event.block_size == size
            assert len(event.token_ids) == size * len(event.block_hashes)


def test_a_copy_that_was_damaged_is_told_to_be_gone() -> None:
    places, spoils = Places(), threading.Event()

    def lying(*args: Any) -> Any:
        tier: Any = HostMemoryTier(2**23, args[1])
        load = tier.load

        def spoiled(names: Any, into: Any, deadline: Any) -> int:
            count: int = load(names, into, deadline)
            if spoils.is_set():
                into[0][-1] ^= 1
            return count

        tier.load = spoiled
        return tier

    with kind("lying", lying), made(kv_tier=("lying:",), kv_events_config=HERE) as llm:
        texts(llm, (100,))
        wait_until(lambda: not offload(llm).has_more)
        wait_until(lambda: places.agree(llm))
        before = len(places.names["CPU"])
        llm.accounting.resize(0, for_now=True)  # everything is evicted …
        llm.accounting.resize(2**22)
        spoils.set()
        texts(llm, (100,))
        assert sum(llm.tiers.tiers[0].num_bad.values()) == 1
        spoils.clear()
        wait_until(lambda: not offload(llm).has_more)
        wait_until(lambda: places.agree(llm))
        assert len(places.names["CPU"]) == before, "it is stored again"
        assert places.removed.count("CPU") == 1


@pytest.mark.parametrize("strategy", ["contiguous", "growing"])
def test_a_cache_without_blocks_has_nothing_to_announce(strategy: str) -> None:
    with held_port() as port:
        config = {**HERE, "endpoint": f"tcp://127.0.0.1:{port}"}
        for _ in range(2):  # the address is given back
            with pytest.raises(ConfigError, match="kv_events_config: this cache keeps no blocks"):
                small(cache=strategy, kv_events_config=config)


def test_an_engine_that_cannot_be_made_gives_its_addresses_back() -> None:
    with held_port() as port:
        address = f"tcp://127.0.0.1:{port}"
        config = {**HERE, "endpoint": address}
        for _ in range(2):
            with pytest.raises(ConfigError, match="max_model_len"):
                small(max_model_len=10**6, kv_events_config=config)
        with small(kv_events_config=config) as llm:
            assert llm.kv_events is not None
            assert llm.kv_events.endpoint == address
            with pytest.raises(ConfigError, match="cannot be bound"):
                LLM(model_of("llama"), kv_events_config=config)


def test_engines_with_one_secret_name_a_tenants_blocks_alike(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 16)
    named, tokens = [], list(span(90_000, 90_000 + SIZE))
    for options in ({"name_key": str(secret)}, {"name_key": str(secret)}, {}):
        with world(**options) as own:
            subscriber = own.subscriber()
            own.heard(subscriber)
            own.cache.start(10**6, tokens, keys=PrefixKeys(tenant="ann"))
            own.cache.free(10**6)
            own.publisher.take_from(own.kv)
            found: list[Any] = []
            while not found:
                assert subscriber.poll(PATIENCE_MS)
                events = read(subscriber)[2].events
                found = [event.block_hashes for event in events if event.token_ids == tokens]
            named.append(found[-1])
    assert named[0] == named[1] != named[2]


@pytest.mark.parametrize("secret", [None, b"short", b"l" * 5000])
def test_a_secret_that_is_none_is_refused(tmp_path, secret) -> None:
    path = tmp_path / "secret"
    if secret is not None:
        path.write_bytes(secret)
    with pytest.raises(ConfigError, match="kv_events_config: name_key"):
        EventPublisher(KVEventsConfig(**HERE, name_key=str(path))).open()
