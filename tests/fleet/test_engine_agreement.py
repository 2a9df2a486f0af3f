"""What a directory finds from a cache's events is what the cache itself finds, in whole blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.told import KEY, on_the_wire
from kv.caches import FULL, SIZE, Cache, sliding
from quire.fleet.prefix_directory import PrefixDirectory
from quire.kv import NO_KEYS, PrefixKeys
from quire.kv.prefix_index import Image

KEYS = (
    NO_KEYS,
    PrefixKeys(tenant="ann"),
    PrefixKeys(salt="s", lora="ab" * 32),
    PrefixKeys(images=(Image(content_id="cat", start=2, num_tokens=3),)),
)
PROMPT = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
        lambda parts: [part for part in parts for _ in range(SIZE)] + [9]
    ),
    st.sampled_from(KEYS),
)


@pytest.mark.parametrize("specs", [(FULL,), (FULL, sliding(6))], ids=["full", "window"])
@settings(max_examples=60, deadline=None)
@given(served=st.lists(PROMPT, max_size=12), asked=st.lists(PROMPT, min_size=1, max_size=4))
def test_it_agrees_with_the_cache(specs, served, asked) -> None:
    """Prompts are served one after the other, in a cache that has room for few: it evicts."""
    cache = Cache(*specs, num_blocks=8 * len(specs), keep_events=True)
    directory = PrefixDirectory(cache.groups, SIZE, key=KEY)
    for number, (tokens, keys) in enumerate(served):
        cache.start(number, tokens, keys=keys)
        cache.free(number)
        events = cache.blocks.take_events()
        directory.apply("r", on_the_wire(cache.groups, SIZE, events))
        directory.check()
    for tokens, keys in asked + served:
        hit = cache.lookup(tokens, keys)
        found = directory.find(directory.hashes(tokens, keys), ["r"]).get("r", {})
        assert found.get("GPU", 0) == hit.num_tokens // SIZE
