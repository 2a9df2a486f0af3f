"""BlockPool against an obvious dictionary, and its granules against the blocks in use."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance.covering import examples
from kv.caches import policy_pool
from quire.kv.block_pool import NO_NODE, BlockPool
from quire.kv.eviction import lru

Ids = npt.NDArray[np.intp]
CACHED = 0  # references of a block that no sequence holds and the index finds


def ids(blocks: Sequence[int]) -> Ids:
    return np.array(blocks, np.intp)


def make(num_blocks: int, granule: int = 1) -> BlockPool:
    policy = lru(policy_pool(num_blocks))
    return BlockPool(num_blocks, policy, granule_blocks=granule)


def release(pool: BlockPool, blocks: Ids, now: int = 0) -> Ids:
    return pool.release(blocks, now, 0) if len(blocks) else blocks


def know(pool: BlockPool, blocks: Sequence[int]) -> None:
    """The index finds these from now on: node n is called 100 + n here."""
    pool.nodes[ids(blocks)] = 100 + ids(blocks)


def test_a_fresh_pool_gives_consecutive_blocks() -> None:
    pool = make(10)
    blocks, opened = pool.take(4)
    assert blocks.tolist() == opened.tolist() == [0, 1, 2, 3]
    assert pool.take(2)[0].tolist() == [4, 5]
    assert pool.num_held == pool.num_open_granules == 6
    pool.check()


def test_a_block_that_the_index_knows_stays_when_its_holder_leaves() -> None:
    pool = make(4)
    blocks, _ = pool.take(3)
    know(pool, [0, 1])
    assert release(pool, blocks[::-1]).tolist() == [2]
    assert (pool.num_held, pool.num_cached, pool.num_open_granules) == (0, 2, 2)
    pool.check()
    assert pool.take(2)[0].tolist() == [2, 3]  # not those that have content


def test_deepest_first_is_the_order_of_eviction() -> None:
    """What was let go first goes first; a hit takes a block out of the middle."""
    pool = make(8)
    one, two = pool.take(3)[0], pool.take(3)[0]
    know(pool, range(6))
    release(pool, one[::-1])
    release(pool, two[::-1])
    pool.hold(ids([1, 4]))
    assert pool.num_cached == 4
    blocks, nodes = pool.evict(3, alike=False)
    assert blocks.tolist() == [2, 0, 5]
    assert nodes.tolist() == [102, 100, 105]
    pool.empty(blocks)
    pool.check()
    assert pool.evict(9, alike=False)[0].tolist() == [3]


def test_a_shared_block_goes_with_its_last_holder() -> None:
    pool = make(2)
    blocks, _ = pool.take(1)
    pool.hold(blocks)
    assert release(pool, blocks).tolist() == []
    assert pool.num_held == 1
    assert release(pool, blocks).tolist() == [0]
    assert pool.num_held == 0
    pool.check()


def test_all_holders_may_leave_in_one_batch() -> None:
    pool = make(4)
    blocks, _ = pool.take(3)
    pool.hold(blocks[:2])
    assert release(pool, ids([1, 0, 1, 2, 0])).tolist() == [1, 0, 2]
    assert pool.num_held == 0
    pool.check()


def test_taking_over_and_forgetting() -> None:
    pool = make(4)
    pool.take(4)
    know(pool, [0, 1, 2])
    release(pool, ids([0, 1]))
    pool.take_over(ids([1]))
    assert (pool.refs[1], pool.nodes[1]) == (1, NO_NODE)
    assert pool.forget(ids([0, 2])).tolist() == [0]  # block 2 is held: it stays
    assert (pool.num_held, pool.num_cached) == (3, 0)
    pool.check()
    assert release(pool, ids([1, 2, 3])).tolist() == [1, 2, 3]
    pool.check()


@pytest.mark.parametrize("granule", [2, 4])
def test_a_granule_closes_with_its_last_block(granule: int) -> None:
    pool = make(4 * granule, granule)
    blocks, opened = pool.take(4 * granule)
    assert opened.tolist() == [0, 1, 2, 3]
    for block in blocks.tolist():
        closed = release(pool, ids([block])).tolist()
        assert closed == ([block // granule] if block % granule == granule - 1 else [])
        pool.check()


def test_gaps_are_filled_before_a_granule_is_opened() -> None:
    pool = make(12, 4)
    assert pool.take(9)[1].tolist() == [0, 1, 2]
    release(pool, ids([1, 6]))
    assert [pool.num_granules_for(count) for count in (0, 5)] == [0, 0]
    blocks, opened = pool.take(5)
    assert sorted(blocks.tolist()) == [1, 6, 9, 10, 11]
    assert opened.tolist() == []
    assert [pool.num_granules_for(count) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
    pool.check()


def test_more_than_there_are_is_a_defect_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="3 ids asked, 2 left"):
        make(2).take(3)
    with pytest.raises(AssertionError, match="within a granule"):
        make(6, 4)


class PoolMachine(RuleBasedStateMachine):
    """A dictionary of reference counts beside the pool; 0 is a block that is only cached."""

    @initialize(num_granules=st.integers(1, 8), granule=st.sampled_from([1, 2, 4]))
    def build(self, num_granules: int, granule: int) -> None:
        self.num_blocks, self.granule = num_granules * granule, granule
        self.pool = make(self.num_blocks, granule)
        self.refs: dict[int, int] = {}
        self.known: set[int] = set()
        self.queue: list[int] = []  # cached blocks, in the order of eviction
        self.now = 0

    # -- the model -------------------------------------------------------------------------------

    def granules(self, *, held: bool = False) -> set[int]:
        """Those with a block that is not empty, or that is held."""
        return {b // self.granule for b, count in self.refs.items() if count or not held}

    def drop(self, block: int) -> None:
        del self.refs[block]
        self.known.discard(block)

    def lose(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            if block in self.known:
                self.queue.append(block)
            else:
                self.drop(block)

    def gain(self, block: int) -> None:
        if not self.refs[block]:
            self.queue.remove(block)
        self.refs[block] += 1

    def draw(self, data: st.DataObject, of: list[int]) -> list[int]:
        drawn: list[int] = data.draw(st.lists(st.sampled_from(of), unique=True)) if of else []
        return drawn

    def held(self) -> list[int]:
        return sorted(block for block, count in self.refs.items() if count)

    # -- rules -----------------------------------------------------------------------------------

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.num_blocks - len(self.refs)))
        gaps = len(self.granules()) * self.granule - len(self.refs)
        for more in (0, count, count + 9):
            wanted = -(-max(0, more - gaps) // self.granule)
            assert self.pool.num_granules_for(more) == wanted
        before = self.granules()
        after = None
        if count and data.draw(st.booleans()):
            places = st.sampled_from([-1, *self.held()])
            after = ids(data.draw(st.lists(places, min_size=count, max_size=count)))
        blocks, opened = self.pool.take(count, after)
        assert len(set(blocks.tolist())) == count
        assert set(blocks.tolist()).isdisjoint(self.refs)
        self.refs |= dict.fromkeys(blocks.tolist(), 1)
        assert set(opened.tolist()) == self.granules() - before
        assert len(opened) == -(-max(0, count - gaps) // self.granule), "opened without need"

    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        """The index is told what some held blocks contain."""
        blocks = self.draw(data, [block for block in self.held() if block not in self.known])
        know(self.pool, blocks)
        self.known.update(blocks)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        blocks = self.draw(data, sorted(self.refs))
        self.pool.hold(ids(blocks))
        for block in blocks:
            self.gain(block)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Some holders leave, in one batch: a block may be in it once for each."""
        holders = [block for block, count in self.refs.items() for _ in range(count)]
        places = self.draw(data, list(range(len(holders))))
        before = self.granules()
        self.now += 1
        closed = release(self.pool, ids([holders[place] for place in places]), self.now)
        lost = [holders[place] for place in places]
        first = list(dict.fromkeys(lost))  # the queue is in the order of first mention
        for block in first:
            for _ in range(lost.count(block)):
                self.lose(block)
        assert set(closed.tolist()) == before - self.granules()
        assert len(set(closed.tolist())) == len(closed)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        victims = self.queue[:count]
        before = self.granules()
        blocks, nodes = self.pool.evict(count, alike=False)
        assert blocks.tolist() == victims
        assert nodes.tolist() == [100 + block for block in victims]
        self.queue = self.queue[count:]
        closed = self.pool.empty(blocks)
        for block in victims:
            self.drop(block)
        assert set(closed.tolist()) == before - self.granules()

    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        blocks = self.draw(data, sorted(self.queue))
        self.pool.take_over(ids(blocks))
        for block in blocks:
            self.gain(block)
            self.known.discard(block)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = self.draw(data, sorted(self.known))
        before = self.granules()
        closed = self.pool.forget(ids(blocks))
        for block in blocks:
            self.known.discard(block)
            if not self.refs[block]:
                self.queue.remove(block)
                del self.refs[block]
        assert set(closed.tolist()) == before - self.granules()

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def predict(self, data: st.DataObject) -> None:
        """What is foretold is the fewest granules that then can hold what is held."""
        holders = [block for block, count in self.refs.items() for _ in range(count)]
        lost = [holders[place] for place in self.draw(data, list(range(len(holders))))]
        gained = self.draw(data, sorted(set(self.refs) - set(lost)))
        num_new = data.draw(st.integers(0, self.num_blocks))
        after = self.pool.held_granules_after(ids(lost), ids(gained), num_new)
        self.same()  # a question changes nothing
        held = {b for b, count in self.refs.items() if count > lost.count(b)} | set(gained)
        granules = {block // self.granule for block in held}
        gaps = len(granules) * self.granule - len(held)
        assert after == len(granules) + -(-max(0, num_new - gaps) // self.granule)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        held = self.held()
        assert self.pool.num_held == len(held)
        assert self.pool.num_cached == len(self.queue)
        assert self.pool.num_open_granules == len(self.granules())
        assert self.pool.num_held_granules == len(self.granules(held=True))
        wanted = [self.refs.get(block, 0) for block in range(self.num_blocks)]
        assert self.pool.refs.tolist() == wanted
        assert set(np.flatnonzero(self.pool.nodes != NO_NODE).tolist()) == self.known


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=examples(30, of=60), stateful_step_count=30, deadline=None
)


@pytest.mark.parametrize("granule", [1, 2, 4])
def test_a_pool_of_empty_granules_becomes_what_was_foretold(granule: int) -> None:
    """Where nothing is only cached, taking and releasing lead exactly where the question said."""
    pool = make(8 * granule, granule)
    pool.take(6 * granule)
    release(pool, ids([0, 3, 5]))
    for lost, count in (([1], 1), ([2, 4], 3), ([], 2), ([], 0)):
        after = pool.held_granules_after(ids(lost), ids([]), count)
        release(pool, ids(lost))
        pool.take(count)
        assert pool.num_held_granules == after
        pool.check()
