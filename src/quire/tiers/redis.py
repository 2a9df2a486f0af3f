"""``RedisTier``: records in a Redis or Valkey server, which several machines may share.

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]?…     TCP
    rediss://…                                       TLS
    redis:/PATH/TO/SOCKET?db=DB&…                    a Unix socket

A record is the value of ``quire:NAMESPACE:NAME``, so one ACL rule covers all, and one pattern a
namespace. The server evicts (``maxmemory-policy``), and expires where ``age`` says so. The client
is Quire's own (``resp``): others hand out values as objects, which are then copied once more.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, final

from quire.errors import ConfigError
from quire.tiers.address import TierAddress, parse_age
from quire.tiers.redis_server import MEANINGS, ConnectionPool, RedisServer
from quire.tiers.resp import ConnectionLost, RespConnection, ServerRefused
from quire.tiers.tier import (
    NAME_BYTES,
    Deadline,
    Name,
    TierError,
    TierFull,
    TierTraits,
    TierUsage,
)
from quire.units import format_bytes

T = TypeVar("T")

_CONNECTIONS = 4
_MOST_CONNECTIONS = 64
_LARGEST_VALUE_BYTES = 512 * 2**20  # proto-max-bulk-len
_NAMES_AT_ONCE = 128  # of one pipeline without values
_SCANNED = 1000  # keys that the server looks at before it serves others
_FIRST_PAGE = b"0"  # of all keys; it follows the last one, too

# Values under way. More is slower: what the server has begun to answer falls out of its caches.
_IN_FLIGHT_BYTES = 4 * 2**20
_LEAST_IN_FLIGHT, _MOST_IN_FLIGHT = 2, 8

_NO_RECORD = "WRONGTYPE"  # a key of another type, which a user with a right to write has made


def open_redis(address: TierAddress, record_bytes: int, namespace: str) -> "RedisTier":
    """Make the tier of an address. Nothing is asked for yet.

    ``record_bytes`` is the largest record's size. Raises: ConfigError.
    """
    if record_bytes > _LARGEST_VALUE_BYTES:
        raise ConfigError(
            f"kv_tier={address}: records of {format_bytes(record_bytes)} are more than the "
            f"{format_bytes(_LARGEST_VALUE_BYTES)} of a value in Redis: use a smaller block_size"
        )
    connections = address.option("connections", _parse_connections, _CONNECTIONS)
    age_s = address.option("age", parse_age, 0.0)
    pool = ConnectionPool(RedisServer.of(address, "age", "connections"), connections)
    window = max(_LEAST_IN_FLIGHT, min(_IN_FLIGHT_BYTES // max(1, record_bytes), _MOST_IN_FLIGHT))
    return RedisTier(pool, str(address), f"quire:{namespace}:".encode(), age_s, window)


@final
class RedisTier:
    """Records of one namespace in one server."""

    traits = TierTraits(is_shared=True, is_persistent=True)

    def __init__(
        self,
        pool: ConnectionPool,
        label: str,
        prefix: bytes,  # of keys
        age_s: float,  # after which the server forgets a record; 0: never
        window: int,  # values under way
    ) -> None:
        self._pool, self._label, self._prefix = pool, label, prefix
        self._age_ms = b"%d" % round(age_s * 1000) if age_s else None
        self._window = window

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        def count(connection: RespConnection) -> int:
            return _pipelined(
                connection,
                len(names),
                _NAMES_AT_ONCE,
                lambda i: connection.ask(b"EXISTS", self._key(names[i]), deadline=deadline),
                lambda _: connection.read(deadline) == 1,
            )

        return self._with_connection(count, deadline)

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        def fill(connection: RespConnection) -> int:
            return _pipelined(
                connection,
                len(names),
                self._window,
                lambda i: connection.ask(b"GET", self._key(names[i]), deadline=deadline),
                lambda i: connection.read_into(into[i], deadline),
            )

        return self._with_connection(fill, deadline)

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        def keep(connection: RespConnection) -> int:
            there = self._lengths(connection, names, deadline)

            def ask(i: int) -> None:
                key = self._key(names[i])
                if not there[i] or there[i] != len(records[i]):
                    expiry = () if self._age_ms is None else (b"PX", self._age_ms)
                    connection.ask(b"SET", key, records[i], *expiry, deadline=deadline)
                elif self._age_ms is not None:  # another machine has stored it: it is young again
                    connection.ask(b"PEXPIRE", key, self._age_ms, deadline=deadline)
                else:
                    connection.ask(b"EXISTS", key, deadline=deadline)

            return _pipelined(
                connection,
                len(names),
                self._window,
                ask,
                lambda _: connection.read(deadline) in (b"OK", 1),
            )

        return self._with_connection(keep, deadline)

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        def unlink(connection: RespConnection) -> None:
            for start in range(0, len(names), _NAMES_AT_ONCE):
                keys = [self._key(name) for name in names[start : start + _NAMES_AT_ONCE]]
                connection.ask(b"UNLINK", *keys, deadline=deadline)
                connection.read(deadline)

        self._with_connection(unlink, deadline)

    def clear(self, deadline: Deadline) -> None:
        longest = len(self._prefix) + 2 * NAME_BYTES

        def unlink_all(connection: RespConnection) -> None:
            cursor = _FIRST_PAGE
            while True:
                scan = (b"SCAN", cursor, b"MATCH", self._prefix + b"*", b"COUNT", b"%d" % _SCANNED)
                connection.ask(*scan, deadline=deadline)
                cursor, keys = connection.read_page(longest, deadline)
                for start in range(0, len(keys), _NAMES_AT_ONCE):
                    several = keys[start : start + _NAMES_AT_ONCE]
                    connection.ask(b"UNLINK", *several, deadline=deadline)
                    connection.read(deadline)
                if cursor == _FIRST_PAGE:
                    return

        self._with_connection(unlink_all, deadline)

    def usage(self) -> TierUsage:
        self._pool.require_open()
        return TierUsage()

    def close(self) -> None:
        self._pool.close()

    def _key(self, name: Name) -> bytes:
        return self._prefix + name.hex().encode()

    def _lengths(
        self, connection: RespConnection, names: Sequence[Name], deadline: Deadline
    ) -> list[int]:
        """Ask how long the values are: 0 for what is not there, or is none."""
        for name in names:
            connection.ask(b"STRLEN", self._key(name), deadline=deadline)
        lengths = []
        for _ in names:
            try:
                found = connection.read(deadline)
            except ServerRefused as error:
                if error.code != _NO_RECORD:
                    raise
                found = 0
            lengths.append(found if isinstance(found, int) else 0)
        return lengths

    def _with_connection(self, work: Callable[[RespConnection], T], deadline: Deadline) -> T:
        """Do work that may be done twice: a server that was restarted has closed what is idle."""
        try:
            with self._pool.connection(deadline) as (connection, is_new):
                try:
                    return work(connection)
                except ConnectionLost:
                    if is_new:
                        raise
            with self._pool.connection(deadline) as (connection, _):
                return work(connection)
        except ServerRefused as error:
            kind = TierFull if error.code == "OOM" else TierError
            raise kind(f"{self._label}: {MEANINGS.get(error.code, error)}") from None


def _pipelined(
    connection: RespConnection,
    num: int,
    window: int,
    ask: Callable[[int], None],
    read: Callable[[int], bool],  # whether the reply is what was hoped for
) -> int:
    """Send requests, ``window`` of them ahead of the replies, up to the first that fails.

    Returns: how many succeeded before it. Raises: TierError if none did, for another reason than
    that there is no record.
    """
    num_asked = num_read = num_good = 0
    refusal: ServerRefused | None = None
    try:
        while connection.is_open:
            if num_asked - num_read <= window // 2:  # short requests leave together
                while num_good == num_read and num_asked < min(num, num_read + window):
                    ask(num_asked)
                    num_asked += 1
            if num_read == num_asked:
                break
            is_good = False
            try:
                is_good = read(num_read)
            except ServerRefused as error:
                if error.code != _NO_RECORD:
                    refusal = refusal or error
            num_good += is_good and num_good == num_read
            num_read += 1
    except TierError:  # what has come before is whole all the same
        if not num_good:
            raise
    if refusal and not num_good:
        raise refusal
    return num_good


def _parse_connections(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_CONNECTIONS:
        raise ValueError(f"a number from 1 to {_MOST_CONNECTIONS}")
    return int(text)
