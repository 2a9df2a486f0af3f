"""Torch's own kernels, one sequence at a time: the fallback that runs everywhere.

A sequence in a range is read where it lies; one in blocks is gathered first. The query heads that
share a key-value head become rows of one head's queries: to repeat keys (or ``enable_gqa``) costs
several times the attention itself on a CPU.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.attention.attention_backend import AttentionBackend, AttentionBatch
from quire.attention.gather import output_width, read_for, readable
from quire.kv import LayerView
from quire.spec import AttentionSpec, FullAttention, LatentAttention

_MOST_ELEMENTS = 2**24  # of a mask or of scores, at once


class SdpaAttention(AttentionBackend):
    """``scaled_dot_product_attention``; written out where it lacks softcap or sinks."""

    name = "sdpa"

    def attend(
        self,
        q: Tensor,  # [T, H, D]
        view: LayerView,
        batch: AttentionBatch,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [H]
    ) -> Tensor:
        out = q.new_empty(*q.shape[:2], output_width(spec))
        for index, (begin, end, context_len) in enumerate(batch.chunks()):
            start = batch.first_read(index, spec, context_len - (end - begin))
            k, v = read_for(spec, view, batch, index, start)
            out[begin:end] = attend_sequence(
                q[begin:end], k, v, spec, start, scale=scale, softcap=softcap, sinks=sinks
            )
        return out


def attend_sequence(
    q: Tensor,  # [n, H, D]
    k: Tensor,  # [K, L, D]
    v: Tensor,  # [K, L, Dv]
    spec: AttentionSpec,
    start: int,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
) -> Tensor:
    """Compute [n, H, Dv] of a sequence's last queries over its tokens from ``start`` on.

    A long chunk goes some queries at a time, each over what comes up to it: a mask, and scores
    where they are written out, would take the square of its length.
    """
    num_queries, heads, _ = q.shape
    num_kv_heads, num_tokens, _ = k.shape
    fused, context_len = softcap is None and sinks is None, start + num_tokens
    attend = partial(_attend, scale=scale, softcap=softcap, sinks=sinks)
    if fused and _is_causal(spec) and heads == num_kv_heads and num_queries == num_tokens > 1:
        return attend(q, k, v, None, is_causal=True)
    each = num_tokens * (heads // num_kv_heads if fused else heads)
    step = max(1, _MOST_ELEMENTS // each)
    parts: list[Tensor] = []
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        stop = context_len - (num_queries - end)
        first = max(start, spec.live_range(stop - (end - begin)).start)  # of what these can read
        mask = readable(spec, end - begin, stop, first, q.device)
        own = slice(first - start, stop - start)
        parts.append(attend(q[begin:end], k[:, own], v[:, own], mask))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _is_causal(spec: AttentionSpec) -> bool:
    """Return whether each token reads all that come before it."""
    return isinstance(spec, FullAttention | LatentAttention)


def _attend(
    q: Tensor,  # [n, H, D]
    k: Tensor,  # [K, L, D]
    v: Tensor,  # [K, L, Dv]
    mask: Tensor | None,  # bool[n, L]
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
    is_causal: bool = False,
) -> Tensor:
    """Compute [n, H, Dv]. ``is_causal`` masks for as many tokens as queries, and fuses."""
    num_queries, heads, _ = q.shape
    sharing = heads // k.shape[0]
    # [n, H, D] → [K, G * n, D]: head h reads key-value head h // G
    rows = q.transpose(0, 1).reshape(k.shape[0], sharing * num_queries, -1)
    row_mask = None if mask is None else mask.repeat(sharing, 1)
    if softcap is None and sinks is None:
        # Where queries and entries differ in dtype, in one that holds both.
        common = torch.promote_types(q.dtype, k.dtype)
        # Queries that lie in a wider tensor are copied: a GPU's kernel wants them aligned, and
        # refuses others only at its launch.
        one, keys, values = (x[None].to(common) for x in (rows.contiguous(), k, v))
        result = scaled_dot_product_attention(
            one, keys, values, attn_mask=row_mask, is_causal=is_causal, scale=scale
        )
        result = result[0].to(q.dtype)
    else:
        # In float32, as the fused kernel does inside: a rounded score is a wrong weight.
        scores = rows.float() @ k.transpose(1, 2).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if row_mask is not None:
            scores = scores.masked_fill(~row_mask, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(k.shape[0], sharing, 1).repeat_interleave(num_queries, 1)
            scores = torch.cat([scores, sink], 2)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        result = (weights @ v.float()).to(q.dtype)
    return result.reshape(heads, num_queries, -1).transpose(0, 1)
