"""``KeyTable``: 64-bit keys to numbers, many at once, in a few bytes each.

A hash table in two arrays. Keys lie in buckets of eight, one cache line, and a key that finds its
bucket full lies in a following one: so a few array operations find any number of keys. Where a key
begins to look is drawn, so that keys which others choose do not meet on purpose.
"""

import secrets
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = npt.NDArray[np.uint64]
Numbers: TypeAlias = npt.NDArray[np.int64]

NOT_THERE: Final = -1
_LANES: Final = 8  # keys of a bucket
_EMPTY, _GONE = np.uint64(0), np.uint64(1)  # no key has these two values
_LEAST_KEY: Final = np.uint64(2)
_FULL_FRACTION: Final = 0.8  # of the places, at most, are taken or gone
_GROWTH: Final = 1.3
_HALF: Final = np.uint64(32)
_WORD: Final = 2**64 - 1
_STAMPS: Final = 0xFFFF_FFFF
_EIGHT: Final = np.uint64(0x0101_0101_0101_0101)  # eight times True, read as one number


def as_keys(numbers: npt.NDArray[np.uint64]) -> Keys:
    """Return numbers (u64[n]) as keys: the two that mark places stand for others."""
    return np.maximum(numbers, _LEAST_KEY)


@final
class KeyTable:
    """Distinct keys (≥ 2), each with a number ≥ 0 below 2³¹ and, if asked for, a stamp: its age."""

    def __init__(self, *, has_stamps: bool = False) -> None:
        self._has_stamps = has_stamps
        self._spread = np.uint64(secrets.randbits(64) | 1)
        self._num_gone = 0
        self._num_keys = 0
        self._make(1)

    def __len__(self) -> int:
        return self._num_keys

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._numbers.nbytes + self._stamps.nbytes

    def find(self, keys: Keys) -> Numbers:
        """Return the numbers of keys (u64[n]), ``NOT_THERE`` for those that are not there."""
        places = self._places(keys)
        found = self._numbers.ravel()[places].astype(np.int64)
        found[places < 0] = NOT_THERE
        return found

    def find_one(self, key: int) -> int:
        """Return the number of one key, sooner than ``find`` does; ``NOT_THERE`` as there."""
        spread = (key * int(self._spread) & _WORD) >> 32
        bucket = spread * len(self._keys) >> 32
        while True:
            held = self._keys[bucket].tolist()
            if key in held:
                return int(self._numbers[bucket, held.index(key)])
            if 0 in held:  # an empty place
                return NOT_THERE
            bucket = (bucket + 1) % len(self._keys)

    def insert(self, keys: Keys, numbers: npt.NDArray[np.integer[Any]], stamp: int = 0) -> None:
        """Add distinct keys (u64[n]) that are not there."""
        if self._num_keys + self._num_gone + len(keys) > _FULL_FRACTION * self._keys.size:
            self._rebuild(self._num_keys + len(keys))
        stamps = np.full(len(keys), stamp & _STAMPS, np.uint32) if self._has_stamps else None
        self._put(keys, numbers, stamps)

    def stamp(self, keys: Keys, stamp: int) -> None:
        """Give keys that are there (u64[n]) another stamp."""
        self._stamps.ravel()[self._places(keys)] = stamp & _STAMPS

    def remove(self, keys: Keys) -> None:
        """Remove distinct keys (u64[n]) that are there."""
        places = self._places(keys)
        # A search ends at a bucket with an empty place, so there a removed key leaves no mark.
        ends = ~_each(self._keys[places // _LANES] != _EMPTY)
        self._keys.ravel()[places] = np.where(ends, _EMPTY, _GONE)
        self._num_gone += len(keys) - int(ends.sum())
        self._num_keys -= len(keys)

    def items(self) -> tuple[Keys, Numbers]:
        """Return all keys and their numbers, in no order."""
        there = self._keys >= _LEAST_KEY
        return self._keys[there], self._numbers[there].astype(np.int64)

    def oldest(self, count: int) -> Keys:
        """Return ``count`` keys (all, if there are fewer) with the lowest stamps."""
        there = self._keys >= _LEAST_KEY
        keys, stamps = self._keys[there], self._stamps[there]
        if count >= len(keys):
            return keys
        return keys[np.argpartition(stamps, count)[:count]]

    # -- places ----------------------------------------------------------------------------------

    def _make(self, num_buckets: int) -> None:
        self._keys = np.full((num_buckets, _LANES), _EMPTY, np.uint64)
        self._numbers = np.zeros((num_buckets, _LANES), np.int32)
        self._stamps = np.zeros((num_buckets if self._has_stamps else 0, _LANES), np.uint32)

    def _rebuild(self, num_keys: int) -> None:
        """Drop the marks of removed keys, and grow if these keys need it."""
        there = self._keys >= _LEAST_KEY
        keys, numbers = self._keys[there], self._numbers[there]
        stamps = self._stamps[there] if self._has_stamps else None
        num_buckets = len(self._keys)
        while num_keys > 0.9 * _FULL_FRACTION * num_buckets * _LANES:
            num_buckets = int(num_buckets * _GROWTH) + 1
        self._make(num_buckets)
        self._num_keys = self._num_gone = 0
        # All at once into empty buckets: the first eight of each, and then the few others.
        buckets = self._buckets(keys)
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        lanes = np.arange(len(order)) - np.searchsorted(buckets, buckets)
        fits = lanes < _LANES
        places, first = (buckets * _LANES + lanes)[fits], order[fits]
        self._keys.ravel()[places] = keys[first]
        self._numbers.ravel()[places] = numbers[first]
        if stamps is not None:
            self._stamps.ravel()[places] = stamps[first]
        self._num_keys = len(first)
        rest = order[~fits]
        self._put(keys[rest], numbers[rest], None if stamps is None else stamps[rest])

    def _buckets(self, keys: Keys) -> Numbers:
        """Return where keys begin to look."""
        spread = (keys * self._spread) >> _HALF
        return ((spread * np.uint64(len(self._keys))) >> _HALF).astype(np.int64)

    def _places(self, keys: Keys) -> Numbers:
        """Return where keys lie, counted over all places; ``NOT_THERE`` for those that do not."""
        places = np.full(len(keys), NOT_THERE, np.int64)
        asked, wanted, buckets = np.arange(len(keys)), keys, self._buckets(keys)
        while len(asked):
            held = self._keys[buckets]
            hits = np.flatnonzero(held == wanted[:, None])  # one at most for each key
            places[asked[hits // _LANES]] = buckets[hits // _LANES] * _LANES + hits % _LANES
            if len(hits) == len(asked):
                break
            goes_on = _each(held != _EMPTY)
            goes_on[hits // _LANES] = False
            asked, wanted = asked[goes_on], wanted[goes_on]
            buckets = (buckets[goes_on] + 1) % len(self._keys)
        return places

    def _put(
        self,
        keys: Keys,
        numbers: npt.NDArray[np.integer[Any]],
        stamps: npt.NDArray[np.uint32] | None,
    ) -> None:
        flat = self._keys.ravel()
        self._num_keys += len(keys)
        buckets = self._buckets(keys)
        while len(keys):
            is_free = self._keys[buckets] < _LEAST_KEY
            has_room = ~_each(~is_free)
            # Several keys may want one place: the last of them gets it, the others look again.
            places = buckets * _LANES + is_free.argmax(axis=1)
            before = flat[places]
            flat[places[has_room]] = keys[has_room]
            won = has_room & (flat[places] == keys)
            self._num_gone -= int((before[won] == _GONE).sum())
            self._numbers.ravel()[places[won]] = numbers[won]
            if stamps is not None:
                self._stamps.ravel()[places[won]] = stamps[won]
                stamps = stamps[~won]
            left = ~won
            buckets = np.where(has_room, buckets, (buckets + 1) % len(self._keys))[left]
            keys, numbers = keys[left], numbers[left]

    def check(self) -> None:
        """Raise AssertionError if keys are lost, doubled or miscounted."""
        keys, numbers = self.items()
        assert len(keys) == self._num_keys, "keys are miscounted"
        assert len(np.unique(keys)) == len(keys), "a key is there twice"
        assert int((self._keys == _GONE).sum()) == self._num_gone, "removed keys are miscounted"
        assert (self.find(keys) == numbers).all(), "a key is not found"


def _each(lanes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Tell for each bucket (bool[n, 8]) whether it is true of all its places: bool[n]."""
    whole: npt.NDArray[np.bool_] = lanes.view(np.uint64)[:, 0] == _EIGHT
    return whole
