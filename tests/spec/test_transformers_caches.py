"""The spec against the truth: tiny models run through Transformers, and what their caches hold.

All kinds of families in ``quire.spec.families``, and plain ones, with random weights in bfloat16.
Layer by layer, the cache's tensors must have the shapes and dtypes that the spec read from the
model's config.json alone, and the bytes of keys and values must add up to ``bytes_for``.
"""

from typing import Any

import pytest

from quire.spec import ModelSpec, RecurrentState

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from zoo.caches import cache_after, expected_of, held_by  # noqa: E402 - it imports torch

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_TOKENS = 24  # 23 in the prompt, then one more: windows of 6 and chunks of 8 have moved on

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}

# model_type → what differs from _SIZES; None takes a field away.
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"num_key_value_heads": None},
    "gpt_bigcode": {"num_key_value_heads": None},
    "falcon": {"num_key_value_heads": None, "multi_query": True},
    "mistral": {"sliding_window": 6, "head_dim": 10},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {"head_dim": 12},
    "phi3": {"sliding_window": 6},
    "gemma2": {"head_dim": 12, "sliding_window": 6},
    "gemma3_text": {"head_dim": 12, "sliding_window": 6, "num_hidden_layers": 7},
    "gemma3n_text": {
        "head_dim": 12,
        "sliding_window": 6,
        "num_hidden_layers": 12,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "head_dim": 12,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 6,
        "num_hidden_layers": 12,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 64,
    },
    "cohere2": {"sliding_window": 6, "num_hidden_layers": 5},
    "gpt_oss": {**_MOE, "head_dim": 12, "sliding_window": 6},
    "llama4_text": {**_MOE, "head_dim": 12, "attention_chunk_size": 8, "intermediate_size_mlp": 48},
    "deepseek_v3": _MLA,
    "minicpm3": {**_MLA, "intermediate_size": 48},
    "qwen3_next": {**_MOE, **_GATED_DELTA},
    "qwen3_5_text": _GATED_DELTA,
    "olmo_hybrid": {},
    "kimi_linear": {
        **_MLA,
        "num_hidden_layers": 5,
        "linear_num_heads": 4,
        "linear_head_dim": 6,
        "num_local_experts": 4,
        "num_experts": 4,
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_MAMBA2,
        **_MOE,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*M",
        "num_hidden_layers": None,
        "head_dim": 12,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 6,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 6,
        "mamba_ngroups": 2,
        "adapter_rank": 4,
        "chunk_size": 8,
    },
    "jamba": {
        **_MOE,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 6,
        "mamba_dt_rank": 4,
    },
    "mamba": {"state_size": 6, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 6, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 8},
    "bailing_hybrid": {**_MLA, "head_dim": 4, "layer_group_size": 2, "num_experts": 4},
    "mimo_v2_flash": {**_MOE, "head_dim": 12, "v_head_dim": 8, "sliding_window": 6},
    "inkling_text": {
        **_MOE,
        "head_dim": 12,
        "swa_head_dim": 10,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "sliding_window_size": 6,
        "rel_extent": 6,
        "n_routed_experts": 4,
        "local_layer_ids": [0, 2, 3],
    },
    "zaya": {**_MOE, "head_dim": 12, "num_experts_per_tok": 1, "router_hidden_size": 8},
    "bert": {"is_decoder": True, "num_key_value_heads": None},
    "bart": {
        "num_key_value_heads": None,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "d_model": 32,
        "encoder_layers": 4,  # of which Transformers makes its cache
        "decoder_layers": 4,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "encoder_ffn_dim": 48,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
}


def tiny_config(model_type: str) -> Any:
    fields = {**_SIZES, **TINY[model_type]}
    stated = {name: value for name, value in fields.items() if value is not None}
    return transformers.AutoConfig.for_model(model_type, **stated)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("model_type", TINY)
def test_the_cache_holds_what_the_spec_says(model_type: str) -> None:
    config = tiny_config(model_type)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    spec = ModelSpec.from_config({**model.config.to_dict(), "dtype": "bfloat16"})
    cache = cache_after(model, torch.randint(3, config.vocab_size, (1, NUM_TOKENS)))

    assert [held_by(layer) for layer in cache.layers] == [
        expected_of(layer, NUM_TOKENS) for layer in spec.layers
    ]
    num_bytes = sum(
        tensor.nbytes
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    )
    if model_type != "llama4_text":
        of_attention = [g for g in spec.groups if not isinstance(g.spec, RecurrentState)]
        assert num_bytes == sum(group.bytes_for(NUM_TOKENS) for group in of_attention)
