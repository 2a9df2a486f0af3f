"""What is typed at a terminal while something else is shown there, and the terminal as it was."""

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
    """While it lasts what is typed is not shown; ``key_by_key`` it can be read without Return.

    Gives standard input's descriptor; None where that is no terminal, and nothing is changed.
    Ctrl-C and Ctrl-Z stay what they are. The terminal is put back also when a signal ends the
    process. In the main thread only.
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
    """As the signal would have, but by way of what is to be put back."""
    raise SystemExit(128 + number)
