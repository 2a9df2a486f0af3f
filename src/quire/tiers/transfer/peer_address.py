"""``PeerAddress``: where a server listens for its peers, and where a peer is reached."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from quire.errors import ConfigError

MOST_PORT = 65_535

_UNIX = "unix:"
_TCP = re.compile(r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+)):(?P<port>[0-9]{1,5})")
_LONGEST_PATH_BYTES = 107  # of a Unix socket
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A Unix socket's path, or a host and a port: equal addresses are equal texts."""

    path: str  # of a Unix socket; empty for TCP
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: object) -> "PeerAddress":
        """Read ``unix:/path`` or ``tcp://host:port``. Raises: ConfigError."""
        given = text if isinstance(text, str) else ""
        if given.startswith(_UNIX):
            path = given.removeprefix(_UNIX)
            is_short = len(path.encode(errors="replace")) <= _LONGEST_PATH_BYTES
            if is_short and PurePosixPath(path).is_absolute() and "\0" not in path:
                return cls(path)
        elif (found := _TCP.fullmatch(given)) and int(found["port"]) <= MOST_PORT:
            return cls("", (found["v6"] or found["name"]).lower(), int(found["port"]))
        raise ConfigError(
            f"{str(text)[:_SHOWN_CHARACTERS]!r} is no address of a peer: it must be unix:/PATH of "
            f"up to {_LONGEST_PATH_BYTES} bytes, or tcp://HOST:PORT with a port up to "
            f"{MOST_PORT:,}"
        )

    @classmethod
    def told(cls, host: str, port: int) -> "PeerAddress":
        """Read vLLM's ``remote_host`` and ``remote_port``. Raises: ConfigError.

        A host that begins with ``unix:`` is the path of a socket, and has no port.
        """
        if host.startswith(_UNIX):
            return cls.parse(host)
        return cls.parse(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")

    @property
    def is_unix(self) -> bool:
        """Return whether it is a path of this machine's file system."""
        return bool(self.path)

    @property
    def remote_host(self) -> str:
        """Return what ``told`` reads as the host."""
        return f"{_UNIX}{self.path}" if self.path else self.host

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
