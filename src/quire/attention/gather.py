"""A sequence's entries out of its blocks, in one tensor, and the masks for them: the slow way.

The reference, torch's attention and models that expand a latent have no kernel and use these.
"""

import torch
from torch import Tensor

from quire.attention.attention_backend import AttentionBackend, AttentionBatch
from quire.kv import LayerView
from quire.kv.storage.entries import dequantize
from quire.spec import AttentionSpec, LatentAttention


def read_sequence(
    view: LayerView, batch: AttentionBatch, index: int, start: int
) -> tuple[Tensor, Tensor]:
    """Read sequence ``index``'s entries from token ``start`` on: k [K, L, D], v [K, L, Dv].

    Return a view where one table entry holds them all, else a copy; of codes, a copy in float32.
    """
    stop, size = int(batch.context_lens[index]), batch.block_size
    first, last = start // size, (stop - 1) // size
    inside = slice(start - first * size, stop - first * size)
    if first == last:
        block = int(batch.tables[index, first])
    else:
        blocks = batch.tables_on(view.k.device)[index, first : last + 1]

    def read(rows: Tensor) -> Tensor:
        """[N, K, B, …] → [K, L, …]"""
        if first == last:
            return rows[block, :, inside]
        return rows[blocks].transpose(0, 1).flatten(1, 2)[:, inside]

    k_scale = None if view.k_scale is None else read(view.k_scale)
    v_scale = None if view.v_scale is None else read(view.v_scale)
    return dequantize(read(view.k), k_scale), dequantize(read(view.v), v_scale)


def read_for(
    spec: AttentionSpec, view: LayerView, batch: AttentionBatch, index: int, start: int
) -> tuple[Tensor, Tensor]:
    """Read what queries meet and what their weights sum: k [K, L, D], v [K, L, Dv].

    A latent's key is the latent and the rotary key, its value the latent.
    """
    k, v = read_sequence(view, batch, index, start)
    return (torch.cat([k, v], -1), k) if isinstance(spec, LatentAttention) else (k, v)


def output_width(spec: AttentionSpec) -> int:
    """Return Dv of attention's result: a value's width, or a latent's."""
    (_, key_width), (_, value_width) = spec.entry_shapes
    return key_width if isinstance(spec, LatentAttention) else value_width


def readable(
    spec: AttentionSpec, num_queries: int, context_len: int, start: int, device: torch.device
) -> Tensor | None:
    """Mark which tokens each query may read: bool[num_queries, context_len - start]; None if all.

    The queries are the last ones of the context; the tokens are those from ``start`` on.
    """
    first = context_len - num_queries
    if num_queries == 1 and spec.live_range(first).start <= start:
        return None
    lows = torch.tensor(
        [spec.live_range(i).start for i in range(first, context_len)], device=device
    )
    queries = torch.arange(first, context_len, device=device)
    tokens = torch.arange(start, context_len, device=device)
    return (tokens >= lows[:, None]) & (tokens <= queries[:, None])


# -- what fits a layer -----------------------------------------------------------------------------


def query_sharing(q: Tensor, view: LayerView, spec: AttentionSpec) -> int:
    """Return how many query heads of q [T, H, D] share a key-value head of the view.

    Raises: ValueError where queries do not fit the view.
    """
    (_, kv_heads, _, width), (*_, value_width) = view.k.shape, view.v.shape
    if isinstance(spec, LatentAttention):
        width += value_width
    if q.shape[1] % kv_heads or q.shape[2] != width:
        raise ValueError(
            f"queries of {q.shape[1]} heads of {q.shape[2]} do not fit {kv_heads} heads of {width}"
        )
    return q.shape[1] // kv_heads


def check_entries(
    view: LayerView, num_tokens: int, slots_dtype: torch.dtype, k: Tensor, v: Tensor
) -> None:
    """Check that k [T, K, D] and v [T, K, Dv] are entries of a layer, for as many slots.

    Raises: ValueError where they are not.
    """
    (_, heads, _, key), value = view.k.shape, view.v.shape[-1]
    if k.shape != (num_tokens, heads, key) or v.shape != (num_tokens, heads, value):
        raise ValueError(
            f"{num_tokens} slots for keys {list(k.shape)} and values {list(v.shape)}: this "
            f"layer keeps {heads} heads of {key} and {value}"
        )
    if slots_dtype != torch.int64 or v.dtype != k.dtype:
        raise ValueError(f"slots are {slots_dtype}, keys {k.dtype}, values {v.dtype}")


# -- reference -------------------------------------------------------------------------------------

# Slow and obvious: the oracle that every other backend is compared with.


class ReferenceAttention(AttentionBackend):
    """One query, one head at a time, in float64, with nothing fused and nothing skipped."""

    name = "reference"

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
        for index, (first_query, end, context_len) in enumerate(batch.chunks()):
            for token in range(first_query, end):
                position = context_len - (end - token)
                start = batch.first_read(index, spec, position)
                k, v = read_for(spec, view, batch, index, start)
                stop = position + 1 - start
                for head in range(q.shape[1]):
                    kv_head = head * k.shape[0] // q.shape[1]
                    scores = k[kv_head, :stop].double() @ q[token, head].double() * scale
                    if softcap is not None:
                        scores = torch.tanh(scores / softcap) * softcap
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head].double()[None]])
                    weights = scores.softmax(0)[:stop]
                    out[token, head] = (weights @ v[kv_head, :stop].double()).to(out.dtype)
        return out
