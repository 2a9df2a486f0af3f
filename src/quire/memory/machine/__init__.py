"""What the operating system says about memory: it is read here, and judged elsewhere."""

from quire.memory.machine.gpu import (
    CudaGauge,
    CudaPeak,
    DeviceMemory,
    cuda_devices,
    cuda_memory,
    may_have_cuda,
)
from quire.memory.machine.machine_state import (
    CgroupVersion,
    HugePages,
    Machine,
    Pressure,
    cgroup_version,
    read_limits,
    read_machine,
    read_pressure,
    unified_memory_cap,
    working_set,
)
from quire.memory.machine.probe import MemoryBound

__all__ = [
    "CgroupVersion",
    "CudaGauge",
    "CudaPeak",
    "DeviceMemory",
    "HugePages",
    "Machine",
    "MemoryBound",
    "Pressure",
    "cgroup_version",
    "cuda_devices",
    "cuda_memory",
    "may_have_cuda",
    "read_limits",
    "read_machine",
    "read_pressure",
    "unified_memory_cap",
    "working_set",
]
