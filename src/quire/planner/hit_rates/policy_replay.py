"""Replay prompts through an eviction policy alone, without an accounting around it.

The engine's own orders are replayed by stretches (``stretch_replay``), any other policy by its
blocks. It is asked what an engine asks it: a prompt holds its cached blocks, the policy evicts as
many as the others need, and the prompt lets go of all, the deepest block first. What is left out is
what costs the time: no token is hashed, no block table is kept, no page is committed. A block's
number in the tree of prompts is its id, so a pool has an id for each block of the trace, and a
fingerprint is looked up by it.

A test compares what is found with what the engine's accounting finds.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final, final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from quire.kv import EVICTION_POLICIES, HeedsEnds, PolicyPool
from quire.kv.eviction import MakePolicy, bip, choice, lru2
from quire.kv.order_trials import Order
from quire.planner.hit_rates.prefix_tree import TELL_EVERY, OnRequest, Prompts
from quire.planner.hit_rates.stretch_replay import StretchReplay

_Ids = npt.NDArray[np.intp]
_ROOT_PRINT = crc32(b"()")  # of a prefix index whose root has no keys
# The policies that are replayed by stretches: their order, and whether others are on trial.
_OWN: Final = (
    (choice, Order.LAST, True),
    (lru2, Order.LAST_BUT_ONE, False),
    (bip, Order.NEWCOMERS, False),
)
_KEPT_IDS = 1 << 24  # of prompts' paths: more are made anew for each replay


@final
class PolicyReplay:
    """The prompts of a trace as block ids; ``hits`` replays them in a cache of one size."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._num_blocks = prompts.num_blocks_of_each()
        self._numbers = np.arange(prompts.num_blocks - 1, -1, -1, dtype=np.intp)  # falling

    def hits(
        self,
        num_blocks: int,
        policy: str,
        on_request: OnRequest = lambda _: None,
        *,
        first_counted: int = 0,
        ended: Sequence[bool] = (),
    ) -> int:
        """Count hit tokens in a cache of ``num_blocks``; it refuses larger prompts.

        Requests before ``first_counted`` fill the cache only. ``ended``: of each request, whether
        its client says that the conversation ends with it; a policy may heed that.

        Raises: ConfigError for an unknown policy.
        """
        make = EVICTION_POLICIES.find(policy, "policy")
        for own, order, with_trials in _OWN:
            if make is own and not ended:
                return self._stretches.hits(
                    num_blocks,
                    order,
                    on_request,
                    with_trials=with_trials,
                    first_counted=first_counted,
                )
        return self._hits(num_blocks, make, on_request, first_counted, ended)

    def _hits(
        self,
        num_blocks: int,
        make: MakePolicy,
        on_request: OnRequest,
        first_counted: int,
        ended: Sequence[bool],
    ) -> int:
        prompts, order = self._prompts, make(self._pool(num_blocks))
        cached = np.zeros(prompts.num_blocks, bool)
        room, clock, hit_tokens = num_blocks, 0, 0
        for request, length in enumerate(self._num_blocks):
            if not 0 < length <= num_blocks:
                continue
            path = self._path(request)
            there = cached[path]
            num_cached = int(np.count_nonzero(there))
            num_hit = num_cached
            if num_cached == length:
                order.hold(path)
            else:
                if num_cached:
                    order.hold(path[there])
                    num_hit = int(there[::-1].argmin())  # the first that is missing
                num_new = length - num_cached
                clock += num_new
                if num_new > room:
                    victims = order.evict(num_new - room)
                    cached[victims] = False
                    room += len(victims)
                room -= num_new
                cached[path] = True
            clock += 1
            order.use(path, clock, 0)
            if ended and ended[request] and isinstance(order, HeedsEnds):
                order.end(path)
            order.free(path)
            if request >= first_counted:
                hit_tokens += prompts.tokens_of(request, num_hit)
            if request % TELL_EVERY == 0:
                on_request(request)
        return hit_tokens

    def _pool(self, num_blocks: int) -> PolicyPool:
        """Describe a pool of ``num_blocks`` in which each block of the trace has its own id."""
        return PolicyPool(
            num_blocks=num_blocks,
            spare_blocks=max(0, self._prompts.num_blocks - num_blocks),
            block_tokens=1,
            prints_of=self._prints.__getitem__,
            places_of=self._places_of,
        )

    def _path(self, request: int) -> _Ids:
        paths = self._paths
        return self._make_path(request) if paths is None else paths[request]

    @cached_property
    def _paths(self) -> list[_Ids] | None:
        if sum(self._num_blocks) > _KEPT_IDS:
            return None
        return [self._make_path(each) for each in range(self._prompts.num_requests)]

    def _make_path(self, request: int) -> _Ids:
        """Return the ids of a prompt's blocks, the deepest first."""
        prompts, numbers = self._prompts, self._numbers
        end, parents, parts = prompts.ends[request], prompts.parents, []
        while end >= 0:
            stop = len(numbers) - int(prompts.firsts[end])
            parts.append(numbers[stop - prompts.lengths[end] : stop])
            end = parents[end]
        return parts[0] if len(parts) == 1 else np.concatenate([numbers[:0], *parts])

    @cached_property
    def _stretches(self) -> StretchReplay:
        return StretchReplay(self._prompts, self._prints)

    @cached_property
    def _prints(self) -> npt.NDArray[np.uint32]:
        """The fingerprint of each prefix, by its last block: that of an engine's prefix index."""
        prompts = self._prompts
        tokens = np.arange(prompts.num_blocks, dtype=np.int32).tobytes()
        found = np.zeros(prompts.num_blocks, np.uint32)
        firsts = prompts.firsts.tolist()
        for stretch in self._shallow_first():
            first, parent = firsts[stretch], prompts.parents[stretch]
            above = _ROOT_PRINT
            if parent >= 0:
                above = int(found[firsts[parent] + prompts.lengths[parent] - 1])
            chain = []
            for at in range(4 * first, 4 * (first + prompts.lengths[stretch]), 4):
                above = crc32(tokens[at : at + 4], above)
                chain.append(above)
            found[first : first + len(chain)] = chain
        return found

    @cached_property
    def _depths(self) -> npt.NDArray[np.int64]:
        """How many blocks come before each."""
        prompts = self._prompts
        found = np.zeros(prompts.num_blocks, np.int64)
        firsts = prompts.firsts.tolist()
        for stretch in self._shallow_first():
            first, parent = firsts[stretch], prompts.parents[stretch]
            above = 0
            if parent >= 0:
                above = 1 + int(found[firsts[parent] + prompts.lengths[parent] - 1])
            length = prompts.lengths[stretch]
            found[first : first + length] = np.arange(above, above + length)
        return found

    @cached_property
    def _above(self) -> npt.NDArray[np.int64]:
        """The block right before each; -1 for none."""
        prompts = self._prompts
        found = np.arange(-1, prompts.num_blocks - 1)
        parents = np.array(prompts.parents, np.int64)
        ends = np.append(prompts.firsts + np.array(prompts.lengths, np.int64) - 1, -1)
        found[prompts.firsts] = ends[parents]  # the last entry is that of the root
        return found

    def _places_of(self, blocks: _Ids) -> tuple[list[int], list[int], list[int]]:
        return self._depths[blocks].tolist(), blocks.tolist(), self._above[blocks].tolist()

    def _shallow_first(self) -> list[int]:
        """List all stretches, each behind its parent."""
        parents, seen, order = self._prompts.parents, {-1}, list[int]()
        for stretch in range(len(parents)):
            path = []
            while stretch not in seen:
                seen.add(stretch)
                path.append(stretch)
                stretch = parents[stretch]
            order += reversed(path)
        return order
