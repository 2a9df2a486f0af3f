"""``Tier``: the one protocol of places that keep records of blocks.

A tier keeps bytes under names of 32 bytes, and nothing that it returns is trusted: callers check
each record (``record``). Calls are synchronous and have a deadline, since threads of the caller
make them and no step waits for one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from quire.errors import QuireError

Name: TypeAlias = bytes  # of a record: 32 bytes

NAME_BYTES = 32


class TierError(QuireError):
    """A tier cannot answer: it is away, broken or out of time. What was asked is not there."""


class TierFull(TierError):
    """A tier has no room for a record, and makes none."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment by which a call returns, on the clock ``time.monotonic``."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Make the deadline that many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Return the seconds until then: 0 when it has passed."""
        return max(0.0, self.at_s - time.monotonic())

    def check(self, what: str) -> None:
        """Raise TierError if the moment has passed."""
        if not self.left_s:
            raise TierError(f"{what}: out of time")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """What a tier holds at this moment, as far as it knows."""

    num_records: int | None = None  # None: it does not say
    used_bytes: int | None = None
    capacity_bytes: int | None = None  # None: it has no limit of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTraits:
    """What a kind of tier is, which callers decide by."""

    is_shared: bool  # other machines or users may write into it
    is_persistent: bool  # it outlives this process
    batch: int = 16  # records that one call loads or stores best

    @property
    def outlives_process(self) -> bool:
        """Whether records are of use when the process that stored them has ended."""
        return self.is_persistent or self.is_shared


class Tier(Protocol):
    """Keeps records by name. Several threads may call at once.

    Every method but ``close`` raises TierError, and nothing else, where it cannot answer in time.
    An answer may be wrong: a record that was found may be gone, cut short, or another's.
    """

    @property
    def traits(self) -> TierTraits:
        """Return what kind of tier this is."""
        ...

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        """Count how many of these records, from the first one on, are probably there."""
        ...

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        """Fill the first of these buffers, each with a whole record. Return how many.

        A record of another length than its buffer ends the run before it. Buffers behind the run
        may have been written to. ``into``: a writable, contiguous view of bytes for each name.
        """
        ...

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        """Keep these records, the first ones first. Return how many are kept.

        A reader sees a record whole or not at all. One that is there already may be left as it is.
        Raises: TierFull if there is no room for the first one.
        """
        ...

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        """Forget these records, as far as they are there."""
        ...

    def usage(self) -> TierUsage:
        """Return what the tier holds, without asking another machine."""
        ...

    def close(self) -> None:
        """Give back what this process holds of the tier. Records that persist stay."""
        ...


@runtime_checkable
class DescribedTier(Protocol):
    """What a tier does besides that keeps, for people, what its records are of."""

    def describe(self, description: bytes) -> None:
        """Keep a namespace's description, a JSON object, beside its records. Raises: TierError."""
        ...


@runtime_checkable
class ClearableTier(Protocol):
    """What a tier does besides that can find all records of its namespace."""

    def clear(self, deadline: Deadline) -> None:
        """Forget all records of the namespace, and no other. Raises: TierError if some are left."""
        ...


@runtime_checkable
class EvictingTier(Protocol):
    """What a tier does besides that tells which records it has evicted for others."""

    def take_evicted(self) -> list[Name]:
        """Return what was evicted since the last call, the first of which is the beginning."""
        ...
