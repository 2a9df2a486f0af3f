"""Leased records and the protocol between two servers: whatever an end sends, the other goes on."""

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.tiers import Deadline, TierError, TierFull
from quire.tiers.transfer.leased_records import LeasedRecords
from quire.tiers.transfer.peer_address import PeerAddress
from quire.tiers.transfer.peer_frames import (
    FrameKind,
    Hello,
    PeerConnection,
    PeerLost,
    PeerRefused,
    pack_count,
    pack_lease,
    pack_names,
    read_count,
    read_lease,
    read_names,
)
from quire.tiers.transfer.peer_server import PeerServer
from quire.tiers.transfer.peer_tier import PeerTier
from tiers.shared_tier_cases import buffers, names_of, record_of, soon

SIZE = 20_000
HELLO = Hello(fingerprint=b"f" * 32, sizes=(SIZE, 64), is_sealed=False, nonce=bytes(32))
TCP = PeerAddress.parse("tcp://127.0.0.1:0")


EVERY_SEAL = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE


def memory_of(num_bytes: int, seals: int) -> int:
    file = os.memfd_create("m", os.MFD_ALLOW_SEALING)
    os.truncate(file, num_bytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def path_only(file: int) -> int:
    return os.open(f"/proc/self/fd/{file}", os.O_PATH)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def served(
    address: PeerAddress = TCP,
    *,
    size_bytes: int = 100 * SIZE,
    hello: Hello = HELLO,
    key: bytes | None = None,
    frame_s: float = 5.0,
) -> Iterator[tuple[PeerServer, LeasedRecords]]:
    records = LeasedRecords(size_bytes, 100.0)
    server = PeerServer(address, records, hello, key, frame_s=frame_s)
    server.start()
    try:
        yield server, records
    finally:
        server.close()


@contextmanager
def asked(
    address: PeerAddress, hello: Hello = HELLO, key: bytes | None = None
) -> Iterator[PeerTier]:
    with closing(PeerTier(address, hello, key)) as peer:
        yield peer


def until(holds: Callable[[], bool]) -> None:
    stop_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < stop_s, "it never came"
        time.sleep(0.001)


def ask(address: PeerAddress, hello: Hello = HELLO, key: bytes | None = None) -> int:
    with asked(address, hello, key) as peer:
        return peer.find(names_of(1), soon())


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> PeerAddress:
    return TCP if request.param == "tcp" else PeerAddress(str(tmp_path / "peer"))


class TestLeases:
    def test_a_lease_is_for_as_many_blocks_as_there_is_room_for(self) -> None:
        clock = Clock()
        records = LeasedRecords(1000, 10.0, clock)
        names = names_of(3)
        lease, count = records.lease([[300], [300], [300], [300]])
        assert count == 3
        assert records.lease([[300]]) == ("", 0)
        for name in names[:2]:
            assert records.keep(lease, name, record_of(name, 300))
        assert not records.wait(lease, 0.0)
        records.skip(lease, 300)
        assert records.wait(lease, 0.0)
        records.check()
        clock.now_s = 5.0
        other, count = records.lease([[300], [300]])
        assert count == 1
        assert records.keep(other, names[0], record_of(names[0], 300)), "leases share a record"
        clock.now_s = 11.0
        assert records.find(names, soon()) == 1, "the second lease has it still"
        assert not records.keep(lease, names[2], record_of(names[2], 300)), "its time is over"
        records.release(other)
        assert records.is_empty
        assert not records.wait("unknown", 1.0), "nothing to wait for"
        records.check()

    def test_a_lease_keeps_no_more_than_it_has_reserved(self) -> None:
        records, names = LeasedRecords(1000, 10.0), names_of(3)
        lease, _ = records.lease([[100], [100]])
        assert not records.keep(lease, names[0], record_of(names[0], 201))
        assert records.keep(lease, names[0], record_of(names[0], 100))
        assert records.keep(lease, names[1], record_of(names[1], 100))
        assert not records.keep(lease, names[2], memoryview(b"")), "all of it has come"
        assert not records.keep("unknown", names[2], record_of(names[2], 1))
        records.check()

    @settings(max_examples=40)
    @given(
        calls=st.lists(
            st.tuples(st.sampled_from("lksrdt"), st.integers(0, 5), st.integers(1, 400)),
            max_size=40,
        )
    )
    def test_bytes_and_references_add_up(self, calls: list[tuple[str, int, int]]) -> None:
        clock, leases = Clock(), [""]
        records, names = LeasedRecords(1000, 10.0, clock), names_of(6)
        for call, number, size in calls:
            lease, name = leases[number % len(leases)], names[number]
            if call == "l":
                leases.append(records.lease([[size]] * number)[0])
            elif call == "k":
                records.keep(lease, name, record_of(name, size))
            elif call == "s":
                records.skip(lease, size)
            elif call == "r":
                records.release(lease)
            elif call == "d":
                records.drop([name], soon())
            else:
                clock.now_s += number
            records.check()
        records.close()
        records.check()
        assert records.is_empty

    def test_a_record_stays_as_it_was_kept_while_its_buffer_is_used_again(self) -> None:
        records, (name,) = LeasedRecords(1000, 10.0), names_of(1)
        lease, _ = records.lease([[300]])
        buffer = bytearray(record_of(name, 300))
        assert records.keep(lease, name, memoryview(buffer))
        buffer[:] = bytes(300)
        (kept,) = records.take([name])
        assert kept == record_of(name, 300)

    def test_a_lease_ends_whose_records_were_dropped(self) -> None:
        """Else the thread that lets peers in, which ends leases, would end itself."""
        clock = Clock()
        records, names = LeasedRecords(1000, 10.0, clock), names_of(2)
        lease, _ = records.lease([[300], [300]])
        for name in names:
            assert records.keep(lease, name, record_of(name, 300))
        records.drop(names[:1], soon())
        records.check()
        clock.now_s = 11.0
        records.expire()
        assert records.is_empty
        assert records.usage().used_bytes == 0
        records.check()


class TestPeers:
    def test_records_are_found_loaded_stored_and_released(self, address: PeerAddress) -> None:
        with served(address) as (server, records):
            peer, names = PeerTier(server.address, HELLO, None), names_of(20)
            lease, count = records.lease([[SIZE]] * 20)
            assert count == 20
            waited = threading.Thread(
                target=lambda: [records.keep(lease, n, record_of(n, SIZE)) for n in names]
            )
            waited.start()
            assert peer.wait(lease, 5.0, soon())
            assert peer.find(names, soon()) == 20
            into = buffers(20, SIZE)
            assert peer.load(names, into, soon()) == 20
            assert into == [record_of(name, SIZE) for name in names]
            assert peer.load(names[:2], [*buffers(1, SIZE), *buffers(1, 64)], soon()) == 0
            assert peer.load([b"?" * 32, *names[:1]], buffers(2, SIZE), soon()) == 0
            peer.release(lease, soon())
            assert peer.find(names, soon()) == 0
            assert peer.store(names, [record_of(name, SIZE) for name in names], soon()) == 20
            assert peer.load(names, into, soon()) == 20
            waited.join()
            peer.close()
            records.check()

    def test_room_for_records_that_never_came_is_free_again(self, address: PeerAddress) -> None:
        with served(address, size_bytes=2 * SIZE) as (server, records):
            with asked(server.address) as peer, peer._connection(soon()) as (connection, _):
                asks = pack_names(names_of(2), [SIZE, SIZE])
                answer = connection.ask(FrameKind.STORE, asks, soon())
                assert read_count(answer.body, 2) == (2, [])
                assert records.lease([[SIZE]]) == ("", 0)
                connection.close()

            def is_free() -> bool:
                lease, count = records.lease([[SIZE], [SIZE]])
                records.release(lease)
                return count == 2

            until(is_free)
            records.check()

    def test_a_full_peer_takes_as_many_as_it_can(self, address: PeerAddress) -> None:
        with served(address, size_bytes=3 * SIZE) as (server, records):
            peer, names = PeerTier(server.address, HELLO, None), names_of(5)
            assert peer.store(names, [record_of(name, SIZE) for name in names], soon()) == 3
            with pytest.raises(TierFull):
                peer.store(names[3:], [record_of(name, SIZE) for name in names[3:]], soon())
            with pytest.raises(PeerLost):
                peer.store(names[:1], [record_of(names[0], 65)], soon())
            records.check()
            peer.close()

    @pytest.mark.parametrize(
        ("theirs", "said"),
        [
            (Hello(fingerprint=b"g" * 32, sizes=HELLO.sizes, is_sealed=False, nonce=bytes(32)),
             "another fingerprint"),
            (Hello(fingerprint=b"f" * 32, sizes=(1,), is_sealed=False, nonce=bytes(32)), "bytes"),
            (Hello(fingerprint=b"f" * 32, sizes=HELLO.sizes, is_sealed=True, nonce=bytes(32)),
             "sealed"),
            (Hello(fingerprint=b"f" * 32, sizes=HELLO.sizes, is_sealed=False, nonce=bytes(32),
                   version=2), "version 2"),
        ],
    )  # fmt: skip
    def test_another_kind_of_records_is_refused_in_words(self, theirs: Hello, said: str) -> None:
        with served() as (server, _), pytest.raises(TierError, match=said):
            ask(server.address, theirs)

    def test_who_has_another_key_is_refused(self) -> None:
        one, other = b"1" * 32, b"2" * 32
        with served(key=one) as (server, _):
            assert ask(server.address, HELLO, one) == 0
            with pytest.raises(TierError, match="another kv_tier_key"):
                ask(server.address, HELLO, other)

    def test_a_peer_that_was_restarted_is_asked_again(self, tmp_path: Path) -> None:
        address = PeerAddress(str(tmp_path / "peer"))
        peer = PeerTier(address, HELLO, None)
        for _ in range(2):  # a socket that a killed process left is no hindrance
            with served(address):
                assert peer.find(names_of(1), soon()) == 0
            left = socket.socket(socket.AF_UNIX)
            left.bind(address.path)
            left.close()
        with pytest.raises(TierError, match="cannot be reached"):
            peer.find(names_of(1), soon())
        peer.close()
        (tmp_path / "file").touch()
        with (
            pytest.raises(ConfigError, match="is not a socket"),
            served(PeerAddress(str(tmp_path / "file"))),
        ):
            pass  # fmt: skip

    def test_a_peer_that_hangs_costs_the_deadline(self, address: PeerAddress) -> None:
        family = socket.AF_UNIX if address.is_unix else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind(address.path or (address.host, 0))
            listener.listen()
            place = address if address.is_unix else PeerAddress("", *listener.getsockname())
            with pytest.raises(TierError, match="out of time"):
                PeerTier(place, HELLO, None).find(names_of(1), Deadline.after(0.1))

    def test_another_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with served(PeerAddress(str(tmp_path / "peer"))) as (server, _):
            monkeypatch.setattr(os, "geteuid", lambda: 4711)
            with pytest.raises(TierError, match="user"):
                ask(server.address)

    def test_too_many_connections_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.tiers.transfer.peer_server.MOST_CONNECTIONS", 1)
        with served() as (server, _), asked(server.address) as first:
            assert first.find(names_of(1), soon()) == 0
            with pytest.raises(TierError, match=r"1 connections already|closed|reset|pipe"):
                ask(server.address)
            assert first.find(names_of(1), soon()) == 0

    def test_a_peer_waits_no_longer_than_it_is_granted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("quire.tiers.transfer.peer_server.LONGEST_AWAIT_S", 0.05)
        with served() as (server, records), asked(server.address) as peer:
            lease, _ = records.lease([[SIZE]])
            assert not peer.wait(lease, 4e6, soon())

    def test_an_answer_that_comes_late_is_none_to_the_next_question(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hold = threading.Event()
        find = LeasedRecords.find

        def late(records: LeasedRecords, names: list[bytes], deadline: Deadline) -> int:
            hold.wait(10)
            return find(records, names, deadline)

        with served() as (server, records), asked(server.address) as peer:
            lease, _ = records.lease([[SIZE]] * 3)
            for name in names_of(3):
                records.keep(lease, name, record_of(name, SIZE))
            assert peer.find(names_of(1), soon()) == 1
            monkeypatch.setattr(LeasedRecords, "find", late)
            with pytest.raises(TierError, match="out of time"):
                peer.find(names_of(3), Deadline.after(0.1))
            hold.set()
            assert peer.find(names_of(1, 7), soon()) == 0

    def test_leases_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.tiers.transfer.leased_records._MOST_LEASES", 2)
        records = LeasedRecords(1000, 10.0)
        assert [records.lease([[1]])[1] for _ in range(3)] == [1, 1, 0]
        records.check()

    def test_those_who_say_nothing_keep_no_peer_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.tiers.transfer.peer_server.MOST_CONNECTIONS", 3)
        with served() as (server, _), asked(server.address) as first:
            assert first.find(names_of(1), soon()) == 0
            silent = [
                socket.create_connection((server.address.host, server.address.port))
                for _ in range(8)
            ]
            assert ask(server.address) == 0
            assert first.find(names_of(1), soon()) == 0
            assert len(server._connections) <= 3
            for each in silent:
                each.close()

    def test_a_thread_that_cannot_be_had_costs_one_connection(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "quire-transfer":
                raise RuntimeError("can't start new thread")
            start(thread)

        with served() as (server, _):
            monkeypatch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(TierError):
                ask(server.address)
            monkeypatch.undo()
            assert ask(server.address) == 0

    def test_a_server_that_closes_leaves_the_next_ones_socket(self, tmp_path: Path) -> None:
        """The next one may bind the path as soon as the old one does not listen any more."""
        address = PeerAddress(str(tmp_path / "peer"))
        with served(address) as (old, records):
            lease, _ = records.lease([[SIZE]])
            with asked(address) as peer:
                peer.find(names_of(1), soon())

                def wait() -> None:
                    with suppress(TierError):
                        peer.wait(lease, 1.0, soon())

                waiting = threading.Thread(target=wait)
                waiting.start()
                closing_one = threading.Thread(target=old.close)
                closing_one.start()
                until(lambda: not Path(address.path).exists())
                with served(address):
                    closing_one.join()
                    waiting.join()
                    assert Path(address.path).is_socket()
                    assert ask(address) == 0


KEY = b"k" * 32
SEALED = Hello(fingerprint=b"f" * 32, sizes=HELLO.sizes, is_sealed=True, nonce=bytes(32))


class Wire:
    """Between two ends over TCP: it keeps what goes by, and may change it."""

    def __init__(self, server: PeerAddress, change: Callable[[str, bytes], bytes]) -> None:
        self.seen = {"out": b"", "back": b""}  # to the server, and from it
        self._server, self._change = server, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = PeerAddress("", *self._listener.getsockname())
        self._streams: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._server.host, self._server.port))
                self._streams += [near, far]
                for way, one, other in (("out", near, far), ("back", far, near)):
                    thread = threading.Thread(target=self._pump, args=(way, one, other))
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, way: str, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(2**16):
                self.seen[way] += data
                other.sendall(self._change(way, data))
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for each in (*self._streams, self._listener):
            each.close()


class TestWire:
    """Who listens between two ends that have a key, and changes what goes by."""

    def test_any_byte_may_change_and_no_answer_is_wrong(self) -> None:
        """Any byte of a whole conversation, in both directions: a sample of them each time."""
        names = names_of(3)
        with served(hello=SEALED, key=KEY) as (server, records):
            lease, _ = records.lease([[64]])
            records.keep(lease, names[0], record_of(names[0], 64))
            with closing(Wire(server.address, lambda _, data: data)) as wire:
                with asked(wire.address, SEALED, KEY) as peer:
                    assert peer.find(names, soon()) == 1
                    assert peer.wait(lease, 0.0, soon())
                lengths = {way: len(data) for way, data in wire.seen.items()}
            assert names[1] in wire.seen["out"], "questions are in clear"
        # A changed length may have an end wait for more: here it does so for a moment.
        with served(hello=SEALED, key=KEY, frame_s=0.3) as (server, records):
            lease, _ = records.lease([[64]])
            records.keep(lease, names[0], record_of(names[0], 64))

            @settings(max_examples=80)
            @given(data=st.data())
            def change(data: st.DataObject) -> None:
                way = data.draw(st.sampled_from(["out", "back"]))
                at = data.draw(st.integers(0, lengths[way] - 1))
                flipped, done = data.draw(st.integers(1, 255)), {"out": 0, "back": 0}

                def flip(own: str, seen: bytes) -> bytes:
                    begun, changed = done[own], bytearray(seen)
                    done[own] += len(seen)
                    if own == way and begun <= at < done[own]:
                        changed[at - begun] ^= flipped
                    return bytes(changed)

                deadline = Deadline.after(1.0)
                with (
                    closing(Wire(server.address, flip)) as wire,
                    asked(wire.address, SEALED, KEY) as peer,
                    suppress(TierError),
                ):
                    assert peer.find(names, deadline) == 1
                    assert peer.wait(lease, 0.0, deadline)

            change()
            assert records.find(names, soon()) == 1
            records.check()

    def test_nothing_can_be_put_in_left_out_or_repeated(self) -> None:
        """A frame that the wire makes of what it saw, in place of a question that a peer puts."""
        with served(hello=SEALED, key=KEY, frame_s=0.3) as (server, records):
            lease, _ = records.lease([[64]])
            name = names_of(1)[0]
            records.keep(lease, name, record_of(name, 64))
            plain = struct.pack("<4sBBI", b"QKVT", FrameKind.RELEASE, 0, len(pack_lease(lease)))
            for put_in in (plain + pack_lease(lease), plain + pack_lease(lease) + bytes(16)):

                def change(way: str, data: bytes, own: bytes = put_in) -> bytes:
                    return own if way == "out" and data[4] == FrameKind.FIND else data

                with (
                    closing(Wire(server.address, change)) as wire,
                    asked(wire.address, SEALED, KEY) as peer,
                    pytest.raises(TierError),
                ):
                    peer.find([name], Deadline.after(1.0))
                assert records.find([name], soon()) == 1
        with served(hello=SEALED, key=KEY) as (server, records):
            lease, _ = records.lease([[64]])
            records.keep(lease, name, record_of(name, 64))

            def repeat(way: str, data: bytes) -> bytes:
                return data * 2 if way == "out" and data[4] == FrameKind.RELEASE else data

            with (
                closing(Wire(server.address, repeat)) as wire,
                asked(wire.address, SEALED, KEY) as peer,
            ):
                peer.release(lease, soon())
                lease, _ = records.lease([[64]])
                records.keep(lease, name, record_of(name, 64))
                assert peer.wait(lease, 0.0, soon()), "that answer is not one to the repeated frame"
            # All that was said once, played to the server again: no nonce is used twice.
            with socket.create_connection((server.address.host, server.address.port)) as own:
                own.sendall(wire.seen["out"])
                own.settimeout(20)
                said = b""
                with suppress(OSError):
                    while more := own.recv(4096):
                        said += more
            assert said.endswith(b"another kv_tier_key")
            assert records.find([name], soon()) == 1

    def test_a_proof_is_of_one_end(self) -> None:
        """Sent back as the other end's it proves nothing, and neither does a HELLO."""
        with served(hello=SEALED, key=KEY) as (server, _):
            stream = socket.create_connection((server.address.host, server.address.port))
            with closing(PeerConnection(stream, "peer")) as connection:
                connection.send(FrameKind.HELLO, SEALED.packed(), soon())
                welcome = connection.answer(soon(), FrameKind.WELCOME).body
                connection.send(FrameKind.PROOF, welcome[-32:], soon())
                with pytest.raises(PeerRefused, match="another kv_tier_key"):
                    connection.answer(soon())

    def test_sealed_records_are_not_had_without_the_key_nor_plain_ones_in_their_place(self) -> None:
        with served(hello=SEALED, key=KEY) as (server, _):
            with pytest.raises(TierError, match="sealed"):
                ask(server.address, HELLO, None)
            with pytest.raises(TierError, match="kv_tier_key"):
                ask(server.address, SEALED, None)
            with (
                closing(Wire(server.address, _says_it_is_plain)) as wire,
                pytest.raises(TierError, match=r"kv_tier_key|sealed"),
            ):
                ask(wire.address, SEALED, KEY)
        with served(hello=HELLO) as (server, _):
            for change in (lambda _, data: data, _says_it_is_sealed):
                with (
                    closing(Wire(server.address, change)) as wire,
                    pytest.raises(TierError, match=r"kv_tier_key|sealed"),
                ):
                    ask(wire.address, SEALED, KEY)


def _says_it_is_plain(way: str, data: bytes) -> bytes:
    return data[:12] + b"\0" + data[13:] if data[4] == FrameKind.WELCOME else data


def _says_it_is_sealed(way: str, data: bytes) -> bytes:
    sealed = {FrameKind.HELLO: b"\0", FrameKind.WELCOME: b"\1"}.get(data[4])
    return data if sealed is None else data[:12] + sealed + data[13:]


class TestFiles:
    """What comes with a frame over a Unix socket."""

    def test_only_a_sealed_file_of_memory_of_the_right_size_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "plain").write_bytes(bytes(SIZE))
        memory = os.memfd_create("m", os.MFD_ALLOW_SEALING)
        os.write(memory, bytes(SIZE))
        for file, said in (
            (os.open(tmp_path / "plain", os.O_RDONLY), "cannot be read"),
            (memory, "not sealed"),
            (os.open("/dev/zero", os.O_RDONLY), "cannot be read"),
            (os.pipe()[0], "cannot be read"),
            (memory_of(SIZE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE), "not sealed"),
            (memory_of(SIZE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK), "not sealed"),
            (memory_of(SIZE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE), "not sealed"),
            (memory_of(2**40, EVERY_SEAL), "another size"),
            (memory_of(0, EVERY_SEAL), "another size"),
            (path_only(memory_of(SIZE, EVERY_SEAL)), "cannot be read"),
            (None, "no file"),
        ):
            one, other = (PeerConnection(s, "peer") for s in socket.socketpair())
            with closing(one), closing(other):
                one.send(FrameKind.ANSWER, pack_count(1, [SIZE]), soon(), file=file)
                frame = other.receive(soon())
                with pytest.raises(PeerLost, match=said):
                    other.receive_payload(frame, buffers(1, SIZE), soon())
            if file is not None:
                os.close(file)
        one, other = (PeerConnection(s, "peer") for s in socket.socketpair())
        with closing(one), closing(other):
            one.send_payload(FrameKind.ANSWER, b"", [record_of(b"n", SIZE - 1)], soon())
            with pytest.raises(PeerLost, match="another size"):
                other.receive_payload(other.receive(soon()), buffers(1, SIZE), soon())

    def test_files_that_belong_to_nothing_are_closed(self) -> None:
        before = set(os.listdir("/proc/self/fd"))
        ours, theirs = socket.socketpair()
        own = [os.memfd_create("m") for _ in range(3)]
        with ours, closing(PeerConnection(theirs, "peer")) as connection:
            socket.send_fds(ours, [struct.pack("<4sBBI", b"QKVT", 9, 0, 0)], own)
            for file in own:
                os.close(file)
            with pytest.raises(PeerLost, match="file"):
                connection.receive(soon())
        assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("head", "size"),
    [(b"QKVt", 0), (b"QKVT", 65_537), (b"QKVT", 2**32 - 1)],
)
def test_a_frame_is_refused_before_its_body_is_read(head: bytes, size: int) -> None:
    one, other = socket.socketpair()
    one.sendall(struct.pack("<4sBBI", head, FrameKind.ANSWER, 0, size))
    with pytest.raises(PeerLost, match="begins with"):
        PeerConnection(other, "peer").receive(soon())
    one.close()


_heads = st.tuples(
    st.sampled_from([b"QKVT", b"QKVt", b"\0\0\0\0"]),
    st.integers(0, 12),
    st.sampled_from([0, 0, 0, 1, 255]),
    st.sampled_from([0, 1, 2, 34, 66, 84, 65_536, 65_537, 2**32 - 1]),
).map(lambda fields: struct.pack("<4sBBI", *fields))
_bodies = st.one_of(
    st.binary(max_size=90),
    st.just(HELLO.packed()),
    st.integers(0, 2**16 - 1).map(pack_count),
    st.just(pack_names(names_of(1), [2**63])),
)
_bytes = st.lists(st.one_of(_heads, _bodies), max_size=6).map(b"".join)


@pytest.mark.parametrize("read", [
    lambda body: Hello.read(body), lambda body: read_count(body, 8, with_sizes=True),
    lambda body: read_names(body, 8, with_sizes=True), read_lease,
])  # fmt: skip
@given(body=st.one_of(_bytes, st.binary(max_size=200)))
@settings(max_examples=60)
def test_any_body_is_read_or_refused(read, body: bytes) -> None:  # type: ignore[no-untyped-def]
    found = read(body)
    assert found is None or found


@settings(max_examples=60)
@given(data=_bytes, is_unix=st.booleans())
def test_any_answer_is_read_or_an_error(data: bytes, is_unix: bool) -> None:
    """A server that sends these bytes, and then nothing."""
    if is_unix:
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
    ours.sendall(data)
    ours.shutdown(socket.SHUT_WR)
    connection, room = PeerConnection(theirs, "peer"), bytearray(b"\xa5" * 96)
    with suppress(TierError):
        while True:
            frame = connection.answer(soon())
            told = read_count(frame.body, 4, with_sizes=True)
            if told and told[1] == [64]:
                connection.receive_payload(frame, [memoryview(room)[16:-16]], soon())
    connection.close()
    ours.close()
    assert room[:16] == room[-16:] == b"\xa5" * 16


def test_any_questions_end_a_connection_and_nothing_else() -> None:
    """Bytes thrown at a server, before and after a handshake; it then serves others as ever."""

    def is_served() -> bool:
        with suppress(TierError):  # where the machine was busy for the moment that a frame has
            return ask(server.address) == 0
        return False

    with served(frame_s=0.2) as (server, records):

        @settings(max_examples=40)
        @given(data=_bytes, shakes_hands=st.booleans())
        def throw(data: bytes, shakes_hands: bool) -> None:
            peer = PeerTier(server.address, HELLO, None)
            if shakes_hands:
                connection = peer._connected(soon())
                stream = connection._stream
            else:
                stream = socket.create_connection((server.address.host, server.address.port))
            with suppress(OSError):
                stream.settimeout(10)
                stream.sendall(data)
                stream.shutdown(socket.SHUT_WR)
                while stream.recv(4096):
                    pass
            stream.close()

        throw()
        until(is_served)
        records.check()
        stalled = PeerTier(server.address, HELLO, None)._connected(soon())
        stalled._stream.sendall(b"QKVT")  # and no more
        stalled._stream.settimeout(20)
        with suppress(ConnectionError):
            assert stalled._stream.recv(1) == b"", "the server ends it"
        stalled.close()


def test_a_count_is_bounded() -> None:
    assert read_count(pack_count(8), 8) == (8, [])
    assert read_count(pack_count(9), 8) is None
    assert read_count(pack_count(9, [1] * 9), 8, with_sizes=True) is None
    assert read_names(pack_names(names_of(9)), 8) is None


def test_addresses() -> None:
    for text in ("unix:/run/quire/peer", "tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://a-b.c:9"):
        assert str(PeerAddress.parse(text)) == text
    for text in ("unix:peer", "unix:/" + "a" * 107, "tcp://host", "tcp://host:65536", "http://a:1",
                 "tcp://a:1/x", 7, "unix:/a\0b"):  # fmt: skip
        with pytest.raises(ConfigError, match="no address of a peer"):
            PeerAddress.parse(text)
    assert PeerAddress.told("unix:/a", 5) == PeerAddress("/a")
    assert str(PeerAddress.told("::1", 5)) == "tcp://[::1]:5"


def test_leases_in_questions() -> None:
    assert read_lease(pack_lease("abc", 1.5)) == ("abc", 1.5)
