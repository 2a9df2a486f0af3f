"""A CUDA device's memory as torch and the driver tell it to this process.

NVML is not used: others have what the driver calls used and torch does not hold, so that a context,
compiled kernels and libraries count among the others.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from quire.errors import MemoryUnavailable
from quire.memory.machine.readings import MemoryReading


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """An accelerator's own memory."""

    name: str
    total_bytes: int
    free_bytes: int
    index: int = 0
    own_bytes: int = 0  # in the hands of this process's torch, weights among it

    @property
    def others_bytes(self) -> int:
        """Bytes of other processes, and of this one's driver and libraries."""
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)


def cuda_memory(index: int = 0) -> DeviceMemory | None:
    """Read a CUDA device's memory; None without one.

    Raises: MemoryUnavailable where there is one and it does not answer.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        free, total = torch.cuda.mem_get_info(index)
        return DeviceMemory(
            name=torch.cuda.get_device_name(index),
            total_bytes=total,
            free_bytes=free,
            index=index,
            own_bytes=torch.cuda.memory_reserved(index),
        )
    except RuntimeError as error:  # also when too little is left for as much as a context
        first_line = (str(error).splitlines() or [""])[0]
        raise MemoryUnavailable(
            f"CUDA device {index} does not say how much memory it has ({first_line}): if others "
            f"have taken all of it, end them, or choose another device"
        ) from error


def may_have_cuda(root: Path = Path("/")) -> bool:
    """Return whether a driver for CUDA is loaded, without importing torch, which takes long."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/dxg").exists()


def cuda_devices() -> tuple[DeviceMemory | str, ...]:
    """Read every CUDA device's memory, or in words why one does not say."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found: list[DeviceMemory | str] = []
    for index in range(torch.cuda.device_count()):
        try:
            memory = cuda_memory(index)
        except MemoryUnavailable as error:
            found.append(str(error))
        else:
            found += [] if memory is None else [memory]
    return tuple(found)


class CudaGauge:
    """Reads one device several times a second. It does not know which tasks wait for memory."""

    def __init__(self, index: int) -> None:
        self._index = index

    def now_s(self) -> float:
        return time.monotonic()

    def read(self) -> MemoryReading:
        memory = cuda_memory(self._index)
        if memory is None:
            raise MemoryUnavailable(f"CUDA device {self._index} has disappeared")
        return MemoryReading(
            total_bytes=memory.total_bytes,
            available_bytes=memory.free_bytes,
            source=memory.name,
        )


class CudaPeak:
    """The most that torch's allocator has handed out on one device, above where it began."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._begin_bytes = 0

    def begin(self) -> None:
        """Begin to measure, from what is allocated now."""
        import torch

        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._index)
        self._begin_bytes = torch.cuda.memory_allocated(self._index)

    def peak_bytes(self) -> int:
        """Return the most bytes since ``begin``, and give torch's unused memory back."""
        import torch

        torch.cuda.synchronize(self._index)
        peak = torch.cuda.max_memory_allocated(self._index) - self._begin_bytes
        torch.cuda.empty_cache()  # what it keeps for the next step, KV memory could not have
        return peak
