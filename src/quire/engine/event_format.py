"""KV-cache events as bytes: the format of vLLM 0.33, which routers read.

A message has three frames: the topic, the batch's number (8 bytes, big-endian, from 0) and the
batch in msgpack. A batch is an array (seconds, events, data-parallel rank), an event is a map whose
``type`` says which of three it is. Fields without a default are always there, others where they
are not None.

A block is named by 64 bits of its chained SHA-256, as vLLM does. Where the chain begins with a
tenant, which is made from an API key, or with a salt, the hash would tell a right guess at those
from a wrong one. Such a block is named by a keyed hash instead, and so is the salt; the key is the
encoder's own, or a fleet's. A tenant is left out: no reader could compare it.

Source: vLLM 0.33.0, vllm/distributed/kv_events.py (names, order and meaning of the fields).
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeAlias, final

import msgspec

from quire.kv.prefix_index import (
    SECRETS,
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    Extra,
)
from quire.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    Group,
    LatentAttention,
    RecurrentState,
    SlidingWindow,
)

SEQUENCE_BYTES = 8
NO_MORE = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # the number behind a replay's last

_HASH_BYTES = 8
KEY_BYTES = 32
_SALT_MARK_BYTES = 16
_RANK = 0  # one engine has all the blocks
_PLACE = "@"  # between an image's id and its place in a block

_KINDS: Mapping[type, str] = MappingProxyType(
    {
        FullAttention: "full_attention",
        SlidingWindow: "sliding_window",
        ChunkedAttention: "chunked_local_attention",
        LatentAttention: "mla_attention",
        RecurrentState: "mamba",
        CrossAttention: "cross_attention",
    }
)
_OTHER_KIND = "unknown"

ExtraKeys: TypeAlias = tuple[Any, ...] | None  # of one block


# -- messages --------------------------------------------------------------------------------------


class StoredBlocks(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    """Blocks that are found from now on, each the next one of a chain."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None  # of the first one's parent; None: it has none
    token_ids: list[int]  # of all of them
    block_size: int  # tokens of one
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys] | None = None  # of each: adapter, (image, place), salt's mark
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None  # tokens
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class RemovedBlocks(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """Blocks that are found no longer."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedBlocks(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    """No block is found any longer."""


WireEvent: TypeAlias = StoredBlocks | RemovedBlocks | ClearedBlocks


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step, or one call between two steps, has changed."""

    ts: float  # seconds since 1970
    events: list[WireEvent]
    data_parallel_rank: int | None = None


def decode_batch(payload: bytes) -> EventBatch:
    """Decode the third frame of a message. Raises: msgspec.DecodeError for other bytes."""
    return msgspec.msgpack.decode(payload, type=EventBatch)


def block_name(digest: bytes, root_keys: Extra, key: bytes) -> int:
    """Return a block's name in events: 64 bits of its hash, keyed where its chain has a secret."""
    if any(tag in SECRETS for tag, _ in root_keys):
        digest = blake2b(digest, key=key, digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest[-_HASH_BYTES:], "big")


# -- from the index to messages --------------------------------------------------------------------


@final
class EventEncoder:
    """Writes the events of one prefix index.

    Two encoders name blocks of a tenant differently, unless they have one ``key``: then who has it,
    too, can tell which of a tenant's prefixes they have, and names stay what they are.
    """

    def __init__(
        self, groups: Sequence[Group], block_size: int, *, key: bytes | None = None
    ) -> None:
        """``groups``: of layers, as events number them; ``block_size``: tokens of a block.

        ``key``: 32 bytes that are kept secret; None: drawn here.
        """
        self._block_size = block_size
        self._kinds = [_KINDS.get(type(group.spec), _OTHER_KIND) for group in groups]
        self._windows = [
            group.spec.window if isinstance(group.spec, SlidingWindow) else None for group in groups
        ]
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._pack = msgspec.msgpack.Encoder()

    def encode(self, at_s: float, events: Iterable[BlockEvent]) -> bytes:
        """Write a batch: the third frame of a message. ``at_s``: seconds since 1970."""
        batch = EventBatch(ts=at_s, events=self.joined(events), data_parallel_rank=_RANK)
        return self._pack.encode(batch)

    def joined(self, events: Iterable[BlockEvent]) -> list[WireEvent]:
        """Write neighbours that belong together as one: a chain's blocks, a group's removals."""
        found: list[WireEvent] = []
        last: WireEvent | None = None
        for event in events:
            new: WireEvent | None
            match event:
                case BlockStored():
                    new = self._stored(event, last)
                case BlockRemoved():
                    new = self._removed(event, last)
                case AllBlocksCleared():
                    new = ClearedBlocks()
            if new is not None:
                found.append(new)
                last = new
        for each in found:
            if isinstance(each, StoredBlocks) and not any(each.extra_keys or ()):
                each.extra_keys = None
        return found

    def _stored(self, event: BlockStored, last: WireEvent | None) -> StoredBlocks | None:
        """Return a new message, or None if the block has joined the last one."""
        number, group = self._number(event.block_hash, event.root_keys), event.group_idx
        parent = event.parent_block_hash
        above = None if parent is None else self._number(parent, event.root_keys)
        extra = self._extra(event) if event.extra_keys or event.root_keys else None
        if (
            isinstance(last, StoredBlocks)
            and above is not None
            and above == last.block_hashes[-1]
            and group == last.group_idx
            and event.medium == last.medium
            and last.extra_keys is not None
        ):
            last.block_hashes.append(number)
            last.token_ids += event.token_ids
            last.extra_keys.append(extra)
            return None
        return StoredBlocks(
            block_hashes=[number],
            parent_block_hash=above,
            token_ids=list(event.token_ids),
            block_size=self._block_size,
            lora_id=None,
            medium=event.medium,
            lora_name=_tagged(event.root_keys, "lora"),
            extra_keys=[extra],
            group_idx=group,
            kv_cache_spec_kind=self._kinds[group],
            kv_cache_spec_sliding_window=self._windows[group],
        )

    def _removed(self, event: BlockRemoved, last: WireEvent | None) -> RemovedBlocks | None:
        number = self._number(event.block_hash, event.root_keys)
        place = event.group_idx, event.medium
        if isinstance(last, RemovedBlocks) and (last.group_idx, last.medium) == place:
            last.block_hashes.append(number)
            return None
        return RemovedBlocks(block_hashes=[number], medium=event.medium, group_idx=event.group_idx)

    def _number(self, digest: bytes, root_keys: Extra) -> int:
        return block_name(digest, root_keys, self._key)

    def _extra(self, event: BlockStored) -> ExtraKeys:
        """Return a block's extra keys, in vLLM's order and without their tags."""
        found: list[Any] = []
        lora, salt = _tagged(event.root_keys, "lora"), _tagged(event.extra_keys, "salt")
        if lora is not None:
            found.append(lora)
        for tag, value in event.extra_keys:
            if tag == "image":
                content_id, _, place = value.rpartition(_PLACE)
                found.append((content_id, int(place)))
        if salt is not None:
            text = salt.encode("utf-8", "surrogatepass")  # of a program, any text
            mark = blake2b(text, key=self._key, digest_size=_SALT_MARK_BYTES)
            found.append(mark.hexdigest())
        return tuple(found) or None


def _tagged(keys: Extra, tag: str) -> str | None:
    """Return the value of the first key with this tag."""
    return next((value for own, value in keys if own == tag), None)
