"""``LeasedRecords``: records that wait in host memory for another server, until their lease ends.

A lease is made when a prompt is computed, for as many of its blocks as there is room for; its
records come while steps go on. Records are not evicted: where the memory is full, a lease is for
fewer blocks, or for none. A lease ends by time, by the peer that has loaded its records, or with
the engine. Leases of one prompt share their records.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import numpy.typing as npt

from quire.tiers.tier import Deadline, Name, TierError, TierFull, TierTraits, TierUsage
from quire.units import format_bytes

_MOST_LEASES = 2**16
_NAME_BYTES = 16  # of randomness: whoever has a lease's name may end it


@dataclass(slots=True, eq=False)
class _LeasedRecord:
    data: npt.NDArray[np.uint8]
    num_leases: int = 0


@dataclass(slots=True, eq=False)
class _Lease:
    ends_s: float  # on the clock
    num_due: int = 0  # records that are still to come
    reserved_bytes: int = 0  # for these
    names: set[Name] = field(default_factory=set)


@final
class LeasedRecords:
    """Keeps records within a budget of bytes. It is a ``Tier``, whose ``store`` makes a lease.

    Any thread may call.
    """

    traits = TierTraits(is_shared=False, is_persistent=False)

    def __init__(
        self,
        size_bytes: int,
        lease_s: float,  # seconds from a lease's beginning to its end
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size_bytes, self.lease_s = size_bytes, lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._is_whole = threading.Condition(self._lock)
        self._records: dict[Name, _LeasedRecord] = {}
        self._leases: dict[str, _Lease] = {}  # those that end first come first
        self._used_bytes = self._reserved_bytes = 0
        self._is_open = True

    @property
    def is_empty(self) -> bool:
        """Return whether there is no record."""
        return not self._records

    # -- leases ------------------------------------------------------------------------------------

    def lease(self, blocks: Sequence[Sequence[int]]) -> tuple[str, int]:
        """Reserve room for the records of blocks, of which each has these sizes in bytes.

        Returns: the lease's name, and how many blocks, from the first one on, it has room for. The
        name is empty where that is none.
        """
        with self._lock:
            self._expire()
            free = self.size_bytes - self._used_bytes - self._reserved_bytes
            count = 0
            own = _Lease(self._clock() + self.lease_s)
            for sizes in blocks:
                if own.reserved_bytes + sum(sizes) > free:
                    break
                own.reserved_bytes += sum(sizes)
                own.num_due += len(sizes)
                count += 1
            if not (count and self._is_open and len(self._leases) < _MOST_LEASES):
                return "", 0
            name = secrets.token_hex(_NAME_BYTES)
            self._leases[name] = own
            self._reserved_bytes += own.reserved_bytes
        return name, count

    def keep(self, lease: str, name: Name, record: memoryview, *, is_own: bool = False) -> bool:
        """Keep a record for a lease that it was reserved for. Return False if that has ended.

        It is copied, unless it ``is_own``: nothing else writes to its buffer.
        """
        with self._lock:
            own = self._leases.get(lease)
            if own is None or not own.num_due or len(record) > own.reserved_bytes:
                return False
            known = self._records.get(name)
            if known is None:
                data = np.frombuffer(record, np.uint8)
                known = _LeasedRecord(data if is_own else data.copy())
            self._settle(own, len(record))
            self._enter(own, name, known)
        return True

    def skip(self, lease: str, num_bytes: int) -> None:
        """Note that a record of that size, which was reserved for a lease, will not come."""
        with self._lock:
            own = self._leases.get(lease)
            if own is not None and own.num_due:
                self._settle(own, num_bytes)

    def wait(self, lease: str, seconds: float) -> bool:
        """Wait for all records of a lease, up to so many seconds. Return whether they came."""
        with self._is_whole:
            self._is_whole.wait_for(lambda: self._is_complete(lease), max(0.0, seconds))
            own = self._leases.get(lease)
            return own is not None and not own.num_due

    def release(self, lease: str) -> None:
        """End a lease. One that has ended, or never was, is passed over."""
        with self._lock:
            self._end(lease)

    def expire(self) -> None:
        """End the leases whose time is over."""
        with self._lock:
            self._expire()

    def release_all(self) -> None:
        """End all leases."""
        with self._lock:
            for lease in list(self._leases):
                self._end(lease)

    # -- a tier ------------------------------------------------------------------------------------

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        with self._lock:
            self._expire()
            for count, name in enumerate(names):
                if name not in self._records:
                    return count
        return len(names)

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        count = 0
        for record, buffer in zip(self.take(names), into, strict=False):
            if len(record) != len(buffer) or (count and not deadline.left_s):
                break
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(record, np.uint8))
            count += 1
        return count

    def take(self, names: Sequence[Name]) -> list[memoryview]:
        """Return the first of these records. They stay as they are while a caller has them."""
        found: list[memoryview] = []
        with self._lock:
            self._expire()
            for name in names:
                record = self._records.get(name)
                if record is None:
                    break
                found.append(record.data.data)
        return found

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        lease, count = self.lease([[len(record)] for record in records])
        if not count:
            raise TierFull(
                f"leased records: {format_bytes(self.size_bytes)} are in use; the option is size"
            )
        for name, record in zip(names[:count], records, strict=False):
            self.keep(lease, name, record)
        return count

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        with self._lock:
            for name in names:
                if (record := self._records.pop(name, None)) is not None:
                    self._used_bytes -= len(record.data)
                    for own in self._leases.values():
                        own.names.discard(name)

    def usage(self) -> TierUsage:
        with self._lock:
            if not self._is_open:
                raise TierError("leased records: closed")
            return TierUsage(
                num_records=len(self._records),
                used_bytes=self._used_bytes,
                capacity_bytes=self.size_bytes,
            )

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            for lease in list(self._leases):
                self._end(lease)

    def check(self) -> None:
        """Check that bytes and references are those of the leases. Raises: AssertionError."""
        with self._lock:
            named = [name for own in self._leases.values() for name in own.names]
            for name, record in self._records.items():
                assert named.count(name) == record.num_leases > 0, "a record without its leases"
            used = sum(len(record.data) for record in self._records.values())
            reserved = sum(own.reserved_bytes for own in self._leases.values())
            assert (used, reserved) == (self._used_bytes, self._reserved_bytes)
            assert used + reserved <= self.size_bytes

    # -- under the lock ----------------------------------------------------------------------------

    def _is_complete(self, lease: str) -> bool:
        own = self._leases.get(lease)
        return own is None or not own.num_due

    def _settle(self, own: _Lease, num_bytes: int) -> None:
        given = min(num_bytes, own.reserved_bytes)
        own.num_due -= 1
        if not own.num_due:
            given = own.reserved_bytes
            self._is_whole.notify_all()
        own.reserved_bytes -= given
        self._reserved_bytes -= given

    def _enter(self, own: _Lease, name: Name, record: _LeasedRecord) -> None:
        if name in own.names:
            return
        if name not in self._records:
            self._records[name] = record
            self._used_bytes += len(record.data)
        record.num_leases += 1
        own.names.add(name)

    def _expire(self) -> None:
        now_s = self._clock()
        while self._leases:
            lease, own = next(iter(self._leases.items()))
            if own.ends_s > now_s:
                return
            self._end(lease)

    def _end(self, lease: str) -> None:
        own = self._leases.pop(lease, None)
        if own is None:
            return
        self._reserved_bytes -= own.reserved_bytes
        for name in own.names:
            record = self._records[name]
            record.num_leases -= 1
            if not record.num_leases:
                del self._records[name]
                self._used_bytes -= len(record.data)
        self._is_whole.notify_all()
