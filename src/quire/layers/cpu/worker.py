"""What each thread does during a call: pack the inputs, then take items until none is left.

An item is taken before the one before it is done, so that memory is asked for the next weights in
time, whichever thread multiplies them.
"""

from llvmlite import ir
from llvmlite.ir import Value

from quire.kernels.isa import Isa
from quire.kernels.language import LANES, LINE_BYTES, Code, Int
from quire.layers.cpu import tiles
from quire.layers.cpu.finish import write_finish, write_turn
from quire.layers.cpu.frame import (
    BLOCK,
    FRAME,
    ITEM,
    MATRIX,
    PANEL_BYTES,
    ROOM_BYTES,
    WORD_BYTES,
    ProductShape,
)
from quire.layers.cpu.vectors import write_vectors


def write_worker(module: ir.Module, shape: ProductShape, isa: Isa) -> None:
    """Add "work" and all that it needs to a module. Its parameter is a frame's address."""
    if shape.tiles:
        tiles.write_tiles(module, isa)
    else:
        write_vectors(module, shape, isa)
    write_turn(Code(module, "turn", 1, isa))
    write_finish(Code(module, "finish", 8, isa), shape)
    _Worker(Code(module, "work", 1, isa), shape).write()


class _Worker:
    """The code of "work"."""

    def __init__(self, code: Code, shape: ProductShape) -> None:
        self.code, self.shape = code, shape
        self.frame = code.params[0]
        self.call = {
            name: code.number(self.word(name)) for name in FRAME if not name.startswith("next")
        }

    def word(self, name: str) -> Int:
        """The address of a word of the frame."""
        return self.frame + FRAME.index(name) * WORD_BYTES

    def write(self) -> None:
        code, call = self.code, self.call
        number = code.take(self.word("next_thread"))
        self.room = call["scratch"] + number * call["scratch_bytes"]
        panels = (call["num_rows"] + (LANES - 1)) // LANES
        self.sums = self.room + ROOM_BYTES
        self.other_sums = self.sums + panels * PANEL_BYTES
        self.inputs = self.other_sums + panels * PANEL_BYTES
        if self.shape.tiles:
            code.run("shape_tiles")
        code.run(
            "pack", call["x"], call["x_row"], call["num_rows"], call["num_inputs"], self.inputs,
            self.room,
        )  # fmt: skip

        def take(_: Int, taken: list[Value]) -> list[Value]:
            item, following = Int(code.b, taken[0]), code.take(self.word("next_item"))
            code.when(item < call["num_items"], lambda: self._item(item, following))
            return [following.value]

        first = code.take(self.word("next_item"))
        code.loop(call["num_items"], [first.value], take)
        if self.shape.tiles:
            code.run("release_tiles")
        code.end()

    def _item(self, number: Int, following: Int) -> None:
        """All outputs of an item; ``following`` is the one that this thread does next."""
        code, call = self.code, self.call
        item = self._words(call["items"], number, ITEM)
        after = self._words(call["items"], following.at_most(call["num_items"] - 1), ITEM)
        matrix, next_matrix = (self._matrix(words["matrix"]) for words in (item, after))
        beyond = self._weights(next_matrix, after["start"])

        def block(start: Int) -> None:
            here = self._weights(matrix, start)
            ahead = code.choose(
                start + BLOCK < item["stop"], self._weights(matrix, start + BLOCK), beyond
            )
            if self.shape.activation is None:
                self._multiply(matrix, here, self.sums, ahead)
                self._finish(matrix, matrix, start)
                return
            other = self._matrix(code.whole(1))
            there = self._weights(other, start)
            self._multiply(matrix, here, self.sums, there)
            self._multiply(other, there, self.other_sums, ahead)
            self._finish(matrix, other, start)

        code.each(item["stop"], block, start=item["start"], step=BLOCK)

    def _words(self, table: Int, number: Int, names: tuple[str, ...]) -> dict[str, Int]:
        address = table + number * (len(names) * WORD_BYTES)
        return {name: self.code.number(address + n * WORD_BYTES) for n, name in enumerate(names)}

    def _matrix(self, number: Int) -> dict[str, Int]:
        return self._words(self.frame + len(FRAME) * WORD_BYTES, number, MATRIX)

    def _first(self, matrix: dict[str, Int], start: Int) -> Int:
        """The last block begins earlier instead of being smaller: some outputs are found twice."""
        return start.at_most(matrix["num_outputs"] - BLOCK)

    def _weights(self, matrix: dict[str, Int], start: Int) -> Int:
        return matrix["weight"] + self._first(matrix, start) * matrix["weight_row"]

    def _multiply(self, matrix: dict[str, Int], weights: Int, sums: Int, ahead: Int) -> None:
        call = self.call
        self.code.run(
            "multiply", weights, matrix["weight_row"], call["num_inputs"], self.inputs,
            call["num_rows"], sums, ahead, self.room,
        )  # fmt: skip

    def _finish(self, matrix: dict[str, Int], other: dict[str, Int], start: Int) -> None:
        code, call, size = self.code, self.call, self.shape.element_bytes
        offset = self._first(matrix, start) * size

        def panel(first: Int) -> None:
            count = (call["num_rows"] - first).at_most(LANES)
            for n in range(BLOCK // LANES):
                place = first * (PANEL_BYTES // LANES) + n * LANES * LINE_BYTES
                beside = offset + n * LANES * size
                code.run("turn", self.sums + place)
                if self.shape.activation is not None:
                    code.run("turn", self.other_sums + place)
                code.run(
                    "finish", self.sums + place, self.other_sums + place, count,
                    matrix["bias"] + beside, other["bias"] + beside,
                    matrix["out"] + first * matrix["out_row"] + beside, matrix["out_row"],
                    self.room,
                )  # fmt: skip

        code.each(call["num_rows"], panel, step=LANES)
