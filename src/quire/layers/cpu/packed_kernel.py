"""What each thread does during a call of a packed product.

It makes its inputs ready, then takes blocks of outputs until none is left: record after record, as
they lie in memory. Lanes are outputs, so that no sum runs across a vector.

    sums[r][n] += scale[n] · Σ_k (code[n][k] - zero[n]) · x[r][k]        of a group's inputs k

Where a CPU multiplies bytes, an input is a few of them (``PackedShape.digits``), with one scale for
a row's group: x = s · (d0 + (d1 + d2 / 254) / 254). Sums of bytes are exact. Elsewhere codes become
floats. In both ways a row's sums are added up in the same order, however many rows there are.
"""

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from llvmlite.ir import Value

from quire.kernels.language import (
    BYTES,
    F32,
    FLOATS,
    I32,
    INTS,
    LANES,
    LINE_BYTES,
    Code,
    Int,
    Isa,
)
from quire.kernels.number_formats import load_as, store_as
from quire.layers.cpu.linear_frame import WORD_BYTES
from quire.layers.cpu.linear_kernel import each_item, each_rows, gated, row_forms, words_at
from quire.layers.cpu.packed_frame import (
    FRAME,
    ITEM,
    MATRIX,
    SUMS_BYTES,
    UNPACK_FRAME,
    PackedShape,
)
from quire.layers.cpu.packed_weight import BLOCK, PANEL, PANELS, STEP

_TILE_BYTES = 2**14  # of records that stay in the nearest cache while rows pass by
_AHEAD_BYTES = 2**13  # that memory is asked for a line, before it is read
_DIGIT = 254.0  # of the next byte: what is left of one is at most a half
_MOST = 127.0

# -- inputs ----------------------------------------------------------------------------------------


def _write_pack(code: Code, shape: PackedShape) -> None:
    """Add (x, its row bytes, rows, inputs, groups, target, notes, room for a line)."""
    x, row_bytes, num_rows, num_inputs, num_groups, target, notes, room = code.params
    isa, group_size = code.isa, shape.form.group_size

    def group(g: Int, r: Int) -> None:
        source = x + r * row_bytes + g * (group_size * shape.element_bytes)
        number = r * num_groups + g
        to = target + number * shape.group_bytes(isa)
        note = notes + number * shape.notes_bytes(isa)
        left = num_inputs - g * group_size
        with_group(
            code, shape, source, left, room,
            lambda values: _write_group(code, shape, values, to, note),
        )  # fmt: skip

    code.each(num_rows, lambda r: code.each(num_groups, lambda g: group(g, r)))
    code.end()


def with_group(
    code: Code,
    shape: PackedShape,
    source: Int,
    left: Int,
    room: Int,
    body: Callable[[list[Value]], None],
) -> None:
    """Write ``body(floats of a row's group)``: zeros are behind the ``left`` elements of the row.

    ``room`` is memory for the floats of a group.
    """
    group_size, size = shape.form.group_size, shape.element_bytes
    pieces = [(n, min(LANES, group_size - n)) for n in range(0, group_size, LANES)]

    def whole() -> None:
        body([load_as(code, source + n * size, shape.kind, count) for n, count in pieces])

    def part() -> None:
        for n, _ in pieces:
            code.store(code.floats(0.0), room + n * 4)

        def one(k: Int) -> None:
            value = load_as(code, source + k * size, shape.kind, 1)
            code.write(code.b.extract_element(value, ir.Constant(I32, 0)), room + k * 4)

        code.each(left, one)
        body([load_as(code, room + n * 4, "f32", count) for n, count in pieces])

    code.either(left >= group_size, whole, part)


def _write_group(
    code: Code, shape: PackedShape, values: list[Value], target: Int, note: Int
) -> None:
    """A row's group of inputs, and what is noted of it."""
    digits, form = shape.digits(code.isa), shape.form
    counts = [min(LANES, form.group_size - n * LANES) for n in range(len(values))]
    lane = ir.Constant(I32, 0)
    if not digits:
        for n, (value, count) in enumerate(zip(values, counts, strict=True)):
            store_as(code, value, target + n * LINE_BYTES, "f32", count)
        code.write(code.sum(_added(code, values)), note)
        return
    amax = code.splat(code.b.bitcast(code.largest_magnitude(values), F32))
    scale = code.b.fdiv(amax, code.floats(_MOST))
    by = code.b.fdiv(code.floats(_MOST), amax)
    sums = [code.ints(0)] * digits
    for n, (value, count) in enumerate(zip(values, counts, strict=True)):
        rest = _number(code, code.b.fmul(value, by))
        for d in range(digits):
            digit = code.round(rest)
            whole = code.b.fptosi(digit, INTS)
            sums[d] = code.b.add(sums[d], whole)
            found = code.b.trunc(whole, BYTES)
            if count < LANES:
                found = code.shuffle(found, found, list(range(count)))
            code.write(found, target + d * form.group_size + n * LANES)
            rest = code.b.fmul(code.b.fsub(rest, digit), code.floats(_DIGIT))
    totals = [code.sum_ints(each) for each in sums]
    for d, total in enumerate(totals):  # codes have no sign there: they count from the lowest one
        code.write(code.b.mul(total, ir.Constant(I32, form.least)), note + d * 4)
    code.write(code.b.extract_element(scale, lane), note + digits * 4)
    inputs = _of_digits(code, [code.b.sitofp(code.splat(total), FLOATS) for total in totals])
    inputs = code.b.fmul(inputs, scale)
    code.write(code.b.extract_element(inputs, lane), note + digits * 4 + 4)


def _number(code: Code, value: Value) -> Value:
    """From -127 to 127; 0 for what is no number, of which the scale tells."""
    value = code.b.select(code.b.fcmp_ordered("ord", value, value), value, code.floats(0.0))
    return code.max(code.min(value, code.floats(_MOST)), code.floats(-_MOST))


def _added(code: Code, values: list[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        total = code.b.fadd(total, value)
    return total


def _of_digits(code: Code, sums: list[Value]) -> Value:
    """d0 + (d1 + d2 / 254) / 254, of floats."""
    total = sums[-1]
    for each in reversed(sums[:-1]):
        total = code.fma(total, code.floats(1 / _DIGIT), each)
    return total


# -- products --------------------------------------------------------------------------------------


class _Asking:
    """Asks memory for what comes next, which is ``gap`` farther on from ``end`` on."""

    def __init__(self, code: Code, end: Int, gap: Int) -> None:
        self._code, self._end, self._gap = code, end, gap

    def __call__(self, place: Int, nbytes: int) -> None:
        """For what a reader of ``nbytes`` at a place will read."""
        code, ahead = self._code, place + _AHEAD_BYTES
        code.prefetch(code.choose(ahead < self._end, ahead, ahead + self._gap), nbytes)


def _write_keep(code: Code, shape: PackedShape) -> None:
    """(records, their number, kept, end, gap): codes of some records become bytes without a sign.

    Kept are, for each group, [group_size / 4][4 panels][16 outputs][4 inputs].
    """
    records, count, kept, end, gap = code.params
    form = shape.form
    step_bytes, ask = BLOCK * STEP * form.bits // 8, _Asking(code, end, gap)

    def group(g: Int) -> None:
        record = records + g * form.record_bytes

        def step(k: Int) -> None:
            codes = record + k * (step_bytes // STEP)
            to = kept + (g * form.group_size + k) * BLOCK
            ask(codes, step_bytes)
            for p in range(PANELS):
                for half, value in enumerate(_bytes_of(code, shape, codes, p)):
                    code.write(value, to + (half * PANELS + p) * LINE_BYTES)

        code.each(form.group_size, step, step=STEP)
        ask(record + form.codes_bytes, form.record_bytes - form.codes_bytes)

    code.each(count, group)
    code.end()


def _write_some_rows(code: Code, shape: PackedShape, rows: int, first: bool, kept: bool) -> None:
    """(records, their number, kept, x, its row bytes, notes, their row bytes, sums, end, gap).

    The ``first`` rows ask memory for what comes next; where codes are ``kept``, keeping them has.
    """
    records, count, kept_codes, x, x_row, notes, notes_row, sums, end, gap = code.params
    form, isa = shape.form, code.isa
    digits = shape.digits(isa)
    step_bytes, asking = BLOCK * STEP * form.bits // 8, _Asking(code, end, gap)

    def ask(place: Int, nbytes: int) -> None:
        if first:
            asking(place, nbytes)

    def group(g: Int) -> None:
        record = records + g * form.record_bytes
        inputs = [x + x_row * r + g * shape.group_bytes(isa) for r in range(rows)]
        note = [notes + notes_row * r + g * shape.notes_bytes(isa) for r in range(rows)]
        if digits:
            begin = [
                code.splat(code.read(note[r] + d * 4, I32))
                for _ in range(PANELS) for r in range(rows) for d in range(digits)
            ]  # fmt: skip
        else:
            begin = [code.floats(0.0)] * (PANELS * rows)

        def step(k: Int, totals: list[Value]) -> list[Value]:
            codes = record + k * (step_bytes // STEP)
            ask(codes, step_bytes)
            if not digits:
                return _add_floats(code, shape, codes, inputs, k, totals)
            if kept:
                codes = kept_codes + (g * form.group_size + k) * BLOCK
            return _add_bytes(code, shape, codes, inputs, k, totals, kept)

        totals = code.loop(form.group_size, begin, step, step=STEP)
        scales = record + form.codes_bytes
        ask(scales, form.record_bytes - form.codes_bytes)
        _add_group(code, shape, totals, scales, note, sums)

    code.each(count, group)
    code.end()


def _add_group(
    code: Code, shape: PackedShape, totals: list[Value], scales: Int, note: list[Int], sums: Int
) -> None:
    """Add a group's totals, times its scales and the inputs' own, to the rows' sums."""
    digits, rows = shape.digits(code.isa), len(note)
    for p in range(PANELS):
        scale, zero = _scale_and_zero(code, shape, scales, p)
        if zero is not None:
            zero = code.b.fsub(code.floats(0.0), zero)
        for r in range(rows):
            at = p * rows + r
            if digits:
                own = totals[at * digits : (at + 1) * digits]
                value = _of_digits(code, [code.b.sitofp(each, FLOATS) for each in own])
                value = code.b.fmul(value, code.splat(code.read(note[r] + digits * 4, F32)))
                of_inputs = note[r] + (digits * 4 + 4)
            else:
                value, of_inputs = totals[at], note[r]
            if zero is not None:
                value = code.fma(zero, code.splat(code.read(of_inputs, F32)), value)
            place = sums + r * SUMS_BYTES + p * LINE_BYTES
            code.store(code.fma(scale, value, code.load(place)), place)


def _scale_and_zero(
    code: Code, shape: PackedShape, scales: Int, panel: int
) -> tuple[Value, Value | None]:
    """Those of a panel's outputs, of a record whose scales begin there."""
    form = shape.form
    place = scales + panel * PANEL * form.scale_dtype.itemsize
    scale = load_as(code, place, shape.scale_kind)
    if not form.has_zeros:
        return scale, None
    return scale, load_as(code, scales + (form.scales_bytes + panel * PANEL), "i8")


def _add_bytes(
    code: Code,
    shape: PackedShape,
    codes: Int,
    inputs: list[Int],
    k: Int,
    totals: list[Value],
    kept: bool,
) -> list[Value]:
    """Eight inputs of a block's outputs, as sums of bytes."""
    digits, size = shape.digits(code.isa), shape.form.group_size
    found, rows = list(totals), len(inputs)
    read = _kept_bytes if kept else partial(_bytes_of, shape=shape)
    weights = [read(code, codes=codes, panel=p) for p in range(PANELS)]
    for half in range(2):
        for r, row in enumerate(inputs):
            for d in range(digits):
                # Read where it is used: there are no registers for all of them.
                given = code.splat(code.read(row + k + (d * size + half * 4), I32))
                for p in range(PANELS):
                    at = (p * rows + r) * digits + d
                    found[at] = code.dot_bytes(found[at], weights[p][half], given)
    return found


def _kept_bytes(code: Code, codes: Int, panel: int) -> list[Value]:
    return [code.read(codes + (half * PANELS + panel) * LINE_BYTES, INTS) for half in range(2)]


def _bytes_of(code: Code, shape: PackedShape, codes: Int, panel: int) -> list[Value]:
    """The first and the last four of eight inputs: bytes without a sign, from the lowest code."""
    if shape.form.bits == 4:
        words, nibbles = code.read(codes + panel * LINE_BYTES, INTS), code.ints(0x0F0F0F0F)
        return [code.b.and_(words, nibbles), code.b.and_(_right(code, words, 4), nibbles)]
    return [
        code.b.xor(
            code.read(codes + (half * PANELS + panel) * LINE_BYTES, INTS), code.ints(-0x7F7F7F80)
        )
        for half in range(2)
    ]


def _right(code: Code, words: Value, bits: int) -> Value:
    return code.b.lshr(words, code.ints(bits)) if bits else words


def _add_floats(
    code: Code, shape: PackedShape, codes: Int, inputs: list[Int], k: Int, totals: list[Value]
) -> list[Value]:
    """Eight inputs of a block's outputs, one after the other."""
    found = list(totals)
    for p in range(PANELS):
        for n, weights in _floats_of(code, shape, codes, p):
            for r, row in enumerate(inputs):
                value = code.splat(code.read(row + (k + n) * 4, F32))
                at = p * len(inputs) + r
                found[at] = code.fma(weights, value, found[at])
    return found


def _floats_of(code: Code, shape: PackedShape, codes: Int, panel: int) -> list[tuple[int, Value]]:
    """Eight codes of a panel's outputs as floats, each with the number of its input."""
    found = []
    if shape.form.bits == 4:
        words = code.read(codes + panel * LINE_BYTES, INTS)
        table = ir.Constant(FLOATS, [float(n + shape.form.least) for n in range(LANES)])
        for place in range(STEP):
            here = _right(code, words, 4 * place)
            if code.isa.registers >= 32:
                value = code.look_up(table, here)
            else:
                here = code.b.and_(here, code.ints(15))
                here = code.b.add(here, code.ints(shape.form.least))
                value = code.b.sitofp(here, FLOATS)
            found.append((place // 2 + place % 2 * 4, value))
        return found
    for half in range(2):
        words = code.read(codes + (half * PANELS + panel) * LINE_BYTES, INTS)
        for byte in range(4):
            left = code.b.shl(words, code.ints(24 - 8 * byte)) if byte < 3 else words
            value = code.b.sitofp(code.b.ashr(left, code.ints(24)), FLOATS)
            found.append((half * 4 + byte, value))
    return found


def _write_multiply(code: Code, shape: PackedShape) -> None:
    """(records, groups, x, notes, rows, sums, room for kept codes, end, gap): a block's sums."""
    records, num_groups, x, notes, num_rows, sums, room, end, gap = code.params
    x_row = num_groups * shape.group_bytes(code.isa)
    notes_row = num_groups * shape.notes_bytes(code.isa)
    code.each(
        num_rows * SUMS_BYTES, lambda n: code.store(code.floats(0.0), sums + n), step=LINE_BYTES
    )

    def tile(start: Int, some: int, kept: bool) -> None:
        count = (num_groups - start).at_most(some)
        here = records + start * shape.form.record_bytes

        def arguments(r: Int) -> tuple[Int, ...]:
            return (
                here, count, room,
                x + r * x_row + start * shape.group_bytes(code.isa), x_row,
                notes + r * notes_row + start * shape.notes_bytes(code.isa), notes_row,
                sums + r * SUMS_BYTES, end, gap,
            )  # fmt: skip

        if kept:
            code.run("keep", here, count, room, end, gap)
        each_rows(
            code, num_rows, shape.rows(code.isa), arguments, name=_name(kept), has_first=not kept
        )

    def tiles(some: int, kept: bool) -> None:
        code.each(num_groups, partial(tile, some=some, kept=kept), step=some)

    as_they_lie = max(1, _TILE_BYTES // shape.form.record_bytes)
    if shape.digits(code.isa):
        many = num_rows >= shape.worth_keeping
        code.either(many, lambda: tiles(shape.kept_groups, True), lambda: tiles(as_they_lie, False))
    else:
        tiles(as_they_lie, False)
    code.end()


def _name(kept: bool) -> str:
    return "multiply_kept" if kept else "multiply"


# -- outputs ---------------------------------------------------------------------------------------


def _write_finish(code: Code, shape: PackedShape) -> None:
    """(sums, the other's, rows, outputs, bias, the other's, out, its row bytes, room for a line).

    Bias, activation, and one rounding where torch's separate operations round.
    """
    sums, others, num_rows, outputs, bias, other_bias, out, out_row, room = code.params
    size = shape.element_bytes

    def panel(r: Int, p: int) -> None:
        def with_bias(place: Int, biases: Int) -> Value:
            value = code.load(place + r * SUMS_BYTES + p * LINE_BYTES)
            return code.b.fadd(value, load_as(code, biases + p * PANEL * size, shape.kind))

        value = with_bias(sums, bias)
        if shape.activation is not None:
            other = with_bias(others, other_bias)
            value = gated(code, value, other, shape.activation, shape.kind)
        target = out + r * out_row + p * PANEL * size

        def some() -> None:
            store_as(code, value, room, shape.kind)
            typ = {4: I32, 2: ir.IntType(16)}[size]
            code.each(
                (outputs - p * PANEL) * size,
                lambda n: code.write(code.read(room + n, typ), target + n),
                step=size,
            )

        whole = outputs >= (p + 1) * PANEL
        code.either(whole, lambda: store_as(code, value, target, shape.kind), some)

    def row(r: Int) -> None:
        panel(r, 0)
        for p in range(1, PANELS):
            with code.b.if_then(outputs >= p * PANEL + 1):
                panel(r, p)

    code.each(num_rows, row)
    code.end()


# -- the worker ------------------------------------------------------------------------------------


def write_worker(module: ir.Module, shape: PackedShape, isa: Isa) -> None:
    """Add "work" and all that it needs to a module. Its parameter is a frame's address."""
    _write_pack(Code(module, "pack", 8, isa), shape)
    for kept in (False, True) if shape.digits(isa) else (False,):
        for name, rows, first in row_forms(shape.rows(isa), name=_name(kept), has_first=not kept):
            _write_some_rows(Code(module, name, 10, isa), shape, rows, first, kept)
    if shape.digits(isa):
        _write_keep(Code(module, "keep", 5, isa), shape)
    _write_multiply(Code(module, "multiply", 9, isa), shape)
    _write_finish(Code(module, "finish", 9, isa), shape)
    _write_work(Code(module, "work", 1, isa), shape)


def _write_work(code: Code, shape: PackedShape) -> None:
    frame = code.params[0]

    def word(name: str) -> Int:
        return frame + FRAME.index(name) * WORD_BYTES

    call = {name: code.number(word(name)) for name in FRAME if not name.startswith("next")}
    number = code.take(word("next_thread"))
    room = call["scratch"] + number * call["scratch_bytes"]
    sums = room + LINE_BYTES
    others = sums + call["num_rows"] * SUMS_BYTES
    kept = others + call["num_rows"] * SUMS_BYTES
    inputs = kept + shape.kept_bytes
    notes = inputs + call["num_rows"] * call["num_groups"] * shape.group_bytes(code.isa)
    code.run(
        "pack", call["x"], call["x_row"], call["num_rows"], call["num_inputs"],
        call["num_groups"], inputs, notes, sums,  # which are not used yet
    )  # fmt: skip

    def matrix_of(number: Int) -> dict[str, Int]:
        return words_at(code, frame + len(FRAME) * WORD_BYTES, number, MATRIX)

    block_bytes = call["num_groups"] * shape.form.record_bytes
    is_gated = shape.activation is not None

    def place(matrix: dict[str, Int], block: Int) -> Int:
        return matrix["data"] + block * block_bytes

    def multiply(begin: Int, to: Int, end: Int, following: Int) -> None:
        code.run(
            "multiply", begin, call["num_groups"], inputs, notes, call["num_rows"], to, kept, end,
            following - end,
        )  # fmt: skip

    def item(number: Int, following: Int) -> None:
        """All blocks of an item; ``following`` is the one that this thread does next."""
        own = words_at(code, call["items"], number, ITEM)
        after = words_at(code, call["items"], following.at_most(call["num_items"] - 1), ITEM)
        matrix = matrix_of(own["matrix"])
        beyond = place(matrix_of(after["matrix"]), after["start"])
        other = matrix_of(code.whole(1)) if is_gated else matrix

        def block(b: Int) -> None:
            here, end = place(matrix, b), place(matrix, b + 1)
            if is_gated:
                there = place(other, b)
                more = code.choose(b + 1 < own["stop"], end, beyond)
                multiply(here, sums, end, there)
                multiply(there, others, place(other, b + 1), more)
            else:
                multiply(here, sums, place(matrix, own["stop"]), beyond)
            first = b * BLOCK
            offset = first * shape.element_bytes
            code.run(
                "finish", sums, others, call["num_rows"],
                (matrix["num_outputs"] - first).at_most(BLOCK), matrix["bias"] + offset,
                other["bias"] + offset, matrix["out"] + offset, matrix["out_row"], room,
            )  # fmt: skip

        code.each(own["stop"], block, start=own["start"])

    each_item(code, word("next_item"), call["num_items"], item)
    code.end()


# -- weights for torch -----------------------------------------------------------------------------


def write_unpacker(module: ir.Module, shape: PackedShape, isa: Isa) -> None:
    """Add "work" to a module: blocks of weights become numbers of the shape's kind, [K][outputs].

    Inputs and outputs behind the last one are zeros.
    """
    code = Code(module, "work", 1, isa)
    frame, form, size = code.params[0], shape.form, shape.element_bytes
    call = {name: code.number(frame + n * WORD_BYTES) for n, name in enumerate(UNPACK_FRAME) if n}
    step_bytes = BLOCK * STEP * form.bits // 8

    def item() -> None:
        block = code.take(frame) + call["start"]
        code.leave_when(block >= call["stop"])
        target = call["target"] + (block - call["start"]) * (BLOCK * size)

        def group(g: Int) -> None:
            record = call["data"] + (block * call["num_groups"] + g) * form.record_bytes
            scales = record + form.codes_bytes
            rows = target + g * form.group_size * call["target_row"]
            for p in range(PANELS):
                scale, zero = _scale_and_zero(code, shape, scales, p)

                def step(
                    k: Int, p: int = p, scale: Value = scale, zero: Value | None = zero
                ) -> None:
                    codes = record + k * (step_bytes // STEP)
                    for n, value in _floats_of(code, shape, codes, p):
                        whole = value if zero is None else code.b.fsub(value, zero)
                        place = rows + (k + n) * call["target_row"] + p * PANEL * size
                        store_as(code, code.b.fmul(whole, scale), place, shape.kind)

                code.each(form.group_size, step, step=STEP)

        code.each(call["num_groups"], group)

    code.forever(item)
    code.end()
