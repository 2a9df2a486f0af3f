"""Where a trace lies: files, packed files, web addresses; as a stream, and with its progress."""

import gzip
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which

import pytest

from quire.errors import ConfigError
from quire.traces import open_trace
from quire.traces import trace_files as source_module
from traces import files

MOONCAKE = files.rows(files.MOONCAKE).encode()


@contextmanager
def served(answers: dict[str, bytes]) -> Iterator[str]:
    """A server of files; one under ``/short`` breaks off."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = answers.get(self.path)
            self.send_response(200 if data is not None else 404)
            data = data or b""
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if self.path == "/short" else data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_packed_with_gzip_whatever_its_name(tmp_path: Path) -> None:
    path = files.written(tmp_path, "x.jsonl", gzip.compress(MOONCAKE))
    assert len(list(open_trace(path))) == 3


def test_a_packed_file_that_breaks_off(tmp_path: Path) -> None:
    packed = gzip.compress(files.rows(files.MOONCAKE * 2000).encode())
    path = files.written(tmp_path, "x.gz", packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match=r"x\.gz cannot be read: .*end-of-stream"):
        list(open_trace(path))


@pytest.mark.skipif(which("zstd") is None, reason="the program zstd is not here")
def test_packed_with_zstd(tmp_path: Path) -> None:
    path = files.written(tmp_path, "x", files.rows(files.MOONCAKE[:1] * 20_000))
    subprocess.run(["zstd", "-q", str(path)], check=True)
    told: list[tuple[int, int | None]] = []
    packed = path.with_name("x.zst")
    trace = open_trace(packed, on_progress=lambda *what: told.append(what))
    assert len(list(trace)) == 20_000
    assert told[-1] == (packed.stat().st_size,) * 2
    assert next(iter(trace)).input_tokens == 1200, "a reader that stops early leaves nothing behind"
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=r"x.zst cannot be read: "):
        list(open_trace(packed))


def test_without_anything_that_knows_zstd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.written(tmp_path, "x", b"\x28\xb5\x2f\xfd rest")
    monkeypatch.setattr(source_module, "which", lambda _: None)
    monkeypatch.setattr(source_module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="compressed with zstd: pip install zstandard"):
        open_trace(path)


def test_web_addresses() -> None:
    many = files.rows(files.MOONCAKE[:1] * 5000).encode()
    answers = {"/m": MOONCAKE, "/g": gzip.compress(MOONCAKE), "/short": many}
    told: list[tuple[int, int | None]] = []
    with served(answers) as address:
        trace = open_trace(f"{address}/m", on_progress=lambda *what: told.append(what))
        assert len(list(trace)) == 3
        assert told[-1] == (len(MOONCAKE), len(MOONCAKE))
        assert len(list(open_trace(f"{address}/g"))) == 3
        with pytest.raises(ConfigError, match="/none: the server answers 404"):
            open_trace(f"{address}/none")
        with pytest.raises(ConfigError, match=r"/short cannot be read: it ends after .* of"):
            list(open_trace(f"{address}/short"))
    with pytest.raises(ConfigError, match=r"cannot be read: .*refused"):
        open_trace(f"{address}/m")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing cannot be read: No such file"):
        open_trace(tmp_path / "missing")


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_LINE_BYTES", 1000)
    path = files.written(tmp_path, "x", MOONCAKE + b"[" * 5000)
    with pytest.raises(ConfigError, match="line 4 is longer than 1000 B: a trace has one"):
        list(open_trace(path))


@pytest.mark.full
def test_memory_is_flat_in_the_length_of_a_file(tmp_path: Path) -> None:
    line = files.rows(files.MOONCAKE[:1])
    peaks = []
    for count in (20_000, 100_000):
        path = files.written(tmp_path, "x", line * count)
        tracemalloc.start()
        assert sum(1 for _ in open_trace(path)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000, "of 10 MB"
