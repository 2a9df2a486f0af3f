"""Calls that have been heard, made again by threads that stay together from one to the next.

Starting threads for every call, from Python, costs more than many a call itself. Here they are
started once: all make the first call, wait for one another, make the second one, and so on.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from quire.kernels.compile import Kernels
from quire.kernels.language import I32, I64, LINE_BYTES, Code, Int, Isa
from quire.kernels.threads import KernelCall, Threads, team_size, yielding
from quire.units import align_up

_FRAME = ("next_thread", "arrived", "calls", "num_calls", "team_size", "yield")
_CALL = ("worker", "frame", "num_threads", "joins")  # joins: all wait for one another after it
_WORD_BYTES = 8
_SPINS = 2_000  # a few tens of microseconds; a thread that waits longer lets others run


class Player:
    """Makes the same calls each time it is called.

    What their frames point to must still be there; ``frames`` may be changed between two times.
    """

    def __init__(self, calls: Sequence[KernelCall], kernels: Kernels, threads: Threads) -> None:
        self._threads = threads
        self._kernels = kernels  # whose code is good as long as it lives
        self._work = kernels.address("player", lambda m: write_player(m, kernels.isa))
        line = LINE_BYTES // _WORD_BYTES
        starts = [0]
        for call in calls:  # no two frames in a line of the cache: threads count in them
            starts.append(align_up(starts[-1] + len(call.frame) // _WORD_BYTES, line))
        self.starts = np.array(starts[:-1], np.int64)  # of each call's frame
        self.frames = np.zeros(starts[-1], np.int64)
        for start, call in zip(starts, calls, strict=False):
            words = np.frombuffer(call.frame, np.int64)
            self.frames[start : start + len(words)] = words
        self._played = _aligned(len(self.frames))
        self.calls = np.zeros((len(calls), len(_CALL)), np.int64)
        self.calls[:, 0] = [call.worker for call in calls]
        self.calls[:, 1] = self._played.ctypes.data + self.starts * _WORD_BYTES
        self.set_threads(slice(None), [call.num_threads for call in calls])

    def set_threads(
        self, which: slice | npt.NDArray[np.int64], num_threads: int | list[int]
    ) -> None:
        """Set on how many threads some calls, i64[n] of their numbers, are made."""
        self.calls[which, 2] = num_threads
        several = self.calls[:, 2] > 1
        self.calls[:, 3] = several
        self.calls[:-1, 3] |= several[1:]
        self._most = int(self.calls[:, 2].max())

    def __call__(self) -> None:
        """Raises: RuntimeError in a forked child."""
        self._played[:] = self.frames
        frame = np.array(
            [0, 0, self.calls.ctypes.data, len(self.calls), team_size(), yielding()], np.int64
        )
        self._threads.run(self._work, frame.tobytes(), self._most)


def _aligned(num_words: int) -> npt.NDArray[np.int64]:
    memory = np.zeros(num_words + LINE_BYTES // _WORD_BYTES, np.int64)
    first = -memory.ctypes.data % LINE_BYTES // _WORD_BYTES
    return memory[first : first + num_words]


def write_player(module: ir.Module, isa: Isa) -> None:
    """Add "work" to a module."""
    code = Code(module, "work", 1, isa)
    frame = code.params[0]

    def place(name: str) -> Int:
        return frame + _FRAME.index(name) * _WORD_BYTES

    number = code.take(place("next_thread"))
    calls, num_calls, yield_ = (code.number(place(n)) for n in ("calls", "num_calls", "yield"))
    team = _team_size(code, code.number(place("team_size")))

    spins = code.b.alloca(I64)

    def wait(target: Int) -> None:
        code.b.store(ir.Constant(I64, 0), spins)

        def look() -> None:
            arrived = code.b.load_atomic(
                code.pointer(place("arrived")), "acquire", _WORD_BYTES, typ=I64
            )
            code.leave_when(Int(code.b, arrived) >= target)
            _pause(code)
            spun = code.b.add(code.b.load(spins, typ=I64), ir.Constant(I64, 1))
            code.b.store(spun, spins)
            code.when(Int(code.b, spun) >= _SPINS, lambda: _call(code, yield_, [], I32))

        code.forever(look)

    def one(n: Int, joined: list[ir.Value]) -> list[ir.Value]:
        here = calls + n * (len(_CALL) * _WORD_BYTES)
        worker, given, num_threads, joins = (
            code.number(here + word * _WORD_BYTES) for word in range(len(_CALL))
        )
        code.when(number < num_threads, lambda: _call(code, worker, [given.value], ir.VoidType()))
        times = Int(code.b, joined[0]) + joins

        def join() -> None:
            code.take(place("arrived"))
            wait(times * team)

        code.when(joins >= 1, join)
        return [times.value]

    code.loop(num_calls, [code.whole(0).value], one)
    code.end()


def _team_size(code: Code, function: Int) -> Int:
    """Ask how many threads there are, which may be fewer than were asked for."""
    b = code.b
    size = b.alloca(I64)
    b.store(ir.Constant(I64, 1), size)

    def ask() -> None:
        b.store(b.zext(_call(code, function, [], I32), I64), size)

    code.when(function >= 1, ask)
    return Int(b, b.load(size, typ=I64))


def _call(code: Code, function: Int, given: list[ir.Value], result: ir.Type) -> ir.Value:
    signature = ir.FunctionType(result, [I64] * len(given))
    pointer = code.b.inttoptr(function.value, signature.as_pointer())
    return code.b.call(pointer, given)


def _pause(code: Code) -> None:
    if "+sse2" in code.isa.features:
        code.call("llvm.x86.sse2.pause", ir.VoidType())
