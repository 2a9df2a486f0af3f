"""Geometries that the strategy tests share."""

from typing import Any

from quire.kv import CacheConfig
from quire.spec import FullAttention, Layer, LayerSpec, ModelSpec

MIB = 2**20
GIB = 2**30


def spec_of(*layers: LayerSpec, max_model_len: int = 40_960) -> ModelSpec:
    return ModelSpec(
        model_type="test",
        layers=tuple(Layer(specs=(layer,)) for layer in layers),
        max_model_len=max_model_len,
        dtype="bfloat16",
    )


# Qwen3-4B: 36 layers of 8 heads of 128, 4096 bytes a token and layer. A page is 16 of its tokens.
QWEN3_4B = spec_of(*[FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16")] * 36)
# One layer of 64 bytes a token: four keys, or four values, a page of 128 bytes.
SMALL = spec_of(FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16"))
SMALL_PAGE_BYTES = 128


def config(**changed: Any) -> CacheConfig:
    defaults: dict[str, Any] = dict(max_model_len=4096, max_num_seqs=64, capacity_bytes=64 * GIB)
    return CacheConfig(**{**defaults, **changed})
