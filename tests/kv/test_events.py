"""Events: their readers know what is cached, block by block and group by group."""

import re
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kv.caches import FULL, SIZE, STATE, Cache, ids, sliding, span
from quire.engine.event_format import EventEncoder
from quire.kv import FITS, Image, PrefixKeys
from quire.kv.prefix_index import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from quire.spec import LayerSpec


class Mirror:
    """The cache as it looks from outside; it knows nothing but the events."""

    def __init__(self, num_groups: int) -> None:
        self.stored: list[dict[bytes, BlockStored]] = [{} for _ in range(num_groups)]

    def read(self, events: list[BlockEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    assert event.block_hash not in self.stored[event.group_idx], "stored twice"
                    self.stored[event.group_idx][event.block_hash] = event
                case BlockRemoved():
                    del self.stored[event.group_idx][event.block_hash]
                case AllBlocksCleared():
                    for stored in self.stored:
                        stored.clear()
        events.clear()

    def num_blocks(self, tokens: list[int], keys: PrefixKeys) -> int:
        """How many blocks of a prompt are there in every group, found by hashes from outside."""
        root, extras = keys.of_root(), keys.of_blocks(SIZE)
        digest = sha256(repr(root).encode() if root else b"").digest()
        for number in range(len(tokens) // SIZE):
            extra = extras[number] if number < len(extras) else ()
            block = np.array(tokens[number * SIZE : (number + 1) * SIZE], np.int32).tobytes()
            digest = sha256(digest + (repr(extra).encode() if extra else b"") + block).digest()
            if not all(digest in stored for stored in self.stored):
                return number
        return len(tokens) // SIZE


def test_the_chain_is_as_the_reference_says() -> None:
    """docs/reference/events.md has numbers for programs that compute the chain outside."""
    page = (Path(__file__).parents[2] / "docs/reference/events.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:root|block \d) \| ([\d ]*)\| `(\w{64})` \| (\d*) ?\|$", page, re.M)
    assert len(rows) == 6
    image = Image(content_id="cat", start=5, num_tokens=2)
    for keys, said in (
        (PrefixKeys(), rows[:3]),
        (PrefixKeys(lora="0123456789abcdef" * 4, images=(image,)), rows[3:]),
    ):
        cache = Cache(FULL, num_blocks=9, keep_events=True)
        index, tokens = cache.blocks.index, [int(each) for row in said for each in row[0].split()]
        cache.start(0, tokens, keys=keys)
        root = index.root(keys.of_root())
        nodes = index.walk(root, np.array(tokens, np.int32).tobytes(), keys.of_blocks(SIZE))
        found = [index.block_hash(index.row(node)) for node in (root, *nodes)]
        assert [digest.hex() for digest in found] == [row[1] for row in said]
        names = [str(int.from_bytes(digest[-8:], "big")) for digest in found]
        assert names[1:] == [row[2] for row in said[1:]]
        (stored,) = EventEncoder(cache.blocks.groups, SIZE).joined(index.events)
        assert [str(name) for name in stored.block_hashes] == names[1:]


def kinds(cache: Cache) -> list[str]:
    names = [type(event).__name__ for event in cache.blocks.index.events]
    cache.blocks.index.events.clear()
    return names


def test_a_block_is_stored_when_it_is_full_and_removed_when_it_goes() -> None:
    """vLLM: so many blocks stored for so many full ones; removed when they are evicted."""
    cache = Cache(FULL, num_blocks=3, keep_events=True)
    cache.start(0, span(0, 7))
    assert kinds(cache) == ["BlockStored"]
    cache.extend(0, [7])
    assert kinds(cache) == ["BlockStored"]
    cache.free(0)
    assert kinds(cache) == []  # it can still be found
    cache.start(1, span(50, 61))
    assert kinds(cache) == ["BlockRemoved"] * 2 + ["BlockStored"] * 2


def test_a_copy_in_a_tier_is_told_as_the_block_itself() -> None:
    """But for the medium; known or not yet known to the index."""
    image = Image(content_id="cat", start=5, num_tokens=1)
    for keys in (PrefixKeys(), PrefixKeys(salt="x", images=(image,)), PrefixKeys(lora="0" * 64)):
        cache, tokens = Cache(FULL, num_blocks=9, keep_events=True), span(0, 12)
        index = cache.blocks.index
        cache.add(0, keys)
        hit = cache.blocks.match_prefix(0, ids(tokens))
        ahead = cache.blocks.following_blocks(0, ids(tokens), hit)
        cache.free(0)
        cache.start(1, tokens, keys=keys)
        known = cache.blocks.computed_blocks(1)
        assert [block.stored(0, "GPU") for block in ahead] == index.events
        assert [block.stored(0, "GPU") for block in known] == index.events
        assert {block.stored(0, "CPU").medium for block in known} == {"CPU"}
        told = [block.removed(0, "GPU") for block in ahead]
        index.events.clear()
        cache.free(1)
        assert cache.blocks.resize(0, for_now=True) == 0
        assert {*told} == {event for event in index.events if isinstance(event, BlockRemoved)}


def test_chains_are_told_by_their_parents() -> None:
    cache = Cache(FULL, num_blocks=9, keep_events=True)
    salt = PrefixKeys(salt="x", images=(Image(content_id="cat", start=5, num_tokens=1),))
    cache.start(0, span(0, 12), keys=salt)
    events = cache.blocks.index.events
    assert all(isinstance(event, BlockStored) for event in events)
    stored = [event for event in events if isinstance(event, BlockStored)]
    hashes = [event.block_hash for event in stored]
    assert [event.parent_block_hash for event in stored] == [None, *hashes[:2]]
    assert [event.token_ids for event in stored] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert [event.extra_keys for event in stored] == [(("salt", "x"),), (("image", "cat@1"),), ()]
    assert {event.root_keys for event in stored} == {(("salt", "x"),)}
    assert cache.blocks.take_events() == stored
    assert cache.blocks.take_events() == []
    cache.free(0)
    cache.blocks.resize(0)
    removed = cache.blocks.take_events()
    assert {event.block_hash for event in removed if isinstance(event, BlockRemoved)} == {*hashes}
    assert {event.root_keys for event in removed if isinstance(event, BlockRemoved)} == {
        (("salt", "x"),)
    }


def test_what_is_kept_once_is_told_once() -> None:
    cache = Cache(FULL, num_blocks=9, keep_events=True)
    cache.start(0, span(0, 8))
    cache.start(1, span(0, 8), read=False)
    assert kinds(cache) == ["BlockStored"] * 2


def test_a_block_that_is_rewritten_is_removed() -> None:
    cache = Cache(FULL, num_blocks=9, keep_events=True)
    cache.start(0, span(0, 8))
    cache.trim(0, 6)
    assert kinds(cache) == ["BlockStored"] * 2
    cache.extend(0, [99])
    assert kinds(cache) == ["BlockRemoved"]
    cache.extend(0, [98])
    assert kinds(cache) == ["BlockStored"]


def test_groups_are_told_apart() -> None:
    cache = Cache(FULL, sliding(2), num_blocks=20, keep_events=True)
    cache.start(0, span(0, 8))
    stored = [e for e in cache.blocks.index.events if isinstance(e, BlockStored)]
    assert sorted(event.group_idx for event in stored) == [0, 0, 1, 1]
    assert len({event.block_hash for event in stored}) == 2


@pytest.mark.parametrize("specs", [(FULL,), (FULL, sliding(5)), (STATE,)])
def test_reset_clears_all_or_nothing(specs: tuple[LayerSpec, ...]) -> None:
    """vLLM: refused while anything is held; afterwards nothing is found."""
    cache = Cache(*specs, num_blocks=20, keep_events=True)
    cache.start(0, span(0, 8))
    cache.keep_state(0)
    cache.start(1, [1])
    cache.free(0)
    before = cache.state()
    assert not cache.blocks.reset_prefix_cache()
    assert cache.state() == before
    assert cache.lookup(span(0, 9)).num_tokens == 8
    cache.free(1)
    cache.blocks.index.events.clear()
    assert cache.blocks.reset_prefix_cache()
    assert kinds(cache)[-1] == "AllBlocksCleared"
    assert cache.num_cached == cache.blocks.pools.committed_bytes == 0
    assert cache.lookup(span(0, 9)).num_tokens == 0
    assert cache.blocks.pools.ceiling.capacity_bytes == cache.capacity_bytes
    cache.blocks.check()
    assert cache.start(2, span(0, 8)) == 0
    cache.keep_state(2)
    assert cache.lookup(span(0, 9)).num_tokens == 8


def test_a_pin_is_a_holder() -> None:
    cache = Cache(FULL, num_blocks=20)
    cache.start(0, span(0, 8))
    assert cache.blocks.pin(7, np.array(span(0, 8), np.int32)) == 8
    cache.free(0)
    assert not cache.blocks.reset_prefix_cache()
    cache.free(7)
    assert cache.blocks.reset_prefix_cache()


class EventMachine(RuleBasedStateMachine):
    """Prompts out of few words come and go in a small cache; the mirror follows."""

    def __init__(self, specs: tuple[LayerSpec, ...]) -> None:
        super().__init__()
        self.specs = specs

    @initialize(num_blocks=st.integers(8, 30))
    def build(self, num_blocks: int) -> None:
        self.cache = Cache(*self.specs, num_blocks=num_blocks, keep_events=True)
        self.mirror = Mirror(len(self.specs))
        self.next_id = 0
        self.prompts: list[tuple[list[int], PrefixKeys]] = []

    @rule(
        words=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        rest=st.integers(0, 3),
        salt=st.sampled_from(["", "", "x"]),
        image=st.none() | st.integers(0, 9),
        read=st.booleans(),
    )
    def start(self, words: list[int], rest: int, salt: str, image: int | None, read: bool) -> None:
        tokens = [word * 10 + i for word in words for i in range(SIZE)] + [5] * rest
        images = () if image is None else (Image(content_id="cat", start=image, num_tokens=3),)
        keys = PrefixKeys(salt=salt, images=images)
        self.cache.add(self.next_id, keys)
        ids = np.array(tokens, np.int32)
        hit = self.cache.blocks.match_prefix(self.next_id, ids) if read else None
        if self.cache.extend(self.next_id, tokens, hit=hit) is not FITS:
            self.cache.free(self.next_id)
        self.next_id += 1
        self.prompts.append((tokens, keys))

    @precondition(lambda self: self.cache.tokens)
    @rule(at=st.integers(0, 9), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def extend(self, at: int, tokens: list[int]) -> None:
        seq_id = sorted(self.cache.tokens)[at % len(self.cache.tokens)]
        if self.cache.extend(seq_id, tokens) is FITS:
            self.prompts.append((self.cache.tokens[seq_id], self.cache.keys[seq_id]))

    @precondition(lambda self: self.cache.tokens)
    @rule(at=st.integers(0, 9))
    def free(self, at: int) -> None:
        self.cache.free(sorted(self.cache.tokens)[at % len(self.cache.tokens)])

    @precondition(lambda self: self.cache.tokens)
    @rule(at=st.integers(0, 9))
    def fork(self, at: int) -> None:
        seq_id = sorted(self.cache.tokens)[at % len(self.cache.tokens)]
        self.cache.fork(seq_id, self.next_id)
        self.next_id += 1

    @rule(num_blocks=st.integers(0, 30))
    def resize(self, num_blocks: int) -> None:
        self.cache.blocks.resize(num_blocks * 8)
        self.cache.blocks.resize(self.cache.capacity_bytes)

    @rule()
    def reset(self) -> None:
        for seq_id in list(self.cache.tokens):
            self.cache.free(seq_id)
        assert self.cache.blocks.reset_prefix_cache()

    @invariant()
    def mirrored(self) -> None:
        if not hasattr(self, "mirror"):
            return
        self.cache.blocks.check()
        self.mirror.read(self.cache.blocks.index.events)
        pools = self.cache.blocks.pools
        for group, stored in enumerate(self.mirror.stored):
            assert len(stored) == np.count_nonzero(pools[group].nodes >= 0)
        for tokens, keys in self.prompts[-8:]:
            index = self.cache.blocks.index
            root = index.root(keys.of_root())
            data = np.array(tokens, np.int32).tobytes()
            rows = index.rows(index.walk(root, data, keys.of_blocks(SIZE)))
            index.decref(root)
            there = np.ones(len(rows), bool)
            for group in range(len(self.specs)):
                there &= index.blocks[group][rows] >= 0
            found = len(there) if there.all() else int(np.argmin(there))
            assert self.mirror.num_blocks(tokens, keys) == found


@pytest.mark.parametrize("specs", [(FULL,), (FULL, sliding(5))])
def test_events_rebuild_the_cache(specs: tuple[LayerSpec, ...]) -> None:
    """vLLM: the stream of stored, removed and cleared is all that a router needs."""
    run_state_machine_as_test(
        lambda: EventMachine(specs),
        settings=settings(max_examples=25, stateful_step_count=30, deadline=None),
    )
