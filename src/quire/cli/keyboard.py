"""Turn off a terminal's echo while the program writes to it, and restore the terminal after."""

import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unseen(*, key_by_key: bool = False) -> Iterator[int | None]:
    """Turn echo off inside the ``with`` block; with ``key_by_key`` keys are readable at once.

    Yields the descriptor of standard input, or None if that is not a terminal. Ctrl-C and Ctrl-Z
    keep their meaning. SIGTERM and SIGHUP restore the terminal too, so only the main thread may
    call this.
    """
    if not sys.stdin.isatty():
        yield None
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    changed = termios.tcgetattr(terminal)
    changed[3] &= ~(termios.ECHO | (termios.ICANON if key_by_key else 0))
    handlers = {each: signal.signal(each, _end) for each in _ENDS}
    try:
        termios.tcsetattr(terminal, termios.TCSADRAIN, changed)
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _end(number: int, _: FrameType | None) -> NoReturn:
    """End the process as the signal would, but run the ``finally`` blocks first."""
    raise SystemExit(128 + number)
