"""What keeping keys and values in fewer bits costs the demo model, in nats a token of unseen text.

    python -m benchmarks.attention.bench_kv_dtype [--windows N] [--output FILE]

The text is that of the model's card: fourteen modules of this Python's own library that it was not
trained on, each token scored once, with 1,024 to 2,047 tokens before it. Every one of those is read
back out of a paged cache, through the engine's own two seams. The dtypes take turns, window by
window, over the same tokens; a difference is of pairs, and its error the standard error over the
windows. float32 holds the same entries as auto and shows what the order of arithmetic alone does:
what is kept in another dtype than the queries' is attended to in float32.
"""

import math
import statistics
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from torch import Tensor

from benchmarks.harness.report import Output, Run, Table
from quire.attention import SdpaAttention, make_batch
from quire.config import KV_CACHE_DTYPES
from quire.kv import CacheConfig, Fits, build_accounting, build_storage
from quire.memory import HostMemory
from quire.models.executors.hooks import make_step
from quire.models.executors.packed import PackedModel
from quire.models.fused_modules import FusedModules
from quire.models.loader import LoadedModel, load

# As in tools/demo_model_data.py: what the model has not seen, and how it is scored.
HELD_OUT = (
    *("calendar", "configparser", "csv", "difflib", "fileinput", "graphlib", "heapq", "netrc"),
    *("sched", "shlex", "statistics", "tempfile", "textwrap", "timeit"),
)
CONTEXT = 2048
DTYPES = ("auto", "float32", "fp8", "int8_per_token_head")


@dataclass(frozen=True, slots=True)
class Scored:
    """One way to keep keys and values."""

    bytes_per_token: int
    losses: list[Tensor] = field(default_factory=list)  # nats, a window: [tokens]
    best: list[Tensor] = field(default_factory=list)  # the likeliest token at each


class Kept:
    """The model over a paged cache in one dtype."""

    def __init__(
        self, loaded: LoadedModel, kv_cache_dtype: str, stand_ins: FusedModules | None = None
    ) -> None:
        name = KV_CACHE_DTYPES[kv_cache_dtype]
        spec = loaded.spec if name is None else loaded.spec.with_kv_dtype(name)
        memory = HostMemory()
        capacity_bytes = 2 * CONTEXT * spec.bytes_per_token
        config = CacheConfig(
            max_model_len=CONTEXT,
            max_num_seqs=1,
            capacity_bytes=capacity_bytes,
            page_bytes=memory.page_bytes,
        )
        self._model = PackedModel(loaded.model, stand_ins)
        self._accounting = build_accounting("paged", spec, config)
        self._storage = build_storage("paged", self._accounting, memory)
        self.scored = Scored(spec.bytes_per_token)

    def score(self, ids: Tensor, first: int) -> None:
        """A window (i64[n]): what each token from the ``first`` on costs after those before it."""
        num_tokens = len(ids) - 1
        self._accounting.add(0)
        assert isinstance(self._accounting.try_extend(0, num_tokens), Fits)
        self._storage.apply(self._accounting.drain())
        groups = range(len(self._accounting.groups))
        batches = [make_batch(self._accounting, group, [(0, 0, num_tokens)]) for group in groups]
        step = make_step(self._accounting, self._storage, SdpaAttention(), batches, {})
        wanted = torch.arange(first - 1, num_tokens)
        logits = self._model.forward(step, ids[:-1], torch.arange(num_tokens), wanted).float()
        assert not step.silent
        losses = torch.nn.functional.cross_entropy(logits, ids[first:], reduction="none")
        self.scored.losses.append(losses)
        self.scored.best.append(logits.argmax(-1))
        self._accounting.free(0)
        self._storage.apply(self._accounting.drain())


def held_out_ids(tokenizer: object) -> Tensor:
    """The held-out modules as one stream; token 0 stands before, between and after them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    ids = [0]
    for name in HELD_OUT:
        text = (library / f"{name}.py").read_text(encoding="utf-8").replace("\r\n", "\n")
        ids += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], 0]  # type: ignore[operator]
    return torch.tensor(ids)


def windows(num_tokens: int, limit: int) -> list[tuple[int, int, int]]:
    """(begin, first scored, stop) of windows that score each token once, or of some of them."""
    half = CONTEXT // 2
    starts = range(0, num_tokens - 1, half)
    every = [(max(0, at - half), at + 1, min(at + half + 1, num_tokens)) for at in starts]
    if limit >= len(every):
        return every
    return [every[round(i * (len(every) - 1) / max(1, limit - 1))] for i in range(limit)]


def table(scored: dict[str, Scored], usual_name: str = "auto") -> Table:
    usual = scored[usual_name]
    rows = []
    for name, own in scored.items():
        per_window = [
            (float((a - b).sum()), len(a)) for a, b in zip(own.losses, usual.losses, strict=True)
        ]
        num_tokens = sum(count for _, count in per_window)
        mean = sum(total for total, _ in per_window) / num_tokens
        error = _standard_error(per_window, mean, num_tokens)
        same = torch.cat(own.best) == torch.cat(usual.best)
        rows.append(
            [
                name,
                f"{own.bytes_per_token:,}",
                f"{own.bytes_per_token / usual.bytes_per_token:.3f}",
                f"{float(torch.cat(own.losses).double().mean()):.4f}",
                "–" if own is usual else f"{mean:+.5f} ± {error:.5f}",
                "–" if own is usual else f"{100 * float(same.double().mean()):.2f} %",
            ]
        )
    columns = (
        *("--kv-cache-dtype", "bytes a token", "of auto", "nats a token", "more than auto"),
        "same likeliest token",
    )
    return Table(title="Held-out text", columns=columns, rows=rows)


def _standard_error(per_window: Iterable[tuple[float, int]], mean: float, num_tokens: int) -> float:
    """Of a mean over tokens, where windows are independent and tokens are not."""
    apart = [total - mean * count for total, count in per_window]
    return statistics.stdev(apart) * math.sqrt(len(apart)) / num_tokens if len(apart) > 1 else 0.0


app = typer.Typer(add_completion=False)


@app.command()
def main(
    limit: Annotated[
        int,
        typer.Option("--windows", min=1, help="Of all 111, evenly; each is about three seconds."),
    ] = 40,
    output: Output = None,
) -> None:
    """The loss of the demo model on unseen text, with keys and values in each dtype."""
    run = Run("attention.bench_kv_dtype", width=140)
    loaded = load(None)
    ids = held_out_ids(loaded.tokenizer)
    every = windows(len(ids), limit)
    kept = {name: Kept(loaded, name) for name in DTYPES}
    for begin, first, stop in track(every, "windows", console=run.aside):
        for own in kept.values():
            own.score(ids[begin:stop], first - begin)
    scored = {name: own.scored for name, own in kept.items()}
    num_scored = sum(map(len, scored["auto"].losses))
    what = f"the demo model in {loaded.dtype}, paged, {num_scored:,} tokens in {len(every)} windows"
    packages = ("torch", "transformers")
    also = ("no seed: nothing is drawn", what)
    setting = run.setting(f" --windows {limit}", packages=packages, also=also)
    run.end([table(scored)], setting, output=output)


if __name__ == "__main__":
    app()
