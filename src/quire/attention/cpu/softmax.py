"""Scores of a panel become weights: the online softmax, with a query in each lane.

Also what happens to scores before: the scales of int8 keys, and a softcap.
"""

from llvmlite.ir import Value

from quire.kernels.exponential import exp2
from quire.kernels.formats import pair_bf16
from quire.kernels.language import F32, INTS, LANES, LINE_BYTES, LOWEST, Code, Int

# How far (log2) a score may pass its query's maximum before everything is rescaled for it.
_SLACK = 8.0


def write_cap(code: Code) -> None:
    """(scores, count, factors): s becomes cap · tanh(s · scale / cap), in place.

    factors: 2 · log2(e) · scale / cap, cap. Source: tanh(x) = 1 - 2 / (1 + exp(2x)).
    """
    scores, count, factors = code.params
    into, cap = (code.splat(code.read(factors + n * 8, F32)) for n in range(2))
    one, two = code.floats(1.0), code.floats(2.0)

    def some(n: Int) -> None:
        address = scores + n * 4
        power = exp2(code, code.min(code.times(code.load(address), into), code.floats(126.0)))
        share = code.b.fdiv(two, code.plus(one, power))
        code.store(code.times(cap, code.minus(one, share)), address)

    code.each(count, some, step=LANES)
    code.end()


def write_scale(code: Code, keys: int) -> None:
    """(Sᵀ, scales of the keys): one panel's scores of int8 codes become scores."""
    scores, scales = code.params

    def token(t: Int) -> None:
        address = scores + t * LINE_BYTES
        scale = code.splat(code.read(scales + t * 4, F32))
        code.store(code.times(code.load(address), scale), address)

    code.each(keys, token)
    code.end()


def write_weigh(
    code: Code, *, keys: int, value_rows: int, pairs: bool, scaled: bool, masked: bool
) -> None:
    """One panel: (Sᵀ, Pᵀ, c, state, Oᵀ, first token, reach, scales).

    state: m[16], l[16]. reach: the first and the last token that each query reads, i32[2][16].
    scales: of each token's value, f32[keys], if they are ``scaled``. Pᵀ is left as ``pairs`` of
    bfloat16, of a token and the next one, or as floats.
    """
    scores, weights, factor_at, state, out, first_token, reach, scales = code.params
    factor = code.splat(code.read(factor_at, F32))
    ends = [code.read(reach + n * LINE_BYTES, INTS) for n in range(2)] if masked else []

    def score(t: Int) -> Value:
        value = code.load(scores + t * LINE_BYTES)
        if masked:
            token = code.splat((first_token + t).int32)
            from_low = code.b.icmp_signed(">=", token, ends[0])
            inside = code.b.and_(from_low, code.b.icmp_signed("<=", token, ends[1]))
            value = code.b.select(inside, value, code.floats(LOWEST))
            code.store(value, scores + t * LINE_BYTES)
        return value

    def highest(t: Int, found: list[Value]) -> list[Value]:
        return [code.max(score(t + n), top) for n, top in enumerate(found)]

    # Several maxima and sums at a time, for each waits for the one before.
    tops = code.loop(keys, [code.floats(LOWEST)] * 4, highest, step=4)
    top = code.max(code.max(tops[0], tops[1]), code.max(tops[2], tops[3]))
    _follow(code, code.times(top, factor), state, out, value_rows)
    shift = code.b.fneg(code.load(state))

    def weight(t: Int, total: Value) -> tuple[Value, Value]:
        """Of a token, and the sum with it."""
        value = code.load(scores + t * LINE_BYTES)
        found = exp2(code, code.fma(value, factor, shift), degree=3 if pairs else 6)
        if masked:
            seen = code.b.fcmp_unordered(">", value, code.floats(LOWEST))  # or is no number
            found = code.b.select(seen, found, code.floats(0.0))
        total = code.plus(total, found)
        if scaled:
            found = code.times(found, code.splat(code.read(scales + t * 4, F32)))
        return found, total

    def two(t: Int, sums: list[Value]) -> list[Value]:
        first, one = weight(t, sums[0])
        second, other = weight(t + 1, sums[1])
        if pairs:
            code.write(pair_bf16(code, first, second), weights + t * (LINE_BYTES // 2))
        else:
            code.store(first, weights + t * LINE_BYTES)
            code.store(second, weights + (t + 1) * LINE_BYTES)
        return [one, other]

    sums = code.plus(*code.loop(keys, [code.floats(0.0)] * 2, two, step=2))
    code.store(code.plus(code.load(state + LINE_BYTES), sums), state + LINE_BYTES)
    code.end()


def _follow(code: Code, top: Value, state: Int, out: Int, value_rows: int) -> None:
    """Where the new maximum is well above a query's old one, m, l and Oᵀ follow it."""
    old = code.load(state)
    above = code.b.fcmp_ordered(">", top, code.plus(old, code.floats(_SLACK)))

    def rescale() -> None:
        new = code.b.select(above, top, old)
        by = exp2(code, code.minus(old, new))
        code.store(new, state)

        def line(address: Int) -> None:
            code.store(code.times(code.load(address), by), address)

        line(state + LINE_BYTES)
        code.each(value_rows, lambda d: line(out + d * LINE_BYTES))

    code.when(code.any(above), rescale)
