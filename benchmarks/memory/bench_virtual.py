"""``virtual``: what its two layouts cost a reader, what sharing saves, and what its calls take.

Candidates take turns in one process; harness/quiet.py says which count. "Unmodified" is torch's
scaled_dot_product_attention on the window as it lies. Bytes and mappings are the system's figures.
"""

import gc
import os
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from benchmarks.harness.attending import make_backend, threads
from benchmarks.harness.report import Output, Run, WithClaims
from benchmarks.memory.virtual import costs, layout, sharing
from benchmarks.memory.virtual import report as shown
from benchmarks.memory.virtual.caches import QWEN3_4B

ROUNDS, QUICK_ROUNDS = 7, 2
LETTERS = "ABCDEFGHI"

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rounds, short contexts, few sequences.")
    ] = False,
    with_claims: WithClaims = False,
    output: Output = None,
    letters: Annotated[
        str, typer.Option("--cases", help="Letters of the tables to make.")
    ] = LETTERS,
    seed: Annotated[int, typer.Option(help="Of entries, prompts and broken pools.")] = 0,
) -> None:
    """What the forms of `virtual` cost and save, beside `contiguous` and `paged`.

    About 6 GiB of memory and five minutes on two busy cores; --quick takes 1 GiB and one minute.
    """
    if not set(letters) & set(LETTERS):
        raise typer.BadParameter(f"--cases {letters}: none of them is made; choose of {LETTERS}")
    run = Run("memory.bench_virtual", width=170)
    report = shown.Report()
    gc.collect()
    gc.freeze()  # what was imported need not be walked through between samples

    with torch.inference_mode():
        if set(letters) & set("ABC"):
            with threads(1):  # a core of their own is what noisy neighbours leave longest
                _layouts(report, letters, quick=quick, seed=seed, say=run.say)
        if "D" in letters:
            run.say("D. texts")
            rounds = 1 if quick else 5
            backends = ("sdpa", "cpu")
            shown.texts(report, {b: costs.texts(b, num_rounds=rounds, seed=seed) for b in backends})
        _sharing(report, letters, quick=quick, seed=seed, say=run.say)
        _costs(report, letters, quick=quick, say=run.say)
    flags = " --quick" * quick + f" --cases {letters}" * (letters != LETTERS)
    load = f"load average at the end {os.getloadavg()[0]:.1f}"
    run.end(
        report.tables,
        run.setting(f"{flags} --seed {seed}", packages=["torch"], also=[load]),
        notes=report.notes,
        claims=report.claims if with_claims else (),
        output=output,
    )


def _layouts(
    report: shown.Report, letters: str, *, quick: bool, seed: int, say: Callable[[str], None]
) -> None:
    longest = 2_048 if quick else layout.LONGEST
    contexts = (1_024,) if quick else layout.CONTEXTS
    num_rounds = QUICK_ROUNDS if quick else ROUNDS
    backend = make_backend(QWEN3_4B)
    say("A, B, C. filling one sequence in each form")
    caches = layout.build(backend, longest, seed)
    report.notes.append(
        f"A, B and C: {layout.LAYERS} of Qwen3-4B's 36 layers, 8 KV heads of 128 in bfloat16, "
        f"{layout.QUERY_HEADS} query heads, one sequence of {longest:,} tokens in each form; "
        f"figures are of one layer and one thread. Largest difference of an output from that over "
        f"contiguous: {max(layout.errors(caches).values()):g}."
    )
    for letter, kernel, name in (
        ("A", None, "unmodified SDPA"),
        ("B", backend, f"our own kernel ({backend.name})"),
    ):
        if letter in letters:
            cases = {}
            for context in contexts:
                say(f"{letter}. {name}, {context:,} tokens")
                rounds = num_rounds if kernel or quick else num_rounds + 4
                cases[f"{context:,} tokens"] = layout.decode(caches, context, kernel, rounds)
            title = f"{letter}. One query over so many tokens, {name}"
            shown.layouts(report, title, cases, claims=kernel is None)
    if "C" in letters:
        say("C. writing")
        found = {"one token": layout.write(caches, num_rounds)}
        shown.layouts(report, "C. Writing a token's entries", found)
    for cache in caches.values():
        cache.storage.close()


def _sharing(
    report: shown.Report, letters: str, *, quick: bool, seed: int, say: Callable[[str], None]
) -> None:
    if "E" in letters:
        say("E. one copy")
        shown.sharing(report, sharing.prefix(), sharing.forks())
    if "F" in letters:
        num_seqs = 50 if quick else sharing.NUM_SEQS
        few = num_seqs // 5
        say("F. mappings")
        shown.mappings(
            report,
            [
                sharing.round_robin(num_seqs),
                sharing.prefilled(num_seqs),
                sharing.in_pieces(few, seed),
                sharing.in_pieces(few, seed, max_mappings=10 * few),
            ],
        )


def _costs(report: shown.Report, letters: str, *, quick: bool, say: Callable[[str], None]) -> None:
    repeats = QUICK_ROUNDS if quick else ROUNDS
    if "G" in letters:
        say("G. changes")
        num_blocks = {"a page": 1_024, "Qwen3-4B, 2.25 MiB": 64}
        shown.calls(
            report,
            {
                name: costs.calls(name, num_blocks=count, repeats=repeats)
                for name, count in num_blocks.items()
            },
        )
    if "H" in letters:
        say("H. hits")
        shown.hits(report, costs.hits(repeats=repeats))
    if "I" in letters:
        say("I. decode steps")
        found = [costs.decoding(count, repeats=2 * repeats) for count in (64, 256)]
        shown.steps(report, [cost for several in found for cost in several])


if __name__ == "__main__":
    app()
