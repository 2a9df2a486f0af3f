"""S3 as a server on this machine may play it: it keeps objects, and answers as it is told."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest


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
        self.meet = threading.Barrier(1)  # those that are to be there at once

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
        with suppress(threading.BrokenBarrierError):
            store.meet.wait(20)
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
        elif "list-type=2" in path:
            bucket, _, query = path.partition("?")
            prefix = f"{bucket}/{parse_qs(query)['prefix'][0]}"
            self._send(200, _listed(bucket, [key for key in store.objects if prefix in key]))
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


def _listed(bucket: str, paths: list[str]) -> bytes:
    """As S3 lists all objects below a prefix."""
    told = "".join(
        f"<Contents><Key>{path.removeprefix(f'{bucket}/')}</Key><Size>1</Size>"
        "<LastModified>2026-11-24T00:00:00.000Z</LastModified></Contents>"
        for path in paths
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{told}</ListBucketResult>".encode()


@contextmanager
def played_s3() -> Iterator[PlayedS3]:
    """Run a server, with credentials for it in the environment."""
    with pytest.MonkeyPatch.context() as patch, PlayedS3() as server:
        patch.setenv("AWS_ACCESS_KEY_ID", "a-name")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
