"""``RedisServer``: how to reach a Redis or Valkey server; ``ConnectionPool``: threads share it.

An address has the host or the socket, the user, the database and what TLS needs. What is asked for
over a connection is ``redis``'s matter. Passwords are in no message: neither an address's text nor
what a server answers to one is repeated.
"""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore, Lock
from types import MappingProxyType
from typing import Any, final
from urllib.parse import unquote

from quire.errors import ConfigError
from quire.tiers.address import TierAddress
from quire.tiers.resp import RespConnection, ServerRefused
from quire.tiers.tier import Deadline, TierError

_PORT = 6379
_LONGEST_PASSWORD_BYTES = 4096
_MOST_DIGITS = 9  # of a database's number

_OPTIONS = ("db", "password_file")
_TLS_FILES = ("ca", "cert", "key")
_TLS_OPTIONS = (*_TLS_FILES, "verify")
_VERIFY = MappingProxyType(
    {
        "full": (ssl.CERT_REQUIRED, True),  # and whether the certificate must name the host
        "ca": (ssl.CERT_REQUIRED, False),
        "none": (ssl.CERT_NONE, False),
    }
)

# What the first word of an error says.
MEANINGS = MappingProxyType(
    {
        "ASK": "it is a node of a cluster that moves keys, and Quire asks one server for all",
        "BUSY": "it runs a script that takes long",
        "CLUSTERDOWN": "its cluster is down",
        "DENIED": "it is in protected mode, in which it lets in no other machine",
        "LOADING": "it still reads its data from disk",
        "MASTERDOWN": "it is a replica that has lost its primary",
        "MISCONF": "it cannot write its data to disk, and takes no more until it can",
        "MOVED": "it is a node of a cluster, and Quire asks one server for all keys",
        "NOAUTH": "it asks for a password: give one in the address, or a file as password_file",
        "NOPERM": "the user's ACL does not permit this: docs/guides/shared-tiers.md has the rule",
        "OOM": "it has reached its maxmemory and evicts nothing: set maxmemory-policy",
        "READONLY": "it is a replica, which takes no records: give the primary's address",
        "WRONGPASS": "the user or the password is wrong",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisServer:
    """How to reach a server, and as which user."""

    label: str
    where: tuple[str, int] | str  # host and port, or a socket's path
    tls: ssl.SSLContext | None
    user: str
    password: str | Path | None = field(repr=False)  # a file is read for each connection
    database: int

    @classmethod
    def of(cls, address: TierAddress, *options: str) -> "RedisServer":
        """Read an address, which may have these options for others. Raises: ConfigError."""
        url, is_tls = address.url, address.kind == "rediss"
        address.require_known(*options, *_OPTIONS, *(_TLS_OPTIONS if is_tls else ()))
        path, where = url.path, f"kv_tier={address}"
        if is_tls and not url.hostname:
            raise ConfigError(f"{where} has no host: write rediss://HOST")
        if not url.hostname and not path.startswith("/"):
            raise ConfigError(f"{where} has no host: write redis://HOST or redis:/PATH/TO/SOCKET")
        database = address.option("db", _parse_database, 0)
        if url.hostname and path.strip("/"):
            if "db" in address.options:
                raise ConfigError(f"{where}: db={database} and {path} are two databases")
            try:
                database = _parse_database(path.strip("/"))
            except ValueError as error:
                raise ConfigError(f"{where}: {path}: {error}") from None
        password: str | Path | None = unquote(url.password) if url.password else None
        if "password_file" in address.options:
            if password:
                raise ConfigError(f"{where} has a password and a password_file: take one out")
            password = Path(address.options["password_file"])
            try:
                _read_password(password)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{where}: password_file={password}: {error}") from None
        return cls(
            label=str(address),
            where=(url.hostname, url.port or _PORT) if url.hostname else path,
            tls=_tls_context(address) if is_tls else None,
            user=unquote(url.username or ""),
            password=password,
            database=database,
        )

    def connect(self, deadline: Deadline) -> RespConnection:
        """Open a connection, and say who asks. Raises: TierError."""
        connection = RespConnection(self._reach(deadline), self.label)
        try:
            self._introduce(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _reach(self, deadline: Deadline) -> socket.socket:
        if isinstance(self.where, str):
            return self._open(socket.AF_UNIX, self.where, deadline)
        try:
            found = socket.getaddrinfo(*self.where, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise TierError(f"{self.label}: {error}") from None
        for family, _, _, _, where in found[:-1]:
            try:
                return self._open(family, where, deadline)
            except TierError:
                deadline.check(self.label)
        return self._open(found[-1][0], found[-1][4], deadline)

    def _open(self, family: int, where: Any, deadline: Deadline) -> socket.socket:
        if not (left_s := deadline.left_s):
            raise TierError(f"{self.label}: cannot be reached: out of time")
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            stream.settimeout(left_s)  # … of connecting, and of TLS's handshake
            stream.connect(where)
            if family != socket.AF_UNIX:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is None:
                return stream
            return self.tls.wrap_socket(stream, server_hostname=self.where[0])
        except OSError as error:
            stream.close()
            told = "out of time" if isinstance(error, TimeoutError) else error.strerror or error
            raise TierError(f"{self.label}: cannot be reached: {told}") from None
        except BaseException:
            stream.close()
            raise

    def _introduce(self, connection: RespConnection, deadline: Deadline) -> None:
        if self.password is not None:
            words = [b"AUTH", *([self.user.encode()] if self.user else []), self._secret()]
            connection.ask(*words, deadline=deadline)
            try:
                connection.read(deadline)
            except ServerRefused as error:  # its text may have the password
                told = MEANINGS.get(error.code, "it does not accept AUTH with a user and password")
                raise TierError(f"{self.label}: {told}") from None
        if self.database:
            connection.ask(b"SELECT", b"%d" % self.database, deadline=deadline)
            connection.read(deadline)

    def _secret(self) -> bytes:
        if isinstance(self.password, Path):
            try:
                return _read_password(self.password)
            except (OSError, ValueError) as error:
                raise TierError(f"{self.label}: password_file={self.password}: {error}") from None
        return (self.password or "").encode()


@final
class ConnectionPool:
    """Connections that threads borrow. They are opened when they are needed first."""

    def __init__(self, server: "RedisServer", num_connections: int) -> None:
        self._server = server
        self._vacant = BoundedSemaphore(num_connections)
        self._lock = Lock()  # of what follows
        self._idle: list[RespConnection] = []
        self._is_closed = False

    @contextmanager
    def connection(self, deadline: Deadline) -> Iterator[tuple[RespConnection, bool]]:
        """Lend a connection, and tell whether it is new. One that failed is not lent again.

        Raises: TierError.
        """
        if not self._vacant.acquire(timeout=deadline.left_s):
            raise TierError(f"{self._server.label}: out of time, all connections are in use")
        try:
            self.require_open()
            with self._lock:
                found = self._idle.pop() if self._idle else None
            connection = found or self._server.connect(deadline)
            try:
                yield connection, found is None
            finally:
                self._take_back(connection)
        finally:
            self._vacant.release()

    def require_open(self) -> None:
        """Raise TierError after ``close``."""
        if self._is_closed:
            raise TierError(f"{self._server.label}: closed")

    def close(self) -> None:
        """Close all that is idle now, and the others when they come back."""
        with self._lock:
            self._is_closed = True
            self._close_idle()

    def _take_back(self, connection: RespConnection) -> None:
        with self._lock:
            if connection.is_idle and not self._is_closed:
                self._idle.append(connection)
                return
            connection.close()
            self._close_idle()  # what has happened to this one may have happened to them

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _read_password(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_LONGEST_PASSWORD_BYTES + 1)
    if len(data) > _LONGEST_PASSWORD_BYTES:
        raise ValueError(f"more than {_LONGEST_PASSWORD_BYTES:,} bytes")
    return data.rstrip(b"\r\n")


def _tls_context(address: TierAddress) -> ssl.SSLContext:
    options = address.options
    verify = options.get("verify", "full")
    if verify not in _VERIFY:
        raise ConfigError(f"kv_tier={address}: verify={verify!r}: known: {', '.join(_VERIFY)}")
    if "key" in options and "cert" not in options:
        raise ConfigError(f"kv_tier={address}: key={options['key']} needs cert, its certificate")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        context.check_hostname = False  # before a mode that does not go with it
        context.verify_mode, context.check_hostname = _VERIFY[verify]
        if "cert" in options:  # the password: OpenSSL would ask the terminal for it
            context.load_cert_chain(options["cert"], options.get("key"), password="")
    except OSError as error:
        files = ", ".join(f"{name}={options[name]}" for name in _TLS_FILES if name in options)
        raise ConfigError(f"kv_tier={address}: {files}: {error.strerror or error}") from None
    return context


def _parse_database(text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ValueError("a database is a number, such as 0")
    return int(text)
