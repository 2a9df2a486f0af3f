"""An item of one query: all its heads, over a range of its sequence's tokens, block by block.

Inside a block it goes head by head, which is how a block lies in memory.
"""

from collections.abc import Callable

from quire.attention.cpu.panels import KEYS
from quire.attention.cpu.rows import TILE
from quire.attention.cpu.thread import Thread
from quire.kernels.language import LOWEST, Int


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
