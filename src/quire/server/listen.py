"""Where the server listens: sockets that are bound before a model is loaded.

So a port in use, or a bad certificate, is reported at once and not after minutes of loading.
"""

import errno
import os
import resource
import socket
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import ServerConfig
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

_OPEN_FILES = 65_536


@dataclass(slots=True)
class Listeners:
    """Bound sockets. They let no client in before the server listens on them."""

    config: ServerConfig
    sockets: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Return where to ask; for a Unix socket its path."""
        if self.config.uds is not None:
            return f"unix:{self.config.uds}"
        scheme = "http" if self.config.ssl_certfile is None else "https"
        host, port = self.config.host, self.sockets[0].getsockname()[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def close(self) -> None:
        """Close the sockets and remove a Unix socket's name."""
        for each in self.sockets:
            each.close()
        if self.sockets and self.config.uds is not None:
            with suppress(OSError):
                Path(self.config.uds).unlink()
        self.sockets = []


def open_listeners(config: ServerConfig) -> Listeners:
    """Bind the sockets of a config. Raises: ConfigError naming the option to change."""
    _check_certificate(config)
    if config.uds is not None:
        return Listeners(config, [_unix_socket(config.uds, int(config.uds_mode, 8))])
    return Listeners(config, _tcp_sockets(config.host, config.port))


def allow_open_files() -> None:
    """Raise the limit of open files as far as the system lets; many shells begin with 1,024.

    Each client is a file. With none left no client is let in until another leaves.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Bind one socket for each address of a host name, all on one port."""
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host={host!r} is not an address of this machine ({error}): 127.0.0.1 is for programs "
            "on it, 0.0.0.0 for all clients that reach it"
        ) from error
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, found[:2]) for family, *_, found in found):
            own = _bind(family, str(address[0]), port)
            if own is not None:
                sockets.append(own)
                port = port or own.getsockname()[1]
        if not sockets:
            raise ConfigError(f"host={host!r} has no address to listen on")
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket | None:
    """Bind one socket; return None for an address family that this machine lacks."""
    try:
        # asyncio sets TCP_NODELAY only where the protocol is given; without it each token of a
        # stream waits 40 ms for the acknowledgement of the one before.
        own = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError:
        return None
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        own.bind((address, port))
        return own
    except OSError as error:
        own.close()
        if error.errno == errno.EADDRNOTAVAIL and family == socket.AF_INET6:
            return None
        raise refused(f"host={address} port={port}", error) from error


def refused(where: str, error: OSError) -> ConfigError:
    """Return the error for an address that cannot be bound, with the reason."""
    advice = {
        errno.EADDRINUSE: "another process listens there: stop it, or choose another --port "
        "(0 takes a free one)",
        errno.EACCES: "ports below 1024 are for root: choose another --port",
        errno.EADDRNOTAVAIL: "this machine has no such address: 127.0.0.1 is for programs on it, "
        "0.0.0.0 for all clients that reach it",
    }
    reason = advice.get(error.errno or 0, error.strerror or str(error))
    return ConfigError(f"{where} cannot be bound: {reason}")


def _unix_socket(path: str, mode: int) -> socket.socket:
    """Bind a path where nothing is, or where a server that has ended left its socket."""
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_way(path)
        with suppress(OSError):  # on Linux the path gets this mode, less the umask
            os.fchmod(own.fileno(), mode)
        own.bind(path)
        Path(path).chmod(mode)
        return own
    except OSError as error:
        own.close()
        raise ConfigError(f"uds={path!r} cannot be bound: {error.strerror}") from error
    except ConfigError:
        own.close()
        raise


def _make_way(path: str) -> None:
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"uds={path!r} exists and is not a socket: remove it, or choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError:
            Path(path).unlink()
            return
    raise ConfigError(f"uds={path!r} is in use: another process listens on it")


def _check_certificate(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without a password OpenSSL would ask for an encrypted key's at the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile={config.ssl_certfile!r} with ssl_keyfile={config.ssl_keyfile!r} is no "
            f"certificate with its key: {error}"
        ) from error


# -- what it says of itself ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """What the server says of itself when it starts."""

    url: str
    model: str  # the name for clients
    strategy: str
    kv_bytes: int
    kv_tokens: int  # that these bytes hold
    kv_bound: str  # the limit that decided kv_bytes
    max_model_len: int
    num_longest: float  # sequences of that length that fit
    max_num_seqs: int
    tiers: tuple[str, ...]  # their names, the nearest first
    num_keys: int
    has_admin_key: bool
    is_local: bool

    @property
    def is_open(self) -> bool:
        """Return whether clients of other machines may ask without a key."""
        return not self.is_local and not self.num_keys


def start_up(llm: "AsyncLLM", config: ServerConfig, url: str) -> StartUp:
    """Return the facts of an engine and how it is served."""
    own = llm.llm
    kv_bytes = own.ledger.kv_bytes
    return StartUp(
        url=url,
        model=config.served_model_name[0] if config.served_model_name else own.name,
        strategy=own.config.cache,
        kv_bytes=kv_bytes,
        kv_tokens=kv_bytes // max(1, own.spec.bytes_per_token),
        kv_bound=own.ledger.bound,
        max_model_len=own.max_model_len,
        num_longest=kv_bytes / max(1, own.spec.bytes_for(own.max_model_len)),
        max_num_seqs=own.config.max_num_seqs,
        tiers=tuple(tier.name for tier in own.tiers.tiers) if own.tiers is not None else (),
        num_keys=len(set(config.api_key)),
        has_admin_key=bool(config.admin_api_key),
        is_local=config.is_local,
    )
