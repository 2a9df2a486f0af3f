"""Several sequences in one step: their tokens side by side, and room for each of them."""

from collections.abc import Iterable, Sequence

import numpy as np

from quire.kv.interface import Slots


def packed_positions(starts: Sequence[int], stops: Sequence[int]) -> tuple[Slots, Slots]:
    """Of tokens [starts[i], stops[i]), one i after the other: each one's i, and its position."""
    first = np.array(starts, np.int64)
    counts = np.array(stops, np.int64) - first
    owners = np.arange(len(counts))
    if (counts == 1).all():
        return owners, first
    before = np.cumsum(counts) - counts
    return np.repeat(owners, counts), np.arange(counts.sum()) + np.repeat(first - before, counts)


def packed_ranges(
    first_slots: Iterable[int], starts: Sequence[int], stops: Sequence[int]
) -> tuple[Slots, Slots]:
    """What ``Accounting.packed`` gives where each sequence has one range, from that slot on.

    The first slot is -1 for a sequence that holds nothing.
    """
    first = np.fromiter(first_slots, np.int64)
    owners, positions = packed_positions(starts, stops)
    return first.reshape(-1, 1), first[owners] + positions
