"""Vacancies against a set, and where sequences that grow together come to lie."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conformance.covering import examples
from kv.caches import FULL, SIZE, STATE, Cache, sliding, span
from quire.kv import Release
from quire.kv.block_pool import FreeList

Ids = npt.NDArray[np.intp]


def ids(*values: int) -> Ids:
    return np.array(values, np.intp)


def take(vacancies: FreeList, *after: int) -> list[int]:
    return vacancies.take(ids(*after)).tolist()


def test_at_first_the_lowest_then_what_came_last() -> None:
    some = FreeList(8)
    assert some.pop(3).tolist() == [0, 1, 2]
    some.put(ids(2, 0))
    assert some.pop(3).tolist() == [0, 2, 3]
    some.check()


def test_the_next_one_if_it_is_vacant() -> None:
    some = FreeList(96)
    assert take(some, -1, -1) == [0, 1]  # one run
    assert take(some, 1) == [2]
    assert take(some, -1) == [32]  # another begins an extent
    assert take(some, 2, 32) == [3, 33]
    some.put(ids(2))
    assert take(some, 1, 3) == [2, 4]
    assert take(some, 1) == [64]  # 2 is not vacant
    some.check()


def test_who_shares_a_block_cannot_both_have_the_next() -> None:
    some = FreeList(96)
    some.pop(1)
    assert take(some, 0, 0, 0) == [1, 32, 64]
    some.check()


def test_the_last_one_has_no_next() -> None:
    some = FreeList(4)
    some.pop(4)
    some.put(ids(0, 1))
    assert sorted(take(some, 3, -1)) == [0, 1]
    some.check()


def test_a_long_run_takes_extents_that_lie_side_by_side() -> None:
    some = FreeList(200)
    take(some, -1)
    assert take(some, *[-1] * 70) == list(range(32, 102))
    assert take(some, 101, *[-1] * 9) == list(range(102, 112))


def test_some_take_one_and_some_take_several() -> None:
    some = FreeList(320)
    assert take(some, -1, -1) == [0, 1]
    assert take(some, *[-1] * 3) == [32, 33, 34]
    assert take(some, 1, -1, 34, 1) == [64, 65, 35, 2]  # who takes one goes first
    assert take(some, -1, 65, -1, 35) == [96, 66, 67, 36]
    some.check()


def test_without_a_whole_extent_the_middle_of_what_is_left() -> None:
    some = FreeList(32)
    assert take(some, *[-1] * 12) == list(range(12))
    assert take(some, -1) == [22]  # 12 … 31 are left, and 11 may grow
    assert take(some, 11, 22) == [12, 23]


def test_what_became_vacant_last_goes_first_where_little_is_left() -> None:
    some = FreeList(320)
    some.pop(320)
    some.put(ids(50, 200, 100, 101, 7))
    assert take(some, 99, 33) == [100, 7]
    assert take(some, -1, -1) == [101, 200]
    assert take(some, 199) == [50]
    some.check()


class VacanciesMachine(RuleBasedStateMachine):
    """Beside a set, and the order in which its members came."""

    @initialize(count=st.sampled_from([1, 5, 40, 130]))
    def build(self, count: int) -> None:
        self.count, self.some = count, FreeList(count)
        self.vacant = list(range(count))[::-1]  # what came last is last

    def used(self) -> list[int]:
        return sorted(set(range(self.count)) - set(self.vacant))

    def gone(self, found: Sequence[int], count: int) -> None:
        assert len(set(found)) == len(found) == count
        assert set(found) <= set(self.vacant), "taken, and not vacant"
        self.vacant = [each for each in self.vacant if each not in set(found)]

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        if used := self.used():
            back = data.draw(st.lists(st.sampled_from(used), unique=True))
            self.some.put(ids(*back))
            self.vacant += back

    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.vacant)))
        wanted = self.vacant[len(self.vacant) - count :][::-1]
        assert self.some.pop(count).tolist() == wanted
        self.gone(wanted, count)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        most = min(len(self.vacant), 50)
        before = st.sampled_from([-1, *self.used()])
        after = data.draw(st.lists(before, max_size=most))
        if not after:
            return
        found = take(self.some, *after)
        if -1 not in after:  # each on its own: the first gets the next one
            wanted = [each + 1 for each in dict.fromkeys(after)]
            firsts = [after.index(each) for each in dict.fromkeys(after)]
            for want, at in zip(wanted, firsts, strict=True):
                assert (found[at] == want) == (want in self.vacant)
        self.gone(found, len(after))

    @invariant()
    def same(self) -> None:
        if hasattr(self, "some"):
            self.some.check()
            assert len(self.some) == len(self.vacant)
            assert self.some.are_in(ids(*range(self.count))).nonzero()[0].tolist() == sorted(
                self.vacant
            )


TestVacancies = VacanciesMachine.TestCase
TestVacancies.settings = settings(
    max_examples=examples(40, of=80), stateful_step_count=30, deadline=None
)


# -- sequences -----------------------------------------------------------------------------------


def neighbours(cache: Cache, seq_ids: Sequence[int], group: int = 0) -> float:
    """The share of pairs in block tables that are neighbours in memory."""
    pairs = [pair for seq_id in seq_ids for pair in pairwise(cache.held(seq_id, group))]
    return sum(b == a + 1 for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("caching", [False, True])
def test_sequences_that_decode_together_lie_side_by_side(caching: bool) -> None:
    cache = Cache(FULL, num_blocks=4 * 64, caching=caching)
    for seq_id in range(4):
        cache.start(seq_id, span(1000 * seq_id, 1000 * seq_id + 5 * SIZE + seq_id))
    for token in range(20 * SIZE):
        assert cache.extend_each({seq_id: [9000 + token] for seq_id in range(4)}) == 4
    assert neighbours(cache, range(4)) == 1


def test_a_window_and_a_state_go_on_too() -> None:
    cache = Cache(sliding(4 * SIZE), STATE, num_blocks=400)
    for seq_id in range(3):
        cache.start(seq_id, span(1000 * seq_id, 1000 * seq_id + 2 * SIZE + seq_id), read=False)
    for token in range(8 * SIZE):
        assert cache.extend_each({seq_id: [9000 + token] for seq_id in range(3)}) == 3
    assert neighbours(cache, range(3)) == 1


def test_what_follows_a_hit_lies_right_behind_it() -> None:
    cache = Cache(FULL, num_blocks=400)
    cache.start(0, span(0, 3 * SIZE))
    cache.free(0)
    assert cache.start(1, [*span(0, 3 * SIZE), *span(100, 100 + 2 * SIZE)]) == 3 * SIZE
    assert neighbours(cache, [1]) == 1


def test_what_is_cached_is_not_taken_for_it() -> None:
    """The next block holds what is cached: it stays, as long as there is room elsewhere."""
    cache = Cache(FULL, num_blocks=12)
    cache.start(0, span(0, 3 * SIZE))
    cache.free(0)
    assert cache.start(1, [*span(0, SIZE), 50]) == SIZE
    first, second = cache.held(1)
    assert cache.blocks.pools[0].nodes[first + 1] >= 0
    assert second != first + 1
    assert cache.num_cached == 2


def test_evicted_blocks_are_used_again_with_their_pages() -> None:
    """Without spare addresses there is nowhere else to go."""
    cache = Cache(FULL, num_blocks=8)
    cache.start(0, span(0, 8 * SIZE))
    cache.free(0)
    cache.start(1, span(500, 500 + 4 * SIZE))
    assert cache.changes == []
    assert cache.blocks.pools.committed_bytes == cache.capacity_bytes


def test_in_spare_addresses_a_full_pool_finds_neighbours() -> None:
    """Pages move there from what is evicted; never more are committed than before."""
    cache = Cache(FULL, num_blocks=64, spare_blocks=64)
    for seq_id in range(12):  # all of it is cached, and not in runs of more than one prompt
        cache.start(seq_id, span(1000 * seq_id, 1000 * seq_id + 7 * SIZE))
        cache.free(seq_id)
    assert cache.num_cached == 64
    for seq_id in (20, 21):
        cache.start(seq_id, span(1000 * seq_id, 1000 * seq_id + 2 * SIZE))
    for token in range(12 * SIZE):
        assert cache.extend_each({20: [50_000 + token], 21: [60_000 + token]}) == 2
        assert cache.blocks.pools.committed_bytes <= cache.capacity_bytes
        cache.end_step()
    assert neighbours(cache, (20, 21)) > 0.5
    assert cache.blocks.pools.sizes[0].num_ids == 128


def test_a_shrunk_pool_gives_back_what_is_cached_wherever_it_lies() -> None:
    cache = Cache(FULL, num_blocks=32, spare_blocks=32)
    for seq_id in range(4):
        cache.start(seq_id, span(1000 * seq_id, 1000 * seq_id + 5 * SIZE))
    for seq_id in range(3):
        cache.free(seq_id)
    cache.blocks.resize(0)
    cache.end_step()
    assert sum(c.stop - c.start for c in cache.changes if isinstance(c, Release)) == 15 * SIZE
    cache.blocks.check()
