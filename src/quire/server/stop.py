"""Signals: the first one asks the process to stop, the second one ends it."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, final

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAID = b"stopped\n"


@final
class StopSignals:
    """SIGTERM and SIGINT while it is entered, in the main thread only.

    A container's first process gets no signal without a handler, so there must be one from the
    start. Before ``when_asked`` the first signal ends the process with 0, after it the second one
    does, whatever its threads do: an exception may be lost in the middle of an import. ``last`` is
    called then, and must wait for nothing.
    """

    def __init__(self, last: Callable[[], None] = lambda: None) -> None:
        self.asked: signal.Signals | None = None
        self._last = last
        self._when_asked: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def when_asked(self, function: Callable[[], object]) -> None:
        """Call ``function`` at the first signal from now on."""
        self._when_asked = function

    def __enter__(self) -> "StopSignals":
        self._before = {each: signal.signal(each, self._take) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self._when_asked is None or self.asked is not None:
            self._last()
            if self.asked is None:
                with suppress(OSError):
                    os.write(2, _SAID)  # the interrupted code may hold the lock of sys.stderr
            os._exit(0)
        self.asked = signal.Signals(number)
        self._when_asked()
