"""The same product by AMX: tiles of sixteen rows of 64 bytes that the CPU multiplies whole.

    c[16][16] += a[16][16 words] · b[16 words][16]      words are pairs of bfloat16

Two by two such products share their loads. A thread sets the tiles' shape first (``shape_tiles``);
the process asks the system for them once (``allow``). Source: Intel SDM, chapter on AMX.
"""

import ctypes
import sys

from llvmlite import ir

from quire.kernels.language import I8, I64, LANES, LINE_BYTES, POINTER, Code, Int

_ARCH_REQ_XCOMP_PERM = 0x1023
_TILE_DATA = 18
_SYS_ARCH_PRCTL = 158
_NOTHING = ir.VoidType()


def allow() -> bool:
    """Ask Linux for the tiles' registers; whether this process has them."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0)


def write_shape(code: Code) -> None:
    """Write a kernel (): set sixteen rows of 64 bytes for all eight tiles of this thread."""
    shape = bytes([1, 0, *[0] * 14, *([LINE_BYTES, 0] * 8), *[0] * 16, *[LANES] * 8, *[0] * 8])
    module = code.function.module
    constant = ir.Constant(ir.ArrayType(I8, len(shape)), bytearray(shape))
    stored = ir.GlobalVariable(module, constant.type, "tile_shape")
    stored.initializer, stored.global_constant, stored.linkage = constant, True, "internal"
    code.call("llvm.x86.ldtilecfg", _NOTHING, code.b.bitcast(stored, POINTER))
    code.end()


def write_release(code: Code) -> None:
    """Write a kernel (): give the tiles back, so that the system need not keep them."""
    code.call("llvm.x86.tilerelease", _NOTHING)
    code.end()


def write_multiply(
    code: Code, *, rows: int, words: int, row_bytes: int, word_bytes: int, adds: bool, pairs: bool
) -> None:
    """Write what ``prefill_kernel._multiply`` does; a row's words lie side by side."""
    assert pairs
    assert word_bytes == 4
    assert rows % LANES == words % LANES == 0
    product = _TileProduct(code, rows, words, row_bytes, adds)
    # Four sums at a time hide how long one takes: two by two, or four rows of a single panel.
    panels = code.params[3]
    code.each(panels - 1, lambda p: product.write(p, height=2, width=2), step=2)
    code.when((panels % 2).equals(1), lambda: product.write(panels - 1, height=4, width=1))
    code.end()


class _TileProduct:
    """c = a b for some panels, by tiles: sums in tiles 0 to 3, a in 4 to 6 in turn, b last."""

    def __init__(self, code: Code, rows: int, words: int, row_bytes: int, adds: bool) -> None:
        self.code, self.rows, self.words, self.row_bytes = code, rows, words, row_bytes
        self.adds = adds
        self.a, self.b, self.c, _ = code.params

    def write(self, panel: Int, *, height: int, width: int) -> None:
        """Add the product of ``width`` panels, ``height`` times sixteen rows at once."""
        step = height * LANES
        whole = self.rows // step * step
        self.code.each(whole, lambda r: self._block(panel, r, height, width), step=step)
        rest = (self.rows - whole) // LANES
        if rest:
            self._block(panel, self.code.whole(whole), rest, width)

    def _block(self, panel: Int, r: Int, height: int, width: int) -> None:
        code = self.code
        sums = [(m, n) for m in range(height) for n in range(width)]
        places = [
            self.c + (panel + n) * (self.rows * LINE_BYTES) + (r + m * LANES) * LINE_BYTES
            for m, n in sums
        ]
        for number, place in enumerate(places):
            if self.adds:
                self._load(number, place, LINE_BYTES)
            else:
                code.call("llvm.x86.tilezero", _NOTHING, _tile(number))
        for w in range(0, self.words, LANES):
            for n in range(width):
                place = self.b + (panel + n) * (self.words * LINE_BYTES) + w * LINE_BYTES
                self._load(7 - n, place, LINE_BYTES)
            for m in range(height):
                left = 4 + m % (4 - width)
                self._load(left, self.a + (r + m * LANES) * self.row_bytes + w * 4, self.row_bytes)
                for n in range(width):
                    tiles = _tile(m * width + n), _tile(left), _tile(7 - n)
                    code.call("llvm.x86.tdpbf16ps", _NOTHING, *tiles)
        line = ir.Constant(I64, LINE_BYTES)
        for number, place in enumerate(places):
            code.call("llvm.x86.tilestored64", _NOTHING, _tile(number), code.pointer(place), line)

    def _load(self, number: int, place: Int, row_bytes: int) -> None:
        code, stride = self.code, ir.Constant(I64, row_bytes)
        code.call("llvm.x86.tileloadd64", _NOTHING, _tile(number), code.pointer(place), stride)


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)
