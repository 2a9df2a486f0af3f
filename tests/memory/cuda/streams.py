"""What an emulated device has been given to do, and has not done yet."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Range = tuple[int, int]  # (address, nbytes)


@dataclass(slots=True, eq=False)
class Work:
    """A kernel, a memset or an event in a stream."""

    ranges: list[tuple[int, int]] = field(default_factory=list)  # (address, nbytes) in use
    run: Callable[[], object] = bool
    runs_on: bool = False  # until a test finishes it
    is_done: bool = False


class Streams:
    """Work is done in order within a stream, at once where no kernel runs before it."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[Work]] = {}

    def enqueue(self, work: Work, stream: int) -> None:
        self.queues.setdefault(stream, deque()).append(work)
        self._advance()

    def finish(self, kernel: Work) -> None:
        kernel.runs_on = False
        self._advance()

    def wait_for(self, work: Work) -> None:
        """Time passes until this is done."""
        for queue in self.queues.values():
            while work in queue:
                self.finish(queue[0])

    def finish_all(self) -> None:
        """Time passes until nothing is left to do."""
        for queue in self.queues.values():
            while queue:
                self.finish(queue[0])

    def uses(self, address: int, nbytes: int) -> bool:
        """Whether anything that is not done yet uses a part of a range."""
        return any(
            start < address + nbytes and address < start + length
            for queue in self.queues.values()
            for work in queue
            for start, length in work.ranges
        )

    def _advance(self) -> None:
        for queue in self.queues.values():
            while queue and not queue[0].runs_on:
                work = queue.popleft()
                work.run()
                work.is_done = True
