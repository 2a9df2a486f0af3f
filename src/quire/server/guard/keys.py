"""API keys. Each one is a tenant, with a prefix cache of its own.

Keys are compared by their digests, all of them whatever the first ones say, in time that depends on
none: neither where two keys differ, nor which one it is, can be read off a clock.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import final

from quire.blocks import PrefixKeys
from quire.server.wire.errors import Refused

_SALT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: a key's number, from 0, or the one whom a server without keys knows."""

    number: int
    salt: str

    def keys(self, cache_salt: str | None) -> PrefixKeys:
        """With whom its prefixes may be shared: with none but itself, and less with a salt.

        A salt is the caller's secret within its own cache; it cannot reach into another's.
        """
        if not cache_salt:
            return PrefixKeys(salt=self.salt)
        return PrefixKeys(salt=_digest(f"{self.salt}\0{cache_salt}".encode()).hex())


NOBODY_ELSE = Caller(number=0, salt="")


@final
class Keys:
    """The keys that a server knows; without any, whoever asks is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._callers = [
            Caller(number=number, salt=_digest(b"tenant\0" + digest).hex()[: 2 * _SALT_BYTES])
            for number, digest in enumerate(self._digests)
        ]

    def __len__(self) -> int:
        return len(self._digests)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Raises: Refused (401)."""
        if not self._digests:
            return NOBODY_ELSE
        digest = _digest(_presented(headers).encode(errors="surrogateescape"))
        matches = [compare_digest(digest, known) for known in self._digests]
        found = [caller for caller, matched in zip(self._callers, matches, strict=True) if matched]
        if not found:
            raise Refused(
                401,
                "an API key is needed: send it as Authorization: Bearer KEY, or as x-api-key",
                code="invalid_api_key",
            )
        return found[0]


def _presented(headers: Mapping[str, str]) -> str:
    """As OpenAI's clients send a key, or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
