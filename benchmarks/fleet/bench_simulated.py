"""A simulated fleet beside a real one: two replicas, the same placement, the same requests.

The real replicas are processes on a processor each (``processes.py``) behind a ``FleetEngine``
with ``PrefixAware``, fed by events over ZeroMQ; this process is the door and the client, without
HTTP, on the same processors. The simulated ones have the engine's own scheduler and accounting;
how long their steps take, and a request at the door, a calibration says (``calibration.py``).

    python -m benchmarks.fleet.bench_simulated --model FOLDER --calibrate fleet.json
    python -m benchmarks.fleet.bench_simulated --model FOLDER --calibration fleet.json --rounds 3
"""

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import numpy as np
import typer
from rich.console import Console

from benchmarks.fleet.calibration import (
    NUM_REPLICAS,
    PROBE_ANSWER,
    PROBE_TOKENS,
    Answer,
    ask,
    engines_costs,
    fleets_costs,
    probe,
    serving,
)
from benchmarks.fleet.processes import OPTIONS
from benchmarks.harness.report import Table, WithClaims, show
from benchmarks.harness.server import parent_and_cpu_s
from benchmarks.planner.real import Plenty, fleet_of
from quire.bench.traffic import replay
from quire.bench.workload import Query, Vocabulary
from quire.engine.sequence import Sequence
from quire.engine.statistics import Latencies
from quire.fleet.fleet_engine import FleetEngine
from quire.planner.planned_tiers import planned_peer
from quire.planner.simulation.cost_model import FittedCosts
from quire.planner.simulation.simulator import Fleet, simulate
from quire.traces import TraceRequest

GOAL = 0.10
_ID_TOKENS = 64  # of a prompt that a hash id stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one fleet did with one workload."""

    tokens_per_s: float
    ttft_mean_s: float
    ttft_median_s: float
    found_tokens: int


# -- workloads -------------------------------------------------------------------------------------


def workloads(scale: float) -> dict[str, list[TraceRequest]]:
    """Six, of some twenty seconds each where ``scale`` is 1; twice as far apart at 2."""
    rng = np.random.default_rng(1)
    fresh = iter(range(1, 10**9))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(next(fresh) for _ in range(count))

    def poisson(count: int, gap_s: float) -> list[float]:
        return np.cumsum(rng.exponential(gap_s * scale, count)).tolist()  # type: ignore[no-any-return]

    def one(at_s: float, own: tuple[int, ...], output: int) -> TraceRequest:
        return TraceRequest(
            at_s=at_s,
            input_tokens=_ID_TOKENS * len(own),
            output_tokens=output,
            hash_ids=own,
            id_tokens=_ID_TOKENS,
        )

    several = [ids(4) for _ in range(4)]
    talks: list[tuple[int, ...]] = [() for _ in range(5)]
    spoken = []
    for place, at_s in enumerate(poisson(25, 0.9)):
        talk = place % len(talks)
        talks[talk] = (*talks[talk], *ids(1))
        spoken.append(one(at_s, talks[talk], 16))
    return {
        "short prompts": [one(at_s, ids(1), 24) for at_s in poisson(28, 0.7)],
        "long prompts": [one(at_s, ids(8), 8) for at_s in poisson(14, 1.6)],
        "all at once": [one(0.0, ids(2), 24) for _ in range(24)],
        "bursts": [one(8.0 * scale * (n // 8), ids(2), 24) for n in range(24)],
        "shared prefixes": [
            one(at_s, (*several[n % 4], *ids(1)), 16) for n, at_s in enumerate(poisson(28, 0.8))
        ],
        "conversations": spoken,
    }


# -- both ------------------------------------------------------------------------------------------


def simulated(fleet: Fleet, trace: list[TraceRequest]) -> Figures:
    firsts = list[float]()

    def note(_: int, sequence: Sequence) -> None:
        first_s = Latencies.of(sequence).first_token_s
        assert first_s is not None
        firsts.append(first_s)

    found = simulate(trace, fleet, ended=note)
    return Figures(
        # A simulation begins at 0, and what is real is counted from its first request on.
        tokens_per_s=found.num_output_tokens / (found.duration_s - min(t.at_s for t in trace)),
        ttft_mean_s=mean(firsts),
        ttft_median_s=median(firsts),
        found_tokens=found.prefix_hit_tokens,
    )


async def really(fleet: FleetEngine, trace: list[TraceRequest], seed: int) -> Figures:
    queries = replay(trace, Vocabulary(), seed=seed)
    begun_s = time.perf_counter()

    async def one(query: Query) -> Answer:
        await asyncio.sleep(max(0.0, begun_s + query.at_s - time.perf_counter()))
        return await ask(fleet, query.token_ids, query.max_tokens)

    answers = await asyncio.gather(*map(one, queries))
    first_at_s = begun_s + min(query.at_s for query in queries)
    firsts = [each.first_s for each in answers]
    return Figures(
        tokens_per_s=sum(each.num_tokens for each in answers)
        / (max(each.end_s for each in answers) - first_at_s),
        ttft_mean_s=mean(firsts),
        ttft_median_s=median(firsts),
        found_tokens=sum(each.found_tokens for each in answers),
    )


def _others_s() -> tuple[float, float]:
    """Return the seconds of processors that programs beside this one and its children took, and
    those that the host of this machine kept for itself.
    """
    with Path("/proc/stat").open(encoding="utf-8") as file:
        user, nice, system, _, _, irq, softirq, stolen, *_ = map(int, file.readline().split()[1:])
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    all_s = (user + nice + system + irq + softirq) * tick_s
    own = [os.getpid(), *(each.pid for each in multiprocessing.active_children())]
    return all_s - sum(parent_and_cpu_s(pid)[1] for pid in own if pid is not None), stolen * tick_s


async def _measure(
    model: str | None, fleet: Fleet, traces: dict[str, list[TraceRequest]], rounds: int
) -> dict[str, list[tuple[Figures, Figures]]]:
    """(real, simulated) of each round."""
    console = Console(stderr=True)
    async with serving(model) as engine:
        await really(engine, next(iter(traces.values())), seed=1000)
        found: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name in traces}
        one = TraceRequest(at_s=0.0, input_tokens=PROBE_TOKENS, output_tokens=PROBE_ANSWER)
        one_s = simulated(fleet, [one]).ttft_mean_s
        for number in range(rounds):
            for name, trace in traces.items():
                probed_s = await probe(engine)
                before, begun_s = _others_s(), time.perf_counter()
                real = await really(engine, trace, seed=number)
                took_s = time.perf_counter() - begun_s
                others, host = (
                    (now_s - then_s) / took_s
                    for now_s, then_s in zip(_others_s(), before, strict=True)
                )
                ours, probed_s = simulated(fleet, trace), probed_s + await probe(engine)
                found[name].append((real, ours))
                # A machine that has become slower since the calibration shows here, too.
                console.print(
                    f"round {number + 1} of {rounds}, {name}: real {real}; simulated {ours}; "
                    f"others took {others:.2f} of a processor, and the host {host:.2f}; "
                    f"prompts alone took {median(probed_s) / one_s:.2f} of their simulated time",
                    soft_wrap=True,
                    highlight=False,
                )
                await asyncio.sleep(0.5)
    return found


# -- the table -------------------------------------------------------------------------------------

_COMPARED: tuple[tuple[str, Callable[[Figures], float]], ...] = (
    ("output tokens/s", lambda figures: figures.tokens_per_s),
    ("first byte, mean", lambda figures: figures.ttft_mean_s),
    ("first byte, median", lambda figures: figures.ttft_median_s),
)


def _rows(found: dict[str, list[tuple[Figures, Figures]]]) -> Iterator[dict[str, Any]]:
    for name, taken in found.items():
        for what, of in _COMPARED:
            errors = [of(ours) / of(real) - 1 for real, ours in taken]
            yield {
                "claim": f"simulated fleet, {name}: {what}",
                "ours": median(of(ours) for _, ours in taken),
                "peer": median(of(real) for real, _ in taken),
                "unit": "s" if "byte" in what else "tokens/s",
                "ratio": 1 + median(errors),
                "goal": f"within {GOAL:.0%}",
                "holds": abs(median(errors)) <= GOAL,
                "notes": {"least": 1 + min(errors), "most": 1 + max(errors)},
            }


def _print(found: dict[str, list[tuple[Figures, Figures]]]) -> None:
    table = Table(
        title="simulated against real",
        columns=("workload", "figure", "real", "simulated", "error (least … most)", "holds"),
        rows=[],
    )
    for row in _rows(found):
        _, name, what = row["claim"].replace("simulated fleet, ", "fleet: ").split(": ")
        notes = row["notes"]
        table.rows.append(
            [
                name,
                what,
                f"{row['peer']:.3g}",
                f"{row['ours']:.3g}",
                f"{row['ratio'] - 1:+.1%} ({notes['least'] - 1:+.1%} … {notes['most'] - 1:+.1%})",
                "yes" if row["holds"] else "no",
            ]
        )
    for name, taken in found.items():
        real, ours = (median(each[place].found_tokens for each in taken) for place in (0, 1))
        table.rows.append([name, "tokens found", f"{real:.0f}", f"{ours:.0f}", "", ""])
    show([table], [], Console())


def main(
    model: Annotated[str | None, typer.Option(help="A folder; default: the demo model.")] = None,
    calibrate_to: Annotated[
        Path | None,
        typer.Option("--calibrate", help="Measure steps and the door, write them there, and end."),
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="What --calibrate has written.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    scale: Annotated[float, typer.Option(help="Factor for the times between requests.")] = 1.0,
    only: Annotated[str, typer.Option(help="Workloads whose names have this.")] = "",
    with_claims: WithClaims = False,
) -> None:
    """Compare throughput and first bytes of a simulated and a real fleet of two replicas."""
    costs = (
        asyncio.run(_calibrated(model)) if calibration is None else FittedCosts.read(calibration)
    )
    if calibrate_to is not None:
        costs.write(calibrate_to)
        return
    fleet = simulated_fleet(model, costs, routing="prefix-aware")
    traces = {name: trace for name, trace in workloads(scale).items() if only in name}
    found = asyncio.run(_measure(model, fleet, traces, rounds))
    _print(found)
    if with_claims:
        for row in _rows(found):
            print(json.dumps(row))


async def _calibrated(model: str | None) -> FittedCosts:
    costs = engines_costs(model)
    async with serving(model) as engine:
        return await fleets_costs(engine, costs)


def simulated_fleet(
    model: str | None, costs: FittedCosts, *, routing: str, num_prefill: int = 0
) -> Fleet:
    """Return a fleet of ``NUM_REPLICAS`` that are sized and calibrated as the real ones.

    ``num_prefill`` of them compute prompts for the others, over a link of this machine.
    """
    from quire.engine.llm import LLM

    with LLM(model, gauge=Plenty(), **OPTIONS) as llm:
        fleet = fleet_of(llm, llm.engine.scheduler)
    block_size = fleet.sizes.block_size
    return replace(
        fleet,
        costs=costs,
        num_replicas=NUM_REPLICAS - num_prefill,
        num_prefill=num_prefill,
        peer=planned_peer(fleet.spec.groups, block_size=block_size) if num_prefill else None,
        routing=routing,
        door=costs.door,
    )


if __name__ == "__main__":
    typer.run(main)
