"""Memory of the four strategies and of Hugging Face's caches, by the system's own figures.

Every sample is a process of its own (cases.py), so that no allocator remembers another's
run; the samples of different caches are interleaved. Figures are medians, with (least … greatest)
where the samples differ.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness import os_memory
from benchmarks.harness.report import Output, Run, WithClaims
from benchmarks.memory.cases import Scenario
from benchmarks.memory.report import Sample, Samples, claims, extrapolated, tables
from quire.units import format_bytes

ALL_CASES = "ABCEF"  # D is measured with A and B
SPARE_BYTES = 4 * 2**30  # left to the rest of the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    label: str
    scenario: Scenario
    repeats: int
    needs_bytes: int = 3 * 2**30

    @property
    def key(self) -> str:
        return f"{self.scenario.case}: {self.label}"


# -- what is run ---------------------------------------------------------------------------------

GROWTHS: dict[str, dict[str, Any]] = {
    "uniform 256": {"growth": "uniform", "growth_tokens": 256},
    "doubling from 16": {"growth": "doubling", "growth_tokens": 16},
    "staggered 128 + layer % 64": {"growth": "staggered", "growth_tokens": 128},
}
ALL_100 = Scenario(
    case="A", cache="", num_seqs=64, prompt_tokens=100, chunk_tokens=100, num_tokens=100
)
ONE_100 = replace(ALL_100, case="B", num_seqs=1, max_num_seqs=64)
GROW = replace(ALL_100, case="C", cache="growing", num_seqs=8, num_tokens=1124, writes=False)
STEPS = replace(ALL_100, case="F", num_tokens=108)
WINDOW = Scenario(
    case="E",
    cache="",
    geometry="gemma-3-4b",
    num_seqs=1,
    prompt_tokens=8160,
    chunk_tokens=480,
    num_tokens=8192,
    max_model_len=8192,
)


def experiments(*, quick: bool) -> list[Experiment]:
    few, more = (1, 1) if quick else (3, 5)
    whole = 40_960 if not quick else 4_096
    one = replace(ALL_100, cache="contiguous", num_seqs=1, max_model_len=whole)
    whole_bytes = whole * 147_456
    found = [
        _held(ALL_100, "paged", more),
        _held(ALL_100, "virtual", more),
        _held(ALL_100, "growing", few, "growing, doubling from 16", GROWTHS["doubling from 16"]),
        _held(ALL_100, "DynamicCache", more),
        Experiment(
            label=f"contiguous, 1 x {whole:,}",
            scenario=one,
            repeats=min(few, 2),
            needs_bytes=whole_bytes,
        ),
        *(_held(ONE_100, cache, more) for cache in ("paged", "virtual", "DynamicCache")),
    ]
    if quick:
        return found
    two = replace(one, num_seqs=2)
    found += [
        *(
            _held(ALL_100, "growing", few, f"growing, {name}", GROWTHS[name])
            for name in ("uniform 256", "staggered 128 + layer % 64")
        ),
        Experiment(
            label="contiguous, 2 x 40,960", scenario=two, repeats=1, needs_bytes=2 * whole_bytes
        ),
        Experiment(
            label="StaticCache, 1 x 40,960",
            scenario=replace(one, cache="StaticCache"),
            repeats=2,
            needs_bytes=whole_bytes,
        ),
        _held(ONE_100, "growing", more, "growing, uniform 256", GROWTHS["uniform 256"]),
        *(_held(STEPS, cache, few) for cache in ("paged", "virtual", "DynamicCache")),
        *(
            _held(WINDOW, cache, few)
            for cache in ("paged", "virtual", "contiguous", "DynamicCache", "StaticCache")
        ),
        *_growth_peaks(),
    ]
    return found


def _held(
    base: Scenario,
    cache: str,
    repeats: int,
    label: str = "",
    options: dict[str, Any] | None = None,
) -> Experiment:
    scenario = replace(base, cache=cache, options=options or {})
    return Experiment(label=label or cache, scenario=scenario, repeats=repeats)


def _growth_peaks() -> Iterable[Experiment]:
    for name, growth in GROWTHS.items():
        for keep_old in (False, True):
            kept = "old kept" if keep_old else "old freed at once"
            for num_seqs, repeats in ((1, 3), (8, 1)):
                scenario = replace(
                    GROW, num_seqs=num_seqs, options={**growth, "keep_old": keep_old}
                )
                label = f"{num_seqs} x growing, {name}, {kept}"
                yield Experiment(label=label, scenario=scenario, repeats=repeats)
    hf = replace(
        GROW,
        cache="DynamicCache",
        writes=True,
        prompt_tokens=1120,
        chunk_tokens=1120,
    )
    yield Experiment(label="8 x DynamicCache, last 4 tokens only", scenario=hf, repeats=1)


def run_all(chosen: list[Experiment], seed: int, progress: Progress) -> tuple[Samples, list[str]]:
    """One sample of each in turn, until each has its repeats; what would not fit is skipped."""
    samples: Samples = defaultdict(list)
    skipped: dict[str, str] = {}
    task = progress.add_task("starting", total=sum(one.repeats for one in chosen))
    for turn in range(max(one.repeats for one in chosen)):
        for one in chosen:
            if turn >= one.repeats:
                continue
            progress.update(task, description=one.key)
            available = os_memory.available_bytes()
            if available < one.needs_bytes + SPARE_BYTES:
                skipped[one.key] = (
                    f"{one.key}: skipped, it needs {format_bytes(one.needs_bytes)} and "
                    f"{format_bytes(SPARE_BYTES)} to spare; {format_bytes(available)} is available"
                )
            else:
                samples[one.key].append(run_child(replace(one.scenario, seed=seed + turn)))
            progress.advance(task)
            if not progress.console.is_terminal:
                progress.console.print(f"turn {turn + 1}, {one.key}")
    return dict(samples), list(skipped.values())


def run_child(scenario: Scenario) -> Sample:
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory.cases", json.dumps(asdict(scenario))],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(f"{scenario} failed:\n{child.stderr}")
    sample: Sample = json.loads(child.stdout.splitlines()[-1])
    return sample


# -- the command ---------------------------------------------------------------------------------


app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="One run of what the claims need, contiguous with 4,096 tokens."
        ),
    ] = False,
    with_claims: WithClaims = False,
    cases: Annotated[
        str, typer.Option(help="Letters of the cases to run, as the tables are lettered.")
    ] = ALL_CASES,
    output: Output = None,
    samples_file: Annotated[
        Path | None, typer.Option("--samples", help="Write every sample's figures as JSON.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random keys and values; one more a turn.")] = 0,
) -> None:
    """What each cache holds, at peak and after release, as Linux counts it.

    The four strategies of Quire and Transformers' DynamicCache and StaticCache, in the geometry of
    Qwen3-4B in bf16 with at most 40,960 tokens.

    Every sample is a process of its own. At most 12 GiB are committed at a time; a case that the
    machine has no room for is skipped aloud. The whole takes a quarter of an hour on
    two busy cores, --quick about a minute there.
    """
    run = Run("memory.bench_memory", width=200)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=run.aside) as progress:
        chosen = [one for one in experiments(quick=quick) if one.scenario.case in cases]
        if not chosen:
            raise typer.BadParameter(f"--cases {cases}: none of them is run; choose of {ALL_CASES}")
        samples, skipped = run_all(chosen, seed, progress)
    if samples_file:
        samples_file.write_text(json.dumps(samples))
    flags = " --quick" * quick + f" --cases {cases}" * (cases != ALL_CASES)
    packages = ("torch", "transformers")
    run.end(
        tables(samples),
        run.setting(f"{flags} --seed {seed}", packages=packages, also=["one thread a child"]),
        notes=extrapolated(samples) + skipped,
        claims=_claims(samples) if with_claims else (),
        output=output,
    )


def _claims(samples: Samples) -> Iterator[dict[str, Any]]:
    """When all else has been shown: what a run of few cases lacks is an error only then."""
    try:
        yield from claims(samples)
    except ValueError as error:
        raise typer.BadParameter(f"--claims: {error}") from error


if __name__ == "__main__":
    app()
