"""What the server itself counts: its answers, and whom it has refused before the engine saw them.

All that a client sends ends in a closed set of labels here, so that no client can make them grow.
"""

import threading
from collections import Counter
from collections.abc import Collection
from typing import Literal, get_args

Rejection = Literal[
    "max_num_queued_reqs",  # vLLM's two
    "max_num_queued_tokens",
    "max_num_reqs_per_key",
    "draining",  # the server is being shut down
    "sleeping",  # an operator has put it to sleep
]
REJECTIONS: tuple[str, ...] = get_args(Rejection)
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
OTHER = "other"


class Counts:
    """Any thread may count and read. ``routes``: the templates of paths that have a label."""

    def __init__(self, routes: Collection[str]) -> None:
        self._routes = set(routes)
        self._lock = threading.Lock()
        self._answers: Counter[tuple[str, ...]] = Counter()
        self._rejections = dict.fromkeys(REJECTIONS, 0)

    def know(self, route: str) -> None:
        """Give a route's template a label of its own."""
        self._routes.add(route)

    def note_answer(self, method: str, route: str, status: int) -> None:
        labels = (
            route if route in self._routes else OTHER,
            method if method in METHODS else OTHER,
            str(status) if 100 <= status <= 599 else OTHER,
        )
        with self._lock:
            self._answers[labels] += 1

    def note_rejection(self, reason: str) -> None:
        """Raises: ValueError for a reason that has no label."""
        if reason not in self._rejections:
            raise ValueError(f"reason={reason!r} must be one of {', '.join(REJECTIONS)}")
        with self._lock:
            self._rejections[reason] += 1

    @property
    def answers(self) -> dict[tuple[str, ...], float]:
        """How many, by route, method and status."""
        with self._lock:
            return {labels: count for labels, count in self._answers.items()}

    @property
    def rejections(self) -> dict[str, int]:
        with self._lock:
            return dict(self._rejections)
