"""Rows that a step's sequences have in a tensor, brought into one batch and back.

A recurrent layer's states are such a tensor: a row for each slot. Where a step is run, torch does
it. A step that was captured has rows of nobody too, which only a kernel can leave out: what a
tensor says on the device decides where it reads and writes.
"""

from typing import Protocol, final

import torch
from torch import Tensor


class RowMover(Protocol):
    """Moves rows by their slots, which lie on the device."""

    def take(self, held: Tensor, slots: Tensor) -> Tensor:
        """Copies of some rows: held [slots, …], slots i64[S] → [S, …], in order."""
        ...

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        """Overwrite some rows: held [slots, …], slots i64[S], new [S, …]."""
        ...


@final
class TorchRows:
    """By torch: every slot is somebody's."""

    def take(self, held: Tensor, slots: Tensor) -> Tensor:
        return held[slots]

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        held[slots] = new


def find_padded_rows(device: torch.device) -> RowMover | str:
    """What knows rows of nobody, or why nothing does there.

    Their slot is -1: they are taken as zeros, and put nowhere. No address is touched for them.
    """
    try:
        from quire.attention.triton import TritonRows, find_gpu
    except (ImportError, OSError) as error:  # torch for CUDA brings it, one for the CPU not
        return f"Triton cannot be imported ({error})"
    gpu = find_gpu(device)
    return gpu if isinstance(gpu, str) else TritonRows()
