"""What the machine gives: reading memory, and multiplying matrices.

STREAM is a plain read, one stream a thread: the better of ``torch.sum`` and of a loop that adds up
vectors. ``torch.dot`` of two halves reads two streams at a time, which keeps more of a core's cache
misses under way; it is shown beside, as what more could be had. ``register_flops`` is what cores
multiply that do nothing else.
"""

import struct
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from llvmlite import ir
from llvmlite.ir import Value

from benchmarks.harness.quiet import Call
from quire.kernels.compile import Kernels, native_isa
from quire.kernels.language import FLOATS, INTS, LANES, LINE_BYTES, Code, Int
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


_SUMS = 24  # in registers: more than a product's latency, and as many as fit beside operands
_TURNS = 100_000
_TRIES = 5


def register_flops(dtype: torch.dtype) -> float:
    """Measure the operations a second of all threads that multiply in registers; the best of five.

    By pairs where the CPU multiplies those of bfloat16 in less time than floats, else by floats.
    """
    isa, threads = native_isa(), Threads()
    by_pairs = dtype == torch.bfloat16 and isa.bf16_dot
    kernels = Kernels(isa)
    kind = "pairs" if by_pairs else "floats"
    address = kernels.address(f"multiply {kind}", lambda m: _write_multiply(m, by_pairs))
    lines = np.zeros((_SUMS, LANES), np.float32)
    frame = struct.pack("q", lines.ctypes.data)
    best = min(_timed(lambda: threads.run(address, frame, threads.most)) for _ in range(_TRIES))
    a_product = 2 * LANES * (2 if by_pairs else 1)
    return threads.most * _TURNS * _SUMS * a_product / best


def _timed(call: Call) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _write_multiply(module: ir.Module, by_pairs: bool) -> None:
    """(frame: lines): each thread multiplies the same two vectors again and again."""
    code = Code(module, "work", 1, native_isa())
    place = code.number(code.params[0])
    typ = INTS if by_pairs else FLOATS
    a, b = code.read(place, typ), code.read(place, typ)

    def turn(_: Int, totals: list[Value]) -> list[Value]:
        if by_pairs:
            return [code.dot_pairs(total, a, b) for total in totals]
        return [code.fma(a, b, total) for total in totals]

    totals = code.loop(_TURNS, [code.floats(0.0)] * _SUMS, turn)
    for number, total in enumerate(totals):
        code.store(total, place + number * LINE_BYTES)
    code.end()
