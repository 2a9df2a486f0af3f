"""What placing a request costs, how much memory the directory of prefixes takes, how fast it takes
events, and how much a fleet finds of what one cache as large as all together would find.

The first three fill a directory with made-up chains of blocks. The last simulates fleets on
Mooncake's trace: the engine's scheduler and accounting, and the placement of a real fleet, on a
virtual clock. The trace is not part of this repository; docs/reference/traces.md says where it is
from.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import typer
from msgspec.msgpack import Encoder

from benchmarks.harness.report import Output, Run, Table, WithClaims
from quire.cli.plan import place_of
from quire.config import EngineConfig
from quire.engine.event_format import (
    EventBatch,
    RemovedBlocks,
    StoredBlocks,
    WireEvent,
    block_name,
    decode_batch,
)
from quire.engine.sequence import Sequence
from quire.fleet.placement import PrefixAware
from quire.fleet.prefix_directory import PrefixDirectory, PromptTokens
from quire.kv import NO_KEYS
from quire.kv.prefix_index import chained_hash
from quire.planner.hardware import roofline
from quire.planner.simulation.cost_model import StepCosts, StepWork
from quire.planner.simulation.simulator import Fleet, fleet_for, simulate
from quire.planner.subject import find_subject
from quire.spec import FullAttention, Group
from quire.traces import TraceRequest, open_trace

PARTS = ("choice", "memory", "events", "hits")
DEVICE = "h100"
TRACE = "mooncake_conversation.jsonl"
SIZE = 16  # tokens of a block
CHAIN, STEP = 64, 128  # blocks of a made-up chain; that a step of 2,048 tokens stores
FILLED = 10**6  # blocks beside those of prompts, in the directory whose choices are timed
GROUPS = (Group(spec=FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16"), layers=(0,)),)
PROMPTS, REPLICAS = (2_000, 12_000, 100_000), (2, 8, 64)
GOAL_US, GOAL_BYTES, GOAL_SHARE = 200.0, 100.0, 0.95
MOVED_S = 20.0  # by which requests of a moved trace come later at most
ONE = {"one": "one cache and engine", "one cache": "one cache, engines side by side"}

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


# -- made-up chains --------------------------------------------------------------------------------


def chains(rng: np.random.Generator, num: int, *, blocks: int = CHAIN) -> Iterator[StoredBlocks]:
    """Chains of blocks that no other chain has."""
    for _ in range(num):
        yield StoredBlocks(
            block_hashes=rng.integers(2, 2**63, blocks).tolist(),
            parent_block_hash=None,
            token_ids=rng.integers(0, 150_000, blocks * SIZE).tolist(),
            block_size=SIZE,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )


def spread(value: list[float]) -> str:
    low, high = np.percentile(value, [10, 90])
    return f"{median(value):,.0f} ({low:,.0f} … {high:,.0f})"


# -- a choice --------------------------------------------------------------------------------------


def choices(rng: np.random.Generator, rounds: int, say: Callable[[str], None]) -> list[list[Any]]:
    """Microseconds of a choice: [prompt tokens, replicas, tuple, array, array again]."""
    rows = []
    for num_replicas in REPLICAS:
        names = [str(number) for number in range(num_replicas)]
        directory = PrefixDirectory(GROUPS, SIZE)
        _fill_twice(directory, rng, names)
        for num_tokens in PROMPTS:
            say(f"{num_tokens:,} tokens, {num_replicas} replicas")
            placement = PrefixAware(directory, seed=0)
            # Half of each prompt is somewhere, and a quarter is at all.
            arrays = [rng.integers(0, 150_000, num_tokens).astype(np.int32) for _ in range(8)]
            prompts = [(prompt, tuple(prompt.tolist())) for prompt in arrays]
            told = [
                (name, _told(prompt, 2 if place == number % num_replicas else 4))
                for number, prompt in enumerate(arrays)
                for place, name in enumerate(names)
            ]
            while told:  # in the steps of engines, beside each other
                for name, events in told:
                    directory.apply(name, [events.pop(0)])
                told = [(name, events) for name, events in told if events]
            times: list[list[float]] = [[], [], []]
            for turn in range(rounds):
                array, plain = prompts[turn % len(prompts)]
                several: tuple[PromptTokens, ...] = (plain, array, array)
                for each, asked in zip(times, several, strict=True):
                    begun = time.perf_counter()
                    placed = placement.place(asked, NO_KEYS, names)
                    each.append(1e6 * (time.perf_counter() - begun))
                    assert placed.found_tokens
                    placement.note_end(placed)
            rows.append([num_tokens, num_replicas, *times])
    return rows


def _fill_twice(directory: PrefixDirectory, rng: np.random.Generator, names: list[str]) -> None:
    """Fill a directory, and take half away: what is stored from then on fills the gaps."""
    several = FILLED // CHAIN // len(names)
    for name in names:
        events = list(chains(rng, 2 * several))
        directory.apply(name, events)
        gone = rng.permutation(len(events))[:several]
        directory.apply(
            name, [RemovedBlocks(block_hashes=events[n].block_hashes, medium="GPU") for n in gone]
        )


def _told(prompt: Any, share: int) -> list[StoredBlocks]:
    """The events of a prompt's first part, a step each; its first block has an engine's name."""
    blocks = len(prompt) // SIZE // share
    first = chained_hash(chained_hash(b"", (), b""), (), prompt[:SIZE].tobytes())
    rng = np.random.default_rng(int(prompt[0]))
    names = [block_name(first, (), b""), *rng.integers(2, 2**63, blocks - 1).tolist()]
    return [
        StoredBlocks(
            block_hashes=names[begin : begin + STEP],
            parent_block_hash=names[begin - 1] if begin else None,
            token_ids=prompt[begin * SIZE : min(begin + STEP, blocks) * SIZE].tolist(),
            block_size=SIZE,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        for begin in range(0, blocks, STEP)
    ]


# -- memory ----------------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fill(num_blocks: int, num_replicas: int, media: int) -> dict[str, float]:
    """Fill a directory and say what a block takes, by its arrays and by the process's pages."""
    rng = np.random.default_rng(0)
    directory = PrefixDirectory(GROUPS, SIZE)
    several = num_blocks // CHAIN // num_replicas
    list(chains(rng, 8))
    gc.collect()
    before, worst_s = resident_bytes(), 0.0
    for number in range(num_replicas):
        for _ in range(several):
            (event,) = chains(rng, 1)
            begun = time.perf_counter()
            directory.apply(str(number), [event])
            worst_s = max(worst_s, time.perf_counter() - begun)
            if media > 1:
                event.medium = "CPU"
                directory.apply(str(number), [event])
    gc.collect()
    blocks = len(directory)
    return {
        "blocks": blocks,
        "arrays": directory.num_bytes / blocks,
        "resident": (resident_bytes() - before) / blocks,
        "worst_s": worst_s,
    }


# -- events ----------------------------------------------------------------------------------------


def throughput(rng: np.random.Generator, rounds: int) -> list[list[Any]]:
    """Blocks a second: [what, figures]."""

    def payload(events: list[WireEvent]) -> bytes:
        return Encoder().encode(EventBatch(ts=0.0, events=events))

    cases: dict[str, tuple[int, int]] = {
        "stored: a prompt of 64 blocks a batch": (1, 64),
        "stored: 64 sequences, a block each a batch": (64, 1),
        "stored: one block a batch": (1, 1),
    }
    rows: list[list[Any]] = []
    for what, (num, blocks) in cases.items():
        directory = PrefixDirectory(GROUPS, SIZE)
        rates, removing = list[float](), list[float]()
        directory.apply("0", chains(rng, 200_000 // CHAIN))
        for _ in range(rounds):
            events: list[WireEvent] = list(chains(rng, num, blocks=blocks))
            stored = payload(events)
            gone = payload(
                [
                    RemovedBlocks(block_hashes=each.block_hashes, medium="GPU")
                    for each in events
                    if isinstance(each, StoredBlocks)
                ]
            )
            for data, times in ((stored, rates), (gone, removing)):
                begun = time.perf_counter()
                directory.apply("0", decode_batch(data).events)
                times.append(num * blocks / (time.perf_counter() - begun))
        rows.append([what, rates])
        rows.append([what.replace("stored", "… removed"), removing])
    return rows


# -- hits ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Together:
    """The costs of several devices as one: each step takes its share of the time.

    ``side_by_side``: each device computes its part of a step with weights of its own. So a sequence
    decodes as slowly as at one of them, and holds its blocks as long.
    """

    costs: StepCosts
    num: int
    side_by_side: bool = False

    @property
    def copy_s(self) -> float:
        return self.costs.copy_s / self.num

    @property
    def copy_s_per_byte(self) -> float:
        return self.costs.copy_s_per_byte / self.num

    @property
    def save_s(self) -> float:
        return self.costs.save_s / self.num

    @property
    def save_s_per_byte(self) -> float:
        return self.costs.save_s_per_byte / self.num

    @property
    def load_s(self) -> float:
        return self.costs.load_s / self.num

    @property
    def load_s_per_byte(self) -> float:
        return self.costs.load_s_per_byte / self.num

    def seconds(self, work: StepWork) -> float:
        if not self.side_by_side:
            return self.costs.seconds(work) / self.num
        part = StepWork(
            num_tokens=-(-work.num_tokens // self.num),
            num_sequences=-(-work.num_sequences // self.num),
            num_sampled=-(-work.num_sampled // self.num),
            num_read=work.num_read / self.num,
            num_attended=work.num_attended / self.num,
            num_prompts=-(-work.num_prompts // self.num),
            num_outlooks=work.num_outlooks,
        )
        return self.costs.seconds(part)


def fleet(num_replicas: int, routing: str, policy: str, memory: float = 1.0) -> Fleet:
    """``routing`` "one": a single engine with the memory and the speed of them all; "one cache":
    such that its sequences decode as slowly as a replica's. ``memory``: of what a replica's cache
    would have.
    """
    config = EngineConfig.from_options(
        memory_mode="dedicated",
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        block_size=128,
        prefix_caching_policy=policy,
    )
    subject = find_subject("Llama-3.1-8B", dtype=config.dtype)
    place = place_of(None, DEVICE)
    costs = roofline(subject, subject.spec, DEVICE, 1)
    is_one = routing in ONE
    num = 1 if is_one else num_replicas
    how = "round-robin" if is_one else routing
    found = fleet_for(subject, config, place, costs, num_replicas=num, routing=how)
    capacity_bytes = int(memory * found.sizes.capacity_bytes)
    found = replace(found, sizes=replace(found.sizes, capacity_bytes=capacity_bytes))
    if not is_one:
        return found
    return replace(
        found,
        sizes=replace(found.sizes, capacity_bytes=num_replicas * found.sizes.capacity_bytes),
        costs=Together(costs, num_replicas, side_by_side=routing == "one cache"),
        limits=replace(
            found.limits,
            max_num_seqs=num_replicas * found.limits.max_num_seqs,
            max_num_batched_tokens=num_replicas * found.limits.max_num_batched_tokens,
            watermark_bytes=num_replicas * found.limits.watermark_bytes,
        ),
    )


def arrivals(
    trace: Path, num_requests: int, seed: int, *, num_skipped: int = 0
) -> list[TraceRequest]:
    """List some requests of a trace as they come (seed 0), or each later by chance."""
    requests = list(islice(open_trace(str(trace)), num_skipped, num_skipped + num_requests))
    if not seed:
        return requests
    draw = Random(seed)
    moved = (replace(each, at_s=each.at_s + draw.uniform(0.0, MOVED_S)) for each in requests)
    return sorted(moved, key=lambda each: each.at_s)


def hits(
    trace: Path,
    num_replicas: int,
    routing: str,
    num_requests: int,
    rate: float,
    policy: str,
    memory: float,
    seed: int = 0,
) -> dict[str, Any]:
    """Simulate a fleet on an arrival of the trace."""
    replicas = fleet(num_replicas, routing, policy, memory)
    computed = [0] * replicas.num_replicas

    def ended(place: int, sequence: Sequence) -> None:
        computed[place] += sequence.num_prompt_tokens - sequence.num_cached_tokens

    requests = arrivals(trace, num_requests, seed)
    paced = (replace(request, at_s=request.at_s / rate) for request in requests)
    result = simulate(paced, replicas, ended=ended)
    return {
        "replicas": num_replicas,
        "routing": routing,
        "hit_rate": result.hit_rate,
        # Of the caches, by sequences that run, in the mean over time.
        "held": (result.committed_bytes - result.cached_bytes)
        / (replicas.num_replicas * replicas.sizes.capacity_bytes),
        "num_used": sum(each > 0 for each in computed),
        "busiest": max(computed) * len(computed) / sum(computed),
        "ttft_s": result.latencies["ttft_s"],
    }


def simulated(asked: tuple[Any, ...]) -> dict[str, Any]:
    return hits(*asked)


# -- the run ---------------------------------------------------------------------------------------


@app.command()
def main(  # noqa: PLR0913
    only: Annotated[str, typer.Option(help=f"One part: {', '.join(PARTS)}.")] = "",
    traces: Annotated[Path | None, typer.Option(help=f"Folder with {TRACE}, for hits.")] = None,
    replicas: Annotated[str, typer.Option(help="Sizes of fleets, for hits.")] = "4,8",
    num_requests: Annotated[int, typer.Option(help="Of the trace, for hits.")] = 12_031,
    rate: Annotated[float, typer.Option(help="Factor for the trace's speed.")] = 1.0,
    policies: Annotated[str, typer.Option(help="Prefix-caching policies.")] = "choice,lru",
    memory: Annotated[float, typer.Option(help="Factor for each replica's cache, for hits.")] = 1.0,
    seeds: Annotated[
        str,
        typer.Option(
            help="Arrivals of the trace, for hits: 0 as it is, else each request later by chance."
        ),
    ] = "0",
    jobs: Annotated[int, typer.Option(help="Simulations at once.")] = 1,
    rounds: Annotated[int, typer.Option(help="Of each timing.", min=5)] = 100,
    num_blocks: Annotated[int, typer.Option(help="Of the directory whose memory counts.")] = 10**6,
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Placement: microseconds a choice, bytes a block, blocks a second, and hits of a fleet."""
    if only and only not in PARTS:
        raise typer.BadParameter(f"--only {only}: there is {', '.join(PARTS)}")
    run = Run("fleet.bench_placement", width=160)
    rng = np.random.default_rng(0)
    tables: list[Table] = []
    claims: list[dict[str, Any]] = []
    if only in ("", "choice"):
        rows = choices(rng, rounds, run.say)
        tables.append(
            Table(
                title="A choice, µs: median (p10 … p90)",
                columns=("prompt tokens", "replicas", "a tuple", "an array", "an array again"),
                rows=[[f"{n:,}", str(r), *map(spread, times)] for n, r, *times in rows],
            )
        )
        claims += [
            claim(f"choice of {r}, {n:,} tokens", median(array), GOAL_US, "µs")
            for n, r, _, array, _ in rows
        ]
    if only in ("", "memory"):
        cells = []
        for num_replicas, media in ((8, 1), (64, 1), (8, 2)):
            run.say(f"{num_blocks:,} blocks of {num_replicas} replicas, {media} media")
            asked = f"fill({num_blocks}, {num_replicas}, {media})"
            found = json.loads(
                subprocess.run(
                    [sys.executable, "-c", f"{IN_A_PROCESS}print(json.dumps({asked}))"],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            cells.append(
                [
                    f"{found['blocks']:,.0f}",
                    str(num_replicas),
                    str(media),
                    f"{found['arrays']:.1f}",
                    f"{found['resident']:.1f}",
                    f"{1000 * found['worst_s']:.0f}",
                ]
            )
            claims.append(
                claim(f"a block, {num_replicas} replicas", found["resident"], GOAL_BYTES, "bytes")
            )
        columns = ("blocks", "replicas", "media", "arrays", "resident", "longest event of 64, ms")
        tables.append(Table(title="Memory, bytes a block", columns=columns, rows=cells))
    if only in ("", "events"):
        run.say("events")
        tables.append(
            Table(
                title="Events, blocks a second with decoding: median (p10 … p90)",
                columns=("batch", "blocks/s"),
                rows=[[what, spread(rates)] for what, rates in throughput(rng, rounds)],
            )
        )
    if only in ("", "hits") and traces is not None:
        table, more = _hits(
            traces / TRACE,
            replicas,
            num_requests,
            rate,
            policies,
            memory,
            [int(seed) for seed in seeds.split(",")],
            jobs,
            run,
        )
        tables.append(table)
        claims += more
    elif only in ("", "hits"):
        run.say("SKIPPED: no hits without --traces FOLDER")
    flags = f"{f' --only {only}' if only else ''}{' --traces …' if traces else ''}"
    run.end(
        tables,
        run.setting(flags, packages=["numpy", "msgspec"], also=[f"seed 0, {rounds} rounds"]),
        claims=claims if with_claims else (),
        output=output,
    )


IN_A_PROCESS = "import json; from benchmarks.fleet.bench_placement import fill; "


def _hits(  # noqa: PLR0913 - each is an option of the command
    trace: Path,
    replicas: str,
    num: int,
    rate: float,
    policies: str,
    memory: float,
    seeds: list[int],
    jobs: int,
    run: Run,
) -> tuple[Table, list[dict[str, Any]]]:
    cases = [
        (int(each), policy, routing)
        for policy in policies.split(",")
        for each in replicas.split(",")
        for routing in (*ONE, "prefix-aware", "least-loaded")
    ]
    asked = [
        (trace, each, routing, num, rate, policy, memory, seed)
        for each, policy, routing in cases
        for seed in seeds
    ]
    rows, claims = [], []
    whole = dict.fromkeys(seeds, 1.0)
    with ProcessPoolExecutor(jobs) as pool:
        played = pool.map(simulated, asked)
        for each, policy, routing in cases:
            found, shares = [], []
            for seed in seeds:
                found.append(next(played))
                rate_found = found[-1]["hit_rate"]
                if routing == "one":
                    whole[seed] = rate_found
                shares.append(rate_found / whole[seed])
                run.say(
                    f"{each} replicas, {routing}, {policy}, arrival {seed}: {rate_found:.2%}, "
                    f"{shares[-1]:.3f} of one"
                )
            rows.append(
                [
                    str(each),
                    policy,
                    ONE.get(routing, routing),
                    f"{mean(one['held'] for one in found):.1%}",
                    f"{mean(one['hit_rate'] for one in found):.2%}",
                    _mean_and_range(shares),
                    f"{mean(one['num_used'] for one in found):.0f}",
                    f"{mean(one['busiest'] for one in found):.2f}",
                    *(
                        f"{mean(one['ttft_s'][part] for one in found):.2f}"
                        for part in ("mean", "p50", "p99")
                    ),
                ]
            )
            if routing == "prefix-aware":
                share = mean(shares)
                held = {"claim": f"hit share, {each} replicas, {policy}", "ours": round(share, 3)}
                claims.append({**held, "goal": GOAL_SHARE, "holds": share >= GOAL_SHARE})
    columns = (
        "replicas",
        "policy",
        "routing",
        "held",
        "found",
        "of one",
        "caches used",
        "computed at the busiest, of the mean",
        "TTFT mean, s",
        "p50",
        "p99",
    )
    title = f"Prompt tokens found, Mooncake's conversations, {num:,} requests at {rate:g} ×"
    if memory != 1.0:
        title += f", caches {memory:g} ×"
    if len(seeds) > 1:
        title += f", means of {len(seeds)} arrivals (least … most)"
    return Table(title=title, columns=columns, rows=rows), claims


def _mean_and_range(shares: list[float]) -> str:
    if len(shares) == 1:
        return f"{shares[0]:.3f}"
    return f"{mean(shares):.3f} ({min(shares):.3f} … {max(shares):.3f})"


def claim(what: str, ours: float, goal: float, unit: str) -> dict[str, Any]:
    return {
        "claim": what,
        "ours": round(ours, 1),
        "goal": f"≤ {goal:g}",
        "unit": unit,
        "holds": ours <= goal,
    }


if __name__ == "__main__":
    app()
