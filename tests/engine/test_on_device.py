"""The engine where ``--device`` says: each strategy and kind of layer gives generate()'s tokens.

In float32, greedily, and a token may differ only where the model all but tossed a coin. A GPU's
memory goes back to its driver.
"""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import target
import tiny
from conformance.covering import in_turn
from quire import LLM, SamplingParams
from quire.kv import STRATEGIES
from quire.memory.cuda import CudaMemory

pytestmark = pytest.mark.device

NUM_TOKENS = 24
GAP = 1e-3  # between the two likeliest tokens; logits of these models reach 10 and more
MODELS = ("qwen3", "gemma2", "gpt_oss", "deepseek_v3")
CACHES: dict[str, dict[str, Any]] = {
    **{name: {"cache": name, "growth_tokens": 16} for name in STRATEGIES},
    "virtual-shared": {"cache": "virtual", "enable_prefix_caching": True},
}
LENGTHS = (3, 17, 40, 1, 29)


@cache
def model(name: str) -> PreTrainedModel:
    return tiny.tiny_model(name).to(target.device())


@cache
def prompts() -> list[list[int]]:
    return [tiny.tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]


@cache
def alone(name: str, which: int) -> tuple[list[int], list[float]]:
    """What generate() continues a prompt with, and how far ahead each of these tokens was."""
    prompt = torch.tensor([prompts()[which]], device=target.device())
    out = model(name).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_id=-1,
        output_scores=True,
        return_dict_in_generate=True,
    )
    gaps = [(top[0] - top[1]).item() for top in (s[0].topk(2).values for s in out.scores)]
    return out.sequences[0, prompt.shape[1] :].tolist(), gaps


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "cache"), in_turn(MODELS, [*CACHES]))
def test_every_strategy_gives_the_tokens_of_generate(name: str, cache: str) -> None:
    provider = target.memory()
    with LLM(model(name), provider=provider, **_options(cache)) as llm:
        assert tokens_of(llm) == wanted(name, tokens_of(llm))
    if isinstance(provider, CudaMemory):
        provider.trim()
        assert provider.physical_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flashinfer", "triton", "sdpa"])
def test_every_backend_of_a_gpu_gives_them_in_16_bits(backend: str) -> None:
    """Of a model as wide as those that are in use: tokens that are far ahead are the same."""
    from quire.attention import choose_backend
    from quire.errors import ConfigError
    from quire.spec import FullAttention

    spec = FullAttention(num_kv_heads=2, head_dim=64, dtype="bfloat16")
    try:
        choose_backend(backend, [spec], target.device())
    except ConfigError as error:
        pytest.skip(str(error))
    config = tiny.CONFIGS["qwen3"]()
    config.head_dim, config.hidden_size = 64, 256
    wide = tiny.random_model(config).bfloat16().to(target.device())
    with torch.inference_mode(), LLM(wide, attention_backend=backend, **_options("paged")) as llm:
        assert llm.attention_backend == backend
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        outputs = llm.generate(prompts(), params)
        for prompt, output in zip(prompts(), outputs, strict=True):
            logits = wide(torch.tensor([prompt], device=target.device())).logits[0, -1].float()
            best = logits.max()
            assert best - logits[output.token_ids[0]] <= 0.05 * best.abs()


def tokens_of(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(prompts(), params)]


def wanted(name: str, told: list[list[int]]) -> list[list[int]]:
    """What generate() gives; from a toss of a coin on, what was told."""
    result = []
    for which, got in enumerate(told):
        want, gaps = alone(name, which)
        at = next((i for i, pair in enumerate(zip(got, want, strict=True)) if len({*pair}) > 1), -1)
        result.append(want if at < 0 or gaps[at] >= GAP else got)
    return result


def _options(cache: str) -> dict[str, Any]:
    """Room for all prompts at once, in pages of a GPU too."""
    return {
        "enable_prefix_caching": False,
        **CACHES[cache],
        "max_model_len": 96,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": "768MiB" if target.has_cuda_memory() else "64MiB",
    }
