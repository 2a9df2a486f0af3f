"""Linear layers: weights read against STREAM, and side by side with torch.

    python -m benchmarks.engine.bench_linear [--claims] [--quick] [--dtypes LIST] [--output FILE]

Every call reads other weights than the one before, as many as no cache holds, as a step does that
goes through a model's layers. Candidates take turns (harness/quiet.py); "ours, again" is the same
call once more, which shows the run's noise. Bandwidth is that of the weights alone, read once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import os_memory
from benchmarks.harness.quiet import Call, Timing, take_turns, times_as_fast
from benchmarks.harness.report import Output, Run, Table, WithClaims
from benchmarks.harness.roofline import STREAMS, Stream, last_cache_bytes, matmul, register_flops
from quire.config import kernel_dir
from quire.layers.cpu import CpuLinear
from quire.units import format_bytes

# Of the 0.45 B model: hidden 1,024, 16 query and 8 key-value heads of 128, ffn 3,072.
HIDDEN, FFN, QKV, VOCABULARY = 1024, 3072, (2048, 1024, 1024), 8192
ROWS = (1, 2, 4, 8, 16, 17, 24, 32, 40, 48, 64, 96, 128, 192, 512, 2048)
QUICK_ROWS = (1, 32)
MANY_ROWS = (512, 2048)
DTYPES = ("bfloat16", "float16", "float32")
ROUNDS, QUICK_ROUNDS = 7, 3
OURS, AGAIN, TORCH, STREAM = "ours", "ours, again", "torch", STREAMS[0]
STREAM_GOAL = 0.85  # of STREAM's bandwidth, at the row counts of a decode step
DECODE_ROWS = (1, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one input, and what is done with them."""

    name: str
    inputs: int
    widths: tuple[int, ...]
    gated: bool = False

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.inputs * sum(self.widths) * dtype.itemsize


LAYERS = (
    Layer(name="up (1,024 → 3,072)", inputs=HIDDEN, widths=(FFN,)),
    Layer(name="down (3,072 → 1,024)", inputs=FFN, widths=(HIDDEN,)),
    Layer(name="q, k, v", inputs=HIDDEN, widths=QKV),
    Layer(name="silu(gate) × up", inputs=HIDDEN, widths=(FFN, FFN), gated=True),
    Layer(name="head (1,024 → 8,192)", inputs=HIDDEN, widths=(VOCABULARY,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer, one number of rows: what each candidate took."""

    layer: Layer
    dtype: torch.dtype
    num_rows: int
    most_rows: int  # of our kernel, by its own rule
    timings: dict[str, Timing]
    stream_bytes: int  # that the read beside them reads
    peak_flops: float  # a second, of what multiplies in registers

    @property
    def num_bytes(self) -> int:
        return self.layer.num_bytes(self.dtype)

    @property
    def flop(self) -> float:
        return 2.0 * self.num_rows * self.num_bytes / self.dtype.itemsize

    def bandwidth(self, name: str) -> float:
        nbytes = self.stream_bytes if name == STREAM else self.num_bytes
        return nbytes / self.timings[name].median_s

    @property
    def share_of_stream(self) -> float:
        """Of the bandwidth of a plain read in the same round."""
        times = times_as_fast(self.timings[OURS], self.timings[STREAM]).median
        return times * self.num_bytes / self.stream_bytes

    @property
    def share_of_bound(self) -> float:
        """Of the larger of two times: to read the weights, and to multiply in registers."""
        reading = self.timings[STREAM].median_s * self.num_bytes / self.stream_bytes
        return max(reading, self.flop / self.peak_flops) / self.timings[OURS].median_s


class Weights:
    """Copies of one layer's weights, more than caches hold."""

    def __init__(self, layer: Layer, dtype: torch.dtype, linears: CpuLinear, nbytes: int) -> None:
        copies = max(2, nbytes // layer.num_bytes(dtype))
        self.layer, self.dtype = layer, dtype
        self.copies = [
            [torch.randn(width, layer.inputs).to(dtype) / 32 for width in layer.widths]
            for _ in range(copies)
        ]
        self.bound: list[Callable[[Tensor], Any]] = [
            linears.bind_gated(copy[0], copy[1], "silu") if layer.gated else linears.bind(copy)
            for copy in self.copies
        ]

    def calls(self, num_rows: int) -> dict[str, Call]:
        x = torch.randn(num_rows, self.layer.inputs).to(self.dtype)
        ours, theirs = cycle(self.bound), cycle(self.copies)

        def own() -> object:
            return next(ours)(x)

        def separate() -> object:
            outs = [functional.linear(x, weight) for weight in next(theirs)]
            return functional.silu(outs[0]) * outs[1] if self.layer.gated else outs

        return {OURS: own, TORCH: separate, AGAIN: own}


def few_rows(
    dtype: torch.dtype,
    rows: Sequence[int],
    num_rounds: int,
    read: Stream,
    say: Callable[[str], None],
) -> list[Case]:
    found = []
    stream = {STREAM: read.calls()[STREAM]}
    forced = CpuLinear(kernel_dir=kernel_dir(), most_rows=max(rows))
    usual = CpuLinear(kernel_dir=kernel_dir())
    peak = register_flops(dtype)
    most_rows = usual.bind([torch.zeros(FFN, HIDDEN, dtype=dtype)]).most_rows
    linears = usual if most_rows >= max(rows) else forced
    for layer in LAYERS if dtype == torch.bfloat16 else LAYERS[:1]:
        weights = Weights(layer, dtype, linears, read.nbytes)
        for num_rows in rows:
            say(f"{layer.name}, {dtype}, {num_rows} rows")
            calls = weights.calls(num_rows) | stream
            timings = take_turns(calls, num_rounds=num_rounds)
            found.append(
                Case(
                    layer=layer,
                    dtype=dtype,
                    num_rows=num_rows,
                    most_rows=most_rows,
                    timings=timings,
                    stream_bytes=read.nbytes,
                    peak_flops=peak,
                )
            )
    return found


def many_rows(num_rounds: int) -> Table:
    """What torch does with a long prompt: into memory that is new each time, or kept."""
    rows = []
    peak, flop = matmul(torch.bfloat16)
    for num_rows in MANY_ROWS:
        x, weight = torch.randn(num_rows, HIDDEN).bfloat16(), torch.randn(FFN, HIDDEN).bfloat16()
        kept = torch.empty(num_rows, FFN, dtype=torch.bfloat16)
        calls: dict[str, Call] = {
            "a new output": partial(functional.linear, x, weight),
            "a kept output": partial(torch.mm, x, weight.T, out=kept),
            "matmul of 2,048³": peak,
        }
        timings = take_turns(calls, num_rounds=num_rounds)
        work = 2.0 * num_rows * HIDDEN * FFN
        ratio = times_as_fast(timings["a kept output"], timings["a new output"])
        rows.append(
            [
                f"{num_rows:,}",
                *(
                    f"{(flop if name.startswith('matmul') else work) / timing.median_s / 1e12:.2f}"
                    for name, timing in timings.items()
                ),
                f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})",
            ]
        )
    columns = ("rows", *calls, "kept: × as fast as new")
    return Table(title="torch's own: up, bfloat16, TFLOP/s", columns=columns, rows=rows)


def table(cases: Sequence[Case]) -> Table:
    columns = (
        "layer", "dtype", "rows", "ours GB/s", "of STREAM", "torch GB/s", "ours GFLOP/s",
        "of the bound", "× as fast as torch", "A/A", "our kernel's by rule",
    )  # fmt: skip
    rows = []
    for case in cases:
        ratio = times_as_fast(case.timings[OURS], case.timings[TORCH])
        noise = times_as_fast(case.timings[OURS], case.timings[AGAIN])
        rows.append(
            [
                case.layer.name,
                str(case.dtype).removeprefix("torch."),
                f"{case.num_rows:,}",
                f"{case.bandwidth(OURS) / 1e9:.1f}",
                f"{100 * case.share_of_stream:.0f} %",
                f"{case.bandwidth(TORCH) / 1e9:.1f}",
                f"{case.flop / case.timings[OURS].median_s / 1e9:.0f}",
                f"{100 * case.share_of_bound:.0f} %",
                f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})"
                + ("" if ratio.all_clean else " *"),
                f"{noise.median:.2f} (± {noise.spread:.2f})",
                "yes" if case.num_rows <= case.most_rows else "no",
            ]
        )
    return Table(title="Beside torch", columns=columns, rows=rows)


def claims(cases: Sequence[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        if case.num_rows > case.most_rows:
            continue
        ratio = times_as_fast(case.timings[OURS], case.timings[TORCH])
        noise = times_as_fast(case.timings[OURS], case.timings[AGAIN])
        what = f"{case.layer.name}, {case.dtype}, {case.num_rows} rows".replace("torch.", "")
        found.append(
            {
                "claim": f"{what}: not slower than torch",
                "ours": round(case.timings[OURS].median_s * 1e6, 1),
                "peer": round(case.timings[TORCH].median_s * 1e6, 1),
                "unit": "µs",
                "ratio": round(ratio.median, 3),
                "goal": "≥ 1.0 ×, less the noise",
                "holds": ratio.median >= 1.0 - noise.spread,
                "a_a_spread": round(noise.spread, 3),
                "clean": ratio.all_clean,
            }
        )
        if case.dtype == torch.bfloat16 and case.num_rows in DECODE_ROWS:
            share = case.share_of_stream
            found.append(
                {
                    "claim": f"{what}: weights are read at the memory's speed",
                    "ours": round(case.bandwidth(OURS) / 1e9, 1),
                    "peer": round(case.bandwidth(STREAM) / 1e9, 1),
                    "unit": "GB/s",
                    "ratio": round(share, 3),
                    "goal": f"≥ {STREAM_GOAL} of STREAM",
                    "holds": share >= STREAM_GOAL,
                }
            )
    return found


app = typer.Typer(add_completion=False)


@app.command()
def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Three rounds of 1 and 32 rows, bfloat16 only.")
    ] = False,
    dtypes: Annotated[str, typer.Option(help="Some of these.")] = ",".join(DTYPES),
    with_claims: WithClaims = False,
    output: Output = None,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
) -> None:
    """How fast linear layers read their weights and multiply: ours, torch's, and STREAM."""
    run = Run("engine.bench_linear", width=170)
    torch.manual_seed(seed)
    num_rounds = QUICK_ROUNDS if quick else ROUNDS
    nbytes = min(2 * max(last_cache_bytes(), 2**26), os_memory.available_bytes() // 12)

    with torch.inference_mode():
        read = Stream(nbytes)
        cases = []
        for name in DTYPES[:1] if quick else dtypes.split(","):
            rows = QUICK_ROWS if quick else ROWS
            cases += few_rows(getattr(torch, name), rows, num_rounds, read, run.say)
        shown = [table(cases)]
        if not quick and dtypes == ",".join(DTYPES):
            shown.append(many_rows(num_rounds))
    best_s = min(case.timings[STREAM].best_s for case in cases)
    flags = " --quick" * quick + f" --dtypes {dtypes}" * (dtypes != ",".join(DTYPES))
    peaks = {case.dtype: f"{case.peak_flops / 1e9:.0f} in {case.dtype}" for case in cases}
    notes = [
        f"STREAM is torch.sum over {format_bytes(read.nbytes)}, in turn with the others; "
        f"its best was {read.nbytes / best_s / 1e9:.1f} GB/s.",
        f"Medians of at least {num_rounds} rounds; ratios are of pairs of one round, with the "
        "least and the greatest; * where too few samples were clean. Between two readings of the "
        f"same weights lie {format_bytes(read.nbytes)} of others.",
        "The bound is the larger of two times: to read the weights at STREAM's rate, and to "
        "multiply at that of registers, GFLOP/s: "
        + ", ".join(peaks.values()).replace("torch.", "")
        + ".",
    ]
    threads = f"{torch.get_num_threads()} threads"
    run.end(
        shown,
        run.setting(f"{flags} --seed {seed}", packages=["torch"], also=[threads]),
        notes=notes,
        claims=claims(cases) if with_claims else (),
        output=output,
    )


if __name__ == "__main__":
    app()
