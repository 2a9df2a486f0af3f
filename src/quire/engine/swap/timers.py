"""How long it takes to save and to bring back, told when it is known."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, final

import torch

from quire.engine.scheduling.swap import Clock

Note: TypeAlias = Callable[[float], None]  # gets seconds


class Timer(Protocol):
    """Measures what lies between two calls."""

    def begin(self) -> Any: ...

    def end(self, begun: Any, note: Note) -> None:
        """``note`` gets the seconds, now or later."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Tell what is known by now; with ``wait``, all."""
        ...


@final
class HostTimer:
    """By a clock: what it measures is done when the call returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def begin(self) -> float:
        return self._clock()

    def end(self, begun: float, note: Note) -> None:
        note(self._clock() - begun)

    def settle(self, *, wait: bool = False) -> None:
        """All is told already."""


@final
class DeviceTimer:
    """Measures by events what a device does, and what it copies on a stream of its own."""

    def __init__(self, device: torch.device, copying: Any) -> None:
        self._device, self._copying = device, copying
        self._pending: list[tuple[Any, Any, Note]] = []

    def begin(self) -> Any:
        self.settle()
        return self._recorded(torch.cuda.current_stream(self._device))

    def end(self, begun: Any, note: Note) -> None:
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        self._pending.append((begun, self._recorded(self._copying), note))

    def settle(self, *, wait: bool = False) -> None:
        """Tell those that the device has come to by now; with ``wait``, all."""
        pending, self._pending = self._pending, []
        for begun, ended, note in pending:
            if wait:
                ended.synchronize()
            if ended.query():
                note(begun.elapsed_time(ended) / 1e3)
            else:
                self._pending.append((begun, ended, note))

    def _recorded(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
