"""A table of keys agrees with a dictionary."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.fleet.key_table import NOT_THERE, KeyTable, as_keys

SOME = st.lists(st.integers(0, 60), max_size=40, unique=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SOME), max_size=25), st.booleans())
def test_it_has_what_a_dictionary_has(done, has_stamps) -> None:
    table, twin = KeyTable(has_stamps=has_stamps), dict[int, int]()
    for stamp, (adds, numbers) in enumerate(done):
        keys = as_keys(np.array(numbers, np.uint64) + np.uint64(2))
        found = table.find(keys)
        assert found.tolist() == [twin.get(key, NOT_THERE) for key in keys.tolist()]
        assert found.tolist() == [table.find_one(key) for key in keys.tolist()]
        there = found != NOT_THERE
        if adds:
            new = keys[~there]
            table.insert(new, np.arange(len(new)), stamp)
            twin |= dict(zip(new.tolist(), range(len(new)), strict=True))
        else:
            table.remove(keys[there])
            for key in keys[there].tolist():
                del twin[key]
        table.check()
        assert len(table) == len(twin)


def test_the_oldest_go_by_their_last_stamp() -> None:
    table, keys = KeyTable(has_stamps=True), np.arange(2, 42, dtype=np.uint64)
    for stamp, part in enumerate(np.split(keys, 4)):
        table.insert(part, np.arange(10), stamp)
    table.stamp(keys[:5], 9)
    assert sorted(table.oldest(15).tolist()) == keys[5:20].tolist()
    assert len(table.oldest(99)) == 40


def test_marks_of_removed_keys_do_not_fill_it() -> None:
    table = KeyTable()
    for turn in range(200):
        keys = as_keys(np.arange(2 + 50 * turn, 52 + 50 * turn, dtype=np.uint64))
        table.insert(keys, np.arange(50))
        table.check()
        table.remove(keys)
    assert table.num_bytes < 16 * 1024
