"""What the machine gives: reading memory, and multiplying matrices.

STREAM is a plain read, one stream a thread: the better of ``torch.sum`` and of a loop that adds up
vectors. ``torch.dot`` of two halves reads two streams at a time, which keeps more of a core's cache
misses under way; it is shown beside, as what more could be had.
"""

import struct
from functools import partial
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from llvmlite.ir import Value

from benchmarks.harness.quiet import Call
from quire.kernels.compile import Kernels, native_isa
from quire.kernels.language import LANES, LINE_BYTES, Code, Int
from quire.kernels.threads import Threads

STREAMS = ("STREAM, torch.sum", "STREAM, vectors added up")
TWO_STREAMS = "two streams a thread, torch.dot"
_UNROLLED = 4  # vectors a turn
MATMUL_SIZE = 2048


def last_cache_bytes() -> int:
    """The largest cache of a core, shared ones too; 0 if the system does not say."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=0)


class Stream:
    """A buffer that no cache holds, and calls that read all of it on torch's threads."""

    def __init__(self, nbytes: int) -> None:
        # numpy asks for huge pages, torch does not: they read a little faster.
        self._buffer = torch.from_numpy(np.ones(nbytes // 8 * 2, np.float32))
        self.nbytes = self._buffer.nbytes
        self._kept: list[object] = []  # machine code lives as long as its kernels

    def calls(self) -> dict[str, Call]:
        """By name: those of ``STREAMS``, and ``TWO_STREAMS``."""
        halves = self._buffer.chunk(2)
        return {
            STREAMS[0]: self._buffer.sum,
            STREAMS[1]: self._added_up(),
            TWO_STREAMS: partial(torch.dot, *halves),
        }

    def _added_up(self) -> Call:
        """Each thread adds up its own part of the buffer, four vectors at a time."""
        kernels, threads = Kernels(native_isa()), Threads()
        address = kernels.address("stream", _write_stream)
        self._kept.append(kernels)
        least = LINE_BYTES * _UNROLLED
        sums = np.zeros((threads.most, LANES), np.float32)

        def call() -> None:
            part = self.nbytes // threads.most // least * least
            frame = struct.pack("4q", 0, self._buffer.data_ptr(), part, sums.ctypes.data)
            threads.run(address, frame, threads.most)

        return call


def _write_stream(module: ir.Module) -> None:
    """(frame: next thread, buffer, bytes of a part, sums): a thread reads one part."""
    code = Code(module, "work", 1, native_isa())
    frame = code.params[0]
    thread = code.take(frame)
    buffer, part, sums = (code.number(frame + 8 * n) for n in (1, 2, 3))

    def some(n: Int, totals: list[Value]) -> list[Value]:
        place = buffer + thread * part + n
        return [
            code.plus(total, code.load(place + i * LINE_BYTES)) for i, total in enumerate(totals)
        ]

    zeros = [code.floats(0.0)] * _UNROLLED
    totals = code.loop(part, zeros, some, step=_UNROLLED * LINE_BYTES)
    code.store(code.total(totals), sums + thread * LINE_BYTES)
    code.end()


def matmul(dtype: torch.dtype) -> tuple[Call, float]:
    """A product of two square matrices, and its floating-point operations."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype) for _ in range(2))
    return partial(torch.matmul, a, b), 2.0 * MATMUL_SIZE**3
