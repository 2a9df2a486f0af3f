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

from quire.attention.cpu.softmax import write_cap, write_scale, write_weigh
from quire.kernels import amx
from quire.kernels.formats import KIND_BYTES, load_as, narrow
from quire.kernels.isa import Isa
from quire.kernels.language import F32, I16, I32, INTS, LANES, LINE_BYTES, Code, Int
from quire.units import align_up

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
