"""Tests in several processes, each a fork of the one that has imported and collected all of them.

To import torch and to collect ten thousand tests takes half a minute of CPU, which each process
would pay if it began on its own. A fork begins with what is there.

The tests of a file stay together and in their order; a process that has none left takes the next
file. Where there are fewer files than processes, each test is taken on its own.
"""

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

NUMBER = 4  # bytes of a share's number on the queue


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers",
        type=_number,
        default=1,
        help="processes that run the tests, or `cores`: as many as there are (Linux only)",
    )


def _number(asked: str) -> int:
    if sys.platform != "linux":
        return 1  # macOS's libraries do not outlive a fork
    number = len(os.sched_getaffinity(0)) if asked == "cores" else int(asked)
    if number < 1:
        raise ValueError(number)  # argparse says what the option was
    return number


def run_all(session: pytest.Session) -> bool | None:
    """Run the session's tests in as many forks as were asked for; None leaves them to pytest.

    Returns in each of the processes. In a fork the session then ends without a word.
    """
    option = session.config.option
    num = option.workers
    if num == 1 or option.collectonly or option.usepdb or session.testsfailed:
        return None
    shares = _shares(session, num)
    queue, fill = os.pipe()
    os.set_blocking(fill, False)  # what a pipe does not hold would wait for ever
    os.write(fill, b"".join(number.to_bytes(NUMBER, "big") for number in range(len(shares))))
    os.close(fill)
    forks: dict[Connection, int] = {}
    for worker in range(min(num, len(shares))):
        ours, theirs = Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            for other in [*forks, ours]:
                other.close()
            _begin_fork(session, f"gw{worker}", theirs)
            _run_shares(session, _taken(shares, queue))
            return True
        theirs.close()
        forks[ours] = pid
    os.close(queue)
    try:
        _listen(session, forks)
    except KeyboardInterrupt:  # at the terminal, where it reaches the forks too
        for _ in _told(forks):
            pass  # they end what they have begun
        raise
    return True


_exit_status: list[int] = []


def note_end(session: pytest.Session, exit_status: int) -> None:
    """Note with what exit code the process ends, if pytest is all that it does."""
    if session.config.option.workers > 1:
        _exit_status.append(exit_status)


@atexit.register
def _leave() -> None:
    """To take the libraries apart takes seconds. What other modules do at the end comes before."""
    if _exit_status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])


def _shares(session: pytest.Session, workers: int) -> list[list[int]]:
    """Return the numbers of the tests that stay together, the most first: they take longest."""
    numbers = range(len(session.items))
    files = [[*of] for _, of in groupby(numbers, key=lambda number: session.items[number].path)]
    if len(files) < workers:
        return [[number] for number in numbers]
    return sorted(files, key=len, reverse=True)


# -- in a fork -------------------------------------------------------------------------------------


class _Teller:
    """A plugin that tells what the reporter would have shown."""

    def __init__(self, config: pytest.Config, told: Connection) -> None:
        self._config = config
        self._told = told

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._told.send(("begun", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook.pytest_report_to_serializable
        self._told.send(("report", hook(config=self._config, report=report)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._told.send(("ended", (nodeid, location)))


def _begin_fork(session: pytest.Session, name: str, told: Connection) -> None:
    config = session.config
    config.workerinput = {"workerid": name}  # pytest's plugins heed it
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Teller(config, told))
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its file is the other processes' too
    capture.start_global_capturing()


def _taken(shares: Sequence[Sequence[int]], queue: int) -> Iterator[int]:
    while number := os.read(queue, NUMBER):
        yield from shares[int.from_bytes(number, "big")]


def _run_shares(session: pytest.Session, numbers: Iterator[int]) -> None:
    items = (session.items[number] for number in numbers)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            return  # the one that listens says why
        item = following


# -- in the process that listens -------------------------------------------------------------------


def _listen(session: pytest.Session, forks: dict[Connection, int]) -> None:
    """Report what forks tell until they have ended. Raises: Session.Failed, Session.Interrupted."""
    if (reporter := session.config.pluginmanager.getplugin("terminalreporter")) is not None:
        reporter.showfspath = False  # of several files at once
    running: dict[int, Any] = {}
    num_left, stops = len(session.items), False
    for pid, message in _told(forks):
        if stops:
            continue
        hook = session.config.hook
        match message:
            case "begun", test:
                running[pid] = test
                hook.pytest_runtest_logstart(nodeid=test[0], location=test[1])
            case "report", data:
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
            case "ended", test:
                del running[pid]
                num_left -= 1
                hook.pytest_runtest_logfinish(nodeid=test[0], location=test[1])
            case "left", code if pid in running:
                hook.pytest_runtest_logreport(report=_died(*running.pop(pid), code))
        stops = bool(session.shouldfail or session.shouldstop)
        for other in forks.values() if stops else ():
            os.kill(other, signal.SIGINT)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop or num_left:
        raise session.Interrupted(
            session.shouldstop or f"{num_left} tests did not run to their end"
        )


def _told(forks: dict[Connection, int]) -> Iterator[tuple[int, tuple[str, Any]]]:
    """Yield what forks tell, with the pid of each, and in the end their exit codes."""
    while forks:
        for fork in wait([*forks]):
            assert isinstance(fork, Connection)
            try:
                yield forks[fork], fork.recv()
            except EOFError:
                pid = forks.pop(fork)
                yield pid, ("left", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _died(nodeid: str, location: tuple[str, int | None, str], code: int) -> pytest.TestReport:
    why = f"its process ended with {code} while it ran: {nodeid}"
    return pytest.TestReport(nodeid, location, {}, "failed", why, "call")
