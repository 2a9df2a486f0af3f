"""Steps over three sequences, chunks and decodes: what a runner says, against the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.attention import choose_backend
from quire.config import kernel_dir
from quire.engine.kv_cache import KVCache
from quire.engine.runner import ModelRunner
from quire.kv import Accounting, CacheConfig, Fits, Storage, build_accounting, build_storage
from quire.kv.layout import attention_spec
from quire.memory import HostMemory
from quire.models.executors.choice import RoundedCache
from quire.models.loader import LoadedModel, adopt
from tiny import tokens

# (sequence, tokens) of each step: prompts from nothing, chunks of them beside decodes, decodes.
STEPS = (
    ((0, 7), (1, 10)),
    ((0, 1), (1, 8), (2, 9)),
    ((1, 5),),
    ((0, 1), (1, 1), (2, 1)),
    ((0, 1), (2, 21)),
    ((0, 1), (1, 1), (2, 1)),
)
LENGTH = 40
MAX_TOKENS = 64


@dataclass(frozen=True)
class World:
    """A runner over a cache of its own."""

    loaded: LoadedModel
    kv: KVCache
    runner: ModelRunner

    def extend(self, chunks: list[tuple[int, int, int]]) -> None:
        for sequence, _, stop in chunks:
            assert isinstance(self.kv.accounting.try_extend(sequence, stop), Fits)
        self.kv.carry_out()
        self.kv.require()

    def logits(self, chunks: list[tuple[int, int, int]], texts: Tensor) -> Tensor:
        """At every token of the step's chunks (sequence, start, stop)."""
        self.extend(chunks)
        ids = [token for n, start, stop in chunks for token in texts[n, start:stop].tolist()]
        logits, silent = self.runner._forward(chunks, ids, [*range(len(ids))])
        assert not silent
        return logits


@contextmanager
def world_of(
    model: PreTrainedModel,
    *,
    kept_as: str = "float32",
    strategy: str = "paged",
    backend: str = "sdpa",  # which has nothing to compile
    max_num_seqs: int = 4,
) -> Iterator[World]:
    loaded, memory = adopt(model), HostMemory()
    config = CacheConfig(
        max_model_len=MAX_TOKENS,
        max_num_seqs=max_num_seqs,
        capacity_bytes=2**26,
        block_size=4,
        growth_tokens=8,
        page_bytes=memory.page_bytes,
    )

    def make_pair() -> tuple[Accounting, Storage]:
        accounting = build_accounting(strategy, loaded.spec.with_kv_dtype(kept_as), config)
        return accounting, build_storage(strategy, accounting, memory)

    kv = KVCache(make_pair)
    specs = [attention_spec(group) for group in kv.accounting.groups]
    chosen = choose_backend(backend, specs, torch.device("cpu"), kernel_dir=kernel_dir())
    yield World(loaded, kv, ModelRunner(loaded, kv, chosen))
    kv.close()


def alone(model: PreTrainedModel, texts: Tensor, kept_as: str = "float32") -> Tensor:
    """The model's own: [sequences, tokens, vocabulary], entries rounded as they are kept."""
    with torch.inference_mode():
        dtype = getattr(torch, kept_as)
        rounded = dtype != model.dtype
        rows = [
            model(
                text[None],
                past_key_values=RoundedCache(model.config, dtype) if rounded else None,
                use_cache=rounded,
            ).logits[0]
            for text in texts
        ]
    return torch.stack(rows)


def deviation(world: World, *, kept_as: str = "float32") -> float:
    """The largest over all tokens of ``STEPS``, of the largest logit."""
    model = world.loaded.model
    texts = tokens(3, LENGTH)
    want = alone(model, texts, kept_as)
    done, worst = [0, 0, 0], 0.0
    for sequence in range(3):
        world.kv.accounting.add(sequence, max_tokens=LENGTH)
    for step in STEPS:
        chunks = [(n, done[n], done[n] + count) for n, count in step]
        wanted = torch.cat([want[n, start:stop] for n, start, stop in chunks])
        error = (world.logits(chunks, texts) - wanted).abs().max() / want.abs().max()
        worst = max(worst, float(error))
        for n, count in step:
            done[n] += count
    for sequence in range(3):
        world.kv.accounting.free(sequence)
    world.kv.carry_out()
    return worst
