"""What a fleet's door costs: the first byte through it, and requests a second of two replicas.

A server (``quire serve``) and a fleet (``quire fleet``, two replicas on Ray Serve) run at the same
time with one thread an engine, and take turns; the server is asked twice in each round (A/A). This
process asks over loopback, on the same processors. Needs ``quire-kv[fleet]``.

What processors the parts of each way take for a request says what bounds it: all of them together
on these processors, and the replicas alone where door, Ray and clients have others.

    python -m benchmarks.fleet.bench_door --rounds 60
    python -m benchmarks.fleet.bench_door --model FOLDER --memory 1GiB --at-once 16,64 --each 1
"""

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.report import WithClaims
from benchmarks.harness.server import ServerProcess, parent_and_cpu_s, post, server, wire

NUM_TOKENS = 16
WARM = 5  # rounds that are not counted
MOST_RATIO, MOST_MORE_MS = 1.3, 5.0
LEAST_OF_TWO = 1.8
_PROMPT = "one two three four five six seven eight nine ten " * 8
_FLAGS = ("--served-model-name", "asked", "--uvicorn-log-level", "warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    claim: str
    ours: float
    peer: float
    unit: str
    ratio: float
    goal: str
    holds: bool
    notes: dict[str, object]


def main(
    with_claims: WithClaims = False,
    rounds: Annotated[int, typer.Option(help="Requests to each, one at a time.")] = 60,
    at_once: Annotated[str, typer.Option(help="Clients of the second part: numbers.")] = "16",
    each: Annotated[int, typer.Option(help="Requests of each of them.")] = 6,
    turns: Annotated[int, typer.Option(help="Turns of the second part, after one more.")] = 5,
    model: Annotated[str, typer.Option(help="A folder; default: the demo model.")] = "",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences of an engine; 0: default.")] = 0,
    memory: Annotated[str, typer.Option(help="KV memory of an engine.")] = "64MiB",
) -> None:
    flags = (*filter(None, (model,)), *_FLAGS, "--kv-cache-memory-bytes", memory)
    if max_num_seqs:
        flags += ("--max-num-seqs", str(max_num_seqs))
    one_thread = ("--cpus-per-replica", "1", "--replicas", "2")
    with (
        server(*flags, processors=_of_one_thread()) as alone,
        server(*flags, *one_thread, command="fleet") as fleet,
    ):
        times = asyncio.run(_first_bytes(alone.port, fleet.port, rounds))
        ways = {"serve": alone, "again": alone, "fleet": fleet}
        several = {
            count: asyncio.run(_rates(ways, count, each, turns))
            for count in map(int, at_once.split(","))
        }
    console, claims = Console(), []
    table = Table(title=f"{rounds} rounds, {NUM_TOKENS} tokens each, ms", title_justify="left")
    for column in ("asked", "first byte", "p10", "p90", "whole"):
        table.add_column(column)
    for name, found in times.items():
        firsts = sorted(1e3 * first for first, _ in found)
        tenth = len(firsts) // 10
        whole = median(1e3 * last for _, last in found)
        row = (median(firsts), firsts[tenth], firsts[-1 - tenth], whole)
        table.add_row(name, *(f"{value:.2f}" for value in row))
    console.print(table)
    ours, peer, again = (
        median(1e3 * first for first, _ in times[name]) for name in ("fleet", "serve", "again")
    )
    claims.append(
        Claim(
            claim="first byte through the door",
            ours=ours,
            peer=peer,
            unit="ms",
            ratio=ours / peer,
            goal=f"<= {MOST_RATIO} x + {MOST_MORE_MS:g} ms",
            holds=ours <= MOST_RATIO * peer + MOST_MORE_MS,
            notes={"again (A/A)": again},
        )
    )
    for count, (rates, used) in several.items():
        claims.append(_rate_claim(count, rates))
        for line in _told(rates, used, num_requests=len(rates["serve"]) * count * each):
            console.print(f"{count} at once, {line}", soft_wrap=True)
    for claim in claims:
        console.print(
            f"{claim.claim}: {claim.ours:.2f} against {claim.peer:.2f} {claim.unit}, "
            f"{claim.ratio:.2f} x; {claim.goal}: {'holds' if claim.holds else 'does not hold'}"
        )
    if with_claims:
        for claim in claims:
            print(json.dumps(asdict(claim)))


def _rate_claim(at_once: int, rates: dict[str, list[float]]) -> Claim:
    two, one = median(rates["fleet"]), median(rates["serve"])
    return Claim(
        claim=f"requests a second of two replicas, {at_once} at once",
        ours=two,
        peer=one,
        unit="requests/s",
        ratio=two / one,
        goal=f">= {LEAST_OF_TWO} x one engine on one core",
        holds=two >= LEAST_OF_TWO * one,
        notes={**rates, "again (A/A)": median(rates["again"]) / one},
    )


def _told(
    rates: dict[str, list[float]], used: dict[str, dict[str, float]], *, num_requests: int
) -> Iterator[str]:
    """What each way answers and takes, and what bounds the fleet where parts are left out."""
    for name, parts in used.items():
        ms = {part: 1e3 * seconds / num_requests for part, seconds in parts.items()}
        told = ", ".join(f"{part} {own_ms:.2f}" for part, own_ms in ms.items())
        yield (
            f"{name}: {median(rates[name]):.2f} ({min(rates[name]):.2f} … "
            f"{max(rates[name]):.2f}) requests/s; ms of a processor for a request: {told}"
        )
    num, one = len(os.sched_getaffinity(0)), median(rates["serve"])
    together, engines = 1e3 * num / sum(ms.values()), 2e3 / ms["replicas"]
    yield (
        f"fleet: at most {together:.2f} requests/s on {num} processors, {together / one:.2f} x; "
        f"{engines:.2f}, {engines / one:.2f} x, where all but its replicas have others"
    )


def _of_one_thread() -> set[int]:
    """The processor of the server alone."""
    return {min(os.sched_getaffinity(0))}


def _body(prompt: str) -> bytes:
    return post(
        "/v1/completions",
        {
            "model": "asked",
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        },
    )


async def _first_bytes(alone: int, fleet: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(first, last) seconds of each request."""
    times: dict[str, list[tuple[float, float]]] = {"serve": [], "again": [], "fleet": []}
    data = _body(_PROMPT)
    async with wire(alone) as to_server, wire(fleet) as to_fleet:
        ways = {"serve": to_server, "again": to_server, "fleet": to_fleet}
        for number in range(WARM + rounds):
            for name, way in ways.items():
                answer = await way.ask(data)
                if number >= WARM:
                    times[name].append((answer.first_s, answer.last_s))
    return times


async def _rates(
    ways: dict[str, ServerProcess], at_once: int, each: int, turns: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Requests a second, of rounds that take turns; each client has a prompt of its own.

    And the seconds of processors that each part of a way took in its own rounds.
    """

    async def client(port: int, number: int) -> None:
        async with wire(port) as own:
            for _ in range(each):
                await own.ask(_body(f"client {number}: {_PROMPT}"))

    rates: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, dict[str, float]] = {name: defaultdict(float) for name in ways}
    for turn in range(1 + turns):
        for name, way in ways.items():
            before, begun_s = _cpu_s(way), perf_counter()
            await asyncio.gather(*(client(way.port, number) for number in range(at_once)))
            if turn:
                rates[name].append(at_once * each / (perf_counter() - begun_s))
                for part, after_s in _cpu_s(way).items():
                    used[name][part] += after_s - before[part]
    return rates, used


def _cpu_s(way: ServerProcess) -> defaultdict[str, float]:
    """Seconds of processors so far, of this process and of those that a server consists of."""
    seconds = defaultdict[str, float](float)
    parents, used_s = dict[int, int](), dict[int, float]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(folder.name)
            parents[pid], used_s[pid] = parent_and_cpu_s(pid)
    for pid, own_s in used_s.items():
        if pid == os.getpid():
            seconds["client"] += own_s
        elif pid == way.pid:
            seconds["server or door"] += own_s
        elif way.pid in _ancestors(pid, parents):
            with suppress(OSError):
                title = (Path("/proc") / str(pid) / "cmdline").read_bytes()
                seconds["replicas" if b"ServeReplica" in title else "Ray's others"] += own_s
    return seconds


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while (parent := parents.get(pid)) is not None:
        yield parent
        pid = parent


if __name__ == "__main__":
    typer.run(main)
