"""RESP connections: whatever a server sends, a caller gets an answer or a TierError."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.tiers import Deadline, TierAddress, TierError, TierFull
from quire.tiers.redis import RedisTier, open_redis
from quire.tiers.resp import ConnectionLost, RespConnection, ServerRefused
from tiers.shared_tier_cases import buffers, names_of, record_of, soon

VALUE_BYTES = 64
GUARD = b"\xa5" * 16

_line = st.binary(max_size=24).map(lambda data: data + b"\r\n")
_value = st.integers(-2, 2 * VALUE_BYTES).map(
    lambda size: b"$%d\r\n" % size + b"v" * max(0, size) + b"\r\n"
)
_hostile = st.sampled_from(
    [
        *(b"$-1\r\n", b":1\r\n", b":0\r\n", b"+OK\r\n", b"-ERR no\r\n", b"-OOM no\r\n", b"-\r\n"),
        *(b"$99999999999999999999\r\n", b"$9223372036854775807\r\n", b"$1_0\r\n", b"$ 64\r\n"),
        *(b"$+64\r\n", b"$0x40\r\n", b"$\r\n", b"*2\r\n", b"*-1\r\n", b"*1\r\n*1\r\n*1\r\n"),
        *(b"*2\r\n$1\r\n0\r\n*1\r\n$3\r\nkey\r\n", b"*2\r\n$1\r\n7\r\n*99999999\r\n"),
        *(b"%1\r\n", b"_\r\n", b"#t\r\n", b">1\r\n", b"\r\n", b"\n", b"\0", b"+" + b"x" * 5000),
        *(b"-WRONGTYPE no\r\n", b"$64\r\n" + b"v" * 64 + b"xx", b"$64\r\n" + b"v" * 63),
    ]
)
_replies = st.lists(st.one_of(_hostile, _value, _line), max_size=8).map(b"".join)


def connected(data: bytes) -> tuple[RespConnection, socket.socket]:
    """A connection whose server has sent all that it will ever send."""
    own, other = socket.socketpair()
    other.sendall(data)
    other.shutdown(socket.SHUT_WR)
    return RespConnection(own, "redis://test"), other


class TestReplies:
    @given(data=_replies, calls=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def test_any_bytes_are_an_answer_or_an_error(self, data: bytes, calls: list[int]) -> None:
        connection, other = connected(data)
        room = bytearray(GUARD + bytes(VALUE_BYTES) + GUARD)
        into = memoryview(room)[len(GUARD) : -len(GUARD)]
        with other:
            for call in calls:
                told = ""
                try:
                    connection.ask(b"GET", b"key", deadline=soon())
                    if call == 2:
                        _, keys = connection.read_page(64, soon())
                        assert max(map(len, keys), default=0) <= 64
                    elif call == 1:
                        assert connection.read_into(into, soon()) in (True, False)
                    else:
                        assert isinstance(connection.read(soon()), int | bytes)
                except ServerRefused as error:
                    told = str(error)
                except TierError:
                    assert not connection.is_idle
                    break
                assert len(told) <= 120
                assert not told or told.isprintable()
        connection.close()
        assert room.startswith(GUARD)
        assert room.endswith(GUARD)

    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"$64\r\n" + b"v" * 64 + b"\r\n", (True, True)),
            (b"$-1\r\n", (False, True)),
            (b"$3\r\nabc\r\n", (False, True)),
            (b"$0\r\n\r\n", (False, True)),
            (b"$65\r\n" + b"v" * 65 + b"\r\n", (False, False)),
            (b"$536870912\r\n", (False, False)),
            (b"$64\r\n" + b"v" * 64 + b"\r\n:1\r\n", (True, False)),  # more than was asked for
        ],
    )
    def test_values(self, data: bytes, expected: tuple[bool, bool]) -> None:
        connection, other = connected(data)
        with other:
            connection.ask(b"GET", b"key", deadline=soon())
            is_whole = connection.read_into(buffers(1, VALUE_BYTES)[0], soon())
            assert (is_whole, connection.is_idle) == expected
            connection.close()

    @pytest.mark.parametrize(
        "data",
        [
            *(b"*1\r\n$1\r\na\r\n", b"%1\r\n", b"$-2\r\n", b"$1e1\r\n", b"$" + b"1" * 30 + b"\r\n"),
            *(b"+OK\r\n", b":1\r\n", b"", b"$64\r\n", b"x" * 10_000, b"+" + b"x" * 2049 + b"\r\n"),
            *(b"$64\r\n" + b"v" * 65 + b"\r\n", b"$64\r\n" + b"v" * 64),
        ],
    )
    def test_what_is_no_value_ends_the_connection(self, data: bytes) -> None:
        connection, other = connected(data)
        with other:
            connection.ask(b"GET", b"key", deadline=soon())
            with pytest.raises(ConnectionLost, match="redis://test: "):
                connection.read_into(buffers(1, VALUE_BYTES)[0], soon())
            assert not connection.is_idle
            connection.close()

    def test_an_answer_that_trickles_ends_with_the_deadline(self) -> None:
        own, other = socket.socketpair()
        done = threading.Event()

        def trickle() -> None:
            other.sendall(b"$1000\r\n")
            while not done.wait(0.01):
                other.sendall(b"v")

        sending = threading.Thread(target=trickle)
        sending.start()
        connection = RespConnection(own, "redis://test")
        began = time.monotonic()
        connection.ask(b"GET", b"key", deadline=soon())
        with pytest.raises(TierError, match="out of time"):
            connection.read_into(buffers(1, 1000)[0], Deadline.after(0.1))
        assert time.monotonic() - began < 5  # all of it takes ten seconds
        done.set()
        sending.join()
        other.close()
        connection.close()

    def test_a_server_that_reads_nothing_ends_with_the_deadline(self) -> None:
        own, other = socket.socketpair()
        connection = RespConnection(own, "redis://test")
        big = memoryview(bytes(8 * 2**20))
        with other, pytest.raises(TierError, match="out of time"):
            connection.ask(b"SET", b"key", big, deadline=Deadline.after(0.1))
        assert not connection.is_idle
        connection.close()


class FakeServer:
    """Answers a connection by a function of what was asked for."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.num_connections = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}?connections=1"

    def tier(self) -> RedisTier:
        return open_redis(TierAddress.parse(self.address), VALUE_BYTES, "0" * 16)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with stream, suppress(OSError):  # the client has had enough
                while data := stream.recv(65536):
                    for _ in range(data.count(b"*")):
                        stream.sendall(self._answer(data))


def answered(answer: bytes) -> FakeServer:
    return FakeServer(lambda _: answer)


class TestErrors:
    @pytest.mark.parametrize(
        ("answer", "match", "kind"),
        [
            (b"-LOADING Redis is loading\r\n", "still reads its data", TierError),
            (b"-READONLY You can't\r\n", "is a replica", TierError),
            (b"-MOVED 3999 10.0.0.1:6381\r\n", "a node of a cluster", TierError),
            (b"-NOAUTH Authentication\r\n", "asks for a password", TierError),
            (b"-WRONGPASS invalid\r\n", "password is wrong", TierError),
            (b"-NOPERM this user\r\n", "ACL does not permit", TierError),
            (b"-MISCONF Redis\r\n", "cannot write its data", TierError),
            (b"-OOM command not allowed\r\n", "reached its maxmemory", TierFull),
            (b"-ERR max number of clients\x1b[2J\r\n", r"max number of clients\?", TierError),
        ],
    )
    def test_a_server_that_refuses_says_why(
        self, answer: bytes, match: str, kind: type[TierError]
    ) -> None:
        server = answered(answer)
        tier, names = server.tier(), names_of(3)
        for _ in range(3):
            with pytest.raises(kind, match=f"redis://127.0.0.1:[0-9]+: .*{match}"):
                tier.load(names, buffers(3, VALUE_BYTES), soon())
            with pytest.raises(kind, match=match):
                tier.find(names, soon())
        assert server.num_connections == 1, "it can be asked again"
        with pytest.raises(kind, match=match):
            tier.store(names, [record_of(name, VALUE_BYTES) for name in names], soon())
        with pytest.raises(kind, match=match):
            tier.drop(names, soon())
        tier.close()
        server.close()

    def test_too_long_a_value_costs_the_connection_only(self) -> None:
        server = answered(b"$536870912\r\n")
        tier = server.tier()
        for _ in range(3):
            assert tier.load(names_of(3), buffers(3, VALUE_BYTES), soon()) == 0
        assert server.num_connections == 3
        tier.close()
        server.close()

    def test_nested_answers_are_not_followed(self) -> None:
        server = answered(b"*1\r\n" * 1000)
        tier = server.tier()
        for call in (tier.find, tier.drop, lambda _, deadline: tier.clear(deadline)):
            with pytest.raises(TierError, match="no answer in RESP2"):
                call(names_of(3), soon())
        tier.close()
        server.close()

    @given(data=_replies)
    def test_a_tier_survives_any_answers(self, data: bytes) -> None:
        connection, other = connected(data)
        tier = RedisTier(_OneConnection(connection), "redis://test", b"quire:", 0.0, 4)  # type: ignore[arg-type]
        names, into = names_of(3), buffers(3, VALUE_BYTES)
        with other:
            for call in (
                lambda: tier.load(names, into, soon()),
                lambda: tier.find(names, soon()),
                lambda: tier.store(names, into, soon()),
            ):
                with suppress(TierError):
                    assert 0 <= call() <= 3
        connection.close()


class _OneConnection:
    """A pool that lends one connection as a new one."""

    def __init__(self, connection: RespConnection) -> None:
        self._connection = connection

    def connection(self, deadline: Deadline) -> "_OneConnection":
        return self

    def __enter__(self) -> tuple[RespConnection, bool]:
        return self._connection, True

    def __exit__(self, *_: object) -> None:
        pass
