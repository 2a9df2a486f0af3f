"""Rows that a step's sequences have in a tensor, brought into one batch and back.

A recurrent layer's states are such a tensor: a row for each slot. Where a step is run, torch moves
them. A step that was captured has rows of padding too. Only a kernel can leave those out: a tensor
on the device tells it where to read and write.
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
    """By torch: every slot is a sequence's."""

    def take(self, held: Tensor, slots: Tensor) -> Tensor:
        return held[slots]

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        held[slots] = new


def find_padded_rows(device: torch.device) -> RowMover | str:
    """What moves rows and leaves out padding, or why nothing does there.

    The slot of padding is -1: it is taken as zeros, and put nowhere. No address is touched for it.
    """
    try:
        from quire.attention.triton.gpu import find_gpu
        from quire.attention.triton.rows import TritonRows
    except (ImportError, OSError) as error:  # torch for CUDA brings it, one for the CPU not
        return f"Triton cannot be imported ({error})"
    gpu = find_gpu(device)
    return gpu if isinstance(gpu, str) else TritonRows()
