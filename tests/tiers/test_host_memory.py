"""Records in host memory: the budget, the order of eviction, and copies beside each other."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.tier_cases import buffers, content, loaded, new_names, soon, store, views
from quire.errors import ConfigError
from quire.tiers import TIERS, TierAddress, TierFull
from quire.tiers.host_memory import HostMemoryTier
from quire.tiers.use_order import TURN_S

LARGEST = 4096
SIZES = (64, 1000, 2048, LARGEST)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory:", "needs a size: memory:.size=2GiB"),
        ("memory:/path?size=1GiB", "memory has no path"),
        ("memory:?size=1GiB&age=7d", "unknown option 'age'; known: size"),
        ("memory:?size=4095", "holds no record: one takes 4.00 KiB"),
        ("memory:?size=8000000TiB", "gives no range of addresses"),
    ],
)
def test_an_address_that_cannot_work_says_why(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TIERS["memory"](TierAddress.parse(text), LARGEST, "0" * 16)


def filled(num_fit: int) -> tuple[HostMemoryTier, Clock]:
    clock = Clock()
    return HostMemoryTier(num_fit * LARGEST, LARGEST, clock), clock


def test_where_little_comes_again_what_was_used_stays() -> None:
    """Most names come once, and more between two uses of the others than fit.

    So what comes again has always gone before it does, until it is known by the names that went.
    """
    tier, clock = filled(256)
    good = new_names(180)
    found = 0
    for turn in range(30):
        clock.now_s += 2 * TURN_S
        for name in good:
            if tier.find([name], soon()):
                found += loaded(tier, [name])
            else:
                assert store(tier, [name]) == 1
        clock.now_s += 2 * TURN_S
        flood = new_names(400)
        for start in range(0, len(flood), 16):
            assert store(tier, flood[start : start + 16]) == len(flood[start : start + 16])
        found *= turn != 19  # the first turns are for learning
    assert found >= 0.8 * 10 * len(good)
    tier.check()


def test_it_tells_what_it_evicts_once_it_is_asked() -> None:
    tier, _ = filled(4)
    for _ in range(2):
        assert store(tier, new_names(4)) == 4
    assert tier.take_evicted() == []
    names = new_names(6)
    assert store(tier, names[:4]) == 4
    assert len(tier.take_evicted()) == 4
    assert store(tier, names[4:]) == 2
    assert sum(tier.find([name], soon()) for name in names) == 4
    assert {*tier.take_evicted()} == {name for name in names if not tier.find([name], soon())}
    tier.drop(names, soon())
    tier.clear(soon())
    assert tier.take_evicted() == []
    assert (tier.usage().num_records, tier.usage().used_bytes) == (0, 0)
    tier.check()


def test_what_was_used_long_ago_goes_when_others_are_used() -> None:
    tier, clock = filled(10)
    old, new = new_names(8), new_names(9)
    for names in (old, new):
        for name in names:
            clock.now_s += 2 * TURN_S
            assert store(tier, [name]) == 1
            assert loaded(tier, [name]) == 1
    assert loaded(tier, new) == 9
    assert tier.find(old, soon()) == 0


@pytest.mark.parametrize("is_used", [False, True])
def test_the_last_blocks_of_a_chain_go_first(is_used: bool) -> None:
    tier, clock = filled(20)
    chain = new_names(16)
    for start in range(0, 16, 4):
        clock.now_s += TURN_S / 10
        assert store(tier, chain[start : start + 4]) == 4
    if is_used:
        clock.now_s += 2 * TURN_S
        for start in range(0, 16, 4):
            clock.now_s += TURN_S / 10
            assert loaded(tier, chain[start : start + 4]) == 4
    clock.now_s += 2 * TURN_S
    passing = new_names(2)  # what comes makes time pass
    assert store(tier, passing) == 2
    tier.drop(passing, soon())
    clock.now_s += 2 * TURN_S
    others = new_names(10)
    for name in others:  # each is asked for at once, so that it is none that goes before the chain
        assert store(tier, [name]) == 1
        assert loaded(tier, [name]) == 1
    assert tier.find(chain, soon()) == 10
    assert sum(loaded(tier, [name]) for name in chain) == 10


@given(
    seed=st.integers(0, 2**32),
    num_fit=st.integers(1, 6),
    sizes=st.lists(st.integers(1, LARGEST), min_size=1, max_size=4),
)
def test_any_use_keeps_the_books(seed: int, num_fit: int, sizes: list[int]) -> None:
    tier, clock = filled(num_fit)
    draw, names = random.Random(seed), new_names(12)
    length = {name: draw.choice(sizes) for name in names}
    for _ in range(60):
        some = draw.sample(names, draw.randint(1, 4))
        records = [content(name, length[name]) for name in some]
        clock.now_s += draw.random() * TURN_S
        what = draw.random()
        if what < 0.5:
            count = tier.store(some, views(records), soon())
            assert tier.find(some, soon()) >= count >= 1
        elif what < 0.9:
            into = buffers([len(record) for record in records])
            count = tier.load(some, into, soon())
            assert count == tier.find(some, soon())
            assert into[:count] == records[:count]
        else:
            tier.drop(some[:2], soon())
            assert tier.find(some, soon()) == 0
        if draw.random() < 0.1:  # from now on it is stored with another length
            length[some[0]] = draw.choice(sizes)
            tier.drop(some[:1], soon())
        tier.check()
        usage = tier.usage()
        assert usage.used_bytes is not None
        assert usage.capacity_bytes is not None
        assert usage.used_bytes <= usage.capacity_bytes <= num_fit * LARGEST


def test_the_table_of_names_grows_with_small_records() -> None:
    tier = HostMemoryTier(300 * LARGEST, LARGEST)
    names = new_names(2300)
    for start in range(0, len(names), 100):
        assert store(tier, names[start : start + 100], 64) == 100
    assert sum(tier.find([name], soon()) for name in names) == len(names)
    tier.check()
    for start in range(0, len(names), 2):
        tier.drop(names[start : start + 1], soon())
    assert [tier.find([name], soon()) for name in names] == [0, 1] * (len(names) // 2)
    tier.check()


def test_a_record_that_is_being_copied_is_not_evicted() -> None:
    tier, failures = HostMemoryTier(6 * LARGEST, LARGEST), list[BaseException]()
    names, num_full = new_names(40), [0]

    def use(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(150):
                some, num_bytes = draw.sample(names, 2), draw.choice(SIZES)
                try:
                    store(tier, some, num_bytes)
                except TierFull:  # all others are being copied
                    num_full[0] += 1
                loaded(tier, some, num_bytes)
                if draw.random() < 0.1:
                    tier.drop(some, soon())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    tier.check()
    usage = tier.usage()
    assert usage.used_bytes is not None
    assert usage.used_bytes <= 6 * LARGEST
    tier.close()
