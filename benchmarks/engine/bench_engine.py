"""Quire's engine and every other that installs here: one model, one precision, in turns.

The model is of 0.45 B parameters with random weights in bfloat16, made on first use, as are the
peers' environments (minutes; llama.cpp is compiled). Everything is kept below ``.venv-peers``.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.engine.model import make
from benchmarks.engine.peers import PEERS, set_up
from benchmarks.engine.report import claims, notes, tables
from benchmarks.engine.rounds import Rounds
from benchmarks.engine.samples import OURS, Samples
from benchmarks.engine.worker import NUM_THREADS
from benchmarks.engine.workloads import SEED, WORKLOADS
from benchmarks.harness import os_memory
from benchmarks.harness.peers import HOME
from benchmarks.harness.report import markdown, replace_section, show
from quire.units import format_seconds

ROUNDS, MINUTES = 3, 18.0

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(  # noqa: PLR0913 - each is a flag
    only_set_up: Annotated[
        bool, typer.Option("--setup", help="Make the model and the peers' environments; no more.")
    ] = False,
    with_claims: Annotated[
        bool, typer.Option("--claims", help="End with one JSON object a line for each claim.")
    ] = False,
    with_idle: Annotated[
        bool, typer.Option("--idle", help="Memory after 30 s without work, too.")
    ] = False,
    with_profile: Annotated[
        bool, typer.Option("--profile", help="Where a step of ours goes at 32 sequences, too.")
    ] = False,
    num_rounds: Annotated[int, typer.Option("--rounds", min=1)] = ROUNDS,
    minutes: Annotated[
        float, typer.Option(help="Begin no round that would end later; seven more for the rest.")
    ] = MINUTES,
    peers: Annotated[str, typer.Option(help=f"Some of {', '.join(PEERS)}; or none.")] = ",".join(
        PEERS
    ),
    workloads: Annotated[str, typer.Option(help="Some of these.")] = ",".join(WORKLOADS),
    resume: Annotated[
        Path | None, typer.Option(help="File of samples; those that it has are not taken again.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the tables into this Markdown file's section.")
    ] = None,
    home: Annotated[Path, typer.Option(help="Folder of the model and the peers.")] = HOME,
) -> None:
    """Output tokens a second of 16 and 32 mixed requests, one stream's decode, prefill, memory.

    All engines but those that are known to be far behind are in memory together: about 18 GiB. The
    others do one round of the shorter workloads afterwards, one by one.
    """
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no worker outlives us
    console, aside = Console(width=None if sys.stdout.isatty() else 210), Console(stderr=True)

    def say(line: str) -> None:
        spent = format_seconds(time.monotonic() - begun)
        aside.print(f"{spent:>8}  {line}", markup=False, highlight=False)

    model = make(home.resolve() / "model")
    wanted = _names(peers, PEERS, "--peers")
    ready, refused = set_up(wanted, home.resolve(), model, say)
    if only_set_up:
        say(f"Ready: {', '.join(peer.name for peer in ready) or 'none'}")
        return
    samples = Samples(resume)
    for name, reason in refused.items():
        samples.add("refused", name, reason=reason)
    logs = Path(tempfile.mkdtemp(prefix="engine-logs-"))
    say(f"What the engines write goes to {logs}")
    measuring = time.monotonic()
    Rounds(samples=samples, model=model, home=home.resolve(), logs=logs, say=say).run(
        ready,
        _names(workloads, WORKLOADS, "--workloads"),
        num_rounds=num_rounds,
        idle=with_idle,
        end=measuring + 60 * minutes,
    )
    if with_profile and OURS not in samples.of("profile"):
        say("Profile of a step")
        samples.add("profile", OURS, **_profile_apart(model))
    flags = " --idle" * with_idle + " --profile" * with_profile
    flags += f" --rounds {num_rounds}" * (num_rounds != ROUNDS)
    flags += f" --peers {peers}" * (wanted != list(PEERS))
    setting = (
        f"`python -m benchmarks.engine.bench_engine{flags}`, seed {SEED}, "
        f"{format_seconds(time.monotonic() - measuring)}; {os_memory.machine()}."
    )
    show(tables(samples), [setting, *notes(samples)], console)
    if output:
        text = markdown(tables(samples), notes(samples), setting)
        replace_section(output, "bench_engine", text)
    if with_claims:
        for claim in claims(samples):
            print(json.dumps(claim, ensure_ascii=False))


def _profile_apart(model: Path) -> dict[str, Any]:
    """In a process of its own: it leaves clocks in torch's classes."""
    command = [sys.executable, "-m", "benchmarks.engine.profile", str(model)]
    environ = os.environ | {"OMP_NUM_THREADS": str(NUM_THREADS)}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _names(given: str, known: Collection[str], option: str) -> list[str]:
    names = [name for name in given.split(",") if name not in ("", "none")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option} {name}: choose of {', '.join(known)}")
    return names


if __name__ == "__main__":
    app()
