"""Runs: the lowest score first, within a score in order of coming; any block may leave."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kv.eviction_queue import _SLACK, EvictionQueue

Ids: TypeAlias = npt.NDArray[np.intp]


def ids(*values: int) -> Ids:
    return np.array(values, np.intp)


def made(num_blocks: int, *runs: tuple[int, tuple[int, ...]]) -> EvictionQueue:
    new = EvictionQueue(num_blocks)
    for score, blocks in runs:
        new.put(score, ids(*blocks))
    return new


def order(runs: EvictionQueue) -> list[int]:
    return [block for each in runs.runs() for block in each.tolist()]


def test_none() -> None:
    none = EvictionQueue(0)
    assert len(none) == 0
    assert none.pop(3).tolist() == []
    none.put(1, ids())
    none.remove(ids())
    assert none.pop(1).tolist() == order(none) == []
    none.check(ids())


def test_the_lowest_score_first_and_what_came_first_within_it() -> None:
    runs = made(9, (5, (3, 1)), (2, (7,)), (5, (0, 2)), (2, (8, 4)))
    assert order(runs) == [7, 8, 4, 3, 1, 0, 2]
    assert runs.first() == 7
    assert runs.pop(4).tolist() == [7, 8, 4, 3]
    runs.put(5, ids(7))
    runs.put(-1, ids(8))
    assert order(runs) == [8, 1, 0, 2, 7]
    runs.check(ids(0, 1, 2, 7, 8))


def test_fewer_if_there_are_fewer() -> None:
    runs = made(4, (0, (2, 0)))
    assert runs.pop(0).tolist() == []
    assert runs.pop(9).tolist() == [2, 0]
    assert runs.pop(1).tolist() == []
    assert len(runs) == 0


def test_out_of_one_run_only() -> None:
    runs = made(9, (1, (3, 1, 4)), (1, (5,)), (2, (6, 7)))
    assert runs.pop(2, one_run=True).tolist() == [3, 1]
    assert runs.pop(9, one_run=True).tolist() == [4]
    runs.remove(ids(5))
    assert runs.pop(9, one_run=True).tolist() == [6, 7]
    runs.check(ids())


@pytest.mark.parametrize(
    ("removed", "left"),
    [
        ((0,), [1, 2, 3, 4]),
        ((4,), [0, 1, 2, 3]),
        ((2,), [0, 1, 3, 4]),
        ((3, 1), [0, 2, 4]),
        ((4, 0, 2), [1, 3]),
        ((0, 1, 2, 3, 4), []),
    ],
)
def test_leaving_from_anywhere(removed: tuple[int, ...], left: list[int]) -> None:
    runs = made(5, (1, (0, 1, 2)), (2, (3, 4)))
    runs.remove(ids(*removed))
    assert len(runs) == len(left)
    assert order(runs) == left
    runs.check(ids(*left))
    assert runs.pop(5).tolist() == left


def test_who_leaves_and_comes_back_is_not_found_where_it_was() -> None:
    runs = made(4, (1, (0, 1, 2, 3)))
    runs.remove(ids(0))
    runs.put(1, ids(0))
    runs.remove(ids(2))
    runs.put(0, ids(2))
    assert order(runs) == [2, 1, 3, 0]
    assert runs.first() == 2


def test_drained_and_filled_again() -> None:
    runs = EvictionQueue(200)
    for turn in range(20):
        blocks = np.roll(np.arange(200), turn)
        for start in range(0, 200, 7):
            runs.put(turn, blocks[start : start + 7])
        assert runs.pop(200).tolist() == blocks.tolist()
        runs.check(ids())


def test_looking_takes_nothing() -> None:
    runs = made(8, (1, (5, 3, 7)))
    for _ in range(3):
        assert runs.first() == 5
        assert order(runs) == [5, 3, 7]
    runs.remove(ids(5))
    assert runs.first() == 3
    assert len(runs) == 2


def test_what_has_left_is_forgotten() -> None:
    """Room is for the blocks that there are, not for those that came and went; the order stays."""
    runs = made(8, *((block, (block,)) for block in range(8)))
    kept = list(range(8))
    for turn in range(5000):
        runs.remove(ids(turn % 8))
        runs.put(8 + turn, ids(turn % 8))
        kept.remove(turn % 8)
        kept.append(turn % 8)
    assert len(runs._heap) <= 2 * 8 + _SLACK + 1
    assert order(runs) == kept
    runs.check(ids(*range(8)))


class RunsMachine(RuleBasedStateMachine):
    """A list of (score, when, block) beside the runs."""

    @initialize(num_blocks=st.integers(0, 40))
    def build(self, num_blocks: int) -> None:
        self.runs, self.num_blocks = EvictionQueue(num_blocks), num_blocks
        self.model: list[tuple[int, int, int]] = []
        self.now = 0

    def some(self, data: st.DataObject, of: list[int]) -> list[int]:
        chosen: list[int] = data.draw(st.lists(st.sampled_from(of), unique=True)) if of else []
        return chosen

    def blocks(self) -> list[int]:
        return [block for _, _, block in sorted(self.model)]

    @rule(data=st.data(), score=st.integers(-3, 3))
    def put(self, data: st.DataObject, score: int) -> None:
        inside = self.blocks()
        batch = self.some(data, [i for i in range(self.num_blocks) if i not in inside])
        self.runs.put(score, ids(*batch))
        for block in batch:
            self.now += 1
            self.model.append((score, self.now, block))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        batch = self.some(data, self.blocks())
        self.runs.remove(ids(*batch))
        self.model = [each for each in self.model if each[2] not in batch]

    @rule(count=st.integers(0, 25))
    def pop(self, count: int) -> None:
        assert self.runs.pop(count).tolist() == self.blocks()[:count]
        self.model = sorted(self.model)[count:]

    @rule(count=st.integers(1, 12))
    def pop_of_one(self, count: int) -> None:
        """Some, all in order, all of one score; none only if there are none."""
        found = self.runs.pop(count, one_run=True).tolist()
        assert found == self.blocks()[: len(found)]
        assert bool(found) == bool(self.model)
        assert len(found) <= count
        assert len({score for score, _, block in self.model if block in found}) <= 1
        self.model = sorted(self.model)[len(found) :]

    @rule(turns=st.integers(1, 60))
    def turn(self, turns: int) -> None:
        """Many leave and return one by one, until what is stale is swept."""
        for _ in range(turns):
            if self.model:
                score, _, block = min(self.model)
                self.runs.remove(ids(block))
                self.runs.put(score, ids(block))
                self.now += 1
                self.model[self.model.index(min(self.model))] = (score, self.now, block)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "runs"):
            return
        assert len(self.runs) == len(self.model)
        assert order(self.runs) == self.blocks()
        self.runs.check(ids(*sorted(self.blocks())))
        if self.model:
            assert self.runs.first() == self.blocks()[0]


TestRuns = RunsMachine.TestCase
TestRuns.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
