"""Replay prompts through the engine's own eviction orders, by stretches instead of blocks.

The blocks of a stretch are always used together, so one number tells when they were used last, and
of a stretch the first blocks are cached and the others are not: no order evicts a block before one
that depends on it. What was used before that is known for each block apart, since evicted blocks
are remembered apart (``Ghosts``).

``Recency`` is what this does, block by block; trials of orders are the engine's. A test compares
what is found with what the engine's accounting finds.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush
from operator import xor
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from quire.kv.counted_hits import Run
from quire.kv.eviction import Ghosts, Prints
from quire.kv.order_trials import Order, OrderTrials
from quire.kv.policy_duel import sample_of
from quire.kv.shadow_caches import KEEP_ONE_IN, NEVER
from quire.planner.hit_rates.prefix_tree import TELL_EVERY, OnRequest, Prompts

_Piece: TypeAlias = tuple[int, int, int]  # blocks of a stretch: which, from where, up to where
_Pieces: TypeAlias = list[_Piece]
_LOW = 0xFFFF  # of a ghost's slot: the time
# Times at which a prompt's blocks were used last, rising from the deepest block on, and how many
# blocks there are up to each.
_Uses: TypeAlias = tuple[list[int], list[int]]
_NO_USES: _Uses = ([], [])


@final
class StretchReplay:
    """The prompts of a trace; ``hits`` replays them in a cache of one size."""

    def __init__(self, prompts: Prompts, prints: Prints) -> None:
        """``prints``: the fingerprint of each prefix, by the number of its last block."""
        self._prompts = prompts
        self._num_blocks = prompts.num_blocks_of_each()
        self._paths = [prompts.path(request)[::-1] for request in range(prompts.num_requests)]
        # As paths are, from the deepest block on: a stretch's blocks are neighbours there.
        self._prints = prints[::-1]
        self.ends: list[int] = (len(prints) - prompts.firsts).tolist()  # behind their first block

    def hits(
        self,
        num_blocks: int,
        order: Order,
        on_request: OnRequest = lambda _: None,
        *,
        with_trials: bool = False,
        first_counted: int = 0,
    ) -> int:
        """Count hit tokens in a cache of ``num_blocks`` in an order, or with others on trial.

        It refuses larger prompts. Requests before ``first_counted`` fill the cache only.
        """
        prompts, lengths = self._prompts, self._prompts.lengths
        cache = _Cache(self, num_blocks, order, with_trials=with_trials)
        cached = cache.cached
        room, clock, hit_tokens = num_blocks, 0, 0
        for request, length in enumerate(self._num_blocks):
            if not 0 < length <= num_blocks:
                continue
            path = self._paths[request]
            num_whole, num_hit = 0, 0  # stretches and blocks that are found, from the root on
            for stretch in reversed(path):
                num_hit += cached[stretch]
                if cached[stretch] < lengths[stretch]:
                    break
                num_whole += 1
            num_new = length - num_hit
            clock += num_new + 1
            before = cache.hold(path, clock)
            if num_new > room:
                room += cache.evict(num_new - room)
            room -= num_new
            cache.use(path, num_whole, num_hit, before, clock)
            if request >= first_counted:
                hit_tokens += prompts.tokens_of(request, num_hit)
            if request % TELL_EVERY == 0:
                on_request(request)
        return hit_tokens

    @property
    def lengths(self) -> list[int]:
        """Return the blocks of each stretch."""
        return self._prompts.lengths

    def sample(self, num_blocks: int) -> list[list[int]]:
        """List the fingerprints of each stretch in a cache's sample, the shallowest first."""
        mask = np.uint32(sample_of(num_blocks)[0] - 1)
        found = (self._prints & mask == 0).nonzero()[0]
        prints: list[int] = self._prints[found].tolist()
        ends = np.array(self.ends)
        at = np.searchsorted(found, [ends - self.lengths, ends]).tolist()
        return [prints[begin:end][::-1] for begin, end in zip(*at, strict=True)]

    @cached_property
    def may_be_taken_for_others(self) -> bytes:
        """Tell of each stretch whether ghosts may take a block of it for another one."""
        _, slots, tags = Ghosts(1).keys(self._prints)  # the fewest slots: others tell more apart
        keys = slots << np.uint32(16) | tags >> np.uint32(16)
        ordered = np.sort(keys)
        alike = np.isin(keys, ordered[1:][ordered[1:] == ordered[:-1]])
        before = np.concatenate([[0], np.cumsum(alike)])
        ends = np.array(self.ends)
        found: npt.NDArray[np.bool_] = before[ends] > before[ends - self.lengths]
        return found.tobytes()

    def ghosts(self, num_blocks: int) -> "_PlacedGhosts":
        """Make what remembers evicted blocks of a cache."""
        return _PlacedGhosts(Ghosts(num_blocks), self._prints)


@final
class _PlacedGhosts:
    """``Ghosts`` of neighbours: few at a time, so that lists are faster than arrays.

    Blocks are known by their places among all.
    """

    def __init__(self, like: Ghosts, prints: Prints) -> None:
        """``prints``: of all blocks, by place."""
        self.tick, self.one_in = like.tick, like.one_in
        self._reach = like.reach
        places, slots, tags = like.keys(prints)
        self._slot_of, self._tag_of = _numbers(slots), _numbers(tags)
        # The places of the blocks that are remembered at all, and how many of them come before
        # each place.
        self._places: Sequence[int] = range(len(prints))
        self._ranks: Sequence[int] = range(len(prints) + 1)
        if self.one_in > 1:
            ranks = np.searchsorted(places, np.arange(len(prints) + 1))
            self._places, self._ranks = _numbers(places), _numbers(ranks)
        self._slots = array("I", bytes(4 * (1 + int(slots.max(initial=0)))))

    def remember(self, begin: int, end: int, time: int) -> None:
        """Note when the blocks from one place up to another, which are evicted, were used last."""
        slots, tick = self._slots, time // self.tick & _LOW
        first, last = self._ranks[begin], self._ranks[end]
        for slot, tag in zip(self._slot_of[first:last], self._tag_of[first:last], strict=True):
            slots[slot] = tag | tick

    def recall(self, begin: int, end: int, now: int) -> list[tuple[int, int]]:
        """Return the places of blocks that are known, and about when each was last used."""
        slots, first, last = self._slots, self._ranks[begin], self._ranks[end]
        found = [slots[slot] for slot in self._slot_of[first:last]]
        tags = self._tag_of[first:last]
        if not found or min(map(xor, found, tags)) > _LOW:
            return []
        known = [
            (at, slot)
            for at, (slot, tag) in enumerate(zip(found, tags, strict=True), first)
            if slot ^ tag <= _LOW
        ]
        ages = [
            (self._places[at], (now // self.tick - slot & _LOW) * self.tick) for at, slot in known
        ]
        return [(place, max(0, now - age)) for place, age in ages if age <= self._reach]


def _numbers(of: npt.NDArray[Any]) -> "array[int]":
    """Return numbers below 2³² as an array of Python's, which is the quicker one item by item."""
    return array("I", of.astype(np.uint32).tobytes())


@final
class _Cache:
    """Which stretches are cached, how far, and which of them go first."""

    def __init__(
        self, replay: StretchReplay, num_blocks: int, order: Order, *, with_trials: bool
    ) -> None:
        lengths = replay.lengths
        self._lengths, self._ends = lengths, replay.ends
        self.cached = [0] * len(lengths)  # blocks of each stretch, from its first on
        self._last = [NEVER] * len(lengths)
        self._whole: _Pieces = [(stretch, 0, length) for stretch, length in enumerate(lengths)]
        # The uses before the last: of each stretch those of its last prompt, and the place of its
        # own first block among that prompt's, from the deepest block on.
        self._before = [_NO_USES] * len(lengths)
        self._first_at = [0] * len(lengths)
        self._new_from = [0] * len(lengths)  # the first block that was not hit yet
        self._order = order
        # Runs by score and serial, since later ones come later: when they were used, and pieces
        # that one prompt used last and that score alike, the last one to go first.
        self._heap: list[tuple[int, int, int, _Pieces]] = []
        self._serial = self._num_misses = 0
        self._ghosts = replay.ghosts(num_blocks)
        # Whether ghosts may know a stretch: some of it was evicted, or it is taken for another.
        self._may_be_known = bytearray(replay.may_be_taken_for_others)
        self._trials: OrderTrials | None = None
        if with_trials:
            tick, gap = self._ghosts.tick, self._ghosts.one_in
            self._trials = OrderTrials(num_blocks, tick=tick, gap=gap)
            self._sample = replay.sample(num_blocks)

    def hold(self, path: list[int], now: int) -> list[int]:
        """Take a prompt's stretches out of the order. Returns: when each was used last."""
        last = self._last
        before = [last[stretch] for stretch in path]
        for stretch in path:
            last[stretch] = now  # what is in a run of another time is no longer there
        return before

    def evict(self, count: int) -> int:
        """Evict so many blocks. Returns: how many there were."""
        heap, last, cached, left = self._heap, self._last, self.cached, count
        ends, remember, may_be_known = self._ends, self._ghosts.remember, self._may_be_known
        while left and heap:
            _, _, used, pieces = heap[0]
            while pieces and left:
                stretch, begin, end = pieces[-1]
                if last[stretch] != used:
                    pieces.pop()
                    continue
                first = max(begin, end - left)
                left -= end - first
                cached[stretch] = first
                if first == begin:
                    pieces.pop()
                    if not first:
                        self._before[stretch] = _NO_USES  # of a long prompt, perhaps
                else:
                    pieces[-1] = stretch, begin, first
                remember(ends[stretch] - end, ends[stretch] - first, used)
                may_be_known[stretch] = True
            if not pieces:
                heappop(heap)
        return count - left

    def use(
        self, path: list[int], num_whole: int, num_hit: int, before: list[int], now: int
    ) -> None:
        """Let a prompt use its stretches, deepest first, of which it has found the last ones.

        ``num_hit``: blocks that it has found; ``before``: when each stretch was used last.
        """
        lengths, cached = self._lengths, self.cached
        uses = self._uses(path, len(path) - num_whole, before, now)
        self._num_misses += num_whole < len(path)
        stays = self._num_misses % KEEP_ONE_IN == 0
        behind, new_from = 0, self._new_from
        before_last, first_at = self._before, self._first_at
        for stretch in path:
            length = lengths[stretch]
            new_from[stretch] = length if stays else cached[stretch]
            cached[stretch] = length
            behind += length
            before_last[stretch], first_at[stretch] = uses, behind - 1
        if self._trials is not None:
            tick, begin, runs = self._ghosts.tick, 0, list[Run]()
            for time, end in zip(*uses, strict=True):
                runs.append((time // tick, False, end - begin))
                begin = end
            sampled = [each for stretch in reversed(path) for each in self._sample[stretch]]
            order = self._trials.watch(sampled, runs, num_hit, now)
            if order is not self._order:
                self._order = order
                self._reorder()
        self._free(now, [self._whole[stretch] for stretch in path])

    def _uses(self, path: list[int], num_fresh: int, before: list[int], now: int) -> _Uses:
        """Return the last uses of a prompt's blocks before this one.

        ``num_fresh``: stretches that are not found whole, the first ones of ``path``. An ancestor
        was used whenever its descendant was, even if its ghost is forgotten.
        """
        lengths, cached, ends = self._lengths, self.cached, self._ends
        times, upto = list[int](), list[int]()
        latest, behind, begin = NEVER, 0, 0  # blocks before, and those of them with other times
        recall, may_be_known = self._ghosts.recall, self._may_be_known
        for stretch in path[:num_fresh]:
            # Of the last of these stretches, the first blocks may be there.
            first, end = ends[stretch] - lengths[stretch], ends[stretch] - cached[stretch]
            for place, time in recall(first, end, now) if may_be_known[stretch] else ():
                if time > latest:
                    at = behind + place - first
                    if at > begin:
                        times.append(latest)
                        upto.append(at)
                        begin = at
                    latest = time
            behind += end - first
        # The part of one that is found, and all that are found whole.
        for at in range(max(0, num_fresh - 1), len(path)):
            stretch, time = path[at], before[at]
            length = cached[stretch]
            if time > latest and length:
                if behind > begin:
                    times.append(latest)
                    upto.append(behind)
                    begin = behind
                latest = time
            behind += length
        times.append(latest)
        upto.append(behind)
        return times, upto

    def _free(self, used: int, pieces: _Pieces) -> None:
        """Put pieces that one prompt used last into the order, the first to go first."""
        runs = [(used, pieces)]
        if self._order is Order.LAST_BUT_ONE:
            runs = self._by_use_before(pieces)
        elif self._order is Order.NEWCOMERS:
            runs = self._by_newness(used, pieces)
        for score, several in runs:
            self._serial += 1
            several.reverse()
            heappush(self._heap, (score, self._serial, used, several))

    def _by_use_before(self, pieces: _Pieces) -> list[tuple[int, _Pieces]]:
        runs: list[tuple[int, _Pieces]] = []
        for whole in pieces:
            stretch, begin, end = whole
            (times, upto), first = self._before[stretch], self._first_at[stretch]
            # Block n is at first - n.
            at, stop = first - end + 1, first - begin + 1
            use = 0 if at < upto[0] else bisect_right(upto, at)
            while at < stop:
                score, last = times[use], min(stop, upto[use])
                piece = whole
                if last - at < end - begin:
                    piece = stretch, first - last + 1, first - at + 1
                if runs and runs[-1][0] == score:
                    runs[-1][1].append(piece)
                else:
                    runs.append((score, [piece]))
                at = last
                use += 1
        return runs

    def _by_newness(self, used: int, pieces: _Pieces) -> list[tuple[int, _Pieces]]:
        new, old = _Pieces(), _Pieces()
        for stretch, begin, end in pieces:
            middle = min(max(self._new_from[stretch], begin), end)
            if middle < end:
                new.append((stretch, middle, end))
            if begin < middle:
                old.append((stretch, begin, middle))
        return [(score, several) for score, several in ((-used, new), (used, old)) if several]

    def _reorder(self) -> None:
        """Put what may be evicted in again, by the order that has the seat now."""
        heap, self._heap, self._serial = sorted(self._heap, key=lambda each: each[:2]), [], 0
        for _, _, used, pieces in heap:
            there = [each for each in reversed(pieces) if self._last[each[0]] == used]
            if there:
                self._free(used, there)
