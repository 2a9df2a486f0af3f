"""Kernels of a module, each called by itself, on arrays that end where memory ends."""

import ctypes
import mmap
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from attention.machines import kernel_folder
from quire.kernels.compile import Kernels
from quire.kernels.language import Code, Isa

_WORD = 8
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_PROT_NONE = 0


class Alone:
    """Every kernel that ``write`` adds to a module; compiled once, called by name."""

    def __init__(self, isa: Isa, name: str, write: Callable[[ir.Module], None]) -> None:
        self._params: dict[str, int] = {}
        self._write, self._isa = write, isa
        # Also where the machine code is there already: names and numbers are in the module.
        self._add(ir.Module(name))
        self._kernels = Kernels(isa, kernel_folder())
        self._work = _WORKER(self._kernels.address(f"alone {name}", self._add))

    def __call__(self, kernel: str, *arguments: Any) -> None:
        """Arrays are given as their addresses. The last ones may be left out: only prefetched."""
        names = list(self._params)
        left_out = self._params[kernel] - len(arguments)
        assert left_out >= 0, kernel
        words = [x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments]
        words += [0] * left_out
        self._work(struct.pack(f"{1 + len(words)}q", names.index(kernel), *words))

    def _add(self, module: ir.Module) -> None:
        """The kernels, and "work", which calls the one whose number comes first in its frame."""
        self._write(module)
        written = [f for f in module.functions if not f.is_declaration]
        self._params = {f.name: len(f.args) for f in written}
        code = Code(module, "work", 1, self._isa)
        frame = code.params[0]
        which = code.number(frame)

        def run(name: str, count: int) -> None:
            code.run(name, *(code.number(frame + (1 + n) * _WORD) for n in range(count)))

        for number, (name, count) in enumerate(self._params.items()):
            code.when(which.equals(number), lambda name=name, count=count: run(name, count))
        code.end()


def ending(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy; to read or write one byte behind it ends the process."""
    page = mmap.PAGESIZE
    room = -(-array.nbytes // page) * page
    mapping = mmap.mmap(-1, room + page)
    whole = np.frombuffer(mapping, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(whole.ctypes.data + room, page, _PROT_NONE) == 0
    copy = whole[room - array.nbytes : room].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
