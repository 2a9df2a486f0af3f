"""What the kernels multiply: elements as they are kept, made factors of a product, and rounded.

Triton's interpreter has no products of bfloat16, cuts its bits off where a GPU rounds, and mistakes
its smallest numbers. With ``EMULATED`` the bits are moved by hand, and the same factors travel in
float32. float8 is converted by the GPU where it can (``FP8_CONVERTS``), else bit by bit.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """float32 in another dtype: to nearest, ties to even."""
    if EMULATED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        y = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def wide(x, EMULATED: tl.constexpr):
    """Any float in float32."""
    if EMULATED and x.dtype == tl.bfloat16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def factor(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """float32 as one side of a product in a dtype."""
    y = rounded(x, DTYPE, EMULATED)
    if EMULATED:
        y = wide(y, EMULATED)
    return y


@triton.jit
def stored_factor(
    x, KIND: tl.constexpr, DTYPE: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr
):
    """What is kept, as one side of a product. All codes are exact in all dtypes."""
    if KIND == "fp8":
        x = x.to(tl.float8e4nv, bitcast=True) if FP8_CONVERTS else from_fp8(x)
    return wide(x, EMULATED) if EMULATED else x.to(DTYPE)


@triton.jit
def from_fp8(codes):
    """u8 → float32. The same exponent and mantissa, with another bias: 127 against 7."""
    codes = codes.to(tl.uint32)
    magnitude = codes & 0x7F
    bits = ((codes & 0x80) << 24) | (magnitude << 20)
    # A code's smallest numbers are float32's smallest here, which a GPU multiplies exactly.
    x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where(magnitude == 0x7F, float("nan"), x)


@triton.jit
def to_fp8(x):
    """float32 within ±448, or NaN → u8: to nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Below the smallest normal, 2 ** -6, codes are multiples of 2 ** -9: the last bit of 2 ** 14.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    # Else 20 of 23 bits of the mantissa go, and the bias is 7 and not 127.
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120 << 23)) >> 20
    code = tl.where(bits < (121 << 23), small, normal)
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)
