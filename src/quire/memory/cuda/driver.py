"""CUDA's driver: the calls that put physical memory at addresses, checked.

``FUNCTIONS`` is what Quire calls of ``cuda.bindings.driver``; an emulator may stand in for it.
``Driver`` calls the functions for one device and raises where they return an error.

Source: CUDA Driver API, "Virtual Memory Management"
"""

import contextlib
import importlib
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, TypeAlias, final

from quire.errors import ConfigError, MemoryUnavailable

DriverFunctions: TypeAlias = Any  # cuda.bindings.driver: each function returns (error, *results)

TYPES = (
    "CUresult", "CUdevice_attribute", "CUevent_flags", "CUmemAccess_flags",
    "CUmemAllocationGranularity_flags", "CUmemAllocationType", "CUmemLocationType",
    "CUmemAccessDesc", "CUmemAllocationProp",
)  # fmt: skip
FUNCTIONS = MappingProxyType(  # and the names of their parameters
    {
        "cuInit": "Flags",
        "cuDeviceGet": "ordinal",
        "cuDeviceGetAttribute": "attrib dev",
        "cuDevicePrimaryCtxRetain": "dev",
        "cuCtxPushCurrent": "ctx",
        "cuCtxPopCurrent": "",
        "cuMemGetInfo": "",
        "cuMemGetAllocationGranularity": "prop option",
        "cuMemAddressReserve": "size alignment addr flags",
        "cuMemAddressFree": "ptr size",
        "cuMemCreate": "size prop flags",
        "cuMemRelease": "handle",
        "cuMemMap": "ptr size offset handle flags",
        "cuMemUnmap": "ptr size",
        "cuMemSetAccess": "ptr size desc count",
        "cuMemsetD8Async": "dstDevice uc N hStream",
        "cuEventCreate": "Flags",
        "cuEventRecord": "hEvent hStream",
        "cuEventQuery": "hEvent",
        "cuEventSynchronize": "hEvent",
        "cuEventDestroy": "hEvent",
    }
)


class DriverError(MemoryUnavailable):
    """A call returned ``error``, by CUDA's name: ``CUDA_ERROR_OUT_OF_MEMORY``."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(call, error)  # both, so that it can be sent to another process
        self.call, self.error = call, error

    def __str__(self) -> str:
        return f"{self.call} failed: {self.error}"


def load_driver_functions() -> DriverFunctions:
    """Load NVIDIA's own bindings.

    Raises: ConfigError where they are not installed, or their release has other names.
    """
    try:
        found = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            f"memory of a GPU needs the package cuda-bindings ({error}): "
            f"pip install 'quire-kv[cuda]', or keep the KV cache in the memory of the CPU"
        ) from error
    missing = [name for name in (*TYPES, *FUNCTIONS) if not hasattr(found, name)]
    if missing:
        raise ConfigError(
            f"these cuda-bindings have no {', '.join(missing)}: install 12.8 or later (pip install "
            f"'quire-kv[cuda]'), or keep the KV cache in the memory of the CPU"
        )
    return found


@final
class Driver:
    """The calls for one device. Each raises DriverError, and then the driver has done nothing.

    The driver zeroes memory on one stream, ``stream``.
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
        (self._context,) = self._call("cuDevicePrimaryCtxRetain", handle)

    def _open(self, device: int) -> object:
        attribute = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
        try:
            self._call("cuInit", 0)
            (handle,) = self._call("cuDeviceGet", device)
            wanted = getattr(self._functions.CUdevice_attribute, attribute)
            (can_map,) = self._call("cuDeviceGetAttribute", wanted, handle)
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
        """Return the bytes of which every size and address here is a multiple."""
        flags = self._functions.CUmemAllocationGranularity_flags
        least = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (nbytes,) = self._call("cuMemGetAllocationGranularity", self._prop, least)
        return int(nbytes)

    def free_and_total(self) -> tuple[int, int]:
        """Return the bytes of the device that are free, and all that it has."""
        with self._current():
            free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserve ``nbytes`` of addresses, and return the first."""
        (address,) = self._call("cuMemAddressReserve", nbytes, alignment, 0, 0)
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        """Give ``nbytes`` of reserved addresses back."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> object:
        """Create ``nbytes`` of physical memory, with undefined content, and return its handle."""
        (handle,) = self._call("cuMemCreate", nbytes, self._prop, 0)
        return handle

    def release(self, handle: object) -> None:
        """Give physical memory back."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: object) -> None:
        """Map memory where nothing is mapped yet. It cannot be read before ``allow``."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write a run of mappings: dear, so one call for the run."""
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap whole mappings. The call does not wait for the device: nothing may use them."""
        self._call("cuMemUnmap", address, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        """Fill ``nbytes`` with zeros, in the order of the stream."""
        with self._current():
            self._call("cuMemsetD8Async", address, 0, nbytes, self.stream)

    def create_event(self) -> object:
        """Create an event that notes no time."""
        flags = int(self._functions.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        with self._current():
            (event,) = self._call("cuEventCreate", flags)
        return event

    def record(self, event: object, stream: int) -> None:
        """Record an event that is passed when the stream has done all that it has been given."""
        with self._current():
            self._call("cuEventRecord", event, stream)

    def has_passed(self, event: object) -> bool:
        """Ask whether an event is passed, without a wait."""
        error, *_ = self._functions.cuEventQuery(event)
        if error == self._functions.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._require("cuEventQuery", error)
        return True

    def wait(self, event: object) -> None:
        """Wait until an event is passed."""
        self._call("cuEventSynchronize", event)

    def destroy_event(self, event: object) -> None:
        """Give an event back."""
        self._call("cuEventDestroy", event)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context the thread's current one, as some calls need, for a while."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *args: object) -> tuple[Any, ...]:
        """Call a driver's function, and return its results. Raises: DriverError."""
        error, *results = getattr(self._functions, name)(*args)
        self._require(name, error)
        return tuple(results)

    def _require(self, name: str, error: Any) -> None:
        if error != self._functions.CUresult.CUDA_SUCCESS:
            raise DriverError(name, error.name)
