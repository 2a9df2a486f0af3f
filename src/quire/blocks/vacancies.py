"""Which ids of a pool are vacant, and which of them to take so that neighbours stay together.

A table's blocks are read one after the other, and faster where they lie side by side: a sequence
that grows is given the id after its last one if that is vacant. So that it often is, a new run
begins at an *extent* (32 ids from a multiple of 32 on) that is vacant as a whole, and where there
is none, in the middle of what is left of one. Such places are looked up for many runs at a time,
and again when a share of the ids has changed hands. Where there are none, what became vacant last
is taken first.

All this is about addresses, which cost nothing: what has pages is the pool's business.
"""

import numpy as np
import numpy.typing as npt

from quire.blocks.runs import NO_IDS, Ids

_EXTENT = 32  # of 32 blocks side by side 31 have their neighbour: 97 %
_SLACK = 64  # stale entries that are not worth a sweep
_SHARE = 32  # one in so many ids: at least as many have changed hands between two look-ups


class Vacancies:
    """Ids 0 … count - 1, all vacant at first: a stack, from which any may also be taken."""

    def __init__(self, count: int) -> None:
        # An id that is taken from the middle leaves its entry behind. It counts again when the id
        # is vacant again, but then there is another one above it, which comes first.
        self._stack = np.empty(count + count // 32 + _SLACK, np.int32)
        self._vacant = np.zeros(count + 1, bool)  # of ids; never of the one after the last
        self._vacant_after = self._vacant[1:]  # of the ids after these; after -1: False
        self._len = self._top = 0
        self._share = len(self._vacant) // _SHARE
        self._starts, self._lengths = NO_IDS, NO_IDS  # where runs may begin
        self._num_changed = 0  # ids put and taken since these were looked up
        self.put(np.arange(count - 1, -1, -1))

    def __len__(self) -> int:
        return self._len

    def are_in(self, ids: Ids) -> npt.NDArray[np.bool_]:
        vacant: npt.NDArray[np.bool_] = self._vacant[ids]
        return vacant

    def put(self, ids: Ids) -> None:
        """These are vacant again."""
        stop = self._top + len(ids)
        if stop > len(self._stack):
            self._sweep()
            stop = self._top + len(ids)
        self._stack[self._top : stop] = ids
        self._vacant[ids] = True
        self._top = stop
        self._len += len(ids)
        self._num_changed += len(ids)

    def pop(self, count: int) -> Ids:
        """Take what became vacant last; at first, the lowest ids. There are as many."""
        assert count <= self._len, f"{count} ids asked, {self._len} left"
        if self._top == self._len:
            self._top -= count
            ids = self._stack[self._top : self._top + count][::-1].astype(np.intp)
            return self._use(ids)
        found: list[Ids] = []
        while count:
            bottom = max(0, self._top - max(count, 16))
            places, ids = self._counting(bottom)
            found.append(self._use(ids[:count]))
            count -= len(found[-1])
            self._top = bottom if count else int(places[len(found[-1]) - 1])
        if not self._len:
            self._top = 0
        return _joined(found)

    def take(self, after: Ids) -> Ids:
        """Take one for each entry of ``after``: the next id if it is vacant. There are as many.

        A negative entry goes on where the one before it has been placed.
        """
        vacant = self._vacant_after[after]
        num_vacant = int(np.count_nonzero(vacant))
        if num_vacant < len(after) and np.count_nonzero(after < 0):
            return self._take_runs(after, num_vacant)
        ids = after + 1
        if num_vacant and len(set(after.tolist())) < len(after):
            # Those that share a block want the same one: the first of them gets it.
            first = np.zeros(len(after), bool)
            first[np.unique(after, return_index=True)[1]] = True
            vacant &= first
            num_vacant = int(np.count_nonzero(vacant))
        if num_vacant == len(ids):
            return self._use(ids)
        if num_vacant:
            self._use(ids[vacant])
        ids[~vacant] = self._begin(len(ids) - num_vacant)
        return ids

    def take_run(self, after: int, count: int) -> Ids:
        """Take so many for one sequence, in as few runs as can be had.

        The first is the id ``after`` this one if that is vacant; it may be negative. There are as
        many.
        """
        found: list[Ids] = []
        if after >= 0:
            used = (~self._vacant_after[after : after + count]).nonzero()[0]
            stop = after + 1 + (int(used[0]) if len(used) else count)
            found.append(self._use(np.arange(after + 1, stop)))
            count -= len(found[-1])
        while count and self._can_begin():
            enough, longest = 1, int(self._lengths[0])
            if longest >= count:
                ids = int(self._starts[0]) + np.arange(longest)
            else:
                ends = np.cumsum(self._lengths[:count])
                enough = int(np.searchsorted(ends, count)) + 1
                ends, lengths = ends[:enough], self._lengths[:enough]
                starts = self._starts[:enough] - ends + lengths
                ids = np.repeat(starts, lengths) + np.arange(ends[-1])
            self._starts, self._lengths = self._starts[enough:], self._lengths[enough:]
            found.append(self._use(ids[self.are_in(ids)][:count]))
            count -= len(found[-1])
        return _joined([*found, self.pop(count)] if count else found)

    def check(self) -> None:
        vacant = self._vacant.nonzero()[0]
        assert len(vacant) == self._len, "the vacant ids are miscounted"
        assert not self._vacant[-1], "there is no such id"
        assert np.isin(vacant, self._stack[: self._top]).all(), "a vacant id has no entry"

    # -- runs ------------------------------------------------------------------------------------

    def _begin(self, count: int) -> Ids:
        """Take one id each for so many new runs."""
        found: list[Ids] = []
        while count and self._can_begin():
            starts = self._starts[:count]
            self._starts, self._lengths = self._starts[count:], self._lengths[count:]
            found.append(self._use(starts[self.are_in(starts)]))
            count -= len(found[-1])
        return _joined([*found, self.pop(count)])

    def _take_runs(self, after: Ids, num_vacant: int) -> Ids:
        """Where some take several: one run after the other, behind those that take one."""
        begins = (after >= 0).nonzero()[0]
        if after[0] < 0:
            begins = np.concatenate(([0], begins))
        counts = np.concatenate((begins[1:], [len(after)])) - begins
        ids, single = np.empty_like(after), (counts == 1) & (after[begins] >= 0)
        if not num_vacant and self._len < self._share:  # there is no place behind or to begin at
            alone = single.repeat(counts)
            taken, num_alone = self.pop(len(after)), int(np.count_nonzero(alone))
            ids[alone], ids[~alone] = taken[:num_alone], taken[num_alone:]
            return ids
        if len(alone := begins[single]):
            ids[alone] = self.take(after[alone])
        runs = zip(begins[~single].tolist(), counts[~single].tolist(), strict=True)
        for begin, count in runs:
            ids[begin : begin + count] = self.take_run(int(after[begin]), count)
        return ids

    def _can_begin(self) -> bool:
        """Whether there are places for new runs. They are looked up if that is due."""
        if self._len < self._share:  # they would be too small to be worth it
            return False
        if not len(self._starts) and self._num_changed >= self._share:
            self._look_up()
        return len(self._starts) > 0

    def _look_up(self) -> None:
        """Whole extents by address, then what is left of others, the longest first."""
        ids = self._vacant.nonzero()[0]
        begins = ((np.diff(ids, prepend=-2) != 1) | (ids % _EXTENT == 0)).nonzero()[0]
        starts, lengths = ids[begins], np.diff(begins, append=len(ids))
        # Right before the rest of an extent a sequence may be growing.
        shift = np.where(starts % _EXTENT, lengths // 2, 0)
        order = np.argsort(shift - lengths, kind="stable")
        order = order[lengths[order] - shift[order] > 1]
        self._starts, self._lengths = (starts + shift)[order], (lengths - shift)[order]
        self._num_changed = 0

    # -- entries ---------------------------------------------------------------------------------

    def _use(self, ids: Ids) -> Ids:
        self._vacant[ids] = False
        self._len -= len(ids)
        self._num_changed += len(ids)
        if not self._len:  # no entry that is left counts
            self._top = 0
        return ids

    def _counting(self, bottom: int) -> tuple[Ids, Ids]:
        """Entries that count from the place ``bottom`` on, the last one first: places and ids."""
        entries = self._stack[bottom : self._top][::-1]
        places = self._vacant[entries].nonzero()[0]
        places = places[np.sort(np.unique(entries[places], return_index=True)[1])]
        return self._top - 1 - places, entries[places].astype(np.intp)

    def _sweep(self) -> None:
        """Keep the entries that count, in their order."""
        _, ids = self._counting(0)
        self._top = len(ids)
        self._stack[: self._top] = ids[::-1]


def _joined(some: list[Ids]) -> Ids:
    some = [ids for ids in some if len(ids)]
    return some[0] if len(some) == 1 else np.concatenate([NO_IDS, *some])
