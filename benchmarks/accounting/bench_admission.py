"""Whether who comes is well decided: the time to finish, by what steps cost, on ten loads.

    python -m benchmarks.accounting.bench_admission --claims

The real scheduler and accounting, no model, and a clock that goes on by what a step takes: that of
the model of 0.45 B on one core, as calibrated there, and on a GPU, as a roofline says. So every
figure is exact. Headroom is kept in full, by half, not at all, or as decided by costs: those that
the scheduler is given, or those that it measures itself on the same clock.
"""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.accounting.loads import Outcome, play, ten_loads
from benchmarks.harness.report import WithClaims
from quire.engine.scheduling.step_costs import Costs
from quire.planner.hardware import BANDWIDTH_FRACTION, COMPUTE_FRACTION, SPEEDS, STEP_S
from quire.planner.simulation.cost_model import FittedCosts, Product, RooflineCosts, StepCosts
from quire.planner.simulation.simulated_engine import prices_of

GOAL = 1.05
FIXED = {"on": 1.0, "half": 0.5, "off": 0.0}  # shares of the expected need that stay free
BY_COSTS = ("costs given", "costs measured")

# quire bench --calibrate, the model of benchmarks/engine/model.py in bfloat16, one thread on one
# core of an AMD EPYC with AVX-512 in bfloat16.
CPU = FittedCosts(
    step_s=0.065,
    prompt_s=0.0079,
    token_s=0.0055,
    next_token_s=0.0048,
    further_token_s=0.007,
    long_token_s=0.0038,
    read_s=2.9e-06,
    attended_s=5.1e-06,
)
# The same model on an H100, as planner/hardware.py has it.
GPU = RooflineCosts(
    flops_per_s=COMPUTE_FRACTION * SPEEDS["h100"].flops_per_s,
    bytes_per_s=BANDWIDTH_FRACTION * SPEEDS["h100"].bytes_per_s,
    host_bytes_per_s=BANDWIDTH_FRACTION * SPEEDS["h100"].host_bytes_per_s,
    step_s=STEP_S,
    products=(
        Product(
            num_bytes=900_000_000,
            flops_per_token=0.9e9,
            flops_per_s=COMPUTE_FRACTION * SPEEDS["h100"].flops_per_s,
        ),
    ),
    head=Product(num_bytes=0, flops_per_token=0, flops_per_s=1),  # within the weights above
    flops_per_pair=4 * 1024 * 28,
    entry_bytes=114_688,
)
TABLES: dict[str, StepCosts] = {"CPU": CPU, "GPU": GPU}


def played(case: tuple[int, str, str, int, float]) -> Outcome:
    """One load, table and policy."""
    number, table, policy, seed, scale = case
    load, prices = ten_loads(seed, scale)[number], TABLES[table]
    if policy in FIXED:
        return play(load, prices, headroom=FIXED[policy])
    costs = Costs()
    if policy == "costs given":
        costs.give(prices_of(prices, load.max_num_batched_tokens))
    return play(load, prices, costs=costs)


def main(
    with_claims: WithClaims = False,
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = 1,
    scale: Annotated[float, typer.Option(help="Of the number of requests.")] = 1.0,
    processes: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
) -> None:
    """Print how long all takes, and against the best of the fixed ways."""
    names = [load.name for load in ten_loads(seed, scale)]
    policies = [*FIXED, *BY_COSTS]
    cases = [
        (number, table, policy, seed, scale)
        for number in range(len(names))
        for table in TABLES
        for policy in policies
    ]
    with ProcessPoolExecutor(processes) as pool:
        found = dict(zip(cases, pool.map(played, cases), strict=True))
    shown = Table(title="Seconds against the best of the first three; steps; computed again")
    for column in ("load", "steps cost", "best", *policies):
        shown.add_column(column, justify="left" if column in ("load", "steps cost") else "right")
    said = []
    for number, name in enumerate(names):
        for table in TABLES:
            row = {policy: found[number, table, policy, seed, scale] for policy in policies}
            best_s = min(row[policy].seconds for policy in FIXED)
            cells = [
                f"{one.seconds / best_s:.3f}; {one.num_steps:,}; {one.recomputed_share:.1%}"
                for one in row.values()
            ]
            shown.add_row(name, table, f"{best_s:,.4g} s", *cells)
            said += [
                {
                    "claim": f"time to finish, {name}, {table}, {policy}",
                    "ours": round(row[policy].seconds, 4),
                    "peer": round(best_s, 4),
                    "unit": "s",
                    "ratio": round(row[policy].seconds / best_s, 4),
                    "goal": GOAL,
                    "holds": row[policy].seconds <= GOAL * best_s,
                }
                for policy in BY_COSTS
            ]
    Console(width=160).print(shown)
    if with_claims:
        for line in said:
            print(json.dumps(line))


if __name__ == "__main__":
    typer.run(main)
