"""What a start costs: processor seconds of `quire serve` from its exec to the first answer.

    python -m benchmarks.server.bench_start [--model FOLDER] [--rounds N] [--claims] [--output FILE]

The demo model, and the 0.45 B model that engines are compared on if its folder is named. A first
start of each, which compiles kernels where none are kept, is not counted. Beside them stand what
Python's own libraries cost, which every server of Transformers' models pays: `import torch`, and
with it Transformers' model class. All processes take turns. Seconds are user and system time of all
threads, as the system counts them; a processor whose other thread is busy makes them longer.
"""

import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

import typer

from benchmarks.harness.report import Output, Run, Table, WithClaims
from benchmarks.harness.server import server

GOALS_S = {"demo": 4.0, "0.45 B": 8.0}
LIBRARIES = {
    "import torch": "import torch",
    "… and Transformers' class": "import torch; from transformers import PreTrainedModel",
}


def serve(model: str | None) -> float:
    """Start a server, ask it once, and end it. Returns: its processor seconds by then."""
    named = [] if model is None else [model]
    with server(*named, "--kv-cache-memory-bytes", "256MiB", "--served-model-name", "m") as own:
        asked = {"model": "m", "prompt": "def add(a, b):", "max_tokens": 1, "temperature": 0}
        request = Request(
            f"http://127.0.0.1:{own.port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=120) as answer:
            assert json.load(answer)["choices"], "it has not answered"
        return own.cpu_s()


def run_python(code: str) -> float:
    """Run a line in a process of its own. Returns: its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


app = typer.Typer(add_completion=False)


@app.command()
def main(
    large: Annotated[
        Path | None, typer.Option("--model", help="The 0.45 B model's folder, made by engine.model")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Processor seconds from exec to the first answer, each start beside the libraries alone."""
    run = Run("server.bench_start", width=120)
    calls: dict[str, Callable[[], float]] = {
        name: lambda code=code: run_python(code)  # type: ignore[misc]
        for name, code in LIBRARIES.items()
    }
    calls["demo"] = lambda: serve(None)
    if large is not None:
        calls["0.45 B"] = lambda: serve(str(large))
    for call in calls.values():
        call()  # compiles, and reads files into memory
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        run.say(f"round {number + 1} of {rounds}")
        for name, call in calls.items():
            found[name].append(call())
    rows = [
        [name, f"{statistics.median(each):.2f}", f"{min(each):.2f} … {max(each):.2f}",
         f"≤ {GOALS_S[name]:g}" if name in GOALS_S else "–"]
        for name, each in found.items()
    ]  # fmt: skip
    claims: list[dict[str, Any]] = [
        {
            "claim": f"start: processor seconds from exec to the first answer, {name}",
            "ours": statistics.median(found[name]),
            "peer": None,
            "unit": "s",
            "goal": f"≤ {goal:g}",
            "holds": statistics.median(found[name]) <= goal,
        }
        for name, goal in GOALS_S.items()
        if name in found
    ]
    columns = ("process", "CPU s, median", "least … greatest", "goal")
    table = Table(title="A start, to the first answer", columns=columns, rows=rows)
    setting = run.setting(f" --rounds {rounds}", packages=("torch", "transformers"))
    run.end([table], setting, claims=claims if with_claims else (), output=output)


if __name__ == "__main__":
    app()
