"""A decode step with recorded passes and without (``--enforce-eager``), step by step in turn.

    python -m benchmarks.engine.bench_recorded --dtype bfloat16 --threads 1 --batch 1

Both engines have the same model object, of Qwen2.5-0.5B's shape with random weights, so that a step
of one sweeps the caches for the next of the other. Wall-clock time and CPU time are printed: on a
machine that others share, only the CPU time of one thread means anything.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import torch
import typer
from transformers import Qwen2Config, Qwen2ForCausalLM

from quire import LLM, SamplingParams

WARM = 28  # steps: the 24th is recorded
CONFIG = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4_864, num_hidden_layers=24)
HEADS = dict(num_attention_heads=14, num_key_value_heads=2, rope_theta=1e6)


def main(
    dtype: str = "bfloat16",
    threads: int = 1,
    batch: Annotated[int, typer.Option(help="Sequences that decode.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of each engine.")] = 60,
) -> None:
    """Print the times of a step, recorded and not, and their ratio."""
    torch.set_num_threads(threads)
    model = make_model(dtype)
    params = SamplingParams(max_tokens=WARM + steps, temperature=0, ignore_eos=True)
    engines: dict[str, LLM] = {}
    for name, eager in (("recorded", False), ("eager", True)):
        engines[name] = llm = LLM(
            model,
            enforce_eager=eager,
            kv_cache_memory_bytes=2**27,
            max_model_len=1024,
            max_num_seqs=max(2, batch),
            enable_prefix_caching=False,
        )
        for number in range(batch):
            prompt = [(7 * i + number) % 300 + 5 for i in range(64)]
            llm.start(llm.request(prompt, params), lambda *_: None)
        for _ in range(WARM):
            llm.step()
    for clock, taken in in_turn(engines, lambda llm, _: llm.step(), steps).items():
        ratios = [b / a for a, b in zip(taken["recorded"], taken["eager"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        least = {name: 1e3 * min(own) for name, own in taken.items()}
        median = {name: 1e3 * statistics.median(own) for name, own in taken.items()}
        print(
            f"{clock}: recorded {least['recorded']:.1f} ms at least, median "
            f"{median['recorded']:.1f}; eager {least['eager']:.1f}, {median['eager']:.1f}; "
            f"eager / recorded {least['eager'] / least['recorded']:.3f} of the least, "
            f"{middle:.3f} of pairs (quartiles {low:.3f} … {high:.3f})"
        )


def make_model(dtype: str, **sizes: int) -> Qwen2ForCausalLM:
    """Make a model of Qwen2.5-0.5B's shape, but for the sizes given, with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **{**CONFIG, **sizes}, **HEADS, tie_word_embeddings=True, dtype=getattr(torch, dtype)
    )
    return Qwen2ForCausalLM(config).to(config.dtype).eval()


def in_turn(
    engines: dict[str, LLM], work: Callable[[LLM, int], object], turns: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each engine's turns, by the name of a clock."""
    times: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in engines} for clock in ("wall clock", "CPU")
    }
    for turn in range(turns):
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            work(engines[name], turn)
            times["CPU"][name].append(time.process_time() - cpu_s)
            times["wall clock"][name].append(time.perf_counter() - wall_s)
    return times


if __name__ == "__main__":
    typer.run(main)
