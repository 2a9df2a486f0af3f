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

from benchmarks.engine.model import make
from benchmarks.engine.peers import PEERS, WEIGHTS, set_up
from benchmarks.engine.report import claims, notes, tables
from benchmarks.engine.rounds import Rounds
from benchmarks.engine.samples import OURS, Samples
from benchmarks.engine.worker import NUM_THREADS
from benchmarks.engine.workloads import SEED, WORKLOADS
from benchmarks.harness.peers import HOME
from benchmarks.harness.report import Output, Run, WithClaims

ROUNDS, MINUTES = 3, 18.0

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(  # noqa: PLR0913 - each is a flag
    only_set_up: Annotated[
        bool, typer.Option("--setup", help="Make the model and the peers' environments; no more.")
    ] = False,
    with_claims: WithClaims = False,
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
    weights: Annotated[
        str, typer.Option(help=f"Of all engines: {', '.join(WEIGHTS)}; not all peers run all.")
    ] = WEIGHTS[0],
    resume: Annotated[
        Path | None, typer.Option(help="File of samples; those that it has are not taken again.")
    ] = None,
    output: Output = None,
    home: Annotated[Path, typer.Option(help="Folder of the model and the peers.")] = HOME,
) -> None:
    """Output tokens a second of 16 and 32 mixed requests, one stream's decode, prefill, memory.

    All engines but those that are known to be far behind are in memory together: about 18 GiB. The
    others do one round of the shorter workloads afterwards, one by one.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no worker outlives us
    run = Run("engine.bench_engine", width=210)
    say = run.say

    model = make(home.resolve() / "model")
    _names(weights, WEIGHTS, "--weights")
    wanted = _names(peers, PEERS, "--peers")
    ready, refused = set_up(wanted, home.resolve(), model, weights, say)
    if only_set_up:
        say(f"Ready: {', '.join(peer.name for peer in ready) or 'none'}")
        return
    samples = Samples(resume)
    for name, reason in refused.items():
        samples.add("refused", name, reason=reason)
    logs = Path(tempfile.mkdtemp(prefix="engine-logs-"))
    say(f"What the engines write goes to {logs}")
    run.begun_s = time.monotonic()  # what was set up is not counted
    Rounds(
        samples=samples,
        model=model,
        home=home.resolve(),
        weights=weights,
        logs=logs,
        say=say,
    ).run(
        ready,
        _names(workloads, WORKLOADS, "--workloads"),
        num_rounds=num_rounds,
        idle=with_idle,
        end=run.begun_s + 60 * minutes,
    )
    if with_profile and OURS not in samples.of("profile"):
        say("Profile of a step")
        samples.add("profile", OURS, **_profile_apart(model))
    flags = " --idle" * with_idle + " --profile" * with_profile
    flags += f" --rounds {num_rounds}" * (num_rounds != ROUNDS)
    flags += f" --peers {peers}" * (wanted != list(PEERS))
    flags += f" --weights {weights}" * (weights != WEIGHTS[0])
    run.end(
        tables(samples),
        run.setting(flags, also=[f"seed {SEED}"]),
        notes=notes(samples),
        claims=claims(samples, weights) if with_claims else (),
        output=output,
    )


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
