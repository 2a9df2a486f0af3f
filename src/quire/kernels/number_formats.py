"""What elements of memory may be, and how they become floats and floats become them."""

from collections.abc import Mapping
from types import MappingProxyType

from llvmlite import ir
from llvmlite.ir import Value

from quire.kernels.language import (
    BFLOATS,
    BYTES,
    F32,
    FLOATS,
    HALVES,
    I8,
    I16,
    I32,
    INTS,
    LANES,
    SHORTS,
    Code,
    Int,
)

# What rows of memory may hold, and the bytes of one element.
KIND_BYTES: Mapping[str, int] = MappingProxyType({"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "f8": 1})
# How far a byte of float8_e4m3fn, shifted to a float16's place, is from its value: their exponents
# count from 7 and from 15.
_F8_FACTOR = 2.0**8


def kind_factor(kind: str) -> float:
    """Return the factor of a loaded element of a kind."""
    return _F8_FACTOR if kind == "f8" else 1.0


def load_as(code: Code, address: Int, kind: str = "f32", count: int = LANES) -> Value:
    """Load up to sixteen elements of a row as floats, with zeros behind ``count``.

    An int8 is its code and a float8 is 2 ** -8 of its value: ``kind_factor`` has the factor.
    """
    if kind == "f32":
        return code.read_part(address, F32, count, LANES)
    if kind == "f16":
        return _from_halves(code, code.read_part(address, I16, count, LANES))
    if kind == "bf16":
        wide = code.b.zext(code.read_part(address, I16, count, LANES), INTS)
        return code.b.bitcast(code.b.shl(wide, code.ints(16)), FLOATS)
    codes = code.read_part(address, I8, count, LANES)
    if kind == "i8":
        return code.b.sitofp(code.b.sext(codes, INTS), FLOATS)
    wide = code.b.zext(codes, SHORTS)
    sign = code.b.and_(code.b.shl(wide, code.shorts(8)), code.shorts(0x8000))
    size = code.b.and_(wide, code.shorts(0x7F))
    nan = code.b.icmp_unsigned("==", size, code.shorts(0x7F))
    rest = code.b.select(nan, code.shorts(0x7E00), code.b.shl(size, code.shorts(7)))
    return _from_halves(code, code.b.or_(sign, rest))


def _from_halves(code: Code, bits: Value) -> Value:
    """Make floats of sixteen float16."""
    if code.isa.f16:
        return code.b.fpext(code.b.bitcast(bits, HALVES), FLOATS)
    # Exponents count from 15, or from 127: what is at hand is 2 ** -112 of the value.
    wide = code.b.zext(bits, INTS)
    rest = code.b.shl(code.b.and_(wide, code.ints(0x7FFF)), code.ints(13))
    value = code.b.fmul(code.b.bitcast(rest, FLOATS), code.floats(2.0**112))
    # Infinity and what is no number have all bits of an exponent, there as here.
    special = code.b.icmp_unsigned(">=", rest, code.ints(0x7C00 << 13))
    exponent = code.b.select(special, code.ints(0x7F800000), code.ints(0))
    found = code.b.or_(code.b.bitcast(value, INTS), exponent)
    sign = code.b.shl(code.b.and_(wide, code.ints(0x8000)), code.ints(16))
    return code.b.bitcast(code.b.or_(found, sign), FLOATS)


def store_as(code: Code, value: Value, address: Int, kind: str, count: int = LANES) -> None:
    """Store the first ``count`` of sixteen floats as the nearest elements of a kind."""
    if kind == "bf16":
        value = code.b.trunc(to_bf16(code, value), SHORTS)
    elif kind == "f16":
        value = _to_halves(code, value)
    elif kind == "f8":
        value = _to_float8(code, value)
    elif kind == "i8":
        value = code.b.trunc(code.b.fptosi(value, INTS), BYTES)
    if count == 1:  # LLVM ends the process over some vectors of a single float
        value = code.b.extract_element(value, ir.Constant(I32, 0))
    elif count < LANES:
        value = code.shuffle(value, value, list(range(count)))
    code.write(value, address)


def rounded(code: Code, value: Value, kind: str) -> Value:
    """Round floats to the nearest f32, f16 or bf16, as floats."""
    if kind == "f32":
        return value
    if kind == "bf16":
        both = narrow(code, value, value)
        bits = code.b.zext(code.shuffle(both, both, list(range(LANES))), INTS)
        return code.b.bitcast(code.b.shl(bits, code.ints(16)), FLOATS)
    assert kind == "f16"
    return _from_halves(code, code.b.bitcast(_to_halves(code, value), SHORTS))


def _to_halves(code: Code, value: Value) -> Value:
    if code.isa.f16:
        return code.b.fptrunc(value, HALVES)
    return code.b.trunc(_narrow_float(code, value, exponent_bits=5, mantissa_bits=10), SHORTS)


def _to_float8(code: Code, value: Value) -> Value:
    """Round to float8_e4m3fn; numbers that are too large become the largest, ±448."""
    nan = code.b.fcmp_unordered("uno", value, value)
    value = code.min(code.max(value, code.floats(-448.0)), code.floats(448.0))
    bits = _narrow_float(code, value, exponent_bits=4, mantissa_bits=3)
    return code.b.trunc(code.b.select(nan, code.ints(0x7F), bits), BYTES)


def _narrow_float(code: Code, value: Value, *, exponent_bits: int, mantissa_bits: int) -> Value:
    """Round to a shorter float, ties to even, and return its bits.

    Numbers that are too large become infinity, where the format has one. Source: F. Giesen, half
    conversion.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    shift = 23 - mantissa_bits
    bits = code.b.bitcast(value, INTS)
    magnitude = code.b.and_(bits, code.ints(0x7FFFFFFF))
    # Below the smallest normal number, an addition of floats does the shift and the rounding.
    magic = ((127 - bias) + shift + 1) << 23
    small = code.b.bitcast(
        code.b.fadd(code.b.bitcast(magnitude, FLOATS), code.b.bitcast(code.ints(magic), FLOATS)),
        INTS,
    )
    small = code.b.sub(small, code.ints(magic))
    odd = code.b.and_(code.b.lshr(magnitude, code.ints(shift)), code.ints(1))
    moved = code.b.add(magnitude, code.ints(((bias - 127) << 23) + (1 << (shift - 1)) - 1))
    normal = code.b.lshr(code.b.add(moved, odd), code.ints(shift))
    is_small = code.b.icmp_unsigned("<", magnitude, code.ints((128 - bias) << 23))
    found = code.b.select(is_small, small, normal)
    if exponent_bits == 5:
        infinity = code.ints(0x7C00)
        above = code.b.icmp_unsigned(">=", magnitude, code.ints((127 + 16) << 23))
        nan = code.b.icmp_unsigned(">", magnitude, code.ints(0x7F800000))
        found = code.b.select(above, code.b.select(nan, code.ints(0x7E00), infinity), found)
    sign = code.b.lshr(
        code.b.and_(bits, code.ints(-(2**31))), code.ints(31 - exponent_bits - mantissa_bits)
    )
    return code.b.or_(found, sign)


def to_bf16(code: Code, x: Value) -> Value:
    """Round to bfloat16, ties to even: its bits are in the low half of each lane."""
    bits = code.b.bitcast(x, INTS)
    odd = code.b.and_(code.b.lshr(bits, code.ints(16)), code.ints(1))
    rounded = code.b.add(bits, code.b.add(odd, code.ints(0x7FFF)))
    # The carry of a number that is none would make it one.
    nan = code.b.fcmp_unordered("uno", x, x)
    return code.b.lshr(code.b.select(nan, code.ints(0x7FC00000), rounded), code.ints(16))


def pair_bf16(code: Code, low: Value, high: Value) -> Value:
    """Pack the nearest bfloat16 to ``low`` and to ``high`` into sixteen words of two."""
    shorts = narrow(code, low, high)
    picks = [lane + half * LANES for lane in range(LANES) for half in (0, 1)]
    return code.b.bitcast(code.shuffle(shorts, shorts, picks), INTS)


def narrow(code: Code, low: Value, high: Value) -> Value:
    """Round 32 floats to the nearest bfloat16, as 32 shorts."""
    if code.isa.bf16_convert:
        both = code.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", BFLOATS, high, low)
        return code.b.bitcast(both, ir.VectorType(I16, 2 * LANES))
    first, second = (code.b.trunc(to_bf16(code, x), SHORTS) for x in (low, high))
    return code.shuffle(first, second, list(range(2 * LANES)))
