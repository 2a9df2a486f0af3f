"""``Staging``: the host memory through which blocks travel between a cache and tiers."""

import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]


@final
class Staging:
    """Buffers for records of each group, within a budget of bytes. Threads share it."""

    def __init__(self, capacity_bytes: int, sizes: Sequence[int]) -> None:
        """``sizes``: the bytes of a buffer, by group."""
        self.capacity_bytes, self.sizes = capacity_bytes, tuple(sizes)
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._used_bytes = self._held_bytes = 0  # given out; and with those that are free
        self._free: dict[int, list[Bytes]] = {}  # by size

    def take(self, group: int, *, share: float = 1.0) -> Bytes | None:
        """Take a buffer for a group's record, while less than a share of the capacity is taken.

        Return None where there is none, or the system has no memory for it.
        """
        num_bytes = self.sizes[group]
        with self._lock:
            if self._used_bytes + num_bytes > self.capacity_bytes * share:
                return None
            self._used_bytes += num_bytes
            if free := self._free.get(num_bytes):
                return free.pop()
            self._held_bytes += num_bytes
            for size, several in self._free.items():  # of other sizes
                while several and self._held_bytes > self.capacity_bytes:
                    several.pop()
                    self._held_bytes -= size
        try:
            return np.empty(num_bytes, np.uint8)
        except MemoryError:
            with self._lock:
                self._used_bytes -= num_bytes
                self._held_bytes -= num_bytes
            return None

    def give(self, buffers: Iterable[Bytes]) -> None:
        """Give buffers back."""
        with self._lock:
            for buffer in buffers:
                self._used_bytes -= len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)
            self._has_room.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until a buffer is given back, or for so many seconds."""
        with self._lock:
            self._has_room.wait(seconds)

    @property
    def free_bytes(self) -> int:
        """Return the bytes that can be taken."""
        with self._lock:
            return self.capacity_bytes - self._used_bytes
