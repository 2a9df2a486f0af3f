"""Streams and events of the device that is not there: all work is in one queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pretend.runtime import Gpu, Graph


class Event:
    gpu: Gpu

    def __init__(self, *_: Any, **__: Any) -> None:
        self._mark = 0

    def record(self, _: Any = None) -> None:
        self._mark = self.gpu.mark

    def query(self) -> bool:
        return self.gpu.has_done(self._mark)

    def synchronize(self) -> None:
        if not self.query():
            self.gpu.wait("event", self._mark)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds: one for each operation."""
        assert self.query(), "the first event has not happened"
        assert later.query(), "the second event has not happened"
        return float(later._mark - self._mark)

    def wait(self, _: Any = None) -> None:
        """It is a stream that waits, and there is one."""


class Stream:
    gpu: Gpu
    event: type[Event]
    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        """There is one."""

    def synchronize(self) -> None:
        self.gpu.wait("stream")

    def wait_stream(self, _: Any) -> None:
        """It would be itself."""

    def wait_event(self, _: Any) -> None:
        """It is of the same queue."""

    def record_event(self, event: Any = None) -> Any:
        event = event or self.event()
        event.record()
        return event


def names_of_streams(gpu: Gpu) -> dict[str, Any]:
    """What ``torch.cuda`` has of them."""
    event = type("Event", (Event,), {"gpu": gpu})
    stream_class = type("Stream", (Stream,), {"gpu": gpu, "event": event})
    stream = stream_class()

    @contextmanager
    def graph(cuda_graph: Graph, **_: Any) -> Iterator[None]:
        assert gpu.capturing is None, "a graph in a graph"
        gpu.capturing = cuda_graph
        try:
            yield
        finally:
            gpu.capturing = None

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    return {
        "Event": event,
        "Stream": stream_class,
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_: stream),
        **dict.fromkeys(("stream", "device_of"), nothing),
        "graph": graph,
        "synchronize": lambda *_: gpu.wait("synchronize"),
    }
