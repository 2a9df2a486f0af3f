"""Prompt lookup: tokens a second with and without, on texts that repeat themselves and on others.

Both take turns on the demo model, with the same requests, and give the same tokens. A second engine
without is the A/A pair: what differs there is noise.
"""

import json
import os
import random
import statistics
import time
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.quiet import no_collection
from benchmarks.harness.report import WithClaims
from quire import LLM, SamplingParams
from quire.models.loader import load

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
CODE = '''def read_config(path):
    """Read a file."""
    with open(path) as file:
        return json.load(file)


'''


def main(
    with_claims: WithClaims = False,
    rounds: Annotated[int, typer.Option(help="Pairs of each case.")] = 7,
    max_tokens: Annotated[int, typer.Option(help="Tokens that each prompt is continued by.")] = 96,
) -> None:
    loaded = load()
    table = Table("case", "sequences", "tokens/s without", "with", "ratio", "A/A", "accepted")
    claims: list[dict[str, object]] = []
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    # A text drawn at a high temperature repeats nothing.
    drawn = SamplingParams(max_tokens=max_tokens, temperature=2.0, seed=1, ignore_eos=True)
    for num_seqs in (1, 16):
        with (
            LLM(loaded, max_num_seqs=16, enable_prefix_caching=False) as without,
            LLM(loaded, max_num_seqs=16, enable_prefix_caching=False) as again,
            LLM(
                loaded, max_num_seqs=16, enable_prefix_caching=False, speculative_config=NGRAM
            ) as ahead,
        ):
            for case, prompts, own in (
                ("repetitive", [CODE * 3] * num_seqs, params),
                ("not repetitive", words(num_seqs), drawn),
            ):
                rates: dict[str, list[float]] = {"without": [], "again": [], "ahead": []}
                counted = ahead.statistics
                for llm in (without, again, ahead):
                    llm.generate(prompts, own)  # kernels are compiled
                before = (
                    counted.num_draft_tokens,
                    counted.num_accepted_tokens,
                )
                with no_collection():
                    for _ in range(rounds):
                        for name, llm in (("without", without), ("ahead", ahead), ("again", again)):
                            start_s = time.perf_counter()
                            llm.generate(prompts, own)
                            took_s = time.perf_counter() - start_s
                            rates[name].append(num_seqs * max_tokens / took_s)
                num_drafts = counted.num_draft_tokens - before[0]
                num_accepted = counted.num_accepted_tokens - before[1]
                ratio, noise = ratio_of(rates, "ahead"), ratio_of(rates, "again")
                table.add_row(
                    case,
                    str(num_seqs),
                    f"{statistics.median(rates['without']):.0f}",
                    f"{statistics.median(rates['ahead']):.0f}",
                    f"{ratio:.2f}",
                    f"{noise:.2f}",
                    f"{num_accepted} of {num_drafts}",
                )
                goal = 1.2 if case == "repetitive" else 0.95
                claims.append(
                    {
                        "claim": f"prompt lookup, {case}, {num_seqs} sequences",
                        "ours": statistics.median(rates["ahead"]),
                        "peer": statistics.median(rates["without"]),
                        "unit": "tokens/s",
                        "ratio": round(ratio, 3),
                        "goal": goal,
                        "holds": ratio >= goal,
                    }
                )
    Console().print(table)
    if with_claims:
        for claim in claims:
            print(json.dumps(claim))


def words(num_seqs: int) -> list[str]:
    """Prompts of which hardly two words in a row come twice."""
    source = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        " ".join("".join(source.choices(letters, k=5)) for _ in range(40)) for _ in range(num_seqs)
    ]


def ratio_of(rates: dict[str, list[float]], name: str) -> float:
    """The median over pairs."""
    pairs = zip(rates[name], rates["without"], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


if __name__ == "__main__":
    typer.run(main)
