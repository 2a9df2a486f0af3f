"""Rows of recurrent states by their slots, of padding too, by the kernels of ``move``."""

from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

from quire.attention.triton.move import put, take
from quire.devices import on_device
from quire.units import ceil_div

_OPTIONS = MappingProxyType(
    {
        "ELEMENTS": 2048,  # of a program: a part of one row
        "num_warps": 4,
        "enable_fp_fusion": False,  # there is nothing to be fused
    }
)
_CODES = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


@final
class TritonRows:
    """A ``RowMover`` that leaves out padding, whose slot is -1."""

    def take(self, held: Tensor, slots: Tensor) -> Tensor:
        """Raises: ValueError for slots of another kind, or rows with gaps inside."""
        _check(held, slots)
        out = held.new_empty(len(slots), *held.shape[1:])
        length = held[0].numel()
        with on_device(held.device):
            take[_grid(slots, length)](
                _codes(out), _codes(held), slots, held.stride(0), length, **_OPTIONS
            )
        return out

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        """Raises: ValueError as ``take`` does, and for rows of another kind; none is written."""
        _check(held, slots)
        if new.shape != (len(slots), *held.shape[1:]) or new.dtype != held.dtype:
            raise ValueError(
                f"rows of {list(new.shape)} in {new.dtype} for {len(slots)} slots of "
                f"{list(held.shape[1:])} in {held.dtype}"
            )
        length = held[0].numel()
        with on_device(held.device):
            put[_grid(slots, length)](
                _codes(held),
                _codes(new.contiguous()),
                slots,
                held.stride(0),
                length,
                **_OPTIONS,
            )


def _grid(slots: Tensor, length: int) -> tuple[int, int]:
    return len(slots), ceil_div(length, _OPTIONS["ELEMENTS"])


def _codes(x: Tensor) -> Tensor:
    return x.view(_CODES[x.element_size()])


def _check(held: Tensor, slots: Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError(f"slots are {slots.dtype} of {list(slots.shape)}, and not i64 in a row")
    if slots.device != held.device:
        raise ValueError(f"slots are on {slots.device}, and the rows on {held.device}")
    if not held[0].is_contiguous():
        raise ValueError(f"rows of {list(held.shape[1:])} have gaps: strides {held.stride()}")
