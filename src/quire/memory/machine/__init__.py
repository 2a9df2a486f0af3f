"""What the operating system says about memory: it is read here, and judged elsewhere."""

from quire.memory.machine.probe import MemoryBound
from quire.memory.machine.snapshot import (
    CgroupVersion,
    DeviceMemory,
    HugePages,
    Machine,
    Pressure,
    cgroup_version,
    cuda_memory,
    read_machine,
    read_pressure,
    unified_memory_cap,
    working_set,
)

__all__ = [
    "CgroupVersion",
    "DeviceMemory",
    "HugePages",
    "Machine",
    "MemoryBound",
    "Pressure",
    "cgroup_version",
    "cuda_memory",
    "read_machine",
    "read_pressure",
    "unified_memory_cap",
    "working_set",
]
