"""Blocks that are brought from outside: found like computed ones, and never others' content."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from kv.caches import FULL, SIZE, STATE, Cache, chunked, ids, sliding, span
from quire.kv import FITS
from quire.kv.eviction import EVICTION_POLICIES
from quire.kv.prefix_index import PrefixKeys
from quire.spec import LayerSpec

KINDS: dict[str, tuple[LayerSpec, ...]] = {
    "full": (FULL,),
    "sliding": (FULL, sliding(5)),
    "chunked": (FULL, chunked(8)),
    "state": (FULL, STATE),
    "all": (FULL, sliding(7), STATE),
}


@pytest.mark.parametrize("kind", KINDS)
class TestBring:
    def test_a_prefix_that_was_brought_is_found(self, kind: str) -> None:
        cache = Cache(*KINDS[kind], num_blocks=60)
        assert cache.bring(span(0, 5 * SIZE))
        assert cache.num_held == 0
        assert cache.lookup(span(0, 5 * SIZE + 1)).num_tokens == 5 * SIZE
        assert cache.start(0, span(0, 5 * SIZE + 3)) == 5 * SIZE
        cache.extend(0, [7])

    def test_it_goes_on_behind_what_is_cached(self, kind: str) -> None:
        cache = Cache(*KINDS[kind], num_blocks=60)
        cache.add(0)
        for start in range(0, 2 * SIZE, SIZE):
            cache.extend(0, span(start, start + SIZE))
        cache.keep_state(0)
        cache.free(0)
        held = cache.num_cached
        assert cache.bring(span(0, 4 * SIZE))
        assert cache.num_cached > held
        assert cache.start(1, span(0, 4 * SIZE + 1)) == 4 * SIZE
        cache.extend(1, [7])

    def test_what_is_cached_is_not_brought_again(self, kind: str) -> None:
        cache = Cache(*KINDS[kind], num_blocks=60)
        assert cache.bring(span(0, 3 * SIZE))
        assert not cache.bring(span(0, 3 * SIZE))

    def test_without_room_nothing_changes(self, kind: str) -> None:
        cache = Cache(*KINDS[kind], num_blocks=8)
        cache.start(0, span(100, 100 + 3 * SIZE))
        assert not cache.bring(span(0, 20 * SIZE))

    def test_keys_tell_prefixes_apart(self, kind: str) -> None:
        cache = Cache(*KINDS[kind], num_blocks=60)
        assert cache.bring(span(0, 3 * SIZE), PrefixKeys(salt="a"))
        assert not cache.lookup(span(0, 3 * SIZE + 1)).num_tokens
        found = cache.lookup(span(0, 3 * SIZE + 1), PrefixKeys(salt="a"))
        assert found.num_tokens == 3 * SIZE

    @settings(max_examples=examples(20, of=60))
    @given(data=st.data())
    def test_any_series_reads_what_belongs_there(self, kind: str, data: st.DataObject) -> None:
        cache = Cache(*KINDS[kind], num_blocks=data.draw(st.integers(6, 40)))
        living: list[int] = []
        for seq_id in range(data.draw(st.integers(1, 25))):
            what = data.draw(st.sampled_from(["bring", "start", "extend", "free", "keep"]))
            base = data.draw(st.sampled_from([0, 50]))
            tokens = span(base, base + data.draw(st.integers(1, 6 * SIZE)))
            if what == "bring":
                cache.bring(tokens[: len(tokens) // SIZE * SIZE] or span(base, base + SIZE))
            elif what == "start":
                cache.add(seq_id)
                hit = cache.blocks.match_prefix(seq_id, ids(tokens))
                if cache.extend(seq_id, tokens, hit=hit) is FITS:
                    living.append(seq_id)
                else:
                    cache.free(seq_id)
            elif living:
                of = data.draw(st.sampled_from(living))
                if what == "extend":
                    cache.extend(of, span(200, 200 + data.draw(st.integers(1, 6))))
                elif what == "keep":
                    cache.keep_state(of)
                else:
                    living.remove(of)
                    cache.free(of)


class TestNames:
    def test_blocks_behind_a_hit_have_the_names_that_they_get(self) -> None:
        cache = Cache(FULL, num_blocks=20)
        cache.blocks.index.filled = []
        keys = PrefixKeys(salt="a", lora="b" * 64)
        tokens = ids(span(0, 4 * SIZE + 2))
        cache.start(0, tokens[: 2 * SIZE + 1].tolist(), keys=keys)
        cache.add(1, keys)
        hit = cache.blocks.match_prefix(1, tokens)
        assert hit.num_tokens == 2 * SIZE
        names = cache.blocks.following_blocks(1, tokens, hit)
        cache.extend(1, tokens.tolist(), hit=hit)
        nodes = np.concatenate(cache.blocks.index.filled)
        found = [cache.blocks.index.identity(int(node)) for node in nodes]
        assert len(found) == 4
        for expected, got in zip(names, found[2:], strict=True):
            assert got is not None
            assert (got.parent, got.chain, got.extras) == (
                expected.parent,
                expected.chain,
                expected.extras,
            )
            assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert b"'a'" in names[0].extras
        assert found[1] is not None
        assert names[0].parent == found[1].chain

    def test_a_node_that_is_gone_has_no_name(self) -> None:
        cache = Cache(FULL, num_blocks=8)
        cache.blocks.index.filled = []
        cache.start(0, span(0, SIZE))
        (nodes,) = cache.blocks.index.filled
        assert cache.blocks.index.identity(int(nodes[0])) is not None
        cache.free(0)
        cache.blocks.reset_prefix_cache()
        cache.start(1, span(50, 50 + SIZE))  # in the same row
        assert cache.blocks.index.identity(int(nodes[0])) is None


def test_it_stays_until_the_prompt_comes_that_it_was_brought_for() -> None:
    """Prompts of one use go first where the use before the last decides."""
    cache = Cache(FULL, num_blocks=12, make_policy=EVICTION_POLICIES["lru-2"])
    assert cache.bring(span(0, 4 * SIZE))
    for seq_id in range(6):
        base = 100 * (1 + seq_id)
        cache.start(seq_id, span(base, base + 3 * SIZE))
        cache.free(seq_id)
    assert cache.start(9, span(0, 4 * SIZE + 1)) == 4 * SIZE
