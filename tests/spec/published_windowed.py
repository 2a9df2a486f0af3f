"""Published models whose layers forget, worked out by hand as in ``published``.

Before a token is computed, a window of W holds the W - 1 tokens before it; a chunk, what there
is of the current one.
"""

from spec.published import Published, sizes

WINDOWED = [
    Published(
        name="mistralai/Mistral-7B-v0.1",
        source="class default of mistral; window and layers in public copies of config.json",
        config=sizes(
            "mistral", 32, 32, 8, 4096, max_position_embeddings=32768, sliding_window=4096
        ),
        bytes_per_token=32 * (1024 + 1024) * 2,
        at_4096=4095 * 32 * (1024 + 1024) * 2,  # the next token reads itself and 4,095 before it
        at_40960=4095 * 32 * (1024 + 1024) * 2,
    ),
    Published(
        name="microsoft/Phi-3-mini-4k-instruct",
        source="config.json copy",
        config=sizes("phi3", 32, 32, 32, 3072, max_position_embeddings=4096, sliding_window=2047),
        bytes_per_token=32 * (3072 + 3072) * 2,
        at_4096=2046 * 32 * (3072 + 3072) * 2,
        at_40960=2046 * 32 * (3072 + 3072) * 2,
    ),
    Published(
        name="google/gemma-2-9b",
        source="config.json copy; 21 sliding and 21 full layers, heads of 256",
        config=sizes(
            "gemma2",
            42,
            16,
            8,
            3584,
            head_dim=256,
            max_position_embeddings=8192,
            sliding_window=4096,
        ),
        bytes_per_token=42 * (2048 + 2048) * 2,
        at_4096=(21 * 4095 + 21 * 4096) * (2048 + 2048) * 2,
        at_40960=(21 * 4095 + 21 * 40960) * (2048 + 2048) * 2,
    ),
    Published(
        name="google/gemma-3-4b-it",
        source="config.json copy: heads, head_dim and context are left to the class defaults",
        config={
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        },
        bytes_per_token=34 * (1024 + 1024) * 2,
        at_4096=(29 * 1023 + 5 * 4096) * (1024 + 1024) * 2,  # every sixth of 34 layers is full
        at_40960=(29 * 1023 + 5 * 40960) * (1024 + 1024) * 2,
    ),
    Published(
        name="google/gemma-3-12b-it",
        source="config.json copy",
        config={
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 3840,
                "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "sliding_window": 1024,
            },
        },
        bytes_per_token=48 * (2048 + 2048) * 2,
        at_4096=(40 * 1023 + 8 * 4096) * (2048 + 2048) * 2,
        at_40960=(40 * 1023 + 8 * 40960) * (2048 + 2048) * 2,
    ),
    Published(
        name="google/gemma-3-27b-it",
        source="config.json copy, but for its 62 layers, which are from memory",
        config={
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 5376,
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "sliding_window": 1024,
            },
        },
        bytes_per_token=62 * (2048 + 2048) * 2,
        at_4096=(52 * 1023 + 10 * 4096) * (2048 + 2048) * 2,
        at_40960=(52 * 1023 + 10 * 40960) * (2048 + 2048) * 2,
    ),
    Published(
        name="google/gemma-3n-E2B-it",
        source="config.json copy; layers 20 to 29 read the keys and values of 18 and 19",
        config={
            "model_type": "gemma3n",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3n_text",
                "hidden_size": 2048,
                "num_hidden_layers": 30,
                "num_kv_shared_layers": 10,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "sliding_window": 512,
                "max_position_embeddings": 32768,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
            },
        },
        bytes_per_token=20 * (512 + 512) * 2,
        at_4096=(16 * 511 + 4 * 4096) * (512 + 512) * 2,
        at_40960=(16 * 511 + 4 * 40960) * (512 + 512) * 2,
    ),
    Published(
        name="openai/gpt-oss-20b",
        source="24 layers in a public description of config.json; the rest is the class default",
        config=sizes(
            "gpt_oss",
            24,
            64,
            8,
            2880,
            head_dim=64,
            max_position_embeddings=131072,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 12,
        ),
        bytes_per_token=24 * (512 + 512) * 2,
        at_4096=(12 * 127 + 12 * 4096) * (512 + 512) * 2,
        at_40960=(12 * 127 + 12 * 40960) * (512 + 512) * 2,
    ),
    Published(
        name="openai/gpt-oss-120b",
        source="class default of gpt_oss, which has this model's sizes",
        config=sizes("gpt_oss", 36, 64, 8, 2880, max_position_embeddings=131072),
        bytes_per_token=36 * (512 + 512) * 2,
        at_4096=(18 * 127 + 18 * 4096) * (512 + 512) * 2,
        at_40960=(18 * 127 + 18 * 40960) * (512 + 512) * 2,
    ),
    Published(
        name="CohereLabs/c4ai-command-r7b-12-2024",
        source="config.json, from memory; every fourth layer is full, as the class has it",
        config=sizes(
            "cohere2",
            32,
            32,
            8,
            4096,
            max_position_embeddings=8192,
            sliding_window=4096,
            sliding_window_pattern=4,
        ),
        bytes_per_token=32 * (1024 + 1024) * 2,
        at_4096=(24 * 4095 + 8 * 4096) * (1024 + 1024) * 2,
        at_40960=(24 * 4095 + 8 * 40960) * (1024 + 1024) * 2,
    ),
    Published(
        name="meta-llama/Llama-4-Scout-17B-16E-Instruct",
        source="config.json copy; no_rope_layers is empty there: every fourth layer is full",
        config={
            "model_type": "llama4",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": 5120,
                "num_hidden_layers": 48,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "attention_chunk_size": 8192,
                "no_rope_layers": [],
                "max_position_embeddings": 10485760,
            },
        },
        bytes_per_token=48 * (1024 + 1024) * 2,
        at_4096=48 * 4096 * (1024 + 1024) * 2,  # the first chunk is half full
        at_40960=12
        * 40960
        * (1024 + 1024)
        * 2,  # five chunks are full, and none will be read again
    ),
]
