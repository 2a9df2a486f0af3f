"""API keys and web pages: who asks, and what the caller may reach.

Each key is a tenant with a prefix cache of its own; an admin key is more than that. A caller's key
is compared with the digests of all keys, in time that depends on none of them: a clock tells
neither where two keys differ, nor which one it is.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Literal, TypeAlias, final
from urllib.parse import urlsplit

from quire.config.keys import is_loopback
from quire.kv import PrefixKeys
from quire.server.wire.error_responses import Refused

# -- keys and tenants ------------------------------------------------------------------------------


# What a route needs: nothing; a key, if the server has any; a key that sees what all keys do; an
# admin key.
Access: TypeAlias = Literal["open", "key", "all", "admin"]

_SALT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of a key: its number from 1, or 0 without a key."""

    number: int
    salt: str
    is_admin: bool = False
    sees_all: bool = False  # what concerns other keys too

    def keys(self, cache_salt: str | None) -> PrefixKeys:
        """Return with whom its prefixes may be shared: with itself, and less with a salt.

        A salt is the caller's secret within its own cache; it cannot reach into another's.
        """
        salt = _digest(cache_salt.encode()).hex() if cache_salt else ""
        return PrefixKeys(tenant=self.salt, salt=salt)

    def session(self, name: str) -> str:
        """Return what stands for the caller's name of a conversation, and for no other caller's."""
        return _digest(f"{self.salt}\0{name}".encode(errors="surrogatepass")).hex()


UNKNOWN = Caller(number=0, salt="")


@final
class Keys:
    """The keys that a server knows. An admin key does all that another key does, and may be one of
    ``keys`` too.

    Without ``keys`` a caller needs none; without admin keys besides, each caller is administrator.
    """

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        admins = dict.fromkeys(_digest(key.encode()) for key in admin_keys)
        clients = dict.fromkeys(_digest(key.encode()) for key in keys)
        self._has_clients, self._has_admins = bool(clients), bool(admins)
        self._digests = list(admins | clients)
        self._callers = [
            Caller(
                number=number,
                salt=_digest(b"tenant\0" + digest).hex()[: 2 * _SALT_BYTES],
                is_admin=digest in admins,
                sees_all=digest in admins or len(self._digests) == 1,
            )
            for number, digest in enumerate(self._digests, 1)
        ]
        is_open = not self._digests
        self._without = Caller(number=0, salt="", is_admin=is_open, sees_all=is_open)

    def need(self, access: Access) -> bool:
        """Return whether a caller without a key is refused."""
        if access == "open":
            return False
        return self._has_clients or (access != "key" and self._has_admins)

    def caller(self, headers: Mapping[str, str], access: Access = "key") -> Caller:
        """Find the caller of a request. Raises: Refused (401 without a known key, 403 if the key
        does not reach so far).
        """
        digest = _digest(_presented(headers).encode(errors="surrogateescape"))
        matches = [compare_digest(digest, known) for known in self._digests]
        found = [caller for caller, matched in zip(self._callers, matches, strict=True) if matched]
        caller = found[0] if found else self._without
        if not found and self.need(access):
            kind = "admin" if access == "admin" else "API"
            raise Refused(
                401,
                f"an {kind} key is needed: send it as Authorization: Bearer KEY, or as x-api-key",
                code="invalid_api_key",
            )
        if (access == "admin" and not caller.is_admin) or (access == "all" and not caller.sees_all):
            raise Refused(403, self._too_little(access), code="admin_key_needed")
        return caller

    def _too_little(self, access: Access) -> str:
        needed = "this needs an admin key, and the one that was sent is a client's"
        if not self._has_admins:
            needed = "this needs an admin key, and the server has none: start it with "
            needed += "--admin-api-key"
        if access == "all":
            needed += "; --unguarded-metrics opens /metrics to all who can reach it"
        return needed


def _presented(headers: Mapping[str, str]) -> str:
    """Return the key as OpenAI's clients send it, or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# -- web pages -------------------------------------------------------------------------------------


@final
class Origins:
    """The web pages that may ask: a browser carries any page's requests to a server on this
    machine.

    A page of another origin is refused unless ``allowed`` names it: its answer would not be shown
    to it, but the work would be done. A private server, which has no key and serves this machine
    alone, only answers to loopback's names: a page whose name was made to point here (DNS
    rebinding) says another.
    """

    def __init__(self, allowed: Iterable[str], *, is_private: bool) -> None:
        self._allowed = {origin.rstrip("/").lower() for origin in allowed}
        self._hosts = {_host(origin) for origin in self._allowed}
        self._is_private = is_private

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse a page or a host name that may not ask. Raises: Refused (403)
        naming the option.
        """
        host = headers.get("host", "").lower()
        if self._is_private and host not in self._hosts and not _is_loopback(host):
            raise Refused(
                403,
                f"this server listens on loopback without a key, and does not answer to the host "
                f"name {host[:100]!r}: set api_key, or name the origin in allowed_origins",
                code="unknown_host",
            )
        origin = headers.get("origin", "").lower()
        if not origin or "*" in self._allowed or origin in self._allowed:
            return
        if _host(origin) != host:
            raise Refused(
                403,
                f"pages of {origin[:100]!r} may not use this server: name it in allowed_origins",
                code="unknown_origin",
            )


def _host(origin: str) -> str:
    """Return host and port of an origin; nothing if it is no origin."""
    return origin.partition("://")[2]


def _is_loopback(host: str) -> bool:
    """Return whether a Host header, with or without a port, is loopback's. HTTP/1.0 has none."""
    try:
        return not host or is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
