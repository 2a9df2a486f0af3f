"""How one layer reads latents: absorbed, with its own long chunk expanded, all expanded each step.

    python -m benchmarks.attention.bench_latents [--dtype float32] [--heads N] [--claims]

The head sizes are those of DeepSeek-V3 (latent 512, rotary key 64, key 128, value 128). The three
take turns over the same paged cache; "gathered" is what a model gets whose projection cannot be
absorbed, and what all got before: latents of the whole context are copied out, expanded, attended
to by torch. The first products with the hidden states are the same in all, and are left out.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness.report import Table, show
from quire.attention import (
    AttentionBackend,
    AttentionBatch,
    SdpaAttention,
    choose_backend,
    make_batch,
)
from quire.config import kernel_dir
from quire.kv import STRATEGIES, CacheConfig, Fits, Storage, build_storage
from quire.memory import HostMemory
from quire.models.executors.hooks import attend_gathered, gather
from quire.models.executors.latent import WORTH_EXPANDING, LatentLayers, attend_latents
from quire.spec import AttentionSpec, Group, LatentAttention

RANK, ROPE, KEY, VALUE = 512, 64, 128, 128
# (tokens before the chunk, tokens of the chunk)
CHUNKS = (
    *((4096, 1), (4096, 8), (2048, 128), (2048, 512), (2048, 2048)),
    *((0, 128), (0, 256), (0, 512), (0, 1024), (0, 2048)),
)
LONGEST = 4608
# Against gathering and expanding everything: (before, chunk) → how many times as fast, at least.
GOALS = {(4096, 1): 5.0, (0, 2048): 2.0}


class Layer(nn.Module):
    """What expands latents in Transformers' modules."""

    def __init__(self, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx = 0
        self.heads = heads
        self.kv_b_proj = nn.Linear(RANK, heads * (KEY + VALUE), bias=False, dtype=dtype)

    def expand_kv(self, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        both = self.kv_b_proj(latents).view(1, latents.shape[2], self.heads, -1).transpose(1, 2)
        k, v = both.split([KEY, VALUE], -1)
        return torch.cat([k, rotary.expand(-1, self.heads, -1, -1)], -1), v


class Cache:
    """One sequence's latents, ``start`` tokens and a chunk of them."""

    def __init__(self, spec: LatentAttention, dtype: torch.dtype, start: int, count: int) -> None:
        memory = HostMemory()
        config = CacheConfig(
            max_model_len=LONGEST,
            max_num_seqs=1,
            capacity_bytes=2 * LONGEST * spec.bytes_per_token,
            page_bytes=memory.page_bytes,
        )
        accounting = STRATEGIES["paged"].make_accounting((Group(spec=spec, layers=(0,)),), config)
        self.storage: Storage = build_storage("paged", accounting, memory)
        accounting.add(0)
        assert isinstance(accounting.try_extend(0, start + count), Fits)
        self.storage.apply(accounting.drain())
        self.latents, self.rotary = (torch.randn(start + count, n).to(dtype) for n in (RANK, ROPE))
        slots = torch.from_numpy(accounting.slots(0, 0, 0, start + count))
        self.storage.write(0, slots, self.latents[:, None], self.rotary[:, None])
        self._accounting, self._chunk = accounting, (0, start, start + count)

    def batch(self) -> AttentionBatch:
        """As a step finds it."""
        return make_batch(self._accounting, 0, [self._chunk])


def ways(heads: int, dtype: torch.dtype, start: int, count: int) -> dict[str, Callable[[], Tensor]]:
    spec = LatentAttention(latent_dim=RANK, rope_dim=ROPE, dtype=str(dtype).removeprefix("torch."))
    backend = choose_backend("cpu", [spec], torch.device("cpu"), kernel_dir=kernel_dir())
    layer, cache = Layer(heads, dtype), Cache(spec, dtype, start, count)
    with LatentLayers(layer, {0: spec}).in_place() as found:
        absorbed = found[0]
    q = torch.randn(count, heads, KEY + ROPE).to(dtype)
    own = (cache.latents[start:][None, None], cache.rotary[start:][None, None])
    view, scale = cache.storage.view(0), (KEY + ROPE) ** -0.5

    def attend(*given: Any, **options: Any) -> Tensor:
        return backend.attend(*given, scale=scale, **options)

    def attend_expanded(*given: Any, spec: AttentionSpec) -> Tensor:
        """As an engine: by torch where the backend has no kernel for what is expanded."""
        serves = backend.unsupported(spec, q.device) is None
        own: AttentionBackend = backend if serves else SdpaAttention()
        return own.attend(*given, spec=spec, scale=scale)

    def by_latents() -> Tensor:
        return absorbed.results(attend(absorbed.queries(q), view, cache.batch(), spec=spec))

    def as_engine() -> Tensor:
        batch = cache.batch()
        return attend_latents(q, *own, absorbed, view, batch, attend, attend_expanded, spec=spec)

    def gathered() -> Tensor:
        batch = cache.batch()
        k, v = layer.expand_kv(*gather(view, batch, spec, dtype))
        return attend_gathered(q, k[0], v[0], batch, spec, scale=scale, softcap=None, sinks=None)

    return {"absorbed": by_latents, "engine": as_engine, "gathered": gathered}


def main(
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    heads: Annotated[int, typer.Option(help="of 128 that the model has")] = 8,
    rounds: Annotated[int, typer.Option(help="of all three in turn")] = 7,
    claims: Annotated[bool, typer.Option(help="end with a JSON object for each claim")] = False,
) -> None:
    torch.manual_seed(0)
    rows, ratios = [], {}
    for start, count in CHUNKS:
        runs = ways(heads, getattr(torch, dtype), start, count)
        spent: dict[str, list[float]] = {name: [] for name in runs}
        with torch.inference_mode():
            for run in runs.values():
                run()
            for _ in range(rounds):
                for name, run in runs.items():
                    began = time.perf_counter()
                    run()
                    spent[name].append(1e3 * (time.perf_counter() - began))
        pairs = zip(spent["gathered"], spent["engine"], strict=True)
        ratio = statistics.median(before / now for before, now in pairs)
        ratios[start, count] = ratio
        told = [f"{min(ms):.1f} ({statistics.median(ms):.1f})" for ms in spent.values()]
        rows.append([f"{start:,}", f"{count:,}", *told, f"{ratio:.1f} x"])
    columns = ("before", "chunk", "absorbed", "engine", "gathered", "gathered / engine")
    notes = [
        f"{heads} heads, {dtype}, {torch.get_num_threads()} threads; ms, best (median) of {rounds}",
        f"engine: absorbed, but for chunks of {WORTH_EXPANDING} tokens or more with none before",
    ]
    show([Table(title="One layer", columns=columns, rows=rows)], notes, Console(width=110))
    for (start, count), goal in GOALS.items() if claims else ():
        ratio = ratios[start, count]
        claim = f"latents: {count} tokens after {start}, against expanding all"
        print(
            json.dumps(
                {
                    "claim": claim,
                    "unit": "x",
                    "ratio": round(ratio, 2),
                    "goal": goal,
                    "holds": ratio >= goal,
                }
            )
        )


if __name__ == "__main__":
    typer.run(main)
