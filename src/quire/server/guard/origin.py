"""Which web pages may ask: a browser carries any page's requests to a server on this machine.

A page of another origin is refused, unless ``allowed_origins`` names it: its answer would not be
shown to it, but the work would be done. And a server that listens at loopback without keys is only
asked by loopback's names: a page whose name was made to point here (DNS rebinding) says another.
"""

from collections.abc import Iterable, Mapping
from typing import final
from urllib.parse import urlsplit

from quire.config.keys import is_loopback
from quire.server.wire.errors import Refused


@final
class Origins:
    """``is_private``: there are no keys, and no client is meant to come from elsewhere."""

    def __init__(self, allowed: Iterable[str], *, is_private: bool) -> None:
        self._allowed = {origin.rstrip("/").lower() for origin in allowed}
        self._hosts = {_host(origin) for origin in self._allowed}
        self._is_private = is_private

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises: Refused (403) naming the option."""
        host = headers.get("host", "").lower()
        if self._is_private and host not in self._hosts and not _is_loopback(host):
            raise Refused(
                403,
                f"this server listens at loopback without a key, and is not asked as "
                f"{host[:100]!r}: set api_key, or name the origin in allowed_origins",
                code="unknown_host",
            )
        origin = headers.get("origin", "").lower()
        if not origin or "*" in self._allowed or origin in self._allowed:
            return
        if _host(origin) != host:
            raise Refused(
                403,
                f"pages of {origin[:100]!r} may not ask: name it in allowed_origins",
                code="unknown_origin",
            )


def _host(origin: str) -> str:
    """With the port, if one is said; nothing of what is no origin."""
    return origin.partition("://")[2]


def _is_loopback(host: str) -> bool:
    """Of a Host header, with or without a port. None at all is HTTP/1.0's way: no browser's."""
    try:
        return not host or is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
