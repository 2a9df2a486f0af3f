"""Requests as a trace to plan with: when they came, how long they were, which began alike.

Each continuation is a line. Nothing of what was asked or answered is in the file, and callers who
share no blocks have no ids in common there. The file is in the form of ``traces.request_log``.
"""

import time
from collections import Counter
from typing import final

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.errors import ConfigError
from quire.traces import RequestLog


@final
class RequestWriter:
    """One new file, open until ``close``. Raises: ConfigError where it cannot be made."""

    def __init__(self, path: str) -> None:
        try:
            self._file = open(path, "xb")  # noqa: SIM115 - until close
        except FileExistsError as error:
            raise ConfigError(
                f"request_log={path!r} is there already: name another file, or move it away"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"request_log={path!r} cannot be written: {error.strerror}"
            ) from error
        self._log = RequestLog(self._file)
        self._begun_s = time.monotonic()

    def begin(self, request: Request) -> "Noted":
        """It goes to the engine now."""
        at_s = time.monotonic() - self._begun_s
        numbers = [
            self._log.begin(at_s, request.prompt_token_ids, apart=repr(request.keys))
            for _ in range(request.num_choices)
        ]
        return Noted(self._log, numbers)

    def close(self) -> None:
        """What has not ended is not written."""
        self._file.close()


@final
class Noted:
    """One request's lines, until it ends."""

    def __init__(self, log: RequestLog, numbers: list[int]) -> None:
        self._log, self._numbers = log, numbers
        self._num_tokens: Counter[int] = Counter()

    def add(self, delta: TextDelta) -> None:
        self._num_tokens[delta.choice] += len(delta.token_ids)

    def end(self) -> None:
        for choice, number in enumerate(self._numbers):
            self._log.end(number, self._num_tokens[choice])
