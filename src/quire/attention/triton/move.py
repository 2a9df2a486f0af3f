"""The kernels that bring rows into one batch and back: a program for a part of each row.

Bits are copied, whatever they stand for. A row with the slot -1 is read as zeros and written
nowhere, so that nothing has to lie behind it.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots"])
def take(out, held, slots, held_row, length, ELEMENTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    at = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = tl.where(slot < 0, 0, length)
    x = tl.load(held + slot * held_row + at, at < there, 0)
    tl.store(out + row * length + at, x, at < length)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def put(held, new, slots, held_row, length, ELEMENTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    at = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    own = at < length
    x = tl.load(new + row * length + at, own)
    tl.store(held + slot * held_row + at, x, own)
