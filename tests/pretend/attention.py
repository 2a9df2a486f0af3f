"""Attention by kernels: pretended ones, which compute as the reference does.

They read what a ``PlacedBatch`` says when they run, which may be long after they were launched, and
nothing of the host's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretend.tensor import PretendTensor
from quire.attention import AttentionBatch, NoHostPart, ReferenceAttention
from quire.attention.gather import output_width
from quire.kv import LayerView
from quire.kv.storage.entries import quantize
from quire.spec import AttentionSpec


class PretendAttention:
    """An ``AttentionBackend`` of the device that is not there."""

    name = "pretend"
    plays = None
    replays = NoHostPart()

    def __init__(self) -> None:
        self.make_writer = _Writer

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "it is for the device that is not there"

    def attend(
        self,
        q: Tensor,
        view: LayerView,
        batch: AttentionBatch,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(q, PretendTensor)
        placed = batch.on(q.device)
        assert batch.num_seqs == len(placed.context_lens)
        out = q.new_zeros(*q.shape[:2], output_width(spec))
        options = dict(spec=spec, scale=scale, softcap=softcap)
        size, longest = batch.block_size, placed.max_context_len
        numbers = placed.query_starts, placed.context_lens, placed.tables
        held = view.k, view.v, view.k_scale, view.v_scale, view.slots_per_row
        q.gpu.kernel(_attend, out, q, *held, *numbers, size, longest, sinks, options)
        return out


def _attend(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots_per_row: int,
    starts: Tensor,
    context_lens: Tensor,
    tables: Tensor,
    block_size: int,
    longest: int,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> None:
    assert starts.dtype == context_lens.dtype == tables.dtype == torch.int32
    assert int(context_lens.max()) <= longest, "a context is longer than was said"
    some = (context_lens > 0).nonzero()[:, 0]
    if not len(some):
        return
    first = [slice(int(starts[i]), int(starts[i + 1])) for i in some]
    batch = AttentionBatch(
        query_starts=np.cumsum([0, *(s.stop - s.start for s in first)]),
        context_lens=context_lens[some].long().numpy(),
        tables=tables[some].long(),
        slots=torch.zeros(0, dtype=torch.long),
        block_size=block_size,
    )
    view = LayerView(k=k, v=v, k_scale=k_scale, v_scale=v_scale, slots_per_row=slots_per_row)
    packed = torch.cat([q[s] for s in first])
    got = ReferenceAttention().attend(packed, view, batch, sinks=sinks, **options)
    for s, part in zip(first, got.split([s.stop - s.start for s in first]), strict=True):
        out[s] = part


class _Writer:
    """A slot of -1 is written nowhere."""

    def __init__(self, view: LayerView) -> None:
        self._view = view

    def __call__(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        assert isinstance(k, PretendTensor)
        view = self._view
        k.gpu.kernel(
            _write, slots, k, v, view.k, view.v, view.k_scale, view.v_scale, view.slots_per_row
        )


def _write(
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    held_k: Tensor,
    held_v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots_per_row: int,
) -> None:
    some = (slots >= 0).nonzero()[:, 0]
    for held, held_scale, new in ((held_k, k_scale, k), (held_v, v_scale, v)):
        codes, scales = quantize(new[some], held.dtype)
        for rows, part in ((held, codes), (held_scale, scales)):
            if rows is None or part is None:
                continue
            for slot, entry in zip(slots[some].tolist(), part, strict=True):
                row, offset = divmod(slot, slots_per_row)
                if row >= len(rows):  # the last ranges begin no row, but have addresses
                    offset, row = offset + (row - len(rows) + 1), len(rows) - 1
                rows[row, :, offset] = entry
