"""What a start costs: processor seconds of `quire serve` from its exec to the first answer.

    python -m benchmarks.server.bench_start [--model FOLDER] [--rounds N] [--limit-s S] [--claims]

The demo model, and the 0.45 B model that engines are compared on if its folder is named. Each is
started cold once, with an empty folder for what starts keep (kernels, hashes of weights), and then
warm with what that start has left there, as often as there are rounds. Beside them stand what
Python's own libraries cost, which every server of Transformers' models pays: `import torch`, and
with it Transformers' model class, both without the garbage collector, as a server imports them. All
processes take turns. Processor seconds are user and system time of all threads, as the system
counts them; a processor whose other thread is busy makes them longer.

All processes find their modules compiled to bytecode, as an installed package has them: it is
written before, also where PYTHONDONTWRITEBYTECODE would have each start compile Quire's anew. What
else is installed beside Quire takes part of a start too: Transformers asks for each package by its
name, and imports some where they are.

It ends within three minutes, or `--limit-s`: no round begins that would end later, but the first.
"""

import compileall
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any
from urllib.request import Request, urlopen

import typer

import quire
from benchmarks.harness.report import Output, Run, Table, WithClaims
from benchmarks.harness.server import server

GOALS_S = {"demo": 4.0, "0.45 B": 8.0}
LIBRARIES = {
    "import torch": "import gc; gc.disable(); import torch",
    "… and Transformers' class": "import gc; gc.disable(); import torch; "
    "from transformers import PreTrainedModel",
}
Seconds = tuple[float, float]  # of processors, of the clock


def serve(model: str | None, kept: Path) -> Seconds:
    """Start a server, ask it once, and end it. Returns: its seconds by the answer.

    ``kept``: the folder for what starts keep.
    """
    os.environ["QUIRE_CACHE_DIR"] = str(kept)
    named = [] if model is None else [model]
    begun_s = perf_counter()
    with server(*named, "--kv-cache-memory-bytes", "256MiB", "--served-model-name", "m") as own:
        asked = {"model": "m", "prompt": "def add(a, b):", "max_tokens": 1, "temperature": 0}
        request = Request(
            f"http://127.0.0.1:{own.port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=120) as answer:
            assert json.load(answer)["choices"], "it has not answered"
        return own.cpu_s(), perf_counter() - begun_s


def run_python(code: str) -> Seconds:
    """Run a line in a process of its own. Returns: its seconds."""
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after, took_s = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter() - begun_s
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, took_s


app = typer.Typer(add_completion=False)


@app.command()
def main(
    large: Annotated[
        Path | None, typer.Option("--model", help="The 0.45 B model's folder, made by engine.model")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    limit_s: Annotated[float, typer.Option(help="No round begins that would end later.")] = 180,
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Processor seconds from exec to the first answer, each start beside the libraries alone."""
    run, begun_s = Run("server.bench_start", width=120), perf_counter()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(Path(quire.__file__).parent, quiet=1)
    models = {"demo": None, **({} if large is None else {"0.45 B": str(large)})}
    found: dict[str, list[Seconds]] = {name: [] for name in (*LIBRARIES, *models)}
    cold: dict[str, Seconds] = {}
    with TemporaryDirectory() as kept:
        for name, model in models.items():
            run.say(f"{name}: a start with nothing kept")
            cold[name] = serve(model, Path(kept, name))
        longest_s = 0.0
        while len(found["demo"]) < rounds:
            round_s = perf_counter()
            if longest_s and round_s + longest_s > begun_s + limit_s:
                run.say(f"{limit_s:g} s are over: {len(found['demo'])} of {rounds} rounds")
                break
            run.say(f"round {len(found['demo']) + 1} of {rounds}")
            for name, code in LIBRARIES.items():
                found[name].append(run_python(code))
            for name, model in models.items():
                found[name].append(serve(model, Path(kept, name)))
            longest_s = max(longest_s, perf_counter() - round_s)
    rows = [[f"{name}, cold", *_figures([each]), "–"] for name, each in cold.items()]
    rows += [
        [name, *_figures(each), f"≤ {GOALS_S[name]:g}" if name in GOALS_S else "–"]
        for name, each in found.items()
    ]
    claims: list[dict[str, Any]] = [
        {
            "claim": f"start: processor seconds from exec to the first answer, {name}",
            "ours": _median(found[name], 0),
            "peer": None,
            "unit": "s",
            "goal": f"≤ {goal:g}",
            "holds": _median(found[name], 0) <= goal,
        }
        for name, goal in GOALS_S.items()
        if name in found
    ]
    columns = ("process", "CPU s, median", "least … greatest", "clock s, median", "goal, CPU s")
    table = Table(title="A start, to the first answer", columns=columns, rows=rows)
    setting = run.setting(f" --rounds {rounds}", packages=("torch", "transformers"))
    run.end([table], setting, claims=claims if with_claims else (), output=output)


def _median(each: list[Seconds], which: int) -> float:
    return statistics.median(seconds[which] for seconds in each)


def _figures(each: list[Seconds]) -> list[str]:
    processors = [seconds[0] for seconds in each]
    spread = f"{min(processors):.2f} … {max(processors):.2f}" if len(each) > 1 else "one start"
    return [f"{_median(each, 0):.2f}", spread, f"{_median(each, 1):.2f}"]


if __name__ == "__main__":
    app()
