"""A record: one block of one group as it lies in a tier, with all that says what it is.

    public header   64 B   magic, version, flags, sizes, fingerprint, group
    private header         parent, chain, extras, parts, token ids
    checks                 an xxh3-128 of each part; or the nonce and the tag of a seal
    padding                to a multiple of 64 B
    payload                the parts, one behind the other

A reader knows what it looks for, so it makes the header that a right record has, and compares all
of it, byte for byte. Nothing in a record is decoded before a byte reaches a slot. The name under
which a tier keeps a record is a hash of the same header.

With a key, records are *sealed*: the private header is left out, the payload is encrypted by
AES-256-GCM with the whole header as associated data, and names are HMACs. Who can read or write the
tier then learns no token and cannot plant a record.
"""

import hashlib
import hmac
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, final, get_args

import numpy as np
from xxhash import xxh3_128_digest

from quire.errors import ConfigError
from quire.kv.prefix_index import BlockIdentity
from quire.tiers.tier import Name
from quire.units import align_up

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VERSION = 1
MAGIC = b"QUIRE\0KV"

_SEALED = 1  # a flag
_PUBLIC = struct.Struct("<8sHHIQ32sII")  # magic … block size: 64 bytes
_PRIVATE = struct.Struct("<32s32s32sII")  # parent, chain, extras, parts, token ids
_PART = struct.Struct("<I16s12s4IQ")  # layer, dtype, order, shape (0 behind its end), bytes
_ALIGNMENT = 64
_CHECK_BYTES = 16  # of a part
_NONCE_BYTES, _TAG_BYTES = 12, 16
_KEY_BYTES = 32
_IS_NAME = re.compile(rb"[A-Za-z0-9_ ]+")  # of a dtype or an order

# Why a record is no use. The words are labels of a metric.
BadReason: TypeAlias = Literal["size", "magic", "version", "fingerprint", "header", "checksum"]
BAD_REASONS: tuple[BadReason, ...] = get_args(BadReason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a block has in one layer, or in all layers that lie together."""

    layer: int  # the first of them
    dtype: str  # of torch: "bfloat16"
    order: str  # in which its bytes lie: another one is another record
    shape: tuple[int, ...]  # at most four
    num_bytes: int  # with scales, where the dtype has some

    def packed(self) -> bytes:
        """Return the part's description as it stands in a header."""
        shape = (*self.shape, 0, 0, 0, 0)[:4]
        dtype, order = self.dtype.encode(), self.order.encode()
        assert max(len(dtype) - 4, len(order)) <= 12, "a name that would be cut"
        return _PART.pack(self.layer, dtype, order, *shape, self.num_bytes)


@final
class RecordFormat:
    """The records of one group: their sizes, headers and names."""

    def __init__(
        self,
        fingerprint: bytes,  # 32 bytes: what gives the payload its meaning
        group: int,
        block_size: int,  # tokens
        parts: Sequence[Part],
        seal: "Seal",
    ) -> None:
        self.parts = tuple(parts)
        self._block_size, self._seal = block_size, seal
        self._extras = b"", seal.digest(b"")  # the latest, and their digest
        self.payload_bytes = sum(part.num_bytes for part in parts)
        self._sizes = [part.num_bytes for part in parts]
        self._check_bytes = seal.check_bytes(len(parts))
        known_bytes = _PUBLIC.size + _PRIVATE.size + _PART.size * len(parts) + 4 * block_size
        self.header_bytes = align_up(known_bytes + self._check_bytes, _ALIGNMENT)
        self.num_bytes = self.header_bytes + self.payload_bytes
        self._public = _PUBLIC.pack(
            MAGIC,
            VERSION,
            seal.flags,
            self.header_bytes,
            self.payload_bytes,
            fingerprint,
            group,
            block_size,
        )
        self._parts = b"".join(part.packed() for part in parts)

    def header(self, block: BlockIdentity) -> bytes:
        """Make the header of the block's record, without its checks. Raises: ValueError."""
        tokens = np.ascontiguousarray(block.token_ids, np.dtype("<i4"))
        if len(tokens) != self._block_size:
            raise ValueError(f"{len(tokens)} token ids in a block of {self._block_size}")
        private = _PRIVATE.pack(
            block.parent.ljust(32, b"\0"),
            block.chain,
            self._digest_of(block.extras),
            len(self.parts),
            len(tokens),
        )
        return self._public + private + self._parts + tokens.tobytes()

    def _digest_of(self, extras: bytes) -> bytes:
        known, digest = self._extras  # those of the block before, as a rule
        if extras != known:
            digest = self._seal.digest(extras)
            self._extras = extras, digest
        return digest

    def name(self, header: bytes) -> Name:
        """Return the name under which a tier keeps the record of this header."""
        return self._seal.digest(header)

    def payload(self, record: memoryview) -> memoryview:
        """Return the part of a record's buffer u8[num_bytes] that is the payload."""
        return record[self.header_bytes :]

    def finish(self, record: memoryview, header: bytes) -> None:
        """Write the header and the checks before a payload that is in its place, and seal it."""
        checks = self._seal.close(header, self.payload(record), self._sizes)
        shown = self._seal.shown(header, _PUBLIC.size) + checks
        record[: self.header_bytes] = shown.ljust(self.header_bytes, b"\0")

    def flaw(self, record: memoryview, header: bytes) -> BadReason | None:
        """Check a record against the header that it should have, and open its seal.

        Returns: why it is no use, or None. Only then the payload may be read.
        """
        if len(record) != self.num_bytes:
            return "size"
        shown = self._seal.shown(header, _PUBLIC.size)
        written = bytes(record[: self.header_bytes])  # a view would be compared byte by byte
        if not written.startswith(shown):
            return self._difference(written[: _PUBLIC.size])
        end = len(shown) + self._check_bytes
        checks = written[len(shown) : end]
        if written.count(0, end) != self.header_bytes - end:
            return "header"
        if not self._seal.open(header, self.payload(record), self._sizes, checks):
            return "checksum"
        return None

    def _difference(self, public: bytes) -> BadReason:
        magic, version, _, _, _, fingerprint, _, _ = _PUBLIC.unpack(public)
        _, _, _, _, _, expected, _, _ = _PUBLIC.unpack(self._public)
        if magic != MAGIC:
            return "magic"
        if version != VERSION:
            return "version"
        return "fingerprint" if fingerprint != expected else "header"


# -- what a stranger's bytes say -------------------------------------------------------------------

MOST_HEADER_BYTES = 1 << 20  # that a file is believed to have


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """What a record's own bytes say of it: nothing of it is proved."""

    is_sealed: bool  # then all that follows the block size is empty
    header_bytes: int
    payload_bytes: int
    fingerprint: bytes
    group: int
    block_size: int  # tokens
    parent: bytes = b""
    chain: bytes = b""
    parts: tuple[Part, ...] = ()
    token_ids: tuple[int, ...] = ()
    name: Name = b""
    checks: tuple[bytes, ...] = ()  # an xxh3-128 of each part


def read_header(data: bytes, num_bytes: int) -> RecordHeader | BadReason:
    """Read the beginning of a file of ``num_bytes`` that should be a record.

    No size in it is trusted. Returns: what it says, or why it is none; "size" also where ``data``
    ends within the header, which has at most ``MOST_HEADER_BYTES``.
    """
    if len(data) < _PUBLIC.size:
        return "size"
    public = _PUBLIC.unpack_from(data)
    magic, version, flags, header_bytes, payload_bytes, fingerprint, group, block_size = public
    if magic != MAGIC:
        return "magic"
    if version != VERSION:
        return "version"
    if header_bytes + payload_bytes != num_bytes or not _PUBLIC.size <= header_bytes <= len(data):
        return "size"
    if flags & ~_SEALED or header_bytes % _ALIGNMENT or header_bytes > MOST_HEADER_BYTES:
        return "header"
    if flags & _SEALED:
        return RecordHeader(
            is_sealed=True,
            header_bytes=header_bytes,
            payload_bytes=payload_bytes,
            fingerprint=fingerprint,
            group=group,
            block_size=block_size,
        )
    at = _PUBLIC.size + _PRIVATE.size
    if header_bytes < at:
        return "header"
    parent, chain, _, num_parts, num_tokens = _PRIVATE.unpack_from(data, _PUBLIC.size)
    known = at + _PART.size * num_parts + 4 * num_tokens
    end = known + _CHECK_BYTES * num_parts
    if num_tokens != block_size or align_up(end, _ALIGNMENT) != header_bytes:
        return "header"
    parts = _read_parts(data[at : at + _PART.size * num_parts])
    if parts is None or sum(part.num_bytes for part in parts) != payload_bytes:
        return "header"
    if any(data[end:header_bytes]):
        return "header"
    return RecordHeader(
        is_sealed=False,
        header_bytes=header_bytes,
        payload_bytes=payload_bytes,
        fingerprint=fingerprint,
        group=group,
        block_size=block_size,
        parent=parent,
        chain=chain,
        parts=parts,
        token_ids=struct.unpack_from(f"<{num_tokens}i", data, known - 4 * num_tokens),
        name=Checksums().digest(data[:known]),
        checks=tuple(data[n : n + _CHECK_BYTES] for n in range(known, end, _CHECK_BYTES)),
    )


def _read_parts(data: bytes) -> tuple[Part, ...] | None:
    parts = []
    for layer, dtype, order, *shape, num_bytes in _PART.iter_unpack(data):
        while shape and not shape[-1]:
            shape.pop()
        names = [each.rstrip(b"\0") for each in (dtype, order)]
        if not all(_IS_NAME.fullmatch(name) for name in names):
            return None
        dtype_name, order_name = (name.decode("ascii") for name in names)
        parts.append(
            Part(
                layer=layer,
                dtype=dtype_name,
                order=order_name,
                shape=tuple(shape),
                num_bytes=num_bytes,
            )
        )
    return tuple(parts)


# -- seals -----------------------------------------------------------------------------------------


class Seal(Protocol):
    """What tells that a record's payload is the one that was written."""

    @property
    def flags(self) -> int:
        """Return the flags of the public header."""
        ...

    def check_bytes(self, num_parts: int) -> int:
        """Return the bytes that follow the header."""
        ...

    def digest(self, data: bytes) -> bytes:
        """Return a hash of 32 bytes."""
        ...

    def shown(self, header: bytes, num_public: int) -> bytes:
        """Return what of a header is written."""
        ...

    def close(self, header: bytes, payload: memoryview, sizes: Sequence[int]) -> bytes:
        """Return the checks of a payload, whose parts have these sizes. It may be encrypted."""
        ...

    def open(self, header: bytes, payload: memoryview, sizes: Sequence[int], checks: bytes) -> bool:
        """Return whether the payload is what was written. It is decrypted in its place."""
        ...


@final
class Checksums:
    """No key: a checksum of each part, for a tier whose writers are trusted."""

    flags = 0

    def check_bytes(self, num_parts: int) -> int:
        return _CHECK_BYTES * num_parts

    def digest(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    def shown(self, header: bytes, num_public: int) -> bytes:
        return header

    def close(self, header: bytes, payload: memoryview, sizes: Sequence[int]) -> bytes:
        ends = list(accumulate(sizes, initial=0))
        return b"".join([xxh3_128_digest(payload[a:b]) for a, b in pairwise(ends)])

    def open(self, header: bytes, payload: memoryview, sizes: Sequence[int], checks: bytes) -> bool:
        return self.close(header, payload, sizes) == checks


@final
class KeyedSeal:
    """A key that the tier's users share: names, token ids and payloads are hidden from others.

    Each header has a key of its own for AES-GCM, so that the random nonces of many records never
    meet under one key.
    """

    flags = _SEALED

    def __init__(self, key: bytes) -> None:
        """``key``: at least 32 bytes. Raises: ConfigError without the package ``cryptography``."""
        if find_spec("cryptography") is None:
            raise ConfigError(
                "kv_tier_key needs the package cryptography: pip install 'quire-kv[tiers]'"
            )
        if len(key) < _KEY_BYTES:
            raise ConfigError(f"kv_tier_key has {len(key)} bytes: it needs at least {_KEY_BYTES}")
        self._names = _derived(key, b"names")
        self._payloads = _derived(key, b"payloads")
        self.peers_key = _derived(key, b"peers")  # by which servers know each other

    def check_bytes(self, num_parts: int) -> int:
        return _NONCE_BYTES + _TAG_BYTES

    def digest(self, data: bytes) -> bytes:
        return hmac.digest(self._names, data, "sha256")

    def shown(self, header: bytes, num_public: int) -> bytes:
        return header[:num_public].ljust(len(header), b"\0")

    def close(self, header: bytes, payload: memoryview, sizes: Sequence[int]) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = memoryview(self._cipher(header).encrypt(nonce, payload, header))
        payload[:] = sealed[:-_TAG_BYTES]
        return nonce + sealed[-_TAG_BYTES:]

    def open(self, header: bytes, payload: memoryview, sizes: Sequence[int], checks: bytes) -> bool:
        from cryptography.exceptions import InvalidTag

        nonce, tag = checks[:_NONCE_BYTES], checks[_NONCE_BYTES:]
        try:
            payload[:] = self._cipher(header).decrypt(nonce, b"".join((payload, tag)), header)
        except InvalidTag:
            return False
        return True

    def _cipher(self, header: bytes) -> "AESGCM":
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hmac.digest(self._payloads, header, "sha256"))


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"quire kv tier " + purpose, "sha256")
