"""A directory tells what a dictionary of whole prefixes tells, whatever replicas say."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.told import CLEARED, FULL, KEY, Prompt, groups_of, on_the_wire
from quire.engine.event_format import ClearedBlocks, RemovedBlocks, StoredBlocks
from quire.errors import ConfigError
from quire.fleet.prefix_directory import MAX_REPLICAS, MEDIA, PrefixDirectory
from quire.kv import NO_KEYS, PrefixKeys
from quire.kv.prefix_index import Image
from quire.spec import (
    ChunkedAttention,
    Group,
    KeptWhole,
    RecurrentState,
    SlidingWindow,
    StateTensor,
)

WINDOW = SlidingWindow(num_kv_heads=1, head_dim=8, dtype="float32", window=5)
CHUNK = ChunkedAttention(num_kv_heads=1, head_dim=8, dtype="float32", chunk=6)
STATE = RecurrentState(states=(StateTensor(name="s", shape=(4,), dtype="float32"),))
MODELS = {
    "full": (FULL,),
    "window": (FULL, WINDOW),
    "only windows": (WINDOW, CHUNK),
    "state": (STATE, FULL),
}
LORA = "ab" * 32
ALL_KEYS = (
    NO_KEYS,
    PrefixKeys(tenant="ann"),
    PrefixKeys(tenant="bob"),
    PrefixKeys(tenant="ann", salt="s"),
    PrefixKeys(lora=LORA),
    PrefixKeys(images=(Image(content_id="cat", start=1, num_tokens=4),)),
    PrefixKeys(images=(Image(content_id="dog", start=1, num_tokens=4),)),
)
REPLICAS = ("a", "b", "c")


class Prefixes:
    """The slow twin: the set of whole prefixes of each replica, group and medium.

    ``shares``: what replicas have in storage, all of them have.
    """

    def __init__(self, groups: tuple[Group, ...], size: int, shares: bool) -> None:
        self.groups, self.size, self.shares = groups, size, shares
        self.held: dict[tuple[str, int, str], set] = defaultdict(set)

    def prefix(self, prompt: Prompt, n: int):
        """What blocks 0 … n are."""
        extras = prompt.keys.of_blocks(self.size)[: n + 1]
        return prompt.keys.of_root(), extras, prompt.token_ids[: (n + 1) * self.size]

    def has_any(self, replica: str, prefix) -> bool:
        return any(
            prefix in has for (name, *_), has in self.held.items() if name in (replica, self.shares)
        )

    def owner(self, replica: str, medium: str) -> str | bool:
        return self.shares if self.shares and medium == "STORAGE" else replica

    def store(self, replica, prompt, blocks, group, medium) -> None:
        for n in blocks:
            if n and not self.has_any(replica, self.prefix(prompt, n - 1)):
                return  # nothing is known of what comes before it
            self.held[self.owner(replica, medium), group, medium].add(self.prefix(prompt, n))

    def remove(self, replica, prompt, blocks, group, medium) -> None:
        gone = {self.prefix(prompt, n) for n in blocks}
        self.held[self.owner(replica, medium), group, medium] -= gone

    def clear(self, replica: str) -> None:
        for group in range(len(self.groups)):
            self.held.pop((replica, group, "GPU"), None)

    def forget(self, replica: str) -> None:
        for place in [place for place in self.held if place[0] == replica]:
            del self.held[place]

    def media(self, replica: str, group: int, prefix) -> list[str]:
        """Where the replica finds a block, the nearest first."""
        return [
            medium
            for medium in MEDIA
            if prefix in self.held.get((self.owner(replica, medium), group, medium), ())
        ]

    def hit(self, replica: str, prompt: Prompt) -> dict[str, int]:
        for n in range(len(prompt.token_ids) // self.size, 0, -1):
            if all(self.fits(replica, prompt, number, n) for number in range(len(self.groups))):
                break
        else:
            return {}
        whole = [k for k, g in enumerate(self.groups) if g.spec in (FULL,)]
        found: dict[str, int] = {}
        for k in range(n):
            at = self.media(replica, whole[0] if whole else 0, self.prefix(prompt, k))
            if at:
                found[at[0]] = found.get(at[0], 0) + 1
        return found

    def fits(self, replica: str, prompt: Prompt, number: int, n: int) -> bool:
        group = self.groups[number]
        first = int(group.live_start(n * self.size)) // self.size
        if isinstance(group.spec, KeptWhole):
            first = n - 1
        return all(self.media(replica, number, self.prefix(prompt, k)) for k in range(first, n))


PROMPT = st.builds(
    Prompt,
    st.lists(st.integers(0, 1), min_size=0, max_size=14).map(tuple),
    st.sampled_from(ALL_KEYS),
)
DOING = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "clear", "forget"]),
    st.sampled_from(REPLICAS),
    st.integers(0, 3),  # prompt
    st.integers(0, 4),  # first block
    st.integers(1, 7),  # blocks
    st.integers(0, 1),  # group
    st.sampled_from(["GPU", "GPU", "CPU", "STORAGE"]),
)


# A block is told before the one that it follows, and in another medium.
OUT_OF_ORDER = [("store", "b", 0, 1, 1, 0, "STORAGE"), ("store", "b", 0, 0, 1, 0, "GPU")]


@settings(max_examples=150, deadline=None)
@example(
    model="full",
    size=2,
    shares=True,
    prompts=[Prompt((0, 0, 0, 0), NO_KEYS)] * 4,
    done=[OUT_OF_ORDER],
)
@given(
    model=st.sampled_from(sorted(MODELS)),
    size=st.sampled_from([2, 3]),
    shares=st.booleans(),
    prompts=st.lists(PROMPT, min_size=4, max_size=4),
    done=st.lists(st.lists(DOING, min_size=1, max_size=4), max_size=8),
)
def test_it_finds_what_whole_prefixes_say(model, size, shares, prompts, done) -> None:
    groups = groups_of(*MODELS[model])
    directory = PrefixDirectory(groups, size, key=KEY)
    twin = Prefixes(groups, size, shares)
    store = "store" if shares else None
    for replica in REPLICAS:
        directory.add(replica, store)
    for together in done:  # one batch of events a replica
        batches = defaultdict(list)
        for kind, replica, which, first, count, group, medium in together:
            prompt, group = prompts[which], min(group, len(groups) - 1)
            blocks = range(first, min(first + count, len(prompt.token_ids) // size))
            if kind == "store":
                batches[replica] += prompt.stored(size, blocks, group, medium)
                twin.store(replica, prompt, blocks, group, medium)
            elif kind == "remove":
                batches[replica] += prompt.removed(size, blocks, group, medium)
                twin.remove(replica, prompt, blocks, group, medium)
            elif kind == "clear":
                batches[replica] += CLEARED
                twin.clear(replica)
            else:
                # What it told before has come: a shared store keeps that without it.
                directory.apply(replica, on_the_wire(groups, size, batches.pop(replica, [])))
                if count % 2:
                    directory.forget(replica)
                    directory.add(replica, store)
                else:
                    directory.clear(replica)
                twin.forget(replica)
        for replica, events in batches.items():
            directory.apply(replica, on_the_wire(groups, size, events))
        directory.check()
        for prompt in prompts:
            found = directory.find(directory.hashes(prompt.token_ids, prompt.keys), REPLICAS)
            assert found == {
                replica: hit for replica in REPLICAS if (hit := twin.hit(replica, prompt))
            }
    for replica in REPLICAS:
        directory.forget(replica)
    directory.check()
    assert not len(directory) or shares


# -- hostile and broken replicas -------------------------------------------------------------------

GROUPS = groups_of()
JUNK = st.one_of(
    st.builds(
        StoredBlocks,
        block_hashes=st.lists(st.integers(-3, 2**64) | st.binary(max_size=9), max_size=4),
        parent_block_hash=st.none() | st.integers(-1, 4) | st.integers(2**64 - 1, 2**64 + 1),
        token_ids=st.lists(st.integers(-1, 2) | st.integers(2**31, 2**64), max_size=8),
        block_size=st.integers(0, 3),
        lora_id=st.none(),
        medium=st.sampled_from([None, "GPU", "CPU", "disk"]),
        lora_name=st.none(),
        extra_keys=st.none() | st.lists(st.none() | st.tuples(st.text(max_size=2)), max_size=4),
        group_idx=st.none() | st.integers(-1, 2),
    ),
    st.builds(
        RemovedBlocks,
        block_hashes=st.lists(st.integers(-3, 2**64), max_size=4),
        medium=st.sampled_from([None, "GPU", "disk"]),
        group_idx=st.none() | st.integers(-1, 2),
    ),
    st.builds(ClearedBlocks),
)
TWO = st.builds(  # that make sense, of few names: each may be told again with other tokens
    StoredBlocks,
    block_hashes=st.lists(st.integers(2, 6), min_size=2, max_size=2),
    parent_block_hash=st.none() | st.integers(2, 6),
    token_ids=st.lists(st.integers(0, 1), min_size=4, max_size=4),
    block_size=st.just(2),
    lora_id=st.none(),
    medium=st.sampled_from(["GPU", "CPU"]),
    lora_name=st.none(),
)


@settings(max_examples=150, deadline=None)
@given(told=st.lists(st.lists(JUNK | TWO, max_size=5), max_size=8))
def test_nothing_that_a_replica_says_breaks_it_or_harms_another(told) -> None:
    directory = PrefixDirectory(GROUPS, 2, key=KEY, max_blocks=8)
    honest = Prompt((1, 0, 1, 1, 0, 0))
    directory.apply("honest", on_the_wire(GROUPS, 2, honest.stored(2, range(3))))
    for events in told:
        directory.apply("liar", events)
        directory.check()
    found = directory.find(directory.hashes(honest.token_ids, honest.keys), ["honest"])
    assert found == {"honest": {"GPU": 3}}
    directory.forget("liar")
    assert len(directory) == 3


def test_a_block_has_one_name() -> None:
    """A second one is left out: the first would stay behind when the second is removed."""
    directory = PrefixDirectory(GROUPS, 2)
    for second in (3, 4):
        event = StoredBlocks(
            block_hashes=[2, second],
            parent_block_hash=None,
            token_ids=[1, 1, 1, 1],
            block_size=2,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        directory.apply("a", [event])
        directory.check()
    assert (directory.num_blocks("a"), directory.num_ignored) == (2, 1)
    directory.apply("a", [RemovedBlocks(block_hashes=[3], medium="GPU")])
    directory.check()
    assert len(directory) == 1


def test_a_cleared_pool_leaves_tiers_as_they_are() -> None:
    directory, prompt = PrefixDirectory(GROUPS, 2), Prompt((1, 1, 2, 2))
    events = prompt.stored(2, [0, 1]) + prompt.stored(2, [0], medium="CPU") + CLEARED
    directory.apply("a", on_the_wire(GROUPS, 2, events))
    directory.check()
    hashes = directory.hashes(prompt.token_ids, prompt.keys)
    assert directory.find(hashes, ["a"]) == {"a": {"CPU": 1}}


def test_a_replica_that_tells_of_too_much_loses_its_oldest() -> None:
    directory = PrefixDirectory(GROUPS, 2, max_blocks=64)
    several = [Prompt((n, n)) for n in range(500)]
    for prompt in several:
        directory.apply("liar", on_the_wire(GROUPS, 2, prompt.stored(2, [0])))
        directory.check()
    assert directory.num_evicted == 500 - directory.num_blocks("liar")
    found = [bool(directory.find(directory.hashes(p.token_ids, p.keys), ["liar"])) for p in several]
    assert not any(found[:430])
    assert all(found[-56:])
    assert directory.num_bytes < 64 * 1024


def test_one_long_event_is_bounded_too() -> None:
    directory = PrefixDirectory(GROUPS, 2, max_blocks=64)
    directory.apply("liar", on_the_wire(GROUPS, 2, Prompt((1,) * 2000).stored(2, range(1000))))
    directory.check()
    assert directory.num_blocks("liar") <= 64


def test_replicas_are_told_apart_after_one_has_gone() -> None:
    prompt = Prompt(tuple(range(8)), NO_KEYS)
    directory = PrefixDirectory(groups_of(FULL), 4, key=KEY)
    hashes = directory.hashes(prompt.token_ids, prompt.keys)

    def has(replica: str, num: int) -> None:
        told = prompt.stored(4, range(num), 0, "GPU")
        directory.apply(replica, on_the_wire(groups_of(FULL), 4, told))

    has("a", 1)
    has("b", 2)
    assert directory.find(hashes, ["a", "b"]) == {"a": {"GPU": 1}, "b": {"GPU": 2}}
    assert directory.find(hashes, ["b", "a"]) == {"a": {"GPU": 1}, "b": {"GPU": 2}}
    directory.forget("a")
    has("c", 1)  # whose bit was a's
    assert directory.find(hashes, ["b", "a"]) == {"b": {"GPU": 2}}
    assert directory.find(hashes, ["c", "b"]) == {"c": {"GPU": 1}, "b": {"GPU": 2}}
    assert directory.find(hashes, []) == {}


def test_memory_is_used_again() -> None:
    directory = PrefixDirectory(GROUPS, 2)
    sizes = []
    for turn in range(6):
        several = [Prompt((turn, n, n, n)) for n in range(300)]
        for prompt in several:
            directory.apply("a", on_the_wire(GROUPS, 2, prompt.stored(2, range(2))))
        for prompt in several:
            directory.apply("a", on_the_wire(GROUPS, 2, prompt.removed(2, range(2))))
        directory.check()
        sizes.append(directory.num_bytes)
    assert len(directory) == 0
    assert sizes[-1] <= sizes[1]


def test_a_block_without_a_known_parent_is_left_out() -> None:
    directory = PrefixDirectory(GROUPS, 2)
    prompt = Prompt((1, 2, 3, 4, 5, 6))
    directory.apply("a", on_the_wire(GROUPS, 2, prompt.stored(2, [1, 2])))
    assert (len(directory), directory.num_ignored) == (0, 2)


def test_one_replica_too_many_is_refused_until_another_is_forgotten() -> None:
    directory = PrefixDirectory(GROUPS, 2)
    for number in range(MAX_REPLICAS):
        directory.add(f"r{number}")
    with pytest.raises(
        ConfigError, match=r"one too many: .* 64 replicas and shared stores at most; use"
    ):
        directory.apply("more", [])
    directory.forget("r5")
    directory.apply("more", on_the_wire(GROUPS, 2, Prompt((1, 1)).stored(2, [0])))
    hashes = directory.hashes((1, 1), NO_KEYS)
    assert directory.find(hashes, ["more", *(f"r{n}" for n in range(63) if n != 5)]) == {
        "more": {"GPU": 1}
    }


def test_without_the_key_secret_prompts_have_no_hashes() -> None:
    directory = PrefixDirectory(GROUPS, 2)
    assert not len(directory.hashes((1, 1), PrefixKeys(tenant="ann")))
    assert len(directory.hashes((1, 1), PrefixKeys(lora=LORA))) == 1


def test_arrays_and_sequences_of_token_ids_are_alike() -> None:
    directory = PrefixDirectory(GROUPS, 3)
    token_ids = tuple(range(20))
    assert (
        directory.hashes(token_ids, NO_KEYS)
        == directory.hashes(np.array(token_ids, np.int32), NO_KEYS)
    ).all()


def test_a_long_prompt_is_looked_up_piece_by_piece() -> None:
    """Beyond the first piece a hit goes on, and ends where it ends."""
    directory = PrefixDirectory(GROUPS, 2)
    prompt = Prompt(tuple(n % 7 for n in range(6000)))
    directory.apply("a", on_the_wire(GROUPS, 2, prompt.stored(2, range(2500))))
    directory.apply("b", on_the_wire(GROUPS, 2, prompt.stored(2, range(256))))
    for begin in range(0, 1500, 300):  # hashed in other pieces than the prompt is
        events = prompt.stored(2, range(begin, begin + 300))
        directory.apply("c", on_the_wire(GROUPS, 2, events))
    hashes = directory.hashes(prompt.token_ids, prompt.keys)
    found = {"a": {"GPU": 2500}, "b": {"GPU": 256}, "c": {"GPU": 1500}}
    assert directory.find(hashes, ["a", "b", "c"]) == found


def test_a_block_that_is_stored_again_is_found_where_it_lies_now() -> None:
    """Blocks that were stored together are looked for in rows one after the other."""
    directory, prompt = PrefixDirectory(GROUPS, 4, key=KEY), Prompt(tuple(range(16)))

    def tell(events) -> None:
        directory.apply("a", on_the_wire(GROUPS, 4, events))

    tell(prompt.stored(4, range(4)))
    tell(prompt.removed(4, range(1, 4)))
    tell(prompt.stored(4, range(1, 2)))  # in the last of the three rows
    hashes = directory.hashes(prompt.token_ids, prompt.keys)
    assert directory.find(hashes, ["a"]) == {"a": {"GPU": 2}}
    directory.check()


def test_what_is_stored_block_by_block_is_found_as_a_whole() -> None:
    """No two blocks of a prompt lie in rows that follow each other."""
    directory = PrefixDirectory(GROUPS, 4, key=KEY)
    several = [Prompt((first, *range(1, 2000))) for first in range(2)]
    for number in range(400):
        for prompt in several:
            events = prompt.stored(4, range(number, number + 1))
            directory.apply("a", on_the_wire(GROUPS, 4, events))
    for prompt in several:
        hashes = directory.hashes(prompt.token_ids, prompt.keys)
        assert directory.find(hashes, ["a"]) == {"a": {"GPU": 400}}


# -- storage that several reach --------------------------------------------------------------------


def test_what_one_has_stored_all_who_reach_it_find() -> None:
    directory, prompt = PrefixDirectory(GROUPS, 2), Prompt((1, 1, 2, 2, 3, 3))
    hashes = directory.hashes(prompt.token_ids, prompt.keys)
    for name, store in (("a", "here"), ("b", "here"), ("c", "there"), ("d", None)):
        directory.add(name, store)
    names = list("abcd")
    directory.apply("a", on_the_wire(GROUPS, 2, prompt.stored(2, range(3))))
    directory.apply("a", on_the_wire(GROUPS, 2, prompt.stored(2, range(3), medium="STORAGE")))
    assert directory.find(hashes, names) == {"a": {"GPU": 3}, "b": {"STORAGE": 3}}
    # Another one's copy of a block, and then another one's word that the last is gone.
    directory.apply("b", on_the_wire(GROUPS, 2, prompt.stored(2, [0])))
    directory.apply("b", on_the_wire(GROUPS, 2, prompt.removed(2, [2], medium="STORAGE")))
    assert directory.find(hashes, names) == {"a": {"GPU": 3}, "b": {"GPU": 1, "STORAGE": 1}}
    directory.check()
    directory.forget("a")  # what it has stored is still there
    assert directory.find(hashes, names[1:]) == {"b": {"GPU": 1, "STORAGE": 1}}
    directory.clear("b")
    assert directory.find(hashes, names[1:]) == {"b": {"STORAGE": 2}}
    directory.check()


def test_a_store_that_no_replica_has_gives_its_place_to_one_that_comes() -> None:
    directory, prompt = PrefixDirectory(GROUPS, 2), Prompt((1, 1))
    directory.add("a", "here")
    directory.apply("a", on_the_wire(GROUPS, 2, prompt.stored(2, [0], medium="STORAGE")))
    directory.forget("a")
    assert len(directory) == 1
    for number in range(MAX_REPLICAS):
        directory.add(f"r{number}")
    directory.check()
    assert len(directory) == 0
    with pytest.raises(ConfigError, match="store 'here' is one too many"):
        directory.add("r1", "here")
