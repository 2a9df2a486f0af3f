"""What the kernels multiply: elements as they are kept, made factors of a product, and rounded.

Triton's interpreter has no products of bfloat16 and cuts its bits off where a GPU rounds; with
``EMULATED`` the same numbers travel in float32. float8 is converted by the GPU where it can
(``FP8_CONVERTS``: compute capability 8.9), else bit by bit.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """float32 that a dtype has: to nearest, ties to even."""
    if EMULATED:
        if DTYPE == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def factor(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """float32 as one side of a product in a dtype."""
    y = rounded(x, DTYPE, EMULATED)
    if EMULATED:
        y = y.to(tl.float32)
    return y


@triton.jit
def stored_factor(
    x, KIND: tl.constexpr, DTYPE: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr
):
    """What is kept, as one side of a product. All codes are exact in all dtypes."""
    if KIND == "fp8":
        if FP8_CONVERTS:
            y = x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            y = from_fp8(x)
    else:
        y = x
    if EMULATED:
        return y.to(tl.float32)
    else:
        return y.to(DTYPE)


@triton.jit
def from_fp8(codes):
    """u8 → float16. The same sign, exponent and mantissa, with another bias: 15 against 7."""
    codes = codes.to(tl.uint16)
    magnitude = codes & 0x7F
    bits = ((codes & 0x80) << 8) | (magnitude << 7)
    x = bits.to(tl.float16, bitcast=True) * 256.0
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
