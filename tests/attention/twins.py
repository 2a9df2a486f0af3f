"""The CPU's kernels again, in numpy and float64, as their equations say. Nothing is fast here."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LOWEST = -1e30
SLACK = 8.0

# -- formats --------------------------------------------------------------------------------------

# Of a short float: bits of the mantissa, the smallest normal exponent, the largest number.
SHORT_FLOATS = {
    "f16": (10, -14, 65504.0),
    "bf16": (7, -126, 2.0**128 - 2.0**120),
    "f8": (3, -6, 448.0),
}


def decode(kind: str, bits: npt.NDArray[np.unsignedinteger]) -> Array:
    """The numbers that bits stand for."""
    if kind == "f32":
        return wide(bits.view(np.float32))
    if kind == "f16":
        return wide(bits.view(np.float16))
    if kind == "bf16":
        return wide((bits.astype(np.uint32) << 16).view(np.float32))
    if kind == "i8":
        return bits.view(np.int8).astype(np.float64)
    assert kind == "f8"
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent, mantissa = (bits >> 3 & 0xF).astype(int), (bits & 7) / 8
    small = mantissa * 2.0**-6
    value = np.where(exponent == 0, small, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    return np.where(bits & 0x7F == 0x7F, np.nan, sign * value)


def wide(x: npt.NDArray[np.floating]) -> Array:
    """In float64; a NaN may be of any sort."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def nearest(kind: str, x: npt.NDArray[np.floating]) -> Array:
    """The nearest number of a format, ties to even; beyond the largest infinity, or in f8 that."""
    x = wide(x)
    if kind == "f32":
        return x.astype(np.float32).astype(np.float64)
    if kind == "i8":
        return np.trunc(x)
    mantissa_bits, lowest, largest = SHORT_FLOATS[kind]
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(x))), lowest)
        # log2 may round up to the next whole number.
        exponent = np.where(2.0**exponent > np.abs(x), np.maximum(exponent - 1, lowest), exponent)
        ulp = 2.0 ** (exponent - mantissa_bits)
        found = np.where(np.isfinite(x), np.rint(x / ulp) * ulp, x)
    if kind == "f8":
        return np.clip(found, -largest, largest)
    return np.where(np.abs(found) > largest, np.copysign(np.inf, x), found)


def bf16(x: Array) -> Array:
    return nearest("bf16", x)


# -- one query a sequence -------------------------------------------------------------------------


def dot_rows(q: Array, k: Array) -> Array:
    """q [G, D], k [t, D] → s [G, t]."""
    return q @ k.T


def weigh_rows(s: Array, c: float, m: Array, sums: Array, o: Array) -> tuple[Array, ...]:
    """s [G, t], m [G], l [G], o [G, Dv] → p, m, l, o."""
    new = np.maximum(m, (s * c).max(1))
    by = np.exp2(m - new)
    p = np.exp2(s * c - new[:, None])
    return p, new, sums * by + p.sum(1), o * by[:, None]


def add_rows(p: Array, v: Array, o: Array) -> Array:
    """p [G, t], v [t, Dv], o [G, Dv] → o."""
    return o + p @ v


# -- panels ---------------------------------------------------------------------------------------


def score(k: Array, q: Array) -> Array:
    """k [t, D], q [i, D] → Sᵀ [t, i]."""
    return k @ q.T


def cap(s: Array, scale: float, most: float) -> Array:
    return most * np.tanh(s * scale / most)


def weigh(
    s: Array, c: float, m: Array, sums: Array, o: Array, read: npt.NDArray[np.bool_] | None = None
) -> tuple[Array, ...]:
    """Sᵀ [t, i], m [i], l [i], Oᵀ [d, i] → Pᵀ, m, l, Oᵀ.  read [t, i]: None where all is read.

    m follows the maximum only when it is far behind.
    """
    seen = np.ones(s.shape, bool) if read is None else read
    top = np.where(seen, s, LOWEST).max(0) * c
    new = np.where(top > m + SLACK, top, m)
    by = np.exp2(np.maximum(m - new, -126))
    p = np.where(seen, np.exp2(np.where(seen, s * c - new, 0.0)), 0.0)
    return p, new, sums * by + p.sum(0), o * by


def add_values(v: Array, p: Array, o: Array) -> Array:
    """v [t, d], Pᵀ [t, i], Oᵀ [d, i] → Oᵀ."""
    return o + v.T @ p


# -- results --------------------------------------------------------------------------------------


def finish(m: float, total: float, o: Array, sink: float | None) -> Array:
    """o [Dv] over its sum; a sink is one more score, whose value is nothing."""
    if sink is None:
        return o / total
    return o * 2.0**m / (total * 2.0**m + np.exp(sink))


def merge(m: Array, sums: Array, o: Array) -> tuple[Array, ...]:
    """m [P, R], l [P, R], o [P, R, Dv] of P parts → those of all."""
    top = m.max(0)
    by = np.exp2(m - top)
    return top, (sums * by).sum(0), (o * by[..., None]).sum(0)
