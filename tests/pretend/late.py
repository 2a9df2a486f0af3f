"""Several streams: what is launched on any but the first is done as late as can be.

That is, when another stream, the host, or a driver's event behind it waits for it. So a read
without a wait finds what was there before, and a write over what is still to be copied spoils the
copy. The first stream does everything at once; another one has to wait for it before it begins.
Copies from and to the host are not for other streams here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memory.cuda.streams import Range, Streams, Work
from pretend.streams import Event

if TYPE_CHECKING:
    from pretend.runtime import Gpu, Graph


class Lateness:
    """The streams of a device. ``queues``: where their work waits, and a driver's if it has one."""

    def __init__(self, gpu: Gpu, queues: Streams) -> None:
        self.queues = queues
        self.num_late = 0  # pieces of work that had to wait
        self.gpu, self._new = gpu, 0
        self.first = self.stream = LateStream(self)
        self._noted: Graph | None = None

    @property
    def noting(self) -> Graph | None:
        """Where the operations of the current stream are noted, unless it is the first one."""
        return self._noted

    def number(self) -> int:
        self._new += 1
        return self._new - 1

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        outer, self._noted = self._noted, stream.notes()
        mark = self.gpu.mark
        try:
            yield
        finally:
            if stream is not self.first and self._noted is not None and self._noted.notes:
                assert stream.waited_for >= mark, "it has not waited for what was launched before"
            self.flush()
            self.stream, self._noted = before, outer

    def flush(self) -> None:
        """What was noted is launched."""
        graph = self._noted
        if graph is not None and graph.notes:
            work = Work(ranges=_ranges(graph), run=graph.run, runs_on=True)
            self.queues.enqueue(work, self.stream.cuda_stream)
            self.num_late += 1
            self._noted = self.stream.notes()

    def marker(self, stream: LateStream) -> Work:
        """Done when all is that the stream has been given so far."""
        self.flush()
        marker = Work()
        self.queues.enqueue(marker, stream.cuda_stream)
        return marker

    def names(self) -> dict[str, Any]:
        """What ``torch.cuda`` has of them."""

        def stream(*_: Any, **__: Any) -> LateStream:
            return LateStream(self)

        def event(*_: Any, **__: Any) -> LateEvent:
            return LateEvent(self)

        def synchronize(*_: Any) -> None:
            self.queues.finish_all()
            self.gpu.wait("synchronize")

        return {
            "Event": event,
            "Stream": stream,
            "current_stream": lambda *_: self.stream,
            "default_stream": lambda *_: self.first,
            "stream": self.on,
            "synchronize": synchronize,
        }

    def note(self) -> Graph:
        from pretend.runtime import Graph

        return Graph(self.gpu)


class LateEvent(Event):
    """For a stream that waits, all of the first one's work is done; for the host it is not."""

    def __init__(self, lateness: Lateness) -> None:
        super().__init__()
        self.gpu, self.lateness = lateness.gpu, lateness
        self.work: Work | None = None  # on another stream than the first

    def record(self, stream: LateStream | None = None) -> None:
        super().record()
        stream = stream or self.lateness.stream
        self.work = self.lateness.marker(stream) if stream.cuda_stream else None

    def query(self) -> bool:
        return super().query() if self.work is None else self.work.is_done

    def synchronize(self) -> None:
        self.pass_by()
        super().synchronize()

    def pass_by(self) -> None:
        if self.work is not None:
            self.lateness.queues.wait_for(self.work)


class LateStream:
    device = torch.device("cuda", 0)

    def __init__(self, lateness: Lateness) -> None:
        self._lateness, self.cuda_stream = lateness, lateness.number()
        self.waited_for = -1  # up to where it has waited for the first one

    def notes(self) -> Graph | None:
        return self._lateness.note() if self.cuda_stream else None

    def wait_event(self, event: LateEvent) -> None:
        self.waited_for = self._lateness.gpu.mark
        event.pass_by()

    def wait_stream(self, other: LateStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        event = event or LateEvent(self._lateness)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


def _ranges(graph: Graph) -> list[Range]:
    """(address, nbytes) of all that is read or written."""
    return [(x.data_ptr(), _extent(x)) for x in graph.tensors() if x.numel()]


def _extent(x: torch.Tensor) -> int:
    steps = zip(x.shape, x.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * x.itemsize
