"""What a model must remember, layer by layer, from its config.json alone. Imports no torch."""

from quire.spec.layers import (
    AttentionSpec,
    ChunkedAttention,
    FullAttention,
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
    "FullAttention",
    "Group",
    "LatentAttention",
    "Layer",
    "LayerSpec",
    "ModelSpec",
    "RecurrentState",
    "SlidingWindow",
    "StateTensor",
]
