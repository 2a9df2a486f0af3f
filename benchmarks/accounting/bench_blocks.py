"""What accounting for blocks costs, side by side with vLLM's own core in one run.

Ours, a second process of ours (for the run's own noise) and vLLM's answer the same cases in turn;
workers.py says what each case does and what its figures enclose.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.accounting import vllm_environment
from benchmarks.accounting.workers import (
    Case,
    Comparison,
    Samples,
    Worker,
    WorkerFailed,
    compare,
    run,
)
from benchmarks.harness.peers import PeerUnavailable
from benchmarks.harness.report import Output, Run, Table, WithClaims

TITLES = {
    "A": "A. Taking and freeing blocks of a pool of 65,536, ns a block",
    "B": "B. A decode step, ns a sequence and step (each 16th sequence needs a block)",
    "C": "C. A prompt of 4,096 tokens that is cached whole, ns a prompt token",
    "D": "D. The same by size of the pool, ns a block, or a sequence and step",
    "E": "E. Metadata, bytes a block",
}
PARTS = tuple((n,) for n in ("pool", "index", "key_bytes", "key_entry", "ghosts", "sequences"))
SHOWN: dict[str, tuple[tuple[str, ...], ...]] = {  # figures, or sums of them, by case
    "pool": (("allocate",), ("free",)),
    "decode": (("allocate",), ("append",), ("allocate", "append")),
    "full_hit": (("hash",), ("lookup",), ("hash", "lookup"), ("adopt",), ("free",)),
    "metadata": (("unhashed",), ("beside_key",), ("key",), ("beside_key", "key"), *PARTS),
}

# -- what is run ---------------------------------------------------------------------------------

BATCHES = (1, 16, 256, 8192)
SIZES = (10**3, 10**4, 10**5, 10**6)
CACHING = {
    "off": "caching off",
    "on": "caching on",
    "evicting": "every block cached",
    "scattered": "every block cached, free list in random order",
}
GROUPS: dict[str, tuple[list[int | None], int]] = {  # windows, and tokens of the prompts
    "full": ([None], 512),
    "full + window 1,024 not reached": ([None, 1024], 512),
    "full + window 1,024 sliding": ([None, 1024], 2048),
}
HIT_GROUPS: dict[str, list[int | None]] = {"full": [None], "full + window 1,024": [None, 1024]}


def cases() -> Iterable[Case]:
    for caching, batch in ((caching, batch) for caching in CACHING for batch in BATCHES):
        if caching != "scattered" or batch == 256:
            claimed = batch > 1 and caching in ("on", "evicting")
            yield _pool("A", 65_536, batch, caching, claimed=claimed)
    for num_seqs in (256, 1024):
        for groups, (windows, prompt_tokens) in GROUPS.items():
            for cached in (False, True):
                yield Case(
                    letter="B",
                    label=_decode_label(num_seqs, groups, cached),
                    command=_decode(0, num_seqs, windows, cached, prompt_tokens, rewind=False),
                    claimed=cached,
                )
    for groups, windows in HIT_GROUPS.items():
        hit = {"case": "full_hit", "prompt_tokens": 4096, "windows": windows, "repeats": 25}
        yield Case(letter="C", label=groups, command=hit, claimed=groups == "full")
    for num_blocks in SIZES:
        ends = num_blocks in (SIZES[0], SIZES[-1])
        for caching in ("on", "evicting", "scattered"):
            yield _pool("D", num_blocks, 256, caching, claimed=ends)
        for cached in (False, True):
            yield Case(
                letter="D",
                label=f"{num_blocks:,} blocks, {_decode_label(256, 'full', cached)}",
                command=_decode(num_blocks, 256, [None], cached, 16, rewind=True),
                claimed=ends,
            )
    held = {"case": "metadata", "num_blocks": 100_000}
    yield Case(letter="E", label="100,000 blocks", command=held, claimed=True)


def _pool(letter: str, num_blocks: int, batch: int, caching: str, *, claimed: bool) -> Case:
    size = "" if letter == "A" else f"{num_blocks:,} blocks, "
    command = {
        "case": "pool", "num_blocks": num_blocks, "batch": batch, "caching": caching, "repeats": 7,
    }  # fmt: skip
    label = f"{size}batches of {batch:,}, {CACHING[caching]}"
    return Case(letter=letter, label=label, command=command, claimed=claimed)


def _decode(
    num_blocks: int,
    num_seqs: int,
    windows: list[int | None],
    caching: bool,
    prompt_tokens: int,
    *,
    rewind: bool,
) -> dict[str, Any]:
    return {
        "case": "decode", "num_blocks": num_blocks, "num_seqs": num_seqs, "windows": windows,
        "caching": caching, "prompt_tokens": prompt_tokens, "rewind": rewind, "repeats": 7,
    }  # fmt: skip


def _decode_label(num_seqs: int, groups: str, caching: bool) -> str:
    return f"{num_seqs:,} sequences, {groups}, caching {'on' if caching else 'off'}"


# -- what is shown -------------------------------------------------------------------------------


def tables(chosen: Iterable[Case], samples: Mapping[str, Samples], peer: str) -> list[Table]:
    columns = (
        "case", "what", "ours (least)", f"{peer} (least)", "ours / peer", "of the least",
        "ours / ours",
    )  # fmt: skip
    rows: dict[str, list[list[str]]] = {}
    for case in chosen:
        for figures in SHOWN[case.command["case"]]:
            found = compare(samples[case.key], *figures)
            what = " + ".join(figures).replace("_", " ")
            rows.setdefault(case.letter, []).append([case.label, what, *_cells(found)])
    return [Table(title=TITLES[at], columns=columns, rows=some) for at, some in rows.items()]


def _cells(found: Comparison) -> Iterable[str]:
    for middle, least in (
        (found.ours, found.ours_least),
        (found.peer, found.peer_least),
    ):
        yield "–" if middle is None else f"{_digits(middle)} ({_digits(least or 0.0)})"
    for ratio in (found.ratio, found.ratio_of_least):
        yield "–" if ratio is None else f"{ratio:.3f}"
    yield "–" if found.noise is None else "{1:.2f} ({0:.2f} … {2:.2f})".format(*found.noise)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def failures(samples: Mapping[str, Samples]) -> list[str]:
    """One line for each distinct thing that went wrong, with the number of cases."""
    cases_of: dict[str, list[str]] = {}
    for key, some in samples.items():
        for side, error in some.errors.items():
            cases_of.setdefault(f"{side}: {error}", []).append(key)
        if not some.agree:
            what = "different work"
            if some.agree_but_for_longer_hits:
                what = "ours finds more of the prompt: its last block, in part, as a copy"
            cases_of.setdefault(f"{what}: {some.facts}", []).append(key)
    return [f"{what} ({len(keys)} cases, {keys[0]} …)" for what, keys in cases_of.items()]


# -- what is claimed -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A goal: at most this share of the peer's cost."""

    key: str
    figures: tuple[str, ...]
    most: float
    goal: str


def goals() -> Iterable[Goal]:
    decode: tuple[tuple[str, ...], ...] = (("allocate",), ("allocate", "append"))
    for num_seqs, groups in ((n, groups) for n in (1024, 256) for groups in GROUPS):
        one_in = 15 if num_seqs == 256 or groups != "full" else 20
        key = f"B: {_decode_label(num_seqs, groups, True)}"
        for figures in decode:
            yield Goal(key=key, figures=figures, most=1 / one_in, goal=f"<= 1/{one_in}")
    for caching in ("on", "evicting"):
        for batch in BATCHES[1:]:
            key = _pool("A", 65_536, batch, caching, claimed=True).key
            for figure in ("allocate", "free"):
                yield Goal(key=key, figures=(figure,), most=1 / 5, goal="<= 1/5")
    yield Goal(key="C: full", figures=("hash", "lookup"), most=1 / 4, goal="<= 1/4")
    for figure in ("adopt", "free"):
        yield Goal(key="C: full", figures=(figure,), most=1.0, goal="<= 1.0 x, within the noise")


def claims(samples: Mapping[str, Samples]) -> Iterable[dict[str, Any]]:
    for goal in goals():
        found = compare(samples[goal.key], *goal.figures)
        most = goal.most
        if most == 1.0 and found.noise:
            most += max(found.noise[2] - 1, 1 - found.noise[0])
        holds = found.ratio is not None and found.ratio <= most
        claim = f"{goal.key}: {' + '.join(goal.figures)}"
        yield _claim(claim, found, "ns", goal.goal, holds=holds)
    flat = [_pool("D", SIZES[0], 256, caching, claimed=True) for caching in CACHING][1:]
    for kind, labels, shown in (
        ("pool", [case.label for case in flat], SHOWN["pool"]),
        (
            "decode",
            [f"{SIZES[0]:,} blocks, {_decode_label(256, 'full', c)}" for c in (False, True)],
            (("allocate",),),
        ),
    ):
        for label, figures in ((label, figures) for label in labels for figures in shown):
            large = label.replace(f"{SIZES[0]:,}", f"{SIZES[-1]:,}", 1)
            yield _flat_claim(samples[f"D: {label}"], samples[f"D: {large}"], figures, kind, label)
    found = compare(samples["E: 100,000 blocks"], "beside_key")
    holds = found.ours is not None and found.ours <= 64
    yield _claim("E: metadata beside the key", found, "bytes a block", "<= 64 bytes", holds=holds)


def _flat_claim(
    small: Samples, large: Samples, figures: tuple[str, ...], kind: str, label: str
) -> dict[str, Any]:
    """Ours at a million blocks against ours at a thousand; the peer's own ratio beside."""
    few, many = compare(small, *figures), compare(large, *figures)
    own = many.ours / few.ours if many.ours and few.ours else None
    peer = many.peer / few.peer if many.peer and few.peer else None
    what = label.partition(" blocks, ")[2]
    return {
        "claim": f"D: {kind}: {what}: {' + '.join(figures)}, at 10^6 blocks against 10^3",
        "ours": own and round(own, 3),
        "peer": peer and round(peer, 3),
        "unit": "x",
        "ratio": round(own / peer, 4) if own and peer else None,
        "goal": "<= 1.5 x",
        "holds": own is not None and own <= 1.5,
    }


def _claim(claim: str, found: Comparison, unit: str, goal: str, *, holds: bool) -> dict[str, Any]:
    rounded = {
        name: None if value is None else round(value, 4)
        for name, value in {
            "ours": found.ours,
            "peer": found.peer,
            "ratio": found.ratio,
            "ratio_of_least": found.ratio_of_least,
        }.items()
    }
    return {
        "claim": claim, "ours": rounded["ours"], "peer": rounded["peer"], "unit": unit,
        "ratio": rounded["ratio"], "goal": goal, "holds": holds,
        "ratio_of_least": rounded["ratio_of_least"],
        "ours_to_ours": found.noise and [round(value, 3) for value in found.noise],
    }  # fmt: skip


# -- the command ---------------------------------------------------------------------------------


app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(  # noqa: PLR0913 - each is a flag
    only_set_up: Annotated[
        bool, typer.Option("--setup", help="Make vLLM's environment; no more.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two pairs of only what the claims need.")
    ] = False,
    with_claims: WithClaims = False,
    output: Output = None,
    letters: Annotated[
        str, typer.Option("--cases", help="Letters of the tables to run.")
    ] = "".join(TITLES),
    num_pairs: Annotated[int, typer.Option("--pairs", min=1, help="Samples of each side.")] = 5,
    peer_env: Annotated[
        Path, typer.Option(help="Folder of vLLM's virtual environment; made if need be.")
    ] = vllm_environment.DEFAULT_ENV,
    with_peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Run vLLM too.")] = True,
    samples_file: Annotated[
        Path | None, typer.Option("--samples", help="Write every sample's figures as JSON.")
    ] = None,
) -> None:
    """What accounting for blocks costs: ours, and vLLM 0.33's own core, in turn.

    vLLM's core is plain Python and runs on any CPU: its source is fetched from the package index
    and installed in an environment of its own on first use, about 200 MB and a minute. Where that
    fails, ours runs alone, and says so.
    """
    own = Run("accounting.bench_blocks", width=180)
    aside = own.aside
    if only_set_up:
        try:
            vllm_environment.python(peer_env, say=partial(aside.print, markup=False))
        except PeerUnavailable as error:
            raise SystemExit(str(error)) from error
        return
    if with_claims and set(letters) != set(TITLES):
        raise typer.BadParameter(f"--claims needs every table, not only {letters}")
    chosen = [case for case in cases() if case.letter in letters and (case.claimed or not quick)]
    pairs = 2 if quick else num_pairs
    with ExitStack() as stack:
        workers, notes = _start(peer_env if with_peer else None, aside, stack)
        samples = _run(chosen, workers, pairs, aside)
        ours, peer = workers["ours"], workers.get("peer")
    notes += failures(samples)
    if samples_file:
        samples_file.write_text(json.dumps({key: _plain(some) for key, some in samples.items()}))
    flags = " --quick" * quick + f" --cases {letters}" * (set(letters) != set(TITLES))
    flags += " --no-peer" * (not with_peer) + f" --pairs {pairs}" * (pairs != 5 and not quick)
    theirs = f"{peer.name} {peer.version}" if peer else "no peer"
    also = (f"{ours.name} {ours.version}, {theirs}", f"{pairs} pairs")
    own.end(
        tables(chosen, samples, theirs if peer else "peer"),
        own.setting(flags, also=also),
        notes=notes,
        claims=claims(samples) if with_claims else (),
        output=output,
    )


def _start(
    peer_env: Path | None, aside: Console, stack: ExitStack
) -> tuple[dict[str, Worker], list[str]]:
    """Our two workers and, where it can be had, the peer's between them; and what to say of it."""
    workers, notes = {"ours": Worker("quire_worker")}, []
    stack.callback(workers["ours"].close)
    say = partial(aside.print, markup=False)
    try:
        if peer_env is None:
            raise PeerUnavailable("--no-peer was given")
        python = vllm_environment.python(peer_env, say=say)
        workers["peer"] = Worker("vllm_worker", python, vllm_environment.environ())
        stack.callback(workers["peer"].close)
    except (PeerUnavailable, WorkerFailed) as error:
        notes.append(f"OURS ALONE: nothing is compared with vLLM here. {error}")
        say(notes[-1])
    workers["twin"] = Worker("quire_worker")
    stack.callback(workers["twin"].close)
    return workers, notes


def _run(
    chosen: list[Case], workers: dict[str, Worker], num_pairs: int, aside: Console
) -> dict[str, Samples]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=aside) as progress:
        task = progress.add_task("starting", total=num_pairs * len(chosen))

        def on_step(pair: int, case: Case) -> None:
            progress.update(task, description=case.key, completed=num_done[0])
            if not aside.is_terminal and case is chosen[0]:
                aside.print(f"pair {pair + 1} of {num_pairs}, {len(chosen)} cases each")
            num_done[0] += 1

        num_done = [0]
        samples = run(chosen, workers, num_pairs, on_step)
        progress.update(task, completed=num_done[0])
    return samples


def _plain(some: Samples) -> dict[str, Any]:
    return {name: getattr(some, name) for name in some.__slots__}


if __name__ == "__main__":
    app()
