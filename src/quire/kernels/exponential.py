"""2 ** x on sixteen floats."""

from math import factorial, log

from llvmlite.ir import Value

from quire.kernels.language import FLOATS, INTS, Code


def exp2(code: Code, x: Value, degree: int = 6) -> Value:
    """Compute 2 ** x for x ≤ 127: to about 2e-4, 4e-6, 1e-7 for degree 3, 4, 5; to rounding for 6.

    2 ** x = 2 ** n * 2 ** r, n the nearest whole number: a polynomial for r, and n added to the
    exponent's bits.
    """
    x = code.max(code.floats(-126.0), x)  # in this order: what is no number stays none
    n = code.round(x)
    r = code.minus(x, n)
    coefficients = exp2_coefficients(degree)
    result = code.floats(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = code.fma(result, r, code.floats(coefficient))
    exponent = code.b.shl(code.b.fptosi(n, INTS), code.ints(23))
    return code.b.bitcast(code.b.add(code.b.bitcast(result, INTS), exponent), FLOATS)


def exp2_coefficients(degree: int) -> list[float]:
    """Fit 2 ** r for |r| ≤ 1/2: Taylor's polynomial, its last terms spread by Chebyshev."""
    terms = [log(2) ** n / factorial(n) for n in range(degree + 3)]
    # Economize: x ** n is lowered by T_n / 2 ** (n - 1) on [-1/2, 1/2].
    for n in range(degree + 2, degree, -1):
        chebyshev = _chebyshev(n)
        scale = terms[n] / (chebyshev[n] * 2.0**n)
        for power in range(n + 1):
            terms[power] -= scale * chebyshev[power] * 2.0**power
    return terms[: degree + 1]


def _chebyshev(n: int) -> list[int]:
    """Compute the coefficients of T_n."""
    before, now = [1], [0, 1]
    for _ in range(n - 1):
        doubled = [0, *(2 * c for c in now)]
        before, now = now, [c - d for c, d in zip(doubled, [*before, 0, 0], strict=False)]
    return now
