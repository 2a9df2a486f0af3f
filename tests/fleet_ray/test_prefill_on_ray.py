"""A fleet on a real Ray Serve in which one replica computes prompts for another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import psutil
import pytest

from fleet_ray.fleet_process import FleetProcess, fleet
from fleet_ray.test_fleet_on_ray import Stream, body, client_of, figure, read, until_they_run
from quire import LLM, SamplingParams

pytestmark = pytest.mark.ray

FLAGS = (
    *("--replicas", "1", "--prefill-replicas", "1", "--cpus-per-replica", "1"),
    *("--kv-cache-memory-bytes", "64MiB", "--health-check-timeout", "3"),
)
PREFILL = "ServeReplica:quire-prefill:Prefill"
WRITTEN = tuple(f"def function_{number}(items):\n    " for number in range(10))
NUM_TOKENS = 600  # that keep a replica busy


def long_prompt(number: int) -> str:
    return f"# Part {number}.\n" + "def add(left, right):\n    return left + right\n\n" * 60


def prompts_of(two: FleetProcess, outcome: str) -> float:
    text = httpx.get(f"{two.url}/metrics", timeout=60, trust_env=False).text
    name = f'quire:fleet_prefilled_prompts_total{{model_name="demo",outcome="{outcome}"}} '
    name_too = f'quire:fleet_prefilled_prompts_total{{outcome="{outcome}",model_name="demo"}} '
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((name, name_too))
    )


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    with fleet(tmp_path_factory.mktemp("fleet"), *FLAGS) as process:
        yield process


def test_prompts_are_computed_apart_while_answers_are_written(process: FleetProcess) -> None:
    with LLM(kv_cache_memory_bytes=64 * 2**20) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        several = llm.generate([long_prompt(number) for number in range(4)], params)
        want = [each.text for each in several]
    process.until(lambda: figure(process, "quire:fleet_replica_up") == 2)

    async def ask() -> list[list[Stream]]:
        rounds = []
        async with client_of(process) as client:
            writing = [Stream() for _ in WRITTEN]
            tasks = [
                asyncio.ensure_future(read(client, body(prompt, NUM_TOKENS), stream))
                for prompt, stream in zip(WRITTEN, writing, strict=True)
            ]
            await until_they_run(writing)
            for numbers in ((0, 1), (2, 3)):
                calls = (read(client, body(long_prompt(n), 8), Stream()) for n in numbers)
                rounds.append(await asyncio.gather(*calls))
                if numbers == (0, 1):
                    assert not all(stream.is_done for stream in writing), "nothing runs"
                    (prefill,) = process.processes(PREFILL)
                    prefill.kill()
            rounds.append(await asyncio.gather(*tasks))
        return rounds

    first, second, written = asyncio.run(ask())
    assert [stream.text for stream in (*first, *second)] == want, process.log
    assert all(stream.is_whole for stream in (*first, *second, *written)), process.log
    assert prompts_of(process, "apart") >= 1, process.log
    # Another one comes in its place, and takes a place of its own.
    process.until(lambda: figure(process, "quire:fleet_replica_up") == 2)


def test_a_door_that_is_killed_takes_its_replicas_along(process: FleetProcess) -> None:
    """The last test of this fleet: who had an answer under way learns that it is over."""
    process.until(lambda: figure(process, "quire:fleet_replica_up") == 2)
    stream = Stream()
    engines: list[psutil.Process] = []

    async def ask() -> None:
        async with client_of(process) as client, asyncio.timeout(60):
            task = asyncio.ensure_future(read(client, body("import ", 1900), stream))
            await until_they_run([stream])
            engines.extend(process.processes("ServeReplica"))
            process.child.kill()
            with pytest.raises(httpx.HTTPError):
                await task

    asyncio.run(ask())
    assert not stream.is_done
    assert len(engines) == 2
    # Agents of Ray's, which hold no memory of a model, try for a minute to tell of the end.
    _, left = psutil.wait_procs(engines, timeout=30)
    assert not left
