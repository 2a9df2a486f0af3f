"""The process that renders clients' templates: one after the other, until its input ends.

The system ends it when a rendering takes too long (an alarm that nothing here handles), and gives
it no more memory than it may have. ``process.py`` starts it and speaks with it.
"""

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from jinja2 import TemplateSyntaxError

from quire.errors import RequestError
from quire.server.chat.sandbox import Limits, Sandbox, syntax_error

_LENGTH = struct.Struct(">Q")


def write_frame(stream: BinaryIO, value: Any) -> None:
    """JSON with its length, in bytes, in front."""
    body = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """What was written, or None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def confine(memory_bytes: int) -> None:
    """Take from this process what a template has no use for."""
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the server's


def answer(source: str, variables: dict[str, Any], limits: Limits) -> dict[str, str]:
    """The prompt, or what is wrong."""
    sandbox = Sandbox(limits)  # a fresh one: nothing of a template is left for the next
    try:
        return {"text": sandbox.render(sandbox.from_string(source), variables)}
    except TemplateSyntaxError as error:
        return {"error": f"chat_template is not a Jinja template: {syntax_error(error)}"}
    except RequestError as error:
        return {"error": str(error)}
    except Exception as error:  # of Jinja's compiler: too deep, too large a number
        return {"error": f"chat_template cannot be read: {type(error).__name__}: {error}"}


def main(seconds: float, max_chars: int, memory_bytes: int) -> None:
    confine(memory_bytes)
    limits = Limits(seconds=seconds, max_chars=max_chars)
    while (request := read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, 1.5 * seconds)  # the clock in its loops comes first
        reply = answer(request["source"], request["variables"], limits)
        write_frame(sys.stdout.buffer, reply)
        signal.setitimer(signal.ITIMER_REAL, 0)
