"""A fleet on a real Ray Serve: what clients see while replicas come, go, hang and die.

The tests share one fleet, and leave it with two replicas.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fleet_ray.fleet_process import COMMAND, CONTROLLER, FleetProcess, fleet
from quire import LLM, SamplingParams

pytestmark = pytest.mark.ray

FLAGS = (
    *("--replicas", "2", "--cpus-per-replica", "1", "--kv-cache-memory-bytes", "64MiB"),
    *("--shutdown-timeout", "5", "--health-check-timeout", "3"),
)
# A prompt is asked where no token of its answer is nearly as likely as the next one: what goes on
# elsewhere is computed in one piece there, and rounding decides between equals. Which prompts these
# are depends on the processor's kernels, so they are found by one engine here.
LEAST_AHEAD = 0.1  # in log-probability: more than a step of bfloat16 among these logits
NUM_TRIED, NUM_ASKED = 120, 7  # prompts, of which so many are asked at once
NUM_TOKENS = 240


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    with fleet(tmp_path_factory.mktemp("fleet"), *FLAGS) as process:
        yield process


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Of one engine, in this process, by prompt: twice ``NUM_ASKED``."""
    several = [f"def function_{number}(items):\n    " for number in range(NUM_TRIED)]
    with LLM(kv_cache_memory_bytes=64 * 2**20) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
        done = llm.generate(several, params)
    found = {}
    for prompt, own in zip(several, done, strict=True):
        tops = [token.top for token in own.choices[0].logprobs]
        if min(first[1] - second[1] for first, second in tops) >= LEAST_AHEAD:
            found[prompt] = own.text
    assert len(found) >= 2 * NUM_ASKED, f"rounding may decide about all but {len(found)}: try more"
    return dict(list(found.items())[: 2 * NUM_ASKED])


def prompts_of(answers: dict[str, str]) -> list[str]:
    return list(answers)[:NUM_ASKED]


def others_of(answers: dict[str, str]) -> list[str]:
    return list(answers)[NUM_ASKED:]


def body(prompt: str | list[int], max_tokens: int = NUM_TOKENS, **more: Any) -> dict[str, Any]:
    return {
        **{"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True},
        **{"temperature": 0, "stream": True},
        **more,
    }


@dataclass
class Stream:
    """What a client has read of one answer."""

    text: str = ""
    num_pieces: int = 0
    finish_reason: str | None = None
    errors: list[Any] = field(default_factory=list)
    is_done: bool = False  # [DONE] has come
    longest_s: float = 0.0  # between two pieces

    @property
    def is_whole(self) -> bool:
        return self.is_done and not self.errors and self.finish_reason == "length"


async def read(client: httpx.AsyncClient, sent: dict[str, Any], stream: Stream) -> Stream:
    at_s = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=sent) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            now_s = time.monotonic()
            stream.longest_s, at_s = max(stream.longest_s, now_s - at_s), now_s
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                stream.is_done = True
                continue
            said = json.loads(data)
            if "error" in said:
                stream.errors.append(said["error"])
                continue
            stream.num_pieces += 1
            for choice in said["choices"]:
                stream.text += choice["text"]
                stream.finish_reason = choice["finish_reason"] or stream.finish_reason
    return stream


def client_of(two: FleetProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=two.url, timeout=60, trust_env=False)


async def until_they_run(streams: list[Stream]) -> None:
    async with asyncio.timeout(60):
        while any(stream.num_pieces < 3 for stream in streams):
            await asyncio.sleep(0.01)


def two_again(two: FleetProcess) -> None:
    """Both ready, and in the fleet: each is asked by the door."""
    two.until(lambda: len(two.replicas()) == 2)
    two.until(lambda: figure(two, "quire:fleet_replica_up") == 2)


def figure(two: FleetProcess, name: str) -> float:
    """One of the door's, summed over replicas."""
    text = httpx.get(f"{two.url}/metrics", timeout=60, trust_env=False).text
    lines = [each for each in text.splitlines() if each.startswith(f"{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# -- while all goes well ---------------------------------------------------------------------------


def test_answers_are_one_engines(two: FleetProcess, answers: dict[str, str]) -> None:
    prompts = prompts_of(answers)

    async def ask() -> list[Stream]:
        async with client_of(two) as client:
            calls = (read(client, body(prompt), Stream()) for prompt in prompts)
            return list(await asyncio.gather(*calls))

    streams = asyncio.run(ask())
    assert not [stream for stream in streams if not stream.is_whole], two.log
    assert [stream.text for stream in streams] == [answers[prompt] for prompt in prompts]
    # Each engine's metrics are the door's, too.
    assert figure(two, "vllm:generation_tokens_total") >= NUM_TOKENS * NUM_ASKED


@pytest.mark.parametrize("salt", [None, "a client's own"])
def test_prefixes_stay_where_they_are(two: FleetProcess, salt: str | None) -> None:
    rng = random.Random(1)
    prefixes = [[rng.randrange(300, 4000) for _ in range(320)] for _ in range(6)]

    async def ask() -> list[int]:
        found = []
        async with client_of(two) as client:
            for turn in range(4):
                for number in rng.sample(range(6), 6):  # taking turns would look like staying
                    tail = [rng.randrange(300, 4000) for _ in range(20)]
                    sent = body([*prefixes[number], *tail], 2, stream=False, cache_salt=salt)
                    answer = (await client.post("/v1/completions", json=sent)).json()
                    details = answer["usage"].get("prompt_tokens_details") or {}
                    found.append(details.get("cached_tokens", 0) if turn else 320)
                    await asyncio.sleep(0.1)
        return found

    assert asyncio.run(ask()) == [320] * 24


# -- while a replica dies --------------------------------------------------------------------------


def test_streams_outlive_a_replica_that_is_killed(
    two: FleetProcess, answers: dict[str, str]
) -> None:
    prompts = prompts_of(answers)
    two_again(two)
    greedy = [Stream() for _ in prompts]
    several = [Stream() for _ in range(6)]

    async def ask() -> None:
        async with client_of(two) as client:
            calls = [
                *(read(client, body(p), s) for p, s in zip(prompts, greedy, strict=True)),
                *(
                    read(client, body(f"import module_{number}", temperature=1.0, n=2), stream)
                    for number, stream in enumerate(several)
                ),
            ]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await until_they_run([*greedy, *several])
            two.busiest().kill()
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)

    asyncio.run(ask())
    assert not [stream for stream in greedy if not stream.is_whole], two.log
    assert [stream.text for stream in greedy] == [answers[prompt] for prompt in prompts]
    # What has several continuations goes on nowhere else: one error event, or untouched.
    assert all(stream.is_whole or len(stream.errors) == 1 for stream in several)
    assert any(stream.errors for stream in several)
    two_again(two)


def test_no_request_waits_for_a_replica_that_hangs(
    two: FleetProcess, answers: dict[str, str]
) -> None:
    others = others_of(answers)
    two_again(two)
    streams = [Stream() for _ in others]
    hangs: list[psutil.Process] = []
    before = figure(two, "quire:fleet_resumed_streams_total")

    async def ask() -> None:
        async with client_of(two) as client:
            tasks = [
                asyncio.ensure_future(read(client, body(p), s))
                for p, s in zip(others, streams, strict=True)
            ]
            await until_they_run(streams)
            hangs.append(two.busiest())
            hangs[0].send_signal(signal.SIGSTOP)
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)

    try:
        asyncio.run(ask())
    finally:
        two.until(lambda: len(two.replicas()) == 3)  # another one comes in its place
        hangs[0].kill()  # Ray asks a process to end, which one that is stopped does not hear
    assert not [stream for stream in streams if not stream.is_whole], two.log
    assert [stream.text for stream in streams] == [answers[prompt] for prompt in others]
    assert figure(two, "quire:fleet_resumed_streams_total") > before, two.log
    two_again(two)


def test_traffic_goes_on_without_serves_controller(
    two: FleetProcess, answers: dict[str, str]
) -> None:
    prompts = prompts_of(answers)
    two_again(two)
    streams = [Stream() for _ in prompts]

    async def ask() -> None:
        async with client_of(two) as client:
            (controller,) = two.processes(CONTROLLER)
            controller.kill()
            for prompt, stream in zip(prompts, streams, strict=True):
                await read(client, body(prompt), stream)

    asyncio.run(ask())
    assert not [stream for stream in streams if not stream.is_whole], two.log
    assert [stream.text for stream in streams] == [answers[prompt] for prompt in prompts]
    two.until(lambda: len(two.processes(CONTROLLER)) == 1)


# -- while replicas are replaced, and the end ------------------------------------------------------


def test_a_roll_breaks_no_stream(two: FleetProcess, answers: dict[str, str]) -> None:
    prompts = prompts_of(answers)
    two_again(two)
    before = {each.pid for each in two.replicas()}
    streams: list[tuple[str, Stream]] = []

    async def one_after_the_other(client: httpx.AsyncClient, prompt: str) -> None:
        while before & {each.pid for each in two.replicas()}:
            stream = Stream()
            streams.append((prompt, stream))
            await read(client, body(prompt), stream)

    async def ask() -> None:
        async with client_of(two) as client, asyncio.timeout(110):
            two.child.send_signal(signal.SIGHUP)
            await asyncio.gather(*(one_after_the_other(client, each) for each in prompts[:4]))

    asyncio.run(ask())
    assert not [stream for _, stream in streams if not stream.is_whole], two.log
    assert all(stream.text == answers[prompt] for prompt, stream in streams)
    two_again(two)


def test_a_stop_lets_what_runs_finish_and_leaves_no_process(
    two: FleetProcess, answers: dict[str, str]
) -> None:
    prompts = prompts_of(answers)
    two_again(two)
    short, long = [Stream() for _ in range(4)], Stream()

    async def ask() -> int:
        async with client_of(two) as client:
            calls = [read(client, body(p), s) for p, s in zip(prompts, short, strict=False)]
            calls.append(read(client, body(prompts[0], 1900), long))
            tasks = [asyncio.ensure_future(call) for call in calls]
            await until_they_run([*short, long])
            end = asyncio.ensure_future(asyncio.to_thread(two.end, signal.SIGTERM))
            await asyncio.gather(*tasks)
            return await end

    assert asyncio.run(ask()) == 0
    assert all(stream.is_whole for stream in short)
    assert [stream.text for stream in short] == [answers[each] for each in prompts[:4]]
    # It has 5 s (shutdown_timeout): whole on a fast machine, else it is told why it ends.
    assert long.is_done
    assert long.finish_reason in ("length", "abort")
    assert "Traceback" not in two.log


# -- what cannot be --------------------------------------------------------------------------------


def refusal(*flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "fleet", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_a_port_in_use_is_said_before_ray_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port={port} cannot be bound: another process listens there" in refusal(
            "--port", port
        )


def test_the_reason_why_no_replica_starts_is_said(tmp_path: Path) -> None:
    said = refusal("--port", "0", "--replicas", "1", "--kv-cache-memory-bytes", "1KiB")
    assert "error: no replica can be started: " in said
    assert "kv_cache_memory_bytes" in said


def test_more_replicas_than_there_is_room_for_are_refused() -> None:
    said = refusal("--port", "0", "--replicas", "2", "--gpus-per-replica", "8")
    assert "2 replicas need 16 GPUs (--gpus-per-replica 8), and there are 0" in said
