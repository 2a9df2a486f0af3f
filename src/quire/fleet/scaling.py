"""How many replicas the work wants: what each reports of itself, and the number that follows."""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Final

BUSY: Final = "busy"  # sequences that run or wait, as a fraction of max_num_seqs
QUEUED_S: Final = "queued_s"  # seconds to compute the prompts that wait
BUSY_GOAL = 0.8
QUEUED_GOAL_S = 1.0


def wanted_replicas(reports: Mapping[str, Iterable[float]]) -> int:
    """Return how many replicas would be busy as they should be.

    ``reports`` has a number of each replica under ``BUSY`` and ``QUEUED_S``. A replica that has not
    reported has nothing to do. With more sequences than places they wait although no prompt is
    long; with long prompts a few sequences are a long queue: the larger of both numbers counts.
    """
    busy, queued_s = sum(reports.get(BUSY, ())), sum(reports.get(QUEUED_S, ()))
    return max(1, ceil(busy / BUSY_GOAL - 1e-9), ceil(queued_s / QUEUED_GOAL_S - 1e-9))
