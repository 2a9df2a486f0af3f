"""What the operating system says about memory: it is read here, and judged elsewhere."""

from quire.memory.machine.cuda import (
    CudaGauge,
    CudaPeak,
    DeviceMemory,
    cuda_devices,
    cuda_memory,
    may_have_cuda,
)
from quire.memory.machine.probe import MemoryBound
from quire.memory.machine.snapshot import (
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
