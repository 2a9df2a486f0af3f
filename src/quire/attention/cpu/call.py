"""One call of the attention kernel: which one, and what its frame says."""

import struct

from torch import Tensor

from quire.attention.cpu.frame import FRAME, AttendShape
from quire.kernels.formats import kind_factor
from quire.kernels.language import LOG2_E
from quire.kernels.tensors import KINDS, words
from quire.kv import LayerView
from quire.spec import AttentionSpec, LatentAttention

# The words that differ from step to step: memory to work in, and a plan's.
PLANNED = range(FRAME.index("scratch"), FRAME.index("block_size") + 1)
_WORDS = struct.Struct(f"{len(FRAME) - 3}q" + "f4x" * 3)


def frame_of(
    q: Tensor,  # [T, H, D], rows side by side
    out: Tensor,  # [T, H, Dv], contiguous
    place: tuple[int, ...],  # ``view_words``
    *,
    planned: tuple[int, ...],  # the words of ``PLANNED``
    kind: str,  # of keys and values
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # f32[H], contiguous
) -> bytes:
    factor, cap_in = LOG2_E * kind_factor(kind) * scale, 0.0
    if softcap is not None:
        factor, cap_in = LOG2_E, 2 * factor / softcap
    return _WORDS.pack(
        0, 0, *planned,
        *words(out, 2), *words(q, 2), *place,
        0 if sinks is None else sinks.data_ptr(), factor, cap_in, softcap or 0.0,
    )  # fmt: skip


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
