"""What differs by the device that KV memory lies on: its provider, its limits, its gauge.

A device is a ``torch.device``, ``cpu`` or ``cuda`` with a number.
"""

import logging
from typing import TYPE_CHECKING

from quire.errors import ConfigError, MemoryUnavailable, QuireError
from quire.memory.cuda.memory import CudaMemory
from quire.memory.cuda.resident import CudaResident
from quire.memory.machine.gpu import CudaGauge, DeviceMemory, cuda_memory
from quire.memory.machine.machine_state import Machine, read_limits, read_machine
from quire.memory.machine.probe import tells_memory
from quire.memory.machine.readings import Gauge, HostGauge
from quire.memory.provider import MemoryProvider
from quire.memory.residency import (
    HostResident,
    Residency,
    Resident,
    host_memory,
    keep_freed_memory,
)
from quire.units import format_bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def memory_for(device: "torch.device", residency: Residency) -> MemoryProvider:
    """Make the provider of a device's memory; no page is committed yet.

    Raises: ConfigError where the device or its driver cannot provide it. MemoryUnavailable where
    the device has no room to begin, or pages cannot be locked.
    """
    if device.type == "cpu":
        return host_memory(residency)
    if device.type != "cuda":
        raise ConfigError(
            f"device={device}: KV memory lies on a CPU or on a CUDA device; set device=cpu"
        )
    if residency == "lock":
        raise ConfigError(
            "residency=lock keeps pages from being swapped out, which those of a GPU never are: "
            "set residency=prefault to take all at the start, or leave it out"
        )
    import torch

    if torch.version.hip is not None:
        raise ConfigError(
            f"device={device}: this torch is for AMD GPUs, whose memory Quire cannot map yet; set "
            f"device=cpu"
        )
    index = _index(device)
    # The caller uses the memory on the stream that is current here: pages that are given back wait
    # for that stream's kernels. An engine calls from the default stream (``engine.cache_lock``).
    stream = torch.cuda.current_stream(index).cuda_stream
    memory = CudaMemory(device=index, stream=stream)
    memory.try_out()
    return memory


def why_no_memory(device: "torch.device") -> str | None:
    """Say why KV memory cannot lie on a device, and what to do; None if it can."""
    try:
        memory_for(device, "on-demand")
    except QuireError as error:
        return str(error)
    return None


def machine_for(device: "torch.device") -> Machine:
    """Read this machine, with the device's memory where KV goes there.

    Raises: MemoryUnavailable where the system or the device does not say how much there is.
    """
    return read_machine(device=_memory_of(device))


def known_machine(
    device: "torch.device", stated_bytes: int | None, *, limits_only: bool = False
) -> Machine | None:
    """Read this machine, or with ``limits_only`` its limits.

    Return None, and log a warning, where the system does not say how much memory there is and the
    user has stated bytes.

    Raises: MemoryUnavailable where the system does not say, and no bytes are stated.
    """
    if tells_memory():
        return read_limits(device=_memory_of(device)) if limits_only else machine_for(device)
    silent = "the system does not say how much memory there is (no /proc/meminfo)"
    if stated_bytes is None:
        raise MemoryUnavailable(f"{silent}: state the KV budget, kv_cache_memory_bytes, in bytes")
    log.warning(
        "%s: kv_cache_memory_bytes=%s is used as stated, and Quire cannot check that so much "
        "memory is available",
        silent,
        format_bytes(stated_bytes),
    )
    return None


def gauge_for(device: "torch.device") -> Gauge:
    """Return the gauge that tells how much of a device's memory is left at any moment."""
    return CudaGauge(_index(device)) if device.type == "cuda" else HostGauge()


def make_resident(
    provider: MemoryProvider,
    residency: Residency,
    capacity_bytes: int,
    *,
    keeps_freed: bool = False,
) -> Resident:
    """Make the memory of one cache, of up to ``capacity_bytes``, with the residency asked for.

    With ``keeps_freed`` and on the host, the C allocator keeps what steps free until it rests.

    Raises: MemoryUnavailable where so much may not be locked.
    """
    if isinstance(provider, CudaMemory):
        return CudaResident(provider, residency, capacity_bytes)
    if keeps_freed:
        keep_freed_memory()
    return HostResident(provider, residency, capacity_bytes)


def give_back_kept(provider: MemoryProvider) -> None:
    """Give back the pages that a GPU's memory keeps to commit them again.

    Raises: MemoryUnavailable where the driver does not take them.
    """
    if isinstance(provider, CudaMemory):
        provider.trim()


def _memory_of(device: "torch.device") -> DeviceMemory | None:
    if device.type != "cuda":
        return None
    found = cuda_memory(_index(device))
    if found is None:
        raise MemoryUnavailable(f"{device} does not say how much memory it has")
    return found


def _index(device: "torch.device") -> int:
    """Return a device's number; of one without a number, that of the device in use."""
    import torch

    return torch.cuda.current_device() if device.index is None else device.index
