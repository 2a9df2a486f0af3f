"""Mooncake's trace through a simulated engine with a host tier of four pools.

The engine's own scheduler, pool and offloading policy run on a virtual clock; beside them are the
pool's policy alone at the tier's size and at that of both (``quire hit-rates``), and pool and tier
without time, where everything is stored. Answers are cut to one token, which leaves the prompts'
hits as they are and saves the time of a million steps; no clock is read.

    python -m benchmarks.planner.tiered TRACE [--pool-gib 40] [--write auto] [--output-tokens 1]
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.plan import place_of
from quire.config import EngineConfig
from quire.kv import DEFAULT_POLICY
from quire.planner.hardware import roofline
from quire.planner.hit_rates import hit_rate_curve, kept_blocks, prompts_of, tiered_hits
from quire.planner.planned_tiers import TierTable
from quire.planner.simulation.result import SimulationResult
from quire.planner.simulation.simulator import fleet_for, simulate
from quire.planner.subject import find_subject
from quire.traces import TraceRequest, open_trace
from quire.units import align_down

MODEL, DEVICE, TIMES = "meta-llama/Llama-3.1-8B", "h100", 4
GOAL = 0.95


def main(
    trace: Path,
    pool_gib: Annotated[float, typer.Option(help="KV memory of the engine.")] = 40.0,
    write: Annotated[str, typer.Option(help="--kv-tier-write: auto or always.")] = "auto",
    speed: Annotated[str, typer.Option(help="--tier-speed.")] = "memory=25,25,0",
    output_tokens: Annotated[int, typer.Option(help="Of each answer; 0: as in the trace.")] = 1,
    rate: Annotated[float, typer.Option(help="Of the trace's own pace.")] = 0.5,
) -> None:
    """Compare hits of pool and tier with the pool's policy alone, of the same size."""
    pool_bytes = int(pool_gib * 2**30)
    subject = find_subject(MODEL, dtype="auto")
    config = EngineConfig.from_options(
        cache="paged",
        block_size=512,  # as the trace's
        kv_cache_memory_bytes=str(pool_bytes),
        kv_tier=(f"memory:?size={TIMES * pool_bytes}",),
        kv_tier_write=write,
        max_num_batched_tokens=8192,
    )
    fleet = fleet_for(
        subject,
        config,
        place_of("640GiB", DEVICE),
        roofline(subject, subject.spec, DEVICE, 1),
        tier_table=TierTable.of([speed], ()),
    )

    def paced(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        for each in requests:
            tokens = output_tokens or each.output_tokens
            yield replace(each, at_s=each.at_s / rate, output_tokens=tokens)

    found = simulate(paced(open_trace(trace)), fleet)
    assert found.tiers is not None
    prompts = prompts_of(open_trace(trace))
    pool = align_down(pool_bytes // subject.spec.bytes_per_token, prompts.block_tokens)
    tier = fleet.tiers[0].num_tokens or 0
    alone = hit_rate_curve(prompts, [tier, pool + tier], [DEFAULT_POLICY])
    still = tiered_hits(
        prompts,
        pool,
        [kept_blocks(fleet.tiers[0], prompts.block_tokens)],
        policy=DEFAULT_POLICY,
    )
    print(f"pool {pool:,} tokens, tier {tier:,}, --kv-tier-write {write}, --tier-speed {speed}")
    print(
        f"engine: {found.hit_rate:.2%}, of which the tier {_share(found.tiers.hit_tokens, found)}; "
        f"{found.tiers.stored_blocks:,} blocks stored, {found.tiers.dropped_blocks:,} evicted "
        f"before that; {found.tiers.saved_s:,.0f} s saved, "
        f"{found.tiers.wasted_tokens:,} tokens loaded for nothing"
    )
    print(f"pool and tier without time, all stored: {still.hit_fraction:.2%}")
    for what, size in (("tier", tier), ("pool and tier", pool + tier)):
        best = alone.at(DEFAULT_POLICY, size).hit_fraction
        print(
            f"{DEFAULT_POLICY} alone at the size of {what}, {size:,}: {best:.2%}; engine "
            f"{found.hit_rate / best:.3f}, without time {still.hit_fraction / best:.3f} of it "
            f"(goal {GOAL})"
        )


def _share(num_tokens: int, found: SimulationResult) -> str:
    return f"{num_tokens / max(1, found.prefix_query_tokens):.2%}"


if __name__ == "__main__":
    typer.run(main)
