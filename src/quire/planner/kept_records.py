"""The names of the records that a tier keeps, and which of them goes when there is no room.

What a tier does with a name, it does here without the bytes: for a simulation, and for hit rates.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, final

from quire.tiers import Name
from quire.tiers.use_order import UseOrder
from quire.units import ceil_div

NamedSize: TypeAlias = tuple[Name, int]  # a record's name, and its bytes


class KeptRecords(Protocol):
    """The names of a tier's records, and which of them goes when there is no room."""

    @property
    def num_records(self) -> int:
        """Return how many there are."""
        ...

    @property
    def used_bytes(self) -> int:
        """Return the bytes that they take."""
        ...

    @property
    def num_evicted(self) -> int:
        """Return how many have gone for others since the start."""
        ...

    def has(self, name: Name) -> bool:
        """Return whether there is a record of this name."""
        ...

    def use(self, name: Name, now_s: float) -> None:
        """Note that a record was loaded, if it is there."""
        ...

    def keep(self, records: Sequence[NamedSize], now_s: float) -> int:
        """Keep records, at the cost of others that go first. Return how many, the first first."""
        ...

    def drop(self, name: Name) -> None:
        """Forget a record, if it is there."""
        ...


@final
class ByUses:
    """Records in the order of ``quire.tiers.use_order``, as in host memory."""

    def __init__(self, num_units: int, *, unit_bytes: int = 1, largest_bytes: int = 1) -> None:
        """``num_units``: of ``unit_bytes`` each; a record takes whole ones."""
        self.num_evicted = 0
        self._num_units, self._unit_bytes = num_units, unit_bytes
        self._numbers: dict[Name, int] = {}
        self._names: list[Name] = []  # by number
        self._units: list[int] = []
        self._free: list[int] = []  # numbers
        self._order = UseOrder(
            num_units,
            num_units,
            lambda number: self._units[number],
            expected=num_units // ceil_div(largest_bytes, unit_bytes),
        )

    @property
    def num_records(self) -> int:
        return len(self._numbers)

    @property
    def used_bytes(self) -> int:
        return self._order.total_weight * self._unit_bytes

    def has(self, name: Name) -> bool:
        return name in self._numbers

    def use(self, name: Name, now_s: float) -> None:
        number = self._numbers.get(name)
        if number is not None:
            self._order.use(number, name, now_s)

    def keep(self, records: Sequence[NamedSize], now_s: float) -> int:
        held = set[int]()  # what one call stores does not evict itself
        for count, (name, num_bytes) in enumerate(records):
            number = self._numbers.get(name)
            if number is None:
                number = self._enter(name, ceil_div(num_bytes, self._unit_bytes), held, now_s)
            if number is None:
                return count
            held.add(number)
        return len(records)

    def drop(self, name: Name) -> None:
        number = self._numbers.pop(name, None)
        if number is not None:
            self._order.remove(number)
            self._free.append(number)

    def _enter(self, name: Name, units: int, held: set[int], now_s: float) -> int | None:
        while self._order.total_weight + units > self._num_units:
            oldest = self._order.oldest(held)
            if oldest is None:
                return None
            self._order.evict(oldest, self._names[oldest])
            del self._numbers[self._names[oldest]]
            self._free.append(oldest)
            self.num_evicted += 1
        if self._free:
            number = self._free.pop()
            self._names[number], self._units[number] = name, units
        else:
            number = len(self._names)
            self._names.append(name)
            self._units.append(units)
        self._numbers[name] = number
        self._order.add(number, name, now_s)
        return number


@final
class LastUsed:
    """Records by last use, as in a server with a maximum of memory; or as many as there are."""

    def __init__(self, capacity_bytes: int | None) -> None:
        """``capacity_bytes``: None for no limit."""
        self.num_evicted = self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[Name, int] = {}  # the one that was used last stands last

    @property
    def num_records(self) -> int:
        return len(self._sizes)

    def has(self, name: Name) -> bool:
        return name in self._sizes

    def use(self, name: Name, now_s: float) -> None:
        if name in self._sizes:
            self._sizes[name] = self._sizes.pop(name)

    def keep(self, records: Sequence[NamedSize], now_s: float) -> int:
        for count, (name, num_bytes) in enumerate(records):
            if name in self._sizes:
                continue
            if self._capacity_bytes is not None:
                if num_bytes > self._capacity_bytes:
                    return count
                while self.used_bytes + num_bytes > self._capacity_bytes:
                    self.drop(next(iter(self._sizes)))
                    self.num_evicted += 1
            self._sizes[name] = num_bytes
            self.used_bytes += num_bytes
        return len(records)

    def drop(self, name: Name) -> None:
        self.used_bytes -= self._sizes.pop(name, 0)
