"""The bytes of events: vLLM's fields in vLLM's order, and no secret among them."""

from dataclasses import replace
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.caches import FULL, LATENT, STATE, chunked, sliding
from quire.engine.event_format import (
    ClearedBlocks,
    EventEncoder,
    RemovedBlocks,
    StoredBlocks,
    WireEvent,
    decode_batch,
)
from quire.kv.prefix_index import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, Extra
from quire.spec import Group, LayerSpec

SIZE = 4
SALT: Extra = (("salt", "a tenant's secret"),)
TENANT: Extra = (("tenant", "made from a key"),)
LORA: Extra = (("lora", "poems-2"),)


def encoder(*specs: LayerSpec) -> EventEncoder:
    groups = [Group(spec=spec, layers=(number,)) for number, spec in enumerate(specs or (FULL,))]
    return EventEncoder(groups, SIZE)


def chain(
    number: int, root: Extra = (), *, images: dict[int, str] | None = None, group: int = 0
) -> list[BlockStored]:
    """So many blocks, one behind the other, of token ids that count."""
    found: list[BlockStored] = []
    above = sha256(repr(root).encode() if root else b"").digest()
    for at in range(number):
        tokens = tuple(range(at * SIZE, (at + 1) * SIZE))
        image = (images or {}).get(at)
        extra = (("image", image),) if image else ()
        digest = sha256(above + repr((extra, tokens)).encode()).digest()
        found.append(
            BlockStored(
                block_hash=digest,
                parent_block_hash=above if at else None,
                token_ids=tokens,
                extra_keys=(*(root if not at else ()), *extra),
                root_keys=root,
                group_idx=group,
            )
        )
        above = digest
    return found


def gone(event: BlockStored) -> BlockRemoved:
    return BlockRemoved(
        block_hash=event.block_hash, root_keys=event.root_keys, group_idx=event.group_idx
    )


def name_of(event: BlockStored | BlockRemoved) -> int:
    return int.from_bytes(event.block_hash[-8:], "big")


def test_a_message_has_vllms_fields_in_vllms_order() -> None:
    """As vLLM 0.33's own structs write them: seven fields always, the others if they say more."""
    first, second = chain(2)
    other = chain(1, group=1)[0]
    own = encoder(FULL, sliding(9))
    payload = own.encode(12.5, [first, second, other, gone(second), AllBlocksCleared()])
    batch = msgspec.msgpack.decode(payload)
    stored = {
        "type": "BlockStored",
        "block_hashes": [name_of(first), name_of(second)],
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3, 4, 5, 6, 7],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    in_window = {
        **stored,
        "block_hashes": [name_of(other)],
        "token_ids": [0, 1, 2, 3],
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 9,
    }
    removed = {
        "type": "BlockRemoved",
        "block_hashes": [name_of(second)],
        "medium": "GPU",
        "group_idx": 0,
    }
    assert batch == [12.5, [stored, in_window, removed, {"type": "AllBlocksCleared"}], 0]
    assert [list(each) for each in batch[1][:2]] == [list(stored), list(in_window)]


def test_copies_in_tiers_are_messages_of_their_own() -> None:
    blocks = chain(2)
    copies = [replace(block, medium="CPU") for block in blocks]
    removed = [replace(gone(block), medium="STORAGE") for block in blocks]
    told = encoder().joined([*blocks, *copies, gone(blocks[0]), *removed])
    assert [(type(each), each.medium, len(each.block_hashes)) for each in told] == [
        (StoredBlocks, "GPU", 2),
        (StoredBlocks, "CPU", 2),
        (RemovedBlocks, "GPU", 1),
        (RemovedBlocks, "STORAGE", 2),
    ]
    assert told[0].block_hashes == told[1].block_hashes == told[3].block_hashes


def test_each_kind_of_group_has_vllms_name() -> None:
    own = encoder(FULL, sliding(9), chunked(8), LATENT, STATE)
    events = [each for group in range(5) for each in chain(1, group=group)]
    assert [each.kv_cache_spec_kind for each in own.joined(events)] == [
        "full_attention",
        "sliding_window",
        "chunked_local_attention",
        "mla_attention",
        "mamba",
    ]


def test_extra_keys_are_vllms_untagged_ones() -> None:
    """In vLLM's order: the adapter of each block, (image, place), the salt of the first block."""
    events = chain(3, (*SALT, *LORA), images={1: "cat@-2"})
    (stored,) = encoder().joined(events)
    assert isinstance(stored, StoredBlocks)
    assert stored.lora_name == "poems-2"
    assert stored.extra_keys is not None
    first, second, third = stored.extra_keys
    assert first is not None
    assert first[0] == "poems-2"
    assert len(first) == 2
    assert second == ("poems-2", ("cat", -2))
    assert third == ("poems-2",)


def test_a_salt_is_never_said() -> None:
    """Neither itself, nor by a hash that would confirm a guess at it."""
    events = [*chain(3, SALT), *map(gone, chain(3, SALT))]
    own, other = encoder(), encoder()
    payload = own.encode(1.0, events)
    assert SALT[0][1].encode() not in payload
    stored, removed = decode_batch(payload).events
    assert isinstance(stored, StoredBlocks)
    assert isinstance(removed, RemovedBlocks)
    assert stored.block_hashes == removed.block_hashes
    assert not {*stored.block_hashes} & {name_of(each) for each in chain(3, SALT)}
    assert stored == own.joined(events)[0]  # the same salt has one mark …
    elsewhere = other.joined(events)[0]
    assert isinstance(elsewhere, StoredBlocks)
    assert elsewhere.block_hashes != stored.block_hashes  # … in one encoder
    assert elsewhere.extra_keys != stored.extra_keys
    assert own.encode(0.0, chain(3, (("salt", "\ud800"),)))  # half a pair ends no publisher
    (unlike,) = own.joined(chain(3, (("salt", "another"),)))
    assert isinstance(unlike, StoredBlocks)
    assert unlike.extra_keys != stored.extra_keys


def test_a_tenant_is_not_told_and_its_blocks_are_named_by_a_key() -> None:
    """Routers compare token ids alone then, as where there are no tenants."""
    events = [*chain(2, TENANT), *map(gone, chain(2, TENANT))]
    payload = encoder().encode(1.0, events)
    assert TENANT[0][1].encode() not in payload
    stored, removed = decode_batch(payload).events
    assert isinstance(stored, StoredBlocks)
    assert isinstance(removed, RemovedBlocks)
    assert stored.extra_keys is None
    assert stored.block_hashes == removed.block_hashes
    assert not {*stored.block_hashes} & {name_of(each) for each in chain(2, TENANT)}


@pytest.mark.parametrize("payload", [b"", b"\x93", b"\x93\x01\x91\x81\xa4type\xa3Bad\x00", b"ab"])
def test_other_bytes_are_no_batch(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_batch(payload)


CHAINS = [
    chain(4, root, images=images, group=group)
    for root in ((), SALT, LORA, TENANT)
    for images in ({}, {0: "cat@0", 2: "dog@3"})
    for group in (0, 1)
]
BLOCKS = st.sampled_from([block for each in CHAINS for block in each])
EVENTS = st.lists(
    st.sampled_from(CHAINS).flatmap(lambda own: st.sampled_from([own, own[1:], own[:2]]))
    | BLOCKS.map(lambda block: [gone(block)])
    | st.sampled_from(CHAINS).map(lambda own: [gone(block) for block in own[::-1]])
    | st.just([AllBlocksCleared()])
).map(lambda several: [event for each in several for event in each])


def one_by_one(events: list[WireEvent]) -> list[tuple[object, ...]]:
    """Each block of each message by itself."""
    found: list[tuple[object, ...]] = []
    for event in events:
        match event:
            case ClearedBlocks():
                found.append(("cleared",))
            case RemovedBlocks():
                found += [("removed", event.group_idx, name) for name in event.block_hashes]
            case StoredBlocks():
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                extras = event.extra_keys or [None] * len(event.block_hashes)
                above = event.parent_block_hash
                for at, (name, extra) in enumerate(zip(event.block_hashes, extras, strict=True)):
                    tokens = tuple(event.token_ids[at * SIZE : (at + 1) * SIZE])
                    plain = extra and tuple(tuple(x) if isinstance(x, list) else x for x in extra)
                    group = event.group_idx
                    found.append(("stored", group, name, above, tokens, plain, event.lora_name))
                    above = name
    return found


@given(EVENTS)
def test_what_is_read_is_what_was_noted(events: list[BlockEvent]) -> None:
    own = encoder(FULL, sliding(9))
    each = [wire for event in events for wire in own.joined([event])]
    batch = decode_batch(own.encode(7.25, events))
    assert batch.ts == 7.25
    assert batch.data_parallel_rank == 0
    assert one_by_one(batch.events) == one_by_one(each)
    plain = [event for event in events if not isinstance(event, AllBlocksCleared)]
    names = [name for kind, *rest in one_by_one(batch.events) if rest for name in rest[1:2]]
    for event, name in zip(plain, names, strict=True):
        assert (name == name_of(event)) == (event.root_keys in ((), LORA))


@given(EVENTS)
def test_vllms_own_structs_read_it(events: list[BlockEvent]) -> None:
    theirs = pytest.importorskip("vllm.distributed.kv_events")
    payload = encoder(FULL, sliding(9)).encode(7.25, events)
    batch = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode(payload)
    assert msgspec.msgpack.encode(batch) == payload
