"""What the planner predicts by data sheets, against what others have measured and published.

``published.toml`` has the figures, each with its source; none is of our own making. A saturated
server, and one with so many requests at a time, are those of ``quire plan``; a fixed batch and a
first token are added up from the cost model's steps. One set of constants
(``quire.planner.hardware``) serves every model and device.

    python -m benchmarks.planner.bench_published [--only SOURCE]
"""

import statistics
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.report import Output, Run, Table, WithClaims
from quire.cli.plan import place_of
from quire.config import EngineConfig
from quire.planner.capacity import plan
from quire.planner.hardware import (
    BANDWIDTH_FRACTION,
    COMPUTE_FRACTION,
    EXCHANGE_S,
    EXPERT_FRACTION,
    LAYER_S,
    STEP_S,
    roofline,
)
from quire.planner.saturation import saturated
from quire.planner.sequence_memory import PlannedLengths
from quire.planner.simulation.cost_model import Reach, RooflineCosts, StepWork, first_token_s
from quire.planner.subject import Subject, find_subject, subject_of
from quire.spec import ModelSpec
from quire.spec.tensor_parallel import rank_spec

DATA = Path(__file__).with_name("published.toml")
GOAL_ERROR = 0.25
# As in the sources: trtllm-bench's defaults, and its share of the memory.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MEMORY_UTILIZATION = 2048, 8192, 0.95
# Requests of a run by its lengths, as TensorRT-LLM's pages list them.
NUM_REQUESTS = {128 + 2048: 3000, 2500: 3000, 2000: 3000, 2048: 3000, 22_000: 1000}
NUM_OTHERS = 1500
STRIDE = 16  # tokens of an answer between two looks at a fixed batch

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A published figure."""

    source: str  # its key
    kind: str
    model: str
    weights: str
    kv: str
    device: str
    tp: int
    batch: int  # of a fixed batch, or requests at a time; 0: as many as fit
    input_tokens: int
    output_tokens: int
    measured: float

    @property
    def lengths(self) -> str:
        batch = f"{self.batch} × " if self.batch else ""
        return f"{batch}{self.input_tokens:,} + {self.output_tokens:,}"


def read(path: Path = DATA) -> tuple[list[Point], Mapping[str, Any]]:
    """Read the figures, and the whole file. Raises: ValueError for one without a source."""
    said = tomllib.loads(path.read_text(encoding="utf-8"))
    return list(_points(said)), said


def _points(said: Mapping[str, Any]) -> Iterator[Point]:
    for series in said["series"]:
        if series["source"] not in said["sources"]:
            raise ValueError(f"{series['model']}: no source {series['source']!r}")
        kind = series["kind"]
        for row in series["rows"]:
            *before, measured = row
            batch = before.pop(0) if kind in ("batch", "tpot") else 0
            yield Point(
                source=series["source"],
                kind=kind,
                model=series["model"],
                weights=series.get("weights", "published"),
                kv=series.get("kv", "auto"),
                device=series["device"],
                tp=series.get("tp", 1),
                batch=batch,
                input_tokens=before[0],
                output_tokens=before[1] if len(before) > 1 else 1,
                measured=float(measured),
            )


# -- predictions -----------------------------------------------------------------------------------


def predicted(point: Point, configs: Mapping[str, Any]) -> float:
    """Predict a figure in its own unit: tokens a second, or milliseconds."""
    subject = _subject(point, configs)
    on_rank = rank_spec(subject.spec, point.tp)
    stored = on_rank if point.kv == "auto" else on_rank.with_kv_dtype("float8_e4m3fn")
    costs = roofline(subject, stored, point.device, point.tp)
    if point.kind == "ttft":
        reach = Reach(stored.groups)
        return 1e3 * first_token_s(costs, reach, point.input_tokens, MAX_NUM_BATCHED_TOKENS)
    if point.kind == "batch":
        return _fixed_batch(point, stored, costs)
    return _served(point, subject, costs)


def _subject(point: Point, configs: Mapping[str, Any]) -> Subject:
    if point.model in configs:
        return subject_of(point.model, configs[point.model], weights=point.weights)
    return find_subject(point.model, weights=point.weights)


def _fixed_batch(point: Point, stored: ModelSpec, costs: RooflineCosts) -> float:
    """Add up the steps of a batch that begins and ends together."""
    reach, batch = Reach(stored.groups), point.batch
    in_a_step = max(1, MAX_NUM_BATCHED_TOKENS // point.input_tokens)
    seconds = 0.0
    for begin in range(0, batch, in_a_step):
        count = min(in_a_step, batch - begin)
        read_, attended = reach.of_range(0, point.input_tokens)
        tokens = count * point.input_tokens
        work = StepWork(tokens, count, count, count * read_, count * attended, count)
        seconds += costs.seconds(work)
    for length in range(point.input_tokens, point.input_tokens + point.output_tokens, STRIDE):
        read_, attended = reach.of_range(length, length + 1)
        work = StepWork(batch, batch, batch, batch * read_, batch * attended)
        seconds += STRIDE * costs.seconds(work)
    return batch * point.output_tokens / seconds


def _served(point: Point, subject: Subject, costs: RooflineCosts) -> float:
    """Plan a server with all requests in its queue from the start, and ask what it computes."""
    longest = point.input_tokens + point.output_tokens
    config = EngineConfig.from_options(
        cache="paged",
        max_model_len=longest + 1,
        max_num_seqs=point.batch or MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        budget="vllm",
        memory_utilization=MEMORY_UTILIZATION,
        kv_cache_dtype=point.kv,
    )
    request = PlannedLengths(input_tokens=point.input_tokens, output_tokens=point.output_tokens)
    place = place_of(None, point.device)
    found = plan(subject, config, place, num_ranks=point.tp, request=request, compare=False)
    most = point.batch or NUM_REQUESTS.get(longest, NUM_OTHERS)
    full = saturated(found, costs, num_requests=most)
    if full is None:
        raise ValueError(f"{point.model} does not fit {point.tp} × {point.device}")
    return 1e3 * full.step_s if point.kind == "tpot" else full.output_tokens_per_s


# -- what is shown ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    point: Point
    predicted: float

    @property
    def error(self) -> float:
        """Relative; above 0 the prediction is too high."""
        return self.predicted / self.point.measured - 1


def tables(found: list[Compared]) -> list[Table]:
    """One table of all points, and one of the errors by what they have in common."""
    rows = [
        [
            each.point.source,
            each.point.model.rpartition("/")[2],
            "as published" if each.point.weights == "published" else each.point.weights,
            f"{each.point.tp} × {each.point.device}",
            each.point.lengths,
            f"{each.point.measured:,.4g} {UNITS[each.point.kind]}",
            f"{each.predicted:,.4g}",
            f"{each.error:+.0%}",
        ]
        for each in found
    ]
    columns = ("source", "model", "weights", "device", "tokens", "measured", "predicted", "error")
    groups: dict[str, list[Compared]] = {"all": found}
    for each in found:
        groups.setdefault(f"kind: {each.point.kind}", []).append(each)
        groups.setdefault(f"source: {each.point.source}", []).append(each)
        groups.setdefault(f"weights: {each.point.weights}", []).append(each)
    summary = [
        [
            name,
            str(len(several)),
            f"{statistics.median(abs(each.error) for each in several):.1%}",
            f"{statistics.median(each.error for each in several):+.1%}",
            str(sum(abs(each.error) > GOAL_ERROR for each in several)),
        ]
        for name, several in groups.items()
    ]
    heads = ("points", "how many", "median error", "median, signed", f"above {GOAL_ERROR:.0%}")
    return [
        Table(title="Published and predicted", columns=columns, rows=rows),
        Table(title="Errors", columns=heads, rows=summary),
    ]


UNITS = {"saturation": "tok/s", "batch": "tok/s", "tpot": "ms a token", "ttft": "ms"}


def claims(found: list[Compared]) -> list[dict[str, Any]]:
    median = statistics.median(abs(each.error) for each in found)
    return [
        {
            "claim": "median error against published figures",
            "value": round(median, 4),
            "points": len(found),
            "goal": GOAL_ERROR,
            "holds": median <= GOAL_ERROR,
        }
    ]


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Points of one source, by its key.")] = "",
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Predict each published figure by data sheets, and print both."""
    points, said = read()
    if only and only not in said["sources"]:
        raise typer.BadParameter(f"--only {only}: there is {', '.join(said['sources'])}")
    points = [point for point in points if only in ("", point.source)]
    run = Run("planner.bench_published", width=180)
    found = []
    with run.aside.status("") as status:
        for number, point in enumerate(points, 1):
            status.update(f"{number} of {len(points)}: {point.model}, {point.lengths} …")
            found.append(Compared(point=point, predicted=predicted(point, said["configs"])))
    constants = (
        f"constants of all points: {COMPUTE_FRACTION} of the peak products (experts "
        f"{EXPERT_FRACTION}), {BANDWIDTH_FRACTION} of the bandwidth, {1e3 * STEP_S:g} ms a step, "
        f"{1e6 * LAYER_S:g} µs a layer, {1e6 * EXCHANGE_S:g} µs an exchange"
    )
    run.end(
        tables(found),
        run.setting(f" --only {only}" if only else "", also=[constants]),
        claims=claims(found) if with_claims else (),
        output=output,
    )


if __name__ == "__main__":
    app()
