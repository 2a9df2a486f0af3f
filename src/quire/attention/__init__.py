"""Tensors: a packed batch of chunks attends to what its sequences hold."""

from quire.attention.attention_backend import (
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
    AttentionFailed,
    RowMover,
    TorchRows,
    backend_for_graphs,
    choose_backend,
    fallback_backends,
    find_padded_rows,
    tried,
)
from quire.attention.gather import ReferenceAttention
from quire.attention.sdpa import SdpaAttention

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
