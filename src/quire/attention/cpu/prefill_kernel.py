"""Chunks, many queries at once: panels of sixteen queries against tiles of ``KEYS`` tokens.

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

from collections.abc import Callable
from dataclasses import dataclass, replace

from llvmlite import ir
from llvmlite.ir import Value

from quire.attention.cpu.call_frame import KEYS, WORD_BYTES, PanelShape
from quire.attention.cpu.thread_code import Thread
from quire.kernels import amx
from quire.kernels.language import (
    F32,
    I16,
    I32,
    INTS,
    LANES,
    LINE_BYTES,
    LOWEST,
    Code,
    Int,
    Isa,
    exp2,
)
from quire.kernels.number_formats import KIND_BYTES, load_as, narrow, pair_bf16

# -- softmax ---------------------------------------------------------------------------------------

# Scores of a panel become weights: the online softmax, with a query in each lane.
#
# Also what happens to scores before: the scales of int8 keys, and a softcap.


# How far (log2) a score may pass its query's maximum before everything is rescaled for it.
_SLACK = 8.0


def write_cap(code: Code) -> None:
    """Write a kernel (scores, count, factors): s becomes cap · tanh(s · scale / cap), in place.

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
    """Write a kernel (Sᵀ, scales of the keys): a panel's scores of int8 codes become scores."""
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
    """Write a kernel for one panel: (Sᵀ, Pᵀ, c, state, Oᵀ, first token, reach, scales).

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
        total = code.b.fadd(total, found)  # in this order, masked or not
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

    sums = code.b.fadd(*code.loop(keys, [code.floats(0.0)] * 2, two, step=2))
    code.store(code.b.fadd(code.load(state + LINE_BYTES), sums), state + LINE_BYTES)
    code.end()


def _follow(code: Code, top: Value, state: Int, out: Int, value_rows: int) -> None:
    """Rescale m, l and Oᵀ where the new maximum is well above a query's old one."""
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
    """Return the bytes of a row of values as ``add_values`` reads them."""
    return shape.value_rows * 4 if shape.pairs else shape.value_row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCopy:
    """The row that ``copy_rows`` makes."""

    width: int  # elements
    padded: int  # with zeros up to so many
    offset: int  # bytes into the target's row
    pairs: bool  # to bfloat16; else to float32
    scaled: bool = False  # each row times its own number


def copy_rows(code: Code, kind: str, copied: RowCopy) -> None:
    """Write a kernel (source, its stride, count, target, its row bytes, scales or nothing)."""
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
    """Store the first ``count`` elements of a vector and nothing behind them."""
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
    """Pair sixteen values of a token with those of the next one, as words."""
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


# -- an item of several queries --------------------------------------------------------------------

# Up to ``MAX_PANELS`` panels of one key-value head, tile by tile. Row r of an item stands for the
# r-th of its queries x heads: a token's heads lie side by side, so that the rows of a panel read
# nearly the same tokens.

_STATE_BYTES = 2 * LINE_BYTES  # of a panel: its maxima and its sums; its first and last tokens


def write_several(thread: Thread) -> None:
    """Add what a thread does with an item of several queries."""
    code, item, at, panel = thread.code, thread.item, thread.at, thread.layout.panel
    num_rows = item["rows"]
    num_panels = (num_rows + (LANES - 1)) // LANES
    padded = num_panels * LANES
    at_once = panel.at_once
    thread.fill(0.0, at["out"], num_panels * (panel.value_rows * LINE_BYTES))
    code.each(num_panels, lambda p: _begin_panel(thread, p))
    min_low = _reach(thread, "lows", code.whole(0))

    def tile(t: Int) -> None:
        # A tile may begin where no query reads, and where nothing is kept any more.
        values = _copy_tile(thread, t, t.at_least(min_low), (t + KEYS).at_most(item["stop"]))

        def panels(first: Int) -> None:
            """Few at a time, so that their scores are still close when they are weighed."""
            last = (first + at_once).at_most(num_panels)
            # Both ends of what a query reads grow with its position.
            ends = first * LANES, (last * LANES).at_most(num_rows) - 1
            lows, highs = ([_reach(thread, which, r) for r in ends] for which in ("lows", "highs"))
            whole = code.b.and_(t >= lows[1], highs[0] >= t + (KEYS - 1))

            def weigh(name: str) -> Callable[[], None]:
                def one(p: Int) -> None:
                    _weigh(thread, first, p, t, name)

                return lambda: code.each(last, one, start=first)

            def attend() -> None:
                queries = at["queries"] + first * (panel.key_words * LINE_BYTES)
                out = at["out"] + first * (panel.value_rows * LINE_BYTES)
                code.run("score", at["keys"], queries, at["scores"], last - first)
                code.either(whole, weigh("weigh"), weigh("weigh_masked"))
                code.run("add_values", values, at["weights"], out, last - first)

            # What none of these queries reads would add nothing.
            code.when(code.b.and_(highs[1] >= t, lows[0] < t + KEYS), attend)
            # Meanwhile memory is asked for these panels' share of the next tile.
            begin, end = (t + KEYS + KEYS * n // num_panels for n in (first, last))
            _fetch(thread, begin, end.at_most(item["stop"]))

        code.each(num_panels, panels, step=at_once)

    code.each(item["stop"], tile, step=KEYS, start=item["start"])
    code.each(num_panels, lambda p: _end_panel(thread, p, padded))

    def each_row(finish: Callable[[Int, Int, Int], None]) -> None:
        code.each(num_rows, lambda r: finish(r, *_query_of(thread, r)))

    thread.end_item(padded, each_row)


def _query_of(thread: Thread, r: Int) -> tuple[Int, Int]:
    """Find the (packed token, query head) of an item's row."""
    item, sharing = thread.item, thread.shape.sharing
    number = item["first_row"] + r
    return item["first_query"] + number // sharing, item["head"] * sharing + number % sharing


def _reach(thread: Thread, which: str, r: Int) -> Int:
    """Read the first ("lows") or the last ("highs") token that an item's row reads."""
    token, _ = _query_of(thread, r)
    return thread.code.number(thread.call[which] + token * WORD_BYTES)


def _begin_panel(thread: Thread, p: Int) -> None:
    """Copy sixteen queries side by side, turn them into a panel, and note what they read."""
    code, at, panel = thread.code, thread.at, thread.layout.panel
    row_bytes, reach = panel.key_words * 4, at["reach"] + p * _STATE_BYTES
    thread.fill(LOWEST, at["state"] + p * _STATE_BYTES, LINE_BYTES)
    thread.fill(0.0, at["state"] + p * _STATE_BYTES + LINE_BYTES, LINE_BYTES)

    def row(n: Int) -> None:
        # A row that stands for no query repeats the last one and reads nothing.
        r = p * LANES + n
        token, head = _query_of(thread, r.at_most(thread.item["rows"] - 1))
        begin = 0
        for number, width in enumerate(panel.key_parts):
            source = thread.query(token, head) + begin * KIND_BYTES[panel.query_kind]
            target = at["query_rows"] + n * row_bytes
            code.run(f"copy_query_{number}", source, 0, 1, target, row_bytes, 0)
            begin += width
        for line, (which, none) in enumerate((("lows", 0), ("highs", -1))):
            found = code.read(thread.call[which] + token * WORD_BYTES, I32)
            found = code.b.select(r < thread.item["rows"], found, ir.Constant(I32, none))
            code.write(found, reach + n * 4 + line * LINE_BYTES)

    code.each(LANES, row)
    target = at["queries"] + p * (panel.key_words * LINE_BYTES)
    columns = panel.key_words // LANES
    code.run("transpose", at["query_rows"], row_bytes, target, LINE_BYTES, 1, columns)


def _copy_tile(thread: Thread, tile_start: Int, start: Int, stop: Int) -> Int:
    """Copy the keys and values of tokens [start, stop) to their places in a tile.

    Return the address of the values.
    """
    code, call, at, panel = thread.code, thread.call, thread.at, thread.layout.panel
    head, eight_bit = thread.item["head"], thread.shape.kind == "i8"
    # (kernel, of the view, into which tile, its row bytes): a latent is key and value.
    copies = [
        (f"copy_keys_{n}", "v" if n else "k", "keys", panel.key_words * 4)
        for n in range(len(panel.key_parts))
    ]
    value = "k" if thread.shape.latent else "v"
    copies.append(("copy_values", value, "values", panel.value_row_bytes))

    def block(entry: Int, inside: Int, first: Int, last: Int) -> None:
        done, count = first - tile_start, last - first
        scales = at["scales"] + done * 4
        if eight_bit:
            thread.copy_scales(entry, head, inside, count, scales)
        for name, what, tile, row_bytes in copies:
            source = thread.place(what, entry, head, inside)
            own_scales = scales + (KEYS * 4 if what == "v" else 0)
            target = at[tile] + done * row_bytes
            code.run(name, source, call[f"{what}_token"], count, target, row_bytes, own_scales)

    thread.each_block(start, stop, block)
    # What weighs nothing must still be a number: zero times anything else is not zero.
    value_bytes = panel.value_row_bytes
    before, behind = start - tile_start, stop - tile_start
    thread.fill(0.0, at["values"], before * value_bytes)
    thread.fill(0.0, at["values"], KEYS * value_bytes, behind * value_bytes)
    if eight_bit:
        thread.fill(0.0, at["scales"] + KEYS * 4, before * 4)
        thread.fill(0.0, at["scales"] + KEYS * 4, KEYS * 4, behind * 4)
    if not panel.pairs:
        return at["values"]
    code.run("pair_values", at["values"], at["paired"])
    return at["paired"]


def _weigh(thread: Thread, first: Int, p: Int, first_token: Int, name: str) -> None:
    """Turn a panel's scores of a tile into weights; ``first`` is the first panel that has some."""
    code, at, panel = thread.code, thread.at, thread.layout.panel
    scores = at["scores"] + (p - first) * (KEYS * LINE_BYTES)
    if panel.scaled_scores:
        code.run("scale_panel", scores, at["scales"])
    thread.cap(scores, KEYS * LANES)
    weights = at["weights"] + (p - first) * (panel.weight_words * LINE_BYTES)
    state, reach = (at[what] + p * _STATE_BYTES for what in ("state", "reach"))
    out = at["out"] + p * (panel.value_rows * LINE_BYTES)
    scales = at["scales"] + KEYS * 4
    code.run(name, scores, weights, thread.word("factor"), state, out, first_token, reach, scales)


def _fetch(thread: Thread, start: Int, stop: Int) -> None:
    """Ask for the keys and values of tokens [start, stop)."""
    code, size = thread.code, thread.call["block_size"]
    kind_bytes = KIND_BYTES[thread.shape.kind]
    widths = (("k", thread.shape.view_dims[0]), ("v", thread.shape.view_dims[1]))

    def token(t: Int) -> None:
        for what, width in widths:
            place = thread.place(what, thread.entry_of(t), thread.item["head"], t % size)
            code.prefetch_block(place, width * kind_bytes)

    if code.isa.block_prefetch is not None:
        code.each(stop, token, start=start)


def _end_panel(thread: Thread, p: Int, padded: Int) -> None:
    """Turn a panel's state and its output back into rows, in the item's area."""
    code, panel, area = thread.code, thread.layout.panel, thread.area
    state = thread.at["state"] + p * _STATE_BYTES
    code.store(code.load(state), area + p * LINE_BYTES)
    code.store(code.load(state + LINE_BYTES), area + padded * 4 + p * LINE_BYTES)
    source = thread.at["out"] + p * (panel.value_rows * LINE_BYTES)
    target = area + padded * 8 + p * (LANES * thread.layout.row_bytes)
    columns = panel.value_rows // LANES
    code.run("transpose", source, LINE_BYTES, target, thread.layout.row_bytes, columns, 1)
