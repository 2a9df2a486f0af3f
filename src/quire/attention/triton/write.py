"""The write side's kernel: each token's key and value into its slot, quantized on the way.

Source of the formats: ``quire.kv.storage.entries``, whose bits it reproduces (products and sums
must not be fused for that). A token with the slot -1 is kept nowhere.
"""

import triton
import triton.language as tl

from quire.attention.triton.elements import rounded, to_fp8, wide


@triton.jit(do_not_specialize_on_alignment=["slots"])
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
def _store(  # noqa: PLR0913
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
        code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if FP8_CONVERTS else to_fp8(y)
        tl.store(to, code, mask)
    else:
        tl.store(to, rounded(wide(x, EMULATED), to.dtype.element_ty, EMULATED), mask)
