"""An attention backend of another package, in plain torch: what a subclass has to say, and no more.

Run: python examples/attention_backend.py [MODEL]
"""

import sys

import torch
from torch import Tensor

import quire
from quire.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionBatch,
    LayersToServe,
    output_width,
    read_for,
    readable,
)
from quire.kv import LayerView
from quire.spec import AttentionSpec


class EinsumAttention(AttentionBackend):
    """Attention as it is written on paper, one sequence after the other."""

    name = "einsum"

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return f"it computes in float32, not {spec.dtype}" if spec.dtype == "float64" else None

    def attend(
        self,
        q: Tensor,  # [T, H, D], the chunks of all sequences packed
        view: LayerView,
        batch: AttentionBatch,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [H]
    ) -> Tensor:
        out = q.new_empty(*q.shape[:2], output_width(spec))
        for index, (begin, end, length) in enumerate(batch.chunks()):
            start = batch.first_read(index, spec, length - (end - begin))
            k, v = read_for(spec, view, batch, index, start)  # [K, L, D], [K, L, Dv]
            heads = q[begin:end].float().unflatten(1, (len(k), -1))  # [n, K, G, D]
            scores = torch.einsum("nkgd,kld->kgnl", heads, k.float()) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            mask = readable(spec, end - begin, length, start, q.device)  # bool[n, L]
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            if sinks is not None:  # a logit that takes weight and gives no value
                sink = sinks.float().view(len(k), -1, 1, 1).expand(*scores.shape[:-1], 1)
                scores = torch.cat([scores, sink], -1)
            weights = scores.softmax(-1)[..., : k.shape[1]]
            out[begin:end] = torch.einsum("kgnl,kld->nkgd", weights, v.float()).flatten(1, 2)
        return out


def make_backend(layers: LayersToServe) -> AttentionBackend:
    """Make the backend: an entry point in the group quire.attention_backends names this."""
    return EinsumAttention()


if __name__ == "__main__":
    BACKENDS.register("einsum", make_backend)
    model = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model
    with quire.LLM(model, attention_backend="einsum") as llm:
        (completion,) = llm.generate(["def fibonacci(n):\n"], quire.SamplingParams(max_tokens=24))
        print(f"attention by {llm.attention_backend}: {completion.text!r}")
