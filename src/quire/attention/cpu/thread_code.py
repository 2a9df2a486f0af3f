"""What the code of one thread has at hand while it works on an item.

The words of the call (``FRAME``), of the item (``ITEM``) and the places in its own memory
(``Layout``), and what both kinds of items need: the blocks of a range, and an end to what they
computed.
"""

from collections.abc import Callable

from llvmlite import ir

from quire.attention.cpu.call_frame import FRAME, GROUP, ITEM, KEYS, WORD_BYTES, AttendShape, Layout
from quire.kernels.language import F32, Code, Int


class Thread:
    """Made once for "work"; ``begin_item`` fills in what each item changes."""

    def __init__(self, code: Code, shape: AttendShape) -> None:
        self.code = code
        self.shape = shape
        self.layout = Layout(shape, code.isa)
        self.frame = code.params[0]
        self.call = {
            name: code.number(self.word(name)) for name in FRAME if not name.startswith("next")
        }
        number = code.take(self.word("next_thread"))
        base = self.call["scratch"] + number * self.call["scratch_bytes"]
        self.at = {name: base + offset for name, offset in self.layout.offsets.items()}

    def word(self, name: str) -> Int:
        """Return the address of a word of the frame."""
        return self.frame + FRAME.index(name) * WORD_BYTES

    def begin_item(self) -> None:
        """Take the next item; leave the innermost loop if there is none."""
        code, call = self.code, self.call
        number = code.take(self.word("next_item"))
        code.leave_when(number >= call["num_items"])
        address = call["items"] + number * (len(ITEM) * WORD_BYTES)
        self.item = {name: code.number(address + n * WORD_BYTES) for n, name in enumerate(ITEM)}
        self.table = call["table"] + self.item["seq"] * call["table_row"]
        self.is_part = self.item["area"] >= 0
        # Where the item leaves its rows: among the parts, or in the thread's own memory.
        self.area = code.choose(self.is_part, call["areas"] + self.item["area"], self.at["area"])

    # -- keys and values -------------------------------------------------------------------------

    def each_block(self, start: Int, stop: Int, body: Callable[[Int, Int, Int, Int], None]) -> None:
        """Call ``body(entry, inside, first, last)`` for each block of tokens [start, stop).

        Its entry in the table, the place of its first token inside, and which tokens it holds.
        """
        code, size = self.code, self.call["block_size"]

        def block(number: Int) -> None:
            begin = number * size
            first, last = start.at_least(begin), stop.at_most(begin + size)
            body(code.number(self.table + number * WORD_BYTES), first - begin, first, last)

        code.each((stop - 1) // size + 1, block, start=start // size)

    def entry_of(self, token: Int) -> Int:
        """Read the table's entry for the block of a token."""
        return self.code.number(self.table + token // self.call["block_size"] * WORD_BYTES)

    def place(self, what: str, entry: Int, head: Int, token: Int) -> Int:
        """Return the address of k, v, k_scale or v_scale of a token inside a block."""
        call, stride = self.call, "scale" if what.endswith("scale") else what
        block = call[what] + entry * call[f"{stride}_block"] + head * call[f"{stride}_head"]
        return block + token * call[f"{stride}_token"]

    def copy_scales(self, entry: Int, head: Int, inside: Int, count: Int, target: Int) -> None:
        """Copy the scales of ``count`` keys and, ``KEYS`` floats on, those of their values."""
        code, stride = self.code, self.call["scale_token"]
        for n, what in enumerate(("k_scale", "v_scale")):
            source, to = self.place(what, entry, head, inside), target + n * KEYS * 4

            def one(t: Int, source: Int = source, to: Int = to) -> None:
                code.write(code.read(source + t * stride, F32), to + t * 4)

            code.each(count, one)

    # -- queries and results ---------------------------------------------------------------------

    def query(self, token: Int, head: Int) -> Int:
        """Return the address of a packed token's query."""
        return self.call["q"] + token * self.call["q_token"] + head * self.call["q_head"]

    def fill(self, value: float, address: Int, nbytes: int | Int, start: int | Int = 0) -> None:
        """Write the same float from byte ``start`` up to ``nbytes``."""
        code, number = self.code, ir.Constant(F32, value)
        code.each(nbytes, lambda n: code.write(number, address + n), step=4, start=start)

    def end_item(
        self, num_rows: Int, each_row: Callable[[Callable[[Int, Int, Int], None]], None]
    ) -> None:
        """Turn an area of ``num_rows`` into outputs, once all parts are there.

        ``each_row(finish)`` calls ``finish(row, token, head)`` for the rows that are queries.
        """
        code, call = self.code, self.call

        def finish(area: Int) -> None:
            def row(r: Int, token: Int, head: Int) -> None:
                target = call["out"] + token * call["out_token"] + head * call["out_head"]
                outputs = area + num_rows * 8 + r * self.layout.row_bytes
                code.run(
                    "finish_row",
                    area + r * 4, area + num_rows * 4 + r * 4, outputs, target,
                    call["sinks"] + head * 4,
                )  # fmt: skip

            each_row(row)

        def part() -> None:
            group = call["groups"] + self.item["group"] * (len(GROUP) * WORD_BYTES)
            _, num_parts, first_area = (code.number(group + n * WORD_BYTES) for n in range(3))
            before = code.take(group, by=-1)

            def last_one() -> None:
                first = call["areas"] + first_area
                code.run("merge", first, num_parts, num_rows)
                finish(first)
                code.write(num_parts.value, group)  # as it was, for the next layer

            code.when(before.equals(1), last_one)

        code.either(self.is_part, part, lambda: finish(self.area))

    def cap(self, scores: Int, count: int) -> None:
        """Call the softcap for ``count`` scores in place, if this kind of layer has one."""
        if self.shape.softcap:
            self.code.run("cap_scores", scores, count, self.word("cap_in"))
