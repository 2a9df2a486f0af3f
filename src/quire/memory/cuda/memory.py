"""Memory of a GPU, by the driver's virtual memory: address space first, pages when tokens come.

Unlike on the host:

* Nothing may be read where nothing is committed or shown: the kernel that does, faults. Nor after
  ``close``, though the addresses of a tensor stay.
* To commit, to map and to unmap are for the time between two steps, on one thread. Kernels must use
  the memory on the given stream, or on one that waits for it (``used_on``). What is given back
  stays in use until the kernels that were launched before have ended (``hidden_bytes``), without a
  wait; only addresses that are to show something else are waited for.
* A write at one address is seen at the page's other addresses by kernels that start later.
"""

import ctypes
import logging
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from quire.errors import ConfigError, MemoryUnavailable, one_line
from quire.memory.cuda.driver import Driver, DriverFunctions, load_driver_functions
from quire.memory.cuda.granules import Granule, Granules
from quire.units import align_up, format_bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@final
class CudaMemory:
    """Memory of one CUDA device.

    A page is what the driver hands out at least, 2 MiB on the GPUs of today, or ``page_bytes``, a
    multiple of it. ``keep_bytes`` of pages that were given back are kept, for to create a page
    takes the driver a hundred times as long as to map one (193 µs on an A100, by kvcached). They
    stay mapped where they were until they are needed elsewhere: there, they only are zeroed.

    ``stream`` is the handle of the stream on which the memory is used (0: the default stream).
    ``driver`` and ``tensor_device`` (DLPack's kind and number) are for an emulator.

    Raises: ConfigError if the device, its driver or cuda-bindings is missing or cannot do this;
    MemoryUnavailable if the driver refuses so much as to begin.
    """

    __slots__ = ("_granules", "_parks", "_tensor_device", "cannot_share", "device")

    def __init__(
        self,
        *,
        device: int = 0,
        stream: int = 0,
        page_bytes: int | None = None,
        keep_bytes: int = 128 * 2**20,
        driver: DriverFunctions | None = None,
        tensor_device: tuple[int, int] | None = None,
    ) -> None:
        calls = Driver(driver or load_driver_functions(), device, stream)
        granularity = calls.granularity()
        page_bytes = page_bytes or granularity
        if page_bytes < 1 or page_bytes % granularity:
            raise ConfigError(
                f"page_bytes={page_bytes} is not a multiple of the granularity of CUDA device "
                f"{device}, {granularity} bytes: choose one, or leave it out"
            )
        self.device = device
        self.cannot_share: str | None = None
        self._parks = True
        self._granules = Granules(calls, page_bytes, keep_bytes)
        self._tensor_device = tensor_device or (CUDA, device)

    @property
    def page_bytes(self) -> int:
        return self._granules.page_bytes

    @property
    def physical_bytes(self) -> int:
        """Bytes of the device in use here: committed, kept, or still awaiting their event."""
        return self._granules.num_created * self.page_bytes

    @property
    def keep_bytes(self) -> int:
        """Bytes of pages that are kept when they are given back, beyond those that are held."""
        return self._granules.keep_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of pages that are ready to be committed again."""
        return self._granules.kept_bytes

    @property
    def parked_bytes(self) -> int:
        """Bytes of kept pages that are still mapped where they were."""
        return self._granules.parked_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes of addresses that are unmapped once the device has done its work so far."""
        return self._granules.hidden_bytes

    @property
    def hold_bytes(self) -> int:
        """Bytes that are held: below them all pages that are given back are kept."""
        return self._granules.hold_bytes

    @hold_bytes.setter
    def hold_bytes(self, nbytes: int) -> None:
        """Bytes that are held: below them all pages that are given back are kept."""
        self._granules.hold_bytes = nbytes
        self._granules.settle()

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        streams = self._granules.fences.streams
        (streams.remove if ends else streams.append)(stream)

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> "CudaRegion":
        """See ``MemoryProvider``.

        Physical memory comes and goes page by page in any case. So heaps are honoured in what they
        promise (what is not committed takes nothing; there are windows), and not as a unit.

        Raises: MemoryUnavailable where the driver refuses. ConfigError for ``heap_bytes`` that are
        not whole pages.
        """
        if heap_bytes is not None and heap_bytes % self.page_bytes:
            raise ConfigError(
                f"heap_bytes={heap_bytes} is not a multiple of the page of CUDA device "
                f"{self.device}, {self.page_bytes} bytes"
            )
        nbytes = align_up(nbytes, heap_bytes or self.page_bytes)
        addresses = _Addresses(self._granules, nbytes, self._tensor_device, parks=self._parks)
        return CudaRegion(self._granules, addresses, has_windows=heap_bytes is not None)

    def try_out(self) -> None:
        """Use a page as an engine will: by a tensor whose first page is not there, and once more.

        Where a page cannot be seen at a second address, ``cannot_share`` says so: less is shared.
        Where a parked page is not as new when it is committed again, no page is parked any more.

        Raises: ConfigError, in words, where such memory is refused or is not what it should be;
        MemoryUnavailable where the device has too little.
        """
        parked = self._refused()
        if parked is None:
            return
        self._parks = False
        if (refused := self._refused()) is not None:
            raise self._of_no_use(refused)
        log.warning("pages that are kept are not kept where they were: %s", parked)

    def _refused(self) -> str | None:
        """Try a page; return what goes wrong only with a page that is used again, or None.

        Such a page may be parked meanwhile.

        Raises: as ``try_out``, for what goes wrong with a new one.
        """
        import torch

        page = self.page_bytes
        region = self.reserve(2 * page, heap_bytes=page)
        is_new = True
        try:
            own = region.tensor(torch.uint8)[page:]
            for _ in range(2):  # the second time it may be parked
                region.commit(page, page)
                _require(not bool(own.any()), "new memory is not full of zeros")
                own.fill_(7)
                _require(bool((own == 7).all()), "what is written is not what is read")
                self._try_window(region, own)
                region.decommit(page, page)
                is_new = False
        except MemoryError as error:
            if "OUT_OF_MEMORY" in str(error):
                raise
            refused = one_line(error)
        except (RuntimeError, SystemError, BufferError, TypeError) as error:
            refused = one_line(error)
        else:
            return None
        finally:
            region.close()
            with suppress(MemoryUnavailable):  # what the driver does not take back is used later
                self.trim()
        if is_new:
            raise self._of_no_use(refused)
        return refused

    def _of_no_use(self, reason: str) -> ConfigError:
        return ConfigError(
            f"KV memory of CUDA device {self.device} is of no use here: {reason}. Choose "
            f"another device, or set device=cpu"
        )

    def _try_window(self, region: "CudaRegion", own: "torch.Tensor") -> None:
        """A page at a second address."""
        try:
            window = region.window(self.page_bytes)
            try:
                window.map(0, self.page_bytes, self.page_bytes)
                seen = window.tensor(own.dtype)
                own.fill_(9)
                _require(bool((seen == 9).all()), "there it is not what was written here")
            finally:
                window.close()
        except (RuntimeError, MemoryUnavailable) as error:
            self.cannot_share = f"no page can be seen at a second address ({one_line(error)})"

    def prepare(self, nbytes: int) -> None:
        """Create pages ahead, so that ``nbytes`` are kept: at most those that would stay.

        Raises: MemoryUnavailable.
        """
        self._granules.prepare(nbytes)

    def poll(self, *, wait: bool = False) -> None:
        """Unmap what has been given back, as far as no kernel can use it; with ``wait``, all.

        Other calls do it in passing. Call it when a device falls idle.
        """
        self._granules.settle(wait=wait)

    def trim(self, keep_bytes: int = 0) -> None:
        """Give kept pages back to the device until ``keep_bytes`` are left, or all are held.

        Raises: MemoryUnavailable if the driver refuses; what is left then is kept.
        """
        self._granules.settle()
        self._granules.trim(keep_bytes)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


@final
class _Addresses:
    """A reserved range. It is given back when neither its owner nor a tensor refers to it."""

    __slots__ = ("__weakref__", "_tensor_device", "table")

    def __init__(
        self, granules: Granules, nbytes: int, tensor_device: tuple[int, int], *, parks: bool
    ) -> None:
        granules.settle()
        try:
            self.table = granules.reserve(nbytes, parks=parks)
        except (MemoryUnavailable, OverflowError) as error:
            raise MemoryUnavailable(
                f"CUDA refused {format_bytes(nbytes)} of address space ({error}): reserve less "
                f"(cache=paged reserves no more than its ceiling; others max_num_seqs times "
                f"max_model_len)"
            ) from error
        self._tensor_device = tensor_device
        weakref.finalize(self, granules.forsake, self.table).atexit = False

    def another(self, granules: Granules, nbytes: int) -> "_Addresses":
        return _Addresses(granules, nbytes, self._tensor_device, parks=False)

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Return a tensor [bytes / itemsize] over the whole range, which keeps it."""
        table = self.table
        return bytes_at(table.start, table.nbytes, self._tensor_device, self).view(dtype)


@final
class CudaRegion:
    """A region; what is committed has a granule a page."""

    __slots__ = ("_addresses", "_granules", "_has_windows", "committed_bytes", "nbytes")

    def __init__(self, granules: Granules, addresses: _Addresses, *, has_windows: bool) -> None:
        self.nbytes = addresses.table.nbytes
        self.committed_bytes = 0
        self._granules = granules
        self._addresses: _Addresses | None = addresses  # None after close
        self._has_windows = has_windows

    def commit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        table = self.opened().table
        self._granules.settle()
        pages = self._pages(offset, nbytes, stride, count)
        self._granules.commit(table, pages)
        self.committed_bytes += nbytes * count

    def decommit(self, offset: int, nbytes: int, *, stride: int = 0, count: int = 1) -> None:
        shown = self.opened().table.shown
        self._hide([shown[page] for page in self._pages(offset, nbytes, stride, count)])
        self.committed_bytes -= nbytes * count
        self._granules.settle()

    def window(self, nbytes: int) -> "CudaWindow":
        own = self.opened()
        if not self._has_windows:
            raise ValueError("only a region that was reserved with heap_bytes has windows")
        nbytes = align_up(nbytes, self._granules.page_bytes)
        return CudaWindow(self, self._granules, own.another(self._granules, nbytes))

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        return self.opened().tensor(dtype)

    def close(self) -> None:
        """See ``Region``. Waits for the device, so that its memory is free on return."""
        if self._addresses is None:
            return
        self._hide(list(self._addresses.table.shown.values()))
        self._granules.retire(self._addresses.table)
        self.committed_bytes = 0
        self._addresses = None
        self._granules.settle(wait=True)

    def opened(self) -> _Addresses:
        """Return the addresses. Raises: ValueError after ``close``."""
        if self._addresses is None:
            raise ValueError("this memory region is closed")
        return self._addresses

    def _hide(self, granules: list[Granule]) -> None:
        """Hide granules wherever they are seen: else their memory would not go."""
        self._granules.hide([place for granule in granules for place in granule.places])

    def _pages(self, offset: int, nbytes: int, stride: int, count: int) -> list[int]:
        page = self._granules.page_bytes
        first, length, step = offset // page, nbytes // page, stride // page
        return [first + step * i + j for i in range(count) for j in range(length)]


@final
class CudaWindow:
    """A range of addresses; the device's page table is its table."""

    __slots__ = ("_addresses", "_granules", "_region", "nbytes")

    def __init__(self, region: CudaRegion, granules: Granules, addresses: _Addresses) -> None:
        self.nbytes = addresses.table.nbytes
        self._region = region
        self._granules = granules
        self._addresses: _Addresses | None = addresses  # None after close

    def map(self, offset: int, source: int, nbytes: int) -> None:
        """See ``Window``. Where something else was shown it waits for the device: a page table
        cannot be changed under a kernel.
        """
        table, pages = self._opened().table, self._pages(offset, nbytes)
        shown, first = self._region.opened().table.shown, source // self._granules.page_bytes
        granules = [shown[page] for page in range(first, first + len(pages))]
        self._granules.settle()
        self._granules.hide([(table, page) for page in pages])
        self._granules.show(table, pages, granules)

    def unmap(self, offset: int, nbytes: int) -> None:
        table = self._opened().table
        self._granules.hide([(table, page) for page in self._pages(offset, nbytes)])
        self._granules.settle()

    def tensor(self, dtype: "torch.dtype") -> "torch.Tensor":
        return self._opened().tensor(dtype)

    def close(self) -> None:
        if self._addresses is None:
            return
        table = self._addresses.table
        self._granules.hide([(table, page) for page in table.shown])
        self._addresses = None
        self._granules.settle()

    def _opened(self) -> _Addresses:
        self._region.opened()
        if self._addresses is None:
            raise ValueError("this memory window is closed")
        return self._addresses

    def _pages(self, offset: int, nbytes: int) -> range:
        page = self._granules.page_bytes
        return range(offset // page, (offset + nbytes) // page)


# -- dlpack ----------------------------------------------------------------------------------------

# Tensors over memory that torch knows nothing of: an address, a length and a device.
#
# DLPack names the device, so torch does not ask whose the address is. (CUDA's array interface
# makes it ask the driver, which cannot say before something is mapped there.)
#
# Source: DLPack, include/dlpack/dlpack.h


CPU = 1  # kDLCPU
CUDA = 2  # kDLCUDA
_UNSIGNED = 1  # kDLUInt


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def _make_deleter() -> Any:
    # Its names are its own: a tensor may die when this module has been taken apart already.
    cast, py_object, drop = ctypes.cast, ctypes.py_object, ctypes.pythonapi.Py_DecRef

    def delete(managed: Any) -> None:
        drop(cast(managed.contents.context, py_object))

    return ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))(delete)


_DELETER = _make_deleter()  # torch calls it, on any thread; ctypes takes Python's lock


@final
class _Export:
    """Holds all that must live until the last tensor is gone; torch refers to it by ``context``."""

    __slots__ = ("managed", "owner", "shape")

    def __init__(self, address: int, nbytes: int, device: tuple[int, int], owner: object) -> None:
        self.owner = owner
        self.shape = (ctypes.c_int64 * 1)(nbytes)
        dtype = _DataType(_UNSIGNED, 8, 1)
        tensor = _Tensor(address, _Device(*device), 1, dtype, self.shape)
        self.managed = _Managed(tensor, id(self), ctypes.cast(_DELETER, ctypes.c_void_p))
        for kept in (self, _DELETER):  # the deleter for ever: it cannot free itself while it runs
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def bytes_at(address: int, nbytes: int, device: tuple[int, int], owner: object) -> "torch.Tensor":
    """Return a tensor u8[nbytes] over memory that ``owner`` holds.

    The owner is kept until the last tensor that shares its memory dies. ``device`` is DLPack's: its
    kind (``CPU``, ``CUDA``) and its number.
    """
    from torch.utils.dlpack import from_dlpack

    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype = ctypes.py_object
    make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    export = _Export(address, nbytes, device, owner)
    capsule = make_capsule(ctypes.addressof(export.managed), b"dltensor", None)
    tensor: torch.Tensor = from_dlpack(capsule)
    return tensor
