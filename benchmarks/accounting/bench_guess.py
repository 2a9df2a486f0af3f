"""Can the end of a conversation be guessed, where its client does not say it?

    pip install scikit-learn      # for this benchmark alone
    python -m benchmarks.accounting.bench_guess --traces … --sizes 1,2,4,8,16

Of each request, what a server knows when it has come and gone: its turn, the time since the turn
before, how many others went on behind the same prefix, lengths. Trees (scikit-learn's histogram
gradient boosting) are fitted to the first half of a trace, with what that half alone tells of which
conversations go on, and judged on the second half: as a guess, and by what ``choice`` finds with
the guess as a hint, beside what it finds with the right bit and with none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.accounting.bench_orders import TracesFolder, ends_of, found_traces
from benchmarks.accounting.prefix_traces import BLOCK_TOKENS
from benchmarks.harness.report import Output, Run, Table, WithClaims, skip_without_traces
from quire.planner.hit_rates import Prompts, prompts_of
from quire.planner.hit_rates.policy_replay import PolicyReplay
from quire.planner.hit_rates.stack_distances import lru_hits
from quire.traces import TraceRequest, open_trace

FEATURES = (
    "turn", "gap", "mean gap", "fan-out", "uses", "idle", "age", "grown by", "length before",
    "share known", "blocks", "tokens", "output", "depth", "end used",
)  # fmt: skip
ASKED = 6  # the first of them: turn number, spacing of turns, fan-out
FITTED, THRESHOLDS = 0.85, (0.5, 0.7, 0.85)  # the rest of the half tells too little of what returns

Bits = npt.NDArray[np.bool_]
Table2 = npt.NDArray[np.float64]


def features(prompts: Prompts, requests: list[TraceRequest]) -> Table2:
    """Return what is known of each request when it ends. Shapes: [requests, FEATURES]."""
    turns: dict[int, tuple[int, float, float, float, int]] = {}  # by the stretch where one ended
    uses, last_s = dict[int, int](), dict[int, float]()
    children: dict[int, set[int]] = {}
    lengths, rows = prompts.num_blocks_of_each(), list[tuple[float, ...]]()
    for number, request in enumerate(requests):
        path, now_s, length = prompts.path(number), prompts.at_s[number], lengths[number]
        known = [each for each in path if each in uses]
        before = next((turns[each] for each in reversed(path) if each in turns), None)
        turn, gap_s, mean_s, first_s, grown, length_before = 1, -1.0, -1.0, now_s, length, 0
        if before is not None:
            last_turn, at_s, last_mean_s, first_s, length_before = before
            turn, gap_s, grown = last_turn + 1, now_s - at_s, length - length_before
            mean_s = gap_s if last_mean_s < 0 else (last_mean_s + gap_s) / 2
        deepest = known[-1] if known else None
        fan = num_uses = -1
        idle_s = -1.0
        if deepest is not None:
            fan, num_uses = len(children.get(deepest, ())), uses[deepest]
            idle_s = now_s - last_s[deepest]
        num_known = sum(prompts.lengths[each] for each in known)
        rows.append(
            (turn, gap_s, mean_s, fan, num_uses, idle_s, now_s - first_s, grown, length_before,
             num_known / length if length else 0, length, request.input_tokens,
             request.output_tokens, len(known), uses.get(path[-1], 0) if path else 0)
        )  # fmt: skip
        for above, each in zip([None, *path[:-1]], path, strict=True):
            uses[each], last_s[each] = uses.get(each, 0) + 1, now_s
            if above is not None:
                children.setdefault(above, set()).add(each)
        if path:
            turns[path[-1]] = turn, now_s, mean_s, first_s, length
    return np.array(rows, float)


def guesses(known: Table2, ends: Bits) -> npt.NDArray[np.float64]:
    """Fit to ``ends``, those of the first requests, and return every request's probability."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-not-found]

    model: Any = HistGradientBoostingClassifier(
        max_iter=150, learning_rate=0.06, max_leaf_nodes=15, min_samples_leaf=40, random_state=0
    )
    fitted = int(len(ends) * FITTED)
    model.fit(known[:fitted], ends[:fitted])
    found: npt.NDArray[np.float64] = model.predict_proba(known)[:, 1]
    return found


def area(guess: npt.NDArray[np.float64], ends: Bits) -> float:
    """Return in which share of pairs the one that ends has the higher guess; 0.5 is chance."""
    order = np.argsort(np.argsort(guess, kind="stable"), kind="stable") + 1
    num = int(ends.sum())
    return float((order[ends].sum() - num * (num + 1) / 2) / (num * (len(ends) - num)))


def measure(name: str, path: Path, sizes: list[float], run: Run) -> Iterator[Table]:
    requests = list(open_trace(path, seed=0))
    prompts = prompts_of(requests, block_tokens=BLOCK_TOKENS, whole_blocks=True)
    half = len(requests) // 2
    ends, known = ends_of(prompts, len(requests)), features(prompts, requests)
    seen = ends_of(prompts, half)
    several = {
        "turn, spacing, fan-out": guesses(known[:, :ASKED], seen),
        "all": guesses(known, seen),
    }
    rows = []
    for what, guess in several.items():
        right = float(((guess[half:] > 0.5) == ends[half:]).mean())
        rows.append([what, f"{area(guess[half:], ends[half:]):.2f}", f"{100 * right:.1f}"])
    always = max(ends[half:].mean(), 1 - ends[half:].mean())
    rows.append(["always the same", "0.50", f"{100 * always:.1f}"])
    yield Table(
        title=f"{name}: guesses at the ends of the second half",
        columns=("features", "area under ROC", "right, %"),
        rows=rows,
    )
    replay, percent = PolicyReplay(prompts), 100 / sum(prompts.prompt_tokens[half:])
    columns = [f"{what}, above {each}" for what in several for each in THRESHOLDS]
    rows = []
    for tokens in sizes:
        size = int(tokens * 1e6) // BLOCK_TOKENS
        lru = lru_hits(prompts, [size], first_counted=half)[0] * percent

        def found(said: Bits | None, size: int = size) -> float:
            hints = () if said is None else said.tolist()
            return percent * replay.hits(size, "choice", first_counted=half, ended=hints)

        plain, told = found(None), found(ends)
        best = max(plain, lru)
        cells = [f"{tokens:g}", f"{lru:.2f}", f"{plain:.2f}", f"{told:.2f}"]
        for guess in several.values():
            for least in THRESHOLDS:
                hits = found(guess > least)
                cells.append(f"{hits:.2f} ({(hits - best) / max(told - best, 0.01):+.2f})")
        run.aside.print(f"{name}: {cells}", markup=False)
        rows.append(cells)
    yield Table(
        title=f"{name}: found in percent of the second half (share of the right bit's gain)",
        columns=("M tokens", "lru", "choice", "right bit", *columns),
        rows=rows,
    )


app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    traces: TracesFolder = None,
    sizes: Annotated[str, typer.Option(help="M tokens of the cache, by commas.")] = "1,2,4,8,16",
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """What a guess at the ends of conversations is worth on traffic that it was not fitted to."""
    if traces is None:
        skip_without_traces(with_claims, output)
        return
    run = Run("accounting.bench_guess", width=200)
    shown, notes = list[Table](), list[str]()
    for name, path in found_traces(traces, notes):
        shown += measure(name, path, [float(each) for each in sizes.split(",")], run)
    run.end(shown, run.setting(f" --traces … --sizes {sizes}"), notes=notes, output=output)


if __name__ == "__main__":
    app()
