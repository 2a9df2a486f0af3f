"""The write side: each token's key and value into its slot, quantized on the way.

Source of the formats: ``quire.strategies.quantized``, whose bits these kernels reproduce. A token
with the slot -1 is kept nowhere.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.attention.triton.elements import rounded, to_fp8, wide
from quire.attention.triton.gpu import Gpu
from quire.attention.triton.shape import kept_as
from quire.attention.triton.tiles import room
from quire.strategies import LayerView
from quire.units import ceil_div

_ELEMENTS = 2048  # of a program: some heads of one token


@triton.jit
def write(  # noqa: PLR0913
    slots, from_k, from_v, k, v, k_scale, v_scale,
    from_k_token, from_k_head, from_v_token, from_v_head,
    k_row, k_head, k_token, k_dim, v_row, v_head, v_token, v_dim,
    scale_row, scale_head, scale_token,
    PER_ROW: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_ROOM: tl.constexpr, VALUE_ROOM: tl.constexpr,
    KEPT: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    row, inside = slot // PER_ROW, slot % PER_ROW
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    own = head < KV_HEADS
    scale_at = row * scale_row + inside * scale_token + head * scale_head

    at = tl.arange(0, KEY_ROOM)[None, :]
    mask = own[:, None] & (at < KEY)
    x = tl.load(from_k + token * from_k_token + head[:, None] * from_k_head + at, mask, 0.0)
    to = k + row * k_row + inside * k_token + head[:, None] * k_head + at * k_dim
    _store(to, k_scale, scale_at, x, own, mask, KEPT, FP8_CONVERTS, EMULATED)

    at = tl.arange(0, VALUE_ROOM)[None, :]
    mask = own[:, None] & (at < VALUE)
    x = tl.load(from_v + token * from_v_token + head[:, None] * from_v_head + at, mask, 0.0)
    to = v + row * v_row + inside * v_token + head[:, None] * v_head + at * v_dim
    _store(to, v_scale, scale_at, x, own, mask, KEPT, FP8_CONVERTS, EMULATED)


@triton.jit
def _store(
    to, scales, scale_at, x, own, mask,
    KEPT: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """x [heads, width] as it is kept."""
    if KEPT == "int8":
        x = wide(x, EMULATED)
        # As integers, floats without a sign are in the same order, and NaN comes last.
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
        most = tl.full(largest.shape, 127.0, tl.float32)
        tl.store(scales + scale_at, tl.div_rn(largest, most), own)
        y = x * tl.div_rn(most, largest)[:, None]
        y = tl.where(y == y, y, 0.0)
        y = tl.minimum(tl.maximum(y, -127.0), 127.0)
        y = (y + 12582912.0) - 12582912.0  # 1.5 · 2 ** 23: nothing is left behind the point
        tl.store(to, y.to(tl.int8), mask)
    elif KEPT == "fp8":
        x = wide(x, EMULATED)
        y = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
        if FP8_CONVERTS:
            code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = to_fp8(y)
        tl.store(to, code, mask)
    else:
        tl.store(to, rounded(wide(x, EMULATED), to.dtype.element_ty, EMULATED), mask)


class TritonWriter:
    """Writes one layer's entries."""

    __slots__ = ("_gpu", "_options", "_grid", "_strides", "_targets", "_view")

    def __init__(self, view: LayerView, gpu: Gpu) -> None:
        self._view, self._gpu = view, gpu
        (_, kv_heads, _, key), value = view.k.shape, view.v.shape[-1]
        kept = kept_as(view.k.dtype)
        k, v = view.k, view.v
        if kept == "fp8":
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        scale_strides = (0, 0, 0) if view.k_scale is None else view.k_scale.stride()
        heads = min(1 << (kv_heads - 1).bit_length(), max(1, _ELEMENTS // room(max(key, value))))
        self._grid = ceil_div(kv_heads, heads)
        self._targets = k, v, view.k_scale, view.v_scale
        self._strides = *k.stride(), *v.stride(), *scale_strides
        self._options: dict[str, Any] = dict(
            PER_ROW=view.slots_per_row,
            KV_HEADS=kv_heads,
            HEADS=heads,
            KEY=key,
            VALUE=value,
            KEY_ROOM=room(key),
            VALUE_ROOM=room(value),
            KEPT=kept,
            FP8_CONVERTS=gpu.fp8_converts,
            EMULATED=gpu.emulated,
        )

    def __call__(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put entries into their slots: slots i64[T], k [T, K, D], v [T, K, Dv].

        Raises: ValueError for other shapes, dtypes or devices; then nothing has been written.
        """
        self._check(slots, k, v)
        if not len(slots):
            return
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        with torch.cuda.device_of(k):
            write[(len(slots), self._grid)](
                slots, k, v, *self._targets, *k.stride()[:2], *v.stride()[:2], *self._strides,
                num_warps=4, enable_fp_fusion=False, **self._options,
            )  # fmt: skip

    def _check(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        (_, heads, _, key), value = self._view.k.shape, self._view.v.shape[-1]
        num_tokens = len(slots)
        if k.shape != (num_tokens, heads, key) or v.shape != (num_tokens, heads, value):
            raise ValueError(
                f"{num_tokens} slots for keys {list(k.shape)} and values {list(v.shape)}: this "
                f"layer keeps {heads} heads of {key} and {value}"
            )
        if slots.dtype != torch.int64 or v.dtype != k.dtype:
            raise ValueError(f"slots are {slots.dtype}, keys {k.dtype}, values {v.dtype}")
        kept_on = self._view.k.device
        if not slots.device == k.device == v.device == kept_on:
            raise ValueError(
                f"slots are on {slots.device}, keys on {k.device} and values on {v.device}: this "
                f"layer lies on {kept_on}"
            )
