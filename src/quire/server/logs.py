"""What the server writes to its log: one line a request without its query, and no prompt ever."""

import logging
import logging.config
import traceback
from copy import copy
from typing import Any, final


def place_of(error: BaseException) -> str:
    """What has failed and where, without its message, which may quote what a client has sent."""
    frames = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    own = "\n  ".join([type(error).__name__, *frames])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return own if cause is None else f"{own}\nbecause of {place_of(cause)}"


@final
class PlaceFormatter(logging.Formatter):
    """Writes of an exception where it has come from, whichever library or room logs it."""

    def format(self, record: logging.LogRecord) -> str:
        own = copy(record)  # another handler may have written it out, with its message
        own.exc_text = None
        return super().format(own)

    def formatException(self, ei: Any) -> str:
        return place_of(ei[1]) if ei[1] is not None else ""


# Requests by the hundred that say nothing: probes of orchestrators and monitors.
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
    """Drops what uvicorn says of an answer without an end: its reader was cut off, or has left."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "ASGI callable returned without completing response."


def log_to_stderr(level: str) -> None:
    """Let Quire and uvicorn write to standard error, from a level of uvicorn's on."""
    logging.addLevelName(5, "TRACE")
    logging.config.dictConfig(log_config(level))


def log_config(level: str) -> dict[str, Any]:
    """For ``logging.config.dictConfig``."""
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
            # Its own start and end are said by run.py, in one block.
            "uvicorn": {**own, "level": max(level_number(level), logging.WARNING)},
            "python_multipart": {**own, "level": "ERROR"},  # of a bad form its client is told
            "uvicorn.error": {"filters": ["without_cut_offs"]},
            "uvicorn.access": {**own, "handlers": ["access"]},
        },
    }


def level_number(level: str) -> int:
    """Of a level by uvicorn's name."""
    number: int = {"trace": 5}.get(level) or getattr(logging, level.upper())
    return number
