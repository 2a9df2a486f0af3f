"""How much of a KV pool holds tokens, at production's lengths: what Kwon et al. (2023) tabulate.

Real lengths go through the real scheduler twice: unscaled, through the accounting of a model that
is not loaded (utilization/replay.py); and a seventh of them through the engine with the demo model
(utilization/demo.py), where the operating system is asked too. utilization/waste.py says what is
used and what is wasted, utilization/lengths.py where the lengths come from.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import track

from benchmarks.harness.report import Output, Run, Table, WithClaims, skip_without_traces
from benchmarks.memory.utilization.demo import CAPACITY_BYTES, DEMO_SYSTEMS, DIVISOR, DemoRun, run
from benchmarks.memory.utilization.lengths import Lengths, TraceUnavailable, azure
from benchmarks.memory.utilization.replay import (
    MAX_NUM_BATCHED_TOKENS,
    SYSTEMS,
    WATERMARK,
    Replay,
    replay,
    samples,
)
from benchmarks.memory.utilization.waste import Bytes, Moment, mean
from quire.models.loader import load
from quire.units import format_bytes

GIB = 2**30
UNSCALED_CAPACITY = 24 * GIB
LEAST_UTILIZATION = 0.96
NAIVE = "contiguous, 4,096 each"
IN_BLOCKS = ("paged", "virtual, unshared", "virtual, shared")

Replays: TypeAlias = dict[str, list[Replay]]  # by system, a sample each
DemoRuns: TypeAlias = dict[str, DemoRun]


# -- what is run ---------------------------------------------------------------------------------


def replay_all(taken: Sequence[Sequence[Lengths]], console: Console) -> Replays:
    """Samples take turns, so that a disturbance of the machine's would meet all systems."""
    every = [(system, requests) for requests in taken for system in SYSTEMS]
    found: Replays = {}
    for system, requests in track(every, "unscaled", console=console):
        found.setdefault(system.name, []).append(replay(system, requests, UNSCALED_CAPACITY))
    return found


def run_all(requests: Sequence[Lengths], seed: int, console: Console) -> DemoRuns:
    loaded = load(None)
    return {
        system.name: run(system, loaded, requests, seed)
        for system in track(DEMO_SYSTEMS, "scaled", console=console)
    }


# -- what is shown -------------------------------------------------------------------------------

_COLUMNS = (
    "system", "utilization", "used", "later", "internal", "external", "cached", "free",
    "sequences at once", "preempted",
)  # fmt: skip


def tables(replays: Replays, runs: DemoRuns) -> list[Table]:
    unscaled = [
        _row(name, [one.mean for one in several], [one.num_preemptions for one in several])
        for name, several in replays.items()
    ]
    scaled = [_row(name, [mean(one.moments)], [one.num_preemptions]) for name, one in runs.items()]
    return [
        Table(
            title=f"Unscaled, Qwen3-4B's accounting: {format_bytes(UNSCALED_CAPACITY)}; "
            f"utilization of what is held, then percent of the pool",
            columns=_COLUMNS,
            rows=unscaled,
        ),
        Table(
            title=f"A seventh, the demo model's engine: {format_bytes(CAPACITY_BYTES)}; the same",
            columns=_COLUMNS,
            rows=scaled,
        ),
    ]


def _row(name: str, moments: Sequence[Moment], num_preemptions: Sequence[int]) -> list[str]:
    def percent(value: Callable[[Bytes], float]) -> str:
        return _spread(100 * value(moment.bytes) for moment in moments)

    def share(part: str) -> str:
        return percent(lambda found: getattr(found, part) / found.capacity)

    return [
        name,
        percent(lambda found: found.utilization) + " %",
        *map(share, Bytes.__slots__),
        _spread(moment.num_sequences for moment in moments),
        _spread(num_preemptions, digits=0),
    ]


def _spread(values: Iterable[float], digits: int = 1) -> str:
    """The median; with it the least and the greatest where they do not read the same."""
    some = sorted(values)
    least, middle, most = (
        f"{value:.{digits}f}" for value in (some[0], statistics.median(some), some[-1])
    )
    return middle if least == most else f"{middle} ({least} … {most})"


def notes(replays: Replays, runs: DemoRuns, num_requests: int, num_scaled: int) -> Iterable[str]:
    differences = [
        100 * abs(one.mean.bytes.utilization - one.mean_by_step.bytes.utilization)
        for several in replays.values()
        for one in several
    ]
    yield (
        f"Unscaled: {len(replays[NAIVE])} stretches of {num_requests:,} requests; up to "
        f"{MAX_NUM_BATCHED_TOKENS:,} tokens a step; newcomers leave {100 * WATERMARK:.0f} % free. "
        f"Were each step weighted alike, no utilization would differ by more than "
        f"{max(differences):.1f} points."
    )
    for name, several in replays.items():
        if refused := sum(one.num_refused for one in several):
            cut = sum(one.num_cut for one in several)
            yield (
                f"{name}: {refused} of {len(several) * num_requests:,} prompts were too long and "
                f"not served, {cut} answers were cut off."
            )
    looks = [look for one in runs.values() for look in one.looks]
    yield (
        f"Scaled: {num_scaled} requests. In {len(looks)} looks our counter of committed bytes and "
        f"the system's differ by at most {format_bytes(_furthest(runs))}."
    )


def _furthest(runs: DemoRuns) -> int:
    return max(abs(ours - theirs) for one in runs.values() for ours, theirs in one.looks)


# -- what is claimed -----------------------------------------------------------------------------


def claims(replays: Replays, runs: DemoRuns) -> Iterable[dict[str, Any]]:
    """Each goal in the sample that is worst for it; ``peer`` is the naive system's best."""
    naive = [one.mean for one in replays[NAIVE]]
    best = max(moment.bytes.utilization for moment in naive)
    for name in IN_BLOCKS:
        found = [one.mean.bytes for one in replays[name]]
        for what, worst in (
            ("held bytes", min(each.utilization for each in found)),
            ("the pool", min(each.used / each.capacity for each in found)),
        ):
            text = f"unscaled, {name}, 16 tokens a block: share of {what} that is used"
            yield _claim(text, worst, best, ">= 0.96", holds=worst >= LEAST_UTILIZATION)
        external = max(each.external / each.capacity for each in found)
        text = f"unscaled, {name}: external waste, of the pool"
        naive_external = max(m.bytes.external / m.bytes.capacity for m in naive)
        yield _claim(text, external, naive_external, "0", holds=external == 0)
    all_naive = [moment.bytes.utilization for moment in naive]
    text = f"unscaled, {NAIVE}: share of held bytes that is used, as in Kwon et al. (2023)"
    yield _claim(text, best, min(all_naive), "0.20 … 0.38", holds=_within(all_naive, 0.20, 0.38))
    ours = [one.mean.num_sequences for one in replays["paged"]]
    ratios = [a / b.num_sequences for a, b in zip(ours, naive, strict=True)]
    text = f"unscaled, paged: sequences at once, against {NAIVE} (expected: roughly 3 x)"
    yield _claim(text, min(ours), min(m.num_sequences for m in naive), ">= 3 x",
                 holds=min(ratios) >= 3, ratio=min(ratios))  # fmt: skip
    text = "scaled: our counter of committed bytes against the system's, the furthest look"
    yield _claim(text, _furthest(runs), 0, "0 bytes", holds=_furthest(runs) == 0)


def _within(values: Iterable[float], least: float, most: float) -> bool:
    return all(least <= value <= most for value in values)


def _claim(
    claim: str, ours: float, peer: float, goal: str, *, holds: bool, ratio: float | None = None
) -> dict[str, Any]:
    if ratio is None and peer:
        ratio = ours / peer
    return {
        "claim": claim, "ours": round(ours, 4), "peer": round(peer, 4), "unit": "",
        "ratio": None if ratio is None else round(ratio, 3), "goal": goal, "holds": holds,
    }  # fmt: skip


# -- the command ---------------------------------------------------------------------------------


app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    traces: Annotated[
        Path | None,
        typer.Option(help="Folder that has AzureLLMInferenceTrace_conv.csv. Needed."),
    ] = None,
    num_samples: Annotated[
        int, typer.Option("--samples", help="Unscaled: stretches of the trace.", min=1)
    ] = 3,
    num_requests: Annotated[
        int, typer.Option("--requests", help="Unscaled: requests of each.", min=400)
    ] = 600,
    num_scaled: Annotated[
        int, typer.Option("--scaled-requests", help="Scaled: requests, from all over.", min=96)
    ] = 128,
    seed: Annotated[int, typer.Option(help="Scaled: of the prompts' tokens.")] = 0,
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """KV utilization of every strategy on Azure's lengths, with each kind of waste apart.

    *Utilization* is what is used of what sequences hold. *Later* will be used before the sequence
    ends, *internal* never. *External* is free and of no use, because it lies in pieces.
    """
    if traces is None:
        skip_without_traces(with_claims, output, "; utilization/lengths.py names it")
        return
    try:
        requests = azure(traces)
    except TraceUnavailable as error:
        raise typer.BadParameter(f"--traces: {error}") from error
    bench = Run("memory.bench_utilization", width=180)
    replays = replay_all(list(samples(requests, num_samples, num_requests)), bench.aside)
    spaced = [lengths.scaled(DIVISOR) for lengths in requests[:: len(requests) // num_scaled]]
    runs = run_all(spaced[:num_scaled], seed, bench.aside)
    flags = f" --traces … --samples {num_samples} --requests {num_requests}"
    bench.end(
        tables(replays, runs),
        bench.setting(f"{flags} --scaled-requests {num_scaled} --seed {seed}"),
        notes=notes(replays, runs, num_requests, num_scaled),
        claims=claims(replays, runs) if with_claims else (),
        output=output,
    )


if __name__ == "__main__":
    app()
