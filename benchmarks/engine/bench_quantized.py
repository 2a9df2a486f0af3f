"""Weights in 8 and 4 bits: how fast they are read, made, and decoded with.

    python -m benchmarks.engine.bench_quantized [--claims] [--model FOLDER] [--output FILE]

Kernels: every call reads other weights than the one before, as many as no cache holds, in huge
pages as an engine has them; eight calls are played one after the other, as in a recorded pass of
a decoding engine. Candidates take turns with a read of plain memory (STREAM), and with the same
products of inputs in two bytes, which is what ``--no-dynamic-quantization`` computes.
Bandwidth is that of the packed bytes, read once. Decoding: the 0.45 B model of random weights
(``benchmarks.engine.model``) in each form, engines side by side in one process, which take turns;
"again" is another run of the first engine and shows the noise; "exact" is without rounded inputs.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from benchmarks.engine.model import make
from benchmarks.harness.quiet import Call, take_turns, times_as_fast
from benchmarks.harness.report import Output, Run, Table, WithClaims
from benchmarks.harness.roofline import STREAMS, Stream
from quire import LLM, SamplingParams
from quire.config import kernel_dir
from quire.kernels.player import Player
from quire.layers.cpu import CpuLinear
from quire.layers.cpu.linear import BoundLinear
from quire.layers.cpu.packed_weight import PackedForm, PackedWeight, quantize
from quire.memory.host.huge_pages import huge_pieces
from quire.models.loader import load
from quire.spec.weight_forms import weight_form
from quire.units import format_bytes

# Of the 0.45 B model: hidden 1,024, ffn 3,072, queries, keys and values 4,096.
LAYERS = {
    "up (1,024 → 3,072)": (1024, (3072,)),
    "down (3,072 → 1,024)": (3072, (1024,)),
    "q, k, v": (1024, (2048, 1024, 1024)),
    "gate, up": (1024, (3072, 3072)),
}
FORMS = ("int8", "int8-g32", "int4", "int4-g128", "int4-g32-asym")
ROWS, DECODE_ROWS = (1, 4, 16, 32, 128, 512, 2048), 1
STREAM, AGAIN, EXACT = STREAMS[1], "again", "two bytes"
STREAM_GOAL = 0.8
STREAM_BYTES = 2**28
MANY_ROWS = 128  # of which multiplying takes so long that it matters little where weights are
PLAYED = 8  # calls, one after the other, as a recorded pass plays them
ENGINES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int8, exact": {"quantization": "int8", "dynamic_quantization": False},
    "int4": {"quantization": "int4"},
    "int4, exact": {"quantization": "int4", "dynamic_quantization": False},
}
# Sequences, tokens of a prompt, new tokens of each.
WORK = {
    "decoding, 1 sequence": (1, 4, 48),
    "decoding, 16 sequences": (16, 4, 48),
    "a prompt of 2,048": (1, 2048, 1),
}


def kernels(
    forms: list[str], num_rounds: int, say: Callable[[str], None]
) -> tuple[Table, list[dict[str, Any]]]:
    read = Stream(STREAM_BYTES)
    kept: list[object] = []  # what recorded calls read and write
    rows, claims = [], []
    for name in forms:
        form = weight_form(name)
        packed = PackedForm(bits=form.bits, group_size=form.group_size, has_zeros=form.has_zeros)
        for layer, (inputs, widths) in LAYERS.items():
            say(f"{layer}, {name}")
            ones = [quantize(torch.randn(width, inputs), packed) for width in widths]
            num_bytes = sum(one.data.nbytes for one in ones)
            copies = max(2, STREAM_BYTES // num_bytes)
            pieces = iter(huge_pieces([one.data.nbytes for one in ones] * copies))
            # Each has its own scratch memory: recorded calls go on using it.
            cpus = {how: CpuLinear(kernel_dir=kernel_dir()) for how in (name, EXACT)}
            bound: dict[str, list[BoundLinear]] = {name: [], EXACT: []}
            for _ in range(copies):
                several = [
                    PackedWeight(
                        next(pieces).view(one.data.shape).copy_(one.data), *one.shape, packed
                    )
                    for one in ones
                ]
                for how, each in bound.items():
                    rounds = how != EXACT
                    each.append(cpus[how].bind(several, None, torch.bfloat16, rounds_inputs=rounds))
            for num_rows in ROWS if layer == "up (1,024 → 3,072)" else (DECODE_ROWS,):
                x = torch.randn(num_rows, inputs).bfloat16()
                calls: dict[str, Call] = {STREAM: read.calls()[STREAM]}
                for how, each in bound.items():
                    cpu, several_of = (
                        cpus[how],
                        each if num_rows < MANY_ROWS else each[: 2 * PLAYED],
                    )
                    with cpu.threads.listening():
                        kept.append([x, *(one(x) for one in several_of)])
                        heard = cpu.threads.take_heard()
                    played = PLAYED * (len(heard) // len(several_of))  # many rows: several calls
                    some = range(0, len(heard) - played + 1, played)
                    waiting = cycle(
                        [Player(heard[n : n + played], cpu.kernels, cpu.threads) for n in some]
                    )
                    calls[how] = partial(_next, waiting)
                calls[AGAIN] = calls[name]
                timings = take_turns(calls, num_rounds=num_rounds)
                exact = times_as_fast(timings[name], timings[EXACT])
                ratio = times_as_fast(timings[name], timings[STREAM])
                scale = PLAYED * num_bytes / read.nbytes
                noise = times_as_fast(timings[name], timings[AGAIN])
                median_s = timings[name].median_s / PLAYED
                flop = 2.0 * num_rows * inputs * sum(widths)
                rows.append(
                    [
                        name, layer, str(num_rows), f"{median_s * 1e6:.0f}",
                        f"{num_bytes / median_s / 1e9:.1f}",
                        f"{read.nbytes / timings[STREAM].median_s / 1e9:.1f}",
                        f"{100 * ratio.median * scale:.0f} % "
                        f"({100 * ratio.least * scale:.0f} … {100 * ratio.greatest * scale:.0f})",
                        f"{flop / median_s / 1e9:.0f}",
                        f"{exact.median:.2f} ({exact.least:.2f} … {exact.greatest:.2f})",
                        f"{noise.median:.2f} (± {noise.spread:.2f})",
                    ]
                )  # fmt: skip
                if num_rows == DECODE_ROWS:
                    claims.append(
                        {
                            "claim": f"{name}, {layer}, one row: read at the memory's speed",
                            "ours": round(num_bytes / median_s / 1e9, 1),
                            "peer": round(read.nbytes / timings[STREAM].median_s / 1e9, 1),
                            "unit": "GB/s",
                            "ratio": round(ratio.median * scale, 3),
                            "goal": f"≥ {STREAM_GOAL} of STREAM",
                            "holds": ratio.median * scale >= STREAM_GOAL,
                            "clean": ratio.all_clean,
                        }
                    )
    columns = (
        "form", "layer", "rows", "µs", "GB/s", "STREAM GB/s", "of STREAM", "GFLOP/s",
        f"× {EXACT}", "A/A",
    )  # fmt: skip
    return Table(title="Kernels", columns=columns, rows=rows), claims


def _next(waiting: Iterator[Player]) -> None:
    next(waiting)()


def decoding(
    folder: Path, names: list[str], num_rounds: int, say: Callable[[str], None]
) -> tuple[Table, list[str]]:
    engines: dict[str, LLM] = {}
    notes = []
    for name in names:
        say(f"loading {name}")
        begun = perf_counter()
        loaded = load(folder, **ENGINES[name])
        notes.append(f"{name} was loaded in {perf_counter() - begun:.1f} s.")
        engines[name] = LLM(
            loaded,
            kv_cache_memory_bytes="512MiB",  # the prompt's are 448 in float32
            enable_prefix_caching=False,
            dynamic_quantization=ENGINES[name].get("dynamic_quantization", True),
        )
    rows = []
    for what, (num_sequences, num_prompt, num_new) in WORK.items():
        say(what)
        prompts: list[Any] = [
            {"prompt_token_ids": [(100 + n + 7 * i) % 1000 for i in range(num_prompt)]}
            for n in range(num_sequences)
        ]
        params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)
        calls: dict[str, Call] = {
            name: partial(llm.generate, prompts, params) for name, llm in engines.items()
        }
        calls[AGAIN] = calls[names[0]]
        for call in calls.values():
            call()  # passes come to be recorded
        timings = take_turns(calls, num_rounds=num_rounds)
        noise = times_as_fast(timings[names[0]], timings[AGAIN])
        for name in names:
            ratio = times_as_fast(timings[name], timings[names[0]])
            rate = num_sequences * max(num_new, num_prompt) / timings[name].median_s
            rows.append(
                [
                    what, name, f"{rate:.1f}",
                    f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})",
                    f"{noise.median:.2f} (± {noise.spread:.2f})",
                ]
            )  # fmt: skip
    for llm in engines.values():
        llm.close()
    columns = ("work", "weights", "tokens/s", f"× {names[0]}", "A/A")
    return Table(title="The engine", columns=columns, rows=rows), notes


app = typer.Typer(add_completion=False)


@app.command()
def main(
    folder: Annotated[
        Path, typer.Option("--model", help="Where the 0.45 B model is, or is to be made.")
    ] = Path("/tmp/quire-bench-model"),
    part: Annotated[str, typer.Option(help="kernels, decoding, or all.")] = "all",
    only: Annotated[str, typer.Option(help="Engines to compare, by semicolons.")] = ";".join(
        ENGINES
    ),
    forms: Annotated[str, typer.Option(help="Forms of kernels, by commas.")] = ",".join(FORMS),
    num_rounds: Annotated[int, typer.Option("--rounds", min=1)] = 5,
    with_claims: WithClaims = False,
    output: Output = None,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
) -> None:
    """Weights in 8 and 4 bits, beside STREAM and beside 16 and 32 bits."""
    run = Run("engine.bench_quantized", width=150)
    torch.manual_seed(seed)
    shown: list[Table] = []
    claims: list[dict[str, Any]] = []
    notes: list[str] = []
    if part in ("all", "kernels"):
        with torch.inference_mode():
            table, claims = kernels(forms.split(","), num_rounds, run.say)
        shown.append(table)
        notes.append(
            f"STREAM adds up vectors over {format_bytes(STREAM_BYTES)}, in turn with the others; "
            f"between two readings of the same weights lie {format_bytes(STREAM_BYTES)} of others."
        )
    if part in ("all", "decoding"):
        table, made = decoding(make(folder), only.split(";"), num_rounds, run.say)
        shown.append(table)
        notes += made
    threads = f"{torch.get_num_threads()} threads"
    flags = f" --part {part} --forms {forms} --rounds {num_rounds} --seed {seed}"
    run.end(
        shown,
        run.setting(flags, packages=["torch", "transformers"], also=[threads]),
        notes=notes,
        claims=claims if with_claims else (),
        output=output,
    )


if __name__ == "__main__":
    app()
