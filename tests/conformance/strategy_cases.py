"""The strategies with their interesting options, and the memories of models that they must hold.

A later strategy or option is one more entry of ``_OWN``, a later kind of layer one of ``KINDS``.
"""

from collections.abc import Mapping
from typing import Any

from conformance import named
from quire.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    Layer,
    LayerSpec,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    StateTensor,
)
from quire.spec.layer_specs import dtype_bytes, scale_bytes

# name → strategy, and what differs from CacheConfig's defaults
_OWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "contiguous": ("contiguous", {}),
    "contiguous-request": ("contiguous", {"reserve": "request"}),
    "contiguous-request-defrag": ("contiguous", {"reserve": "request", "defrag": True}),
    **{
        f"growing-{growth}-{'kept' if keep_old else 'freed'}": (
            "growing",
            {"growth": growth, "growth_tokens": 8, "keep_old": keep_old},
        )
        for growth in ("uniform", "doubling", "staggered")
        for keep_old in (False, True)
    },
    "contiguous-stacks": ("contiguous", {"layers_per_page": 2, "reserve": "request"}),
    "growing-stacks": (
        "growing",
        {"layers_per_page": "auto", "growth": "staggered", "growth_tokens": 8},
    ),
    "virtual-stacks": ("virtual", {"layers_per_page": "auto"}),
    "virtual-stacks-2": ("virtual", {"layers_per_page": 2}),
    "virtual-shared-auto": (
        "virtual",
        {"shares_pages": True, "layers_per_page": "auto", "heap_bytes": 2**14},
    ),
    "paged-1": ("paged", {"block_size": 1}),
    "paged-4": ("paged", {"block_size": 4}),
    "paged-16": ("paged", {"block_size": 16}),
    "virtual": ("virtual", {}),
    "virtual-shared": ("virtual", {"shares_pages": True, "heap_bytes": 2**14}),
    "virtual-shared-stacks": (
        "virtual",
        {"shares_pages": True, "block_size": 1, "layers_per_page": 1, "heap_bytes": 1},
    ),
}
OPTIONS = named.options_of(_OWN)


def layers_of(kind: str, dtype: str, *, wide: bool) -> tuple[LayerSpec, ...]:
    """The layers of a model of one kind. ``wide``: a few tokens fill a page of 4096 bytes."""
    dim, heads = 512 // dtype_bytes(dtype) if wide else 16, 1
    if wide and scale_bytes(dtype):
        dim, heads = 128, 16  # a page of scales too
    full = FullAttention(num_kv_heads=2 * heads, head_dim=dim, dtype=dtype)
    sliding = SlidingWindow(num_kv_heads=heads, head_dim=dim, dtype=dtype, window=9)
    convolution = StateTensor(name="conv", shape=(3, 5), dtype="bfloat16")
    scan = StateTensor(name="scan", shape=(2, 70 if wide else 7), dtype="float32")
    state = RecurrentState(states=(convolution, scan))
    source = CrossAttention(num_kv_heads=3, head_dim=dim, dtype=dtype, source_tokens=5)
    if kind == "full":
        return (full, full, full)
    if kind == "full+sliding":
        return (full, sliding, sliding, full)
    if kind == "sliding":
        return (sliding, sliding)
    if kind == "sliding-1":
        return (full, SlidingWindow(num_kv_heads=heads, head_dim=dim, dtype=dtype, window=1))
    if kind == "chunked":
        return (ChunkedAttention(num_kv_heads=2 * heads, head_dim=dim, dtype=dtype, chunk=8), full)
    if kind == "states":
        return (state, state)
    if kind == "full+states":
        return (full, state, sliding, state)
    if kind == "full+source":
        return (full, source, full, source)
    if kind == "sliding+source+states":
        return (sliding, source, state)
    if kind == "latent":
        return (LatentAttention(latent_dim=4 * dim, rope_dim=dim // 2, dtype=dtype),)
    assert kind == "odd"
    return (FullAttention(num_kv_heads=3, head_dim=80, value_head_dim=96, dtype=dtype), sliding)


KINDS = ("full", "full+sliding", "sliding", "sliding-1", "chunked", "latent", "odd")
KINDS_WITH_STATES = (*KINDS, "full+states", "states", "full+source", "sliding+source+states")


def model_spec(layers: tuple[LayerSpec, ...], *, max_model_len: int = 64) -> ModelSpec:
    return ModelSpec(
        model_type="tiny",
        layers=tuple(Layer(specs=(spec,)) for spec in layers),
        max_model_len=max_model_len,
        dtype="bfloat16",
    )
