"""Tensors: a packed batch of chunks attends to what its sequences hold."""

from quire.attention.base import (
    AttentionBackend,
    AttentionBatch,
    FindWords,
    NoHostPart,
    PlacedBatch,
    Plays,
    Replays,
    VaryingCall,
    make_batch,
    packed_tokens,
)
from quire.attention.choose import (
    BACKENDS,
    backend_for_graphs,
    choose_backend,
    fallback_backends,
)
from quire.attention.reference import ReferenceAttention
from quire.attention.rows import RowMover, TorchRows, find_padded_rows
from quire.attention.sdpa import SdpaAttention
from quire.attention.tried import AttentionFailed, tried

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionFailed",
    "FindWords",
    "NoHostPart",
    "PlacedBatch",
    "Plays",
    "ReferenceAttention",
    "Replays",
    "RowMover",
    "SdpaAttention",
    "TorchRows",
    "VaryingCall",
    "backend_for_graphs",
    "choose_backend",
    "fallback_backends",
    "find_padded_rows",
    "make_batch",
    "packed_tokens",
    "tried",
]
