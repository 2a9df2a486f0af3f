"""What a layer's kernels are compiled for, beside the sizes that a step brings."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kv import LayerView
from quire.spec import AttentionSpec, ChunkedAttention, LatentAttention, SlidingWindow

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendShape:
    """One kind of layer and of queries."""

    kv_heads: int
    sharing: int  # query heads of a key-value head
    key: int  # width, in elements; of a latent
    value: int  # … of its rotary key
    reads: str  # "full", "sliding" or "chunked"
    reach: int  # tokens of a window or a chunk
    latent: bool
    kept: str  # "plain", "int8" or "fp8"
    kept_bytes: int  # of an element
    dtype: torch.dtype  # in which factors are multiplied

    @property
    def output_width(self) -> int:
        return self.key if self.latent else self.value

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.sharing


def shape_of(q: Tensor, view: LayerView, spec: AttentionSpec) -> AttendShape:
    """Raises: ValueError where queries do not fit the view."""
    latent = isinstance(spec, LatentAttention)
    (_, kv_heads, _, key), value = view.k.shape, view.v.shape[-1]
    width = key + value if latent else key
    if q.shape[1] % kv_heads or q.shape[2] != width:
        raise ValueError(
            f"queries of {q.shape[1]} heads of {q.shape[2]} do not fit {kv_heads} heads of {width}"
        )
    if q.dtype not in _FLOATS:
        raise ValueError(f"there is no kernel for queries in {q.dtype}")
    reads, reach = "full", 0
    if isinstance(spec, SlidingWindow):
        reads, reach = "sliding", spec.window
    elif isinstance(spec, ChunkedAttention):
        reads, reach = "chunked", spec.chunk
    kept = kept_as(view.k.dtype)
    return AttendShape(
        kv_heads=kv_heads,
        sharing=q.shape[1] // kv_heads,
        key=key,
        value=value,
        reads=reads,
        reach=reach,
        latent=latent,
        kept=kept,
        kept_bytes=view.k.element_size(),
        # One that holds both; codes are exact in any.
        dtype=torch.promote_types(q.dtype, view.k.dtype) if kept == "plain" else q.dtype,
    )


def kept_as(dtype: torch.dtype) -> str:
    """Raises: ValueError for a dtype that no kernel reads."""
    if dtype in _FLOATS:
        return "plain"
    if dtype == torch.int8:
        return "int8"
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    raise ValueError(f"there is no kernel for {dtype}")
