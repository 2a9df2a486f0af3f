"""Prompts computed apart, against two equal replicas: what it gives and what it takes.

Two fleets of two processes each, on the same two processors (``processes.py``), take turns: two
plain replicas, and one that computes prompts for one that writes answers. Streams are being
written while long prompts come; this process is door and client, without HTTP. The plain fleet is
asked twice in each round (A/A). With a calibration of ``bench_simulated`` both fleets are simulated
too, by the door's own rule, the engine's scheduler, and a link of the speed that was measured.

    python -m benchmarks.fleet.bench_prefill --model FOLDER --rounds 3 --calibration fleet.json
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

from benchmarks.fleet.bench_simulated import simulated_fleet
from benchmarks.fleet.processes import replicas_of, running
from benchmarks.harness.report import Table, WithClaims, show
from quire.bench.workload import Vocabulary
from quire.engine.sequence import Sequence
from quire.engine.statistics import Latencies
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.placement import LeastLoaded
from quire.fleet.prefill import PrefillPlaces
from quire.planner.simulation.cost_model import FittedCosts
from quire.planner.simulation.simulator import simulate
from quire.sampling_params import SamplingParams
from quire.traces import TraceRequest

ROUTING = "least-loaded"
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


def _simulated(model: str | None, costs: FittedCosts, gap_s: float, *, is_apart: bool) -> Taken:
    """Return what a simulated fleet takes, whose gaps are the means of each answer."""
    fleet = simulated_fleet(model, costs, routing=ROUTING, num_prefill=int(is_apart))
    written = [
        TraceRequest(at_s=0.0, input_tokens=WRITTEN_PROMPT, output_tokens=WRITTEN_TOKENS)
        for _ in range(WRITTEN)
    ]
    long = [
        TraceRequest(at_s=(1 + n) * gap_s, input_tokens=LONG_PROMPT, output_tokens=LONG_TOKENS)
        for n in range(LONG)
    ]
    taken = Taken()

    def note(_: int, sequence: Sequence) -> None:
        took = Latencies.of(sequence)
        assert took.first_token_s is not None
        assert took.decode_s is not None
        if sequence.num_prompt_tokens == LONG_PROMPT:
            taken.firsts_s.append(took.first_token_s)
        else:
            taken.gaps_s.append(took.decode_s / (sequence.num_output_tokens - 1))

    found = simulate([*written, *long], fleet, ended=note)
    taken.tokens_per_s = found.output_tokens_per_s
    taken.apart = 0 if found.prefill is None else found.prefill.num_prompts["apart"]
    return taken


_GAPS = 3  # of the figures, that a simulation has only as means of answers
_FIGURES: tuple[tuple[str, Callable[[Taken], float]], ...] = (
    ("time between tokens, median, ms", lambda own: 1e3 * median(own.gaps_s)),
    ("time between tokens, p99, ms", lambda own: 1e3 * float(np.percentile(own.gaps_s, 99))),
    ("longest of these, ms", lambda own: 1e3 * max(own.gaps_s)),
    ("time between tokens, mean, ms", lambda own: 1e3 * mean(own.gaps_s)),
    ("first token of long prompts, mean, ms", lambda own: 1e3 * mean(own.firsts_s)),
    ("all tokens/s", lambda own: own.tokens_per_s),
    ("prompts computed apart", lambda own: float(own.apart)),
)


def main(
    model: Annotated[str | None, typer.Option(help="A folder; default: the demo model.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    gap_s: Annotated[float, typer.Option(help="Seconds between two long prompts.")] = 0.7,
    calibration: Annotated[
        Path | None, typer.Option(help="Simulate both fleets with it, too.")
    ] = None,
    with_claims: WithClaims = False,
) -> None:
    """Compare a fleet with a prefill replica to one of two equal replicas."""
    found = asyncio.run(_measure(model, rounds, gap_s))
    paper = list[Taken]()
    if calibration is not None:
        costs = FittedCosts.read(calibration)
        both = (False, True)
        paper = [_simulated(model, costs, gap_s, is_apart=is_apart) for is_apart in both]
    table = Table(
        title=f"{WRITTEN} answers of {WRITTEN_TOKENS} tokens, {LONG} prompts of {LONG_PROMPT}",
        columns=(
            "figure",
            *found,
            "apart / two (least … most)",
            *("two, simulated", "apart, simulated")[: len(paper)],
        ),
        rows=[],
    )
    for number, (name, of) in enumerate(_FIGURES):
        values = {fleet: [of(own) for own in taken] for fleet, taken in found.items()}
        ratio = ""
        if all(values["two replicas"]):
            pairs = zip(values["prompts apart"], values["two replicas"], strict=True)
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})"
            if with_claims:
                print(json.dumps({"claim": f"prompts apart: {name}", "ratio": median(ratios)}))
        row = [f"{median(each):.1f}" for each in values.values()]
        said = ["" if number < _GAPS else f"{of(own):.1f}" for own in paper]
        table.rows.append([name, *row, ratio, *said])
    show([table], [], Console())


if __name__ == "__main__":
    typer.run(main)
