"""Activations of sixteen floats."""

from collections.abc import Callable
from functools import partial
from math import pi, sqrt

from llvmlite.ir import Value
from torch import Tensor
from torch.nn import functional

from quire.kernels.language import LOG2_E, Code, exp2

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
# Of erfc in t = 1 / (1 + |x| / 2): its error is below 1.2e-7 of the value everywhere.
# Source: Press et al., Numerical Recipes, erfcc.
_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806,
    0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277,
)  # fmt: skip
_MOST = 127.0  # 2 ** this is finite


def torch_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return torch's function, [n] → [n], for an activation of ``ACTIVATIONS``."""
    if name == "silu":
        return functional.silu
    return partial(functional.gelu, approximate="tanh" if name == "gelu_tanh" else "none")


def activate(code: Code, x: Value, name: str) -> Value:
    """Compute an activation of sixteen floats."""
    if name == "silu":
        return _over_one_plus_exp(code, x, code.b.fmul(x, code.floats(-LOG2_E)))
    if name == "gelu_tanh":
        # 1 + tanh(u) = 2 / (1 + exp(-2u))
        square = code.b.fmul(x, x)
        factor = -2 * LOG2_E * sqrt(2 / pi)
        inner = code.fma(square, code.floats(factor * 0.044715), code.floats(factor))
        return _over_one_plus_exp(code, x, code.b.fmul(x, inner))
    return _gelu(code, x)


def _over_one_plus_exp(code: Code, x: Value, log2: Value) -> Value:
    """x / (1 + 2 ** log2)."""
    bounded = code.min(code.floats(_MOST), log2)  # in this order: what is no number stays none
    return code.b.fdiv(x, code.b.fadd(code.floats(1.0), exp2(code, bounded)))


def _gelu(code: Code, x: Value) -> Value:
    """x Φ(x), Φ(x) = erfc(-x / √2) / 2."""
    zero, one = code.floats(0.0), code.floats(1.0)
    u = code.b.fmul(x, code.floats(sqrt(0.5)))
    size = code.max(u, code.b.fsub(zero, u))
    t = code.b.fdiv(one, code.fma(size, code.floats(0.5), one))
    series = code.floats(_ERFC[-1])
    for coefficient in reversed(_ERFC[:-1]):
        series = code.fma(series, t, code.floats(coefficient))
    exponent = code.b.fmul(code.b.fsub(series, code.b.fmul(size, size)), code.floats(LOG2_E))
    tail = code.b.fmul(code.b.fmul(t, exp2(code, exponent)), code.floats(0.5))
    negative = code.b.fcmp_ordered("<", x, zero)
    return code.b.fmul(x, code.b.select(negative, tail, code.b.fsub(one, tail)))
