"""What tiers cost requests that gain nothing by them: steps beside loads, and prompts of one use.

    python -m benchmarks.tiers.bench_beside --rounds 4 --minutes 0
    python -m benchmarks.tiers.bench_beside --rounds 0 --minutes 7

*Beside loads*: some sequences decode, and meanwhile prompts come whose blocks lie in a tier. The
twin engine has no tier and gets no such prompts: its steps are as long as they can be. Steps that
compute a prompt's last tokens are left out; what is left is decoding, beside loads or not.
*Of one use*: prompts none of which begins like another one, with a tier that may store them and
without. Engines take turns, prompt by prompt, in an order that changes: seconds until all tokens
are there, and seconds of the processor in all threads until all that goes out is stored. The
first prompts stand by themselves: with them the engine learns that nothing recurs.
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
ONE_USE_TOKENS, ONE_USE_OUTPUT = 256, 8
LEARNING = 20  # prompts


def main(
    rounds: Annotated[int, typer.Option(help="Of steps beside loads.")] = 4,
    minutes: Annotated[float, typer.Option(help="Of prompts of one use.")] = 7,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    model: Annotated[Path, typer.Option(help="Its folder; made if it is not there.")] = MODEL,
    tier: Annotated[str, typer.Option(help="memory, or file.")] = "file",
) -> None:
    """Print ratios of a step's times, and of throughput."""
    torch.set_num_threads(threads)
    loaded, rng = load(make(model)), random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        where = "memory:?size=2GiB" if tier == "memory" else f"file:{folder}/blocks?size=8GiB"
        if rounds:
            _beside_loads(loaded, rng, where, rounds)
        if minutes:
            _of_one_use(loaded, rng, where, minutes)


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


def _all_is_stored(llm: LLM) -> bool:
    offload, report = llm.engine.scheduler.offload, llm.tiers
    assert offload is not None
    assert report is not None
    [tier] = report.tiers
    # The model has one group: a block is one record.
    return not offload.has_more and tier.num_stored + tier.num_dropped >= (
        report.counts.stored_blocks
    )


def _of_one_use(loaded: LoadedModel, rng: random.Random, where: str, minutes: float) -> None:
    engines = {
        "tier": _engine(loaded, kv_tier=(where,)),
        "without": _engine(loaded),
        "without again": _engine(loaded),
    }
    offload = engines["tier"].engine.scheduler.offload
    assert offload is not None
    params = SamplingParams(max_tokens=ONE_USE_OUTPUT, temperature=0, ignore_eos=True)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    stored = list[int]()  # blocks, after each prompt
    for llm in engines.values():
        llm.generate([_prompt(rng, loaded, ONE_USE_TOKENS)], params)  # makes what is made once
    stop_s = time.monotonic() + 60 * minutes
    while time.monotonic() < stop_s:
        prompt, order = _prompt(rng, loaded, ONE_USE_TOKENS), list(engines)
        rng.shuffle(order)
        for name in order:
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            engines[name].generate([prompt], params)
            took_s = time.perf_counter() - begun_s
            while name == "tier" and not _all_is_stored(engines[name]):
                time.sleep(0.01)
            taken[name].append((took_s, time.process_time() - begun_cpu_s))
        stored.append(offload.counts.stored_blocks)
    print(f"of one use: {len(stored)} prompts of {ONE_USE_TOKENS} tokens")
    for label, part in (("first", slice(LEARNING)), ("others", slice(LEARNING, None))):
        blocks = stored[part]
        if not blocks:
            continue
        before = stored[LEARNING - 1] if part.start else 0
        print(
            f"  {label} {len(blocks)}: {blocks[-1] - before} of "
            f"{len(blocks) * (ONE_USE_TOKENS // 16)} blocks of prompts stored"
        )
        for name in ("tier", "without again"):
            for what, at in (("clock", 0), ("processor", 1)):
                own, twin = ([each[at] for each in taken[x][part]] for x in (name, "without"))
                ratios = sorted(b / a for a, b in zip(own, twin, strict=True))
                low, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.25, 0.75))
                print(
                    f"    {name:14} throughput × without, by the {what:9}: median "
                    f"{statistics.median(ratios):.3f}, quartiles {low:.3f} … {high:.3f}, "
                    f"of sums {sum(twin) / sum(own):.3f}"
                )
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    typer.run(main)
