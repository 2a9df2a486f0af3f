"""What the default eviction policy finds beside LRU and the optimum, at many sizes, with hints too.

Each trace in whole blocks of 512 tokens, as an engine keeps them, through the policy's own code
(``PolicyReplay``). Hit rates are exact: neither noise nor repetition changes them.

A hint is one bit a request: no later prompt goes on behind this one. It is right, or turned around
for a share of the requests, drawn from a seed. What right hints are worth is what is found where
they are believed without a trial: what has ended goes first, or as if it had been used a pool's
size earlier, whichever finds more.

Traffic that is *held out* was not looked at while the constants of the trials were chosen: it is
conversations that are drawn from three other seeds. The second half of a trace by itself stands
beside it, though the whole trace was in view.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.accounting.generated_traffic import as_prompts, circle, generated, generated_kind
from benchmarks.accounting.prefix_traces import BLOCK_TOKENS, MOONCAKE
from benchmarks.harness.report import Output, Run, Table, WithClaims, skip_without_traces
from quire.kv import EVICTION_POLICIES
from quire.kv.eviction import Recency
from quire.kv.order_trials import Order
from quire.planner.hit_rates import Prompts, prompts_of
from quire.planner.hit_rates.optimum import Optimum
from quire.planner.hit_rates.policy_replay import PolicyReplay
from quire.planner.hit_rates.stack_distances import lru_hits
from quire.traces import TraceRequest, open_trace

KV_TESTER = "kv-cache-tester.tar.zst"
TRACES = {"Mooncake": MOONCAKE, "kv-cache-tester": KV_TESTER}
DRAWN_ONLY = "drawn"
TracesFolder = Annotated[
    Path | None,
    typer.Option(help=f"Folder that has {MOONCAKE} and, if wanted, {KV_TESTER}. Needed."),
]
MILLION = 10**6
NUM_SIZES, FROM_TOKENS, TO_TOKENS = 24, MILLION // 2, 64 * MILLION
WRONG = (0.0, 0.2, 0.33)  # shares of the hints
_EVERY = 4  # one in so many sizes with hints
LOOP_BLOCKS, LOOP_CACHE, LOOP_ROUNDS = 8_800, 8_000, 12
WORTH_TOKENS = (1, 2, 4, 8, 16)  # millions
DRAWN, DRAWN_SEEDS, DRAWN_PARTS = ("conversations", "long conversations"), (1, 2, 3), (0.02, 0.05)
COLUMNS = ("lru", "choice", "choice / lru", "optimum")
PARTS = (0.03, 0.1, 0.2, 0.4, 0.7)  # of the blocks of generated traffic: sizes of the cache


@dataclass(slots=True, kw_only=True)
class Found:
    """Percent of a trace's prompt tokens, at one size."""

    blocks: int
    lru: float
    optimum: float
    choice: float
    hinted: list[float] = field(default_factory=list)  # as many as WRONG, or none

    @property
    def tokens(self) -> float:
        return self.blocks * BLOCK_TOKENS / MILLION


def found_traces(
    folder: Path, notes: list[str], only: str | None = None
) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each trace in a folder, and note those that are not there.

    ``only``: the one that is asked for; None: all.
    """
    for name, file in TRACES.items():
        if only not in (None, name):
            continue
        if (path := folder / file).exists():
            yield name, path
        else:
            notes.append(f"SKIPPED: {name}: there is no {file} in the traces' folder.")


def measure(name: str, prompts: Prompts, seed: int, run: Run) -> list[Found]:
    """Replay a trace at each size."""
    tokens = np.geomspace(FROM_TOKENS, TO_TOKENS, NUM_SIZES)
    sizes = [int(each) // BLOCK_TOKENS for each in tokens]
    replay, found = PolicyReplay(prompts), list[Found]()
    hints = [_hints(prompts, wrong, seed) for wrong in WRONG]
    percent = 100 / prompts.num_tokens
    for number, each in enumerate(_found(prompts, replay, sizes)):
        if number % _EVERY == 0:
            each.hinted = [
                replay.hits(each.blocks, "choice", ended=ended) * percent for ended in hints
            ]
        run.aside.print(f"{name}, {each.tokens:.1f} M tokens: {each}", markup=False)
        found.append(each)
    return found


def _found(prompts: Prompts, replay: PolicyReplay, sizes: Sequence[int]) -> Iterator[Found]:
    future, percent = Optimum(prompts), 100 / prompts.num_tokens
    for size, lru in zip(sizes, lru_hits(prompts, sizes), strict=True):
        yield Found(
            blocks=size,
            lru=lru * percent,
            optimum=future.hits(size) * percent,
            choice=replay.hits(size, "choice") * percent,
        )


def _hints(prompts: Prompts, wrong: float, seed: int) -> list[bool]:
    """Return for each request whether its client says that no prompt will go on behind it."""
    ended = ends_of(prompts, prompts.num_requests)
    turned = np.random.default_rng(seed).random(len(ended)) < wrong
    said: list[bool] = (ended ^ turned).tolist()
    return said


def ends_of(prompts: Prompts, num_requests: int) -> npt.NDArray[np.bool_]:
    """Return for each of the first requests whether none of the others goes on behind it."""
    last_use = dict[int, int]()
    for number in range(num_requests):
        last_use.update(dict.fromkeys(prompts.path(number), number))
    return np.array([last_use.get(end) == at for at, end in enumerate(prompts.ends[:num_requests])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What hints bring, in percent of prompt tokens, at one size."""

    traffic: str
    is_held_out: bool
    size: str
    lru: float
    without: float  # hints: `choice` alone
    right: float
    believed: float  # the better order of the two, without a trial
    wrong: list[float]  # as many as WRONG has beyond none

    @property
    def share(self) -> float:
        """Return which part of what right hints are worth is found; NaN where that is nothing."""
        worth = self.believed - self.lru
        return (self.right - self.lru) / worth if worth > 0 else math.nan


@contextmanager
def believers() -> Iterator[list[str]]:
    """Have policies that believe clients without a trial, and yield their names."""
    orders = {f"believe-{each.name}": each for each in (Order.ENDED_EARLIER, Order.ENDED_FIRST)}
    for name, order in orders.items():
        EVICTION_POLICIES.register(name, partial(Recency, order=order))
    try:
        yield list(orders)
    finally:
        for name in orders:
            EVICTION_POLICIES.unregister(name)


def worth(
    traffic: str, prompts: Prompts, sizes: dict[str, int], seed: int, *, is_held_out: bool
) -> Iterator[Worth]:
    """Yield what hints bring, by the size of the cache in words and in blocks."""
    replay, percent = PolicyReplay(prompts), 100 / prompts.num_tokens
    right, *wrong = (_hints(prompts, share, seed) for share in WRONG)
    for words, size in sizes.items():
        with believers() as names:
            believed = max(replay.hits(size, name, ended=right) for name in names)
        yield Worth(
            traffic=traffic,
            is_held_out=is_held_out,
            size=words,
            lru=lru_hits(prompts, [size])[0] * percent,
            without=replay.hits(size, "choice") * percent,
            right=replay.hits(size, "choice", ended=right) * percent,
            believed=believed * percent,
            wrong=[replay.hits(size, "choice", ended=each) * percent for each in wrong],
        )


def worths_of(
    name: str, requests: Sequence[TraceRequest], millions: Sequence[float], seed: int
) -> Iterator[Worth]:
    """Yield what hints bring in a trace, and in the second half of it by itself."""
    sizes = {f"{each:g} M tokens": int(each * MILLION) // BLOCK_TOKENS for each in millions}
    halves = {name: requests, f"{name}, second half": requests[len(requests) // 2 :]}
    for traffic, part in halves.items():
        prompts = prompts_of(part, block_tokens=BLOCK_TOKENS, whole_blocks=True)
        yield from worth(traffic, prompts, sizes, seed, is_held_out=False)


def worths_of_drawn() -> Iterator[Worth]:
    """Yield what hints bring in conversations that are drawn."""
    for kind in DRAWN:
        for seed in DRAWN_SEEDS:
            prompts = generated_kind(kind, seed)
            counts = (int(prompts.num_blocks * part) for part in DRAWN_PARTS)
            sizes = {f"{count:,} blocks": count for count in counts}
            yield from worth(f"{kind}, seed {seed}", prompts, sizes, seed, is_held_out=True)


def loop() -> Found:
    """Blocks that are read in a circle, 22 at a time, and are a tenth more than the cache has."""
    prompts = as_prompts(circle(LOOP_BLOCKS, LOOP_ROUNDS))
    [found] = _found(prompts, PolicyReplay(prompts), [LOOP_CACHE])
    return found


def made_up(seed: int) -> Iterator[tuple[str, Found]]:
    """Yield what is found of generated traffic: its kind, and each size."""
    for name, prompts in generated(seed):
        sizes = [max(100, int(prompts.num_blocks * part)) for part in PARTS]
        for each in _found(prompts, PolicyReplay(prompts), sizes):
            yield name, each


# -- what is shown ---------------------------------------------------------------------------------


def table(name: str, found: Sequence[Found]) -> Table:
    rows = []
    for each in found:
        hinted = [f"{percent:.2f}" for percent in each.hinted] or ["" for _ in WRONG]
        rows.append([f"{each.tokens:.2f}", *_cells(each), *hinted])
    titles = (f"hints, {100 * wrong:.0f} % wrong" for wrong in WRONG)
    return Table(
        title=f"{name}: found in percent of prompt tokens",
        columns=("M tokens", *COLUMNS, *titles),
        rows=rows,
    )


def table_of_made_up(found: Sequence[tuple[str, Found]]) -> Table:
    return Table(
        title="Generated traffic: found in percent of prompt blocks",
        columns=("traffic", "blocks", *COLUMNS),
        rows=[[kind, f"{each.blocks:,}", *_cells(each)] for kind, each in found],
    )


def table_of_worth(found: Sequence[Worth]) -> Table:
    titles = (f"hints, {100 * wrong:.0f} % wrong" for wrong in WRONG[1:])
    return Table(
        title="What hints bring: found in percent of prompt tokens",
        columns=(
            "traffic", "held out", "size", "lru", "choice", "right hints", "believed", "share",
            *titles,
        ),
        rows=[
            [
                each.traffic, "yes" if each.is_held_out else "no", each.size, f"{each.lru:.2f}",
                f"{each.without:.2f}", f"{each.right:.2f}", f"{each.believed:.2f}",
                f"{each.share:.2f}", *(f"{wrong:.2f}" for wrong in each.wrong),
            ]
            for each in found
        ],
    )  # fmt: skip


def _cells(found: Found) -> list[str]:
    """Return what stands below ``COLUMNS``."""
    ratio = f"{found.choice / found.lru:.3f}" if found.lru else ""
    return [f"{found.lru:.2f}", f"{found.choice:.2f}", ratio, f"{found.optimum:.2f}"]


def claims(
    every: dict[str, list[Found]],
    generated: Sequence[tuple[str, Found]],
    circle: Found,
    worths: Sequence[Worth],
) -> Iterator[dict[str, Any]]:
    for name, found in every.items():
        worst = min(found, key=lambda each: each.choice / each.lru)
        yield _claim(
            f"{name}: choice against LRU at {len(found)} sizes, the worst at {worst.tokens:.1f} M",
            (worst.choice, worst.lru),
            ">= 0.99 x",
            holds=worst.choice >= 0.99 * worst.lru,
        )
        with_hints = [each for each in found if each.hinted]
        worst = min(with_hints, key=lambda each: each.hinted[-1] / each.lru)
        yield _claim(
            f"{name}: a third of the hints wrong, against LRU, the worst at {worst.tokens:.1f} M",
            (worst.hinted[-1], worst.lru),
            ">= 1 x",
            holds=worst.hinted[-1] >= worst.lru,
        )
    for is_held_out in (False, True):
        part = [each for each in worths if each.is_held_out is is_held_out]
        if not part:
            continue
        worthy = [each for each in part if not math.isnan(each.share)]
        least = min(worthy or part, key=lambda each: each.share)
        yield _claim(
            f"right hints{' on traffic held out' * is_held_out}, the least share of their worth: "
            f"{least.traffic}, {least.size}",
            (least.right - least.lru, least.believed - least.lru),
            ">= 0.8 x",
            holds=least.share >= 0.8,
        )
        lowest = min(part, key=lambda each: each.wrong[-1] / each.lru)
        yield _claim(
            f"a third of the hints wrong{', on traffic held out' * is_held_out}, against LRU: "
            f"{lowest.traffic}, {lowest.size}",
            (lowest.wrong[-1], lowest.lru),
            ">= 1 x",
            holds=lowest.wrong[-1] >= lowest.lru,
        )
    if generated:
        kind, worst = min(
            ((kind, each) for kind, each in generated if each.lru),
            key=lambda pair: pair[1].choice / pair[1].lru,
        )
        yield _claim(
            f"generated traffic: choice against LRU, the worst: {kind}, {worst.blocks:,} blocks",
            (worst.choice, worst.lru),
            ">= 0.99 x",
            holds=worst.choice >= 0.99 * worst.lru,
        )
    yield _claim(
        f"{LOOP_BLOCKS:,} blocks in a circle, a cache of {LOOP_CACHE:,}: found, and the optimum",
        (circle.choice, circle.optimum),
        ">= 40 %",
        holds=circle.choice >= 40,
    )


def _claim(claim: str, figures: tuple[float, float], goal: str, *, holds: bool) -> dict[str, Any]:
    ours, peer = figures
    return {
        "claim": claim, "ours": round(ours, 3), "peer": round(peer, 3), "unit": "%",
        "ratio": round(ours / peer, 4), "goal": goal, "holds": holds,
    }  # fmt: skip


# -- the command -----------------------------------------------------------------------------------


app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    traces: TracesFolder = None,
    seed: Annotated[
        int, typer.Option(help="Of wrong hints, when agents begin, and generated traffic.")
    ] = 0,
    hints_only: Annotated[
        bool, typer.Option(help="Only what hints bring, also on traffic that is held out.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            help=f"Only what hints bring, and only there: {', '.join(TRACES)}, or {DRAWN_ONLY}."
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Of caches, in millions of tokens, where hints are judged.")
    ] = ",".join(map(str, WORTH_TOKENS)),
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Hit rates of the default eviction policy at 24 sizes, beside LRU and the optimum."""
    if traces is None:
        skip_without_traces(with_claims, output)
        return
    if only not in (None, DRAWN_ONLY, *TRACES):
        known = ", ".join((*TRACES, DRAWN_ONLY))
        raise typer.BadParameter(f"--only {only!r} is unknown; known: {known}")
    try:
        millions = [float(each) for each in sizes.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--sizes {sizes!r}: numbers with commas are wanted") from None
    hints_only = hints_only or only is not None
    asked = f" --only {only}" if only else " --hints-only" * hints_only
    asked += f" --sizes {sizes}" * (millions != list(WORTH_TOKENS))
    run = Run("accounting.bench_orders", width=150)
    every, notes, worths = dict[str, list[Found]](), list[str](), list[Worth]()
    for name, path in found_traces(traces, notes, only):
        requests = list(open_trace(path, seed=seed))
        for each in worths_of(name, requests, millions, seed):
            run.aside.print(each, markup=False)
            worths.append(each)
        if not hints_only:
            prompts = prompts_of(requests, block_tokens=BLOCK_TOKENS, whole_blocks=True)
            every[name] = measure(name, prompts, seed, run)
    if only in (None, DRAWN_ONLY):
        worths += worths_of_drawn()
    of_loop, of_made_up = loop(), [] if hints_only else [*made_up(seed)]
    run.end(
        [
            *(table(name, found) for name, found in every.items()),
            table_of_worth(worths),
            *([] if hints_only else [table_of_made_up(of_made_up)]),
            table("A circle", [of_loop]),
        ],
        run.setting(f" --traces … --seed {seed}" + asked),
        notes=notes,
        claims=claims(every, of_made_up, of_loop, worths) if with_claims else (),
        output=output,
    )


if __name__ == "__main__":
    app()
