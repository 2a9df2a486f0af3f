"""Decoding, one query a sequence: rows of keys against the few queries that share them.

For each tile of up to ``TILE`` tokens of one block and one key-value head:

    dot_rows    s[g][t]  = q[g] · k[t]
    weigh_rows  m[g]     = max(m[g], max_t s[g][t] · c)         c = scale · log2(e)
                p[g][t]  = 2 ** (s[g][t] · c - m[g])
                l[g]    += Σ_t p[g][t]       (l, o first times 2 ** (old m - new m))
    add_rows    o[g]    += Σ_t p[g][t] · v[t]

The memory decides how fast this goes, so every byte of keys and values is read once and in the
order in which it lies; and while a tile is worked on, memory is asked for the next one.
Source: online softmax, Milakov and Gimelshein 2018; Dao et al. 2022.
"""

from collections.abc import Callable

from llvmlite import ir
from llvmlite.ir import Value

from quire.attention.cpu.call_frame import KEYS, TILE, RowShape
from quire.attention.cpu.thread_code import Thread
from quire.kernels.language import F32, I16, INTS, LANES, LINE_BYTES, LOWEST, Code, Int, Isa, exp2
from quire.kernels.number_formats import KIND_BYTES, load_as
from quire.units import ceil_div


def write_rows(module: ir.Module, shape: RowShape, isa: Isa) -> None:
    """Add the kernels for a shape to a module."""
    _dot_rows(Code(module, "dot_rows", 7, isa), shape)
    _weigh_rows(Code(module, "weigh_rows", 6, isa), shape)
    _add_rows(Code(module, "add_rows", 7, isa), shape)
    if shape.kind == "i8":
        _scale_rows(Code(module, "scale_rows", 3, isa), shape)


def _dot_rows(code: Code, shape: RowShape) -> None:
    """(keys, stride, queries, scores, count, next, its stride): s[g][t] = q[g] · k[t].

    Sixteen tokens at a time: each leaves a vector of partial sums, and the sums of their lanes are
    sixteen scores. The loop over tokens stays a loop: unrolled, its loads are reordered, and the
    prefetcher loses the stream.
    """
    keys, stride, queries, scores, count, ahead, ahead_stride = code.params
    partial = scores + shape.queries * TILE * 4
    steps = ceil_div(shape.key_dim, shape.width)

    def query(g: int, step: int) -> Value:
        address = queries + (g * shape.query_row_bytes + step * LINE_BYTES)
        return code.read(address, INTS) if shape.pairs else code.load(address)

    # Queries stay in registers if they leave room for a key and a sum.
    kept = shape.queries * steps <= code.isa.registers - 4
    at_hand = [[query(g, i) for i in range(steps)] for g in range(shape.queries)] if kept else []

    def sixteen(first: Int) -> None:
        def token(t: Int) -> None:
            address = keys + (first + t) * stride
            code.prefetch_block(ahead + (first + t) * ahead_stride, shape.key_bytes)
            sums = [code.floats(0.0)] * shape.queries
            for i in range(steps):
                k = _key_step(code, shape, address, i)
                for g in range(shape.queries):
                    q = at_hand[g][i] if kept else query(g, i)
                    sums[g] = (
                        code.dot_pairs(sums[g], q, k) if shape.pairs else code.fma(q, k, sums[g])
                    )
            for g, value in enumerate(sums):
                code.store(value, partial + t * LINE_BYTES + g * LANES * LINE_BYTES)

        code.each((count - first).at_most(LANES), token)
        for g in range(shape.queries):
            lines = partial + g * LANES * LINE_BYTES
            sums = code.lane_sums([code.load(lines + i * LINE_BYTES) for i in range(LANES)])
            code.store(sums, scores + g * TILE * 4 + first * 4)

    code.each(count, sixteen, step=LANES)
    code.end()


def _key_step(code: Code, shape: RowShape, address: Int, step: int) -> Value:
    """Load the step-th vector of a key: floats, or words of two bfloat16; zeros behind its end."""
    count = min(shape.width, shape.key_dim - step * shape.width)
    address = address + step * shape.width * KIND_BYTES[shape.kind]
    if not shape.pairs:
        return load_as(code, address, shape.kind, count)
    if count == shape.width:
        return code.read(address, INTS)
    return code.b.bitcast(code.read_part(address, I16, count, 2 * LANES), INTS)


def _weigh_rows(code: Code, shape: RowShape) -> None:
    """(scores, count, c, m, l, o): scores become weights, l and o follow the new maximum m.

    c, m and l are addresses of floats; lanes behind ``count`` are whatever they are.
    """
    scores, count, factor_at, m_at, l_at, out = code.params
    factor = code.splat(code.read(factor_at, F32))
    for g in range(shape.queries):
        row = scores + g * TILE * 4
        m_here, l_here = m_at + g * 4, l_at + g * 4

        def highest(t: Int, found: list[Value], row: Int = row) -> list[Value]:
            address = row + t * 4
            inside = code.b.icmp_signed("<", code.lane_numbers(), code.splat((count - t).int32))
            # In units of log2; what lies behind the count is no score.
            score = code.times(code.load(address), factor)
            score = code.b.select(inside, score, code.floats(LOWEST))
            code.store(score, address)
            return [code.max(found[0], score)]

        (found,) = code.loop(count, [code.floats(LOWEST)], highest, step=LANES)
        old = code.read(m_here, F32)
        top = code.largest(found)
        new = code.b.select(code.b.fcmp_ordered(">", top, old), top, old)

        def rescale(g: int = g, old: Value = old, new: Value = new, m: Int = m_here) -> None:
            by = exp2(code, code.splat(code.b.fsub(old, new)))
            code.write(new, m)
            total = l_at + g * 4
            first = code.b.extract_element(by, ir.Constant(ir.IntType(32), 0))
            code.write(code.b.fmul(code.read(total, F32), first), total)
            for j in range(0, shape.out_row_bytes, LINE_BYTES):
                address = out + (g * shape.out_row_bytes + j)
                code.store(code.times(code.load(address), by), address)

        code.when(code.b.fcmp_ordered(">", new, old), rescale)
        shift = code.splat(new)

        def weights(t: Int, sums: list[Value], row: Int = row, shift: Value = shift) -> list[Value]:
            address = row + t * 4
            weight = exp2(code, code.minus(code.load(address), shift))
            code.store(weight, address)
            return [code.plus(sums[0], weight)]

        (sums,) = code.loop(count, [code.floats(0.0)], weights, step=LANES)
        code.write(code.b.fadd(code.read(l_here, F32), code.sum(sums)), l_here)
    code.end()


def _add_rows(code: Code, shape: RowShape) -> None:
    """(values, stride, weights, o, count, next, its stride): o[g] += Σ_t p[g][t] · v[t].

    As many columns at a time as the registers hold sums for; the tokens are walked once for each.
    """
    values, stride, weights, out, count, ahead, ahead_stride = code.params
    parts = ceil_div(shape.value_dim, LANES)
    at_once = max(1, min(parts, (code.isa.registers * 5 // 8) // shape.queries))
    for first in range(0, parts, at_once):
        columns = range(first, min(first + at_once, parts))
        places = [
            out + (g * shape.out_row_bytes + j * LINE_BYTES)
            for g in range(shape.queries)
            for j in columns
        ]

        def token(t: Int, sums: list[Value], columns: range = columns) -> list[Value]:
            address = values + t * stride
            if columns.start == 0:
                code.prefetch_block(ahead + t * ahead_stride, shape.value_bytes)
            weight_at = weights + t * 4
            by = [
                code.splat(code.read(weight_at + g * TILE * 4, F32)) for g in range(shape.queries)
            ]
            found = []
            for j in columns:
                width = min(LANES, shape.value_dim - j * LANES)
                offset = j * LANES * KIND_BYTES[shape.kind]
                found.append(load_as(code, address + offset, shape.kind, width))
            return [
                code.fma(found[i % len(columns)], by[i // len(columns)], total)
                for i, total in enumerate(sums)
            ]

        sums = code.loop(count, [code.load(place) for place in places], token)
        for place, total in zip(places, sums, strict=True):
            code.store(total, place)
    code.end()


def _scale_rows(code: Code, shape: RowShape) -> None:
    """(scores, scales, count): s[g][t] times scale[t]: codes of int8 are not yet values."""
    scores, scales, count = code.params

    def some(t: Int) -> None:
        by = code.load(scales + t * 4)
        for g in range(shape.queries):
            address = scores + g * TILE * 4 + t * 4
            code.store(code.times(code.load(address), by), address)

    code.each(count, some, step=LANES)
    code.end()


# -- an item of one query --------------------------------------------------------------------------

# All heads of the query, over a range of its sequence's tokens: block by block, and inside a block
# head by head, which is how a block lies in memory.


def write_single(thread: Thread) -> None:
    """Add what a thread does with an item of one query."""
    code, shape, item = thread.code, thread.shape, thread.item
    num_rows = shape.num_rows
    thread.fill(LOWEST, thread.area, num_rows * 4)
    thread.fill(0.0, thread.area + num_rows * 4, num_rows * (4 + thread.layout.row_bytes))
    code.each(shape.kv_heads, lambda head: _copy_queries(thread, head))

    def block(entry: Int, inside: Int, first: Int, last: Int) -> None:
        following = thread.entry_of(last.at_most(item["stop"] - 1))

        def head(h: Int) -> None:
            def tile(t: Int) -> None:
                count = (last - first - t).at_most(TILE)
                _tile(thread, entry, h, inside + t, count, [ahead(what, t) for what in ("k", "v")])

            def ahead(what: str, t: Int) -> Int:
                """What is read next: this head's, else the next head's, else of the next block."""
                rest = thread.place(what, entry, h, inside + t + TILE)
                below = thread.place(what, entry, h + 1, inside)
                beside = thread.place(what, following, code.whole(0), code.whole(0))
                after = code.choose(h + 1 < shape.kv_heads, below, beside)
                return code.choose(t + TILE < last - first, rest, after)

            code.each(last - first, tile, step=TILE)

        code.each(shape.kv_heads, head)

    thread.each_block(item["start"], item["stop"], block)

    def each_row(finish: Callable[[Int, Int, Int], None]) -> None:
        def head(h: Int) -> None:
            first = h * shape.sharing
            code.each(
                shape.sharing,
                lambda g: finish(_first_row(thread, h) + g, item["first_query"], first + g),
            )

        code.each(shape.kv_heads, head)

    thread.end_item(code.whole(num_rows), each_row)


def _first_row(thread: Thread, head: Int) -> Int:
    """Find the first row of a key-value head. Rows go few at a time; the last may be no queries."""
    return head * (thread.shape.rounds * thread.shape.at_once)


def _copy_queries(thread: Thread, head: Int) -> None:
    """Copy the queries that share a key-value head, as ``dot_rows`` reads them."""
    sharing, row_bytes = thread.shape.sharing, thread.layout.row.query_row_bytes
    source = thread.query(thread.item["first_query"], head * sharing)
    target = thread.at["query_rows"] + _first_row(thread, head) * row_bytes
    stride = thread.call["q_head"]
    thread.code.run("copy_row_query", source, stride, sharing, target, row_bytes, 0)


def _tile(thread: Thread, entry: Int, head: Int, inside: Int, count: Int, ahead: list[Int]) -> None:
    """Attend to up to ``TILE`` tokens of one block and one key-value head.

    Meanwhile ask memory for what comes next: the keys and the values at ``ahead``.
    """
    code, call, at, shape = thread.code, thread.call, thread.at, thread.shape
    keys, values = (thread.place(what, entry, head, inside) for what in ("k", "v"))
    scores, row = at["scores"], thread.layout.row
    if shape.kind == "i8":
        thread.copy_scales(entry, head, inside, count, at["scales"])

    def some_queries(n: Int) -> None:
        first = _first_row(thread, head) + n * shape.at_once
        queries = at["query_rows"] + first * row.query_row_bytes
        m = thread.area + first * 4
        sums = m + shape.num_rows * 4
        out = thread.area + (shape.num_rows * 8) + first * thread.layout.row_bytes
        code.run(
            "dot_rows", keys, call["k_token"], queries, scores, count, ahead[0], call["k_token"]
        )
        if shape.kind == "i8":
            code.run("scale_rows", scores, at["scales"], count)
        thread.cap(scores, row.queries * TILE)
        code.run("weigh_rows", scores, count, thread.word("factor"), m, sums, out)
        if shape.kind == "i8":
            code.run("scale_rows", scores, at["scales"] + KEYS * 4, count)
        code.run("add_rows", values, call["v_token"], scores, out, count, ahead[1], call["v_token"])

    code.each(shape.rounds, some_queries)
