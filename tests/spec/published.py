"""Published models, and what each must remember, worked out by hand from its config.json.

Only the fields that matter are copied. ``source`` says where the values were checked: "config.json
copy" is a copy of the published file in a public source repository, "class default" the default of
the model's config class in Transformers 5.23, "from memory" that no stored copy was found.

The arithmetic is written as ``layers * (key + value elements) * bytes``, and for states as
``layers * (convolution bytes + scan bytes)``; nothing here calls the code under test.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One model: its facts, and the bytes that follow from them."""

    name: str
    source: str
    config: dict[str, Any]
    bytes_per_token: int  # while nothing is forgotten
    at_4096: int  # bytes to keep once 4,096 tokens are computed
    at_40960: int


def sizes(model_type: str, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> Any:
    """The five fields that nearly all files have, under their usual names."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "torch_dtype": "bfloat16",
        **more,
    }


def _full(name: str, source: str, config: dict[str, Any], per_token: int) -> Published:
    """A model whose every layer remembers everything."""
    return Published(
        name=name,
        source=source,
        config=config,
        bytes_per_token=per_token,
        at_4096=4096 * per_token,
        at_40960=40960 * per_token,
    )


FULL = [
    _full(
        "meta-llama/Llama-2-7b-hf",
        "config.json, sizes copied in a public repository",
        sizes("llama", 32, 32, 32, 4096, max_position_embeddings=4096, torch_dtype="float16"),
        32 * (4096 + 4096) * 2,  # 512 KiB
    ),
    _full(
        "meta-llama/Llama-3.1-8B",
        "config.json copy",
        sizes("llama", 32, 32, 8, 4096, max_position_embeddings=131072),
        32 * (1024 + 1024) * 2,  # 128 KiB
    ),
    _full(
        "meta-llama/Llama-3.1-70B",
        "config.json copy",
        sizes("llama", 80, 64, 8, 8192, max_position_embeddings=131072),
        80 * (1024 + 1024) * 2,  # 320 KiB
    ),
    _full(
        "Qwen/Qwen2.5-7B",
        "config.json copy; the window is stated, and switched off",
        sizes(
            "qwen2",
            28,
            28,
            4,
            3584,
            max_position_embeddings=131072,
            use_sliding_window=False,
            sliding_window=131072,
            max_window_layers=28,
        ),
        28 * (512 + 512) * 2,  # 56 KiB
    ),
    _full(
        "Qwen/Qwen3-0.6B",
        "config.json copy; heads are wider than hidden_size / heads = 64",
        sizes("qwen3", 28, 16, 8, 1024, head_dim=128, max_position_embeddings=40960),
        28 * (1024 + 1024) * 2,  # 112 KiB
    ),
    _full(
        "Qwen/Qwen3-4B",
        "config.json copy",
        sizes(
            "qwen3",
            36,
            32,
            8,
            2560,
            head_dim=128,
            max_position_embeddings=40960,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=36,
        ),
        36 * (1024 + 1024) * 2,  # 144 KiB
    ),
    _full(
        "Qwen/Qwen3-30B-A3B",
        "config.json copy",
        sizes(
            "qwen3_moe",
            48,
            32,
            4,
            2048,
            head_dim=128,
            max_position_embeddings=40960,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=48,
        ),
        48 * (512 + 512) * 2,  # 96 KiB
    ),
    _full(
        "mistralai/Mistral-Nemo-Base-2407",
        "config.json, sizes copied in a public repository; hidden_size / heads would be 160",
        sizes(
            "mistral",
            40,
            32,
            8,
            5120,
            head_dim=128,
            max_position_embeddings=131072,
            sliding_window=None,
        ),
        40 * (1024 + 1024) * 2,  # 160 KiB
    ),
    _full(
        "mistralai/Mixtral-8x7B-v0.1",
        "config.json copy",
        sizes("mixtral", 32, 32, 8, 4096, max_position_embeddings=32768, sliding_window=None),
        32 * (1024 + 1024) * 2,
    ),
    _full(
        "allenai/OLMo-2-1124-7B",
        "config.json, from memory; same sizes as the class default of olmo2",
        sizes("olmo2", 32, 32, 32, 4096, max_position_embeddings=4096),
        32 * (4096 + 4096) * 2,
    ),
    _full(
        "tiiuae/falcon-7b",
        "config.json copy; one head of keys and values for 71 of queries",
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
        32 * (64 + 64) * 2,  # 8 KiB
    ),
    _full(
        "tiiuae/falcon-40b",
        "config.json copy",
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "hidden_size": 8192,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        60 * (512 + 512) * 2,  # 120 KiB
    ),
    _full(
        "openai-community/gpt2",
        "config.json, from memory; class default of gpt2",
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
        12 * (768 + 768) * 2,
    ),
    _full(
        "bigcode/starcoder",
        "config.json copy",
        {
            "model_type": "gpt_bigcode",
            "n_layer": 40,
            "n_head": 48,
            "n_embd": 6144,
            "n_positions": 8192,
            "multi_query": True,
        },
        40 * (128 + 128) * 2,  # 20 KiB
    ),
    _full(
        "mosaicml/mpt-7b",
        "config.json, from memory",
        {"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "max_seq_len": 2048},
        32 * (4096 + 4096) * 2,
    ),
]

LATENT = [
    _full(
        "deepseek-ai/DeepSeek-V2-Lite",
        "config.json, sizes copied in public repositories",
        sizes(
            "deepseek_v2",
            27,
            16,
            16,
            2048,
            max_position_embeddings=163840,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
        ),
        27 * (512 + 64) * 2,  # 30.4 KiB
    ),
    _full(
        "deepseek-ai/DeepSeek-V3",
        "config.json copy; class default of deepseek_v3",
        sizes(
            "deepseek_v3",
            61,
            128,
            128,
            7168,
            max_position_embeddings=163840,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
        ),
        61 * (512 + 64) * 2,  # 68.6 KiB, and 287,834,112 bytes at 4,096 tokens
    ),
    _full(
        "moonshotai/Kimi-K2.5",
        "config.json copy; the text part of a multimodal file",
        {
            "model_type": "kimi_k25",
            "vision_config": {"vt_num_hidden_layers": 27},
            "text_config": sizes(
                "kimi_k2",
                61,
                64,
                64,
                7168,
                max_position_embeddings=262144,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
                qk_nope_head_dim=128,
                v_head_dim=128,
            ),
        },
        61 * (512 + 64) * 2,
    ),
    _full(
        "zai-org/GLM-4.7-Flash",
        "config.json: class default of glm4_moe_lite; context length in a public copy",
        sizes(
            "glm4_moe_lite",
            47,
            20,
            20,
            2048,
            max_position_embeddings=202752,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=192,
            v_head_dim=256,
        ),
        47 * (512 + 64) * 2,  # 52.9 KiB
    ),
]
