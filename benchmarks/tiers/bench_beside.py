"""What tiers cost requests that gain nothing by them: steps beside loads, and prompts of one use.

    python -m benchmarks.tiers.bench_beside --rounds 8

*Beside loads*: some sequences decode, and meanwhile prompts come whose blocks lie in a tier. The
twin engine has no tier and gets no such prompts: its steps are as long as they can be. Steps that
compute a prompt's last tokens are left out; what is left is decoding, beside loads or not.
*Of one use*: prompts none of which begins like another one, with a tier that may store them and
without; requests a second.
"""

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import torch
import typer

from benchmarks.engine.model import make
from quire import LLM, SamplingParams
from quire.models.loader import LoadedModel, load

SEED = 1234
MODEL = Path(tempfile.gettempdir()) / "quire-bench-model"
DECODING, PROMPT_TOKENS, LONG_TOKENS = 8, 64, 1024


def main(
    rounds: int = 8,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    model: Annotated[Path, typer.Option(help="Its folder; made if it is not there.")] = MODEL,
    tier: Annotated[str, typer.Option(help="memory, or file.")] = "file",
) -> None:
    """Print ratios of a step's times, and of throughput."""
    torch.set_num_threads(threads)
    loaded, rng = load(make(model)), random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        where = "memory:?size=2GiB" if tier == "memory" else f"file:{folder}/blocks?size=8GiB"
        _beside_loads(loaded, rng, where, rounds)
        _of_one_use(loaded, rng, where, rounds)


def _engine(loaded: LoadedModel, **options: Any) -> LLM:
    return LLM(loaded, kv_cache_memory_bytes=2**30, max_model_len=2048, max_num_seqs=16, **options)


def _prompt(rng: random.Random, loaded: LoadedModel, num_tokens: int) -> list[int]:
    return [rng.randrange(5, loaded.vocab_size) for _ in range(num_tokens)]


def _beside_loads(  # noqa: C901 - one measurement, from its beginning to its end
    loaded: LoadedModel, rng: random.Random, where: str, rounds: int
) -> None:
    engines = {
        "tier": _engine(loaded, kv_tier=(where,), kv_tier_write="always"),
        "without": _engine(loaded),
        "without again": _engine(loaded),
    }
    stored = [_prompt(rng, loaded, LONG_TOKENS) for _ in range(4)]
    for llm in engines.values():
        llm.generate(stored, SamplingParams(max_tokens=1, temperature=0))
    tiered = engines["tier"]
    offload = tiered.engine.scheduler.offload
    assert offload is not None
    while offload.has_more:
        time.sleep(0.05)
    sizes: dict[str, int] = {}
    for name, llm in engines.items():
        llm.engine.watch = lambda plan, name=name: sizes.__setitem__(name, plan.num_tokens)
    decode = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        prompts = [_prompt(rng, loaded, PROMPT_TOKENS) for _ in range(DECODING)]
        for llm in engines.values():
            llm.reset_prefix_cache()
            for prompt in prompts:
                llm.start(llm.request(prompt, decode), lambda *_: None)
        more, step = True, 0
        while more:
            if step % 20 == 10:  # its blocks are loaded while the others decode
                tiered.reset_prefix_cache()
                prompt = stored[(number + step) % len(stored)]
                one = SamplingParams(max_tokens=1, temperature=0)
                tiered.start(tiered.request(prompt, one), lambda *_: None)
            taken: dict[str, float] = {}
            order = list(engines)
            for name in order[step % 3 :] + order[: step % 3]:
                begun_s = time.perf_counter()
                more = engines[name].step()
                taken[name] = time.perf_counter() - begun_s
            step += 1
            if set(sizes.values()) == {DECODING} and number:
                for name, own in taken.items():
                    times[name].append(own)
        while tiered.step():
            pass
    counts = offload.counts
    print(
        f"beside loads, {where.partition(':')[0]}: {len(times['tier']):,} decode steps of "
        f"{DECODING} sequences, {counts.hit_tokens:,} tokens loaded meanwhile"
    )
    for name in ("tier", "without again"):
        _compare(name, times[name], times["without"])
    for llm in engines.values():
        llm.close()


def _compare(name: str, own: list[float], twin: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(own, twin, strict=True))
    print(
        f"  {name:14} median {_ratio(own, twin, 0.5)}, p99 {_ratio(own, twin, 0.99)}, "
        f"longest {max(own) / max(twin):.3f}; of pairs: median {statistics.median(ratios):.3f}, "
        f"p99 {ratios[int(0.99 * len(ratios))]:.2f}"
    )


def _ratio(own: list[float], twin: list[float], share: float) -> str:
    a, b = (sorted(each)[int(share * len(each))] for each in (own, twin))
    return f"{a * 1e3:.1f} ms / {b * 1e3:.1f} ms = {a / b:.3f}"


def _of_one_use(loaded: LoadedModel, rng: random.Random, where: str, rounds: int) -> None:
    engines = {
        "tier": _engine(loaded, kv_tier=(where,)),
        "without": _engine(loaded),
        "without again": _engine(loaded),
    }
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(1 + rounds):
        prompts = [_prompt(rng, loaded, 256) for _ in range(8)]
        order = list(engines)
        for name in order[number % 3 :] + order[: number % 3]:
            begun_s = time.perf_counter()
            engines[name].generate(prompts, params)
            if number:
                seconds[name].append(time.perf_counter() - begun_s)
    offload = engines["tier"].engine.scheduler.offload
    assert offload is not None
    print(
        f"of one use: {rounds} rounds of 8 prompts of 256 tokens, {offload.counts.stored_blocks} "
        f"blocks stored of {(1 + rounds) * 8 * 256 // 16}"
    )
    for name in ("tier", "without again"):
        ratios = [b / a for a, b in zip(seconds[name], seconds["without"], strict=True)]
        print(
            f"  {name:14} throughput × without: median {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} … {max(ratios):.3f})"
        )
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    typer.run(main)
