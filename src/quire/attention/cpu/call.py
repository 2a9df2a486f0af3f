"""One call of the attention kernel: which one, and what its frame says."""

import struct

from torch import Tensor

from quire.attention.cpu.frame import FRAME, AttendShape
from quire.kernels.formats import kind_factor
from quire.kernels.language import LOG2_E
from quire.kernels.tensors import KINDS
from quire.spec import AttentionSpec, LatentAttention
from quire.strategies import LayerView

WORDS = struct.Struct(f"{len(FRAME) - 3}q" + "f4x" * 3)


def factors(kind: str, scale: float, softcap: float | None) -> tuple[float, float, float]:
    """The last words of a frame, for keys of a kind: factor, cap_in, cap_out."""
    factor = LOG2_E * kind_factor(kind) * scale
    return (factor, 0.0, 0.0) if softcap is None else (LOG2_E, 2 * factor / softcap, softcap)


def shape_of(
    q: Tensor, view: LayerView, spec: AttentionSpec, *, softcap: bool, sinks: bool
) -> AttendShape:
    """Raises: ValueError where queries do not fit the view."""
    latent = isinstance(spec, LatentAttention)
    (_, kv_heads, _, key_dim), value_dim = view.k.shape, view.v.shape[-1]
    width = key_dim + value_dim if latent else key_dim
    if q.shape[1] % kv_heads or q.shape[2] != width:
        raise ValueError(
            f"queries of {q.shape[1]} heads of {q.shape[2]} do not fit {kv_heads} heads of {width}"
        )
    if latent:
        key_dim, value_dim = value_dim, key_dim
    return AttendShape(
        kv_heads=kv_heads,
        sharing=q.shape[1] // kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kind=KINDS[view.k.dtype],
        query_kind=KINDS[q.dtype],
        latent=latent,
        sinks=sinks,
        softcap=softcap,
    )
