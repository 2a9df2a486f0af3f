"""The server's process: what it says, how it ends, and what it refuses before a model is loaded."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from quire.cli import main
from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.server.listen import open_listeners
from quire.server.stop import StopSignals
from server.process import body, events, running

SECRET = "def a_name_that_no_log_may_have():"


def test_a_stop_lets_in_nobody_and_what_runs_finishes() -> None:
    flags = ("-tp", "1", "--served-model-name", "mine", "--num-gpu-blocks-override", "300")
    with running(*flags) as process:
        for said in ("-tp 1 is read as --tensor-parallel-size 1", "mine at http://127.0.0.1:"):
            assert said in " ".join(process.log.split())
        for said in ("tokens fit", "of this machine only, no key needed", "KV memory 18.75 MiB"):
            assert said in " ".join(process.log.split())
        with (
            httpx.Client(base_url=process.url, timeout=60) as client,
            httpx.Client(base_url=process.url, timeout=60) as another,
        ):
            health = client.get("/health", params={"key": "in-the-query"})
            assert "server" not in health.headers
            assert client.get("/nothing", params={"key": "in-the-query"}).status_code == 404
            asked = {**body(SECRET, 600), "model": "mine"}
            with client.stream("POST", "/v1/completions", json=asked) as response:
                pieces = events(response)
                next(pieces)
                process.child.send_signal(signal.SIGTERM)
                process.wait_for("told to stop")
                refused = another.post("/v1/completions", json={**asked, "stream": False})
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) > 0
                *_, last, done = pieces
        assert last is not None
        assert last["choices"][0]["finish_reason"] == "length"
        assert done is None
        assert process.end() == 0
        assert '"GET /nothing HTTP/1.1" 404' in process.log
        for private in (
            "in-the-query",
            "a_name_that_no_log_may_have",
            "Traceback",
            " ERROR ",
            "leaked",
        ):
            assert private not in process.log


@pytest.mark.full
def test_what_still_runs_after_the_timeout_is_aborted_and_told() -> None:
    with (
        running("--shutdown-timeout", "0.2", "--host", "0.0.0.0") as process,
        httpx.Client(base_url=process.url, timeout=60) as client,
    ):
        with client.stream("POST", "/v1/completions", json=body("import os", 2000)) as response:
            pieces = events(response)
            next(pieces)
            assert "host=0.0.0.0 accepts other machines, and no API key is set" in process.log
            assert "and administer it. Set --api-key @FILE" in process.log
            assert "from any machine, no key needed" in " ".join(process.log.split())
            process.child.send_signal(signal.SIGINT)
            *_, last, done = pieces
        assert last is not None
        assert last["choices"][0]["finish_reason"] == "abort"
        assert done is None
        assert process.end() == 0
        assert (
            "after 0.2 s (shutdown_timeout) the requests that still run are aborted" in process.log
        )
        assert "Traceback" not in process.log
        assert " ERROR " not in process.log


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    transport = httpx.HTTPTransport(uds=str(path))
    with (
        running("--uds", str(path), "--shutdown-timeout", "600") as process,
        httpx.Client(base_url=process.url, transport=transport, timeout=60) as client,
    ):
        assert path.is_socket()
        assert client.get("/version").status_code == 200
        through = {"x-forwarded-for": "203.0.113.7"}  # a proxy's, which the file system lets in
        sent = body("import os", 2000)
        with client.stream("POST", "/v1/completions", json=sent, headers=through) as response:
            pieces = events(response)
            next(pieces)
            process.wait_for('unix:0 "GET /version')
            process.wait_for('203.0.113.7:0 "POST /v1/completions')
            process.child.send_signal(signal.SIGTERM)
            process.wait_for("told to stop")
            process.child.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)
        assert process.end() == 0
        assert not path.exists()


STOPPED_EARLY = """
import os, signal, sys

class Told:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Told())
from quire.cli import main
main()
"""


@pytest.mark.parametrize("at", ["quire.config", "torch"])
def test_a_stop_while_it_loads_is_one_line(at: str, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    command = [sys.executable, "-c", STOPPED_EARLY, "serve", "--uds", str(path)]
    environment = {**os.environ, "AT": at}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    *loading, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout, last) == (0, "", "stopped")
    assert not any("stop" in line or "Traceback" in line for line in loading)
    assert not path.exists()


FAILING = """
from quire.config import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.server.run import serve
import sys

def fail(usage):
    raise OSError("the device is gone")

def announce(facts):
    print(f"{facts.url} memory page", file=sys.stderr, flush=True)

config = ServerConfig(port=0)
sys.exit(serve(config, lambda: AsyncLLM(observe=fail), announce=announce, last_words_s=60))
"""


def test_an_engine_that_fails_shows_in_health_and_then_ends_the_process() -> None:
    with (
        running(script=FAILING) as process,
        httpx.Client(base_url=process.url, timeout=60) as client,
    ):
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json={**body("import os", 5), "stream": False})
        assert answer.status_code == 500
        assert client.get("/health").status_code == 503
        process.wait_for("the engine has failed: /health answers 503")
        # Where, and of which kind: a message could quote a prompt.
        assert re.search(r"all its requests fail\nOSError\n  .* in ", process.log)
        assert "the device is gone" not in process.log
        process.child.send_signal(signal.SIGTERM)  # for those who do not want to wait
        assert process.end() == 1


# -- before anything is loaded ---------------------------------------------------------------------


def test_a_port_in_use_is_said_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["quire", "serve", "./no-model", "--port", port])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 1
    err = " ".join(capsys.readouterr().err.split())
    assert f"port={port} cannot be bound: another process listens there" in err


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "a..b"])
def test_a_host_that_is_none_names_the_option(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^host="):
        open_listeners(ServerConfig(host=host, port=0))


def test_a_name_of_two_addresses_has_one_port() -> None:
    listeners = open_listeners(ServerConfig(host="localhost", port=0))
    assert len({each.getsockname()[1] for each in listeners.sockets}) == 1
    listeners.close()
    assert listeners.sockets == []


def test_pieces_of_an_answer_are_not_held_back() -> None:
    async def accepted() -> int:
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def met(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            told.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listeners = open_listeners(ServerConfig(port=0))
        async with await asyncio.start_server(met, sock=listeners.sockets[0]):
            host, port = listeners.sockets[0].getsockname()
            _, writer = await asyncio.open_connection(host, port)
            try:
                return await told
            finally:
                writer.close()

    assert asyncio.run(accepted())


def test_a_socket_that_nobody_listens_at_makes_way(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    listeners = open_listeners(ServerConfig(uds=str(path)))
    listeners.sockets[0].listen()
    with pytest.raises(ConfigError, match="in use: another process listens on it"):
        open_listeners(ServerConfig(uds=str(path)))
    assert path.is_socket()
    listeners.close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        open_listeners(ServerConfig(uds=str(path)))
    assert path.read_text() == "mine"


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("nothing")
    with pytest.raises(ConfigError, match=r"ssl_certfile=.* is no certificate with its key"):
        open_listeners(ServerConfig(ssl_certfile=str(path), port=0))


def test_handlers_are_put_back_and_a_first_signal_only_asks() -> None:
    before, heard = signal.getsignal(signal.SIGTERM), []
    with StopSignals() as signals:
        signals.when_asked(lambda: heard.append("asked"))
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["asked"]
    assert signal.getsignal(signal.SIGTERM) is before
