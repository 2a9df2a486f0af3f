"""Responses that can be asked for again, in a bounded part of this process's memory.

Each caller has its own: none finds another's, whatever names it tries. When there is no room,
the caller with the most bytes loses what it has not used for longest, so that one who keeps much
pushes out no other caller's. Nothing is written to a disk or a log.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import final

_ENTRY_BYTES = 1024  # about what an entry takes besides its texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One response, and what it answered."""

    response: bytes = field(repr=False)  # its JSON
    before: tuple[bytes, ...] = field(
        default=(), repr=False
    )  # JSON lists of all items, old and new
    events: tuple[bytes, ...] = field(default=(), repr=False)  # if they may be asked for again
    in_background: bool = False

    @property
    def num_bytes(self) -> int:
        """Of its texts. What several share is counted for each."""
        return len(self.response) + sum(map(len, self.before)) + sum(map(len, self.events))


@final
class Store:
    """Of one server. ``most_bytes`` is for all callers together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_caller: dict[int, OrderedDict[str, Kept]] = {}
        self._num_bytes: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes.values())

    def __len__(self) -> int:
        return sum(map(len, self._by_caller.values()))

    def put(self, caller: int, name: str, kept: Kept) -> None:
        """Keep it as long as there is room; not at all, if it alone is too large."""
        self.drop(caller, name)
        if _cost(kept) > self._most_bytes:
            return
        self._by_caller.setdefault(caller, OrderedDict())[name] = kept
        self._num_bytes[caller] = self._num_bytes.get(caller, 0) + _cost(kept)
        while self.num_bytes > self._most_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self.drop(largest, next(iter(self._by_caller[largest])))

    def get(self, caller: int, name: str) -> Kept | None:
        """It has been used now."""
        own = self._by_caller.get(caller)
        if own is None or name not in own:
            return None
        own.move_to_end(name)
        return own[name]

    def drop(self, caller: int, name: str) -> bool:
        """Whether there was one."""
        own = self._by_caller.get(caller)
        if own is None or name not in own:
            return False
        self._num_bytes[caller] -= _cost(own.pop(name))
        if not own:
            del self._by_caller[caller], self._num_bytes[caller]
        return True


def _cost(kept: Kept) -> int:
    return _ENTRY_BYTES + kept.num_bytes
