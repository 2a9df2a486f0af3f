"""How a step reads a latent layer: absorbed, but for long chunks that begin a sequence.

Absorbed, each query meets latents, which are several times as wide as a head's own keys. That is
little beside expanding what came before; a chunk of hundreds of tokens with nothing before it is
done sooner on its own keys and values. They are as many as the step's tokens, made by the model's
own ``expand_kv``, and gone with the layer: what came before is never expanded.

Source: decision 21, where both are measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.attention import AttentionBatch
from quire.kv import LayerView
from quire.models.ways.latent import AbsorbedLatent
from quire.spec import AttentionSpec, FullAttention

WORTH_EXPANDING = 129  # tokens of a chunk: more than a recorded pass has


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A step's sequences, by how they are read."""

    expanded: list[tuple[int, int, AttentionBatch]]  # first query, one past the last, by itself
    absorbed: AttentionBatch | None  # all the others
    queries: Tensor  # i64: theirs


def attend_latents(  # noqa: PLR0913
    q: Tensor,  # [T, H, Dn + rope]
    latents: Tensor,  # [1, 1, T, R]: the step's own
    rotary: Tensor,  # [1, 1, T, rope]
    absorbed: AbsorbedLatent,
    view: LayerView,
    batch: AttentionBatch,
    attend: Callable[..., Tensor],  # a backend's, with its scale
    attend_expanded: Callable[..., Tensor],  # the same, of what may be of another kind
    *,
    spec: AttentionSpec,
) -> Tensor:
    """[T, H, Dv]"""

    def read(q: Tensor, batch: AttentionBatch) -> Tensor:
        return absorbed.results(attend(absorbed.queries(q), view, batch, spec=spec))

    # Where entries are rounded, what is read is what is kept.
    if len(q) < WORTH_EXPANDING or view.k.dtype != q.dtype:
        return read(q, batch)
    parts = batch.memo.get("latents")
    if parts is None:
        parts = batch.memo["latents"] = _split(batch, q.device)
    if not parts.expanded:
        return read(q, batch)
    out: Tensor | None = None
    for begin, end, alone in parts.expanded:
        k, v = absorbed.expand(latents[:, :, begin:end], rotary[:, :, begin:end])
        own = FullAttention(
            num_kv_heads=k.shape[1],
            head_dim=k.shape[-1],
            value_head_dim=v.shape[-1],
            dtype=spec.dtype,
        )
        row = LayerView(k=k, v=v, slots_per_row=1)
        part = attend_expanded(q[begin:end], row, alone, spec=own)
        if out is None:
            out = part.new_empty(*q.shape[:2], part.shape[-1])
        out[begin:end] = part
    assert out is not None
    if parts.absorbed is not None:
        out[parts.queries] = read(q[parts.queries], parts.absorbed)
    return out


def _split(batch: AttentionBatch, device: torch.device) -> _Parts:
    expanded: list[tuple[int, int, AttentionBatch]] = []
    others: list[int] = []
    queries: list[Tensor] = []
    for number, (begin, end, context_len) in enumerate(batch.chunks()):
        num_tokens = end - begin
        if num_tokens == context_len and num_tokens >= WORTH_EXPANDING:
            expanded.append((begin, end, _by_itself(num_tokens)))
        else:
            others.append(number)
            queries.append(torch.arange(begin, end))
    if not expanded or not others:
        return _Parts(expanded=expanded, absorbed=None, queries=torch.arange(0))
    lengths = np.diff(batch.query_starts)[others]
    rest = replace(
        batch,
        query_starts=np.concatenate([[0], lengths.cumsum()]).astype(np.int64),
        context_lens=batch.context_lens[others],
        tables=batch.tables[others],
        slots=batch.slots[torch.cat(queries)],
        memo={},
    )
    return _Parts(expanded=expanded, absorbed=rest, queries=torch.cat(queries).to(device))


def _by_itself(num_tokens: int) -> AttentionBatch:
    """A sequence that lies in one row."""
    return AttentionBatch(
        query_starts=np.array([0, num_tokens]),
        context_lens=np.array([num_tokens]),
        tables=torch.zeros(1, 1, dtype=torch.long),
        slots=torch.arange(num_tokens),
        block_size=num_tokens,
    )
