"""A whole tier: records in one SQLite database, the oldest of which make room for new ones.

Run: python examples/tier.py     (it writes one record to records.db here)
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.tiers import Deadline, Name, TierAddress, TierError, TierFull, TierTraits, TierUsage
from quire.units import parse_bytes

TABLE = "CREATE TABLE IF NOT EXISTS records (space, name, data, PRIMARY KEY (space, name))"
GET, SET = "SELECT data FROM records", "INSERT OR REPLACE INTO records VALUES (?, ?, ?)"
DELETE, ONE = "DELETE FROM records", " WHERE space = ? AND name = ?"
OLDEST = " WHERE rowid = (SELECT min(rowid) FROM records)"
USED = "SELECT count(*), coalesce(sum(length(data)), 0) FROM records"


class SqliteTier:
    traits = TierTraits(is_shared=False, is_persistent=True)

    def __init__(self, address: TierAddress, largest_bytes: int, namespace: str) -> None:
        address.require_known("size")
        self._size, self._space = address.option("size", parse_bytes, 2**30), namespace
        self._db = sqlite3.connect(address.url.path, check_same_thread=False, timeout=5)
        self._lock = threading.Lock()
        self._db.execute(TABLE)

    @contextmanager
    def _use(self, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=deadline.left_s):
            raise TierError("sqlite: out of time")
        try:
            with self._db:  # a transaction: others see all of it or nothing
                yield
        except sqlite3.Error as error:  # also of a database that was closed
            raise TierError(f"sqlite: {error}") from error
        finally:
            self._lock.release()

    def _get(self, name: Name) -> bytes:
        return (self._db.execute(GET + ONE, (self._space, name)).fetchone() or (b"",))[0]

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        with self._use(deadline):
            return next((n for n, name in enumerate(names) if not self._get(name)), len(names))

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        with self._use(deadline):
            for count, (name, buffer) in enumerate(zip(names, into, strict=True)):
                if len(found := self._get(name)) != len(buffer):
                    return count
                buffer[:] = found
        return len(names)

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        with self._use(deadline):
            taken = 0
            for count, (name, record) in enumerate(zip(names, records, strict=True)):
                if (taken := taken + len(record)) > self._size:
                    if count:
                        return count
                    raise TierFull(f"sqlite: a record has {taken} bytes, and size={self._size}")
                self._db.execute(SET, (self._space, name, record))
                while self._db.execute(USED).fetchone()[1] > self._size:
                    self._db.execute(DELETE + OLDEST)
        return len(names)

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        with self._use(deadline):
            self._db.executemany(DELETE + ONE, [(self._space, name) for name in names])

    def usage(self) -> TierUsage:
        with self._use(Deadline.after(1)):
            count, used = self._db.execute(USED).fetchone()
        return TierUsage(num_records=count, used_bytes=used, capacity_bytes=self._size)

    def close(self) -> None:
        with self._lock:  # no other thread may be inside
            self._db.close()


if __name__ == "__main__":
    made = SqliteTier(TierAddress.parse("sqlite:records.db?size=1MiB"), 4096, "0" * 16)
    made.store([bytes(32)], [memoryview(bytes(4096))], Deadline.after(1))
    print(made.usage())
