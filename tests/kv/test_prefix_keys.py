"""What tells prefixes apart besides their tokens: tenants, adapters and images never mix."""

from itertools import permutations

import numpy as np
import pytest

from kv.caches import FULL, SIZE, STATE, Cache, sliding, span
from quire.errors import RequestError
from quire.kv import NO_KEYS, Image, PrefixKeys
from quire.spec import LayerSpec
from quire.tiers.record import Checksums, Part, RecordFormat

A, B, AB = "a" * 64, "b" * 64, "ab" * 32  # adapters

WORLDS = [
    NO_KEYS,
    PrefixKeys(tenant="a"),
    PrefixKeys(salt="a"),
    PrefixKeys(salt="b"),
    PrefixKeys(lora=A),
    PrefixKeys(lora=B),
    PrefixKeys(salt="a", lora=A),
    PrefixKeys(salt="b", lora=A),
    PrefixKeys(salt="a", lora=B),
]


@pytest.mark.parametrize("specs", [(FULL,), (FULL, sliding(5))])
def test_worlds_never_see_each_other(specs: tuple[LayerSpec, ...]) -> None:
    """vLLM: salt and adapter isolate, and a salt is never taken for an adapter."""
    cache = Cache(*specs, num_blocks=100)
    for seq_id, keys in enumerate(WORLDS):
        assert cache.start(seq_id, span(0, 10), keys=keys) == 0
    for seq_id, keys in enumerate(WORLDS):
        assert cache.start(100 + seq_id, span(0, 10), keys=keys) == 8
        assert cache.table(100 + seq_id)[:2] == cache.table(seq_id)[:2]
    tables = [set(cache.table(seq_id)) for seq_id in range(len(WORLDS))]
    assert all(one.isdisjoint(other) for one, other in permutations(tables, 2))


def test_not_even_a_part_of_a_block_is_seen() -> None:
    cache = Cache(FULL, num_blocks=10)
    cache.start(0, span(0, 8), keys=PrefixKeys(salt="a"))
    for keys in (NO_KEYS, PrefixKeys(salt="b"), PrefixKeys(lora=A)):
        assert cache.lookup([0, 1, 2, 99], keys).num_tokens == 0
    assert cache.lookup([0, 1, 2, 99], PrefixKeys(salt="a")).num_tokens == 3


def test_keys_do_not_run_into_each_other() -> None:
    """Values that spell other tags: each is still its own."""
    cache = Cache(FULL, num_blocks=40)
    tricky = [
        PrefixKeys(salt="a", lora=B),
        PrefixKeys(salt=f"a'), ('lora', '{B}"),
        PrefixKeys(salt=AB),
        PrefixKeys(lora=AB),
        PrefixKeys(salt="lora", lora=B),
    ]
    for seq_id, keys in enumerate(tricky):
        assert cache.start(seq_id, span(0, 5), keys=keys) == 0
    index = cache.blocks.index
    tips = [cache.blocks._cache.tail(row) for row in cache.blocks.tables.rows.values()]
    assert len({index.block_hash(index.row(tip)) for tip in tips}) == len(tricky)


def test_a_new_salt_says_that_it_is_new() -> None:
    cache = Cache(FULL, num_blocks=10)
    cache.start(0, span(0, 8), keys=PrefixKeys(salt="a"))
    assert cache.lookup(span(0, 9), PrefixKeys(salt="b")).shortfall == "salt"
    # Under a salt that is used, content is what is missing; and without one there is none to blame.
    assert cache.lookup(span(50, 59), PrefixKeys(salt="a")).shortfall == "unknown"
    assert cache.lookup(span(0, 9)).shortfall == "unknown"


def test_a_fork_stays_in_its_world() -> None:
    cache = Cache(FULL, num_blocks=10)
    salt = PrefixKeys(salt="a")
    cache.start(0, span(0, 6), keys=salt)
    cache.fork(0, 1)
    cache.free(0)
    cache.extend(1, [6, 7])
    assert cache.lookup(span(0, 9)).num_tokens == 0
    assert cache.lookup(span(0, 9), salt).num_tokens == 8


def test_a_state_is_kept_under_its_salt() -> None:
    cache = Cache(STATE, num_blocks=10)
    salt = PrefixKeys(salt="a")
    cache.start(0, span(0, 4), keys=salt)
    assert cache.keep_state(0)
    assert cache.lookup(span(0, 6)).num_tokens == 0
    assert cache.start(1, span(0, 6), keys=salt) == 4


# -- images --------------------------------------------------------------------------------------


def with_images(*images: tuple[str, int, int]) -> PrefixKeys:
    return PrefixKeys(
        images=tuple(Image(content_id=i, start=s, num_tokens=n) for i, s, n in images)
    )


PLACEHOLDERS = [1, 2, 3, *[0] * 6, 9, 10, 11, 12]  # an image in tokens 3 … 8: blocks 0, 1 and 2


def test_the_same_placeholders_for_another_image_are_another_prompt() -> None:
    """vLLM: the token ids are equal, what they stand for is not."""
    cache = Cache(FULL, num_blocks=20)
    assert cache.start(0, PLACEHOLDERS, keys=with_images(("cat", 3, 6))) == 0
    assert cache.start(1, PLACEHOLDERS, keys=with_images(("dog", 3, 6))) == 0
    assert cache.start(2, PLACEHOLDERS) == 0
    assert cache.start(3, PLACEHOLDERS, keys=with_images(("cat", 3, 6))) == 12


def test_the_same_image_at_another_place_is_another_prompt() -> None:
    """vLLM: blocks that hold other parts of an image differ, though all their tokens are alike."""
    cache = Cache(FULL, num_blocks=20)
    tokens = [0] * 12
    cache.start(0, tokens, keys=with_images(("cat", 0, 8)))
    assert cache.lookup(tokens, with_images(("cat", 1, 8))).num_tokens == 0
    assert cache.lookup(tokens, with_images(("cat", 4, 8))).num_tokens == 0
    assert cache.lookup(tokens, with_images(("cat", 0, 8))).num_tokens == 11


def test_what_comes_before_an_image_is_shared() -> None:
    cache = Cache(FULL, num_blocks=20)
    tokens = [*span(0, 4), *[0] * 4, *span(8, 13)]
    cache.start(0, tokens, keys=with_images(("cat", 4, 4)))
    assert cache.start(1, tokens, keys=with_images(("dog", 4, 4))) == 4
    assert cache.start(2, [*span(0, 4), 77, 78]) == 4
    # What follows an image depends on it: the last block has the same tokens in both.
    assert cache.table(0)[2] != cache.table(1)[2]


def test_two_images_in_one_block() -> None:
    cache = Cache(FULL, num_blocks=20)
    tokens = [*[0] * 8, 5]
    cache.start(0, tokens, keys=with_images(("cat", 0, 2), ("dog", 2, 2)))
    assert cache.lookup(tokens, with_images(("dog", 0, 2), ("cat", 2, 2))).num_tokens == 0
    assert cache.lookup(tokens, with_images(("cat", 0, 2))).num_tokens == 0
    # In whichever order they are named.
    assert cache.lookup(tokens, with_images(("dog", 2, 2), ("cat", 0, 2))).num_tokens == 8


def test_a_block_with_an_image_is_not_shared_in_part() -> None:
    """Where an image reaches into a block, only the whole of it is compared."""
    cache = Cache(FULL, num_blocks=20)
    tokens = [*span(0, 4), 5, 6, 0, 0]
    cache.start(0, tokens, keys=with_images(("cat", 6, 2)))
    hit = cache.lookup([*span(0, 4), 5, 6, 9, 9], with_images(("dog", 6, 2)))
    assert hit.num_tokens == 4
    assert cache.lookup([*span(0, 4), 5, 6, 9, 9]).num_tokens == 4


def test_text_that_reads_as_an_images_placeholders_is_not_shared_in_part() -> None:
    cache = Cache(FULL, num_blocks=20)
    tokens = [*span(0, 4), 5, 6, 0, 0, 9]
    cache.start(0, tokens)
    assert cache.lookup(tokens, with_images(("dog", 6, 2))).num_tokens == 4
    assert cache.lookup(tokens).num_tokens == 8


def test_which_blocks_an_image_reaches_into() -> None:
    keys = with_images(("cat", 3, 6), ("dog", 10, 1))
    assert keys.of_blocks(4) == (
        (("image", "cat@3"),),
        (("image", "cat@-1"),),
        (("image", "cat@-5"), ("image", "dog@2")),
    )
    assert keys.of_root() == NO_KEYS.of_root() == NO_KEYS.of_blocks(4) == ()
    assert PrefixKeys(salt="x", lora=A).of_root() == (("salt", "x"), ("lora", A))


@pytest.mark.parametrize("lora", ["sql-writer", "a" * 63, "A" * 64, f"{A}\n", f"{A}{B}"])
def test_an_adapters_name_is_refused(lora: str) -> None:
    with pytest.raises(RequestError, match="must be 64 hex digits, a hash of the adapter's"):
        PrefixKeys(lora=lora)


def test_an_adapter_that_was_replaced_leaves_no_record_behind_that_is_read() -> None:
    """Its blocks have other names in a tier, and other headers; going back, the old ones."""
    form = RecordFormat(
        bytes(32),
        0,
        SIZE,
        [Part(layer=0, dtype="int8", order="heads first", shape=(8,), num_bytes=8)],
        Checksums(),
    )
    found = []
    for keys in (NO_KEYS, PrefixKeys(lora=A), PrefixKeys(lora=B), PrefixKeys(lora=A)):
        cache = Cache(FULL, num_blocks=10)
        cache.blocks.index.filled = []
        cache.start(0, span(0, 2 * SIZE), keys=keys)
        names = []
        for node in np.concatenate(cache.blocks.index.filled).tolist():
            identity = cache.blocks.index.identity(node)
            assert identity is not None
            names.append(form.name(form.header(identity)))
        assert len(names) == 2
        found.append(names)
    assert found[1] == found[3]
    assert len({name for names in found[:3] for name in names}) == 6
