"""CUDA's driver: the calls that put physical memory at addresses, checked.

``DriverFunctions`` is what is used of ``cuda.bindings.driver``; anything with the same functions
will do, an emulator for one. ``Driver`` calls them for one device and raises where they return an
error. When to call what is not known here.

Source: CUDA Driver API, "Virtual Memory Management"
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Protocol, cast, final

from quire.errors import ConfigError, MemoryUnavailable

Returned = tuple[Any, ...]  # (error, *results)


class DriverFunctions(Protocol):
    """The part of ``cuda.bindings.driver`` that is used, by its own names."""

    CUresult: Any
    CUdevice_attribute: Any
    CUevent_flags: Any
    CUmemAccess_flags: Any
    CUmemAllocationGranularity_flags: Any
    CUmemAllocationType: Any
    CUmemLocationType: Any
    CUmemAccessDesc: Any
    CUmemAllocationProp: Any

    def cuInit(self, Flags: int) -> Returned: ...
    def cuDeviceGet(self, ordinal: int) -> Returned: ...
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> Returned: ...
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Returned: ...
    def cuCtxPushCurrent(self, ctx: Any) -> Returned: ...
    def cuCtxPopCurrent(self) -> Returned: ...
    def cuMemGetInfo(self) -> Returned: ...
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> Returned: ...
    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Returned: ...
    def cuMemAddressFree(self, ptr: int, size: int) -> Returned: ...
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Returned: ...
    def cuMemRelease(self, handle: Any) -> Returned: ...
    def cuMemMap(self, ptr: int, size: int, offset: int, handle: Any, flags: int) -> Returned: ...
    def cuMemUnmap(self, ptr: int, size: int) -> Returned: ...
    def cuMemSetAccess(self, ptr: int, size: int, desc: Any, count: int) -> Returned: ...
    def cuMemsetD8Async(self, dstDevice: int, uc: int, N: int, hStream: Any) -> Returned: ...
    def cuEventCreate(self, Flags: int) -> Returned: ...
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> Returned: ...
    def cuEventQuery(self, hEvent: Any) -> Returned: ...
    def cuEventSynchronize(self, hEvent: Any) -> Returned: ...
    def cuEventDestroy(self, hEvent: Any) -> Returned: ...


class DriverError(MemoryUnavailable):
    """A call returned ``error``, by CUDA's name: ``CUDA_ERROR_OUT_OF_MEMORY``."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(call, error)  # both, so that it can be sent to another process
        self.call, self.error = call, error

    def __str__(self) -> str:
        return f"{self.call} failed: {self.error}"


def load_driver_functions() -> DriverFunctions:
    """NVIDIA's own bindings.

    Raises: ConfigError if they are not installed, or are of a release that has other names.
    """
    try:
        found = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            f"memory of a GPU needs the package cuda-bindings ({error}): "
            f"pip install 'quire[cuda]', or keep the KV cache in the memory of the CPU"
        ) from error
    wanted = [*DriverFunctions.__annotations__, *vars(DriverFunctions)]
    missing = [name for name in wanted if name[:2].lower() == "cu" and not hasattr(found, name)]
    if missing:
        raise ConfigError(
            f"these cuda-bindings have no {', '.join(missing)}: install 12.8 or later (pip install "
            f"'quire[cuda]'), or keep the KV cache in the memory of the CPU"
        )
    return cast(DriverFunctions, found)


@final
class Driver:
    """The calls for one device. Each raises DriverError, and then the driver has done nothing.

    Memory is zeroed on one stream, ``stream``.
    """

    __slots__ = ("_access", "_context", "_functions", "_prop", "device", "stream")

    def __init__(self, functions: DriverFunctions, device: int, stream: int) -> None:
        self._functions = functions
        self.stream = stream
        self.device = device
        handle = self._open(device)
        types, places = functions.CUmemAllocationType, functions.CUmemLocationType
        self._prop = functions.CUmemAllocationProp()
        self._prop.type = types.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = functions.CUmemAccessDesc()
        self._access.flags = functions.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for described in (self._prop, self._access):
            described.location.type = places.CU_MEM_LOCATION_TYPE_DEVICE
            described.location.id = device
        (self._context,) = self._checked(
            "cuDevicePrimaryCtxRetain", functions.cuDevicePrimaryCtxRetain(handle)
        )

    def _open(self, device: int) -> object:
        attribute = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
        functions = self._functions
        try:
            self._checked("cuInit", functions.cuInit(0))
            (handle,) = self._checked("cuDeviceGet", functions.cuDeviceGet(device))
            (can_map,) = self._checked(
                "cuDeviceGetAttribute",
                functions.cuDeviceGetAttribute(
                    getattr(functions.CUdevice_attribute, attribute), handle
                ),
            )
        except (DriverError, RuntimeError) as error:  # RuntimeError: there is no driver to load
            raise ConfigError(
                f"CUDA device {device} cannot be used ({error}): install NVIDIA's driver, choose "
                f"another device, or keep the KV cache in the memory of the CPU"
            ) from error
        if not can_map:
            raise ConfigError(
                f"CUDA device {device} cannot map memory to chosen addresses ({attribute} is 0): "
                f"choose another device, or keep the KV cache in the memory of the CPU"
            )
        return handle

    def granularity(self) -> int:
        """Bytes of which every size and address here is a multiple."""
        flags = self._functions.CUmemAllocationGranularity_flags
        (nbytes,) = self._checked(
            "cuMemGetAllocationGranularity",
            self._functions.cuMemGetAllocationGranularity(
                self._prop, flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            ),
        )
        return int(nbytes)

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all it has."""
        with self._current():
            free, total = self._checked("cuMemGetInfo", self._functions.cuMemGetInfo())
        return int(free), int(total)

    def reserve(self, nbytes: int, alignment: int) -> int:
        (address,) = self._checked(
            "cuMemAddressReserve", self._functions.cuMemAddressReserve(nbytes, alignment, 0, 0)
        )
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        self._checked("cuMemAddressFree", self._functions.cuMemAddressFree(address, nbytes))

    def create(self, nbytes: int) -> object:
        """Physical memory, as a handle; its content is undefined."""
        handle: object
        (handle,) = self._checked("cuMemCreate", self._functions.cuMemCreate(nbytes, self._prop, 0))
        return handle

    def release(self, handle: object) -> None:
        self._checked("cuMemRelease", self._functions.cuMemRelease(handle))

    def map(self, address: int, nbytes: int, handle: object) -> None:
        """Nothing may be mapped there yet. It cannot be read before ``allow``."""
        self._checked("cuMemMap", self._functions.cuMemMap(address, nbytes, 0, handle, 0))

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write a run of mappings: dear, so one call for the run."""
        self._checked(
            "cuMemSetAccess",
            self._functions.cuMemSetAccess(address, nbytes, [self._access], 1),
        )

    def unmap(self, address: int, nbytes: int) -> None:
        """Whole mappings only. Not ordered with the device's work: nothing may be using them."""
        self._checked("cuMemUnmap", self._functions.cuMemUnmap(address, nbytes))

    def zero(self, address: int, nbytes: int) -> None:
        with self._current():
            self._checked(
                "cuMemsetD8Async",
                self._functions.cuMemsetD8Async(address, 0, nbytes, self.stream),
            )

    def create_event(self) -> object:
        event: object
        flags = int(self._functions.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        with self._current():
            (event,) = self._checked("cuEventCreate", self._functions.cuEventCreate(flags))
        return event

    def record(self, event: object, stream: int) -> None:
        """The event is passed when the stream has done all that it has been given so far."""
        with self._current():
            self._checked("cuEventRecord", self._functions.cuEventRecord(event, stream))

    def has_passed(self, event: object) -> bool:
        error, *_ = self._functions.cuEventQuery(event)
        if error == self._functions.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._checked("cuEventQuery", (error,))
        return True

    def wait(self, event: object) -> None:
        self._checked("cuEventSynchronize", self._functions.cuEventSynchronize(event))

    def destroy_event(self, event: object) -> None:
        self._checked("cuEventDestroy", self._functions.cuEventDestroy(event))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Some calls mean the device of the thread's current context; it is given back after."""
        self._checked("cuCtxPushCurrent", self._functions.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._checked("cuCtxPopCurrent", self._functions.cuCtxPopCurrent())

    def _checked(self, call: str, returned: Returned) -> Returned:
        error, *results = returned
        if error != self._functions.CUresult.CUDA_SUCCESS:
            raise DriverError(call, error.name)
        return tuple(results)
