"""``memory:?size=2GiB``: records in this process's memory, within a budget of bytes.

The memory is one range of addresses, which the system backs when it is first written to. It is cut
into pieces of an eighth of the largest record, and a record takes as many as it needs: groups with
records of several sizes share the budget, and nothing is ever moved. ``use_order`` says which
record goes when there is no room.

One lock guards what is where. Bytes are copied without it, and without Python's own: a record that
is being copied is held, and neither evicted nor given back until the copy ends.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np

from quire.errors import ConfigError
from quire.tiers.address import TierAddress
from quire.tiers.tier import (
    NAME_BYTES,
    Deadline,
    Name,
    TierError,
    TierFull,
    TierTraits,
    TierUsage,
)
from quire.tiers.use_order import UseOrder
from quire.units import align_up, ceil_div, format_bytes, parse_bytes

_PIECES = 8  # of the largest record
_LINE_BYTES = 64  # pieces begin at a cache line
_FEWEST_PLACES = 1024  # of the table of names
_CLEARED_AT_ONCE = 1024  # records, while other threads wait
_MOST_EVICTED = 2**16  # names that wait to be taken
_LOAD = 3 / 4  # of that table, at most
_MOST_LENGTHS = 255  # of records, that are kept as a number of one byte
_NONE = -1


def make_memory_tier(address: TierAddress, largest_bytes: int, namespace: str) -> "HostMemoryTier":
    """Make the tier of an address such as ``memory:?size=2GiB``. Raises: ConfigError.

    ``largest_bytes``: of a record. ``namespace`` is not needed: no other engine reads this memory.
    """
    address.require_known("size")
    if "size" not in address.options:
        raise ConfigError("kv_tier=memory: needs a size: memory:?size=2GiB")
    if address.url.netloc or address.url.path:
        raise ConfigError(f"kv_tier={address}: memory has no path: memory:?size=2GiB")
    return HostMemoryTier(address.option("size", parse_bytes, 0), largest_bytes)


def piece_bytes(largest_bytes: int) -> int:
    """Return the bytes of a piece, of which a record takes whole ones, for the largest record."""
    return align_up(ceil_div(largest_bytes, _PIECES), _LINE_BYTES)


@final
class HostMemoryTier:
    """Keeps records in the memory of this process."""

    traits = TierTraits(is_shared=False, is_persistent=False)

    def __init__(
        self,
        size_bytes: int,
        largest_bytes: int,  # of a record
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises: ConfigError if not even one record fits, or the system has no such addresses."""
        self._piece_bytes = piece_bytes(largest_bytes)
        num_pieces = size_bytes // self._piece_bytes
        needed = ceil_div(largest_bytes, self._piece_bytes)
        if num_pieces < needed:
            raise ConfigError(
                f"kv_tier=memory: size={format_bytes(size_bytes)} holds no record: one takes "
                f"{format_bytes(needed * self._piece_bytes)}"
            )
        try:
            self._bytes = np.empty(num_pieces * self._piece_bytes, np.uint8)
            self._next_piece = np.empty(num_pieces, np.int32).data
        except (MemoryError, ValueError) as error:
            raise ConfigError(
                f"kv_tier=memory: size={format_bytes(size_bytes)}: the system gives no range of "
                f"addresses of that length"
            ) from error
        self._num_pieces, self._num_free = num_pieces, num_pieces
        self._first_free, self._num_fresh = _NONE, 0  # pieces below it were taken once
        self._names = _NameTable(num_pieces, ceil_div(num_pieces, needed))
        self._num_numbers, self._first_unused = 0, _NONE
        self._lengths = _RecordLengths(num_pieces)
        self._first_pieces = np.empty(num_pieces, np.int32).data
        self._order = UseOrder(
            num_pieces, num_pieces, self._count_pieces, expected=ceil_div(num_pieces, needed)
        )
        self._evicted: deque[Name] | None = None  # None: nothing has asked for them yet
        self._held: dict[int, int] = {}  # by how many copies
        self._gone: set[int] = set()  # held, and no longer found
        self._lock, self._clock, self._is_open = threading.Lock(), clock, True

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        with self._guarded(deadline):
            for count, name in enumerate(names):
                if self._names.find(name) is None:
                    return count
        return len(names)

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        held: list[int] = []
        count = 0
        try:
            with self._guarded(deadline):
                for name, buffer in zip(names, into, strict=True):
                    record = self._names.find(name)
                    if record is None or self._lengths[record] != buffer.nbytes:
                        break
                    self._hold(record, held)
            for record, buffer in zip(held, into, strict=False):
                if not deadline.left_s:
                    break
                self._copy(record, buffer, out=True)
                count += 1
        finally:
            with self._lock:
                now_s = self._clock()
                for record in held[:count]:
                    if record not in self._gone:
                        self._order.use(record, self._names.name(record), now_s)
                self._let_go(held)
        if held and not count:
            deadline.check("kv_tier=memory: load")
        return count

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        # What this call has stored is held to its end, so that it does not evict that itself.
        held: list[int] = []
        count = 0
        try:
            for name, data in zip(names, records, strict=True):
                if count and not deadline.left_s:
                    break
                with self._guarded(deadline):
                    record = self._names.find(name)
                    if record is not None and self._lengths[record] == data.nbytes:
                        self._hold(record, held)
                        count += 1
                        continue
                    record = self._take(data.nbytes)
                    if record is None:
                        break
                    self._hold(record, held)
                    self._gone.add(record)  # not found before it is whole
                self._copy(record, data, out=False)
                with self._lock:
                    self._enter(record, name)
                count += 1
        finally:
            with self._lock:
                self._let_go(held)
        if names and not count:
            raise TierFull(
                f"kv_tier=memory: no room for a record of {format_bytes(records[0].nbytes)}: "
                f"{format_bytes(self._num_pieces * self._piece_bytes)} are in use; the option is "
                f"size"
            )
        return count

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        with self._guarded(deadline):
            for name in names:
                record = self._names.find(name)
                if record is not None:
                    self._forget(record)

    def clear(self, deadline: Deadline) -> None:
        with self._guarded(deadline):
            names = [self._names.name(record) for record in self._names.records()]
        for start in range(0, len(names), _CLEARED_AT_ONCE):
            deadline.check("kv_tier=memory: clear")
            self.drop(names[start : start + _CLEARED_AT_ONCE], deadline)

    def take_evicted(self) -> list[Name]:
        with self._lock:
            evicted, self._evicted = self._evicted, deque(maxlen=_MOST_EVICTED)
        return list(evicted or ())

    def usage(self) -> TierUsage:
        with self._lock:
            self._require_open()
            return TierUsage(
                num_records=self._names.num_records,
                used_bytes=(self._num_pieces - self._num_free) * self._piece_bytes,
                capacity_bytes=self._num_pieces * self._piece_bytes,
            )

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._free_if_closed()

    def check(self) -> None:
        """Check that every piece is free or belongs to one record, and each record is found."""
        with self._lock:
            records = self._names.records()
            seen = np.zeros(self._num_pieces, bool)
            for record in {*records, *self._gone}:
                for piece in self._pieces(record):
                    assert not seen[piece], f"piece {piece} belongs to two records"
                    seen[piece] = True
            piece, num_free = self._first_free, self._num_pieces - self._num_fresh
            while piece != _NONE:
                assert not seen[piece], f"piece {piece} is free and belongs to a record"
                piece, num_free = self._next_piece[piece], num_free + 1
            assert num_free == self._num_free
            assert num_free + int(seen.sum()) == self._num_pieces
            found = {self._names.find(self._names.name(record)) for record in records}
            assert found == set(records)
            assert sum(map(self._count_pieces, records)) == self._order.total_weight

    # -- under the lock ----------------------------------------------------------------------------

    @contextmanager
    def _guarded(self, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=deadline.left_s):
            raise TierError("kv_tier=memory: out of time")
        try:
            self._require_open()
            yield
        finally:
            self._lock.release()

    def _require_open(self) -> None:
        if not self._is_open:
            raise TierError("kv_tier=memory is closed")

    def _take(self, num_bytes: int) -> int | None:
        """Take room for a record, by evicting others; None if there is none."""
        count = ceil_div(num_bytes, self._piece_bytes)
        while self._num_free < count:
            oldest = self._order.oldest(self._held)
            if oldest is None:
                return None
            name = self._names.name(oldest)
            if self._evicted is not None:
                self._evicted.append(name)
            self._order.evict(oldest, name)
            self._give_up(oldest)
        record = self._new_number()
        self._first_pieces[record] = self._take_pieces(count)
        self._lengths[record] = num_bytes
        return record

    def _count_pieces(self, record: int) -> int:
        return ceil_div(self._lengths[record], self._piece_bytes)

    def _new_number(self) -> int:
        """Return a number that no record has. Those given back are linked like free pieces."""
        record = self._first_unused
        if record == _NONE:
            self._num_numbers += 1
            return self._num_numbers - 1
        self._first_unused = self._first_pieces[record]
        return record

    def _take_pieces(self, count: int) -> int:
        self._num_free -= count
        first = last = _NONE
        for _ in range(count):
            if self._first_free != _NONE:
                piece = self._first_free
                self._first_free = self._next_piece[piece]
            else:
                piece = self._num_fresh
                self._num_fresh += 1
            if last == _NONE:
                first = piece
            else:
                self._next_piece[last] = piece
            last = piece
        self._next_piece[last] = _NONE
        return first

    def _enter(self, record: int, name: Name) -> None:
        """Have a record found that is whole."""
        other = self._names.find(name)
        if other is not None and self._lengths[other] == self._lengths[record]:
            return  # another thread was quicker: ours goes when it is let go
        if other is not None:
            self._forget(other)
        self._gone.discard(record)
        self._names.add(record, name)
        self._order.add(record, name, self._clock())

    def _forget(self, record: int) -> None:
        self._order.remove(record)
        self._give_up(record)

    def _give_up(self, record: int) -> None:
        """Have a record no longer found, and give back its room once nothing copies it."""
        self._names.remove(record)
        if record in self._held:
            self._gone.add(record)
        else:
            self._give_back(record)

    def _hold(self, record: int, held: list[int]) -> None:
        self._held[record] = self._held.get(record, 0) + 1
        held.append(record)

    def _let_go(self, records: Sequence[int]) -> None:
        for record in records:
            self._held[record] -= 1
            if not self._held[record]:
                del self._held[record]
                if record in self._gone:
                    self._gone.remove(record)
                    self._give_back(record)
        self._free_if_closed()

    def _free_if_closed(self) -> None:
        if not self._is_open and not self._held:
            self._bytes = np.empty(0, np.uint8)

    def _give_back(self, record: int) -> None:
        pieces = self._pieces(record)
        self._next_piece[pieces[-1]] = self._first_free
        self._first_free = pieces[0]
        self._num_free += len(pieces)
        self._first_pieces[record], self._first_unused = self._first_unused, record

    # -- without it, of a record that is held -----------------------------------------------------

    def _pieces(self, record: int) -> list[int]:
        pieces, piece = [], self._first_pieces[record]
        while piece != _NONE:
            pieces.append(piece)
            piece = self._next_piece[piece]
        return pieces

    def _copy(self, record: int, buffer: memoryview, *, out: bool) -> None:
        """Copy a record to a buffer u8[its length], or from there. numpy lets other threads run."""
        data = np.frombuffer(buffer, np.uint8)
        pieces, size, start, at = self._pieces(record), self._piece_bytes, 0, 0
        memory = self._bytes
        while at < len(data):
            stop = start + 1  # pieces that follow one another are copied at once
            while stop < len(pieces) and pieces[stop] == pieces[stop - 1] + 1:
                stop += 1
            end = min(len(data), at + (stop - start) * size)
            place = pieces[start] * size
            kept, given = memory[place : place + end - at], data[at:end]
            np.copyto(given, kept) if out else np.copyto(kept, given)
            start, at = stop, end


@final
class _RecordLengths:
    """The bytes of each record, by its number. Most tiers see few lengths: one for each group."""

    def __init__(self, most_records: int) -> None:
        self._numbers = np.empty(most_records, np.uint8).data  # of a record's length, among …
        self._known: list[int] = []  # … these
        self._others: dict[int, int] = {}  # lengths that have no number, by record

    def __getitem__(self, record: int) -> int:
        number = self._numbers[record]
        return self._known[number] if number < _MOST_LENGTHS else self._others[record]

    def __setitem__(self, record: int, num_bytes: int) -> None:
        self._others.pop(record, None)
        if num_bytes in self._known:
            self._numbers[record] = self._known.index(num_bytes)
        elif len(self._known) < _MOST_LENGTHS:
            self._numbers[record] = len(self._known)
            self._known.append(num_bytes)
        else:
            self._numbers[record], self._others[record] = _MOST_LENGTHS, num_bytes


@final
class _NameTable:
    """Numbers of records by name: a hash table with open addressing, some 37 bytes a record."""

    def __init__(self, most_records: int, expected: int) -> None:
        # Pages that no record needs are never backed; of the table of places each is.
        self._names = np.empty(most_records * NAME_BYTES, np.uint8).data
        self.num_records = 0
        self._num_places = max(_FEWEST_PLACES, int(expected / _LOAD) + 1)
        self._places = np.zeros(self._num_places, np.int32).data  # a record's number + 1

    def name(self, record: int) -> Name:
        return bytes(self._names[record * NAME_BYTES : (record + 1) * NAME_BYTES])

    def records(self) -> list[int]:
        return [number - 1 for number in self._places if number]

    def find(self, name: Name) -> int | None:
        """Return a record's number. Raises: TierError for a name of another length."""
        place = self._place(name)
        return self._places[place] - 1 if self._places[place] else None

    def add(self, record: int, name: Name) -> None:
        if self.num_records >= _LOAD * len(self._places):
            self._grow()
        self._names[record * NAME_BYTES : (record + 1) * NAME_BYTES] = name
        self._places[self._place(name)] = record + 1
        self.num_records += 1

    def remove(self, record: int) -> None:
        """Take a record out, and move those behind it to where they are found without it."""
        places, count = self._places, self._num_places
        hole = self._place(self.name(record))
        at = hole
        while True:
            at = (at + 1) % count
            if not places[at]:
                break
            home = self._home(self.name(places[at] - 1))
            if (at - home) % count >= (at - hole) % count:
                places[hole], hole = places[at], at
        places[hole] = 0
        self.num_records -= 1

    def _home(self, name: Name) -> int:
        return int.from_bytes(name[:8], "little") % self._num_places

    def _place(self, name: Name) -> int:
        """Return where a name's record stands, or would."""
        if len(name) != NAME_BYTES:
            raise TierError(f"a name has {NAME_BYTES} bytes, not {len(name)}")
        places, names, at = self._places, self._names, self._home(name)
        while number := places[at]:
            start = (number - 1) * NAME_BYTES
            if names[start : start + NAME_BYTES] == name:
                break
            at = (at + 1) % self._num_places
        return at

    def _grow(self) -> None:
        records = self.records()
        self._num_places *= 2
        self._places = np.zeros(self._num_places, np.int32).data
        for record in records:
            self._places[self._place(self.name(record))] = record + 1
