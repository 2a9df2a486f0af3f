"""A tier in an object store: obstore's own stores, and S3 over HTTP as a server may play it."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.tiers import TIERS, Deadline, Tier, TierAddress, TierError
from quire.tiers.objects import ObjectTier, open_objects
from tiers.shared_tier_cases import (
    RECORD_BYTES,
    MakeNamespace,
    SharedTierCases,
    buffers,
    names_of,
    records_of,
    soon,
)

NAMESPACE = "0123456789abcdef"


def open_tier(text: str) -> Tier:
    address = TierAddress.parse(text)
    return TIERS[address.kind](address, RECORD_BYTES, NAMESPACE)


class TestOwnStores(SharedTierCases):
    @pytest.fixture(params=["memory", "local"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> MakeNamespace:
        from obstore.store import LocalStore, MemoryStore

        store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path)
        return lambda namespace: ObjectTier(store, "s3://bucket", namespace, 4)


class PlayedS3(ThreadingHTTPServer):
    """Keeps objects, and answers as it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []  # methods
        self.play = ""
        self.most_at_once = self.at_once = 0
        self.lock = threading.Lock()
        self.over = threading.Event()

    def handle_error(self, *_: object) -> None:
        pass  # a client that had enough

    @property
    def address(self) -> str:
        return f"s3://bucket/folder?region=us-east-1&endpoint=http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PlayedS3

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_PUT = do_POST = do_GET

    def _answer(self) -> None:
        store, path = self.server, self.path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with store.lock:
            store.asked.append(self.command)
            store.at_once += 1
            store.most_at_once = max(store.most_at_once, store.at_once)
        if store.play == "hang":
            store.over.wait()
        if store.play == "slow":
            store.over.wait(0.05)
        with store.lock:
            store.at_once -= 1
        if store.play in ("403", "500"):
            self._send(int(store.play), b"<Error><Code>Told</Code></Error>")
        elif store.play == "no bucket":
            self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif self.command == "PUT":
            store.objects[path] = body
            self._send(200)
        elif self.command == "POST":  # to delete what the body lists
            for key in re.findall(rb"<Key>([^<]*)</Key>", body):
                store.objects.pop(f"{path.partition('?')[0]}/{key.decode()}", None)
            self._send(200, b"<DeleteResult><Deleted><Key>a</Key></Deleted></DeleteResult>")
        elif path not in store.objects:
            self._send(404)
        else:
            self._send(200, store.objects[path])

    def _send(self, status: int, body: bytes = b"") -> None:
        play = self.server.play if self.command == "GET" else ""
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 00:00:00 GMT")
        if play == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body) + (play == "cut")))
        self.end_headers()
        if self.command == "HEAD":
            return
        if play == "chunked":
            for _ in range(100):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(body), body))
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(body)
        if play == "cut":
            self.close_connection = True


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    server = PlayedS3()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


class TestS3:
    def test_objects_lie_in_a_folder_a_namespace(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(3)
        assert tier.store(names, records_of(names), soon()) == 3
        assert next(iter(s3.objects)).startswith(f"/bucket/folder/quire/{NAMESPACE}/")
        into = buffers(4)
        assert tier.load(names_of(4), into, soon()) == 3 == tier.find(names_of(4), soon())
        assert into[:3] == records_of(names)
        tier.drop([*names[:2], *names_of(1, 9)], soon())
        assert len(s3.objects) == 1

    def test_a_record_that_is_there_is_not_sent_again(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(3)
        tier.store(names, records_of(names), soon())
        assert tier.store(names, records_of(names), soon()) == 3
        assert s3.asked.count("PUT") == 3

    def test_requests_run_side_by_side(self, s3: PlayedS3) -> None:
        s3.play = "slow"
        tier, names = open_tier(f"{s3.address}&requests=3"), names_of(9)
        began = time.monotonic()
        assert tier.store(names, records_of(names), soon()) == 9
        assert s3.most_at_once == 3
        assert time.monotonic() - began < 18 * 0.05

    def test_a_store_that_hangs_ends_with_the_deadline(self, s3: PlayedS3) -> None:
        tier, names = open_tier(f"{s3.address}&requests=2"), names_of(4)
        tier.store(names, records_of(names), soon())
        s3.play = "hang"
        began = time.monotonic()
        for call in (
            lambda: tier.find(names, Deadline.after(0.1)),
            lambda: tier.load(names, buffers(4), Deadline.after(0.1)),
            lambda: tier.store(names, records_of(names), Deadline.after(0.1)),
            lambda: tier.drop(names, Deadline.after(0.1)),
        ):
            with pytest.raises(TierError, match="out of time"):
                call()
        assert time.monotonic() - began < 1.5

    def test_a_late_store_reads_no_buffer_of_the_caller(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(1)
        record = bytearray(records_of(names)[0])
        expected = bytes(record)
        s3.play = "hang"
        with pytest.raises(TierError, match="out of time"):
            tier.store(names, [memoryview(record)], Deadline.after(0.1))
        record[:] = bytes(len(record))
        s3.over.set()
        until = time.monotonic() + 10
        while not s3.objects and time.monotonic() < until:
            time.sleep(0.01)
        assert list(s3.objects.values()) == [expected]

    @pytest.mark.parametrize(
        ("play", "match"), [("403", "403|[Pp]ermission|denied|lacked"), ("500", "500|[Ss]erver")]
    )
    def test_a_store_that_refuses_is_an_error(self, s3: PlayedS3, play: str, match: str) -> None:
        tier, names = open_tier(s3.address), names_of(2)
        s3.play = play
        with pytest.raises(TierError, match=match) as raised:
            tier.load(names, buffers(2), soon())
        assert str(raised.value).startswith("s3://bucket/folder: ")
        assert "a-secret" not in str(raised.value)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("play", ["cut", "chunked"])
    def test_a_body_of_another_length_is_no_record(self, s3: PlayedS3, play: str) -> None:
        tier, names = open_tier(s3.address), names_of(2)
        tier.store(names, records_of(names), soon())
        s3.play = play
        around = bytearray(RECORD_BYTES + 2)
        with suppress(TierError):
            assert tier.load(names, [memoryview(around)[1:-1], *buffers(1)], soon()) == 0
        assert (around[0], around[-1]) == (0, 0)
        s3.play = ""
        assert tier.load(names, buffers(2), soon()) == 2

    def test_no_bucket(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(2)
        s3.play = "no bucket"
        assert tier.find(names, soon()) == 0
        with pytest.raises(TierError, match="no such bucket"):
            tier.store(names, records_of(names), soon())

    def test_no_server(self) -> None:
        tier = open_tier("s3://bucket?region=r&endpoint=http://127.0.0.1:9")
        with pytest.raises(TierError, match="s3://bucket: "):
            tier.find(names_of(1), Deadline.after(5))


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("s3:", "s3://BUCKET"),
            ("s3://user:secret@bucket", "read from the environment"),
            ("s3://bucket?age=7d", "lifecycle rule"),
            ("s3://bucket?size=1GiB", "lifecycle rule"),
            ("s3://bucket?secret_access_key=x", "unknown option"),
            ("gs://bucket?endpoint=http://x", "unknown option"),
            ("s3://bucket?requests=0", "from 1 to 256"),
            ("az://container", "[Aa]ccount"),
        ],
    )
    def test_what_is_wrong_is_said(
        self, text: str, match: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(ConfigError, match=match):
            open_tier(text)

    def test_the_package_may_be_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.tiers.objects.find_spec", lambda _: None)
        with pytest.raises(ConfigError, match=r"pip install quire\[objects\]"):
            open_objects(TierAddress.parse("s3://bucket"), RECORD_BYTES, NAMESPACE)

    def test_kinds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        for text in ("s3://bucket/a/b", "gs://bucket", "az://container/a", "az://c?account=other"):
            open_tier(text).close()
