"""FirstFit against a bitmap of slots, and compaction carried out on a list of contents."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from quire.kv import FirstFit

NUM_SLOTS = 24
# A length asks for a range of it; a negative number frees one of those held.
actions = st.lists(st.integers(1, 9) | st.integers(-8, -1), max_size=40)


class Bitmap:
    """The same arena, as obvious as can be: the holder of each slot."""

    def __init__(self) -> None:
        self.owners: list[int | None] = [None] * NUM_SLOTS

    def holes(self) -> list[tuple[int, int]]:
        holes, start = [], 0
        for slot, owner in enumerate([*self.owners, -1]):
            if owner is not None:
                if slot > start:
                    holes.append((start, slot - start))
                start = slot + 1
        return holes

    def allocate(self, length: int, owner: int) -> int | None:
        start = next((start for start, room in self.holes() if room >= length), None)
        if start is not None:
            self.owners[start : start + length] = [owner] * length
        return start

    def free(self, owner: int) -> None:
        self.owners = [None if held == owner else held for held in self.owners]


def perform(asked: list[int]) -> tuple[FirstFit, Bitmap, dict[int, int]]:
    """Both arenas after the actions, and where each owner's range begins."""
    arena, bitmap, starts = FirstFit(NUM_SLOTS), Bitmap(), {}
    for owner, action in enumerate(asked):
        if action > 0:
            start = arena.allocate(action)
            assert start == bitmap.allocate(action, owner)
            if start is not None:
                starts[owner] = start
        elif starts:
            freed = sorted(starts)[action % len(starts)]
            arena.free(starts.pop(freed))
            bitmap.free(freed)
        arena.check()
        rooms = [room for _, room in bitmap.holes()]
        assert arena.free_slots == sum(rooms)
        assert arena.largest_hole == max(rooms, default=0)
        outside = 1 - max(rooms) / sum(rooms) if rooms else 0.0
        assert arena.fragmentation == pytest.approx(outside)
    return arena, bitmap, starts


@settings(deadline=None, max_examples=examples(50, of=150))
@given(actions)
def test_it_does_what_a_bitmap_does(asked: list[int]) -> None:
    perform(asked)


@settings(deadline=None, max_examples=examples(50, of=150))
@given(actions)
def test_compaction_keeps_every_range_whole(asked: list[int]) -> None:
    arena, bitmap, starts = perform(asked)
    lengths = {owner: bitmap.owners.count(owner) for owner in starts}
    contents = bitmap.owners.copy()
    in_order = sorted(starts, key=starts.__getitem__)

    moves = arena.compact()
    for move in moves:
        # A later move's source must not have been written to by an earlier one.
        piece = contents[move.source : move.source + move.length]
        assert len(set(piece)) == 1, f"{move} copies what another has overwritten"
        contents[move.target : move.target + move.length] = piece
    packed = [owner for owner in in_order for _ in range(lengths[owner])]
    assert contents[: len(packed)] == packed
    assert all(move.target < move.source for move in moves)
    arena.check()
    assert arena.fragmentation == 0
    assert arena.largest_hole == arena.free_slots == NUM_SLOTS - len(packed)
    assert arena.compact() == []


def test_the_lowest_hole_that_is_long_enough() -> None:
    arena = FirstFit(20)
    assert [arena.allocate(4) for _ in range(5)] == [0, 4, 8, 12, 16]
    arena.free(4)
    arena.free(12)
    arena.free(16)
    assert arena.allocate(5) == 12
    assert arena.allocate(2) == 4
    assert arena.allocate(2) == 6
    assert arena.allocate(4) is None
    with pytest.raises(KeyError):
        arena.free(5)
    arena.check()


def test_enough_room_and_yet_none_that_fits() -> None:
    """Seeds 1 and 4: external fragmentation, its measure, and the pass that cures it."""
    arena = FirstFit(100)
    for _ in range(10):
        arena.allocate(10)
    for start in range(0, 100, 20):
        arena.free(start)
    assert arena.free_slots == 50
    assert arena.allocate(11) is None
    assert arena.fragmentation == pytest.approx(0.8)  # five holes of ten: one is a fifth
    assert sum(move.length for move in arena.compact()) == 50
    assert arena.fragmentation == 0
    assert arena.allocate(50) == 50


def test_an_arena_of_nothing() -> None:
    arena = FirstFit(0)
    assert arena.allocate(1) is None
    assert arena.largest_hole == arena.free_slots == arena.fragmentation == 0
    arena.check()
