"""What a tier remembers of the records that it has evicted."""

import hashlib

from conformance.tier_cases import new_names
from quire.tiers.evicted_names import EvictedNames


def test_a_name_is_remembered_with_its_moment_and_taken_once() -> None:
    evicted, names = EvictedNames(64), new_names(20)
    for moment, name in enumerate(names, 250):
        evicted.add(name, moment)
    assert [evicted.take(name) for name in names] == [n % 256 for n in range(250, 270)]
    assert [evicted.take(name) for name in names] == [None] * 20


def test_chains_are_forgotten_together_the_oldest_first() -> None:
    """Of 40 chains of 64 blocks each is remembered whole or not at all, but for a few.

    The names are the same in each run: of names drawn anew, one draw in fifty misses more.
    """
    evicted = EvictedNames(256)
    chains = [
        [hashlib.sha256(b"%d of chain %d" % (block, chain)).digest() for block in range(64)]
        for chain in range(40)
    ]
    for chain in chains:
        for name in chain:
            evicted.add(name)
    found = [sum(evicted.take(name) is not None for name in chain) for chain in chains]
    assert min(found[-10:]) >= 62
    assert sum(found[-10:]) >= 10 * 64 - 4
    assert max(found[:20]) <= 2
    assert sum(16 <= count <= 48 for count in found) <= 4


def test_a_tier_of_one_record_remembers_some() -> None:
    evicted, names = EvictedNames(1), new_names(8)
    for name in names:
        evicted.add(name, 7)
    assert [evicted.take(name) for name in names[-4:]] == [7] * 4
