"""Kernels for many queries at once: panels of sixteen queries against tiles of ``KEYS`` tokens.

Lanes are queries, so neither the maximum nor the sum of a query's scores crosses lanes, and keys
are used as they lie. For each tile of tokens and one key-value head:

    copy_rows    keys and values into one tile, as bfloat16 pairs or float32, zeros behind them
    multiply     Sᵀ[t][i]  = Σ_d k[t][d] · q[i][d]
    weigh        m[i]      = max(m[i], max_t Sᵀ[t][i] · c), for tokens that query i may read
                 Pᵀ[t][i]  = 2 ** (Sᵀ[t][i] · c - m[i])
                 l[i]     += Σ_t Pᵀ[t][i]    (l, Oᵀ first times 2 ** (old m - new m))
    multiply     Oᵀ[d][i] += Σ_t v[t][d] · Pᵀ[t][i]

A panel of Sᵀ, Pᵀ, Oᵀ or of the queries is contiguous: [rows][16]. "Words" are 32 bits: a float32,
or two bfloat16 that are multiplied as a pair, of neighbours along the sum.
"""

from dataclasses import dataclass, replace

from llvmlite import ir
from llvmlite.ir import Value

from quire.kernels import amx
from quire.kernels.exponential import exp2
from quire.kernels.language import F32, I16, I32, INTS, LANES, LINE_BYTES, LOWEST, Code, Int, Isa
from quire.kernels.number_formats import KIND_BYTES, load_as, narrow, pair_bf16
from quire.units import align_up

# -- softmax ---------------------------------------------------------------------------------------

# Scores of a panel become weights: the online softmax, with a query in each lane.
#
# Also what happens to scores before: the scales of int8 keys, and a softcap.


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


# -- panels ----------------------------------------------------------------------------------------


KEYS = 64  # tokens of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelShape:
    """What the kernels of this module are made for."""

    key_parts: tuple[int, ...]  # widths of what lies side by side in a tile's row of keys
    value_dim: int
    kind: str  # of keys and values in memory
    query_kind: str
    pairs: bool  # multiplied as pairs of bfloat16; else as float32
    tiles: bool = False  # and those by AMX

    @property
    def scaled_rows(self) -> bool:
        """Whether int8 becomes values while it is copied: parts of a key have their own scales.

        Else scores and weights are scaled, which are fewer.
        """
        return self.kind == "i8" and len(self.key_parts) > 1

    @property
    def scaled_scores(self) -> bool:
        return self.kind == "i8" and not self.scaled_rows

    @property
    def at_once(self) -> int:
        """Panels that go through a tile of tokens together: what they share and leave fits L1."""
        return 1 if self.tiles else 4

    @property
    def word_elements(self) -> int:
        return 2 if self.pairs else 1

    @property
    def key_words(self) -> int:
        """Of a row of keys or queries: padded with zeros to whole vectors."""
        return align_up(sum(self.key_parts), LANES * self.word_elements) // self.word_elements

    @property
    def value_rows(self) -> int:
        """Of Oᵀ: the width of a value, padded."""
        return align_up(self.value_dim, LANES)

    @property
    def weight_words(self) -> int:
        """Of a column of Pᵀ."""
        return KEYS // self.word_elements

    @property
    def value_row_bytes(self) -> int:
        """Of a row of values before it is paired with the next one."""
        return align_up(self.value_dim, 2 * LANES) * (2 if self.pairs else 4)


def write_panels(module: ir.Module, shape: PanelShape, isa: Isa) -> None:
    """Add the kernels for a shape to a module."""
    element = 2 if shape.pairs else 4
    key_bytes = shape.key_words * 4
    begin = 0
    for number, width in enumerate(shape.key_parts):
        last = number + 1 == len(shape.key_parts)
        padded = key_bytes // element - begin if last else width
        row = RowCopy(width=width, padded=padded, offset=begin * element, pairs=shape.pairs)
        key_row = replace(row, scaled=shape.scaled_rows)
        copy_rows(Code(module, f"copy_keys_{number}", 6, isa), shape.kind, key_row)
        copy_rows(Code(module, f"copy_query_{number}", 6, isa), shape.query_kind, row)
        begin += width
    padded = shape.value_row_bytes // element
    row = RowCopy(width=shape.value_dim, padded=padded, offset=0, pairs=shape.pairs)
    row = replace(row, scaled=shape.scaled_rows)
    copy_rows(Code(module, "copy_values", 6, isa), shape.kind, row)
    _transpose(Code(module, "transpose", 6, isa))
    if shape.pairs:
        write = _tile_values if shape.tiles else _pair_values
        write(Code(module, "pair_values", 2, isa), shape)
    multiply = amx.write_multiply if shape.tiles else _multiply
    # Paired values are words [t / 2][d]; the tiles of AMX want them as [d][t / 2].
    over_d, over_t = (shape.weight_words * 4, 4) if shape.tiles else (4, _paired_bytes(shape))
    multiply(
        Code(module, "score", 4, isa),
        rows=KEYS,
        words=shape.key_words,
        row_bytes=key_bytes,
        word_bytes=4,
        adds=False,
        pairs=shape.pairs,
    )
    multiply(
        Code(module, "add_values", 4, isa),
        rows=shape.value_rows,
        words=shape.weight_words,
        row_bytes=over_d,
        word_bytes=over_t,
        adds=True,
        pairs=shape.pairs,
    )
    write_cap(Code(module, "cap_scores", 3, isa))
    if shape.scaled_scores:
        write_scale(Code(module, "scale_panel", 2, isa), KEYS)
    for name, masked in (("weigh", False), ("weigh_masked", True)):
        write_weigh(
            Code(module, name, 8, isa),
            keys=KEYS,
            value_rows=shape.value_rows,
            pairs=shape.pairs,
            scaled=shape.scaled_scores,
            masked=masked,
        )


def _paired_bytes(shape: PanelShape) -> int:
    """Of a row of values as ``add_values`` reads them."""
    return shape.value_rows * 4 if shape.pairs else shape.value_row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCopy:
    """What ``copy_rows`` makes of a row."""

    width: int  # elements
    padded: int  # with zeros up to so many
    offset: int  # bytes into the target's row
    pairs: bool  # to bfloat16; else to float32
    scaled: bool = False  # each row times its own number


def copy_rows(code: Code, kind: str, copied: RowCopy) -> None:
    """(source, bytes from one row to the next, count, target, its row bytes, scales or nothing)."""
    source, stride, count, target, row_bytes, scales = code.params
    size, step = KIND_BYTES[kind], 2 * LANES if copied.pairs else LANES

    def row(t: Int) -> None:
        scale = code.splat(code.read(scales + t * 4, F32)) if copied.scaled else None

        def sixteen(first: int, begin: int) -> Value:
            """Elements from ``first`` + ``begin`` on; zeros behind the row's end."""
            left = min(LANES, copied.width - first - begin)
            if left <= 0:
                return code.floats(0.0)
            value = load_as(code, source + t * stride + (first + begin) * size, kind, left)
            return value if scale is None else code.times(value, scale)

        for first in range(0, copied.padded, step):
            if not copied.pairs:
                value = sixteen(first, 0)
            elif kind == "bf16":
                left = max(0, min(step, copied.width - first))
                value = code.read_part(source + t * stride + first * size, I16, left, step)
            else:
                value = narrow(code, sixteen(first, 0), sixteen(first, LANES))
            place = copied.offset + first * (2 if copied.pairs else 4)
            room = min(step, copied.padded - first)
            _store_part(code, value, target + t * row_bytes + place, room)

    code.each(count, row)
    code.end()


def _store_part(code: Code, value: Value, address: Int, count: int) -> None:
    """The first ``count`` elements of a vector; the rest of memory is left alone."""
    lanes = value.type.count
    if count < lanes:
        value = code.shuffle(value, value, list(range(count)))
    code.write(value, address)


def _transpose(code: Code) -> None:
    """(source, its row bytes, target, its row bytes, rows / 16, columns / 16) of words."""
    source, source_bytes, target, target_bytes, rows, columns = code.params

    def block(i: Int, j: Int) -> None:
        here = source + i * LANES * source_bytes + j * LINE_BYTES
        there = target + j * LANES * target_bytes + i * LINE_BYTES
        lines = code.transpose([code.read(here + source_bytes * n, INTS) for n in range(LANES)])
        for n, line in enumerate(lines):
            code.write(line, there + target_bytes * n)

    code.each(rows, lambda i: code.each(columns, lambda j: block(i, j)))
    code.end()


def _pair_values(code: Code, shape: PanelShape) -> None:
    """(rows of bfloat16, words): word [t / 2][d] is (v[t][d], v[t + 1][d])."""
    source, target = code.params

    def pair(t: Int) -> None:
        for first in range(0, shape.value_rows, LANES):
            word = _paired(code, source + t * (2 * shape.value_row_bytes) + first * 2, shape)
            code.write(word, target + t * (shape.value_rows * 4) + first * 4)

    code.each(KEYS // 2, pair)
    code.end()


def _tile_values(code: Code, shape: PanelShape) -> None:
    """(rows of bfloat16, words): word [d][t / 2] is (v[t][d], v[t + 1][d])."""
    source, target = code.params
    row_bytes = shape.weight_words * 4

    def block(t: Int, d: Int) -> None:
        here = source + t * (2 * shape.value_row_bytes) + d * 2
        words = [_paired(code, here + n * 2 * shape.value_row_bytes, shape) for n in range(LANES)]
        for n, line in enumerate(code.transpose(words)):
            code.write(line, target + d * row_bytes + n * row_bytes + t * 4)

    def tokens(t: Int) -> None:
        code.each(shape.value_rows, lambda d: block(t, d), step=LANES)

    code.each(shape.weight_words, tokens, step=LANES)
    code.end()


def _paired(code: Code, address: Int, shape: PanelShape) -> Value:
    """Words of sixteen values of a token and of the next one."""
    half = ir.VectorType(I16, LANES)
    low = code.b.zext(code.read(address, half), INTS)
    high = code.b.zext(code.read(address + shape.value_row_bytes, half), INTS)
    return code.b.or_(low, code.b.shl(high, code.ints(16)))


def _multiply(
    code: Code, *, rows: int, words: int, row_bytes: int, word_bytes: int, adds: bool, pairs: bool
) -> None:
    """(a, b, c, panels): c[r][i] = Σ_w a[r][w] · b[w][i], added to c if it ``adds``.

    a's word (r, w) lies at r * row_bytes + w * word_bytes; b and c are panels, one after another.
    """
    a, b, c, panels = code.params
    at_once = 8 if code.isa.registers >= 32 else 4  # rows
    wide = code.isa.registers >= 32
    word_type = INTS if pairs else None

    def block(panel: Int, width: int) -> None:
        bs = [b + (panel + n) * (words * LINE_BYTES) for n in range(width)]
        cs = [c + (panel + n) * (rows * LINE_BYTES) for n in range(width)]

        def some_rows(r: Int) -> None:
            first = a + r * row_bytes
            places = [target + (r + n) * LINE_BYTES for n in range(at_once) for target in cs]
            sums = [code.load(place) if adds else code.floats(0.0) for place in places]

            def word(w: Int, sums: list[Value]) -> list[Value]:
                right = [
                    code.read(x + w * LINE_BYTES, INTS)
                    if word_type
                    else code.load(x + w * LINE_BYTES)
                    for x in bs
                ]
                found = []
                for n in range(at_once):
                    address = first + w * word_bytes + n * row_bytes
                    left = code.splat(code.read(address, I32 if pairs else F32))
                    for m in range(width):
                        total = sums[n * width + m]
                        found.append(
                            code.dot_pairs(total, left, right[m])
                            if pairs
                            else code.fma(left, right[m], total)
                        )
                return found

            for place, total in zip(places, code.loop(words, sums, word), strict=True):
                code.store(total, place)

        code.each(rows, some_rows, step=at_once)

    if wide:
        code.each(panels - 1, lambda panel: block(panel, 2), step=2)
        code.when((panels % 2).equals(1), lambda: block(panels - 1, 1))
    else:
        code.each(panels, lambda panel: block(panel, 1))
    code.end()
