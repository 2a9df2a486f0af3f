"""A directory tells what a dictionary of whole prefixes tells, whatever replicas say."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.told import CLEARED, FULL, KEY, Prompt, groups_of, on_the_wire
from quire.fleet.prefix_directory import MEDIA, PrefixDirectory
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
    """The slow twin: the set of whole prefixes of each replica, group and medium."""

    def __init__(self, groups: tuple[Group, ...], size: int, shared: frozenset[str]) -> None:
        self.groups, self.size, self.shared = groups, size, shared
        self.held: dict[tuple[str, int, str], set] = defaultdict(set)

    def prefix(self, prompt: Prompt, n: int):
        """What blocks 0 … n are."""
        extras = prompt.keys.of_blocks(self.size)[: n + 1]
        return prompt.keys.of_root(), extras, prompt.token_ids[: (n + 1) * self.size]

    def has_any(self, replica: str, prefix) -> bool:
        return any(prefix in has for (name, *_), has in self.held.items() if name == replica)

    def store(self, replica, prompt, blocks, group, medium) -> None:
        for n in blocks:
            if n and not self.has_any(replica, self.prefix(prompt, n - 1)):
                return  # nothing is known of what comes before it
            self.held[replica, group, medium].add(self.prefix(prompt, n))

    def remove(self, replica, prompt, blocks, group, medium) -> None:
        self.held[replica, group, medium] -= {self.prefix(prompt, n) for n in blocks}

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
            for name in (REPLICAS if medium in self.shared else (replica,))
            if prefix in self.held.get((name, group, medium), ())
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


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    size=st.sampled_from([2, 3]),
    shared=st.sampled_from([frozenset(), frozenset({"STORAGE"})]),
    prompts=st.lists(PROMPT, min_size=4, max_size=4),
    done=st.lists(st.lists(DOING, min_size=1, max_size=4), max_size=8),
)
def test_it_finds_what_whole_prefixes_say(model, size, shared, prompts, done) -> None:
    groups = groups_of(*MODELS[model])
    directory = PrefixDirectory(groups, size, key=KEY, shared=shared)
    twin = Prefixes(groups, size, shared)
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
                directory.forget(replica)
                batches.pop(replica, None)
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
    assert not len(directory)
