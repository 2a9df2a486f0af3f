"""Layers that change keys and values after they were kept: each reads all that its sequences hold.

Some models repeat, split or expand what the cache returns before they attend. What lies in blocks
is then not what attention reads, so the cache returns everything, one sequence after the other, and
each sequence attends by itself to its part of what the model has made of it. Of a window only what
a query of the step can still read is brought along. Slower than reading blocks where they lie.
"""

import torch
from torch import Tensor

from quire.attention import AttentionBatch
from quire.attention.gather import read_sequence
from quire.attention.sdpa import attend_sequence
from quire.kv import LayerView
from quire.spec import AttentionSpec


def gather(
    view: LayerView, batch: AttentionBatch, spec: AttentionSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What the step's queries may read: k [1, K, all sequences' tokens, D], v [1, K, …, Dv].

    In the model's own ``dtype``, whatever they are kept in.
    """
    held = [read_sequence(view, batch, n, start) for n, (_, _, start, _) in _parts(batch, spec)]
    return (
        torch.cat([k for k, _ in held], 1)[None].to(dtype),
        torch.cat([v for _, v in held], 1)[None].to(dtype),
    )


def attend_gathered(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [K, all sequences' tokens, D]
    v: Tensor,  # [K, all sequences' tokens, Dv]
    batch: AttentionBatch,
    spec: AttentionSpec,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[T, H, Dv]. Raises: RuntimeError where tokens were added or lost on the way."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    first = 0
    for _, (begin, end, start, context_len) in _parts(batch, spec):
        own = slice(first, first + context_len - start)
        out[begin:end] = attend_sequence(
            q[begin:end],
            k[:, own],
            v[:, own],
            spec,
            start,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        first = own.stop
    if not k.shape[1] == v.shape[1] == first:
        raise RuntimeError(
            f"{first} tokens were gathered, attention was given {k.shape[1]} keys and "
            f"{v.shape[1]} values"
        )
    return out


def _parts(
    batch: AttentionBatch, spec: AttentionSpec
) -> list[tuple[int, tuple[int, int, int, int]]]:
    """(number, (first query, one past the last, first token read, context length)) of each."""
    return [
        (n, (begin, end, spec.live_range(context_len - (end - begin)).start, context_len))
        for n, (begin, end, context_len) in enumerate(batch.chunks())
    ]
