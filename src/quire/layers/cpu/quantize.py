"""Weights into records, at the speed at which memory gives them: ``packed_weight.quantize`` itself
is the slow twin, and the bytes are the same, but for the sign of the zeros behind the last output.

A thread takes a block of outputs and goes through its groups. Each output's codes become words of
eight inputs, which are written to where the record has them.
"""

import struct

import torch
from llvmlite import ir
from llvmlite.ir import Value
from torch import Tensor

from quire.kernels.compile import KINDS, Kernels, words
from quire.kernels.language import (
    BYTES,
    I32,
    I64,
    INTS,
    LANES,
    LINE_BYTES,
    Code,
    Int,
    Isa,
)
from quire.kernels.number_formats import rounded, store_as
from quire.kernels.threads import Threads
from quire.layers.cpu.linear_frame import WORD_BYTES
from quire.layers.cpu.packed_frame import PackedShape
from quire.layers.cpu.packed_kernel import with_group
from quire.layers.cpu.packed_weight import BLOCK, STEP, PackedForm, PackedWeight, quantize
from quire.units import align_up, ceil_div

_COUNTERS = ("next_block", "next_thread", "num_bad")  # shared by the threads
_FRAME = (
    *_COUNTERS,
    "weight", "weight_row", "num_outputs", "num_inputs", "num_groups", "num_blocks",
    "data", "scratch", "scratch_bytes",
)  # fmt: skip
_NOT_FINITE = 0x7F800000  # magnitudes from here on are infinite, or no number
_KINDS = ("f32", "bf16", "f16")


class Quantizer:
    """Rounds weights to a form. What has no kernel, ``packed_weight.quantize`` rounds."""

    def __init__(self, form: PackedForm, kernels: Kernels, threads: Threads) -> None:
        self._form = form
        self._kernels = kernels
        self._threads = threads

    def fits(self, weight: Tensor) -> bool:
        """Tell whether there is a kernel for weights [N, K]."""
        is_plain = weight.device.type == "cpu" and weight.dim() == 2 and weight.stride(1) == 1
        return is_plain and KINDS.get(weight.dtype) in _KINDS and weight.numel() > 0

    def __call__(self, weight: Tensor, out: Tensor | None = None) -> PackedWeight:
        """Pack weights [N, K]. ``out`` is where the data is to lie, u8[bytes].

        Raises: ValueError as ``packed_weight.quantize``.
        """
        form = self._form
        if not self.fits(weight):
            return quantize(weight, form, out)
        shape = PackedShape(kind=KINDS[weight.dtype], form=form)
        work = self._kernels.address(
            f"quantize {shape}", lambda module: write_quantizer(module, shape, self._kernels.isa)
        )
        num_outputs, num_inputs = weight.shape
        blocks, groups, record_bytes = form.shape(num_outputs, num_inputs)
        if out is None:
            out = torch.empty(blocks * groups * record_bytes, dtype=torch.uint8)
        num_threads = min(self._threads.most, blocks)
        room = _room_bytes(form)
        scratch = torch.empty(room * num_threads, dtype=torch.uint8)
        # A thread counts in the frame: what is counted there is read from it afterwards.
        frame = torch.tensor(
            [
                0, 0, 0, *words(weight, 1), num_outputs, num_inputs, groups, blocks,
                out.data_ptr(), scratch.data_ptr(), room,
            ]
        )  # fmt: skip
        call = struct.pack("q", frame.data_ptr())
        self._threads.run(work, call, num_threads)
        if int(frame[_FRAME.index("num_bad")]):
            return quantize(weight, form, out)  # which says what is wrong
        return PackedWeight(out.view(blocks, groups, record_bytes), num_outputs, num_inputs, form)


def _room_bytes(form: PackedForm) -> int:
    """Count the bytes of a thread: a group as floats, and as codes."""
    return align_up(form.group_size, LANES) * (4 + 1) + LINE_BYTES


def write_quantizer(module: ir.Module, shape: PackedShape, isa: Isa) -> None:
    """Add "work" to a module. Its parameter is the address of a frame's address."""
    code = Code(module, "work", 1, isa)
    form, frame = shape.form, code.number(code.params[0])

    def word(name: str) -> Int:
        return frame + _FRAME.index(name) * WORD_BYTES

    call = {name: code.number(word(name)) for name in _FRAME if name not in _COUNTERS}
    number = code.take(word("next_thread"))
    room = call["scratch"] + number * call["scratch_bytes"]
    codes = room + align_up(form.group_size, LANES) * 4

    def output(o: Int, block: Int, g: Int, record: Int) -> None:
        source = call["weight"] + (block * BLOCK + o) * call["weight_row"]
        source += g * (form.group_size * shape.element_bytes)
        left = call["num_inputs"] - g * form.group_size
        with_group(
            code, shape, source, left, room,
            lambda values: _write_output(code, shape, values, record, o, codes, word("num_bad")),
        )  # fmt: skip

    def item() -> None:
        block = code.take(word("next_block"))
        code.leave_when(block >= call["num_blocks"])
        outputs = (call["num_outputs"] - block * BLOCK).at_most(BLOCK)

        def group(g: Int) -> None:
            record = call["data"] + (block * call["num_groups"] + g) * form.record_bytes
            code.each(outputs, lambda o: output(o, block, g, record))
            zeros = [code.floats(0.0)] * ceil_div(form.group_size, LANES)
            code.each(
                BLOCK,
                lambda o: _write_output(code, shape, zeros, record, o, codes, word("num_bad")),
                start=outputs,
            )

        code.each(call["num_groups"], group)

    code.forever(item)
    code.end()


def _write_output(
    code: Code,
    shape: PackedShape,
    values: list[Value],
    record: Int,
    o: Int,
    codes: Int,
    num_bad: Int,
) -> None:
    """One output's group: its scale, its zero, and its codes as words."""
    form, b = shape.form, code.b
    least, most = code.floats(float(form.least)), code.floats(float(-form.least - 1))
    counts = [min(LANES, form.group_size - n * LANES) for n in range(len(values))]
    bad = b.icmp_unsigned(">=", code.largest_magnitude(values), ir.Constant(I32, _NOT_FINITE))
    low = high = values[0]
    for value in values[1:]:
        low, high = code.min(low, value), code.max(high, value)
    low, high = code.splat(code.smallest(low)), code.splat(code.largest(high))
    zero = code.floats(0.0)
    if form.has_zeros:
        low, high = code.min(low, zero), code.max(high, zero)
        scale = b.fdiv(b.fsub(high, low), code.floats(float(-2 * form.least - 1)))
    else:
        farther = b.fcmp_ordered(">", high, b.fsub(code.floats(-0.0), low))
        scale = b.fdiv(b.select(farther, high, low), least)
    scale = rounded(code, scale, shape.scale_kind)
    own = b.bitcast(b.extract_element(scale, ir.Constant(I32, 0)), I32)
    too_large = b.icmp_unsigned(
        ">=", b.and_(own, ir.Constant(I32, 0x7FFFFFFF)), ir.Constant(I32, _NOT_FINITE)
    )
    code.when(b.or_(bad, too_large), lambda: _count(code, num_bad))
    none = b.fcmp_ordered("==", scale, zero)
    by = b.select(none, zero, b.fdiv(code.floats(1.0), scale))
    middle = None
    if form.has_zeros:
        middle = code.round(b.fsub(least, b.fmul(low, by)))
        middle = code.min(code.max(middle, least), most)
    places = record + form.codes_bytes
    scale_bytes = form.scale_dtype.itemsize
    store_as(code, scale, places + o * scale_bytes, shape.scale_kind, 1)
    if middle is not None:
        store_as(code, middle, places + (o + form.scales_bytes), "i8", 1)
    # Codes of four bits count from the lowest one in a word.
    shift = code.floats(float(-form.least if form.bits == 4 else 0))
    for n, (value, count) in enumerate(zip(values, counts, strict=True)):
        scaled = b.fmul(value, by)
        if middle is not None:
            scaled = b.fadd(scaled, middle)
        whole = code.min(code.max(code.round(scaled), least), most)
        found = b.trunc(b.fptosi(b.fadd(whole, shift), INTS), BYTES)
        if count < LANES:
            found = code.shuffle(found, found, list(range(count)))
        code.write(found, codes + n * LANES)
    _write_words(code, form, record, o, codes)


def _count(code: Code, place: Int) -> None:
    code.take(place)


def _write_words(code: Code, form: PackedForm, record: Int, o: Int, codes: Int) -> None:
    """Bytes of codes, side by side, into the words of an output."""
    word_bytes, b = 4, code.b

    def eight(k: Int) -> None:
        both = code.read(codes + k, I64)
        low = b.trunc(both, I32)
        high = b.trunc(b.lshr(both, ir.Constant(I64, 32)), I32)
        if form.bits == 4:
            packed = b.or_(low, b.shl(high, ir.Constant(I32, 4)))
            code.write(packed, record + k * (BLOCK * word_bytes // STEP) + o * word_bytes)
            return
        for half, value in enumerate((low, high)):
            place = record + k * (2 * BLOCK * word_bytes // STEP) + half * BLOCK * word_bytes
            code.write(value, place + o * word_bytes)

    code.each(form.group_size, eight, step=STEP)
