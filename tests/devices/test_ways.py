"""Models that are no plain decoders, and what else an engine does, on the pretended device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    DiffLlamaConfig,
    MambaConfig,
    PreTrainedConfig,
)

import pretend
from conformance.covering import in_turn, only
from models.test_recurrent import HYBRIDS
from pretend import PretendMemory
from quire import LLM, SamplingParams
from quire.config import SpeculativeConfig
from quire.engine.scheduling.step_costs import Prices
from readers import source_ids, tiny_reader
from tiny import random_model, tiny_model, tokens

NEW = 8
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (4, 23, 11)]
SIZES: dict[str, Any] = dict(
    attention_backend="sdpa",  # kernels in an interpreter know no pretended device
    kv_cache_memory_bytes="32MB",
    max_num_seqs=4,
    max_num_batched_tokens=16,
)
_IDS: dict[str, Any] = dict(vocab_size=199, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_COMMON: dict[str, Any] = dict(
    **_IDS,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gathered": lambda: DiffLlamaConfig(**_COMMON),
    "alone": lambda: BloomConfig(**_IDS, hidden_size=64, n_layer=3, n_head=4),
    "mamba2": HYBRIDS["granitemoehybrid"],
    "no attention": lambda: MambaConfig(**_IDS, hidden_size=16, num_hidden_layers=2, state_size=4),
}


def own(model: Any, prompt: list[int]) -> tuple[int, ...]:
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tuple(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())


@pytest.mark.parametrize("name", only(MODELS, "gathered", "alone", "no attention"))
def test_tokens_are_those_of_generate(name: str) -> None:
    model = random_model(MODELS[name]())
    want = [own(model, prompt) for prompt in PROMPTS]
    with pretend.cuda() as gpu:
        llm = LLM(model.to("cuda"), provider=PretendMemory(gpu), max_model_len=64, **SIZES)
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == want


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoders_read_their_sources_there(name: str) -> None:
    model = tiny_reader(name)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    if name == "whisper":
        prompts: list[Any] = [{"source": torch.randn(8, 40)} for _ in range(2)]
    else:
        prompts = [source_ids(1, length, seed=length)[0].tolist() for length in (5, 12)]
    want = [c.token_ids for c in LLM(model, **SIZES).generate(prompts, GREEDY)]
    with pretend.cuda() as gpu:
        llm = LLM(model.to("cuda"), provider=PretendMemory(gpu), **SIZES)
        assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == want


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kept_as", "strategy"), in_turn(["fp8", "int8_per_token_head"], ["virtual", "paged"])
)
def test_eight_bits_are_the_same_there(kept_as: str, strategy: str) -> None:
    options = dict(**SIZES, max_model_len=64, kv_cache_dtype=kept_as, cache=strategy)
    model = tiny_model("llama")
    here = LLM(model, **options)
    want = [c.token_ids for c in here.generate(PROMPTS, GREEDY)]
    with pretend.cuda() as gpu:
        llm = LLM(model.to("cuda"), provider=PretendMemory(gpu), **options)
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == want


@pytest.mark.full
def test_a_draft_model_guesses_there() -> None:
    model, draft = tiny_model("llama"), tiny_model("llama", seed=3)
    want = [own(model, prompt) for prompt in PROMPTS]
    with pretend.cuda() as gpu:
        speculative = SpeculativeConfig(model=draft.to("cuda"), num_speculative_tokens=3)
        llm = LLM(
            model.to("cuda"),
            provider=PretendMemory(gpu),
            max_model_len=64,
            speculative_config=speculative,
            **SIZES,
        )
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == want


@pytest.mark.full
def test_who_makes_room_is_swapped_and_comes_back() -> None:
    model = tiny_model("llama")
    want = [own(model, prompt) for prompt in PROMPTS]
    with pretend.cuda() as gpu:
        llm = LLM(
            model.to("cuda"),
            provider=PretendMemory(gpu),
            **{**SIZES, "kv_cache_memory_bytes": 96 * 1024},
            max_model_len=40,
            swap_space="8MB",
        )
        costs = llm.engine.scheduler.costs
        costs.give(Prices(step_s=0.0, token_s=10.0))  # so that to compute again is dear
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == want
