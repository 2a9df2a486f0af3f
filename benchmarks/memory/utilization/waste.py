"""Where every byte of a KV pool is at one moment: used, or wasted in one of several ways.

The words are those of seeds 3 and 4 (which take them from Kwon et al. 2023), made exact:

* *used*: entries of tokens, which a later token will read.
* *later*: room inside what a sequence holds that it will fill before it ends. Known here because
  the trace says how each ends. Seed 3 counts it with the next one.
* *internal*: room inside what a sequence holds that it never fills: "a request that reserves 8k
  slots but generates 200 tokens wastes the other 7,800 for its entire lifetime" (seed 3); of a
  block or a page, the last part (seed 4).
* *external*: what is free, and in one piece would do for the sequence that waits, but no hole is
  long enough: "even if the total free memory is sufficient, no single contiguous region may be
  large enough" (seed 4). What is too little even in one piece is not external, it is free.
* *cached*: held by no sequence and kept for prompts that begin alike; a sequence that needs room
  gets it.
* *free*: the rest. While a sequence waits, too little for it beside what newcomers must leave.

The six sum up to the capacity. *Held* is used + later + internal: what sequences have and no other
can get. *Utilization* is used / held; of the whole pool, used / capacity.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from quire.kv import Accounting, AllocationResult, Extension, Fits, NotNow
from quire.kv.contiguous import ContiguousAccounting
from quire.kv.growing import GrowingAccounting
from quire.kv.interface import AS_IT_IS
from quire.kv.layout import common_page_tokens, page_tokens
from quire.kv.virtual import VirtualAccounting
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.spec import FullAttention
from quire.units import align_up

HeldSlots = Callable[[int, int, int], int]  # group, seq_id, tokens of its range → slots it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Of one moment, or a mean of several."""

    used: float
    later: float
    internal: float
    external: float
    cached: float
    free: float

    @property
    def held(self) -> float:
        return self.used + self.later + self.internal

    @property
    def capacity(self) -> float:
        return self.held + self.external + self.cached + self.free

    @property
    def utilization(self) -> float:
        return self.used / self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Of a step, or a mean of several."""

    bytes: Bytes
    num_sequences: float  # that hold something


def mean(moments: Iterable[tuple[Moment, float]]) -> Moment:
    """Of moments, each with its weight."""
    several = list(moments)
    total = sum(weight for _, weight in several)

    def of(part: Callable[[Moment], float]) -> float:
        return sum(part(moment) * weight for moment, weight in several) / total

    parts = {name: of(attrgetter(f"bytes.{name}")) for name in Bytes.__slots__}
    return Moment(bytes=Bytes(**parts), num_sequences=of(attrgetter("num_sequences")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How long a sequence is in the end, and the range that it gets where sequences get ranges."""

    final_tokens: int
    range_tokens: int


class Watch:
    """Sees who gets room in an accounting and who is refused; from then on it can be asked.

    Only full attention, where a sequence never gives back a part of what it holds.
    """

    def __init__(self, accounting: Accounting, page_bytes: int) -> None:
        assert all(isinstance(group.spec, FullAttention) for group in accounting.groups)
        self.one_has_waited = False
        self._accounting = accounting
        self._held_slots = _held_slots(accounting, page_bytes)
        self._coming: deque[Fate] = deque()
        self._fates: dict[int, Fate] = {}
        self._holders: set[int] = set()
        self._waiting: tuple[int, NotNow] | None = None  # who was refused room to begin, last
        self._add, self._try_extend = accounting.add, accounting.try_extend
        self._free = accounting.free
        # What an instance has comes before what its class has.
        accounting.add = self._added  # type: ignore[method-assign]
        accounting.try_extend = self._extended  # type: ignore[method-assign]
        accounting.free = self._freed  # type: ignore[method-assign]

    def expect(self, fate: Fate) -> None:
        """Sequences are told of in the order in which they will come."""
        self._coming.append(fate)

    def now(self) -> Moment:
        """Raises: AssertionError where what sequences hold is not what the accounting counts."""
        usage, capacity = self._accounting.usage(), self._accounting.ceiling.capacity_bytes
        used = later = held = 0
        for seq_id in self._holders:
            num_tokens, fate = self._accounting.num_tokens(seq_id), self._fates[seq_id]
            assert num_tokens <= fate.final_tokens, "a sequence is longer than it will be"
            for number, group in enumerate(self._accounting.groups):
                slots = self._held_slots(number, seq_id, fate.range_tokens)
                used += num_tokens * group.bytes_per_token
                later += (min(slots, fate.final_tokens) - num_tokens) * group.bytes_per_token
                held += slots * group.bytes_per_token
        assert used == usage.used_bytes, "bytes are used, and by no sequence"
        assert held == usage.committed_bytes - usage.cached_bytes, "bytes are held by no sequence"
        free = capacity - usage.committed_bytes
        external = free if self._lies_in_pieces(free, usage.cached_bytes) else 0
        found = Bytes(
            used=used,
            later=later,
            internal=held - used - later,
            external=external,
            cached=usage.cached_bytes,
            free=free - external,
        )
        assert min(getattr(found, name) for name in Bytes.__slots__) >= 0, "less than nothing"
        assert found.capacity == capacity, "the parts are not the whole"
        return Moment(bytes=found, num_sequences=len(self._holders))

    def _lies_in_pieces(self, free_bytes: int, cached_bytes: int) -> bool:
        """Whether there is enough for the sequence that waits, and in no piece of it."""
        if self._waiting is None:
            return False
        hole_bytes = free_bytes = free_bytes + cached_bytes  # any block, any page will do
        if isinstance(self._accounting, ContiguousAccounting):
            hole_bytes = round((1 - self._accounting.fragmentation) * free_bytes)
        _, refusal = self._waiting
        return hole_bytes < refusal.need_bytes <= free_bytes - refusal.kept_bytes

    def _added(self, seq_id: int, **options: Any) -> None:
        self._add(seq_id, **options)
        if seq_id not in self._fates:  # else it was preempted
            self._fates[seq_id] = self._coming.popleft()

    def _extended(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        verdict = self._try_extend(seq_id, num_tokens, extension)
        if isinstance(verdict, Fits):
            self._holders.add(seq_id)
            self._waits_no_more(seq_id)
        elif isinstance(verdict, NotNow) and seq_id not in self._holders:
            self._waiting, self.one_has_waited = (seq_id, verdict), True
        return verdict

    def _freed(self, seq_id: int, **options: Any) -> None:
        self._free(seq_id, **options)
        self._holders.discard(seq_id)
        self._waits_no_more(seq_id)

    def _waits_no_more(self, seq_id: int) -> None:
        if self._waiting is not None and self._waiting[0] == seq_id:
            self._waiting = None


def _held_slots(accounting: Accounting, page_bytes: int) -> HeldSlots:
    """How many slots a sequence holds, worked out beside the accounting and not by it."""
    if isinstance(accounting, ContiguousAccounting):
        step = common_page_tokens(accounting.groups, page_bytes)
        return lambda group, seq_id, range_tokens: align_up(range_tokens, step)
    if isinstance(accounting, SharedVirtualAccounting):
        steps = [accounting.tables.block_size for n in range(len(accounting.groups))]
    elif isinstance(accounting, GrowingAccounting | VirtualAccounting):
        steps = [page_tokens(group, page_bytes) for group in accounting.groups]
    else:
        steps = [accounting.block_size(n) for n in range(len(accounting.groups))]

    def held(group: int, seq_id: int, range_tokens: int) -> int:
        tokens = accounting.num_tokens(seq_id)
        if isinstance(accounting, GrowingAccounting):
            tokens += accounting.spare_tokens(group, seq_id)
        return align_up(tokens, steps[group])

    return held
