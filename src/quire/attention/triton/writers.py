"""Writers by Triton's kernels: a layer's entries, and rows of recurrent states."""

from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from quire.attention.gather import check_entries
from quire.attention.triton.kernels import put, take, write
from quire.attention.triton.launch import ELEMENTS, Gpu, address_of, alignment_of, kept_as, room
from quire.devices import on_device
from quire.kv import LayerView
from quire.units import ceil_div

_ELEMENTS = 2048  # of a program: some heads of one token


@final
class TritonWriter:
    """Writes one layer's entries."""

    __slots__ = ("_gpu", "_grid", "_options", "_strides", "_targets", "_view")

    def __init__(self, view: LayerView, gpu: Gpu) -> None:
        self._view, self._gpu = view, gpu
        (_, kv_heads, _, key), value = view.k.shape, view.v.shape[-1]
        kept = kept_as(view.k.dtype)
        k, v = view.k, view.v
        scale_strides = (0, 0, 0) if view.k_scale is None else view.k_scale.stride()
        heads = min(1 << (kv_heads - 1).bit_length(), max(1, _ELEMENTS // room(max(key, value))))
        self._grid = ceil_div(kv_heads, heads)
        self._targets = tuple(map(address_of, (k, v, view.k_scale, view.v_scale)))
        self._strides = *k.stride(), *v.stride(), *scale_strides
        self._options: dict[str, Any] = dict(
            PER_ROW=view.slots_per_row,
            KV_HEADS=kv_heads,
            HEADS=heads,
            KEY=key,
            VALUE=value,
            KEY_ROOM=room(key),
            VALUE_ROOM=room(value),
            STORED=ELEMENTS[k.dtype],
            ALIGNED=alignment_of(k, v),
            KEPT=kept,
            FP8_CONVERTS=gpu.fp8_converts,
            EMULATED=gpu.emulated,
        )

    def __call__(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put entries into their slots: slots i64[T], k [T, K, D], v [T, K, Dv].

        Raises: ValueError for other shapes, dtypes or devices; then nothing has been written.
        """
        check_entries(self._view, len(slots), slots.dtype, k, v)
        kept_on = self._view.k.device
        if not slots.device == k.device == v.device == kept_on:
            raise ValueError(
                f"slots are on {slots.device}, keys on {k.device} and values on {v.device}: this "
                f"layer lies on {kept_on}"
            )
        if not len(slots):
            return
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        with on_device(k.device):
            write[(len(slots), self._grid)](
                slots, k, v, *self._targets, *k.stride()[:2], *v.stride()[:2], *self._strides,
                num_warps=4, enable_fp_fusion=False, **self._options,
            )  # fmt: skip


# -- recurrent states ------------------------------------------------------------------------------

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
        """Copy rows [n, …] out of ``held`` [slots, …] by slots i64[n]; padding is zeros.

        Raises: ValueError for slots of another kind, or rows with gaps inside.
        """
        _check(held, slots)
        out = held.new_empty(len(slots), *held.shape[1:])
        length = held[0].numel()
        with on_device(held.device):
            take[_grid(slots, length)](
                _codes(out),
                address_of(held),
                slots,
                held.stride(0),
                length,
                ALIGNED=alignment_of(held),
                **_OPTIONS,
            )
        return out

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        """Copy ``new`` [n, …] into ``held`` [slots, …] by slots i64[n], padding left out.

        Raises: ValueError as ``take`` does, and for rows of another kind; none is written.
        """
        _check(held, slots)
        if new.shape != (len(slots), *held.shape[1:]) or new.dtype != held.dtype:
            raise ValueError(
                f"rows of {list(new.shape)} in {new.dtype} for {len(slots)} slots of "
                f"{list(held.shape[1:])} in {held.dtype}"
            )
        length = held[0].numel()
        with on_device(held.device):
            put[_grid(slots, length)](
                address_of(held),
                _codes(new.contiguous()),
                slots,
                held.stride(0),
                length,
                ALIGNED=alignment_of(held),
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
