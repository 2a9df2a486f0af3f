"""BlockPool against an obvious dictionary, and its granules against the blocks in use."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.blocks import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """A dictionary of reference counts beside the pool."""

    @initialize(num_blocks=st.integers(1, 20), granule=st.integers(1, 4))
    def build(self, num_blocks: int, granule: int) -> None:
        self.num_blocks, self.granule = num_blocks, granule
        self.pool = BlockPool(num_blocks, granule_blocks=granule)
        self.refs: dict[int, int] = {}

    def granules(self) -> set[int]:
        return {block // self.granule for block in self.refs}

    def take(self, num_blocks: int) -> set[int]:
        """Allocate, and the granules that were opened."""
        lowest = [block for block in range(self.num_blocks) if block not in self.refs][:num_blocks]
        before = self.granules()
        blocks, opened = self.pool.allocate(num_blocks)
        assert blocks == lowest
        self.refs |= dict.fromkeys(blocks, 1)
        assert set(opened) == self.granules() - before
        assert len(set(opened)) == len(opened)
        return set(opened)

    def lose(self, block: int) -> int | None:
        """Release, and the granule that was closed."""
        closed = self.pool.release(block)
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]
        granule = block // self.granule
        in_use = any(other // self.granule == granule for other in self.refs)
        assert closed == (None if in_use else granule)
        return closed

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        self.take(data.draw(st.integers(0, self.num_blocks - len(self.refs))))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.share(block)
        self.refs[block] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.lose(data.draw(st.sampled_from(sorted(self.refs))))

    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        """The predicted change is exactly what releasing and allocating then do."""
        held = st.sampled_from(sorted(self.refs)) if self.refs else st.nothing()
        released = data.draw(st.lists(held, unique=True))
        num_blocks = data.draw(st.integers(0, self.num_blocks))
        predicted = self.pool.granule_change(released, num_blocks)
        self.counts_agree()  # a question changes nothing

        freed = [block for block in released if self.refs[block] == 1]
        assert (predicted is None) == (num_blocks > self.num_blocks - len(self.refs) + len(freed))
        before = self.pool.num_granules
        for block in released:
            self.lose(block)
        if predicted is not None:
            self.take(num_blocks)
            assert self.pool.num_granules - before == predicted

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_free == self.num_blocks - len(self.refs)
        assert self.pool.num_granules == len(self.granules())
        wanted = [self.refs.get(block, 0) for block in range(self.num_blocks)]
        assert self.pool.refs.tolist() == wanted


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_lowest_ids_come_first() -> None:
    pool = BlockPool(10)
    assert pool.allocate(6) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    for block in (4, 1, 3):
        pool.release(block)
    assert pool.allocate(4)[0] == [1, 3, 4, 6]


@given(st.permutations(range(12)))
@settings(deadline=None, max_examples=30)
def test_a_granule_closes_with_its_last_block(order: list[int]) -> None:
    pool = BlockPool(12, granule_blocks=4)
    assert pool.allocate(12)[1] == [0, 1, 2]
    closed = [pool.release(block) for block in order]
    last = {granule: max(order.index(4 * granule + i) for i in range(4)) for granule in range(3)}
    assert closed == [
        block // 4 if last[block // 4] == index else None for index, block in enumerate(order)
    ]


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.share(0)
    assert pool.release(0) is None
    assert pool.num_free == 1
    assert pool.release(0) == 0
    assert pool.num_free == 2


def test_defects_of_the_caller_are_caught() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks asked, 2 free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="block 1 is free and cannot be shared"):
        pool.share(1)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(0)


def test_importing_the_room_loads_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import quire.blocks"
    subprocess.run([sys.executable, "-c", code], check=True)
