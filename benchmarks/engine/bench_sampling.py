"""What sampling a step's tokens costs, from logits to tokens on the host.

On a GPU the question is whether it pays to leave the logits there: beside it, all of them are
copied to the host, which samples. Both choose the same tokens, which is looked at first. The
candidates take turns.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import torch
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.harness.quiet import Call, Timing, take_turns, times_as_fast
from benchmarks.harness.report import Table, WithClaims, show
from quire import SamplingParams
from quire.engine.sampling import LogitsSampler
from quire.engine.sequence import Request
from quire.engine.sequence import Sequence as Running
from quire.engine.step_plan import Draw, StepPlan

VOCAB_SIZE = 151_936
OUTPUT_TOKENS = 500  # of each sequence so far: what penalties count
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"top_p": 0.9},
    "penalties, greedy": {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}
OURS, PEER, AGAIN = "ours", "peer", "ours again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kind: str
    num_rows: int
    timings: dict[str, Timing]

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.num_rows} rows"


def plan_of(num_rows: int, kind: dict[str, Any]) -> StepPlan:
    generator = torch.Generator().manual_seed(0)
    draws = []
    for row in range(num_rows):
        params = SamplingParams(max_tokens=2 * OUTPUT_TOKENS, seed=row, **kind)
        request = Request(request_id=row, prompt_token_ids=(1, 2, 3), params=params)
        sequence = Running(request, seq_id=row)
        came = torch.randint(0, VOCAB_SIZE, (OUTPUT_TOKENS,), generator=generator)
        sequence.token_ids += came.tolist()
        draws.append(Draw(sequence=sequence, row=row))
    return StepPlan(chunks=(), draws=tuple(draws), prompt_rows=())


def calls_of(logits: Tensor, plan: StepPlan) -> dict[str, Call]:
    ours, peer = LogitsSampler(), LogitsSampler()

    def own() -> object:
        return ours.sample(logits, plan)

    def other() -> object:
        return peer.sample(logits.cpu(), plan)

    if logits.is_cpu:
        return {OURS: own, AGAIN: own}
    tokens = [[result.token_ids for result in call()] for call in (own, other)]  # type: ignore
    if tokens[0] != tokens[1]:
        differing = sum(one != two for one, two in zip(*tokens, strict=True))
        raise SystemExit(f"the two chose differently in {differing} of {len(tokens[0])} rows")
    return {OURS: own, PEER: other, AGAIN: own}


def measured(
    device: str, num_rows: Sequence[int], num_rounds: int, console: Console
) -> Iterator[Case]:
    for count in num_rows:
        generator = torch.Generator().manual_seed(count)
        logits = 2.5 * torch.randn(count, VOCAB_SIZE, generator=generator)
        logits = logits.to(device, torch.bfloat16)
        for kind, params in KINDS.items():
            with console.status(f"{kind}, {count} rows"):
                calls = calls_of(logits, plan_of(count, params))
                yield Case(
                    kind=kind, num_rows=count, timings=take_turns(calls, num_rounds=num_rounds)
                )


def table(cases: Sequence[Case], ours: str, peer: str) -> Table:
    rows = []
    for case in cases:
        peers = case.timings.get(PEER)
        ratio = None if peers is None else times_as_fast(case.timings[OURS], peers)
        noise = times_as_fast(case.timings[OURS], case.timings[AGAIN])
        rows.append(
            [
                case.kind,
                str(case.num_rows),
                f"{1e3 * case.timings[OURS].median_s:.3f}",
                "–" if peers is None else f"{1e3 * peers.median_s:.3f}",
                "–"
                if ratio is None
                else f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})"
                + ("" if ratio.all_clean else " *"),
                f"{noise.median:.2f} (± {noise.spread:.2f})",
            ]
        )
    columns = ("rows are", "rows", f"{ours}, ms", f"{peer}, ms", "× as fast", "A/A")
    return Table(title="Sampling of one step", columns=columns, rows=rows)


def claims(cases: Sequence[Case], ours: str, peer: str) -> Iterator[dict[str, Any]]:
    for case in cases:
        if PEER not in case.timings:
            continue
        ratio = times_as_fast(case.timings[OURS], case.timings[PEER])
        noise = times_as_fast(case.timings[OURS], case.timings[AGAIN])
        yield {
            "claim": f"sampling, {case.name}: {ours} is not slower than {peer}",
            "ours": round(case.timings[OURS].median_s * 1e3, 4),
            "peer": round(case.timings[PEER].median_s * 1e3, 4),
            "unit": "ms",
            "ratio": round(ratio.median, 3),
            "goal": "≥ 1.0 ×, less the noise",
            "holds": ratio.median >= 1.0 - noise.spread,
            "a_a_spread": round(noise.spread, 3),
        }


def main(
    with_claims: WithClaims = False,
    device: Annotated[str, typer.Option(help="auto: cuda if there is one, else cpu.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Samples of each candidate.")] = 7,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of a step; may be given more than once.")
    ] = None,
) -> None:
    """Milliseconds of sampling, from logits to tokens on the host."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        ours, peer = "on the CPU", "–"
        console.print("There is no GPU here: what sampling costs on one was not measured.")
    else:
        ours, peer = "on the device", "copied to the host, numpy"
    cases = list(
        measured(device, rows or ([1, 16] if device == "cpu" else [1, 64]), rounds, console)
    )
    what = torch.cuda.get_device_name() if device != "cpu" else f"{torch.get_num_threads()} threads"
    setting = f"{device} ({what}), torch {torch.__version__}, vocabulary {VOCAB_SIZE:,}, bfloat16"
    show([table(cases, ours, peer)], [setting, "* too few samples were clean"], console)
    if with_claims:
        for claim in claims(cases, ours, peer):
            print(json.dumps(claim, ensure_ascii=False))


if __name__ == "__main__":
    typer.run(main)
