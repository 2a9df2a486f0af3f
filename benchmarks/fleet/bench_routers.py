"""How much of prompts is found: this fleet's placement beside vllm-router's ``cache_aware``.

Two engines, each with the same options and as much memory: as two ``quire serve`` behind
vllm-router, and as two replicas behind a ``FleetEngine`` with ``PrefixAware``, fed by events. Each
prefix is computed at one of the two engines first, by a coin, and not through the router. Then it
is asked for through the router some times, in another order each time, with other ends. So what a
router has sent tells it nothing of the first turn, and half of it wrong later if it guesses. The
coins, prefixes and orders are the same for both.

    python tests/clients/environments.py vllm-router
    python -m benchmarks.fleet.bench_routers --rounds 5
"""

import asyncio
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeAlias

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import typer

from benchmarks.fleet.calibration import EVENTS
from benchmarks.fleet.processes import OPTIONS, replicas_of, running
from benchmarks.harness.report import Output, Run, Table, WithClaims
from benchmarks.harness.server import ask, free_port, post, server
from quire.fleet.event_follower import ZmqFollower
from quire.fleet.placement import PrefixAware
from quire.fleet.prefix_directory import PrefixDirectory
from quire.sampling_params import SamplingParams

GOAL = 1.1
NUM_ENGINES = 2
MAX_TOKENS = 2
SETTLE_S = 0.3  # after prefixes were computed, for events and for what a step leaves
_WORDS = ("list", "dict", "tuple", "return", "yield", "import", "class", "self", "key", "node")

# Asks for a prompt and returns (its tokens, those that were found): at an engine directly, or
# (None) through the router.
Ask: TypeAlias = Callable[[str, int | None], Awaitable[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked in a round."""

    prefixes: list[str]
    homes: list[int]  # the engine that computes each first
    orders: list[list[int]]  # of the prefixes, by turn
    ends: list[list[str]]  # by turn and prefix

    @classmethod
    def drawn(cls, seed: int, num_prefixes: int, num_words: int, turns: int) -> "Load":
        rng = random.Random(seed)
        places = range(num_prefixes)
        prefixes = [" ".join(rng.choices(_WORDS, k=num_words)) for _ in places]
        homes = [rng.randrange(NUM_ENGINES) for _ in places]
        orders = [rng.sample(places, num_prefixes) for _ in range(turns)]
        ends = [[f" turn {turn} {rng.random()}" for _ in places] for turn in range(turns)]
        return cls(prefixes=prefixes, homes=homes, orders=orders, ends=ends)


async def played(load: Load, asked: Ask, at_once: int) -> list[float]:
    """The share of prompt tokens that were found, by turn."""
    for prefix, home in zip(load.prefixes, load.homes, strict=True):
        await asked(prefix, home)
    await asyncio.sleep(SETTLE_S)
    shares = []
    for order, ends in zip(load.orders, load.ends, strict=True):
        free = asyncio.Semaphore(at_once)

        async def one(
            number: int, ends: list[str] = ends, free: asyncio.Semaphore = free
        ) -> tuple[int, int]:
            async with free:
                return await asked(load.prefixes[number] + ends[number], None)

        counts = await asyncio.gather(*map(one, order))
        shares.append(sum(found for _, found in counts) / sum(tokens for tokens, _ in counts))
    return shares


# -- servers behind vllm-router --------------------------------------------------------------------


@contextmanager
def routed(router: Path, ports: list[int], threshold: int) -> Iterator[int]:
    """vllm-router before servers, at the port that is returned."""
    port = free_port()
    command = [
        *(str(router), "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
        *("--balance-abs-threshold", str(threshold), "--prometheus-port", str(free_port())),
        *("--worker-urls", *(f"http://127.0.0.1:{each}" for each in ports)),
    ]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < until_s:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise RuntimeError(f"{router} does not come up")
        time.sleep(2)  # until it has looked at its servers
        yield port
    finally:
        child.terminate()
        child.wait(10)


def of_servers(ports: list[int], router_port: int) -> Ask:
    async def asked(prompt: str, home: int | None) -> tuple[int, int]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        port = router_port if home is None else ports[home]
        answer = await ask(port, post("/v1/completions", body))
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.body[:300]!r}")
        usage = json.loads(answer.body)["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return usage["prompt_tokens"], details.get("cached_tokens") or 0

    return asked


# -- replicas behind a door ------------------------------------------------------------------------


@asynccontextmanager
async def of_replicas(memory: str) -> AsyncIterator[Ask]:
    with TemporaryDirectory() as folder:
        own = {"kv_events_config": EVENTS, "kv_cache_memory_bytes": memory}
        replicas = replicas_of(Path(folder), None, [own] * NUM_ENGINES)
        facts = await replicas[0].facts()
        directory = PrefixDirectory(facts.groups, facts.block_size)
        follower = ZmqFollower(directory)
        async with running(replicas, PrefixAware(directory, seed=0), follower=follower) as engine:

            async def asked(prompt: str, home: int | None) -> tuple[int, int]:
                params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
                request = await engine.request(prompt, params)
                pieces = (
                    engine.generate(request)
                    if home is None
                    else replicas[home].generate(request, request_id=f"direct-{id(request)}")
                )
                found = [delta.num_cached_tokens async for delta in pieces]
                return len(request.prompt_token_ids), found[0]

            yield asked


# -- the run ---------------------------------------------------------------------------------------


def main(  # noqa: PLR0913
    router: Annotated[Path, typer.Option(help="vllm-router's program.")] = Path(
        ".venv-peers/vllm-router/bin/vllm-router"
    ),
    rounds: Annotated[int, typer.Option(help="With other prefixes each.", min=1)] = 5,
    num_prefixes: Annotated[int, typer.Option(help="Prefixes of a round.")] = 12,
    num_words: Annotated[int, typer.Option(help="Words of a prefix.")] = 150,
    turns: Annotated[int, typer.Option(help="Times that each is asked for.")] = 4,
    at_once: Annotated[int, typer.Option(help="Requests at once.")] = 4,
    memory: Annotated[str, typer.Option(help="KV cache of each engine.")] = "64MiB",
    thresholds: Annotated[str, typer.Option(help="--balance-abs-threshold of each run.")] = "64,4",
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Ask for shuffled prefixes, routed by vllm-router's cache_aware and by a fleet's placement."""
    run = Run("fleet.bench_routers", width=120)
    loads = [Load.drawn(seed, num_prefixes, num_words, turns) for seed in range(rounds)]
    found: dict[str, list[list[float]]] = {}

    async def all_rounds(asked: Ask) -> list[list[float]]:
        return [await played(load, asked, at_once) for load in loads]

    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    flags += [f"--kv-cache-memory-bytes={memory}", "--uvicorn-log-level=warning"]
    for threshold in map(int, thresholds.split(",")):
        name = f"vllm-router, cache_aware, threshold {threshold}"
        run.say(name)
        with ExitStack() as stack:
            processors = sorted(os.sched_getaffinity(0))
            ports = [
                stack.enter_context(
                    server(*flags, processors={processors[n % len(processors)]})
                ).port
                for n in range(NUM_ENGINES)
            ]
            own = stack.enter_context(routed(router, ports, threshold))
            found[name] = asyncio.run(all_rounds(of_servers(ports, own)))
    run.say("exact placement")

    async def exact() -> list[list[float]]:
        async with of_replicas(memory) as asked:
            return await all_rounds(asked)

    found["a fleet's exact placement"] = asyncio.run(exact())
    _end(run, found, with_claims, output, f"--rounds {rounds} --memory {memory}")


def _end(
    run: Run,
    found: dict[str, list[list[float]]],
    with_claims: bool,
    output: Path | None,
    flags: str,
) -> None:
    totals = {name: [sum(own) / len(own) for own in rounds] for name, rounds in found.items()}
    *others, ours = totals
    rows = []
    for name, rounds in found.items():
        whole = totals[name]
        turns = ", ".join(f"{median(own):.3f}" for own in zip(*rounds, strict=True))
        spread = f"{median(whole):.3f} ({min(whole):.3f} … {max(whole):.3f})"
        rows.append([name, spread, turns, f"{median(totals[ours]) / median(whole):.2f} ×"])
    table = Table(
        title="Share of prompt tokens found, median of rounds (least … most)",
        columns=("routed by", "all turns", "by turn", "the fleet's, of it"),
        rows=rows,
    )
    claims: list[dict[str, Any]] = []
    for name in others:
        ratio = median(totals[ours]) / median(totals[name])
        claims.append(
            {
                "claim": f"hit share beside {name}, shuffled",
                "ours": median(totals[ours]),
                "peer": median(totals[name]),
                "unit": "of prompt tokens",
                "ratio": ratio,
                "goal": f">= {GOAL} x",
                "holds": ratio >= GOAL,
            }
        )
    run.end(
        [table],
        run.setting(flags, packages=["numpy"], also=["vllm-router 0.1.17", "seeds 0 …"]),
        claims=claims if with_claims else (),
        output=output,
    )


if __name__ == "__main__":
    typer.run(main)
