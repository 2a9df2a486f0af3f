"""Which eviction policy keeps what real traffic comes back for: hit rates in our own core.

Every policy that the core offers, LRU among them, and Belady's optimum beside. Hit rates are exact:
neither noise nor repetition changes them. prefix_traces.py says what the traces are,
replay.py what a request does.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.accounting.prefix_traces import (
    BLOCK_TOKENS,
    PrefixTrace,
    TraceUnavailable,
    kv_tester,
    mooncake,
)
from benchmarks.accounting.replay import OnRequest, Replay, infinite, optimum, prompts, replay
from benchmarks.harness.report import Output, Run, Table, WithClaims, skip_without_traces
from quire.kv import DEFAULT_POLICY, EVICTION_POLICIES
from quire.planner.hit_rates.optimum import Optimum
from quire.units import format_seconds

LRU = "lru"
_OWN = "lru,lru-2,choice"
SMALLEST_GAP = 0.05  # percentage points between LRU and the optimum: less is no gap
MILLION = 10**6


@dataclass(slots=True, kw_only=True)
class Results:
    """One trace."""

    trace: PrefixTrace
    infinite: Replay
    optimum: dict[int, Replay] = field(default_factory=dict)  # by millions of tokens
    policies: dict[str, dict[int, Replay]] = field(default_factory=dict)  # by name, by the same

    def percent(self, found: Replay) -> float:
        return 100 * found.hit_tokens / self.trace.num_tokens

    def hit(self, policy: str, size: int) -> float:
        """Percent of the prompts' tokens that were found."""
        return self.percent(self.policies[policy][size])

    def gap(self, size: int) -> float:
        """Percentage points between LRU and the optimum."""
        return self.percent(self.optimum[size]) - self.hit(LRU, size)

    def closed(self, policy: str, size: int) -> float | None:
        """The share of that gap which a policy closes; None where there is none to speak of."""
        gap = self.gap(size)
        return (self.hit(policy, size) - self.hit(LRU, size)) / gap if gap > SMALLEST_GAP else None


# -- what is run ---------------------------------------------------------------------------------


def measure(
    trace: PrefixTrace, policies: Iterable[str], sizes: Iterable[int], progress: Progress
) -> Results:
    found, future = Results(trace=trace, infinite=infinite(trace)), Optimum(prompts(trace))
    runs = [(size, name) for size in sizes for name in ("", *policies)]  # "": the optimum
    count = len(trace.chains)
    task = progress.add_task(trace.name, total=len(runs) * count)
    for number, (size, name) in enumerate(runs):
        num_blocks = size * MILLION // BLOCK_TOKENS
        what = f"{trace.name}, {size} M tokens, {name or 'optimum'}"
        progress.update(task, description=what)
        on_request = _teller(progress, task, number * count)
        begun = time.monotonic()
        if name:
            result = replay(trace, num_blocks, name, on_request)
            found.policies.setdefault(name, {})[size] = result
        else:
            result = found.optimum[size] = optimum(trace, future, num_blocks, on_request)
        progress.update(task, completed=(number + 1) * count)
        if not progress.console.is_terminal:
            spent = format_seconds(time.monotonic() - begun)
            progress.console.print(f"{what}: {found.percent(result):.2f} %, {spent}", markup=False)
    return found


def _teller(progress: Progress, task: Any, before: int) -> OnRequest:
    return lambda done: progress.update(task, completed=before + done)


# -- what is shown -------------------------------------------------------------------------------


def table(found: Results) -> Table:
    sizes, trace = list(found.optimum), found.trace
    rows = [["optimum", *(f"{found.percent(found.optimum[size]):.2f}" for size in sizes)]]
    for name, by_size in found.policies.items():
        cells = []
        for size, result in by_size.items():
            closed = found.closed(name, size)
            share = "" if closed is None or name == LRU else f" ({100 * closed:.0f} %)"
            cells.append(f"{found.hit(name, size):.2f}{share}, {result.us_a_request:,.0f} µs")
        rows.append([name + " (default)" * (name == DEFAULT_POLICY), *cells])
    title = (
        f"{trace.name}: hits in percent of prompt tokens (share of the gap from LRU to the optimum "
        f"closed), time a request"
    )
    return Table(
        title=title, columns=("policy", *(f"{size} M tokens" for size in sizes)), rows=rows
    )


def notes(every: Iterable[Results]) -> Iterable[str]:
    for found in every:
        trace = found.trace
        yield (
            f"{trace.name}: {len(trace.chains):,} requests, {trace.num_tokens / MILLION:,.0f} M "
            f"prompt tokens; a cache without end finds {found.percent(found.infinite):.2f} %."
        )
        for name, by_size in found.policies.items():
            for size, result in by_size.items():
                if result.refused:
                    yield (
                        f"{trace.name}, {size} M tokens, {name}: {result.refused} requests were "
                        f"larger than the cache, found what there was, and were not kept."
                    )


# -- what is claimed -----------------------------------------------------------------------------


def claims(every: Iterable[Results], policy: str) -> Iterable[dict[str, Any]]:
    """Each goal for the default policy: ``peer`` is LRU in the same core."""
    for found in every:
        yield from _against_lru(found, policy)
        if found.trace.name == "Mooncake" and 1 in found.optimum:
            ours, lru = found.hit(policy, 1), found.hit(LRU, 1)
            text = f"Mooncake, 1 M tokens, {policy}: hits against LRU's"
            yield _claim(text, ours, lru, "%", ours / lru, ">= 2 x", holds=ours >= 2 * lru)
        for size in found.optimum:
            closed = found.closed(policy, size)
            if closed is not None:
                text = f"{found.trace.name}, {size} M tokens, {policy}: share of LRU's gap closed"
                gap = found.gap(size)
                yield _claim(
                    text, closed * gap, gap, "points", closed, ">= 0.5", holds=closed >= 0.5
                )


def _against_lru(found: Results, policy: str) -> Iterable[dict[str, Any]]:
    """The size at which the policy does worst against LRU."""
    size = min(found.optimum, key=lambda at: found.hit(policy, at) - found.hit(LRU, at))
    ours, lru = found.hit(policy, size), found.hit(LRU, size)
    text = f"{found.trace.name}, {policy}: never worse than LRU; the worst is at {size} M tokens"
    holds = round(ours, 2) >= round(lru, 2)
    yield _claim(text, ours, lru, "%", ours / lru, ">= 1 x, to 0.01 points", holds=holds)


def _claim(
    claim: str, ours: float, peer: float, unit: str, ratio: float, goal: str, *, holds: bool
) -> dict[str, Any]:
    return {
        "claim": claim, "ours": round(ours, 3), "peer": round(peer, 3), "unit": unit,
        "ratio": round(ratio, 4), "goal": goal, "holds": holds,
    }  # fmt: skip


# -- the command ---------------------------------------------------------------------------------


app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    traces: Annotated[
        Path | None, typer.Option(help="Folder that has mooncake_conversation.jsonl. Needed.")
    ] = None,
    kv_tester_path: Annotated[
        Path | None,
        typer.Option(
            "--kv-tester", help="kv-cache-tester too: its .tar.zst, or the folder unpacked from it."
        ),
    ] = None,
    hours: Annotated[
        float, typer.Option(help="kv-cache-tester: conversations begin within so many hours.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="kv-cache-tester: of when they begin.")] = 0,
    sizes: Annotated[str, typer.Option(help="Sizes of the cache, in millions of tokens.")] = (
        "1,4,16,50"
    ),
    policies: Annotated[str, typer.Option(help="Policies to run beside LRU.")] = _OWN,
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Hit rates of every eviction policy on real traces, against LRU and Belady's optimum.

    The policies run in Quire's own core. Sizes are what the cache holds; hits are in percent of all
    prompt tokens, and requests are instantaneous.
    """
    if traces is None:
        skip_without_traces(with_claims, output, "; prefix_traces.py names them")
        return
    run = Run("accounting.bench_eviction", width=180)
    names = list(dict.fromkeys([LRU, *_known(policies)]))
    if with_claims and DEFAULT_POLICY not in names:
        raise typer.BadParameter(f"--claims is about {DEFAULT_POLICY}, which --policies leaves out")
    read, said = _read(traces, kv_tester_path, hours, seed, run.aside)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=run.aside) as progress:
        every = [measure(trace, names, _numbers(sizes), progress) for trace in read]
    flags = _flags(kv_tester_path is not None, hours, seed, sizes, policies)
    run.end(
        [table(found) for found in every],
        run.setting(f" --traces …{flags}"),
        notes=[*said, *notes(every)],
        claims=claims(every, DEFAULT_POLICY) if with_claims else (),
        output=output,
    )


def _read(
    folder: Path, kv_tester_path: Path | None, hours: float, seed: int, aside: Console
) -> tuple[list[PrefixTrace], list[str]]:
    """The traces that there are, and what to say of one that is not."""

    def say(line: str) -> None:
        aside.print(line, markup=False)

    try:
        read, said = [mooncake(folder)], []
    except TraceUnavailable as error:
        raise typer.BadParameter(f"--traces: {error}") from error
    if kv_tester_path:
        try:
            read.append(kv_tester(kv_tester_path, seed=seed, hours=hours, say=say))
        except TraceUnavailable as error:
            said.append(f"SKIPPED: {error}.")
            say(said[-1])
    return read, said


def _known(policies: str) -> list[str]:
    names = policies.split(",")
    if unknown := [name for name in names if name not in EVICTION_POLICIES]:
        raise typer.BadParameter(f"--policies {unknown}: known are {', '.join(EVICTION_POLICIES)}")
    return names


def _numbers(sizes: str) -> list[int]:
    try:
        found = [int(size) for size in sizes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--sizes {sizes}: whole millions, such as 1,4,16,50") from error
    if min(found) < 1:
        raise typer.BadParameter(f"--sizes {sizes}: at least 1")
    return found


def _flags(with_kv_tester: bool, hours: float, seed: int, sizes: str, policies: str) -> str:
    flags = f" --kv-tester … --hours {hours:g} --seed {seed}" * with_kv_tester
    flags += f" --sizes {sizes}" * (sizes != "1,4,16,50")
    return flags + f" --policies {policies}" * (policies != _OWN)


if __name__ == "__main__":
    app()
