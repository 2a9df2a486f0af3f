"""What the server writes: log lines without queries and prompts, and the request log."""

import logging
import logging.config
import time
import traceback
from collections import Counter
from copy import copy
from typing import TYPE_CHECKING, Any, final

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.traces import RequestLog

# -- logs ------------------------------------------------------------------------------------------


def place_of(error: BaseException) -> str:
    """Return where an error was raised, without its message, which may quote a client."""
    frames = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    own = "\n  ".join([type(error).__name__, *frames])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return own if cause is None else f"{own}\nbecause of {place_of(cause)}"


@final
class PlaceFormatter(logging.Formatter):
    """Writes the place of an exception and not its message, whichever room logs it."""

    def format(self, record: logging.LogRecord) -> str:
        own = copy(record)  # another handler may have formatted it with its message
        own.exc_text = None
        return super().format(own)

    def formatException(self, ei: Any) -> str:
        """Return the place of the exception."""
        return place_of(ei[1]) if ei[1] is not None else ""


# Frequent requests of orchestrators and monitors.
_PROBES = frozenset({"health", "ping", "metrics"})


class WithoutQuery(logging.Filter):
    """Cuts the query off the path in uvicorn's access lines; drops probes that went well."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) != 5:
            return True
        client, method, path, version, status = record.args
        path = str(path).partition("?")[0]
        record.args = (client, method, path, version, status)
        return path.rpartition("/")[2] not in _PROBES or status != 200  # a root_path may precede it


class WithoutCutOffs(logging.Filter):
    """Drops uvicorn's line about an unfinished answer: its reader was cut off, or has left."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "ASGI callable returned without completing response."


def log_to_stderr(level: str) -> None:
    """Let Quire and uvicorn write to standard error, from one of uvicorn's levels on."""
    logging.addLevelName(5, "TRACE")
    logging.config.dictConfig(log_config(level))


def log_config(level: str) -> dict[str, Any]:
    """Return the configuration for ``logging.config.dictConfig``."""
    own = {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {
            "without_query": {"()": WithoutQuery},
            "without_cut_offs": {"()": WithoutCutOffs},
        },
        "formatters": {
            "plain": {
                "()": PlaceFormatter,
                "fmt": "%(asctime)s %(levelname)s %(message)s",
                "datefmt": "%Y-%m-%dT%H:%M:%S%z",
            },
            "access": {
                "()": "uvicorn.logging.AccessFormatter",
                "fmt": '%(asctime)s %(levelname)s %(client_addr)s "%(request_line)s" '
                "%(status_code)s",
                "datefmt": "%Y-%m-%dT%H:%M:%S%z",
                "use_colors": False,
            },
        },
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "plain"},
            "access": {
                "class": "logging.StreamHandler",
                "formatter": "access",
                "filters": ["without_query"],
            },
        },
        "loggers": {
            "quire": own,
            "asyncio": {**own, "level": max(level_number(level), logging.WARNING)},
            # The command line prints start and end.
            "uvicorn": {**own, "level": max(level_number(level), logging.WARNING)},
            "python_multipart": {**own, "level": "ERROR"},  # the client is told of a bad form
            "uvicorn.error": {"filters": ["without_cut_offs"]},
            "uvicorn.access": {**own, "handlers": ["access"]},
        },
    }


def level_number(level: str) -> int:
    """Return the number of a level by uvicorn's name for it."""
    number: int = {"trace": 5}.get(level) or getattr(logging, level.upper())
    return number


# -- request log -----------------------------------------------------------------------------------


@final
class RequestWriter:
    """Writes requests as a trace to plan with: when each came, how long it was, which began alike.

    Each continuation is a line, in the form of ``traces.request_log``. The file has nothing of what
    was asked or answered, and callers who share no blocks have no ids in common there.

    Raises: ConfigError where the file exists or cannot be made.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = open(path, "xb")  # noqa: SIM115 - until close
        except FileExistsError as error:
            raise ConfigError(
                f"request_log={path!r} exists already: name another file, or move it away"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"request_log={path!r} cannot be written: {error.strerror}"
            ) from error
        from quire.traces import RequestLog  # with all forms of traces: few servers write one

        self._log = RequestLog(self._file)
        self._begun_s = time.monotonic()

    def begin(self, request: Request) -> "Noted":
        """Note a request that goes to the engine now."""
        at_s = time.monotonic() - self._begun_s
        numbers = [
            self._log.begin(at_s, request.prompt_token_ids, apart=repr(request.keys))
            for _ in range(request.num_choices)
        ]
        return Noted(self._log, numbers)

    def close(self) -> None:
        """Close the file. Requests that have not ended are not written."""
        self._file.close()


@final
class Noted:
    """The lines of one request, until it ends."""

    def __init__(self, log: "RequestLog", numbers: list[int]) -> None:
        self._log, self._numbers = log, numbers
        self._num_tokens: Counter[int] = Counter()

    def add(self, delta: TextDelta) -> None:
        """Count what is new of a choice."""
        self._num_tokens[delta.choice] += len(delta.token_ids)

    def end(self) -> None:
        """Write the lines."""
        for choice, number in enumerate(self._numbers):
            self._log.end(number, self._num_tokens[choice])
