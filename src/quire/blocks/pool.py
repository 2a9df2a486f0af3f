"""A pool of equal blocks with reference counts. Any free block will do for anyone.

The lowest free id is handed out first, so that blocks in use huddle together and whole pages at the
far end stay empty. The pool also knows which *granules* (the fewest blocks that fill whole pages)
have a block in use, because those are what storage must have committed.
"""

import heapq
from collections import Counter

import numpy as np
import numpy.typing as npt


class BlockPool:
    """Blocks 0 … num_blocks - 1, each held by ``refs[id]`` holders."""

    def __init__(self, num_blocks: int, *, granule_blocks: int = 1) -> None:
        self.num_blocks = num_blocks
        self.granule_blocks = granule_blocks
        self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        # Ids below the high-water mark that came back, as a heap; above it every id is free.
        self._returned: list[int] = []
        self._high_water = 0
        self._granule_use: dict[int, int] = {}  # granule → blocks of it in use
        self.num_shared = 0  # blocks with more than one holder

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._high_water + len(self._returned)

    @property
    def num_granules(self) -> int:
        """Granules with a block in use."""
        return len(self._granule_use)

    def granule_change(self, released: list[int], num_blocks: int) -> int | None:
        """The rise of granules in use if ``released`` lost a holder and blocks were then taken.

        None if the blocks would not suffice. Nothing changes: the question before the act.
        """
        freed = [block for block in released if self.refs[block] == 1]
        if num_blocks > self.num_free + len(freed):
            return None
        reused = heapq.nsmallest(num_blocks, (*self._returned, *freed))
        fresh = range(self._high_water, self._high_water + num_blocks - len(reused))
        change = Counter(block // self.granule_blocks for block in (*reused, *fresh))
        change.subtract(block // self.granule_blocks for block in freed)
        before = sum(granule in self._granule_use for granule in change)
        after = sum(self._granule_use.get(granule, 0) + n > 0 for granule, n in change.items())
        return after - before

    def allocate(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Take blocks, one reference each.

        Returns: the block ids, and the granules that came into use with them.
        The caller has checked ``num_free``: running out here is a defect, not a verdict.
        """
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked, {self.num_free} free"
        blocks: list[int] = []
        opened: list[int] = []
        for _ in range(num_blocks):
            if self._returned:
                block = heapq.heappop(self._returned)
            else:
                block = self._high_water
                self._high_water += 1
            self.refs[block] = 1
            blocks.append(block)
            granule = block // self.granule_blocks
            used = self._granule_use.get(granule, 0)
            if not used:
                opened.append(granule)
            self._granule_use[granule] = used + 1
        return blocks, opened

    def share(self, block: int) -> None:
        """One more holder."""
        assert self.refs[block] > 0, f"block {block} is free and cannot be shared"
        self.num_shared += int(self.refs[block] == 1)
        self.refs[block] += 1

    def release(self, block: int) -> int | None:
        """One holder less. Returns: the block's granule if no block of it is in use any more."""
        assert self.refs[block] > 0, f"block {block} is released more often than it is held"
        self.refs[block] -= 1
        if self.refs[block]:
            self.num_shared -= int(self.refs[block] == 1)
            return None
        heapq.heappush(self._returned, block)
        granule = block // self.granule_blocks
        self._granule_use[granule] -= 1
        if self._granule_use[granule]:
            return None
        del self._granule_use[granule]
        return granule

    def check(self) -> None:
        used = np.flatnonzero(self.refs)
        assert len(set(self._returned)) == len(self._returned), "a block was returned twice"
        assert not self.refs[self._returned].any(), "a returned block is still held"
        assert len(used) + self.num_free == self.num_blocks, "used and free blocks do not add up"
        assert (self.refs >= 0).all(), "a reference count is negative"
        assert self.num_shared == (self.refs > 1).sum(), "the shared blocks are miscounted"
        counts = np.unique(used // self.granule_blocks, return_counts=True)
        expected = dict(zip(*(c.tolist() for c in counts), strict=True))
        assert self._granule_use == expected, "granule counts differ from the blocks in use"
