"""Compute LRU hits for every cache size in one pass, by stack distances.

Blocks form a stack with the most recently used on top; of one prompt the first block is on top,
since an engine frees the deepest first. A cache of n blocks holds the n topmost for any n, if it
can hold every prompt. So a block hits in all caches that are larger than its place in the stack.

The blocks that one prompt was the last to use are neighbours, so the pass needs only their number
per prompt, and a Fenwick tree sums it. A test compares the result with the engine's own accounting.

Source: stack distances, Mattson, Gecsei, Slutz and Traiger 1970.
"""

from collections.abc import Sequence

import numpy as np

from quire.planner.hit_rates.prefix_tree import TELL_EVERY, Ints, OnRequest, Prompts


def infinite_hits(prompts: Prompts, *, first_counted: int = 0) -> int:
    """Count the hit tokens of a cache that never evicts."""
    seen, lengths, found = bytearray(len(prompts.lengths)), prompts.lengths, 0
    for now in range(prompts.num_requests):
        num_hit = 0
        for each in prompts.path(now):
            if seen[each]:
                num_hit += lengths[each]
            seen[each] = True
        if now >= first_counted:
            found += prompts.tokens_of(now, num_hit)
    return found


def lru_hits(
    prompts: Prompts,
    sizes: Sequence[int],
    on_request: OnRequest = lambda _: None,
    *,
    first_counted: int = 0,
) -> list[int]:
    """Count hit tokens in caches of these sizes in blocks, from request ``first_counted`` on.

    A cache refuses a prompt that is larger: the prompt hits nothing and changes nothing.
    """
    longest = max(prompts.num_blocks_of_each())
    found: dict[int, int] = {}
    large = [size for size in sizes if size >= longest]
    if large:
        curve = lru_curve(prompts, on_request, first_counted=first_counted)
        found |= {size: int(curve[min(size, len(curve) - 1)]) for size in large}
    for size in set(sizes) - set(large):
        curve = lru_curve(prompts, on_request, first_counted=first_counted, most_blocks=size)
        found[size] = int(curve[min(size, len(curve) - 1)])
    return [found[size] for size in sizes]


def lru_curve(
    prompts: Prompts,
    on_request: OnRequest = lambda _: None,
    *,
    first_counted: int = 0,
    most_blocks: int | None = None,
) -> Ints:
    """Count hit tokens by cache size in blocks, from 0 to all distinct blocks.

    Prompts of more than ``most_blocks`` are refused. Shapes: [blocks + 1].
    """
    lengths, size = prompts.lengths, prompts.block_tokens
    last_use = [-1] * len(lengths)
    uses = _Sums(prompts.num_requests)
    begins, ends = [], []  # ranges of places in the stack at which blocks were hit
    lasts, lacking = [], []  # places of prompts' last blocks, and the tokens that these lack
    for now in range(prompts.num_requests):
        path = prompts.path(now)
        num_blocks = sum([lengths[each] for each in path])
        if most_blocks is not None and num_blocks > most_blocks:
            continue
        at, depth, moved = 0, 0, []
        while at < len(path) and (then := last_use[path[at]]) >= 0:
            place = uses.after(then)
            run = 0
            while at < len(path) and last_use[path[at]] == then:
                run += lengths[path[at]]
                at += 1
            moved.append((then, run))
            depth += run
            if now >= first_counted:
                begins.append(place)
                ends.append(place + run)
                if depth == num_blocks:
                    lasts.append(place + run - 1)
                    lacking.append(size - prompts.last_tokens(now, num_blocks))
        for then, run in moved:
            uses.add(then, -run)
        uses.add(now, num_blocks)
        for each in path:
            last_use[each] = now
        if now % TELL_EVERY == 0:
            on_request(now)
    steps = np.zeros(prompts.num_blocks + 2, np.int64)
    np.add.at(steps, begins, size)
    np.subtract.at(steps, ends, size)
    tokens = steps.cumsum()  # by place in the stack
    np.subtract.at(tokens, lasts, lacking)
    return np.concatenate([[0], tokens.cumsum()[:-1]])


class _Sums:
    """Numbers by time, with their sum after a time in logarithmic cost.

    Source: Fenwick 1994.
    """

    def __init__(self, count: int) -> None:
        self._tree = [0] * (count + 1)
        self._total = 0

    def add(self, when: int, number: int) -> None:
        tree, at = self._tree, when + 1
        self._total += number
        while at < len(tree):
            tree[at] += number
            at += at & -at

    def after(self, when: int) -> int:
        """Return the sum of all numbers after this time."""
        tree, at, total = self._tree, when + 1, self._total
        while at:
            total -= tree[at]
            at &= at - 1
        return total
