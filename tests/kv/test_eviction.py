"""The seam of the eviction policies, held to by the plainest of them: least recently used."""

import numpy as np
import numpy.typing as npt
import pytest

from quire.kv.eviction import POLICIES, EvictionPolicy, lru


def ids(*blocks: int) -> npt.NDArray[np.intp]:
    return np.array(blocks, np.intp)


def plain(num_blocks: int) -> EvictionPolicy:
    return lru(num_blocks, lambda blocks: blocks.astype(np.uint32))


def let_go(policy: EvictionPolicy, now: int, *blocks: int, priority: int = 0) -> None:
    policy.use(ids(*blocks), now, priority)
    policy.free(ids(*blocks))


def test_what_was_let_go_first_goes_first() -> None:
    policy = plain(8)
    let_go(policy, 1, 3, 2, 1)
    let_go(policy, 2, 6, 5)
    assert len(policy) == 5
    assert policy.next_time() == 1
    policy.hold(ids(2, 6))
    let_go(policy, 3, 2)
    assert policy.evict(2).tolist() == [3, 1]
    assert policy.next_time() == 2
    assert policy.evict(9).tolist() == [5, 2]
    assert len(policy) == 0


def test_only_what_was_let_go_together() -> None:
    policy = plain(8)
    let_go(policy, 1, 3, 2, 1)
    let_go(policy, 2, 6, 5)
    assert policy.evict(9, alike=True).tolist() == [3, 2, 1]
    assert policy.evict(1, alike=True).tolist() == [6]


def test_who_matters_more_goes_later() -> None:
    policy = plain(8)
    let_go(policy, 1, 0, priority=-1)
    let_go(policy, 2, 1)
    let_go(policy, 3, 2, priority=5)
    assert policy.evict(9).tolist() == [2, 1, 0]


def test_who_matters_more_goes_later_in_a_batch() -> None:
    """Several sequences let go in one step, and a block that two of them held counts as both."""
    policy = plain(8)
    for blocks, priorities, order in (
        ([0, 1, 2], [0, 5, 0], [1, 0, 2]),
        ([0, 1, 2], [5, 0, -5], [0, 1, 2]),
        ([0, 1, 0, 2], [0, 1, 3, 1], [1, 2, 0]),
        ([0, 1, 0, 2], [3, 1, 0, 1], [1, 2, 0]),
    ):
        policy.use(ids(*blocks), 1, np.array(priorities, np.int8))
        policy.free(ids(0, 1, 2))
        assert policy.evict(9).tolist() == order


@pytest.mark.parametrize("name", ["lru", "lru-2"])
def test_the_order_is_the_same_when_the_clock_is_set_back(name: str) -> None:
    policy = POLICIES[name](8, lambda blocks: blocks.astype(np.uint32), 0)
    ticks = 1 << 30

    def use_twice(now: int, *blocks: int) -> None:
        let_go(policy, now, *blocks)
        policy.hold(ids(*blocks))
        let_go(policy, now + 1, *blocks)

    use_twice(ticks + 10, 0, 1)
    policy.rewind(ticks)
    assert policy.next_time() == 11
    use_twice(20, 2, 3)
    assert policy.evict(9).tolist() == [0, 1, 2, 3]


def test_check_names_what_may_be_evicted() -> None:
    policy = plain(4)
    let_go(policy, 1, 2, 0)
    policy.check(ids(0, 2))
    with pytest.raises(AssertionError):
        policy.check(ids(0, 1, 2))
    with pytest.raises(AssertionError):
        policy.check(ids(2))
