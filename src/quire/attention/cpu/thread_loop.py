"""What each thread does during a call: take items of a plan until none is left.

An item is one query over all heads (``single``) or several queries of one key-value head
(``several``), over a range of one sequence's tokens. A sequence that is split into several ranges
leaves parts, and the thread that finishes the last part merges them, in order, so that results do
not depend on chance.
"""

from collections.abc import Callable

from llvmlite import ir

from quire.attention.cpu import decode_kernel as rows
from quire.attention.cpu import prefill_kernel as panels
from quire.attention.cpu.call_frame import WORD_BYTES, AttendShape, Layout
from quire.attention.cpu.decode_kernel import TILE
from quire.attention.cpu.prefill_kernel import KEYS
from quire.attention.cpu.thread_code import Thread
from quire.kernels import amx
from quire.kernels.exponential import exp2
from quire.kernels.language import F32, I32, LANES, LINE_BYTES, LOG2_E, LOWEST, Code, Int, Isa
from quire.kernels.number_formats import KIND_BYTES, kind_factor, store_as

# -- an item of several queries --------------------------------------------------------------------

# An item of several queries: up to ``MAX_PANELS`` panels of one key-value head, tile by tile.
#
# Row r of an item stands for the r-th of its queries x heads: a token's heads lie side by side, so
# that the rows of a panel read nearly the same tokens.


_STATE_BYTES = 2 * LINE_BYTES  # of a panel: its maxima and its sums; its first and last tokens


def write_several(thread: Thread) -> None:
    """Add what a thread does with such an item."""
    code, item, at, panel = thread.code, thread.item, thread.at, thread.layout.panel
    num_rows = item["rows"]
    num_panels = (num_rows + (LANES - 1)) // LANES
    padded = num_panels * LANES
    at_once = panel.at_once
    thread.fill(0.0, at["out"], num_panels * (panel.value_rows * LINE_BYTES))
    code.each(num_panels, lambda p: _begin_panel(thread, p))
    # Both ends of what a query reads grow with its position.
    min_high = _reach(thread, "highs", code.whole(0))
    max_low = _reach(thread, "lows", num_rows - 1)

    def tile(t: Int) -> None:
        values = _copy_tile(thread, t, (t + KEYS).at_most(item["stop"]))
        whole = code.b.and_(t >= max_low, t + (KEYS - 1) < min_high + 1)

        def panels(first: Int) -> None:
            """Few at a time, so that their scores are still close when they are weighed."""
            last = (first + at_once).at_most(num_panels)
            queries = at["queries"] + first * (panel.key_words * LINE_BYTES)
            out = at["out"] + first * (panel.value_rows * LINE_BYTES)
            code.run("score", at["keys"], queries, at["scores"], last - first)

            def weigh(name: str) -> Callable[[], None]:
                def one(p: Int) -> None:
                    _weigh(thread, first, p, t, name)

                return lambda: code.each(last, one, start=first)

            code.either(whole, weigh("weigh"), weigh("weigh_masked"))
            code.run("add_values", values, at["weights"], out, last - first)
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
    """(packed token, query head) of an item's row."""
    item, sharing = thread.item, thread.shape.sharing
    number = item["first_row"] + r
    return item["first_query"] + number // sharing, item["head"] * sharing + number % sharing


def _reach(thread: Thread, which: str, r: Int) -> Int:
    """The first ("lows") or the last ("highs") token that an item's row reads."""
    token, _ = _query_of(thread, r)
    return thread.code.number(thread.call[which] + token * WORD_BYTES)


def _begin_panel(thread: Thread, p: Int) -> None:
    """Sixteen queries, copied beside each other and turned into a panel; and what they read."""
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


def _copy_tile(thread: Thread, start: Int, stop: Int) -> Int:
    """Keys and values of up to ``KEYS`` tokens; where the values are for ``add_values``."""
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
        done, count = first - start, last - first
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
    thread.fill(0.0, at["values"], KEYS * value_bytes, (stop - start) * value_bytes)
    if eight_bit:
        thread.fill(0.0, at["scales"] + KEYS * 4, KEYS * 4, (stop - start) * 4)
    if not panel.pairs:
        return at["values"]
    code.run("pair_values", at["values"], at["paired"])
    return at["paired"]


def _weigh(thread: Thread, first: Int, p: Int, first_token: Int, name: str) -> None:
    """A panel's scores of a tile become weights; ``first`` is the first panel that has some."""
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
            code.prefetch(place, width * kind_bytes)

    if code.isa.prefetch:
        code.each(stop, token, start=start)


def _end_panel(thread: Thread, p: Int, padded: Int) -> None:
    """A panel's state and its output, turned back into rows, into the item's area."""
    code, panel, area = thread.code, thread.layout.panel, thread.area
    state = thread.at["state"] + p * _STATE_BYTES
    code.store(code.load(state), area + p * LINE_BYTES)
    code.store(code.load(state + LINE_BYTES), area + padded * 4 + p * LINE_BYTES)
    source = thread.at["out"] + p * (panel.value_rows * LINE_BYTES)
    target = area + padded * 8 + p * (LANES * thread.layout.row_bytes)
    columns = panel.value_rows // LANES
    code.run("transpose", source, LINE_BYTES, target, thread.layout.row_bytes, columns, 1)


# -- an item of one query --------------------------------------------------------------------------

# An item of one query: all its heads, over a range of its sequence's tokens, block by block.
#
# Inside a block it goes head by head, which is how a block lies in memory.


def write_single(thread: Thread) -> None:
    """Add what a thread does with such an item."""
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
    """Of a key-value head. Its rows are taken a few at a time; the last may be no queries."""
    return head * (thread.shape.rounds * thread.shape.at_once)


def _copy_queries(thread: Thread, head: Int) -> None:
    """The queries that share a key-value head, as ``dot_rows`` reads them."""
    sharing, row_bytes = thread.shape.sharing, thread.layout.row.query_row_bytes
    source = thread.query(thread.item["first_query"], head * sharing)
    target = thread.at["query_rows"] + _first_row(thread, head) * row_bytes
    stride = thread.call["q_head"]
    thread.code.run("copy_row_query", source, stride, sharing, target, row_bytes, 0)


def _tile(thread: Thread, entry: Int, head: Int, inside: Int, count: Int, ahead: list[Int]) -> None:
    """Up to ``TILE`` tokens of one block and one key-value head.

    Meanwhile memory is asked for what comes next: the keys and the values at ``ahead``.
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


# -- parts merged ----------------------------------------------------------------------------------

# From areas to outputs: the parts of a sequence merged, a row divided by its sum.
#
# An area holds R rows of queries that are not finished: maxima m[R], sums l[R], outputs o[R][Dv].


def write_finish_row(code: Code, shape: AttendShape) -> None:
    """(m, l, o, target, sink): o / l, where a sink takes its share of l, as the output's kind."""
    m_at, l_at, out, target, sink_at = code.params
    total = code.splat(code.read(l_at, F32))
    by = code.floats(kind_factor(shape.kind))
    if shape.sinks:
        top = code.splat(code.read(m_at, F32))
        sink = code.times(code.splat(code.read(sink_at, F32)), code.floats(LOG2_E))
        highest = code.max(top, sink)
        own = exp2(code, code.minus(top, highest))
        total = code.fma(total, own, exp2(code, code.minus(sink, highest)))
        by = code.times(by, own)
    by = code.b.fdiv(by, total)
    size = KIND_BYTES[shape.query_kind]
    for first in range(0, shape.value_dim, LANES):
        count = min(LANES, shape.value_dim - first)
        value = code.times(code.load(out + first * 4), by)
        store_as(code, value, target + first * size, shape.query_kind, count)
    code.end()


def write_merge(code: Code, shape: AttendShape) -> None:
    """(first area, number of areas, rows): all of them into the first one, in order."""
    area, num_parts, num_rows = code.params
    layout = Layout(shape, code.isa)
    row_bytes, part_bytes = layout.row_bytes, layout.area_bytes(num_rows)

    def row(part: Int, r: Int) -> None:
        here, there = area, area + part * part_bytes
        tops = [code.splat(code.read(x + r * 4, F32)) for x in (here, there)]
        top = code.max(*tops)
        by = [exp2(code, code.minus(x, top)) for x in tops]

        def join(offset: Int) -> None:
            mine = code.times(code.load(here + offset), by[0])
            code.store(code.fma(code.load(there + offset), by[1], mine), here + offset)

        sums = num_rows * 4 + r * 4
        mine, theirs = (code.splat(code.read(x + sums, F32)) for x in (here, there))
        total = code.fma(theirs, by[1], code.times(mine, by[0]))
        lane = ir.Constant(I32, 0)
        code.write(code.b.extract_element(total, lane), here + sums)
        code.write(code.b.extract_element(top, lane), here + r * 4)
        begin = num_rows * 8 + r * row_bytes
        code.each(row_bytes, lambda n: join(begin + n), step=LINE_BYTES)

    code.each(num_parts, lambda p: code.each(num_rows, lambda r: row(p, r)), start=1)
    code.end()


# -- the worker ------------------------------------------------------------------------------------


def write_worker(module: ir.Module, shape: AttendShape, isa: Isa) -> None:
    """Add "work" and all that it needs to a module. Its parameter is a frame's address."""
    panel, row = shape.panel_shape(isa), shape.row_shape(isa)
    panels.write_panels(module, panel, isa)
    if not shape.latent:
        rows.write_rows(module, row, isa)
        padded = row.query_row_bytes // (2 if row.pairs else 4)
        copied = panels.RowCopy(width=shape.key_dim, padded=padded, offset=0, pairs=row.pairs)
        panels.copy_rows(Code(module, "copy_row_query", 6, isa), shape.query_kind, copied)
    if panel.tiles:
        amx.write_shape(Code(module, "shape_tiles", 0, isa))
        amx.write_release(Code(module, "release_tiles", 0, isa))
    write_finish_row(Code(module, "finish_row", 5, isa), shape)
    write_merge(Code(module, "merge", 3, isa), shape)
    _write_work(Code(module, "work", 1, isa), shape)


def _write_work(code: Code, shape: AttendShape) -> None:
    thread = Thread(code, shape)
    tiles = thread.layout.panel.tiles

    def item() -> None:
        thread.begin_item()
        if shape.latent:
            write_several(thread)
            return
        is_single = thread.item["rows"].equals(0)
        code.either(is_single, lambda: write_single(thread), lambda: write_several(thread))

    if tiles:
        code.run("shape_tiles")
    code.forever(item)
    if tiles:
        code.run("release_tiles")
    code.end()
