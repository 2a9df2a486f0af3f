"""What differs by where KV memory lies: who provides it, what limits it, who tells what is left.

A device is a ``torch.device``, ``cpu`` or ``cuda`` with a number. What is not known here is which
of them a model is on.
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
from quire.memory.residency import HostResident, Residency, Resident, host_memory
from quire.units import format_bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def memory_for(device: "torch.device", residency: Residency) -> MemoryProvider:
    """Make the memory of a device; none of it is taken yet.

    Raises: ConfigError, in words, where the device or what drives it cannot do this.
    MemoryUnavailable where it can, and has no room to begin, or pages cannot be locked.
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
            f"device={device}: this torch drives GPUs of AMD, whose memory is not mapped here yet; "
            f"set device=cpu"
        )
    index = _index(device)
    # The caller uses it on the stream that is current here: what is given back waits for that
    # stream's kernels. An engine calls from the default stream, and uses it there
    # (``engine.cache_lock``).
    stream = torch.cuda.current_stream(index).cuda_stream
    memory = CudaMemory(device=index, stream=stream)
    memory.try_out()
    return memory


def why_no_memory(device: "torch.device") -> str | None:
    """Say why KV memory cannot lie there, and what to do; None if it can."""
    try:
        memory_for(device, "on-demand")
    except QuireError as error:
        return str(error)
    return None


def machine_for(device: "torch.device") -> Machine:
    """Read this machine, with the device's memory where KV goes there.

    Raises: MemoryUnavailable where it is not told how much there is.
    """
    return read_machine(device=_memory_of(device))


def limits_for(device: "torch.device") -> Machine:
    """Read what limits memory there, in a millisecond (``read_limits``).

    Raises: MemoryUnavailable where it is not told how much there is.
    """
    return read_limits(device=_memory_of(device))


def known_machine(
    device: "torch.device", stated_bytes: int | None, *, limits_only: bool = False
) -> Machine | None:
    """Read as ``machine_for``, or with ``limits_only`` as ``limits_for``.

    Return None, and log a warning, where the system does not say and bytes are stated.

    Raises: MemoryUnavailable where it does not say, and they are not.
    """
    if tells_memory():
        return limits_for(device) if limits_only else machine_for(device)
    silent = "the system does not say how much memory there is (no /proc/meminfo)"
    if stated_bytes is None:
        raise MemoryUnavailable(f"{silent}: state the KV budget, kv_cache_memory_bytes, in bytes")
    log.warning(
        "%s: kv_cache_memory_bytes=%s is taken as it is, and nothing checks that there is so much",
        silent,
        format_bytes(stated_bytes),
    )
    return None


def gauge_for(device: "torch.device") -> Gauge:
    """Make the gauge that tells how much of that memory is left, at any moment."""
    return CudaGauge(_index(device)) if device.type == "cuda" else HostGauge()


def make_resident(provider: MemoryProvider, residency: Residency, capacity_bytes: int) -> Resident:
    """Make the memory of one cache, with the residency that was asked for.

    Raises: MemoryUnavailable where so much may not be locked.
    """
    if isinstance(provider, CudaMemory):
        return CudaResident(provider, residency, capacity_bytes)
    return HostResident(provider, residency, capacity_bytes)


def give_back_kept(provider: MemoryProvider) -> None:
    """Give back pages that a device's memory keeps for later. Raises: MemoryUnavailable."""
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
    """Its number; without one, that of the device in use."""
    import torch

    return torch.cuda.current_device() if device.index is None else device.index
