"""Tiny models with random weights, of published architectures: what every model test runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCAB = 199
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
WINDOW = 9

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_COMMON,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_implementation="eager",  # torch's knows no softcap, and is taken before 5.18
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{k: v for k, v in _COMMON.items() if k not in ("num_key_value_heads", "head_dim")},
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
    ),
}


def tiny_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """A model of ``CONFIGS``, as ``random_model`` makes it."""
    return random_model(CONFIGS[name](), seed=seed)


def random_model(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """A model in fp32. Its random weights are large enough to make tokens differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def heavy_model() -> PreTrainedModel:
    """63 MiB of weights that the system's figures show, most of them embeddings, and few layers."""
    return random_model(
        LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, head_dim=64, vocab_size=30_000, tie_word_embeddings=False,
            max_position_embeddings=2048,
        )
    )  # fmt: skip


def tokens(num_rows: int, num_tokens: int, *, seed: int = 0) -> torch.Tensor:
    """Random token ids, i64[rows, tokens], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (num_rows, num_tokens), generator=generator)
