"""When blocks that are gone were last used: a small table that may forget.

One slot of four bytes holds a 16-bit tag and a 16-bit time; a newcomer overwrites. Of a large cache
only a sample of the blocks is remembered, chosen by content, since blocks of one prefix are used
together: the time of a deep block says that its ancestors were used no earlier.
"""

import numpy as np
import numpy.typing as npt

Prints = npt.NDArray[np.uint32]  # 32-bit fingerprints of whole prefixes
Times = npt.NDArray[np.int64]
_SLOTS_A_BLOCK = 2
_LEAST_SLOTS = 1 << 14
_REACH = 8  # how far back a time is believed: so many times the number of blocks
_TICKS = 1024  # of the coarse clock, in the time that as many blocks are computed as there are
NEVER = -1
_LOW = np.uint32(0xFFFF)  # of a slot: the time
_LEAST_TAG = np.uint32(1 << 16)  # … above it the tag: the upper half of a print, and never zero
_SPREAD, _SHIFT = np.uint32(0x9E3779B1), np.uint32(4)


class Ghosts:
    """Times are counted in blocks computed."""

    def __init__(self, num_blocks: int) -> None:
        slots = max(_LEAST_SLOTS, 1 << (_SLOTS_A_BLOCK * num_blocks - 1).bit_length())
        self._slots = np.zeros(slots, np.uint32)
        self._last = np.uint32(slots - 1)  # there are a power of two of them
        # A power of two, so that the clock can be set back by one without moving the ticks.
        self._tick = 1 << max(0, min(14, (num_blocks // _TICKS).bit_length()))
        self._reach = _REACH * num_blocks
        one_in = 1 << max(0, (self._reach // slots).bit_length() - 1)
        self._mask = np.uint32(one_in - 1)  # prints with none of these bits are remembered

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def remember(self, prints: Prints, times: Times) -> None:
        """Blocks of these contents are evicted; they were last used then."""
        if self._mask:
            sampled = prints & self._mask == 0
            prints, times = prints[sampled], times[sampled]
        ticks = (times // self._tick).astype(np.uint32) & _LOW
        self._slots[self._place(prints)] = (prints | _LEAST_TAG) & ~_LOW | ticks

    def recall(self, prints: Prints, now: int) -> Times:
        """When each was last used, roughly; ``NEVER`` where that is not known."""
        found = self._slots[self._place(prints)]
        known = (found ^ (prints | _LEAST_TAG)) <= _LOW  # no tag is zero
        known &= prints & self._mask == 0
        ages = ((now // self._tick - found.astype(np.int64)) & 0xFFFF) * self._tick
        known &= ages <= self._reach
        return np.where(known, np.maximum(now - ages, 0), NEVER)

    def _place(self, prints: Prints) -> npt.NDArray[np.uint32]:
        places: npt.NDArray[np.uint32] = prints * _SPREAD >> _SHIFT & self._last
        return places
