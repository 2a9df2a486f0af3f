"""The simulator beside a real engine, step by step: the same plans, and the same committed bytes.

Requests come at steps here, not at times, so that both are asked the same at the same moment.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.covering import only
from planner.fleets import COSTS, request
from quire.engine.llm import LLM
from quire.engine.scheduler import Scheduler
from quire.engine.step_plan import StepPlan
from quire.kv import CacheConfig
from quire.memory.machine.readings import MemoryReading
from quire.planner.simulation.simulated_engine import prices_of
from quire.planner.simulation.simulator import Fleet, make_replica
from quire.sampling_params import SamplingParams
from quire.traces import TraceRequest
from tiny import tiny_model

PREEMPTED_AT = (9, 10, 31, 60)  # steps
ID_TOKENS = 24  # no multiple of a block
Step = tuple[tuple[tuple[int, int, int, int], ...], int]  # chunks, committed bytes

STRATEGIES: dict[str, dict[str, Any]] = {
    "contiguous": {"cache": "contiguous"},
    "contiguous by request": {"cache": "contiguous", "reserve": "request"},
    "growing": {"cache": "growing", "growth_tokens": 32},
    "growing, staggered": {"cache": "growing", "growth": "staggered", "growth_tokens": 16},
    "paged": {"cache": "paged"},
    "paged without caching": {"cache": "paged", "enable_prefix_caching": False},
    "virtual": {"cache": "virtual", "enable_prefix_caching": False},
    "virtual that shares": {"cache": "virtual"},
}


# What they differ in from "contiguous" and "paged" is their accounting's, and tested there.
_ALIKE = ("contiguous by request", "growing", "paged without caching", "virtual")


class Plenty:
    """A machine with memory enough."""

    def now_s(self) -> float:
        return 0.0

    def read(self) -> MemoryReading:
        return MemoryReading(total_bytes=2**40, available_bytes=2**39)


def stretch(hash_id: int) -> list[int]:
    """What a hash id stands for in the real prompt: it begins like no other."""
    rest = np.random.default_rng(hash_id).integers(3, 100, ID_TOKENS - 1)
    return [100 + hash_id, *rest.tolist()]


def real_prompt(asked: TraceRequest, number: int) -> list[int]:
    token_ids = [token for hash_id in asked.hash_ids for token in stretch(hash_id)]
    rest = np.random.default_rng((7, number)).integers(3, 100, asked.input_tokens)
    own = [150 + number, *rest.tolist()]
    return (token_ids + own)[: asked.input_tokens]


def arrivals() -> list[tuple[int, TraceRequest]]:
    """By step: long and short ones, some that share beginnings, in two bursts."""
    rng = np.random.default_rng(3)
    several = []
    for number in range(22):
        step = int(rng.integers(0, 8)) if number < 12 else 40 + int(rng.integers(0, 60))
        ids = [int(i) for i in rng.integers(0, 3, rng.integers(0, 4))]
        length = ID_TOKENS * len(ids) + int(rng.integers(1, 40))
        several.append((step, length, int(rng.integers(1, 50)), ids))
    several.sort(key=lambda each: each[0])
    return [
        (step, request(0.0, length, output, *ids, id_tokens=ID_TOKENS))
        for step, length, output, ids in several
    ]


def drive(
    scheduler: Scheduler, add: Callable[[TraceRequest, int], None], step: Callable[[], bool]
) -> None:
    """Ask both alike. Now and then the last one has to make room, as if the machine were short."""
    coming, number, goes_on = arrivals(), 0, True
    at = 0
    while number < len(coming) or goes_on:
        while number < len(coming) and coming[number][0] <= at:
            add(coming[number][1], number)
            number += 1
        if at in PREEMPTED_AT:
            scheduler.preempt_youngest(spare_oldest=True)
        goes_on = step()
        at += 1


def real_steps(options: dict[str, Any], model: str) -> tuple[list[Step], LLM, Any]:
    llm = LLM(
        tiny_model(model),
        gauge=Plenty(),
        **{"max_model_len": 192, "max_num_seqs": 6, "max_num_batched_tokens": 48, **options},
    )
    with llm:
        steps, plans = list[Step](), list[StepPlan]()
        llm.engine.watch = plans.append
        # What steps take decides what comes: here as the simulator says, not as measured.
        limits = llm.engine.scheduler.limits
        llm.engine.scheduler.costs.give(prices_of(COSTS, limits.max_num_batched_tokens))
        empty = llm.accounting.ceiling.capacity_bytes, limits

        def add(asked: TraceRequest, number: int) -> None:
            params = SamplingParams(
                max_tokens=max(1, asked.output_tokens), temperature=0.0, ignore_eos=True
            )
            llm.start(llm.request(real_prompt(asked, number), params), lambda _: None)

        def step() -> bool:
            goes_on = llm.step()
            steps.append((chunks_of(plans.pop()), llm.usage().committed_bytes))
            assert llm.memory.committed_bytes == steps[-1][1]
            return goes_on

        drive(llm.engine.scheduler, add, step)
    return steps, llm, empty


def simulated_steps(options: dict[str, Any], llm: LLM, empty: Any) -> tuple[list[Step], Any]:
    capacity_bytes, limits = empty
    config = llm.config
    fleet = Fleet(
        spec=llm.spec,
        cache=config.cache,
        sizes=CacheConfig(
            max_model_len=llm.max_model_len,
            max_num_seqs=config.max_num_seqs,
            capacity_bytes=capacity_bytes,
            block_size=config.block_size,
            reserve=config.reserve,
            shares_pages=config.cache == "virtual" and config.enable_prefix_caching,
            growth=config.growth,
            growth_tokens=config.growth_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        limits=limits,
        costs=COSTS,
    )
    replica = make_replica(fleet, lambda _: None)
    steps, plans = list[Step](), list[StepPlan]()
    replica.engine.watch = plans.append

    def step() -> bool:
        replica.step()
        steps.append((chunks_of(plans.pop()), replica.accounting.usage().committed_bytes))
        return not replica.is_idle

    drive(replica.scheduler, replica.add, step)
    return steps, replica


def chunks_of(plan: StepPlan) -> tuple[tuple[int, int, int, int], ...]:
    return tuple((c.sequence.seq_id, c.start, c.stop, c.num_restored) for c in plan.chunks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("strategy", "blocks"),
    [
        *(
            pytest.param(
                strategy,
                26,
                id=f"{strategy}-tight",
                marks=pytest.mark.full if strategy in _ALIKE else [],
            )
            for strategy in STRATEGIES
        ),
        *(
            pytest.param(
                strategy,
                200,
                id=f"{strategy}-roomy",
                marks=[] if strategy == "paged" else pytest.mark.full,
            )
            for strategy in STRATEGIES
        ),
    ],
)
def test_the_same_plans_and_bytes_at_every_step(strategy: str, blocks: int) -> None:
    # 4 layers of 4 KiB for a block of 16 tokens. Ranges are 192 tokens long.
    options = {**STRATEGIES[strategy], "kv_cache_memory_bytes": blocks * 4 * 4096}
    real, llm, empty = real_steps(options, "llama")
    simulated, replica = simulated_steps(options, llm, empty)
    for number, (theirs, ours) in enumerate(zip(real, simulated, strict=False)):
        assert ours == theirs, f"step {number}"
    assert len(simulated) == len(real)
    statistics, ours = llm.statistics, replica.scheduler.statistics
    for name in ("num_preemptions", "num_recomputed_tokens", "prefix_hit_tokens"):
        assert getattr(ours, name) == getattr(statistics, name), name
    assert ours.prefix_missed_tokens == statistics.prefix_missed_tokens
    shares = llm.config.enable_prefix_caching and llm.config.cache in ("paged", "virtual")
    assert (ours.prefix_hit_tokens > 0) == shares
    assert ours.num_preemptions >= len(PREEMPTED_AT)
    assert ours.num_recomputed_tokens


@pytest.mark.parametrize("model", only(["gemma3", "deepseek_v3"], "gemma3"))
def test_windows_and_latents_too(model: str) -> None:
    options = {"cache": "paged", "kv_cache_memory_bytes": 60 * 4 * 4096}
    real, llm, empty = real_steps(options, model)
    simulated, _ = simulated_steps(options, llm, empty)
    assert simulated == real
