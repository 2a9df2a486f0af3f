"""What making room costs: recomputed and swapped tokens, and how many steps the work takes.

The real scheduler over the real accounting, with no model: a step is a step, whatever it takes, so
every figure is exact and no repetition changes it. The baseline, in the same run, is recompute with
last-in victims and without headroom, which is what other engines do.

"Running" is counted as sequences that bring a new token, averaged over all steps: who only computes
again what it had counts for nothing. Recomputed tokens are those that a sequence had computed,
lost and computed again; the ideal is each token of each sequence once.
"""

import json
import random
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quire.engine.params import SamplingParams
from quire.engine.plan import Sampled
from quire.engine.scheduler import Limits, Scheduler
from quire.engine.scheduling.swap import Costs, SwapSpace
from quire.engine.sequence import Request, Sequence
from quire.spec import FullAttention, Group
from quire.strategies import STRATEGIES, CacheConfig

EOS = 0
BLOCK_TOKENS = 16
GOAL = 0.05
GROUPS = (Group(spec=FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16"), layers=(0,)),)
TOKEN_BYTES = GROUPS[0].bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    num_prompt_tokens: int
    num_output_tokens: int  # after which it ends
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Jobs that are all there from the beginning, and the pool that they share."""

    name: str
    jobs: tuple[Job, ...]
    pool_tokens: int
    max_num_seqs: int
    ends_are_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How room is made. ``swap_tokens``: of swap space, which is thought cheaper than computing."""

    name: str
    headroom: bool
    spares: bool  # hysteresis: not twice the same victim in a row
    swap_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    num_steps: int
    num_preemptions: int
    recomputed_share: float  # of the ideal
    swapped_tokens: int  # there
    mean_running: float


def baseline() -> Way:
    return Way(name="last-in, recompute", headroom=False, spares=False)


def ways(load: Load) -> list[Way]:
    return [
        baseline(),
        Way(name="hysteresis", headroom=False, spares=True),
        Way(name="headroom (default)", headroom=True, spares=True),
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


def play(load: Load, way: Way, *, caching: bool) -> Outcome:
    """Every job to its end."""
    longest = max(job.num_prompt_tokens + job.max_tokens for job in load.jobs)
    config = CacheConfig(
        max_model_len=longest,
        max_num_seqs=load.max_num_seqs,
        capacity_bytes=load.pool_tokens * TOKEN_BYTES,
        block_size=BLOCK_TOKENS,
        page_bytes=BLOCK_TOKENS * TOKEN_BYTES,
        enable_prefix_caching=caching,
    )
    accounting = STRATEGIES["paged"][0](GROUPS, config)
    limits = Limits(
        max_model_len=longest,
        max_num_seqs=load.max_num_seqs,
        max_num_batched_tokens=1024,
        eos_token_ids=frozenset([EOS]),
        headroom=way.headroom,
    )
    scheduler = Scheduler(
        accounting, limits, swap=SwapSpace(way.swap_tokens * TOKEN_BYTES), costs=_costs()
    )
    if not way.spares:
        scheduler._preemption.victim = _last_in  # type: ignore[method-assign]
    for number, job in enumerate(load.jobs):
        scheduler.add(_request(number, job, load.ends_are_known))
    num_steps = num_new = 0
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        accounting.drain()
        results = [
            Sampled(token_ids=(_next(draw.sequence, load.jobs[draw.sequence.request.request_id]),))
            for draw in plan.draws
        ]
        scheduler.update(plan, results)
        accounting.drain()
        num_steps, num_new = num_steps + 1, num_new + len(results)
    stats = scheduler.stats
    ideal = sum(job.num_prompt_tokens + job.num_output_tokens - 1 for job in load.jobs)
    return Outcome(
        num_steps=num_steps,
        num_preemptions=stats.num_preemptions,
        recomputed_share=stats.num_recomputed_tokens / ideal,
        swapped_tokens=stats.saved_bytes // TOKEN_BYTES,
        mean_running=num_new / num_steps,
    )


def _costs() -> Costs:
    """It is assumed that entries are copied in less time than they are computed."""
    costs = Costs(bytes_per_token=TOKEN_BYTES)
    costs.note_step(num_tokens=100, num_sequences=1, seconds=1.0)
    costs.note_saved(TOKEN_BYTES, 1e-4)
    costs.note_loaded(TOKEN_BYTES, 1e-4)
    return costs


def _last_in(candidates: list[Sequence]) -> Sequence:
    return candidates[-1]


def _request(number: int, job: Job, ends_are_known: bool) -> Request:
    """A prompt that begins like no other."""
    first = 10_000 * (number + 1)
    return Request(
        request_id=number,
        prompt_token_ids=tuple(range(first, first + job.num_prompt_tokens)),
        params=SamplingParams(max_tokens=job.max_tokens, ignore_eos=ends_are_known),
    )


def _next(sequence: Sequence, job: Job) -> int:
    return EOS if sequence.num_output_tokens + 1 == job.num_output_tokens else 1


def claims(load: Load, caching: bool, found: dict[str, Outcome]) -> list[dict[str, Any]]:
    """The goals are set for the first load; with swap of one pool, and with the defaults alone."""
    peer = found[baseline().name]
    lines: list[dict[str, Any]] = []
    where = f"{load.name}, {'with' if caching else 'without'} prefix caching"
    for way in ("headroom, swap 1 pool", "headroom (default)"):
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
    with_claims: Annotated[
        bool, typer.Option("--claims", help="End with one JSON object a line for each claim.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the lengths of the second load.")] = 1,
) -> None:
    """Print how much is computed twice, and how long it takes."""
    said: list[dict[str, Any]] = []
    for number, load in enumerate(loads(seed)):
        for caching in (False, True):
            found = {way.name: play(load, way, caching=caching) for way in ways(load)}
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
