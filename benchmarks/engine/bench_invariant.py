"""What ``--batch-invariant`` costs: engines with it and without, in turn, step by step.

    python -m benchmarks.engine.bench_invariant --batch 32 --layers 6

Three engines have the same model object, of Qwen2.5-0.5B's shape with random weights: a usual one,
the same again (A/A: what the machine's own unrest is), and a batch-invariant one. Timed are a step
in which all sequences decode, a step of 512 tokens of a prompt, and a whole mixed run: prompts of
32 to 160 tokens that come at once, each continued by 32. Wall-clock time and CPU time are printed:
on a machine that others share, only the CPU time of one thread (``--threads 1``) means anything.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import torch
import typer
from transformers import Qwen2ForCausalLM

from benchmarks.engine.bench_recorded import WARM, in_turn, make_model
from quire import LLM, SamplingParams
from quire.engine.outputs import TextDelta

USUAL, AGAIN, INVARIANT = "usual", "usual again", "batch-invariant"
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 32


def main(
    dtype: str = "bfloat16",
    threads: int = 2,
    batch: Annotated[int, typer.Option(help="Sequences that decode.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens of each when decoding begins.")] = 256,
    layers: Annotated[int, typer.Option(help="Of the model, which has 24.")] = 24,
    steps: Annotated[int, typer.Option(help="Steps of each engine in which all decode.")] = 30,
    prompts: Annotated[int, typer.Option(help="Steps of each engine over a prompt.")] = 5,
    mixed: Annotated[int, typer.Option(help="Mixed runs of each engine.")] = 3,
) -> None:
    """Print the median time of each engine, and its ratio to the usual one's in the same turn."""
    torch.set_num_threads(threads)
    model = make_model(dtype, num_hidden_layers=layers)
    engines = {name: _engine(model, name, batch, context + WARM + steps + batch) for name in _NAMES}
    try:
        for llm in engines.values():
            _begin_decoding(llm, batch, context, WARM + steps)
        _report(f"a step of {batch} decodes", engines, _step, steps)
        for llm in engines.values():
            while llm.engine.scheduler.has_unfinished:
                llm.step()
        _report(f"a step of {PROMPT_TOKENS} tokens of a prompt", engines, _prefill, prompts)
        _report(f"mixed, {batch} sequences", engines, lambda llm, n: _mixed(llm, n, batch), mixed)
    finally:
        for llm in engines.values():
            llm.close()


_NAMES = (USUAL, AGAIN, INVARIANT)


def _engine(model: Qwen2ForCausalLM, name: str, batch: int, most_tokens: int) -> LLM:
    return LLM(
        model,
        batch_invariant=name == INVARIANT,
        kv_cache_memory_bytes=2**29,
        max_model_len=max(1024, most_tokens),
        max_num_seqs=batch,
        enable_prefix_caching=False,
    )


def _prompt(number: int, length: int) -> list[int]:
    return [(7 * i + number) % 3000 + 5 for i in range(length)]


def _begin_decoding(llm: LLM, batch: int, context: int, steps: int) -> None:
    """Compute prompts, and so many tokens of each that all decode and are recorded."""
    params = SamplingParams(max_tokens=steps + batch, temperature=0, ignore_eos=True)
    begun: set[int] = set()
    for number in range(batch):
        begin = partial(_note, begun, number)
        llm.start(llm.request(_prompt(number, context), params), begin)
    while len(begun) < batch:
        llm.step()
    for _ in range(WARM):
        llm.step()


def _note(begun: set[int], number: int, _: TextDelta) -> None:
    begun.add(number)


def _step(llm: LLM, _: int) -> None:
    llm.step()


def _prefill(llm: LLM, number: int) -> None:
    llm.generate([_prompt(number, PROMPT_TOKENS)], SamplingParams(max_tokens=1, temperature=0))


def _mixed(llm: LLM, number: int, batch: int) -> None:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    llm.generate([_prompt(number + n, 32 + 128 * n // batch) for n in range(batch)], params)


def _report(
    what: str, engines: dict[str, LLM], work: Callable[[LLM, int], None], turns: int
) -> None:
    for clock, taken in in_turn(engines, work, turns).items():
        print(f"{what}, {turns} turns, {clock}:")
        for name, own in taken.items():
            ratios = sorted(a / b for a, b in zip(own, taken[USUAL], strict=True))
            print(
                f"  {name}: median {1e3 * statistics.median(own):.1f} ms, "
                f"{statistics.median(ratios):.3f} of the usual in its turn "
                f"({ratios[0]:.3f} … {ratios[-1]:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
