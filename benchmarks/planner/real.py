"""The simulator beside the engine: the same requests, at the same steps, in turns.

    python -m benchmarks.planner.real --model demo
    python -m benchmarks.planner.real --model large --rounds 5 --samples real.jsonl --claims

In each round each workload runs in the engine and in the simulator, and right before it the machine
is calibrated with the workload's strategy. Requests come at steps, not at times, so that both are
asked the same: each step is then compared, its plan and its committed bytes. The time of a run is
that of its steps. With --samples a run can be taken in pieces: what the file has is not taken
again.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.harness.report import Table, show
from quire.bench import calibrate as calibration
from quire.bench.calibrate import about, calibrate, warm_up
from quire.engine.llm import LLM
from quire.engine.scheduler import Scheduler
from quire.engine.scheduling.step_costs import Clock
from quire.engine.sequence import Request
from quire.engine.statistics import Statistics
from quire.engine.step_plan import StepPlan
from quire.kv import CacheConfig
from quire.memory.machine.readings import MemoryReading
from quire.models.recorded import recordings
from quire.planner.simulation.cost_model import FittedCosts
from quire.planner.simulation.simulated_engine import prices_of
from quire.planner.simulation.simulator import Fleet, make_replica
from quire.sampling_params import SamplingParams

ROUNDS = 5
THROUGHPUT_GOAL, COUNT_GOAL = 0.10, 0.02
COMMON: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024}

Step = tuple[tuple[tuple[int, int, int], ...], int]  # chunks, committed bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, and at which step it comes."""

    at_step: int
    prompt: tuple[int, ...]
    num_tokens: int
    n: int = 1
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and options; ``tokens``: what the KV memory is to hold."""

    name: str
    asked: tuple[Asked, ...]
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    is_timed: bool = False  # the engine decides by measured times: steps need not be equal

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(asked.prompt) + asked.num_tokens for asked in self.asked)


@dataclass(slots=True)
class Run:
    """What one of both did."""

    seconds: float
    steps: list[Step]
    num_tokens: int
    num_preemptions: int
    num_hits: int
    num_recomputed: int


class Plenty:
    """A machine with memory enough, so that no pressure moves the ceiling."""

    def now_s(self) -> float:
        return 0.0

    def read(self) -> MemoryReading:
        return MemoryReading(total_bytes=2**40, available_bytes=2**39)


def workloads(vocab_size: int) -> list[Workload]:
    """Short, long, shared, short of memory, in bursts, n > 1, swapped; every strategy."""
    rng = np.random.default_rng(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(5, vocab_size - 5, count).tolist())

    def several(count: int, prompt: int, output: int, **extra: Any) -> tuple[Asked, ...]:
        """Lengths from a half to one and a half of these."""
        return tuple(
            Asked(
                at_step=0,
                prompt=ids(int(rng.integers(prompt // 2, prompt * 3 // 2 + 1))),
                num_tokens=int(rng.integers(output // 2, output * 3 // 2 + 1)),
                **extra,
            )
            for _ in range(count)
        )

    short, long = several(24, 32, 48), several(8, 500, 24)
    system = ids(256)
    shared = tuple(Asked(at_step=6 * i, prompt=system + ids(40), num_tokens=32) for i in range(14))
    bursts = tuple(
        Asked(at_step=step, prompt=each.prompt, num_tokens=each.num_tokens)
        for step in (0, 40, 80)
        for each in several(8, 80, 32)
    )
    # Those who come later go first: others make room for them.
    urgent = tuple(
        Asked(at_step=4 * i, prompt=each.prompt, num_tokens=each.num_tokens, priority=-(i // 3))
        for i, each in enumerate(several(18, 120, 48))
    )
    parallel = tuple(Asked(at_step=0, prompt=ids(150), num_tokens=32, n=3) for _ in range(5))
    by_priority = {"scheduling_policy": "priority"}
    return [
        Workload(name="short prompts", asked=short, tokens=8192),
        Workload(name="long prompts", asked=long, tokens=16384),
        Workload(name="shared prefixes", asked=shared, tokens=8192),
        Workload(name="shared, virtual", asked=shared, tokens=8192, options={"cache": "virtual"}),
        Workload(name="tight, priorities", asked=urgent, tokens=900, options=by_priority),
        Workload(name="bursts", asked=bursts, tokens=2048),
        Workload(name="bursts, growing", asked=bursts, tokens=6000, options={"cache": "growing"}),
        Workload(
            name="bursts, contiguous", asked=bursts, tokens=6 * 1024,
            options={"cache": "contiguous"},
        ),
        Workload(name="three each", asked=parallel, tokens=8192),
        Workload(
            name="tight, swapped", asked=urgent, tokens=900,
            options={**by_priority, "swap_space": 2**30}, is_timed=True,
        ),
    ]  # fmt: skip


def request_of(asked: Asked, number: int) -> Request:
    params = SamplingParams(
        n=asked.n,
        max_tokens=asked.num_tokens,
        temperature=float(asked.n > 1),  # else all would write the same, and share it
        ignore_eos=True,
    )
    return Request(
        request_id=number + 1,
        prompt_token_ids=asked.prompt,
        params=params,
        priority=asked.priority,
    )


def drive(workload: Workload, add: Callable[[Asked, int], None], step: Callable[[], bool]) -> None:
    coming = sorted(enumerate(workload.asked), key=lambda pair: pair[1].at_step)
    at, goes_on = 0, True
    while coming or goes_on:
        while coming and coming[0][1].at_step <= at:
            number, asked = coming.pop(0)
            add(asked, number)
        goes_on = step()
        at += 1


def chunks_of(plans: list[StepPlan]) -> tuple[tuple[int, int, int], ...]:
    return tuple((c.sequence.seq_id, c.start, c.stop) for plan in plans for c in plan.chunks)


def really(loaded: Any, workload: Workload, costs: FittedCosts, clock: Clock) -> tuple[Run, Fleet]:
    """In the engine; and what a simulated one would be made of.

    The scheduler decides who comes by the same costs in both.
    """
    bytes_per_token = loaded.spec.bytes_per_token
    options = {**COMMON, **workload.options}
    capacity_bytes = workload.tokens * bytes_per_token
    llm = LLM(loaded, gauge=Plenty(), kv_cache_memory_bytes=capacity_bytes, **options)
    with llm:
        scheduler = llm.engine.scheduler
        fleet = fleet_of(llm, scheduler)
        plans, steps, seconds, offset = list[StepPlan](), list[Step](), 0.0, 0
        llm.engine.watch = plans.append

        def add(asked: Asked, number: int) -> None:
            llm.start(request_of(asked, number), lambda _: None)

        def step() -> bool:
            nonlocal seconds
            plans.clear()
            begin_s = clock()
            goes_on = llm.step()
            seconds += clock() - begin_s
            chunks = tuple((i - offset, a, b) for i, a, b in chunks_of(plans))
            steps.append((chunks, llm.accounting.usage().committed_bytes))
            return goes_on

        # An engine that serves has done this before. Nothing of it stays in the cache.
        warm_up(llm)
        scheduler.costs.give(prices_of(costs, scheduler.limits.max_num_batched_tokens))
        drive(workload, add, step)
        llm.reset_prefix_cache()
        steps.clear()
        seconds, before = 0.0, _counts(llm.statistics)
        (probe,) = scheduler.add(request_of(replace(workload.asked[0], n=1), -1))
        scheduler.finish(probe, "abort")
        offset = probe.seq_id + 1
        drive(workload, add, step)
        after = _counts(llm.statistics)
    counts = {name: after[name] - before[name] for name in after}
    return Run(seconds=seconds, steps=steps, **counts), fleet


def _counts(counted: Statistics) -> dict[str, int]:
    return {
        "num_tokens": counted.num_generation_tokens,
        "num_preemptions": counted.num_preemptions,
        "num_hits": counted.prefix_hit_tokens,
        "num_recomputed": counted.num_recomputed_tokens,
    }


def fleet_of(llm: LLM, scheduler: Scheduler) -> Fleet:
    config = llm.config
    return Fleet(
        spec=llm.spec,
        cache=config.cache,
        sizes=CacheConfig(
            max_model_len=llm.max_model_len,
            max_num_seqs=config.max_num_seqs,
            capacity_bytes=llm.accounting.ceiling.capacity_bytes,
            block_size=config.block_size,
            reserve=config.reserve,
            shares_pages=config.cache == "virtual" and config.enable_prefix_caching,
            growth=config.growth,
            growth_tokens=config.growth_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        limits=scheduler.limits,
        costs=FittedCosts(),
        swap_bytes=config.swap_space,
    )


def simulated(fleet: Fleet, workload: Workload, costs: FittedCosts) -> Run:
    replica = make_replica(replace(fleet, costs=costs), lambda _: None)
    plans, steps = list[StepPlan](), list[Step]()
    replica.engine.watch = plans.append

    def add(asked: Asked, number: int) -> None:
        replica.scheduler.add(request_of(asked, number), arrived_s=replica.now_s)

    def step() -> bool:
        plans.clear()
        replica.step()
        steps.append((chunks_of(plans), replica.accounting.usage().committed_bytes))
        return not replica.is_idle

    drive(workload, add, step)
    return Run(seconds=replica.now_s, steps=steps, **_counts(replica.scheduler.statistics))


def sample(loaded: Any, workload: Workload, costs: FittedCosts, clock: Clock) -> dict[str, Any]:
    real, fleet = really(loaded, workload, costs, clock)
    ours = simulated(fleet, workload, costs)
    alike = sum(a == b for a, b in zip(real.steps, ours.steps, strict=False))
    return {
        "real_tokens_per_s": real.num_tokens / real.seconds,
        "simulated_tokens_per_s": ours.num_tokens / ours.seconds,
        "num_steps": len(real.steps),
        "num_alike": alike if len(real.steps) == len(ours.steps) else -1,
        "real_preemptions": real.num_preemptions,
        "simulated_preemptions": ours.num_preemptions,
        "real_hits": real.num_hits,
        "simulated_hits": ours.num_hits,
        "is_timed": workload.is_timed,
    }


def claims(model: str, samples: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for name, taken in samples.items():
        errors = [s["simulated_tokens_per_s"] / s["real_tokens_per_s"] - 1 for s in taken]
        middle = statistics.median(errors)
        yield {
            "claim": f"simulated throughput, {model}: {name}",
            "ours": statistics.median(s["simulated_tokens_per_s"] for s in taken),
            "peer": statistics.median(s["real_tokens_per_s"] for s in taken),
            "unit": "output tokens/s",
            "ratio": 1 + middle,
            "goal": f"within {THROUGHPUT_GOAL:.0%}",
            "holds": abs(middle) <= THROUGHPUT_GOAL,
        }
        for what in ("preemptions", "hits"):
            ours = statistics.median(s[f"simulated_{what}"] for s in taken)
            real = statistics.median(s[f"real_{what}"] for s in taken)
            yield {
                "claim": f"simulated {what}, {model}: {name}",
                "ours": ours,
                "peer": real,
                "unit": what,
                "ratio": ours / real if real else None,
                "goal": f"within {COUNT_GOAL:.0%}",
                "holds": abs(ours - real) <= COUNT_GOAL * max(real, 1),
            }
        if not taken[0]["is_timed"]:
            alike = min(s["num_alike"] for s in taken)
            yield {
                "claim": f"plans and committed bytes at every step, {model}: {name}",
                "ours": alike,
                "peer": taken[0]["num_steps"],
                "unit": "steps alike",
                "ratio": alike / taken[0]["num_steps"],
                "goal": "all",
                "holds": all(s["num_alike"] == s["num_steps"] for s in taken),
            }


def cache_of(workload: Workload) -> str:
    return str(workload.options.get("cache", "paged"))


class Calibrations:
    """An engine of each strategy, that has served; it is calibrated again and again.

    With a folder each strategy's costs are kept there, and what it has is not measured again.
    Without ``rehearses`` an engine that has recorded its passes is measured at once: where a step
    takes long, what it does first is not seen in it. No context is longer than ``longest`` tokens.
    """

    def __init__(
        self,
        loaded: Any,
        clock: Clock,
        most_age_s: float,
        *,
        longest: int,
        folder: Path | None,
        rehearses: bool,
    ) -> None:
        self._loaded, self._clock, self._most_age_s = loaded, clock, most_age_s
        self._folder, self._rehearses = folder, rehearses
        self._options = COMMON | {"max_model_len": longest}
        self._engines: dict[str, LLM] = {}
        self._known: dict[str, tuple[float, FittedCosts]] = {}

    def take(self, cache: str) -> FittedCosts:
        """How fast the machine is just now, or was a short while ago."""
        if cache in self._known and time.monotonic() - self._known[cache][0] < self._most_age_s:
            return self._known[cache][1]
        kept = self._folder and self._folder / f"{cache}.json"
        if kept and kept.exists():
            return FittedCosts.read(kept)
        is_warm = cache in self._engines
        if not is_warm:
            room = 40_000 * self._loaded.spec.bytes_per_token
            self._engines[cache] = LLM(
                self._loaded,
                gauge=Plenty(),
                cache=cache,
                kv_cache_memory_bytes=room,
                **self._options,
            )
        llm = self._engines[cache]
        if not is_warm and not self._rehearses:
            warm_up(llm)
            is_warm = True
        found = calibrate(llm, rounds=1, is_warm=is_warm, clock=self._clock, report=_report)
        costs = about(found, machine="", model="", cache=cache, num_threads=1).costs
        self._known[cache] = time.monotonic(), costs
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            costs.write(kept)
            self._engines.pop(cache).close()  # it holds memory for 40,000 tokens
        return costs


def _report(done: int, total: int) -> None:
    if sys.stderr.isatty() or done % 10 == 0:
        print(f"  calibration: {done} of {total} points", file=sys.stderr)


def _row(name: str, taken: list[dict[str, Any]]) -> list[str]:
    """Real and simulated, of the first round where all are to be alike."""
    real = statistics.median(s["real_tokens_per_s"] for s in taken)
    ours = statistics.median(s["simulated_tokens_per_s"] for s in taken)
    error = statistics.median(s["simulated_tokens_per_s"] / s["real_tokens_per_s"] for s in taken)
    first = taken[0]
    return [
        name,
        f"{real:,.1f}",
        f"{ours:,.1f}",
        f"{error - 1:+.1%}",
        f"{first['real_preemptions']} / {first['simulated_preemptions']}",
        f"{first['real_hits']} / {first['simulated_hits']}",
        f"{first['num_alike']} of {first['num_steps']} steps",
    ]


def _loaded(model: str, home: Path) -> Any:
    from quire.models.loader import load

    if model == "demo":
        return load(None)
    from benchmarks.engine.model import make

    return load(make(home.resolve() / "model"))


def main(  # noqa: PLR0913 - each is a flag
    model: Annotated[str, typer.Option(help="demo, or large: that of 0.45 B.")] = "demo",
    rounds: Annotated[int, typer.Option(min=1)] = ROUNDS,
    only: Annotated[
        str, typer.Option(help="Workloads whose names have this, or one of several, by commas.")
    ] = "",
    samples_file: Annotated[
        Path | None, typer.Option("--samples", help="Kept there; what it has is not taken again.")
    ] = None,
    with_claims: Annotated[bool, typer.Option("--claims")] = False,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Of this process, where others share the core.")
    ] = False,
    most_age_s: Annotated[
        float, typer.Option("--calibration-age", help="Seconds after which one is taken again.")
    ] = 0.0,
    record_after: Annotated[
        int, typer.Option(min=1, help="Steps of a size after which it is recorded. Few: less wait.")
    ] = recordings.WORTH_IT,
    calibrations_folder: Annotated[
        Path | None,
        typer.Option("--calibrations", help="Kept there, one a strategy, for runs in pieces."),
    ] = None,
    rehearses: Annotated[
        bool, typer.Option(help="Run each calibration's grid once before it is measured.")
    ] = True,
    home: Annotated[Path, typer.Option(help="Folder of the large model.")] = Path(".venv-peers"),
) -> None:
    """Simulated against real: throughput, preemptions, hits, and each step."""
    aside = Console(stderr=True)
    clock = time.process_time if cpu_time else time.perf_counter
    samples: dict[str, list[dict[str, Any]]] = {}
    known: set[tuple[int, str]] = set()
    for line in (
        samples_file.read_text().splitlines() if samples_file and samples_file.exists() else ()
    ):
        taken = json.loads(line)
        if taken["model"] == model:
            known.add((taken["round"], taken["workload"]))
            samples.setdefault(taken["workload"], []).append(taken)
    loaded = _loaded(model, home)
    parts = only.split(",")
    wanted = [w for w in workloads(loaded.vocab_size) if any(part in w.name for part in parts)]
    recordings.WORTH_IT, calibration._TIMES = record_after, record_after + 1
    calibrations = Calibrations(
        loaded,
        clock,
        most_age_s,
        longest=max(workload.longest for workload in wanted),
        folder=calibrations_folder,
        rehearses=rehearses,
    )
    for number in range(rounds):
        due = [w for w in wanted if (number, w.name) not in known]
        for workload in due:
            costs = calibrations.take(cache_of(workload))
            taken = sample(loaded, workload, costs, clock)
            taken |= {"model": model, "round": number, "workload": workload.name}
            taken |= {"calibration_error": costs.about["median_error"]}
            taken |= {"spread": costs.about["spread"]}
            samples.setdefault(workload.name, []).append(taken)
            if samples_file:
                with samples_file.open("a") as file:
                    file.write(json.dumps(taken) + "\n")
            aside.print(f"  {number} {workload.name}: {json.dumps(taken)}", soft_wrap=True)
    table = Table(
        title=f"Simulated against real, {model} model, median of {rounds}",
        columns=("workload", "real tok/s", "simulated", "error", "preemptions", "hits", "alike"),
        rows=[_row(name, taken) for name, taken in samples.items()],
    )
    show([table], [], Console(width=None if sys.stdout.isatty() else 160))
    if with_claims:
        for claim in claims(model, samples):
            print(json.dumps(claim))


if __name__ == "__main__":
    typer.run(main)
