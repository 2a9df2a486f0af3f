"""The tiers that the suite runs on: an address for each kind, and what a test asks of a tier.

``--tier ADDRESS`` runs the suite on that address instead, such as one of another package's kind, or
of a server that is there. A kind that needs a server has its place in ``SERVERS``.
"""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from conformance import named
from quire.tiers import TIERS, Deadline, Name, Tier, TierAddress
from tiers.played_s3 import played_s3
from tiers.redis_process import NO_PROGRAM, PROGRAM, RedisProcess

LARGEST_BYTES = 4096  # of a record of the suite
NUM_FIT = 32  # records of that length that Quire's own tiers here have room for
PATIENCE_S = 30.0  # of calls that are not about time

OWN: Mapping[str, Callable[[Path], str]] = MappingProxyType(
    {
        "memory": lambda folder: f"memory:?size={NUM_FIT * LARGEST_BYTES}",
        "file": lambda folder: f"file:{folder}/tier?size={NUM_FIT * LARGEST_BYTES}&reserve=0",
    }
)


def _redis(folder: Path) -> Iterator[str]:
    if PROGRAM is None:
        pytest.skip(NO_PROGRAM)
    server = RedisProcess(folder)
    try:
        yield server.address
    finally:
        server.kill()


def _s3(folder: Path) -> Iterator[str]:
    with played_s3() as server:
        yield server.address


# Kinds that need a server: a context manager gives the address while the server runs, or skips.
SERVERS: Mapping[str, Callable[[Path], Iterator[str]]] = MappingProxyType(
    {"redis": _redis, "s3": _s3}
)

EXAMPLE = "sqlite"  # of another package: examples/tier.py
# What is stored at an address of ``--tier`` may outlive a run.
_OF_THIS_RUN = os.urandom(16) if named.TIER in os.environ else b""
_NUM_MADE = Counter[str]()  # names, by test
CASES = (*OWN, *SERVERS, EXAMPLE)


@dataclass(frozen=True, slots=True)
class TierCase:
    """A kind of tier at an address."""

    address: TierAddress
    kind: str

    def make(self, namespace: str = "0123456789abcdef") -> Tier:
        """Make the tier, as an engine with this namespace does."""
        return TIERS.find(self.kind, "--tier")(self.address, LARGEST_BYTES, namespace)

    @property
    def is_small(self) -> bool:
        """Whether a test may fill it."""
        return self.kind in (*OWN, EXAMPLE)


@contextmanager
def tier_case(name: str, folder: Path) -> Iterator[TierCase]:
    """Make the case of a name in ``CASES``, or of an address."""
    if name in SERVERS:
        with contextmanager(SERVERS[name])(folder) as text:
            address = TierAddress.parse(text)
            yield TierCase(address, address.kind)
        return
    if name == EXAMPLE:
        text = f"{EXAMPLE}:{folder}/records.sqlite?size={NUM_FIT * LARGEST_BYTES}"
    else:
        text = OWN[name](folder) if name in OWN else name
    address = TierAddress.parse(text)
    yield TierCase(address, address.kind)


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


def new_names(count: int) -> list[Name]:
    """Make names that no other test has used, the same in each run unless there is a ``--tier``.

    Of names drawn anew two share a tag now and then, or one finds a bucket full.
    """
    test = os.environ["PYTEST_CURRENT_TEST"]
    first = _NUM_MADE[test]
    _NUM_MADE[test] += count
    names = (f"{test} {number}".encode() for number in range(first, first + count))
    return [hashlib.sha256(_OF_THIS_RUN + name).digest() for name in names]


def content(name: Name, num_bytes: int = LARGEST_BYTES) -> bytes:
    """Return the one record of a name and a length."""
    return random.Random(name + num_bytes.to_bytes(4, "little")).randbytes(num_bytes)


def views(records: Sequence[bytes]) -> list[memoryview]:
    return [memoryview(record) for record in records]


def buffers(sizes: Sequence[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def store(tier: Tier, names: Sequence[Name], num_bytes: int = LARGEST_BYTES) -> int:
    """Store the record of each name."""
    return tier.store(names, views([content(name, num_bytes) for name in names]), soon())


def loaded(tier: Tier, names: Sequence[Name], num_bytes: int = LARGEST_BYTES) -> int:
    """Load the record of each name; each that is loaded must be right."""
    into = buffers([num_bytes] * len(names))
    count = tier.load(names, into, soon())
    for name, buffer in zip(names[:count], into, strict=False):
        assert buffer == content(name, num_bytes), "another record, or a part of one"
    return count
