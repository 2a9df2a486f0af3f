"""Slow and obvious: the oracle that every other backend is compared with."""

import torch
from torch import Tensor

from quire.attention.gather import output_width, read_for
from quire.attention.interface import AttentionBatch
from quire.kv import LayerView
from quire.spec import AttentionSpec


class ReferenceAttention:
    """One query, one head at a time, in float64, with nothing fused and nothing skipped."""

    name = "reference"
    make_writer = None
    plays = None
    replays = None

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return None

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
