"""Parse API keys, and choose the key for a server."""

import os
import re
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from urllib.parse import SplitResult, urlsplit

from quire.errors import ConfigError

IS_KEY = re.compile(r"[!-~]+")  # printable ASCII without spaces, which a header carries unchanged
_OPENAI_URL = "https://api.openai.com/v1"
_PORTS = MappingProxyType({"http": 80, "https": 443})


def parse_keys(text: str, option: str = "api_key") -> tuple[str, ...]:
    """Parse a key, or @ and the path of a file with one key per line and # before comments.

    Raises: ConfigError, which may show the path and never a key.
    """
    if not text.startswith("@"):
        return (text,)
    path = Path(text[1:]).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{option}: @{path} cannot be read: {reason}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{option}: @{path} has no key: write one per line")
    return keys


def key_for(url: str, api_key: str | None = None) -> str | None:
    """Return the key for a server: ``api_key``, or one of the environment.

    A key of the environment goes to its own server only: ``QUIRE_API_KEY`` to this machine and to
    ``QUIRE_URL``, ``OPENAI_API_KEY`` to ``OPENAI_BASE_URL`` (default: OpenAI's server). Of several
    keys in a file it is the first one.

    Raises: ConfigError for a key that no header can carry, without showing the key.
    """
    source, text = ("--api-key", api_key) if api_key else _own_key(url)
    if not text:
        return None
    key = parse_keys(text)[0]
    if not IS_KEY.fullmatch(key):
        raise ConfigError(f"{source} must be printable ASCII without spaces")
    return key


def is_loopback(name: str) -> bool:
    """Return whether a host is this machine: ``localhost``, ``*.localhost``, a loopback address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:  # another name
        return False


def _own_key(url: str) -> tuple[str, str]:
    """Return the variable with the key for this server, and the key; empty if there is none."""
    asked = _parts(url)
    homes = {
        "QUIRE_API_KEY": os.environ.get("QUIRE_URL", ""),
        "OPENAI_API_KEY": os.environ.get("OPENAI_BASE_URL") or _OPENAI_URL,
    }
    for variable, home in homes.items():
        is_here = url.startswith("unix:") or is_loopback(asked.hostname or "")
        is_ours = variable == "QUIRE_API_KEY" and is_here
        if os.environ.get(variable) and (is_ours or _origin(asked) == _origin(_parts(home))):
            return variable, os.environ[variable]
    return "", ""


def _parts(url: str) -> SplitResult:
    return urlsplit(url if "//" in url else f"http://{url}")


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port, which are equal for addresses of one server."""
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
