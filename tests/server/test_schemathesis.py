"""Random requests, right and wrong, to a server in a process of its own."""

from collections.abc import Iterator

import httpx
import pytest

from server.process import Process, running
from server.random_requests import FLAGS, Asker


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with running(*FLAGS) as process:
        yield process


def _ask(process: Process, num_cases: int) -> Asker:
    asker = Asker(process.url)
    asker.ask(num_cases, random_seed=1)
    assert "Traceback" not in process.log, process.log
    assert httpx.get(f"{process.url}/health").status_code == 200
    return asker


def test_answers_are_as_described(process: Process) -> None:
    asker = _ask(process, 30)
    for operation in asker.operations:  # and some of them come through
        path = f"{operation.method} {operation.path}"
        if "{" not in path:
            assert asker.tally.statuses[path, 200], str(asker.tally)


@pytest.mark.full
def test_answers_are_as_described_many_times(process: Process) -> None:
    asker = _ask(process, 1000)
    assert asker.tally.num_cases > 5000
