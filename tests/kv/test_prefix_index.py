"""The prefix index: equality and not hashes, ids that never return, and hashes for the outside."""

from hashlib import sha256

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from quire.kv.prefix_index import NO_BLOCK, BlockRemoved, BlockStored, Extra, PrefixIndex

SIZE = 4


def data(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def ids(*blocks: int) -> npt.NDArray[np.intp]:
    return np.array(blocks, np.intp)


def grow(index: PrefixIndex, root: int, *blocks: bytes, extras: tuple[Extra, ...] = ()) -> int:
    """A sequence fills these blocks; the node that it ends in. It stands in ``root`` before."""
    tip = root
    for number, tokens in enumerate(blocks):
        tip, _ = index.advance(tip, tokens, extras[number] if number < len(extras) else ())
    return tip


A, B, C, D = data(1, 2, 3, 4), data(5, 6, 7, 8), data(9, 10, 11, 12), data(1, 2, 3, 5)


# -- finding -------------------------------------------------------------------------------------


def test_whole_blocks_are_found_as_far_as_they_go() -> None:
    index = PrefixIndex(1, SIZE)
    tip = grow(index, index.root(), A, B, C)
    root = index.root()
    path = index.walk(root, A + B + C + data(13, 14))
    assert len(path) == 3
    assert path[-1] == tip
    assert index.walk(root, A + B + D) == path[:2]
    assert index.walk(root, A + data(5, 6, 7)) == path[:1]
    assert index.walk(root, data(1, 2, 3)) == []
    assert index.walk(root, B + A) == []
    index.check()


def test_the_same_tokens_after_others_are_another_node() -> None:
    index = PrefixIndex(1, SIZE)
    one = grow(index, index.root(), A, C)
    other = grow(index, index.root(), B, C)
    assert one != other
    assert index.parent(one) != index.parent(other)
    index.check()


def test_who_fills_what_is_known_gets_the_same_node() -> None:
    index = PrefixIndex(1, SIZE)
    one, is_new = index.advance(index.root(), A)
    assert is_new
    assert index.advance(index.root(), A) == (one, False)
    assert len(index) == 2  # with the root
    index.check()


def test_bytes_of_one_token_do_not_run_into_the_next() -> None:
    index = PrefixIndex(1, SIZE)
    grow(index, index.root(), data(1, 256, 0, 0))
    assert index.walk(index.root(), data(1, 1, 0, 0)) == []
    near = index.nearest_child(index.root(), data(1, 1))
    assert near is not None
    assert near[1] == 1


def test_equality_holds_where_every_hash_collides() -> None:
    class Bytes(bytes):
        def __hash__(self) -> int:
            return 7

    index = PrefixIndex(1, SIZE)
    nodes = {index.advance(index.root(), Bytes(each))[0] for each in (A, B, C, D)}
    assert len(nodes) == 4
    index.check()


# -- living and dying ----------------------------------------------------------------------------


def test_a_node_ends_with_the_last_that_needs_it() -> None:
    index = PrefixIndex(2, SIZE)
    tip = grow(index, index.root(), A)
    index.attach(0, index.rows([tip]), ids(5))
    index.attach(1, index.rows([tip]), ids(6))
    index.decref(tip)
    root = index.root()
    assert index.walk(root, A) == [tip]
    index.detach(0, index.rows([tip]))
    assert index.walk(root, A) == [tip]
    index.detach(1, index.rows([tip]))
    assert index.walk(root, A) == []
    index.decref(root)
    assert len(index) == 0
    index.check()


def test_a_node_outlives_its_block_while_it_has_children() -> None:
    """Windows lose their early blocks first: what follows is still found."""
    index = PrefixIndex(1, SIZE)
    tip = grow(index, index.root(), A, B, C)
    root = index.root()
    path = index.walk(root, A + B + C)
    index.attach(0, index.rows(path), ids(0, 1, 2))
    index.decref(tip)
    index.detach(0, index.rows(path[:2]))
    assert index.walk(root, A + B + C) == path
    assert index.blocks[0][index.rows(path)].tolist() == [NO_BLOCK, NO_BLOCK, 2]
    index.detach(0, index.rows(path[2:]))
    assert index.walk(root, A + B + C) == []
    assert len(index) == 1
    index.check()


def test_ids_are_never_used_again() -> None:
    """A row may be; the id says which of its nodes is meant."""
    index = PrefixIndex(1, SIZE)
    root = index.root()
    seen = set()
    for turn in range(50):
        tip = grow(index, index.root(), data(turn, 0, 0, 0))
        assert tip not in seen
        seen.add(tip)
        index.decref(tip)
        index.check()
    assert len({index.row(node) for node in seen}) == 1
    assert len(index) == 1
    index.decref(root)


def test_a_key_with_a_dead_parent_matches_nothing() -> None:
    index = PrefixIndex(1, SIZE)
    root = index.root()
    old = grow(index, index.root(), A)
    child = grow(index, index.root(), A, B)
    index.decref(child)
    index.decref(old)
    new = grow(index, index.root(), C)  # on the row that A had, or B
    assert index.row(new) in (index.row(old), index.row(child))
    assert index.walk(root, C + B) == [new]
    assert index.walk(old, B) == index.walk(child, B) == []
    assert index.nearest_child(new, B) is None
    index.check()


def test_a_row_that_is_used_again_has_nothing_of_the_node_before() -> None:
    index = PrefixIndex(1, SIZE, keep_events=True)
    root = index.root()
    tip = grow(index, index.root(), A)
    index.attach(0, index.rows([tip]), ids(3))
    before = index.block_hash(index.row(tip))
    index.decref(tip)
    index.detach(0, index.rows([tip]))
    again = grow(index, index.root(), B)
    row = index.row(again)
    assert row == index.row(tip)
    assert index.blocks[0][row] == NO_BLOCK
    assert index.tokens(row) == B
    assert index.block_hash(row) != before
    index.decref(root)


def test_more_rows_than_there_was_room_for() -> None:
    index = PrefixIndex(2, SIZE)
    tips = [grow(index, index.root(), data(i, i, i, i)) for i in range(500)]
    index.attach(1, index.rows(tips), np.arange(500))
    assert index.blocks[1][index.rows(tips)].tolist() == list(range(500))
    assert (index.blocks[0][index.rows(tips)] == NO_BLOCK).all()
    index.check()


def test_the_path_to_a_node() -> None:
    index = PrefixIndex(1, SIZE)
    tip = grow(index, index.root((("salt", "x"),)), A, B, C)
    rows = index.path(index.row(tip))
    assert [index.tokens(row) for row in rows] == [A, B, C]
    assert rows[-1] == index.row(tip)


# -- extra keys ----------------------------------------------------------------------------------


def test_roots_with_other_extras_are_other_worlds() -> None:
    index = PrefixIndex(1, SIZE)
    extras: list[Extra] = [(), (("salt", "x"),), (("lora", "x"),), (("salt", "x"), ("lora", "x"))]
    tips = [grow(index, index.root(extra), A, B) for extra in extras]
    assert len(set(tips)) == len(extras)
    for extra, tip in zip(extras, tips, strict=True):
        assert index.walk(index.root(extra), A + B)[-1] == tip
    index.check()


def test_extras_of_single_blocks() -> None:
    """The second block stands for an image: the first is shared, what follows is not."""
    index = PrefixIndex(1, SIZE)
    cat: tuple[Extra, ...] = ((), (("image", "cat@0"),))
    dog: tuple[Extra, ...] = ((), (("image", "dog@0"),))
    with_cat = grow(index, index.root(), A, B, C, extras=cat)
    with_dog = grow(index, index.root(), A, B, C, extras=dog)
    assert with_cat != with_dog
    root = index.root()
    one, other = (index.walk(root, A + B + C, extras) for extras in (cat, dog))
    assert one[-1] == with_cat
    assert other[-1] == with_dog
    assert one[0] == other[0]
    assert index.walk(root, A + B + C) == one[:1]
    index.check()


def test_only_plain_children_are_near() -> None:
    index = PrefixIndex(1, SIZE)
    grow(index, index.root(), B, extras=((("image", "cat@0"),),))
    assert index.nearest_child(index.root(), B) is None


# -- the child that begins most alike ------------------------------------------------------------

tokens_of_a_block = st.lists(
    st.sampled_from([0, 1, 2, 255, 256, 2**31 - 1]), min_size=SIZE, max_size=SIZE
)


def common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@given(
    st.lists(tokens_of_a_block, min_size=1, max_size=12, unique_by=tuple),
    st.lists(st.tuples(tokens_of_a_block, st.integers(1, SIZE)), min_size=1, max_size=8),
    st.integers(0, 12),
)
@settings(max_examples=examples(50, of=150), deadline=None)
def test_nearest_child_shares_most(
    children: list[list[int]], wanted: list[tuple[list[int], int]], num_gone: int
) -> None:
    """Against brute force, also after some of the children have gone."""
    index = PrefixIndex(1, SIZE)
    root = index.root()
    tips = [grow(index, index.root(), data(*child)) for child in children]
    for tip in tips[:num_gone]:
        index.decref(tip)
    left = dict(zip(tips[num_gone:], children[num_gone:], strict=True))
    for block, length in wanted:
        prompt = block[:length]
        longest = max((common(child, prompt) for child in left.values()), default=0)
        near = index.nearest_child(root, data(*prompt))
        if not longest:
            assert near is None
            continue
        assert near is not None
        assert near[1] == longest == common(left[near[0]], prompt)


# -- for the outside -----------------------------------------------------------------------------


def test_hashes_are_chained_sha256() -> None:
    """By hand: each over its parent's, its extra keys and its token ids as int32."""
    index = PrefixIndex(1, SIZE)
    tip = grow(index, index.root(), A, B)
    none = sha256(b"").digest()
    first = sha256(none + b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0").digest()
    second = sha256(first + B).digest()
    assert index.block_hash(index.row(tip)) == second
    assert index.block_hash(index.row(index.parent(tip))) == first

    salted = grow(index, index.root((("salt", "x"),)), A)
    root = sha256(repr((("salt", "x"),)).encode()).digest()
    assert index.block_hash(index.row(salted)) == sha256(root + A).digest()


def test_hashes_change_with_parent_tokens_and_extras() -> None:
    index = PrefixIndex(1, SIZE)
    image: Extra = (("image", "cat@0"),)
    tips = [
        grow(index, index.root(), A),
        grow(index, index.root(), D),
        grow(index, index.root(), A, A),
        grow(index, index.root(), B, A),
        grow(index, index.root((("salt", "x"),)), A),
        grow(index, index.root((("lora", "x"),)), A),
        grow(index, index.root(), A, extras=(image,)),
        grow(index, index.root(), A, A, extras=(image,)),
    ]
    assert len({index.block_hash(index.row(tip)) for tip in tips}) == len(tips)
    # … and with nothing else: another index, filled in another order, finds the same.
    other = PrefixIndex(1, SIZE)
    grow(other, other.root(), C)
    tip = grow(other, other.root(), B, A)
    assert other.block_hash(other.row(tip)) == index.block_hash(index.row(tips[3]))


def test_a_hash_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0

    def counted(start: bytes = b"") -> object:
        nonlocal computed
        computed += 1
        return sha256(start)

    monkeypatch.setattr("quire.kv.prefix_index.sha256", counted)
    index = PrefixIndex(1, SIZE)
    tip = grow(index, index.root(), *(data(i, i, i, i) for i in range(20)))
    assert computed == 0  # none was asked for
    index.block_hash(index.row(tip))
    assert computed == 21  # 20 blocks and the root
    for row in index.path(index.row(tip)):
        index.block_hash(row)
    index.block_hash(index.row(index.advance(tip, A)[0]))
    assert computed == 22


def test_a_long_chain_needs_no_deep_recursion() -> None:
    index = PrefixIndex(1, SIZE)
    tip = grow(index, index.root(), *(data(i, 0, 0, 0) for i in range(5000)))
    assert len(index.block_hash(index.row(tip))) == 32
    index.decref(tip)
    assert len(index) == 0


def test_events_say_what_is_found_and_what_no_longer() -> None:
    index = PrefixIndex(2, SIZE, keep_events=True)
    extras: tuple[Extra, ...] = ((), (("image", "cat@1"),))
    tip = grow(index, index.root((("salt", "x"),)), A, B, extras=extras)
    path = index.walk(index.root((("salt", "x"),)), A + B, extras)
    assert index.events == []  # a node without a block cannot be used
    index.attach(0, index.rows(path), ids(4, 9))
    index.attach(1, index.rows(path[1:]), ids(2))
    first, second = (index.block_hash(index.row(node)) for node in path)
    one = BlockStored(
        block_hash=first,
        parent_block_hash=None,
        token_ids=(1, 2, 3, 4),
        extra_keys=(("salt", "x"),),
        root_keys=(("salt", "x"),),
        group_idx=0,
    )
    two = BlockStored(
        block_hash=second,
        parent_block_hash=first,
        token_ids=(5, 6, 7, 8),
        extra_keys=(("image", "cat@1"),),
        root_keys=(("salt", "x"),),
        group_idx=0,
    )
    again = BlockStored(
        block_hash=second,
        parent_block_hash=first,
        token_ids=(5, 6, 7, 8),
        extra_keys=(("image", "cat@1"),),
        root_keys=(("salt", "x"),),
        group_idx=1,
    )
    assert index.events == [one, two, again]
    index.events.clear()
    index.decref(tip)
    index.detach(0, index.rows(path[::-1]))
    salt = (("salt", "x"),)
    removed = [
        BlockRemoved(block_hash=each, root_keys=salt, group_idx=0) for each in (second, first)
    ]
    assert index.events == removed


def test_without_events_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("quire.kv.prefix_index.sha256")
    index = PrefixIndex(1, SIZE)
    tip = grow(index, index.root(), A)
    index.attach(0, index.rows([tip]), ids(0))
    index.detach(0, index.rows([tip]))
    assert index.events == []
