"""Free blocks in order of a score, as runs: blocks that one sequence released mostly score alike.

A run gives its blocks in the order in which they were put in. A block that leaves from the middle
forgets its run, and the entry that stays behind is skipped when it comes up; when half of the
entries are stale, all are swept. So each block costs O(1) amortised, and each run a heap operation.
"""

import heapq
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.intp]
NO_IDS: Ids = np.empty(0, np.intp)
_NO_RUN = 0
_LAST_SERIAL = 2**31 - 1
_SLACK = 1 << 12  # stale entries that are not worth a sweep


@dataclass(slots=True)
class _QueuedRun:
    blocks: npt.NDArray[np.int32]
    begin: int = 0  # entries before it have left


class EvictionQueue:
    """Blocks 0 … num_blocks - 1, each in at most one run; the lowest score is first."""

    def __init__(self, num_blocks: int) -> None:
        self._run_of = np.zeros(num_blocks, np.int32)  # serial of a block's run
        self._heap: list[tuple[int, int, _QueuedRun]] = []  # score, serial: later runs come later
        self._serial = _NO_RUN
        self._len = 0
        self._num_entries = 0  # blocks in runs, stale ones included

    def __len__(self) -> int:
        return self._len

    def put(self, score: int, blocks: Ids) -> None:
        """Put a run in."""
        if self._num_entries > 2 * self._len + _SLACK or self._serial == _LAST_SERIAL:
            self._sweep()
        self._serial += 1
        heapq.heappush(self._heap, (score, self._serial, _QueuedRun(blocks.astype(np.int32))))
        self._run_of[blocks] = self._serial
        self._len += len(blocks)
        self._num_entries += len(blocks)

    def remove(self, blocks: Ids) -> None:
        """Take these out, wherever they are."""
        self._run_of[blocks] = _NO_RUN
        self._len -= len(blocks)

    def first(self) -> int:
        """Return the block that comes first. There is one."""
        while True:
            _, serial, run = self._heap[0]
            for index in range(run.begin, len(run.blocks)):
                if self._run_of[run.blocks[index]] == serial:
                    self._num_entries -= index - run.begin
                    run.begin = index
                    return int(run.blocks[index])
            self._drop_first()

    def pop(self, count: int, *, one_run: bool = False) -> Ids:
        """Take the first ``count`` out, or as many as there are (in the first run)."""
        found: list[Ids] = []
        heap, run_of = self._heap, self._run_of
        count = min(count, self._len)
        while count:
            _, serial, run = heap[0]
            begin = run.begin
            stop = min(begin + max(count, 16), len(run.blocks))
            entries = run.blocks[begin:stop]
            alive = (run_of[entries] == serial).nonzero()[0]
            if len(alive) > count:
                alive = alive[:count]
                stop = begin + int(alive[-1]) + 1
            self._num_entries -= stop - begin
            run.begin = stop
            if stop == len(run.blocks):
                heapq.heappop(heap)
            if len(alive):
                taken = entries[: len(alive)] if len(alive) == stop - begin else entries[alive]
                found.append(taken.astype(np.intp))
                count -= len(alive)
                if one_run:
                    break
        blocks = found[0] if len(found) == 1 else np.concatenate([NO_IDS, *found])
        self.remove(blocks)
        return blocks

    def runs(self) -> list[Ids]:
        """List the blocks of each run, in order."""
        return [blocks for _, blocks in self._alive()]

    def check(self, blocks: Ids) -> None:
        """Raise AssertionError unless exactly these ``blocks`` (ascending) are in."""
        found = np.sort(np.concatenate([NO_IDS, *self.runs()]))
        assert np.array_equal(found, blocks), "the free blocks are not those in the runs"
        assert len(found) == self._len, "the free blocks are miscounted"
        assert np.array_equal(self._run_of.nonzero()[0], blocks), "a block has a run that is gone"
        entries = sum(len(run.blocks) - run.begin for _, _, run in self._heap)
        assert entries == self._num_entries, "the entries are miscounted"

    def _drop_first(self) -> None:
        _, _, run = heapq.heappop(self._heap)
        self._num_entries -= len(run.blocks) - run.begin

    def _alive(self) -> list[tuple[int, Ids]]:
        """List the score and the blocks of each run that has any, in order."""
        found: list[tuple[int, Ids]] = []
        for score, serial, run in sorted(self._heap, key=itemgetter(0, 1)):
            blocks = run.blocks[run.begin :]
            blocks = blocks[self._run_of[blocks] == serial]
            if len(blocks):
                found.append((score, blocks.astype(np.intp)))
        return found

    def _sweep(self) -> None:
        """Drop stale entries; the others keep their order."""
        runs = self._alive()
        self._heap, self._serial = [], _NO_RUN
        for score, blocks in runs:
            self._serial += 1
            self._heap.append((score, self._serial, _QueuedRun(blocks.astype(np.int32))))
            self._run_of[blocks] = self._serial
        self._num_entries = self._len
