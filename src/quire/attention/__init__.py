"""Attention: a packed batch of chunks attends to the tokens that its sequences hold.

Importing this room imports no torch: the names of backends are options of the command line. Other
names are loaded on first use. Begin to read with ``attention_backend``.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quire.attention.choose import (
    AUTO,
    BACKENDS,
    BY_TORCH,
    LayersToServe,
    MakeBackend,
    backend_for_graphs,
    choose_backend,
    fallback_backends,
)

if TYPE_CHECKING:
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
    from quire.attention.gather import ReferenceAttention, output_width, read_for, readable
    from quire.attention.sdpa import SdpaAttention
    from quire.attention.trial import AttentionFailed, tried

__all__ = [
    "AUTO",
    "BACKENDS",
    "BY_TORCH",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionFailed",
    "FindWords",
    "LayersToServe",
    "MakeBackend",
    "NoHostPart",
    "PlacedBatch",
    "Plays",
    "ReferenceAttention",
    "Replays",
    "SdpaAttention",
    "VaryingCall",
    "backend_for_graphs",
    "choose_backend",
    "fallback_backends",
    "make_batch",
    "output_width",
    "packed_tokens",
    "read_for",
    "readable",
    "tried",
]

_ELSEWHERE = MappingProxyType(
    {
        "AttentionFailed": "trial",
        "ReferenceAttention": "gather",
        "SdpaAttention": "sdpa",
        "output_width": "gather",
        "read_for": "gather",
        "readable": "gather",
        "tried": "trial",
    }
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quire.attention' has no attribute {name!r}")
    module = import_module(f"quire.attention.{_ELSEWHERE.get(name, 'attention_backend')}")
    return getattr(module, name)
