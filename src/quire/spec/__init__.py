"""Describe a model's KV memory layer by layer, from its config.json alone. Imports no torch."""

from quire.spec.layer_specs import (
    AttentionSpec,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KeptWhole,
    LatentAttention,
    Layer,
    LayerSpec,
    RecurrentState,
    SlidingWindow,
    StateTensor,
)
from quire.spec.model import Group, ModelSpec

__all__ = [
    "AttentionSpec",
    "ChunkedAttention",
    "CrossAttention",
    "FullAttention",
    "Group",
    "KeptWhole",
    "LatentAttention",
    "Layer",
    "LayerSpec",
    "ModelSpec",
    "RecurrentState",
    "SlidingWindow",
    "StateTensor",
]
