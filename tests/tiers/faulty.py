"""A tier that fails in every way that the protocol allows, by a schedule that a seed draws.

    FaultyTier(tier, seed=3)                    each fault, in one call of five
    FaultyTier(tier, seed=3, faults=("hang",), share=1.0)
    FaultyTier(tier, script={0: "full", 4: "payload bit"})

``done`` lists what happened, so that a test can tell that its faults did occur. Faults of bytes are
those of a record: they are applied to what ``load`` returns, or to what ``store`` keeps.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from quire.tiers import Deadline, Name, Tier, TierError, TierFull, TierTraits, TierUsage

# Where the fields of a record lie: [from, to), the last one to the end (quire.tiers.record).
FIELDS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "magic": (0, 8),
        "version": (8, 10),
        "flags": (10, 12),
        "sizes": (12, 24),
        "fingerprint": (24, 56),
        "group": (56, 64),
    }
)
_PUBLIC_BYTES = 64
_PART_BYTES, _PRIVATE_BYTES, _CHECK_BYTES = 56, 104, 16
_MOST_DELAY_S = 0.02
_PAUSE_S = 0.001

BIT_FAULTS = tuple(
    f"{where} bit"
    for where in (*FIELDS, "private header", "checks", "padding", "payload", "last byte")
)
BYTE_FAULTS = (
    *BIT_FAULTS,
    "next version",
    "other fingerprint",
    "other record",  # a right one, which belongs to another name
    "cut",  # its second half is zeros, as after a loss of power
    "zeros",
    "two writers",  # the first half of one record, the second of another
)
CALL_FAULTS = ("delay", "hang", "error", "full", "short", "lost", "found", "forgotten", "twice")
FAULTS = (*CALL_FAULTS, *BYTE_FAULTS)

Change = Callable[[bytearray, random.Random], None]


class FaultyTier:
    """A tier around another one, some of whose calls fail."""

    def __init__(
        self,
        tier: Tier,
        *,
        seed: int = 0,
        faults: Sequence[str] = FAULTS,
        share: float = 0.2,  # of the calls, in which there is a fault
        script: Mapping[int, str] | None = None,  # by the call's number, instead of a share
    ) -> None:
        unknown = {*faults, *(script or {}).values()} - {*FAULTS}
        assert not unknown, f"no such fault: {sorted(unknown)}"
        self._tier, self._draw = tier, random.Random(seed)
        self._faults, self._share, self._script = tuple(faults), share, script
        self._lock, self._num_calls = threading.Lock(), 0
        self._others: list[tuple[Name, bytes]] = []  # records that were stored
        self.done: Counter[str] = Counter()
        self.num_in_call = self.most_in_call = 0

    @property
    def traits(self) -> TierTraits:
        return self._tier.traits

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        fault = self._next(("delay", "hang", "error", "short", "lost", "found"))
        self._wait(fault, deadline)
        count = self._tier.find(names, deadline)
        if fault == "short":
            return self._below(count)
        if fault == "lost":  # between this answer and the load
            self._tier.drop(names[: count + 1], deadline)
        return len(names) if fault == "found" else count

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        fault = self._next(("delay", "hang", "error", "short", "lost", *BYTE_FAULTS))
        self._wait(fault, deadline)
        if fault == "lost":
            self._tier.drop(names[self._below(len(names)) :], deadline)
        count = self._tier.load(names, into, deadline)
        if fault == "short":
            return self._below(count)
        if fault in BYTE_FAULTS and count:
            spoiled = into[self._below(count)]
            data = bytearray(spoiled)
            self._spoil(fault, data)
            spoiled[:] = data
        return count

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        fault = self._next(("delay", "hang", "error", "full", "short", "forgotten", "twice"))
        self._wait(fault, deadline)
        with self._lock:
            self._others += [(name, bytes(data)) for name, data in zip(names, records, strict=True)]
            del self._others[:-64]
        if fault == "full":
            raise TierFull("a tier that fails on purpose is full")
        if fault == "short":
            count = self._below(len(names))
            return self._tier.store(names[:count], records[:count], deadline)
        if fault == "forgotten":  # acknowledged, and not kept
            return len(names)
        if fault == "twice":
            self._tier.store(names, records, deadline)
        return self._tier.store(names, records, deadline)

    def store_spoiled(self, fault: str, name: Name, record: memoryview, deadline: Deadline) -> int:
        """Have the tier keep a record with a fault of its bytes."""
        data = bytearray(record)
        self._spoil(fault, data)
        self._tier.drop([name], deadline)
        return self._tier.store([name], [memoryview(data)], deadline)

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        fault = self._next(("delay", "hang", "error", "forgotten"))
        self._wait(fault, deadline)
        if fault != "forgotten":
            self._tier.drop(names, deadline)

    def usage(self) -> TierUsage:
        return self._tier.usage()

    def close(self) -> None:
        self._tier.close()

    # -- the schedule ------------------------------------------------------------------------------

    def _next(self, possible: Sequence[str]) -> str | None:
        """Draw the fault of this call: one that this kind of call can have."""
        with self._lock:
            number, self._num_calls = self._num_calls, self._num_calls + 1
            if self._script is not None:
                fault = self._script.get(number)
            else:
                able = [fault for fault in self._faults if fault in possible]
                fault = (
                    self._draw.choice(able) if able and self._draw.random() < self._share else None
                )
            if fault is not None and fault in possible:
                self.done[fault] += 1
                return fault
        return None

    def _below(self, count: int) -> int:
        with self._lock:
            return self._draw.randrange(count) if count else 0

    def _wait(self, fault: str | None, deadline: Deadline) -> None:
        if fault == "delay":
            with self._lock:
                pause_s = self._draw.random() * _MOST_DELAY_S
            time.sleep(min(pause_s, deadline.left_s))
        elif fault == "hang":  # a call that waits for a machine that is away
            while deadline.left_s:
                time.sleep(min(_PAUSE_S, deadline.left_s))
            raise TierError("a tier that fails on purpose: out of time")
        elif fault == "error":
            raise TierError("a tier that fails on purpose: no route to host")

    # -- bytes -------------------------------------------------------------------------------------

    def _spoil(self, fault: str, data: bytearray) -> None:
        with self._lock:
            draw, others = self._draw, [each for _, each in self._others if len(each) == len(data)]
            different = [each for each in others if each != data]
            if fault in BIT_FAULTS:
                start, stop = span(fault.removesuffix(" bit"), data)
                data[draw.randrange(start, stop)] ^= 1 << draw.randrange(8)
            elif fault == "next version":
                data[8] += 1
            elif fault == "other fingerprint":
                data[24:56] = draw.randbytes(32)
            elif fault == "cut":
                data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
                data[-1] ^= 0xFF  # a payload of zeros is cut, too
            elif fault == "zeros":
                data[:] = bytes(len(data))
            elif different and fault == "other record":
                data[:] = draw.choice(different)
            elif different and fault == "two writers":
                half = len(data) // 2
                data[half:] = draw.choice(different)[half:]
                data[-1] ^= 0xFF  # both may end alike
            else:  # there is no other record yet
                data[-1] ^= 0xFF


def span(where: str, data: bytes | bytearray) -> tuple[int, int]:
    """Return where a part of a record's bytes lies: [from, to)."""
    if where in FIELDS:
        return FIELDS[where]
    header_bytes = min(int.from_bytes(data[12:16], "little"), len(data) - 1)
    if header_bytes <= _PUBLIC_BYTES:
        return len(data) - 1, len(data)
    num_parts = int.from_bytes(data[_PUBLIC_BYTES + 96 : _PUBLIC_BYTES + 100], "little")
    num_tokens = int.from_bytes(data[_PUBLIC_BYTES + 100 : _PUBLIC_BYTES + 104], "little")
    known = _PUBLIC_BYTES + _PRIVATE_BYTES + _PART_BYTES * num_parts + 4 * num_tokens
    checks = known + _CHECK_BYTES * num_parts
    if not known < checks <= header_bytes:  # sealed: what is hidden is zeros
        known = checks = header_bytes
    return {
        "private header": (_PUBLIC_BYTES, known),
        "checks": (known, checks) if checks > known else (_PUBLIC_BYTES, known),
        "padding": (checks, header_bytes) if header_bytes > checks else (checks - 1, checks),
        "payload": (header_bytes, len(data)),
        "last byte": (len(data) - 1, len(data)),
    }[where]
