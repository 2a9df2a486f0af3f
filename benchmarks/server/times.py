"""Times that one client sees: to the first byte, of a chunk, and of another tenant's prompts."""

import asyncio
import math
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import uvicorn

from benchmarks.harness.server import Wire, post, server, wire
from quire import AsyncLLM, SamplingParams
from quire.config import ServerConfig
from quire.server.app import make_app
from quire.server.loop import uvicorn_config

PROMPT_TOKENS = 64
TENANT_TOKENS = 512  # enough that finding them computed shows
_ENGINE: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_bytes": "128MB"}
_FLAGS = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "128MB", "--disable-log-stats")
_QUIET = ("--uvicorn-log-level", "warning")


@asynccontextmanager
async def served_here(llm: AsyncLLM) -> AsyncIterator[int]:
    """A server in this event loop; the port."""
    config = ServerConfig(uvicorn_log_level="warning")
    running = uvicorn.Server(uvicorn_config(make_app(llm, config), config))
    running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    # asyncio sends at once only on sockets whose protocol is named.
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    own.bind(("127.0.0.1", 0))
    serving = asyncio.create_task(running.serve([own]))
    while not running.started:
        await asyncio.sleep(0.01)
    try:
        yield own.getsockname()[1]
    finally:
        running.should_exit = True
        await serving


@asynccontextmanager
async def client_elsewhere(port: int) -> AsyncIterator[Callable[[bytes], Awaitable[float]]]:
    """A process that asks; it says how long the first byte took, in seconds."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(port)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    into, out = child.stdin, child.stdout

    async def asked(data: bytes) -> float:
        into.write(len(data).to_bytes(4, "big") + data)
        return float(await out.readline())

    try:
        yield asked
    finally:
        into.close()
        await child.wait()


async def _ask_what_is_said(port: int) -> None:
    """The client's side, on standard input and output."""
    async with wire(port) as connection:
        while size := int.from_bytes(sys.stdin.buffer.read(4), "big"):
            answer = await connection.ask(sys.stdin.buffer.read(size))
            print(answer.first_s, flush=True)


def drawn(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(20, 4000) for _ in range(num_tokens)]


def completion(token_ids: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    own = {"temperature": 0, "ignore_eos": True, "stream": True}
    return {"prompt": token_ids, "max_tokens": max_tokens, **own, **fields}


async def first_byte(scale: float) -> list[dict[str, Any]]:
    """Of a stream over HTTP, and of the same prompt's first piece from ``AsyncLLM``, in turns.

    Both from the same engine, in this process: two processes differ by more than HTTP costs, in
    where their memory lies. The client over HTTP is a process of its own.
    """
    num, rng = max(20, round(600 * scale)), random.Random(1)
    times_s: dict[str, list[float]] = {"bare": [], "http": [], "again": []}
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    async with AsyncLLM(**_ENGINE) as llm:

        async def bare(token_ids: list[int]) -> float:
            loop = asyncio.get_running_loop()
            begin = loop.time()
            taken = None
            async for _ in llm.generate(token_ids, params):
                taken = taken or loop.time() - begin
            return taken or 0.0

        async with served_here(llm) as port, client_elsewhere(port) as http:
            for number in range(-20, num):  # the first ones compile and warm
                turns = list(times_s)
                rng.shuffle(turns)
                for turn in turns:
                    prompt = drawn(rng, PROMPT_TOKENS)
                    if turn == "http":
                        taken = await http(post("/v1/completions", completion(prompt, 2)))
                    else:
                        taken = await bare(prompt)
                    if number >= 0:
                        times_s[turn].append(taken)
    quantiles = {turn: np.quantile(times, [0.5, 0.99]) * 1e3 for turn, times in times_s.items()}
    found = []
    for index, (name, goal_ms) in enumerate((("p50", 2.0), ("p99", None))):
        over = float(quantiles["http"][index] - quantiles["bare"][index])
        noise = float(quantiles["again"][index] - quantiles["bare"][index])
        found.append(
            {
                "claim": f"server: time to first byte over the bare engine, {name}",
                "ours": over,
                "peer": None,
                "unit": "ms",
                "ratio": None,
                "goal": "none" if goal_ms is None else f"≤ {goal_ms:g} ms",
                "holds": None if goal_ms is None else over <= goal_ms,
                "notes": {
                    "HTTP ms": float(quantiles["http"][index]),
                    "bare ms": float(quantiles["bare"][index]),
                    "A/A ms": noise,
                    "n": num,
                },
            }
        )
    return found


async def chunk_cost(scale: float) -> list[dict[str, Any]]:
    """Processor time of the server for a stream's chunk: a stream, less the same at once."""
    num_tokens = max(100, round(1500 * scale))
    rounds = max(3, round(9 * scale))
    rng = random.Random(3)
    per_chunk_us, between_us = [], []
    with server(*_FLAGS, *_QUIET) as own:
        async with wire(own.port) as connection:

            async def cpu_s(stream: bool) -> float:
                before = own.cpu_s()
                body = completion(drawn(rng, 16), num_tokens, stream=stream)
                await asyncio.gather(connection.ask(post("/v1/completions", body)))
                return own.cpu_s() - before

            await cpu_s(True)
            for _ in range(rounds):
                whole, streamed, again = await cpu_s(False), await cpu_s(True), await cpu_s(False)
                per_chunk_us.append((streamed - (whole + again) / 2) / num_tokens * 1e6)
                between_us.append(abs(again - whole) / num_tokens * 1e6)
    return [
        {
            "claim": "server: processor time of a chunk",
            "ours": statistics.median(per_chunk_us),
            "peer": None,
            "unit": "us",
            "ratio": None,
            "goal": "none",
            "holds": None,
            "notes": {"A/A us": statistics.median(between_us), "rounds": rounds},
        }
    ]


async def tenants(scale: float) -> list[dict[str, Any]]:
    """Bob's time to the first byte of a prompt that Alice has asked, and of a new one.

    And Alice's own of what she has asked: a difference that the same test must see.
    """
    num, rng = max(30, round(2000 * scale)), random.Random(2)
    times_s: dict[str, list[float]] = {"alice had it": [], "none had it": [], "own": []}
    with server(*_FLAGS, *_QUIET, "--api-key", "alice", "--api-key", "bob") as own:
        async with wire(own.port) as alice, wire(own.port) as bob:

            async def ask(who: Wire, prompt: list[int], key: str) -> float:
                return (await who.ask(post("/v1/completions", completion(prompt, 1), key))).first_s

            for number in range(-5, num):
                turns = list(times_s)
                rng.shuffle(turns)
                for turn in turns:
                    prompt = drawn(rng, TENANT_TOKENS)
                    before = prompt if turn != "none had it" else drawn(rng, TENANT_TOKENS)
                    await ask(alice, before, "alice")
                    who, key = (alice, "alice") if turn == "own" else (bob, "bob")
                    taken = await ask(who, prompt, key)
                    if number >= 0:
                        times_s[turn].append(taken)
    same = ks_probability(times_s["alice had it"], times_s["none had it"])
    control = ks_probability(times_s["own"], times_s["none had it"])
    medians = {f"{turn}, ms": statistics.median(t) * 1e3 for turn, t in times_s.items()}
    return [
        {
            "claim": "server: tenants' times are alike, Kolmogorov-Smirnov",
            "ours": same,
            "peer": None,
            "unit": "p",
            "ratio": None,
            "goal": "> 0.05, and < 0.05 for a tenant's own",
            "holds": same > 0.05 > control,
            "notes": {**medians, "p of own": control, "n": num},
        }
    ]


def ks_probability(one: Sequence[float], two: Sequence[float]) -> float:
    """That two samples of one distribution are as far apart as these.

    Source: Press et al., Numerical Recipes, 14.3 (the asymptotic form with its correction).
    """
    both = np.sort(np.concatenate([one, two]))
    ranks = [np.searchsorted(np.sort(each), both, side="right") / len(each) for each in (one, two)]
    distance = float(np.abs(ranks[0] - ranks[1]).max())
    size = math.sqrt(len(one) * len(two) / (len(one) + len(two)))
    x = (size + 0.12 + 0.11 / size) * distance
    if x < 0.2:  # the series does not converge, and the sum is 1
        return 1.0
    total: float = sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * total))


if __name__ == "__main__":
    asyncio.run(_ask_what_is_said(int(sys.argv[1])))
