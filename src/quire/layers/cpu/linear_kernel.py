"""What each thread does during a call: pack the inputs, then take items until none is left.

An item is taken before the one before it is done, so that memory is asked for the next weights in
time, whichever thread multiplies them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

from llvmlite import ir
from llvmlite.ir import Value

from quire.kernels import amx
from quire.kernels.language import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    LINE_BYTES,
    Code,
    Int,
    Isa,
)
from quire.kernels.number_formats import load_as, narrow, rounded, store_as
from quire.layers.cpu.activation import activate
from quire.layers.cpu.linear_frame import (
    ALIAS_BYTES,
    ALIASED_OUTPUTS,
    BLOCK,
    FRAME,
    ITEM,
    KEPT_BYTES,
    KEPT_ROWS,
    KEPT_STEPS,
    MATRIX,
    MOST_PANELS,
    ONE_PANEL_OUTPUTS,
    OUTPUTS,
    PANEL_BYTES,
    PANEL_OUTPUTS,
    PARTS_BYTES,
    ROOM_BYTES,
    WORD_BYTES,
    ProductShape,
)

# -- the rest of a row -----------------------------------------------------------------------------

# The last inputs of a row, where they fill no vector: copied to where zeros are behind them.


def copy_rest(code: Code, element_bytes: int, source: Int, count: Int, target: Int) -> None:
    """Copy ``count`` elements, and zeros up to a whole line."""
    typ = {4: I32, 2: I16}[element_bytes]
    code.write(ir.Constant(ir.VectorType(I8, LINE_BYTES), [0] * LINE_BYTES), target)
    code.each(
        count * element_bytes,
        lambda n: code.write(code.read(source + n, typ), target + n),
        step=element_bytes,
    )


def _copy_last(
    code: Code, weights: Int, row_bytes: Int, num_inputs: Int, room: Int, *, step: int, size: int
) -> None:
    """Copy a block's weights of the last inputs, where they fill no step, a line each."""
    whole, rest, _ = _divided(num_inputs, step)

    def copy() -> None:
        for o in range(BLOCK):
            source = weights + row_bytes * o + whole * (step * size)
            copy_rest(code, size, source, rest, room + o * LINE_BYTES)

    code.when(rest >= 1, copy)


def _divided(num_inputs: Int, step: int) -> tuple[Int, Int, Int]:
    """Return a row's whole steps, the inputs that are left, and its steps with those."""
    whole = num_inputs // step
    return whole, num_inputs - whole * step, (num_inputs + (step - 1)) // step


# -- by vectors ------------------------------------------------------------------------------------

# A block of outputs at a time by ordinary vectors: each sum runs along a row of weights.
#
#     c[o][r] = Σ_i weight[o][i] · x[r][i]
#
# A few outputs' rows of weights stay in the nearest cache while all rows of inputs pass by. Where
# weights have to become floats, some steps of them do so once for many rows, and stay as floats.
# Every sum is added up in the same order, however many rows there are.


def write_vectors(module: ir.Module, shape: ProductShape, isa: Isa) -> None:
    """Add "pack" and "multiply" to a module."""
    _pack_for_vectors(Code(module, "pack", 6, isa), shape)
    for name, rows, first in row_forms(_rows(isa)):
        _some_rows(Code(module, name, 8, isa), shape, rows, first)
    if shape.keeps(isa):
        _keep(Code(module, "keep", 7, isa), shape)
        _rows_of_kept(Code(module, "multiply_kept", 8, isa), _rows(isa)[0])
    _multiply_vectors(Code(module, "multiply", 8, isa), shape)


def _rows(isa: Isa) -> tuple[int, ...]:
    """How many share a load of weights: the most of them first."""
    return (4, 2, 1) if isa.registers >= 32 else (1,)


def row_forms(
    sizes: Sequence[int], *, name: str = "multiply", has_first: bool = True
) -> Iterator[tuple[str, int, bool]]:
    """List the kernels that ``each_rows`` runs: name, number of rows, whether of the first ones."""
    for rows in sizes:
        for first in (True, False) if has_first else (False,):
            yield _form_name(name, rows, first), rows, first


def _form_name(name: str, rows: int, first: bool) -> str:
    return f"{name}_{rows}" + "_first" * first


def each_rows(
    code: Code,
    num_rows: Int,
    sizes: Sequence[int],
    arguments: Callable[[Int], tuple[Int, ...]],
    *,
    name: str = "multiply",
    has_first: bool = True,
) -> None:
    """Run the kernels of ``row_forms`` over all rows, with their arguments from a row on.

    ``sizes`` are the numbers of rows that one of them takes: the largest first, 1 the last.
    ``has_first``: the first rows have kernels of their own.
    """

    def several(r: Int, rows: int) -> None:
        def run(first: bool) -> None:
            code.run(_form_name(name, rows, first), *arguments(r))

        if has_first:
            code.either(r.equals(0), lambda: run(True), lambda: run(False))
        else:
            run(False)

    done = code.whole(0)
    for rows in sizes:
        stop = num_rows if rows == 1 else done + (num_rows - done) // rows * rows
        code.each(stop, partial(several, rows=rows), step=rows, start=done)
        done = stop


def _pack_for_vectors(code: Code, shape: ProductShape) -> None:
    """(x, its row bytes, rows, inputs, target, room for a line): rows of whole steps."""
    x, row_bytes, num_rows, num_inputs, target, room = code.params
    step, size = shape.step(code.isa), shape.element_bytes
    whole, rest, steps = _divided(num_inputs, step)
    target_row = steps * LINE_BYTES

    def row(r: Int) -> None:
        source, to = x + r * row_bytes, target + r * target_row

        def some(n: Int, place: Int) -> None:
            code.write(_read_step(code, shape, place), to + n * LINE_BYTES)

        code.each(whole, lambda n: some(n, source + n * (step * size)))

        def last() -> None:
            copy_rest(code, size, source + whole * (step * size), rest, room)
            some(whole, room)

        code.when(rest >= 1, last)

    code.each(num_rows, row)
    code.end()


def _read_step(code: Code, shape: ProductShape, place: Int) -> Value:
    """As many inputs or weights as are multiplied at once: floats, or words of two bfloat16."""
    if shape.pairs(code.isa):
        return code.read(place, INTS)
    return load_as(code, place, shape.kind)


def _multiply_vectors(code: Code, shape: ProductShape) -> None:
    """(weights, their row bytes, inputs, x, rows, c, next, room): the sums of a block.

    They lie in panels of sixteen rows. Meanwhile memory is asked for the weights of ``next``.
    """
    weights, row_bytes, num_inputs, x, num_rows, sums, ahead, room = code.params
    step, size = shape.step(code.isa), shape.element_bytes
    whole, _, steps = _divided(num_inputs, step)
    x_row = steps * LINE_BYTES
    _copy_last(code, weights, row_bytes, num_inputs, room, step=step, size=size)

    def some_outputs(o: Int) -> None:
        here, line = weights + o * row_bytes, room + o * LINE_BYTES
        following = code.choose(o + OUTPUTS < BLOCK, weights + (o + OUTPUTS) * row_bytes, ahead)

        def sums_of(r: Int) -> Int:
            return sums + r // LANES * PANEL_BYTES + o * LINE_BYTES + r % LANES * 4

        def as_they_lie() -> None:
            def arguments(r: Int) -> tuple[Int, ...]:
                return (
                    here,
                    row_bytes,
                    num_inputs,
                    x + r * x_row,
                    x_row,
                    sums_of(r),
                    following,
                    line,
                )

            each_rows(code, num_rows, _rows(code.isa), arguments)

        if not shape.keeps(code.isa):
            as_they_lie()
            return
        kept = x + (num_rows + (LANES - 1)) // LANES * LANES * x_row
        parts = kept + KEPT_BYTES

        def as_floats(start: Int) -> None:
            count = (steps - start).at_most(KEPT_STEPS)
            own = (whole - start).at_most(count)
            code.run(
                "keep", here + start * (step * size), row_bytes, own, count, line,
                following + start * (step * size * OUTPUTS), kept,
            )  # fmt: skip

            def rows_of_kept(r: Int) -> None:
                code.run(
                    "multiply_kept", x + r * x_row + start * LINE_BYTES, x_row, count, kept,
                    start, steps - start - count, parts + r * PARTS_BYTES, sums_of(r),
                )  # fmt: skip

            code.each(num_rows, rows_of_kept, step=_rows(code.isa)[0])

        code.either(
            num_rows >= KEPT_ROWS,
            lambda: code.each(steps, as_floats, step=KEPT_STEPS),
            as_they_lie,
        )

    code.each(BLOCK, some_outputs, step=OUTPUTS)
    code.end()


def _keep(code: Code, shape: ProductShape) -> None:
    """(weights, their row bytes, steps, steps and the last, its inputs, next, target): floats.

    A step of all outputs lies side by side.
    """
    weights, row_bytes, whole, count, last, ahead, target = code.params
    step, size = shape.step(code.isa), shape.element_bytes

    def keep(n: Int, places: list[Int]) -> None:
        for o, place in enumerate(places):
            value = _read_step(code, shape, place)
            code.store(value, target + (n * OUTPUTS + o) * LINE_BYTES)

    def whole_step(n: Int) -> None:
        code.prefetch(ahead + n * (step * size * OUTPUTS), step * size * OUTPUTS)
        keep(n, [weights + row_bytes * o + n * (step * size) for o in range(OUTPUTS)])

    code.each(whole, whole_step)
    code.each(
        count, lambda n: keep(n, [last + o * LINE_BYTES for o in range(OUTPUTS)]), start=whole
    )
    code.end()


def _rows_of_kept(code: Code, rows: int) -> None:
    """(x, its row bytes, steps, kept weights, steps before, steps after, sums' parts, c).

    Sums go on from their parts where there were steps before, and end where there are none after.
    Rows behind the last one are multiplied too: there is memory for sixteen.
    """
    x, x_row, count, kept, before, after, parts, sums = code.params
    places = [parts + n * LINE_BYTES for n in range(OUTPUTS * rows)]

    def add(n: Int, totals: list[Value]) -> list[Value]:
        inputs = [code.load(x + x_row * r + n * LINE_BYTES) for r in range(rows)]
        weights = [code.load(kept + (n * OUTPUTS + o) * LINE_BYTES) for o in range(OUTPUTS)]
        return [
            code.fma(weights[n // rows], inputs[n % rows], total) for n, total in enumerate(totals)
        ]

    totals = [code.floats(0.0)] * (OUTPUTS * rows)
    totals = code.loop(before.at_most(1), totals, lambda _, __: [code.load(p) for p in places])
    totals = code.loop(count, totals, add)

    def keep_parts() -> None:
        for place, total in zip(places, totals, strict=True):
            code.store(total, place)

    code.either(after >= 1, keep_parts, lambda: _write_sums(code, totals, rows, sums))
    code.end()


def _some_rows(code: Code, shape: ProductShape, rows: int, first: bool) -> None:
    """(weights, their row bytes, inputs, x, its row bytes, c, next, the outputs' last inputs)."""
    weights, row_bytes, num_inputs, x, x_row, sums, ahead, last = code.params
    step, size = shape.step(code.isa), shape.element_bytes
    whole, has_rest, _ = _divided(num_inputs, step)
    some_bytes = OUTPUTS * step * size  # of weights
    places = [weights + row_bytes * o for o in range(OUTPUTS)]

    def add(totals: list[Value], n: Int, places: list[Int]) -> list[Value]:
        typ = INTS if shape.pairs(code.isa) else FLOATS
        inputs = [code.read(x + x_row * r + n * LINE_BYTES, typ) for r in range(rows)]
        found = []
        for o, place in enumerate(places):
            weight = _read_step(code, shape, place)
            for r in range(rows):
                total = totals[o * rows + r]
                found.append(
                    code.dot_pairs(total, weight, inputs[r])
                    if shape.pairs(code.isa)
                    else code.fma(weight, inputs[r], total)
                )
        return found

    def whole_step(n: Int, totals: list[Value]) -> list[Value]:
        if first:
            code.prefetch(ahead + n * some_bytes, some_bytes)
        return add(totals, n, [place + n * (step * size) for place in places])

    totals = code.loop(whole, [code.floats(0.0)] * (OUTPUTS * rows), whole_step)

    def rest(_: Int, totals: list[Value]) -> list[Value]:
        return add(totals, whole, [last + o * LINE_BYTES for o in range(OUTPUTS)])

    totals = code.loop(has_rest.at_most(1), totals, rest)
    _write_sums(code, totals, rows, sums)
    code.end()


def _write_sums(code: Code, totals: list[Value], rows: int, target: Int) -> None:
    """Write the sum of all lanes of each [outputs][rows]."""
    sums = code.lane_sums(totals)
    for o in range(OUTPUTS):
        some = code.shuffle(sums, sums, [o * rows + r for r in range(rows)])
        code.write(some, target + o * LINE_BYTES)


# -- outputs ---------------------------------------------------------------------------------------

# From sums to outputs: bias, activation, and one rounding where torch's separate ops round.


def write_turn(code: Code) -> None:
    """Add (sums of a panel): [16 outputs][16 rows] become [16 rows][16 outputs], where they are."""
    sums = code.params[0]
    places = [sums + n * LINE_BYTES for n in range(LANES)]
    for place, line in zip(places, code.transpose([code.load(p) for p in places]), strict=True):
        code.store(line, place)
    code.end()


def write_finish(code: Code, shape: ProductShape) -> None:
    """Add (sums, the other's, count, bias, the other's, out, its row bytes): a block's outputs.

    All of a row's are written at once: a line of the cache is whole then.
    """
    sums, others, count, bias, other_bias, out, out_row = code.params
    offsets = [(n * LANES * LINE_BYTES, n * LANES * shape.element_bytes) for n in range(_TILES)]

    def row(r: Int) -> None:
        def with_bias(place: Int, bias: Int) -> Value:
            return code.b.fadd(code.load(place + r * LINE_BYTES), load_as(code, bias, shape.kind))

        values = [with_bias(sums + panel, bias + beside) for panel, beside in offsets]
        if shape.activation is not None:
            several = [with_bias(others + panel, other_bias + beside) for panel, beside in offsets]
            values = [
                gated(code, value, other, shape.activation, shape.kind)
                for value, other in zip(values, several, strict=True)
            ]
        if shape.kind == "bf16":
            code.write(narrow(code, *values), out + r * out_row)
            return
        for value, (_, beside) in zip(values, offsets, strict=True):
            store_as(code, value, out + r * out_row + beside, shape.kind)

    code.each(count, row)
    code.end()


def gated(code: Code, gate: Value, up: Value, activation: str, kind: str) -> Value:
    """Compute act(gate) * up of outputs of a kind, each rounded where torch rounds it."""
    gate, up = rounded(code, gate, kind), rounded(code, up, kind)
    return code.b.fmul(rounded(code, activate(code, gate, activation), kind), up)


# -- the worker ------------------------------------------------------------------------------------


def write_worker(module: ir.Module, shape: ProductShape, isa: Isa) -> None:
    """Add "work" and all that it needs to a module. Its parameter is a frame's address."""
    if shape.tiles:
        write_tiles(module, isa)
    else:
        write_vectors(module, shape, isa)
    if shape.panel_rows(isa) is not None:
        write_panels(module, shape, isa)
    write_turn(Code(module, "turn", 1, isa))
    write_finish(Code(module, "finish", 7, isa), shape)
    _Worker(Code(module, "work", 1, isa), shape).write()


def each_item(code: Code, next_item: Int, num_items: Int, item: Callable[[Int, Int], None]) -> None:
    """Write ``item(number, following)`` for all that this thread takes by a counter's address.

    ``following`` is the one that it does next: it is taken before, so that memory is asked for it
    in time.
    """

    def take(_: Int, taken: list[Value]) -> list[Value]:
        number, following = Int(code.b, taken[0]), code.take(next_item)
        code.when(number < num_items, lambda: item(number, following))
        return [following.value]

    code.loop(num_items, [code.take(next_item).value], take)


def words_at(code: Code, table: Int, number: Int, names: tuple[str, ...]) -> dict[str, Int]:
    """Read the words of a table's entry, by their names."""
    address = table + number * (len(names) * WORD_BYTES)
    return {name: code.number(address + n * WORD_BYTES) for n, name in enumerate(names)}


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
        self._run(
            "pack", call["x"], call["x_row"], call["num_rows"], call["num_inputs"], self.inputs,
            self.room,
        )  # fmt: skip

        each_item(code, self.word("next_item"), call["num_items"], self._item)
        if self.shape.tiles:
            code.run("release_tiles")
        code.end()

    def _run(self, name: str, *arguments: Int) -> None:
        """Call a kernel, or that for panels where there are rows enough for them."""
        least = self.shape.panel_rows(self.code.isa)
        if least is None:
            self.code.run(name, *arguments)
            return
        self.code.either(
            self.call["num_rows"] >= least,
            lambda: self.code.run(f"{name}_panels", *arguments),
            lambda: self.code.run(name, *arguments),
        )

    def _item(self, number: Int, following: Int) -> None:
        """All outputs of an item; ``following`` is the one that this thread does next."""
        code, call = self.code, self.call
        item = words_at(code, call["items"], number, ITEM)
        after = words_at(code, call["items"], following.at_most(call["num_items"] - 1), ITEM)
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

    def _matrix(self, number: Int) -> dict[str, Int]:
        return words_at(self.code, self.frame + len(FRAME) * WORD_BYTES, number, MATRIX)

    def _first(self, matrix: dict[str, Int], start: Int) -> Int:
        """The last block begins earlier instead of being smaller: some outputs are found twice."""
        return start.at_most(matrix["num_outputs"] - BLOCK)

    def _weights(self, matrix: dict[str, Int], start: Int) -> Int:
        return matrix["weight"] + self._first(matrix, start) * matrix["weight_row"]

    def _multiply(self, matrix: dict[str, Int], weights: Int, sums: Int, ahead: Int) -> None:
        call = self.call
        self._run(
            "multiply", weights, matrix["weight_row"], call["num_inputs"], self.inputs,
            call["num_rows"], sums, ahead, self.room,
        )  # fmt: skip

    def _finish(self, matrix: dict[str, Int], other: dict[str, Int], start: Int) -> None:
        code, call, size = self.code, self.call, self.shape.element_bytes
        offset = self._first(matrix, start) * size

        def panel(first: Int) -> None:
            count = (call["num_rows"] - first).at_most(LANES)
            place = first * (PANEL_BYTES // LANES)
            for n in range(_TILES):
                code.run("turn", self.sums + place + n * _TILE_BYTES)
                if self.shape.activation is not None:
                    code.run("turn", self.other_sums + place + n * _TILE_BYTES)
            code.run(
                "finish", self.sums + place, self.other_sums + place, count,
                matrix["bias"] + offset, other["bias"] + offset,
                matrix["out"] + first * matrix["out_row"] + offset, matrix["out_row"],
            )  # fmt: skip

        code.each(call["num_rows"], panel, step=LANES)


# -- by AMX ----------------------------------------------------------------------------------------

# A block of outputs at a time by AMX: weights as they lie, inputs packed before.
#
#     c[o][r] = Σ_w weight[o][w] · x[r][w]     words w are pairs of bfloat16; o, r: sixteen each
#
# A tile of weights is sixteen rows of 64 bytes, as they lie; a tile of inputs is sixteen words of
# sixteen rows, packed so. Two tiles of weights and two of inputs share their loads; where there
# are more rows, the weights of a block come from the second cache again. Every sum is added up in
# the same order, however many rows there are. Source: Intel SDM, chapter on AMX.


STEP = 2 * LANES  # inputs of a tile
_TILE_BYTES = LANES * LINE_BYTES
_AT_ONCE = 2  # panels of sixteen rows
_TILES = BLOCK // LANES  # of weights
_SUMS, _WEIGHTS, _INPUTS = 0, 4, 6  # numbers of tiles
_STEP_BYTES = BLOCK * LINE_BYTES  # of a block's weights
_NOTHING = ir.VoidType()


def write_tiles(module: ir.Module, isa: Isa) -> None:
    """Add "pack", "multiply", "shape_tiles" and "release_tiles" to a module."""
    amx.write_shape(Code(module, "shape_tiles", 0, isa))
    amx.write_release(Code(module, "release_tiles", 0, isa))
    _pack_for_tiles(Code(module, "pack", 6, isa), _AT_ONCE, 2)
    for panels in range(1, _AT_ONCE + 1):
        for first in (True, False):
            _some_panels(Code(module, _tiles_name(panels, first), 7, isa), panels, first)
    _multiply_tiles(Code(module, "multiply", 8, isa))


def _tiles_name(panels: int, first: bool) -> str:
    return f"multiply_{panels}" + "_first" * first


def _pack_for_tiles(code: Code, at_once: int, size: int) -> None:
    """(x, its row bytes, rows, inputs, target, room): tiles [panels / n][steps][n][16][16] words.

    n panels are multiplied ``at_once``. Rows behind the last one repeat it. Inputs have ``size``
    bytes each.
    """
    x, row_bytes, num_rows, num_inputs, target, room = code.params
    whole, rest, steps = _divided(num_inputs, LINE_BYTES // size)
    whole_bytes = whole * LINE_BYTES
    panels = (num_rows + (LANES - 1)) // LANES

    def panel(first: Int) -> None:
        rows = [x + (first + n).at_most(num_rows - 1) * row_bytes for n in range(LANES)]
        number = first // LANES
        inside = number % at_once
        together = (panels - number + inside).at_most(at_once)
        here = target + ((number - inside) * steps + inside) * _TILE_BYTES

        def tile(places: list[Int], to: Int) -> None:
            lines = code.transpose([code.read(place, INTS) for place in places])
            for n, line in enumerate(lines):
                code.write(line, to + n * LINE_BYTES)

        def step(offset: Int) -> None:
            tile([row + offset for row in rows], here + offset * LANES * together)

        def last() -> None:
            lines = [room + n * LINE_BYTES for n in range(LANES)]
            for row, line in zip(rows, lines, strict=True):
                copy_rest(code, size, row + whole_bytes, rest, line)
            tile(lines, here + whole_bytes * LANES * together)

        code.each(whole_bytes, step, step=LINE_BYTES)
        code.when(rest >= 1, last)

    code.each(num_rows, panel, step=LANES)
    code.end()


def _multiply_tiles(code: Code) -> None:
    """(weights, their row bytes, inputs, x, rows, c, next, room): the sums of a block.

    They lie in panels of sixteen rows. Meanwhile memory is asked for the weights of ``next``.
    """
    weights, row_bytes, num_inputs, x, num_rows, sums, ahead, room = code.params
    panels = (num_rows + (LANES - 1)) // LANES
    whole, rest, steps = _divided(num_inputs, STEP)
    last = code.choose(rest >= 1, room, code.whole(0))

    def run(panel: Int, number: int, first: bool) -> None:
        code.run(
            _tiles_name(number, first), weights, row_bytes, whole, x + panel * steps * _TILE_BYTES,
            sums + panel * PANEL_BYTES, ahead, last,
        )  # fmt: skip

    def some_panels(panel: Int) -> None:
        def run_some(first: bool) -> None:
            code.either(
                panels - panel >= _AT_ONCE,
                lambda: run(panel, _AT_ONCE, first),
                lambda: run(panel, 1, first),
            )

        code.either(panel.equals(0), lambda: run_some(True), lambda: run_some(False))

    _copy_last(code, weights, row_bytes, num_inputs, room, step=STEP, size=2)
    code.each(panels, some_panels, step=_AT_ONCE)
    code.end()


def _some_panels(code: Code, panels: int, first: bool) -> None:
    """(weights, their row bytes, whole steps, x, c, next, the last inputs' weights or nothing)."""
    weights, row_bytes, steps, x, sums, ahead, last = code.params
    line = ir.Constant(I64, LINE_BYTES)
    pairs = [(o, p) for o in range(_TILES) for p in range(panels)]
    for number in range(len(pairs)):
        code.call("llvm.x86.tilezero", _NOTHING, _tile(_SUMS + number))

    def multiply(n: Int, here: Int, stride: Value) -> None:
        for p in range(panels):
            _load(code, _INPUTS + p, x + n * (_TILE_BYTES * panels) + p * _TILE_BYTES, line)
        for o in range(_TILES):
            _load(code, _WEIGHTS + o, here + Int(code.b, stride) * (o * LANES), stride)
            for p in range(panels):
                tiles = (_SUMS + o * panels + p, _WEIGHTS + o, _INPUTS + p)
                code.call("llvm.x86.tdpbf16ps", _NOTHING, *map(_tile, tiles))

    def step(n: Int) -> None:
        if first:
            code.prefetch(ahead + n * _STEP_BYTES, _STEP_BYTES)
        multiply(n, weights + n * LINE_BYTES, row_bytes.value)

    code.each(steps, step)
    code.when(last >= 1, lambda: multiply(steps, last, line))
    for number, (o, p) in enumerate(pairs):
        place = code.pointer(sums + p * PANEL_BYTES + o * _TILE_BYTES)
        code.call("llvm.x86.tilestored64", _NOTHING, _tile(_SUMS + number), place, line)
    code.end()


def _load(code: Code, number: int, place: Int, row_bytes: Value) -> None:
    code.call("llvm.x86.tileloadd64", _NOTHING, _tile(number), code.pointer(place), row_bytes)


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


# -- by panels of rows -----------------------------------------------------------------------------

# A block of outputs at a time: weights as they lie, inputs packed before, as for tiles.
#
#     c[o][r] = Σ_w weight[o][w] · x[w][r]     words w are pairs of bfloat16, or floats;
#                                              r: sixteen rows, which are the lanes
#
# No sum crosses a vector, and a word of weights is read once for up to three panels. One row takes
# as long as sixteen, which is no longer than memory takes where all cores read. Every sum is added
# up in the order of its inputs, however many rows there are.

_WORDS = 4  # of each output, between two looks at the loop's end


def write_panels(module: ir.Module, shape: ProductShape, isa: Isa) -> None:
    """Add "pack_panels" and "multiply_panels" to a module."""
    size, pairs = shape.element_bytes, shape.pairs(isa)
    _pack_for_tiles(Code(module, "pack_panels", 6, isa), 1, size)
    alone = (*ONE_PANEL_OUTPUTS, *ALIASED_OUTPUTS) if pairs else PANEL_OUTPUTS
    forms = {*product((1,), alone), *product(range(2, MOST_PANELS + 1), PANEL_OUTPUTS)}
    for (panels, outputs), first in product(sorted(forms), (True, False)):
        code = Code(module, _panels_name(panels, outputs, first), 8, isa)
        _rows_of_panels(code, panels, outputs, first, pairs=pairs)
    _multiply_panels(Code(module, "multiply_panels", 8, isa), size, pairs=pairs)


def _panels_name(panels: int, outputs: int, first: bool) -> str:
    return f"panels_{panels}_{outputs}" + "_first" * first


def _multiply_panels(code: Code, size: int, *, pairs: bool) -> None:
    """(weights, their row bytes, inputs, x, rows, c, next, room): as "multiply" of tiles."""
    weights, row_bytes, num_inputs, x, num_rows, sums, ahead, room = code.params
    panels = (num_rows + (LANES - 1)) // LANES
    step = LINE_BYTES // size
    whole, rest, steps = _divided(num_inputs, step)
    panel_bytes = steps * _TILE_BYTES

    def run(panel: Int, number: int, first: bool) -> None:
        if number > 1 or not pairs:
            run_parts(panel, number, PANEL_OUTPUTS, first)
            return
        code.either(
            (row_bytes % ALIAS_BYTES).equals(0),
            lambda: run_parts(panel, number, ALIASED_OUTPUTS, first),
            lambda: run_parts(panel, number, ONE_PANEL_OUTPUTS, first),
        )

    def run_parts(panel: Int, number: int, parts: tuple[int, ...], first: bool) -> None:
        o = 0
        for outputs in parts:
            after = o + outputs
            code.run(
                _panels_name(number, outputs, first), weights + row_bytes * o, row_bytes, whole,
                x + panel * panel_bytes, panel_bytes,
                sums + panel * PANEL_BYTES + o * LINE_BYTES,
                weights + row_bytes * after if after < BLOCK else ahead,
                code.choose(rest >= 1, room + o * LINE_BYTES, code.whole(0)),
            )  # fmt: skip
            o = after

    def some_panels(panel: Int) -> None:
        def run_some(number: int, first: bool) -> None:
            if number == 1:
                run(panel, number, first)
                return
            code.either(
                panels - panel >= number,
                lambda: run(panel, number, first),
                lambda: run_some(number - 1, first),
            )

        code.either(
            panel.equals(0),
            lambda: run_some(MOST_PANELS, True),
            lambda: run_some(MOST_PANELS, False),
        )

    _copy_last(code, weights, row_bytes, num_inputs, room, step=step, size=size)
    code.each(panels, some_panels, step=MOST_PANELS)
    code.end()


def _rows_of_panels(code: Code, panels: int, outputs: int, first: bool, *, pairs: bool) -> None:
    """(weights, row bytes, whole steps, x, a panel's bytes, c, next, last weights or nothing)."""
    weights, row_bytes, steps, x, panel_bytes, sums, ahead, last = code.params
    words = steps * LANES
    one, many = (I32, INTS) if pairs else (F32, FLOATS)

    def multiply(total: Value, weight: Value, inputs: Value) -> Value:
        return code.dot_pairs(total, weight, inputs) if pairs else code.fma(weight, inputs, total)

    def add(totals: list[Value], place: Int, stride: Int, given: Int) -> list[Value]:
        found = list(totals)
        for w in range(_WORDS):
            inputs = [
                code.read(given + panel_bytes * p + w * LINE_BYTES, many) for p in range(panels)
            ]
            for o in range(outputs):
                weight = code.splat(code.read(place + stride * o + w * 4, one))
                for p in range(panels):
                    at = o * panels + p
                    found[at] = multiply(found[at], weight, inputs[p])
        return found

    def some_words(word: Int, totals: list[Value]) -> list[Value]:
        if first:
            code.prefetch(ahead + word * (outputs * 4), outputs * _WORDS * 4)
        return add(totals, weights + word * 4, row_bytes, x + word * LINE_BYTES)

    totals = code.loop(words, [code.floats(0.0)] * (outputs * panels), some_words, step=_WORDS)

    def rest(word: Int, totals: list[Value]) -> list[Value]:
        given = x + (words + word) * LINE_BYTES
        return add(totals, last + word * 4, code.whole(LINE_BYTES), given)

    has_rest = code.choose(last >= 1, code.whole(LANES), code.whole(0))
    totals = code.loop(has_rest, totals, rest, step=_WORDS)
    for number, total in enumerate(totals):
        o, p = divmod(number, panels)
        code.store(total, sums + p * PANEL_BYTES + o * LINE_BYTES)
    code.end()
