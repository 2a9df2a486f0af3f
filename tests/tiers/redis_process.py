"""A redis-server of a test's own: its folder, its ports, TLS and ACL."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
NO_PROGRAM = "neither redis-server nor valkey-server is on PATH"
needs_redis = pytest.mark.skipif(PROGRAM is None, reason=NO_PROGRAM)
STARTED_WITHIN_S = 20


class RedisProcess:
    """A server that keeps what it has only while it runs, unless it is told otherwise."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.folder, self.options, self.port = folder, options, port
        self.socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"redis:{self.socket}"

    def start(self) -> None:
        assert PROGRAM is not None
        told = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        told += ["--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [PROGRAM, *told, *self.options], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until = time.monotonic() + STARTED_WITHIN_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until, "it does not answer"
            time.sleep(0.01)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it do nothing meanwhile: what is sent to it waits."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.socket.unlink(missing_ok=True)

    def tell(self, *words: str) -> bytes:
        """Send a command, and return what has come of the answer to it."""
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(STARTED_WITHIN_S)
            stream.connect(str(self.socket))
            stream.sendall(f"*{len(words)}\r\n".encode())
            for word in words:
                data = word.encode()
                stream.sendall(b"$%d\r\n%b\r\n" % (len(data), data))
            return stream.recv(65536)

    def _answers(self) -> bool:
        try:
            return self.tell("PING")[:1] in (b"+", b"-")
        except OSError:
            return False


def make_certificates(folder: Path) -> None:
    """Write ca.pem, and server.pem with server.key for localhost, signed by it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    now = datetime.now(UTC)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def built(name: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("Quire's tests"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )

    is_ca = x509.BasicConstraints(ca=True, path_length=None)
    ca = built("Quire's tests", ca_key.public_key()).add_extension(is_ca, critical=True)
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    )
    own = built("localhost", key.public_key()).add_extension(names, critical=False)
    for file, builder in (("ca.pem", ca), ("server.pem", own)):
        signed = builder.sign(ca_key, hashes.SHA256())
        (folder / file).write_bytes(signed.public_bytes(Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
