"""What a model's keys and values take, from config.json alone: no torch, no weights, no network.

Run: python examples/plan_bytes.py [path/to/config.json]
"""

import sys

from quire import ModelSpec
from quire.units import format_bytes, format_count

# As published for Gemma 3 4B: five layers of a window of 1,024 tokens to one that reads everything.
CONFIG = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2560,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}

spec = ModelSpec.from_file(sys.argv[1]) if len(sys.argv) > 1 else ModelSpec.from_config(CONFIG)
print(f"{spec.model_type}, {spec.num_layers} layers, {spec.dtype}")
for group in spec.groups:
    print(
        f"  {group.num_layers} × {type(group.spec).__name__}: {group.bytes_per_token:,} B a token"
    )
print("one sequence:")
for num_tokens in (100, 1_000, 10_000, spec.max_model_len):
    print(f"  {format_count(num_tokens):>9} tokens  {format_bytes(spec.bytes_for(num_tokens)):>10}")
