"""Behind a proxy: the guide's nginx, as another user, in front of a Unix socket."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.server.listen import open_listeners
from server.process import Process, body, events, running

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"
NGINX, OPENSSL = (
    shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    for name in ("nginx", "openssl")
)


@pytest.mark.parametrize(("mode", "mask"), [("660", 0o077), ("0600", 0), ("666", 0o027)])
def test_a_socket_has_its_mode_from_the_start(
    tmp_path: Path, mode: str, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, at_bind = tmp_path / "s", []
    own = Path.chmod

    def chmod(each: Path, wanted: int) -> None:
        at_bind.append(stat.S_IMODE(each.stat().st_mode))
        own(each, wanted)

    monkeypatch.setattr(Path, "chmod", chmod)
    before = os.umask(mask)
    try:
        listeners = open_listeners(ServerConfig(uds=str(path), uds_mode=mode))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
    assert at_bind == [int(mode, 8) & ~mask], "it was open to others for a moment"
    listeners.close()


@pytest.mark.parametrize("mode", ["", "66", "0o660", "999", "1777"])
def test_a_wrong_mode_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"uds_mode='.*' must be three octal digits"):
        ServerConfig(uds="s", uds_mode=mode)
    with pytest.raises(ConfigError, match="uds_mode=666 needs uds"):
        ServerConfig(uds_mode="666")


@contextmanager
def nginx(folder: Path, block: str) -> Iterator[None]:
    """As another user where this one may say which: nobody, of the socket's group."""
    assert NGINX is not None
    config, group = folder / "nginx.conf", grp.getgrgid(folder.stat().st_gid).gr_name
    config.write_text(
        (f"user nobody {group};\n" if os.geteuid() == 0 else "")
        + f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        + "events {}\nhttp {\naccess_log off;\n"
        + "".join(
            f"{kind}_temp_path {folder}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        + f"{block}\n}}\n"
    )
    child = subprocess.Popen(
        [NGINX, "-p", folder, "-e", folder / "error.log", "-c", config], stderr=subprocess.PIPE
    )
    try:
        yield
    finally:
        child.terminate()
        said = child.communicate(timeout=10)[1].decode()
        assert child.returncode == 0, said


@pytest.fixture
def folder() -> Iterator[Path]:
    """As the guide makes it: its group is that of the proxy, and what is in it has that too."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        if os.geteuid() == 0:
            os.chown(path, -1, pwd.getpwnam("nobody").pw_gid)
        path.chmod(0o2750)
        yield path


def guides_block(folder: Path, port: int) -> str:
    """The guide's, with this test's places in it."""
    found = re.search(r"```nginx\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    block = found[1]
    for theirs, ours in (
        ("/run/quire/quire.sock", f"{folder}/quire.sock"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/", f"{folder}/"),
    ):
        assert theirs in block
        block = block.replace(theirs, ours)
    return block


def make_certificate(folder: Path) -> None:
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "2", "-subj", "/CN=x",
         "-keyout", folder / "llm.key", "-out", folder / "llm.pem"],
        check=True, capture_output=True,
    )  # fmt: skip


def ask_until_it_listens(client: httpx.Client, path: str) -> httpx.Response:
    for _ in range(200):
        try:
            return client.get(path)
        except httpx.ConnectError:
            signal.sigtimedwait([], 0.05)
    raise AssertionError("nginx does not listen")


@pytest.mark.skipif(
    NGINX is None or OPENSSL is None, reason="there is no nginx, or no openssl, on the path"
)
@pytest.mark.full
def test_the_guides_nginx_asks_a_unix_socket(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    make_certificate(folder)
    process: Process
    with (
        running("--uds", f"{folder}/quire.sock", "--root-path", "/llm") as process,
        nginx(folder, guides_block(folder, port)),
        httpx.Client(
            base_url=f"https://127.0.0.1:{port}/llm", verify=_any_certificate(), timeout=60
        ) as client,
    ):
        models = ask_until_it_listens(client, "/v1/models")
        assert models.status_code == 200, (folder / "error.log").read_text()
        document: dict[str, Any] = client.get("/openapi.json").json()
        assert document["servers"] == [{"url": "/llm"}]
        with client.stream("POST", "/v1/completions", json=body("import os", 400)) as response:
            pieces = events(response)
            next(pieces)
            process.child.send_signal(signal.SIGTERM)
            process.wait_for("told to stop")
            refused = client.post("/v1/chat/completions", json={"messages": []})
            assert refused.status_code == 503
            assert list(pieces)[-1] is None
        assert process.end() == 0
    said = re.findall(r'INFO (\S+) "(\S+ \S+) .*?" (\d+)', process.log)
    assert [(path, status) for _, path, status in said] == [
        ("GET /llm/v1/models", "200"),
        ("GET /llm/openapi.json", "200"),
        ("POST /llm/v1/completions", "200"),
        ("POST /llm/v1/chat/completions", "503"),
    ]
    assert {address.partition(":")[0] for address, *_ in said} == {"127.0.0.1"}


def _any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
