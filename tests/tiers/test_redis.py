"""A tier in Redis: a real server, restarted, full, behind TLS and ACL, slow, and cut off."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from ports import held_port
from quire.errors import ConfigError
from quire.tiers import TIERS, Deadline, Tier, TierAddress, TierError, TierFull
from tiers.redis_process import RedisProcess, make_certificates, needs_redis
from tiers.shared_tier_cases import (
    RECORD_BYTES,
    MakeNamespace,
    SharedTierCases,
    buffers,
    names_of,
    record_of,
    records_of,
    soon,
)

PASSWORD = "s3cret/@:#"
QUOTED = "s3cret%2F%40%3A%23"
# The whole rule of docs/guides/shared-tiers.md, but for the password.
RULE = "resetkeys ~quire:* resetchannels -@all +get +set +strlen +exists +pexpire +unlink +scan"


def open_tier(text: str, namespace: str = "0" * 16, record_bytes: int = RECORD_BYTES) -> Tier:
    address = TierAddress.parse(text)
    return TIERS[address.kind](address, record_bytes, namespace)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with held_port() as port:
        running = RedisProcess(tmp_path_factory.mktemp("redis"), port=port)
        yield running
        running.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisProcess]:
    running = RedisProcess(tmp_path)
    yield running
    running.kill()


@needs_redis
class TestRedisTier(SharedTierCases):
    @pytest.fixture(params=["unix", "tcp"])
    def make(self, server: RedisProcess, request: pytest.FixtureRequest) -> Iterator[MakeNamespace]:
        server.tell("FLUSHALL")
        tcp = f"redis://127.0.0.1:{server.port}"
        with ExitStack() as opened:

            def make(namespace: str) -> Tier:
                tier = open_tier(server.address if request.param == "unix" else tcp, namespace)
                opened.callback(tier.close)
                return tier

            yield make


@needs_redis
class TestServer:
    def test_a_key_says_whose_it_is(self, server: RedisProcess) -> None:
        server.tell("FLUSHALL")
        tier = open_tier(f"{server.address}?db=3", "0123456789abcdef")
        tier.store(names_of(1), records_of(names_of(1)), soon())
        assert b"keys=1" in server.tell("INFO", "keyspace").split(b"db3:")[1]
        other = open_tier(f"{server.address}", "0123456789abcdef")
        assert other.find(names_of(1), soon()) == 0
        other.store(names_of(1), records_of(names_of(1)), soon())
        assert b"quire:0123456789abcdef:" + b"01" * 32 in server.tell("KEYS", "*")
        tier.close()
        other.close()

    def test_a_key_of_another_type_is_no_record(self, server: RedisProcess) -> None:
        server.tell("FLUSHALL")
        tier, names = open_tier(server.address), names_of(3)
        tier.store(names, records_of(names), soon())
        key = f"quire:{'0' * 16}:{names[1].hex()}"
        server.tell("DEL", key)
        server.tell("LPUSH", key, "a")
        assert tier.load(names, buffers(3), soon()) == 1
        assert tier.load(names[1:], buffers(2), soon()) == 0
        assert tier.store(names, records_of(names), soon()) == 3
        assert tier.load(names, buffers(3), soon()) == 3
        tier.close()

    def test_a_record_that_is_there_is_not_sent_again(self, server: RedisProcess) -> None:
        server.tell("FLUSHALL")
        tier, names = open_tier(server.address), names_of(4)
        tier.store(names, records_of(names), soon())
        before = _received_bytes(server)
        assert tier.store(names, records_of(names), soon()) == 4
        assert _received_bytes(server) - before < RECORD_BYTES
        tier.close()

    def test_a_record_is_forgotten_at_its_age(self, server: RedisProcess) -> None:
        server.tell("FLUSHALL")
        tier, names = open_tier(f"{server.address}?age=1h"), names_of(2)
        tier.store(names, records_of(names), soon())
        used, other = (f"quire:{'0' * 16}:{name.hex()}" for name in names)
        for key in (used, other):
            assert 3_000_000 < int(server.tell("PTTL", key)[1:]) <= 3_600_000
            server.tell("PEXPIRE", key, "60000")  # as after 59 minutes
        tier.store(names[:1], records_of(names[:1]), soon())  # it is used: young again
        assert int(server.tell("PTTL", used)[1:]) > 3_000_000
        assert int(server.tell("PTTL", other)[1:]) <= 60_000
        server.tell("PEXPIRE", other, "0")
        assert tier.find(names[1:], soon()) == 0
        assert tier.find(names, soon()) == 1
        tier.close()

    def test_a_restart_in_the_middle_is_not_noticed(self, own_server: RedisProcess) -> None:
        tier, names = open_tier(own_server.address), names_of(3)
        tier.store(names, records_of(names), soon())
        own_server.kill()
        with pytest.raises(TierError, match=r"redis:.*redis\.sock: "):
            tier.find(names, soon())
        own_server.start()
        assert tier.find(names, soon()) == 0
        tier.store(names, records_of(names), soon())
        own_server.kill()
        own_server.start()
        assert tier.load(names, buffers(3), soon()) == 0, "without an error: it was reached anew"
        tier.close()

    def test_no_room_and_no_eviction(self, tmp_path: Path) -> None:
        own = RedisProcess(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
        try:
            tier, names = open_tier(own.address), names_of(60)
            kept = tier.store(names, records_of(names), soon())
            assert 0 < kept < 60
            with pytest.raises(TierFull, match="maxmemory"):
                tier.store(names[kept + 8 :], records_of(names[kept + 8 :]), soon())
            assert tier.find(names, soon()) >= kept
            tier.drop(names, soon())
            assert tier.store(names[:5], records_of(names[:5]), soon()) == 5
            own.tell("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            assert tier.store(names, records_of(names), soon()) == 60
            assert 0 < sum(tier.find([name], soon()) for name in names) < 60
            tier.close()
        finally:
            own.kill()

    def test_a_replica_and_a_stopped_server(self, own_server: RedisProcess) -> None:
        tier, names = open_tier(own_server.address), names_of(2)
        tier.store(names, records_of(names), soon())
        with own_server.stopped(), pytest.raises(TierError, match="out of time"):
            tier.load(names, buffers(2), Deadline.after(0.1))  # which is soon, or never
        assert tier.load(names, buffers(2), soon()) == 2
        own_server.tell("REPLICAOF", "127.0.0.1", "1")
        own_server.tell("CONFIG", "SET", "replica-serve-stale-data", "yes")
        with pytest.raises(TierError, match="replica, which takes no records"):
            tier.store(names_of(1, 9), records_of(names_of(1, 9)), soon())
        tier.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    make_certificates(folder)
    tls = ("--tls-cert-file", "server.pem", "--tls-key-file", "server.key")
    with held_port() as port:
        running = RedisProcess(
            folder,
            *("--tls-port", str(port)),
            *(word.replace("server.", f"{folder}/server.") for word in tls),
            *("--tls-ca-cert-file", f"{folder}/ca.pem", "--tls-auth-clients", "optional"),
            *("--user", "quire", "on", f">{PASSWORD}", *RULE.split()),
            *("--user", "default", "off"),
        )
        yield running
        running.kill()


@needs_redis
class TestWhoAsks:
    def tls(self, server: RedisProcess, options: str, host: str = "localhost") -> str:
        port = server.options[1]
        return f"rediss://quire:{QUOTED}@{host}:{port}?{options}"

    def test_tls_and_a_user_who_may_do_little(self, guarded: RedisProcess) -> None:
        ca = f"ca={guarded.folder}/ca.pem"
        for options, host in (
            (ca, "localhost"),
            (f"{ca}&age=1h", "127.0.0.1"),
            (f"{ca}&cert={guarded.folder}/server.pem&key={guarded.folder}/server.key", "localhost"),
            ("verify=none", "localhost"),
        ):
            tier, names = open_tier(self.tls(guarded, options, host)), names_of(9)
            into = buffers(9)
            assert tier.store(names, records_of(names), soon()) == 9
            assert tier.store(names, records_of(names), soon()) == 9
            assert tier.load(names, into, soon()) == 9 == tier.find(names, soon())
            assert into == records_of(names)
            tier.drop(names[:3], soon())
            tier.clear(soon())
            assert [tier.find([name], soon()) for name in names] == [0] * 9
            tier.close()

    @pytest.mark.parametrize("options", ["", "verify=ca"])
    def test_a_certificate_that_no_one_vouches_for(
        self, guarded: RedisProcess, options: str
    ) -> None:
        tier = open_tier(self.tls(guarded, options))
        with pytest.raises(TierError, match=r"cannot be reached.*[Cc]ertificate"):
            tier.find(names_of(1), soon())

    def test_a_password_is_in_no_message(self, guarded: RedisProcess, tmp_path: Path) -> None:
        file = tmp_path / "password"
        file.write_text("wrong-" + PASSWORD)
        socket_path = guarded.socket
        messages = []
        for text, match in (
            (f"redis:{socket_path}", "asks for a password"),
            (f"redis:{socket_path}?password_file={file}", "password is wrong"),
            (self.tls(guarded, "verify=none").replace("quire:", "quire:x"), "password is wrong"),
        ):
            tier = open_tier(text)
            with pytest.raises(TierError, match=match) as raised:
                tier.load(names_of(1), buffers(1), soon())
            messages += [str(raised.value), str(raised.getrepr())]
            tier.close()
        assert not any(PASSWORD in message or QUOTED in message for message in messages)
        assert PASSWORD not in repr(TierAddress.parse(self.tls(guarded, "")))

    def test_a_password_from_a_file_that_changes(self, tmp_path: Path) -> None:
        own = RedisProcess(tmp_path, "--requirepass", PASSWORD)
        file = tmp_path / "password"
        try:
            file.write_text(f"{PASSWORD}\n")
            tier = open_tier(f"{own.address}?password_file={file}")
            assert tier.store(names_of(1), records_of(names_of(1)), soon()) == 1
            own.kill()
            own.options = ("--requirepass", "another")
            own.start()
            with pytest.raises(TierError, match="password is wrong"):
                tier.find(names_of(1), soon())
            file.write_text("another")
            assert tier.find(names_of(1), soon()) == 0
            tier.close()
        finally:
            own.kill()

    def test_a_server_that_repeats_the_password(self, tmp_path: Path) -> None:
        own = RedisProcess(tmp_path, "--rename-command", "AUTH", "")
        try:
            assert PASSWORD.encode() in own.tell("AUTH", PASSWORD), "as Redis does"
            port = own.socket
            file = tmp_path / "password"
            file.write_text(PASSWORD)
            tier = open_tier(f"redis:{port}?password_file={file}")
            with pytest.raises(TierError, match="does not accept AUTH") as raised:
                tier.find(names_of(1), soon())
            assert PASSWORD not in str(raised.value)
            tier.close()
        finally:
            own.kill()

    def test_what_the_rule_forbids(self, guarded: RedisProcess) -> None:
        tier = open_tier(f"{self.tls(guarded, 'verify=none')}&db=1")
        with pytest.raises(TierError, match="ACL does not permit"):
            tier.find(names_of(1), soon())
        tier.close()


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("redis:", "no host"),
            ("redis:relative.sock", "no host"),
            ("rediss:/tmp/redis.sock", "no host"),
            ("redis://h/one", "/one: a database is a number"),
            ("redis://h/1?db=2", "two databases"),
            ("redis://h?db=-1", "db='-1': a database is a number"),
            ("redis://h?connections=0", "from 1 to 64"),
            ("redis://h?ca=/x", "unknown option 'ca'"),
            ("redis://h?timeout=1", "unknown option 'timeout'"),
            ("redis://h?age=soon", "an age is a number"),
            ("redis://h?password_file=/not/there", "password_file=/not/there"),
            ("redis://:a@h?password_file=/not/there", "take one out"),
            ("rediss://h?ca=/not/there", "ca=/not/there: No such file"),
            ("rediss://h?verify=maybe", "known: full, ca, none"),
            ("rediss://h?key=/x", "needs cert"),
        ],
    )
    def test_what_is_wrong_is_said(self, text: str, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            open_tier(text)

    @pytest.mark.parametrize(
        "text", ["redis://:cret/x@h", "redis://:x?cret@h", "redis://u:x#cret@h"]
    )
    def test_a_password_that_splits_the_address_is_not_shown(self, text: str) -> None:
        with pytest.raises(ConfigError, match="write %2F, %3F, %23") as raised:
            open_tier(text)
        assert "cret" not in str(raised.value)

    def test_records_that_redis_cannot_hold(self) -> None:
        with pytest.raises(ConfigError, match=r"600\.0 MiB are more than.*block_size"):
            open_tier("redis://h", record_bytes=600 * 2**20)

    def test_a_host_that_is_not_there(self) -> None:
        with held_port() as port:
            for text in (f"redis://localhost:{port}", "redis:/not/there.sock"):
                with pytest.raises(TierError, match="cannot be reached"):
                    open_tier(text).find(names_of(1), soon())


# -- a network that is slow, and a server that is cut off ------------------------------------------


@contextmanager
def proxy(
    server: RedisProcess, *, cut_after: int | None = None, then_stalls: bool = False
) -> Iterator[str]:
    """Yield the address of a server between: it ends at a byte of the answers, or stalls there."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as opened:
        listener.settimeout(0.02)

        def copy(source: socket.socket, to: socket.socket, is_answer: bool) -> None:
            left = cut_after
            with suppress(OSError):
                while not done.is_set() and (data := source.recv(16384)):
                    if is_answer and left is not None:
                        data = data[:left]
                        left -= len(data)
                    to.sendall(data)
                    if left == 0:
                        if then_stalls:
                            done.wait()
                        break
            for end in (source, to):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            while not done.is_set():
                try:
                    client, _ = listener.accept()
                except OSError:
                    continue
                behind = socket.socket(socket.AF_UNIX)
                behind.connect(str(server.socket))
                opened.enter_context(client)
                opened.enter_context(behind)
                for ends in ((client, behind, False), (behind, client, True)):
                    thread = threading.Thread(target=copy, args=ends, daemon=True)
                    thread.start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            accepting.join()


@needs_redis
class TestNetwork:
    @pytest.mark.parametrize("cut", [0, 1, 2, 5, 8, 9, 500, 1009, 1010, 1011, 1015, 1030, 3030])
    def test_cut_at_any_byte_of_the_answer(self, server: RedisProcess, cut: int) -> None:
        server.tell("FLUSHALL")
        names = names_of(3)
        records = [record_of(name, 1000) for name in names]  # $1000\r\n, 1,000 bytes, \r\n
        direct = open_tier(server.address)
        direct.store(names, records, soon())
        whole = min(3, cut // 1009)
        with proxy(server, cut_after=cut) as address:
            tier, into = open_tier(address), buffers(3, 1000)
            if whole:
                assert tier.load(names, into, soon()) == whole
            else:
                with pytest.raises(TierError, match=r"closed the connection|reset"):
                    tier.load(names, into, soon())
            assert into[:whole] == records[:whole]
            tier.close()
        direct.close()

    def test_a_slow_network_ends_with_the_deadline(self, server: RedisProcess) -> None:
        server.tell("FLUSHALL")
        names = names_of(6)
        direct = open_tier(server.address)
        direct.store(names, records_of(names), soon())
        with proxy(server, cut_after=7 * RECORD_BYTES // 2, then_stalls=True) as address:
            tier, into = open_tier(address), buffers(6)
            loaded = tier.load(names, into, Deadline.after(0.7))
            assert 0 < loaded <= 3, "what has come in time is whole"
            assert into[:loaded] == records_of(names[:loaded])
        with proxy(server, cut_after=0, then_stalls=True) as address:
            other = open_tier(address)
            with pytest.raises(TierError, match="out of time"):
                other.load(names, into, Deadline.after(0.1))
        for each in (tier, other, direct):
            each.close()


def _received_bytes(server: RedisProcess) -> int:
    stats = server.tell("INFO", "stats")
    return int(stats.split(b"total_net_input_bytes:")[1].split(b"\r\n")[0])
