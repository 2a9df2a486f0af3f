"""Tensors: a packed batch of chunks attends to what its sequences hold."""

from quire.attention.base import AttentionBackend, AttentionBatch, make_batch
from quire.attention.reference import ReferenceAttention
from quire.attention.sdpa import SdpaAttention

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "ReferenceAttention",
    "SdpaAttention",
    "make_batch",
]
