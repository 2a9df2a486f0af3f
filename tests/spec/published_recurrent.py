"""Published models with recurrent layers, worked out by hand as in ``published``.

The states' shapes are those of Transformers' caches: the convolution keeps its whole width, and the
scan is float32. (vLLM keeps one column less of the convolution, and the scan in the model's dtype.)
"""

from typing import Any

from spec.published import Published

MIB = 2**20


def _hybrid(
    name: str, source: str, config: dict[str, Any], *, per_token: int, states: int
) -> Published:
    """A model of full attention and recurrent layers: a slope, and a constant."""
    return Published(
        name=name,
        source=source,
        config=config,
        bytes_per_token=per_token,
        at_4096=4096 * per_token + states,
        at_40960=40960 * per_token + states,
    )


RECURRENT = [
    _hybrid(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "config.json copy; class default of qwen3_next",
        {
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "torch_dtype": "bfloat16",
        },
        per_token=12 * (512 + 512) * 2,  # 24 KiB
        # convolution over 2 x 2048 channels of queries and keys and 4096 of values
        states=36 * ((2 * 2048 + 4096) * 4 * 2 + 32 * 128 * 128 * 4),
    ),
    _hybrid(
        "Qwen/Qwen3.5-9B",
        "config.json copy; 32 KiB a token is also what llama.cpp allocated for these sizes",
        {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5_text",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
                "linear_conv_kernel_dim": 4,
                "linear_num_key_heads": 16,
                "linear_key_head_dim": 128,
                "linear_num_value_heads": 32,
                "linear_value_head_dim": 128,
                "max_position_embeddings": 262144,
                "dtype": "bfloat16",
            },
        },
        per_token=8 * (1024 + 1024) * 2,  # 32 KiB
        states=24 * ((2 * 2048 + 4096) * 4 * 2 + 32 * 128 * 128 * 4),
    ),
    _hybrid(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "config.json copy; full attention in 7 layers, counted from 1",
        {
            "model_type": "kimi_linear",
            "hidden_size": 2304,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "model_max_length": 1048576,
            "dtype": "bfloat16",
        },
        per_token=7 * (512 + 64) * 2,
        states=20 * (3 * 4096 * 4 * 2 + 32 * 128 * 128 * 4),
    ),
    _hybrid(
        "tiiuae/Falcon-H1-7B-Instruct",
        "config.json copy; attention and Mamba-2 side by side in every layer",
        {
            "model_type": "falcon_h1",
            "hidden_size": 3072,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_conv": 4,
            "mamba_d_head": 128,
            "mamba_d_ssm": 3072,
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 24,
            "attn_layer_indices": None,
            "max_position_embeddings": 262144,
            "torch_dtype": "bfloat16",
        },
        per_token=44 * (256 + 256) * 2,  # 44 KiB
        states=44 * ((3072 + 2 * 256) * 4 * 2 + 24 * 128 * 256 * 4),
    ),
    _hybrid(
        "ai21labs/Jamba-v0.1",
        "config.json copy; full attention in layers 4, 12, 20 and 28",
        {
            "model_type": "jamba",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_offset": 4,
            "attn_layer_period": 8,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "max_position_embeddings": 262144,
            "torch_dtype": "bfloat16",
        },
        per_token=4 * (1024 + 1024) * 2,  # 16 KiB
        states=28 * (8192 * 4 * 2 + 8192 * 16 * 4),
    ),
    _hybrid(
        "ibm-ai-platform/Bamba-9B",
        "config.json copy, trimmed; the rest is the class default of bamba",
        {
            "model_type": "bamba",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_indices": [9, 18, 27],
            "mamba_d_conv": 4,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 128,
            "max_position_embeddings": 4096,
            "torch_dtype": "bfloat16",
        },
        per_token=3 * (1024 + 1024) * 2,
        states=29 * ((8192 + 2 * 128) * 4 * 2 + 128 * 64 * 128 * 4),
    ),
    _hybrid(
        "ibm-granite/granite-4.0-h-small",
        "config.json copy: 4 attention and 36 Mamba-2 layers; their places as in the copy of "
        "granite-4.0-h-1b; mamba_n_heads = 2 x 4096 / 64 and mamba_n_groups from memory",
        {
            "model_type": "granitemoehybrid",
            "hidden_size": 4096,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
        },
        per_token=4 * (1024 + 1024) * 2,  # 16 KiB
        states=36 * ((8192 + 2 * 128) * 4 * 2 + 128 * 64 * 128 * 4),
    ),
    _hybrid(
        "nvidia/Nemotron-H-8B-Base-8K",
        "config.json copy: 24 Mamba-2, 4 attention and 24 feed-forward layers",
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "hidden_size": 4096,
            "num_hidden_layers": 52,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attention_head_dim": 128,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "expand": 2,
            "max_position_embeddings": 8192,
            "torch_dtype": "bfloat16",
        },
        per_token=4 * (1024 + 1024) * 2,  # 16 KiB
        states=24 * ((8192 + 2 * 8 * 128) * 4 * 2 + 128 * 64 * 128 * 4),
    ),
    _hybrid(
        "LiquidAI/LFM2-1.2B",
        "config.json copy; short convolutions keep three columns of the hidden state",
        {
            "model_type": "lfm2",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "max_position_embeddings": 128000,
            "torch_dtype": "bfloat16",
        },
        per_token=6 * (512 + 512) * 2,  # 12 KiB
        states=10 * 2048 * 3 * 2,
    ),
    _hybrid(
        "Zyphra/Zamba2-2.7B",
        "config.json, sizes copied in a public repository; n_mamba_heads from memory",
        {
            "model_type": "zamba2",
            "hidden_size": 2560,
            "num_hidden_layers": 54,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "attention_head_dim": 160,
            "kv_channels": 80,
            "mamba_d_conv": 4,
            "mamba_d_state": 64,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 80,
            "max_position_embeddings": 4096,
            "layers_block_type": [
                "hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for i in range(54)
            ],
            "torch_dtype": "bfloat16",
        },
        per_token=9 * (5120 + 5120) * 2,  # 180 KiB
        states=54 * ((5120 + 2 * 64) * 4 * 2 + 80 * 64 * 64 * 4),
    ),
    _hybrid(
        "state-spaces/mamba-2.8b-hf",
        "config.json copy; float32 throughout",
        {
            "model_type": "mamba",
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "n_layer": 64,
            "d_model": 2560,
            "intermediate_size": 5120,
            "expand": 2,
            "state_size": 16,
            "conv_kernel": 4,
            "torch_dtype": "float32",
        },
        per_token=0,
        states=25 * MIB,  # 64 x (5120 x 4 x 4 + 5120 x 16 x 4) bytes
    ),
    _hybrid(
        "mistralai/Mamba-Codestral-7B-v0.1",
        "config.json: class default of mamba2, which has this model's sizes",
        {
            "model_type": "mamba2",
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "expand": 2,
            "conv_kernel": 4,
            "torch_dtype": "bfloat16",
        },
        per_token=0,
        states=261 * MIB,  # 64 x (10240 x 4 x 2 + 128 x 64 x 128 x 4) bytes
    ),
    Published(
        name="google/recurrentgemma-2b",
        source="config.json copy",
        config={
            "model_type": "recurrent_gemma",
            "hidden_size": 2560,
            "num_hidden_layers": 26,
            "num_attention_heads": 10,
            "num_key_value_heads": 1,
            "attention_window_size": 2048,
            "_block_types": ["recurrent", "recurrent", "attention"],
            "lru_width": 2560,
            "conv1d_width": 4,
            "torch_dtype": "bfloat16",
        },
        bytes_per_token=8 * (256 + 256) * 2,
        at_4096=8 * 2047 * (256 + 256) * 2 + 18 * (2560 * 3 * 2 + 2560 * 4),
        at_40960=8 * 2047 * (256 + 256) * 2 + 18 * (2560 * 3 * 2 + 2560 * 4),
    ),
]
