"""The drop-in cache beside Transformers' own ``DynamicCache``: seconds a decode step, and to begin.

One model with random weights decodes over all caches at once, a token over each in turn, so that a
pair of steps saw the same machine. Contexts are random keys and values, put in by ``update``. The
figure is the median of the ratios of steps; ``dynamic again`` shows the noise of it.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import quire
from benchmarks.harness.attending import threads
from benchmarks.harness.report import Output, Run, Table, WithClaims
from quire.kv import STRATEGIES

PEER, AGAIN = "dynamic", "dynamic again"
# (rows, context, tokens of padding before each second row)
CASES = ((1, 64, 0), (1, 2_048, 0), (8, 64, 0), (8, 2_048, 0), (8, 512, 100))
WARM_UP = 3  # steps: the first ones compile kernels, or load them
GOAL_SHORT, GOAL_LONG, GOAL_CREATION_S = 0.98, 1.0, 5e-3

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was measured of one cache in one case: seconds of steps, in the order of the rounds."""

    steps: list[float]
    ratios: list[float]  # the peer's step by this one's, of each round

    @property
    def times_as_fast(self) -> float:
        return statistics.median(self.ratios)


def make_model(seed: int) -> PreTrainedModel:
    """A Qwen3 of 95 million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def make_cache(name: str, model: PreTrainedModel, longest: int) -> Any:
    if name in STRATEGIES:
        return quire.cache(model, name, max_model_len=longest)
    return DynamicCache(config=model.config)


def fill(kept: Any, model: PreTrainedModel, rows: int, num_tokens: int, seed: int) -> None:
    """Random keys and values in every layer, the same ones in every cache."""
    config, draws = model.config, torch.Generator().manual_seed(seed)
    shape = (rows, config.num_key_value_heads, num_tokens, config.head_dim)
    k, v = torch.randn(2, *shape, generator=draws).to(torch.bfloat16)
    for layer in range(config.num_hidden_layers):
        kept.update(k, v, layer)


def decode(
    model: PreTrainedModel, case: tuple[int, int, int], num_rounds: int, seed: int
) -> dict[str, Found]:
    """Steps over all caches in turn; the first one changes from round to round."""
    rows, context, padded = case
    names = [PEER, *STRATEGIES, AGAIN]
    total = context + num_rounds + WARM_UP
    caches = {name: make_cache(name, model, total + 1) for name in names}
    for kept in caches.values():
        fill(kept, model, rows, context, seed)
    mask = torch.ones(rows, total + 1, dtype=torch.long)
    mask[1::2, :padded] = 0
    token = torch.randint(0, 8192, (rows, 1), generator=torch.Generator().manual_seed(seed))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(num_rounds + WARM_UP):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_step(model, caches[name], token, mask[:, : context + turn + 1]))
    for name in STRATEGIES:
        caches[name].close()
    base = seconds[PEER][WARM_UP:]
    return {
        name: Found(
            steps=(own := taken[WARM_UP:]),
            ratios=[theirs / ours for theirs, ours in zip(base, own, strict=True)],
        )
        for name, taken in seconds.items()
    }


def _step(model: PreTrainedModel, kept: Any, token: Tensor, mask: Tensor) -> float:
    begun = time.perf_counter()
    model(input_ids=token, past_key_values=kept, attention_mask=mask)
    return time.perf_counter() - begun


def creation(model: PreTrainedModel, repeats: int) -> dict[str, list[float]]:
    """Seconds to make a cache, of each strategy and of the peer, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in (PEER, *STRATEGIES)}
    for _ in range(repeats):
        for name, several in taken.items():
            begun = time.perf_counter()
            make_cache(name, model, 4_096)
            several.append(time.perf_counter() - begun)
    return taken


def shown(values: Sequence[float], write: Callable[[float], str]) -> str:
    middle = statistics.median(values)
    return f"{write(middle)} ({write(min(values))} … {write(max(values))})"


def millis(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def quartiles(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} … {high:.3f})"


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, no long context.")] = False,
    with_claims: WithClaims = False,
    output: Output = None,
    rounds: Annotated[int, typer.Option(help="Steps over each cache in each case.")] = 40,
    seed: Annotated[int, typer.Option(help="Of weights, contexts and tokens.")] = 0,
) -> None:
    """Decode steps over every strategy beside `DynamicCache`. One thread, 5 GiB, three minutes."""
    run = Run("engine.bench_drop_in", width=170)
    cases = tuple(case for case in CASES if case[1] < 1_000) if quick else CASES
    num_rounds = 8 if quick else rounds
    steps, starts = [], []
    claims: list[dict[str, Any]] = []
    with threads(1), torch.inference_mode():
        model = make_model(seed)
        for case in cases:
            gc.collect()
            found = decode(model, case, num_rounds, seed)
            rows, context, padded = case
            name = f"{rows} rows, {context:,} tokens" + f", {padded} of padding" * bool(padded)
            noise = abs(1 - found[AGAIN].times_as_fast)
            for kind, each in found.items():
                steps.append(
                    [name, kind, shown(each.steps, millis), quartiles(each.ratios)]
                    if kind != PEER
                    else [name, kind, shown(each.steps, millis), "1"]
                )
                if kind in STRATEGIES:
                    goal = GOAL_LONG if context >= 2_048 else GOAL_SHORT
                    claims.append(
                        {
                            "claim": f"drop-in {kind}, {name}: a decode step beside DynamicCache's",
                            "ours": round(statistics.median(each.steps) * 1e3, 3),
                            "peer": round(statistics.median(found[PEER].steps) * 1e3, 3),
                            "unit": "ms",
                            "ratio": round(each.times_as_fast, 4),
                            "goal": goal,
                            "noise": round(noise, 4),
                            "holds": each.times_as_fast >= goal - noise,
                        }
                    )
        for kind, taken in creation(model, 5 if quick else 30).items():
            starts.append([kind, shown(taken, millis)])
            if kind in STRATEGIES:
                middle = statistics.median(taken)
                claims.append(
                    {
                        "claim": f"drop-in {kind}: to make a cache",
                        "ours": round(middle * 1e3, 3),
                        "unit": "ms",
                        "goal": GOAL_CREATION_S * 1e3,
                        "holds": middle <= GOAL_CREATION_S,
                    }
                )
    tables = [
        Table(
            title="Decode steps over each cache",
            columns=("case", "cache", "a step", "speed, dynamic = 1 (quartiles)"),
            rows=steps,
        ),
        Table(title="To make a cache", columns=("cache", "time"), rows=starts),
    ]
    flags = " --quick" * quick + f" --rounds {rounds}" * (rounds != 40)
    notes = [
        f"A Qwen3 of {model.num_parameters() / 1e6:.0f} million parameters in bfloat16, 14 layers, "
        f"5 KV heads of 128, 10 query heads; one thread; medians, least and greatest of a step.",
    ]
    load = f"load average at the end {os.getloadavg()[0]:.1f}"
    run.end(
        tables,
        run.setting(f"{flags} --seed {seed}", packages=["torch", "transformers"], also=[load]),
        notes=notes,
        claims=claims if with_claims else (),
        output=output,
    )


if __name__ == "__main__":
    app()
