"""Prompts computed apart, against two equal replicas: what it gives and what it takes.

Two fleets of two processes each, on the same two processors (``processes.py``), take turns: two
plain replicas, and one that computes prompts for one that writes answers. Streams are being
written while long prompts come; this process is door and client, without HTTP. The plain fleet is
asked twice in each round (A/A).

    python -m benchmarks.fleet.bench_prefill --model FOLDER --rounds 3
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import numpy as np
import typer
from rich.console import Console

from benchmarks.fleet.processes import replicas_of, running
from benchmarks.harness.report import Table, WithClaims, show
from quire.bench.workload import Vocabulary
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.placement import LeastLoaded
from quire.fleet.prefill import PrefillPlaces
from quire.sampling_params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# What is written lasts as long as prompts come: to an idle replica none goes apart.
WRITTEN, WRITTEN_PROMPT, WRITTEN_TOKENS = 6, 32, 400
LONG, LONG_PROMPT, LONG_TOKENS = 6, 512, 4


@dataclass(slots=True)
class Taken:
    """What one round of one fleet took, in seconds."""

    gaps_s: list[float] = field(default_factory=list)  # between pieces of what is written
    firsts_s: list[float] = field(default_factory=list)  # of long prompts
    tokens_per_s: float = 0.0
    apart: int = 0


async def _read(
    fleet: FleetEngine, prompt: list[int], max_tokens: int
) -> tuple[float, list[float]]:
    """Return the seconds until the first piece, and between pieces."""
    params = SamplingParams(max_tokens=max_tokens, **GREEDY)
    at_s, times = time.perf_counter(), list[float]()
    async for _ in fleet.generate(await fleet.request(prompt, params)):
        now_s = time.perf_counter()
        times.append(now_s - at_s)
        at_s = now_s
    return times[0], times[1:]


async def _round(fleet: FleetEngine, seed: int, gap_s: float) -> Taken:
    rng, vocabulary, taken = np.random.default_rng(seed), Vocabulary(), Taken()
    before, begun_s = fleet.num_prefilled["apart"], time.perf_counter()

    async def write() -> None:
        prompt = vocabulary.draw(rng, WRITTEN_PROMPT)
        _, gaps_s = await _read(fleet, prompt, WRITTEN_TOKENS)
        taken.gaps_s += gaps_s

    async def ask(number: int) -> None:
        prompt = vocabulary.draw(rng, LONG_PROMPT)
        await asyncio.sleep((1 + number) * gap_s)
        first_s, _ = await _read(fleet, prompt, LONG_TOKENS)
        taken.firsts_s.append(first_s)

    await asyncio.gather(*(write() for _ in range(WRITTEN)), *map(ask, range(LONG)))
    num_tokens = WRITTEN * WRITTEN_TOKENS + LONG * LONG_TOKENS
    taken.tokens_per_s = num_tokens / (time.perf_counter() - begun_s)
    taken.apart = fleet.num_prefilled["apart"] - before
    return taken


@asynccontextmanager
async def _fleet(folder: Path, model: str | None, *, is_apart: bool) -> AsyncIterator[FleetEngine]:
    places, held, more = PrefillPlaces.made(str(folder), 1), -1, [dict[str, Any](), {}]
    if is_apart:
        config, held = places.take()
        more = [{"kv_transfer_config": config}, {"kv_transfer_config": places.of_decoder()}]
    try:
        replicas = replicas_of(folder, model, more)
        async with running(replicas, LeastLoaded(seed=0), prefills_apart=is_apart) as engine:
            yield engine
    finally:
        if held >= 0:
            os.close(held)


async def _measure(model: str | None, rounds: int, gap_s: float) -> dict[str, list[Taken]]:
    found: dict[str, list[Taken]] = {"two replicas": [], "again (A/A)": [], "prompts apart": []}
    async with AsyncExitStack() as stack:
        fleets = {}
        for name, is_apart in (("two replicas", False), ("prompts apart", True)):
            folder = Path(stack.enter_context(TemporaryDirectory()))
            fleets[name] = await stack.enter_async_context(_fleet(folder, model, is_apart=is_apart))
            await _round(fleets[name], 1000, gap_s)  # kernels are compiled, and steps recorded
        for number in range(rounds):
            for name in found:
                fleet = fleets.get(name, fleets["two replicas"])
                seed = 10 * number + list(found).index(name)
                found[name].append(await _round(fleet, seed, gap_s))
    return found


_FIGURES: tuple[tuple[str, Callable[[Taken], float]], ...] = (
    ("time between tokens, median, ms", lambda own: 1e3 * median(own.gaps_s)),
    ("time between tokens, p99, ms", lambda own: 1e3 * float(np.percentile(own.gaps_s, 99))),
    ("longest of these, ms", lambda own: 1e3 * max(own.gaps_s)),
    ("first token of long prompts, mean, ms", lambda own: 1e3 * mean(own.firsts_s)),
    ("all tokens/s", lambda own: own.tokens_per_s),
    ("prompts computed apart", lambda own: float(own.apart)),
)


def main(
    model: Annotated[str | None, typer.Option(help="A folder; default: the demo model.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    gap_s: Annotated[float, typer.Option(help="Seconds between two long prompts.")] = 0.7,
    with_claims: WithClaims = False,
) -> None:
    """Compare a fleet with a prefill replica to one of two equal replicas."""
    found = asyncio.run(_measure(model, rounds, gap_s))
    table = Table(
        title=f"{WRITTEN} answers of {WRITTEN_TOKENS} tokens, {LONG} prompts of {LONG_PROMPT}",
        columns=("figure", *found, "apart / two (least … most)"),
        rows=[],
    )
    for name, of in _FIGURES:
        values = {fleet: [of(own) for own in taken] for fleet, taken in found.items()}
        ratio = ""
        if all(values["two replicas"]):
            pairs = zip(values["prompts apart"], values["two replicas"], strict=True)
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})"
            if with_claims:
                print(json.dumps({"claim": f"prompts apart: {name}", "ratio": median(ratios)}))
        row = [f"{median(each):.1f}" for each in values.values()]
        table.rows.append([name, *row, ratio])
    show([table], [], Console())


if __name__ == "__main__":
    typer.run(main)
