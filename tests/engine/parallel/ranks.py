"""Tiny models in a folder each, a crew that has parts of them, and what is looked at."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, PreTrainedModel

from quire.engine.llm import LLM
from quire.engine.parallel.model_part import load_parts
from quire.engine.parallel.worker_group import WorkerGroup
from quire.kv import STRATEGIES, Usage
from quire.models.loader import LoadedModel
from quire.sampling_params import SamplingParams
from tiny import CONFIGS, VOCAB, random_model, tokens

_VOCAB = VOCAB + 1
GREEDY = SamplingParams(temperature=0, max_tokens=16)
OPTIONS: dict[str, Any] = dict(
    max_model_len=128, max_num_seqs=6, max_num_batched_tokens=24, kv_cache_memory_bytes="1MiB"
)
CACHES: dict[str, dict[str, Any]] = {
    **{name: dict(cache=name) for name in STRATEGIES},
    "virtual, shared": dict(cache="virtual", enable_prefix_caching=True),
    "virtual": dict(cache="virtual", enable_prefix_caching=False),
}
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (40, 3, 27, 12)]


def make(name: str) -> PreTrainedModel:
    """With a vocabulary that two ranks divide: an odd one is for newer Transformers alone."""
    if name == "mixtral":
        common = CONFIGS["llama"]().to_dict()
        kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        heads = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
        sizes = {field: common[field] for field in (*kept, *heads)}
        sizes["vocab_size"] = _VOCAB
        return random_model(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    config = CONFIGS[name]()
    config.vocab_size = _VOCAB
    return random_model(config)


class Folder:
    """Saved models, and their parts in the ranks of one crew; each is made once."""

    def __init__(self, path: Path, crew: WorkerGroup | None) -> None:
        self.path, self.crew = path, crew
        self._parts: dict[str, LoadedModel] = {}

    def of(self, name: str) -> Path:
        folder = self.path / name
        if not folder.exists():
            make(name).save_pretrained(folder)
        return folder

    def parts(self, name: str) -> LoadedModel:
        if name not in self._parts:
            self._parts[name] = load_parts(self.of(name), 2, workers=self.crew)
        return self._parts[name]

    def alone(self, name: str, **options: Any) -> LLM:
        return LLM(self.of(name), **{**OPTIONS, **options})

    def ranked(self, name: str, **options: Any) -> LLM:
        return LLM(self.parts(name), tensor_parallel_size=2, **{**OPTIONS, **options})


def texts(completions: list[Any]) -> list[list[tuple[int, ...]]]:
    return [[tuple(choice.token_ids) for choice in each.choices] for each in completions]


class Watch:
    """After each step every rank has committed what accounting says."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.committed = llm, []

    def __call__(self, usage: Usage) -> None:
        assert self.llm._team is not None
        ours = self.llm.memory.committed_bytes
        assert usage.committed_bytes == ours == self.llm._team.least_committed_bytes
        self.committed.append(ours)


def generated(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY) -> Any:
    with llm:
        return texts(llm.generate(prompts, params, observe=Watch(llm)))


def of_generate(model: Any, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def gone(pids: list[int], within_s: float = 60.0) -> bool:
    """Whether none of these processes is there any more, or will be in a moment."""
    end_s = time.monotonic() + within_s
    while any(os.path.exists(f"/proc/{pid}") and not _is_zombie(pid) for pid in pids):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
