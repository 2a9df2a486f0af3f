"""The process of a rank other than 0: it does one thing after the other, until it may leave.

``crew`` starts it and speaks with it; what it does is in ``follower``.
"""

import logging
import os
import pickle
import shutil
import threading
from multiprocessing.connection import Connection
from typing import Any

from quire.engine.parallel.follower import Follower
from quire.engine.parallel.group import leave
from quire.engine.parallel.messages import EXCHANGES, Answer, Done, Failed, Heard, Leave
from quire.errors import QuireError

log = logging.getLogger(__name__)

_NOT_HEARD = 70  # the exit code of a rank that has failed alone, for which others may wait


def main(channel: int, lifeline: int, folder: str, grace_s: float) -> None:
    """``lifeline`` is a pipe that ends with rank 0, whose ``folder`` is cleared away then."""
    threading.Thread(
        target=_end_with, args=(lifeline, folder), name="quire-lifeline", daemon=True
    ).start()
    logging.basicConfig(level=logging.ERROR)  # what rank 0 logs too need not be said twice
    if not follow(Connection(channel), grace_s):
        shutil.rmtree(folder, ignore_errors=True)


def follow(channel: "Connection[Any, Any]", grace_s: float) -> bool:
    """Answer messages until one says to leave; False if rank 0 is gone without a word."""
    follower = Follower()
    _tell(channel, Done())  # it is there
    while True:
        try:
            message = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            return False
        if isinstance(message, Leave):
            follower.close()
            leave()
            return True
        if isinstance(message, Heard):
            continue
        answer = _answer(follower, message)
        _tell(channel, answer)
        failed = isinstance(answer, Failed) and isinstance(message, EXCHANGES)
        # If it failed in all ranks at the same place, rank 0 says so at once. If not, the others
        # wait in an exchange that will never be: they are freed by the end of this one.
        if failed and not channel.poll(grace_s):
            log.error("%s failed in this rank alone, which ends", type(message).__name__)
            os._exit(_NOT_HEARD)
        follower.go_on(message)


def _answer(follower: Follower, message: Any) -> Answer:
    try:
        return Done(follower.do(message))
    except Exception as error:
        own = isinstance(error, QuireError)
        told = error if own else RuntimeError(f"rank {follower.rank}: {error!r}")
        return Failed(told, follower.committed_bytes(message))


def _tell(channel: "Connection[Any, Any]", answer: Answer) -> None:
    try:
        channel.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
    except OSError:  # rank 0 is gone
        os._exit(1)


def _end_with(lifeline: int, folder: str) -> None:
    os.read(lifeline, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
