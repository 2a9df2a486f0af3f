"""Random requests, right and wrong, to a server in a process of its own."""

from collections.abc import Iterator
from pathlib import Path

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
    assert " ERROR " not in process.log, process.log
    assert httpx.get(f"{process.url}/health").status_code == 200
    return asker


def test_answers_are_as_described(process: Process) -> None:
    asker = _ask(process, 14)
    never = ("{", "/v1/audio/", "/tiers/trust")  # the demo model hears nothing, and has no tiers
    for operation in asker.operations:  # and some of them come through
        path = f"{operation.method} {operation.path}"
        if not any(part in path for part in never):
            assert asker.tally.statuses[path, 200], str(asker.tally)


def test_while_it_sleeps_the_system_has_the_model_and_the_cache_again(process: Process) -> None:
    """The demo model: 13 MiB of weights, and as much and more that is made of them."""

    def resident_bytes() -> int:
        said = Path(f"/proc/{process.child.pid}/smaps_rollup").read_text()
        return int(said.partition("Rss:")[2].split()[0]) * 1024

    def ask() -> tuple[int, str]:
        body = {"prompt": list(range(9, 100)), "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{process.url}/v1/completions", json=body)
        return answer.status_code, answer.json().get("choices", [{}])[0].get("text", "")

    assert httpx.post(f"{process.url}/reset_prefix_cache").status_code == 200
    before = ask()
    awake = resident_bytes()
    assert httpx.post(f"{process.url}/sleep?level=2", timeout=60).status_code == 200
    assert awake - resident_bytes() > 12 * 2**20
    assert ask()[0] == 503
    assert httpx.get(f"{process.url}/is_sleeping").json() == {"is_sleeping": True}
    assert httpx.get(f"{process.url}/health").status_code == 200
    assert httpx.post(f"{process.url}/wake_up", timeout=60).status_code == 200
    assert ask() == before


@pytest.mark.full
def test_answers_are_as_described_many_times(process: Process) -> None:
    asker = _ask(process, 300)
    assert asker.tally.num_cases > 1500  # make fuzz-http asks for longer
