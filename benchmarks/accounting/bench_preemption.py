"""What making room costs: recomputed and swapped tokens, and how many steps the work takes.

The real scheduler over the real accounting, with no model: a step is a step, whatever it takes, so
every figure is exact and no repetition changes it. The baseline, in the same run, is recompute with
last-in victims and without headroom, which is what other engines do.

"Running" is counted as sequences that bring a new token, averaged over all steps: one that only
computes again what it had counts for nothing. Recomputed tokens are those that a sequence had
computed, lost and computed again; the ideal is each token of each sequence once.
"""

import json
import random
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.accounting.loads import TOKEN_BYTES, Job, Load, Outcome, play
from benchmarks.harness.report import WithClaims
from quire.engine.scheduler import Scheduler
from quire.engine.scheduling.step_costs import Costs, Prices
from quire.engine.sequence import Sequence
from quire.planner.simulation.cost_model import FittedCosts

GOAL = 0.05
STEP = FittedCosts(step_s=1.0)  # a step is a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How room is made. ``swap_tokens``: of swap space, which is thought cheaper than computing."""

    name: str
    headroom: bool
    spares: bool  # hysteresis: not twice the same victim in a row
    swap_tokens: int = 0


def baseline() -> Way:
    return Way(name="last-in, recompute", headroom=False, spares=False)


def ways(load: Load) -> list[Way]:
    return [
        baseline(),
        Way(name="hysteresis", headroom=False, spares=True),
        Way(name="headroom", headroom=True, spares=True),
        Way(
            name="headroom, swap ½ pool",
            headroom=True,
            spares=True,
            swap_tokens=load.pool_tokens // 2,
        ),
        Way(name="headroom, swap 1 pool", headroom=True, spares=True, swap_tokens=load.pool_tokens),
    ]


def loads(seed: int) -> list[Load]:
    draw = random.Random(seed)
    equal = tuple(
        Job(num_prompt_tokens=64, num_output_tokens=128, max_tokens=128) for _ in range(16)
    )
    varied = tuple(
        Job(
            num_prompt_tokens=draw.randint(16, 256),
            num_output_tokens=min(512, max(1, round(draw.lognormvariate(4.3, 0.9)))),
            max_tokens=512,
        )
        for _ in range(200)
    )
    return [
        Load(
            name="16 × (64 + 128)",
            jobs=equal,
            pool_tokens=1024,
            max_num_seqs=16,
            ends_are_known=True,
        ),
        Load(
            name="200 × (16…256 + lognormal)",
            jobs=varied,
            pool_tokens=4096,
            max_num_seqs=64,
            ends_are_known=False,
        ),
    ]


def play_way(load: Load, way: Way, *, caching: bool) -> Outcome:
    """Every job to its end."""

    def prepare(scheduler: Scheduler) -> None:
        if not way.spares:
            scheduler._victim = _last_in  # type: ignore[method-assign]

    return play(
        load,
        STEP,
        headroom=float(way.headroom),
        costs=_costs(),
        swap_tokens=way.swap_tokens,
        caching=caching,
        prepare=prepare,
    )


def _costs() -> Costs:
    """It is assumed that entries are copied in less time than they are computed."""
    costs = Costs(bytes_per_token=TOKEN_BYTES, prices=Prices(step_s=0.0, token_s=0.01))
    costs.note_saved(TOKEN_BYTES, 1e-4)
    costs.note_loaded(TOKEN_BYTES, 1e-4)
    return costs


def _last_in(candidates: Several[Sequence]) -> Sequence:
    return candidates[-1]


def claims(load: Load, caching: bool, found: dict[str, Outcome]) -> list[dict[str, Any]]:
    """The goals are set for the first load; with swap of one pool, and without swap."""
    peer = found[baseline().name]
    lines: list[dict[str, Any]] = []
    where = f"{load.name}, {'with' if caching else 'without'} prefix caching"
    for way in ("headroom, swap 1 pool", "headroom"):
        ours = found[way]
        for what, mine, theirs, goal, holds in (
            (
                "recomputed share of the ideal",
                ours.recomputed_share,
                peer.recomputed_share,
                GOAL,
                ours.recomputed_share <= GOAL,
            ),
            (
                "sequences running on average",
                ours.mean_running,
                peer.mean_running,
                peer.mean_running,
                ours.mean_running >= peer.mean_running,
            ),
            (
                "steps to finish",
                ours.num_steps,
                peer.num_steps,
                peer.num_steps,
                ours.num_steps <= peer.num_steps,
            ),
        ):
            lines.append(
                {
                    "claim": f"{where}, {way}: {what}",
                    "ours": round(mine, 4),
                    "peer": round(theirs, 4),
                    "unit": "share" if "share" in what else "count",
                    "ratio": round(mine / theirs, 4) if theirs else None,
                    "goal": round(goal, 4),
                    "holds": holds,
                }
            )
    return lines


def main(
    with_claims: WithClaims = False,
    seed: Annotated[int, typer.Option(help="Of the lengths of the second load.")] = 1,
) -> None:
    """Print how much is computed twice, and how long it takes."""
    said: list[dict[str, Any]] = []
    for number, load in enumerate(loads(seed)):
        for caching in (False, True):
            found = {way.name: play_way(load, way, caching=caching) for way in ways(load)}
            Console().print(_table(load, caching, found))
            if not number:
                said += claims(load, caching, found)
    if with_claims:
        for line in said:
            print(json.dumps(line))


def _table(load: Load, caching: bool, found: dict[str, Outcome]) -> Table:
    title = (
        f"{load.name} in {load.pool_tokens:,} tokens, {'with' if caching else 'no'} prefix caching"
    )
    table = Table(title=title)
    for column in ("", "recomputed", "swapped tokens", "preemptions", "running", "steps"):
        table.add_column(column, justify="left" if not column else "right")
    for name, outcome in found.items():
        table.add_row(
            name,
            f"{outcome.recomputed_share:.1%}",
            f"{outcome.swapped_tokens:,}",
            f"{outcome.num_preemptions:,}",
            f"{outcome.mean_running:.2f}",
            f"{outcome.num_steps:,}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
