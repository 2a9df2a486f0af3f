"""How a process is told to stop: the first signal asks it to, the second one ends it."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Let SIGTERM and SIGINT end the process with 0 inside the block; in the main thread only.

    For the time before it holds anything. What a handler raises while modules are imported may be
    lost, so it raises nothing.
    """
    before = {each: signal.signal(each, lambda *_: os._exit(0)) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@final
class StopSignals:
    """SIGTERM and SIGINT, while it is entered; in the main thread only.

    A process that is the first of its container gets no signal that it has no handler for, so there
    must be one from the beginning: before ``when_asked`` a signal raises SystemExit, and so ends
    loading. The second one ends the process at once, whatever its threads do: ``last`` is called
    then, which must not wait for anything.
    """

    def __init__(self, last: Callable[[], None]) -> None:
        self.asked: signal.Signals | None = None
        self._last = last
        self._when_asked: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def when_asked(self, function: Callable[[], object]) -> None:
        """Call it at the first signal, instead of raising SystemExit.

        There may have been one: a library can lose what a handler raises in the midst of its code.
        """
        self._when_asked = function
        if self.asked is not None:
            function()

    def __enter__(self) -> "StopSignals":
        self._before = {each: signal.signal(each, self._take) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.asked is not None:
            self._last()
            sys.stderr.flush()
            os._exit(0)
        self.asked = signal.Signals(number)
        if self._when_asked is None:
            raise SystemExit(0)
        self._when_asked()
