"""Requests that share a pool, played by the real scheduler on a clock of given costs.

There is no model and no tensor: what a step takes is what a cost model says, so that every figure
is exact and no repetition changes it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.scheduling.step_costs import Costs
from quire.engine.scheduling.swap_space import SwapSpace
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Sampled
from quire.kv import STRATEGIES, CacheConfig
from quire.planner.simulation.cost_model import FittedCosts, Reach, StepCosts, StepWork
from quire.sampling_params import SamplingParams
from quire.spec import FullAttention, Group

EOS = 0
BLOCK_TOKENS = 16
GROUPS = (Group(spec=FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16"), layers=(0,)),)
TOKEN_BYTES = GROUPS[0].bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    num_prompt_tokens: int
    num_output_tokens: int  # after which it ends
    max_tokens: int
    at: float = 0.0  # when it comes, as a share of the time that all take where memory is plenty
    num_shared_tokens: int = 0  # of the prompt, that all others begin with too


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Jobs, and the pool that they share."""

    name: str
    jobs: tuple[Job, ...]
    pool_tokens: int
    max_num_seqs: int
    ends_are_known: bool
    max_num_batched_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: float
    num_steps: int
    num_preemptions: int
    recomputed_share: float  # of the ideal: each token of each sequence once
    swapped_tokens: int  # there
    mean_running: float  # sequences that bring a new token, over all steps


def ten_loads(seed: int, scale: float = 1.0) -> list[Load]:
    """``scale``: of the number of requests, and of the pool while it holds two of the longest."""
    draw = random.Random(seed)

    def count(number: int) -> int:
        return max(4, round(number * scale))

    def lognormal(median: float, sigma: float, most: int) -> int:
        return min(most, max(1, round(median * draw.lognormvariate(0.0, sigma))))

    def several(
        number: int, prompt: tuple[int, int], output: Callable[[], int], most: int, at: float = 0.0
    ) -> tuple[Job, ...]:
        return tuple(
            Job(
                num_prompt_tokens=draw.randint(*prompt),
                num_output_tokens=min(most, output()),
                max_tokens=most,
                at=at,
            )
            for _ in range(count(number))
        )

    equal = several(16, (64, 64), lambda: 128, 128)
    varied = several(200, (16, 256), lambda: lognormal(74, 0.9, 512), 512)
    bursts = tuple(
        job
        for number in range(4)
        for job in several(30, (32, 160), lambda: lognormal(90, 0.7, 384), 384, at=0.6 * number)
    )
    tailed = several(
        96, (32, 96), lambda: draw.randint(600, 1000) if draw.random() < 0.1 else 32, 1024
    )
    shared = tuple(
        replace(job, num_prompt_tokens=job.num_prompt_tokens + 384, num_shared_tokens=384)
        for job in several(80, (16, 64), lambda: lognormal(100, 0.6, 400), 400)
    )
    narrow = several(80, (100, 300), lambda: lognormal(80, 0.6, 300), 300)
    long = several(60, (500, 1100), lambda: draw.randint(40, 160), 200)
    large = several(160, (300, 1500), lambda: lognormal(300, 0.8, 2000), 2000)
    usual = {"max_num_seqs": 64, "pool_tokens": 4096}
    several_loads = [
        Load(name="16 equal", jobs=equal, pool_tokens=1024, max_num_seqs=16, ends_are_known=True),
        Load(
            name="16 equal, ends unknown",
            jobs=tuple(replace(job, max_tokens=512) for job in equal),
            pool_tokens=1024, max_num_seqs=16, ends_are_known=False,
        ),
        Load(name="200 random", jobs=known(varied), ends_are_known=True, **usual),
        Load(name="200 random, ends unknown", jobs=varied, ends_are_known=False, **usual),
        Load(name="bursts, ends unknown", jobs=bursts, ends_are_known=False, **usual),
        Load(name="long tails", jobs=known(tailed), ends_are_known=True, **usual),
        Load(name="long tails, ends unknown", jobs=tailed, ends_are_known=False, **usual),
        Load(name="shared prefixes, ends unknown", jobs=shared, ends_are_known=False, **usual),
        Load(
            name="few tokens a step, ends unknown", jobs=narrow, ends_are_known=False,
            max_num_batched_tokens=64, **usual,
        ),
        Load(
            name="long prompts, large pool", jobs=known(long) + large, ends_are_known=False,
            max_num_batched_tokens=2048, max_num_seqs=64, pool_tokens=32_768,
        ),
    ]  # fmt: skip
    return [scaled(load, scale) for load in several_loads]


def scaled(load: Load, scale: float) -> Load:
    """In a pool as much smaller, while that holds two of the longest."""
    longest = max(job.num_prompt_tokens + job.max_tokens for job in load.jobs)
    least = min(load.pool_tokens, 2 * longest)
    return replace(load, pool_tokens=max(least, round(scale * load.pool_tokens)))


def any_load(draw: random.Random) -> tuple[Load, FittedCosts]:
    """One of a wide family, and what steps take there: tokens cost little beside a step, or much.

    The pool holds a few sequences at their longest, and there are several times as many.
    """
    longest_prompt, most = draw.choice([40, 150, 400]), draw.choice([60, 200, 500])
    sigma, median = draw.uniform(0.1, 1.2), most * draw.uniform(0.15, 0.8)
    shared = draw.choice([0, 0, 0, 160])
    jobs = tuple(
        Job(
            num_prompt_tokens=shared + draw.randint(longest_prompt // 4, longest_prompt),
            num_output_tokens=min(most, max(1, round(median * draw.lognormvariate(0.0, sigma)))),
            max_tokens=most,
            at=draw.choice([0.0, 0.0, 0.5]),
            num_shared_tokens=shared,
        )
        for _ in range(draw.randint(24, 48))
    )
    ends_are_known = draw.random() < 0.4
    load = Load(
        name="any",
        jobs=known(jobs) if ends_are_known else jobs,
        pool_tokens=round((shared + longest_prompt + most) * draw.uniform(2.5, 6)),
        max_num_seqs=64,
        ends_are_known=ends_are_known,
        max_num_batched_tokens=draw.choice([64, 256, 1024]),
    )
    token_s = 10 ** draw.uniform(-4, -0.5)  # beside a step of 1 s
    prices = FittedCosts(
        step_s=1.0,
        token_s=token_s,
        next_token_s=token_s,
        further_token_s=token_s,
        long_token_s=token_s,
    )
    return load, prices


def known(jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Where ends are known, it is by their limits."""
    return tuple(replace(job, max_tokens=job.num_output_tokens) for job in jobs)


def play(
    load: Load,
    prices: StepCosts,
    *,
    headroom: float | None = None,
    costs: Costs | None = None,
    swap_tokens: int = 0,
    caching: bool = True,
    prepare: Callable[[Scheduler], object] = bool,
) -> Outcome:
    """Every job to its end. ``prices``: what a step takes; ``costs``: what is believed of that."""
    longest = max(job.num_prompt_tokens + job.max_tokens for job in load.jobs)
    config = CacheConfig(
        max_model_len=longest,
        max_num_seqs=load.max_num_seqs,
        capacity_bytes=load.pool_tokens * TOKEN_BYTES,
        block_size=BLOCK_TOKENS,
        page_bytes=BLOCK_TOKENS * TOKEN_BYTES,
        enable_prefix_caching=caching,
    )
    accounting = STRATEGIES["paged"].make_accounting(GROUPS, config)
    limits = SchedulerLimits(
        max_model_len=longest,
        max_num_seqs=load.max_num_seqs,
        max_num_batched_tokens=load.max_num_batched_tokens,
        eos_token_ids=frozenset([EOS]),
        headroom=headroom,
    )
    scheduler = Scheduler(
        accounting, limits, swap=SwapSpace(swap_tokens * TOKEN_BYTES), costs=costs
    )
    prepare(scheduler)
    reach, now_s, num_steps, num_new = Reach(GROUPS), 0.0, 0, 0
    unit_s = plenty_s(load, prices)
    coming = sorted(enumerate(load.jobs), key=lambda pair: pair[1].at)[::-1]
    while coming or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now_s = max(now_s, coming[-1][1].at * unit_s)
        while coming and coming[-1][1].at * unit_s <= now_s:
            number, job = coming.pop()
            scheduler.add(_request(number, job, load.ends_are_known))
        plan = scheduler.plan()
        accounting.drain()
        results = [
            Sampled(token_ids=(_next(draw.sequence, load.jobs[draw.sequence.request.request_id]),))
            for draw in plan.draws
        ]
        step_s = prices.seconds(reach.of(plan)) if plan.chunks else 0.0
        now_s += step_s
        if plan.chunks:
            scheduler.costs.note_step(plan.num_tokens, len(plan.chunks), plan.num_read, step_s)
        scheduler.update(plan, results)
        accounting.drain()
        num_steps, num_new = num_steps + 1, num_new + len(results)
    stats = scheduler.statistics
    ideal = sum(job.num_prompt_tokens + job.num_output_tokens - 1 for job in load.jobs)
    return Outcome(
        seconds=now_s,
        num_steps=num_steps,
        num_preemptions=stats.num_preemptions,
        recomputed_share=stats.num_recomputed_tokens / ideal,
        swapped_tokens=stats.saved_bytes // TOKEN_BYTES,
        mean_running=num_new / num_steps,
    )


def plenty_s(load: Load, prices: StepCosts) -> float:
    """About how long the work takes in batches as large as there are seats."""
    seats = min(load.max_num_seqs, len(load.jobs))
    tokens = sum(job.num_output_tokens for job in load.jobs)
    return prices.seconds(StepWork(seats, seats, seats, 0.0, 0.0)) * tokens / seats


def _request(number: int, job: Job, ends_are_known: bool) -> Request:
    """A prompt that begins like no other, or like all others."""
    first = 10_000 * (number + 1)
    own = range(first, first + job.num_prompt_tokens - job.num_shared_tokens)
    return Request(
        request_id=number,
        prompt_token_ids=(*range(1, job.num_shared_tokens + 1), *own),
        params=SamplingParams(max_tokens=job.max_tokens, ignore_eos=ends_are_known),
    )


def _next(sequence: Sequence, job: Job) -> int:
    return EOS if sequence.num_output_tokens + 1 == job.num_output_tokens else 1
