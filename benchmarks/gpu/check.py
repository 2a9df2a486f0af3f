"""A part that is tests: pytest, which tells each result as it comes.

A process in which a kernel has faulted can use the device no more: it ends, and ``run`` starts
another one for the tests that are left.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts import PARTS, tell
from benchmarks.gpu.process import ROOT


def check(asked: dict[str, Any]) -> int:
    """Run a part's tests, and return pytest's code where they could not run."""
    part, marked = PARTS[asked["part"]], "(gpu or device)"
    if asked["emulated"] or not part.full:
        marked += " and not full"
    options = ["--device", "emulated" if asked["emulated"] else "cuda", "-m", marked]
    # Other releases warn of other things; what they compute is what counts here.
    options += ["-W", "default", "-p", "no:cacheprovider", "-p", "no:xdist", "-s", "-q"]
    options += ["--no-header", "--no-summary", "--continue-on-collection-errors"]
    options += ["-k", part.select] if part.select else []
    files = [str(ROOT / "tests" / name) for name in part.files]
    code = pytest.main([*options, *files], plugins=[Telling(asked)])
    if code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        return 0  # which ones failed was told; where all were done before, none is left
    return int(code)


class Telling:
    """A plugin of pytest."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._done, self._last = set(asked["done"]), set(asked["last"])
        self._shard, self._num_shards = asked["shard"]
        self._emulated = asked["emulated"]
        self._session: Any = None
        self._seconds = 0.0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Note the session, to end it where the device is lost."""
        self._session = session

    @pytest.hookimpl(trylast=True)  # when others have taken out what is not marked
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Choose the tests of this shard that are not done, the last ones last."""
        chosen = few(items) if self._emulated else items
        mine = chosen[self._shard :: self._num_shards]
        left = [item for item in mine if item.nodeid not in self._done]
        items[:] = sorted(left, key=lambda item: item.nodeid in self._last)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell that a test begins."""
        self._seconds = 0.0
        tell(begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell a test's outcome, and end the session where the device is lost."""
        self._seconds += report.duration
        if report.failed:
            print(f"{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)
        if report.when == "call" or report.outcome != "passed":
            self._tell(report)
        if report.failed and (lost := device_lost()) is not None:
            tell(lost=lost)
            self._session.shouldstop = f"the device is lost: {lost}"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Tell that a test has ended."""
        tell(finished=nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tell a file that cannot be collected."""
        if report.failed:
            print(report.longreprtext, flush=True)
        if report.outcome != "passed":
            self._tell(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no dots between the lines."""
        counts = report.when == "call" or report.outcome != "passed"
        return (report.outcome if counts else "", "", "")

    def _tell(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        last = why.strip().splitlines()[-1][:200] if why.strip() else ""
        seconds = round(self._seconds, 2)
        tell(test=report.nodeid, outcome=report.outcome, why=last, seconds=seconds)


def few(items: list[pytest.Item]) -> list[pytest.Item]:
    """Choose the first and the last test of each file that run, or one that is skipped.

    Where all is emulated: `make test` runs all of them so.
    """
    by_file: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_file[item.path].append(item)
    chosen = []
    for several in by_file.values():
        run = [item for item in several if item.get_closest_marker("skip") is None]
        chosen += [run[0], run[-1]] if len(run) > 1 else run or several[:1]
    return chosen


def device_lost() -> str | None:
    """Say why the device is lost: after a fault in a kernel every later call fails."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
