"""An item of several queries: up to ``MAX_PANELS`` panels of one key-value head, tile by tile.

Row r of an item stands for the r-th of its queries x heads: a token's heads lie side by side, so
that the rows of a panel read nearly the same tokens.
"""

from collections.abc import Callable

from llvmlite import ir

from quire.attention.cpu.frame import WORD_BYTES
from quire.attention.cpu.panels import KEYS
from quire.attention.cpu.thread import Thread
from quire.kernels.formats import KIND_BYTES
from quire.kernels.language import I32, LANES, LINE_BYTES, LOWEST, Int

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
