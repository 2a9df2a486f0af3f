"""Pack several sequences into one step: their tokens lie side by side."""

from collections.abc import Iterable, Sequence

import numpy as np

from quire.kv.interface import Slots


def packed_positions(starts: Sequence[int], stops: Sequence[int]) -> tuple[Slots, Slots]:
    """Return each token's sequence i and position, for tokens [starts[i], stops[i]) in order.

    Shapes: i64[T] each.
    """
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
    """Return what ``Accounting.packed`` does, for sequences of one range each.

    ``first_slots``: where each range begins; -1 for a sequence that holds nothing. Returns: first
    slots i64[S, 1] and slots i64[T].
    """
    first = np.fromiter(first_slots, np.int64)
    owners, positions = packed_positions(starts, stops)
    return first.reshape(-1, 1), first[owners] + positions
