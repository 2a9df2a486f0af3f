"""CUDA's driver without a GPU: the functions of ``cuda.bindings.driver`` that are used, on a memfd.

Physical memory is a file; a mapping is a mapping of it, so that tensors of the CPU can lie there.
It keeps the rules that CUDA documents. What the driver would refuse is refused, and noted in
``refused``; what is undefined, or would fault, raises ``Violation`` on the spot. New memory is full
of 0xAB. Kernels are ``launch``ed as the ranges that they use, and run until ``finish`` or until the
host waits for them.
"""

import ctypes
import functools
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from memory.cuda import names
from memory.cuda.names import CUresult
from memory.cuda.streams import Streams, Work
from quire.memory.cuda.memory import CPU

GARBAGE = b"\xab"
TENSOR_DEVICE = (CPU, 0)
_FIXED, _NORESERVE = 0x10, 0x4000  # of Linux
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PROT_NONE = 0


class Violation(AssertionError):
    """What a real driver would not forgive: a fault of the device, or undefined behaviour."""


@dataclass(slots=True)
class Memory:
    offset: int
    nbytes: int
    is_held: bool = True  # its handle has not been released
    num_mappings: int = 0


@dataclass(slots=True)
class Mapping:
    handle: int
    nbytes: int
    is_accessible: bool = False


def driver_call(function: Callable[..., Any]) -> Any:
    """Count it, and fail it if it is its turn."""

    @functools.wraps(function)
    def call(self: "EmulatedDriver", *args: Any) -> Any:
        name = function.__name__
        self.calls[name] += 1
        self.num_calls += 1
        if (error := self.fails(name, self.num_calls)) is not None:
            return (error, None)
        returned = function(self, *args)
        if returned[0] == CUresult.CUDA_ERROR_INVALID_VALUE:
            self.refused.append(f"{name}{args}")
        return returned

    return call


OK = CUresult.CUDA_SUCCESS
INVALID = (CUresult.CUDA_ERROR_INVALID_VALUE, None)


class EmulatedDriver:
    """One device with ``total_bytes`` of memory."""

    CUresult = CUresult
    CUdevice_attribute = names.CUdevice_attribute
    CUevent_flags = names.CUevent_flags
    CUmemAccess_flags = names.CUmemAccess_flags
    CUmemAllocationGranularity_flags = names.CUmemAllocationGranularity_flags
    CUmemAllocationType = names.CUmemAllocationType
    CUmemLocationType = names.CUmemLocationType

    def __init__(
        self,
        *,
        total_bytes: int = 2**30,
        granularity: int = 2**16,
        can_map: bool = True,
        fills_at_once: bool = False,
    ) -> None:
        """``fills_at_once``: memory that nothing uses is filled before the host goes on.

        For tensors of the CPU, whose operations do not wait in a stream.
        """
        self.total_bytes = total_bytes
        self.granularity = granularity
        self.can_map = can_map
        self.fills_at_once = fills_at_once
        self.calls: Counter[str] = Counter()
        self.num_calls = 0
        self.refused: list[str] = []
        self.fails: Callable[[str, int], CUresult | None] = lambda name, number: None
        self._file = os.memfd_create("emulated device", os.MFD_CLOEXEC)
        os.ftruncate(self._file, 2**44)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3]
        self._libc.mmap.argtypes += [ctypes.c_int64]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, *[ctypes.c_int64] * 2]
        self._next = 1  # handle or event
        self._end = 0  # of the file in use
        self._holes: dict[int, list[int]] = {}  # bytes → offsets in the file
        self._memory: dict[int, Memory] = {}
        self._reserved: dict[int, tuple[int, int]] = {}  # address → bytes, address of the system's
        self._mappings: dict[int, Mapping] = {}
        self._events: dict[int, Work | None] = {}
        self.streams = Streams()
        self._contexts: list[str] = []

    def __del__(self) -> None:
        for address, (nbytes, start) in self._reserved.items():
            self._libc.munmap(start, nbytes + (address - start))
        os.close(self._file)

    # -- for tests -------------------------------------------------------------------------------

    @property
    def physical_bytes(self) -> int:
        """Memory of the device that is taken, by the rules."""
        return sum(memory.nbytes for memory in self._memory.values())

    @property
    def backed_bytes(self) -> int:
        """The same by the system's count of the file's blocks."""
        return os.fstat(self._file).st_blocks * 512

    @property
    def reserved_bytes(self) -> int:
        return sum(nbytes for nbytes, _ in self._reserved.values())

    def mapped_bytes(self, address: int, nbytes: int) -> int:
        """Bytes of a range at which something is mapped."""
        stop = address + nbytes
        return sum(m.nbytes for start, m in self._mappings.items() if address <= start < stop)

    def launch(self, *ranges: tuple[int, int], stream: int = 0) -> Work:
        """A kernel that uses these (address, nbytes), and runs until a test ends it."""
        kernel = Work(ranges=list(ranges), runs_on=True)
        self._enqueue(kernel, stream)
        return kernel

    def finish(self, kernel: Work) -> None:
        self.streams.finish(kernel)

    def fail_call(self, number: int, error: CUresult = CUresult.CUDA_ERROR_UNKNOWN) -> None:
        """Let the call after ``number - 1`` more fail, whichever it is."""
        turn = self.num_calls + number
        self.fails = lambda name, now: error if now == turn else None

    # -- the driver's functions ------------------------------------------------------------------

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(flags=None, location=SimpleNamespace(type=None, id=None))

    @driver_call
    def cuInit(self, Flags: int) -> Any:
        return (OK,)

    @driver_call
    def cuDeviceGet(self, ordinal: int) -> Any:
        return (OK, ordinal) if ordinal == 0 else (CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    @driver_call
    def cuDeviceGetAttribute(self, attrib: int, dev: int) -> Any:
        return OK, int(self.can_map)

    @driver_call
    def cuDevicePrimaryCtxRetain(self, dev: int) -> Any:
        return OK, "the primary context"

    @driver_call
    def cuCtxPushCurrent(self, ctx: str) -> Any:
        self._contexts.append(ctx)
        return (OK,)

    @driver_call
    def cuCtxPopCurrent(self) -> Any:
        return OK, self._contexts.pop()

    @driver_call
    def cuMemGetInfo(self) -> Any:
        if not self._contexts:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None, None
        return OK, self.total_bytes - self.physical_bytes, self.total_bytes

    @driver_call
    def cuMemGetAllocationGranularity(self, prop: Any, option: int) -> Any:
        return OK, self.granularity

    @driver_call
    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Any:
        if size % self.granularity or alignment & (alignment - 1) or addr or flags:
            return INVALID
        if size.bit_length() > 64:
            raise OverflowError("value too large to convert to size_t")
        alignment = max(alignment, self.granularity)
        access, kind = _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        start = self._libc.mmap(None, min(size + alignment, 2**64 - 1), access, kind, -1, 0)
        if start == ctypes.c_void_p(-1).value:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        address = -(-start // alignment) * alignment
        self._libc.munmap(address + size, start + alignment - address)
        self._reserved[address] = (size, start)
        return OK, address

    @driver_call
    def cuMemAddressFree(self, ptr: int, size: int) -> Any:
        if self._reserved.get(ptr, (None,))[0] != size or self.mapped_bytes(ptr, size):
            return INVALID
        _, start = self._reserved.pop(ptr)
        self._libc.munmap(start, size + (ptr - start))
        return (OK,)

    @driver_call
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        if size % self.granularity or not size or flags or prop.location.id is None:
            return INVALID
        if self.physical_bytes + size > self.total_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        offset = holes.pop() if (holes := self._holes.get(size)) else self._end
        self._end = max(self._end, offset + size)
        os.pwrite(self._file, GARBAGE * size, offset)
        handle = self._number()
        self._memory[handle] = Memory(offset, size)
        return OK, handle

    @driver_call
    def cuMemRelease(self, handle: int) -> Any:
        memory = self._memory.get(handle)
        if memory is None or not memory.is_held:
            raise Violation(f"handle {handle} is released twice, or is none")
        memory.is_held = False
        self._drop_if_unused(handle)
        return (OK,)

    @driver_call
    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> Any:
        memory = self._memory.get(handle)
        if memory is None or not memory.is_held:
            raise Violation(f"handle {handle} is mapped after its release, or is none")
        if ptr % self.granularity or size % self.granularity or not size or flags:
            return INVALID
        if offset or size != memory.nbytes:  # older drivers map whole allocations only
            return INVALID
        if not self._is_reserved(ptr, size) or self._overlaps_a_mapping(ptr, size):
            return INVALID
        self._mappings[ptr] = Mapping(handle, size)
        memory.num_mappings += 1
        return (OK,)

    @driver_call
    def cuMemSetAccess(self, ptr: int, size: int, desc: Iterable[Any], count: int) -> Any:
        found = self._whole_mappings(ptr, size)
        if not found or len(list(desc)) != count:
            return INVALID
        for address in found:
            mapping = self._mappings[address]
            mapping.is_accessible = True
            access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
            offset = self._memory[mapping.handle].offset
            self._libc.mmap(address, mapping.nbytes, access, kind, self._file, offset)
        return (OK,)

    @driver_call
    def cuMemUnmap(self, ptr: int, size: int) -> Any:
        found = self._whole_mappings(ptr, size)
        if not found:
            return INVALID
        if self.streams.uses(ptr, size):
            raise Violation(f"{ptr:#x} is unmapped while the device uses it")
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        self._libc.mmap(ptr, size, _PROT_NONE, kind, -1, 0)
        for address in found:
            handle = self._mappings.pop(address).handle
            self._memory[handle].num_mappings -= 1
            self._drop_if_unused(handle)
        return (OK,)

    @driver_call
    def cuMemsetD8Async(self, dstDevice: int, uc: int, N: int, hStream: int) -> Any:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        fill = functools.partial(ctypes.memset, dstDevice, uc, N)
        if self.fills_at_once and not self.streams.uses(dstDevice, N):
            fill()
            return (OK,)
        self._enqueue(Work(ranges=[(dstDevice, N)], run=fill), hStream)
        return (OK,)

    @driver_call
    def cuEventCreate(self, Flags: int) -> Any:
        if not self._contexts:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        event = self._number()
        self._events[event] = None
        return OK, event

    @driver_call
    def cuEventRecord(self, hEvent: int, hStream: int) -> Any:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._marker_of(hEvent)
        self._events[hEvent] = marker = Work()
        self._enqueue(marker, hStream)
        return (OK,)

    @driver_call
    def cuEventQuery(self, hEvent: int) -> Any:
        marker = self._marker_of(hEvent)
        return (OK if marker is None or marker.is_done else CUresult.CUDA_ERROR_NOT_READY,)

    @driver_call
    def cuEventSynchronize(self, hEvent: int) -> Any:
        if marker := self._marker_of(hEvent):
            self.streams.wait_for(marker)
        return (OK,)

    @driver_call
    def cuEventDestroy(self, hEvent: int) -> Any:
        self._marker_of(hEvent)
        del self._events[hEvent]
        return (OK,)

    # -- what they share -------------------------------------------------------------------------

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _enqueue(self, work: Work, stream: int) -> None:
        for address, nbytes in work.ranges:
            self._check_accessible(address, nbytes)
        self.streams.enqueue(work, stream)

    def _check_accessible(self, address: int, nbytes: int) -> None:
        stop = address + nbytes
        while address < stop:
            where = [
                (start, mapping)
                for start, mapping in self._mappings.items()
                if start <= address < start + mapping.nbytes
            ]
            if not where or not where[0][1].is_accessible:
                raise Violation(f"the device uses {address:#x}, to which it has no access")
            address = where[0][0] + where[0][1].nbytes

    def _marker_of(self, event: int) -> Work | None:
        if event not in self._events:
            raise Violation(f"event {event} is used after it was destroyed, or is none")
        return self._events[event]

    def _is_reserved(self, ptr: int, size: int) -> bool:
        return any(
            start <= ptr and ptr + size <= start + nbytes
            for start, (nbytes, _) in self._reserved.items()
        )

    def _overlaps_a_mapping(self, ptr: int, size: int) -> bool:
        return any(
            start < ptr + size and ptr < start + mapping.nbytes
            for start, mapping in self._mappings.items()
        )

    def _whole_mappings(self, ptr: int, size: int) -> list[int]:
        """Addresses of the mappings that fill a range exactly; none if they do not."""
        found, address = [], ptr
        while address < ptr + size:
            if address not in self._mappings:
                return []
            found.append(address)
            address += self._mappings[address].nbytes
        return found if address == ptr + size else []

    def _drop_if_unused(self, handle: int) -> None:
        memory = self._memory[handle]
        if memory.is_held or memory.num_mappings:
            return
        mode = _KEEP_SIZE | _PUNCH_HOLE
        self._libc.fallocate(self._file, mode, memory.offset, memory.nbytes)
        self._holes.setdefault(memory.nbytes, []).append(memory.offset)
        del self._memory[handle]
