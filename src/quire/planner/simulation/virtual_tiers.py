"""What simulated tiers keep, and what simulated prefill replicas have left: names without bytes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import final

from quire.planner.kept_records import KeptRecords
from quire.planner.planned_tiers import PlannedTier
from quire.tiers import Name

_LEASE_S = 120.0  # as ``kv_transfer_config`` has it


@final
class VirtualTier:
    """What a planned tier keeps, and what has been read from it and written to it."""

    def __init__(self, planned: PlannedTier) -> None:
        self.planned = planned
        self.records: KeptRecords = planned.make_records()
        self.loaded_bytes = self.stored_bytes = 0
        self.hit_tokens = 0  # that it had, and that were inserted into the cache


# -- from replica to replica -----------------------------------------------------------------------


@dataclass(slots=True)
class _VirtualLease:
    """Memory for the records of one prompt."""

    until_s: float
    reserved_bytes: int = 0
    num_due: int = 0  # records that are still to come
    names: list[Name] = field(default_factory=list)
    whole_s: float | None = None  # when the last one had come, or been given up


@final
class VirtualPeer:
    """The leased records of one prefill replica, and the links over which others load them.

    There is room for the bytes of the planned tier. What finds none is computed where its answer
    is.
    """

    def __init__(self, planned: PlannedTier, number: int = 0) -> None:
        """``number``: of the prefill replica."""
        self.tier, self.number = VirtualTier(planned), number
        self._leases: dict[str, _VirtualLease] = {}
        self._num_leases = Counter[Name]()  # of each record
        self._sizes: dict[Name, int] = {}
        self._numbers = count(1)
        self._used_bytes = self._reserved_bytes = 0

    def lease(self, blocks: Sequence[Sequence[int]], now_s: float) -> tuple[str, int]:
        """Reserve room for the records of blocks, of which each has these sizes in bytes.

        Returns: the lease's name, and how many blocks, from the first one on, it has room for. The
        name is empty where that is none.
        """
        for name in [name for name, each in self._leases.items() if each.until_s <= now_s]:
            self.release(name)
        capacity = self.tier.planned.capacity_bytes
        own, num_blocks = _VirtualLease(now_s + _LEASE_S), 0
        for sizes in blocks:
            held = self._used_bytes + self._reserved_bytes + own.reserved_bytes
            if capacity is not None and held + sum(sizes) > capacity:
                break
            own.reserved_bytes += sum(sizes)
            own.num_due += len(sizes)
            num_blocks += 1
        if not num_blocks:
            return "", 0
        lease = str(next(self._numbers))
        if not own.num_due:
            own.whole_s = now_s
        self._leases[lease] = own
        self._reserved_bytes += own.reserved_bytes
        return lease, num_blocks

    def keep(self, lease: str, name: Name, size: int, now_s: float) -> None:
        """Keep a record for a lease that it was reserved for, unless that has ended."""
        own = self._leases.get(lease)
        if own is None:
            return
        self._settle(own, size, now_s)
        own.names.append(name)
        self._num_leases[name] += 1
        if name not in self._sizes:
            self._sizes[name] = size
            self._used_bytes += size
            self.tier.stored_bytes += size
            self.tier.records.keep([(name, size)], now_s)

    def skip(self, lease: str, size: int, now_s: float) -> None:
        """Note that a record of that size, which was reserved for a lease, will not come."""
        own = self._leases.get(lease)
        if own is not None:
            self._settle(own, size, now_s)

    def whole_s(self, lease: str) -> float | None:
        """Return since when all of a lease is there; None: it is not yet, or the lease ended."""
        own = self._leases.get(lease)
        return None if own is None else own.whole_s

    def is_open(self, lease: str) -> bool:
        """Return whether a lease has not ended."""
        return lease in self._leases

    def release(self, lease: str) -> None:
        """End a lease. One that has ended is passed over."""
        own = self._leases.pop(lease, None)
        if own is None:
            return
        self._reserved_bytes -= own.reserved_bytes
        for name in own.names:
            self._num_leases[name] -= 1
            if not self._num_leases[name]:
                del self._num_leases[name]
                self._used_bytes -= self._sizes.pop(name)
                self.tier.records.drop(name)

    def _settle(self, own: _VirtualLease, size: int, now_s: float) -> None:
        own.num_due -= 1
        own.reserved_bytes -= size
        self._reserved_bytes -= size
        if not own.num_due:
            own.whole_s = now_s


# -- of one replica --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a replica's blocks go, and where they come from."""

    tiers: tuple[VirtualTier, ...] = ()  # the nearest first
    leaves_at: VirtualPeer | None = None  # where a prefill replica leaves prompts
    peers: tuple[VirtualPeer, ...] = ()  # from which one that goes on with prompts loads them

    @property
    def hands_over(self) -> bool:
        """Return whether blocks go from replica to replica here."""
        return self.leaves_at is not None or bool(self.peers)

    @property
    def sources(self) -> tuple[VirtualTier, ...]:
        """Return what blocks are loaded from: its tiers, and then its peers."""
        return (*self.tiers, *(peer.tier for peer in self.peers))
