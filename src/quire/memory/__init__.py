"""Where the bytes come from: reserved once, committed page by page. Importing it loads no torch."""

from quire.memory.base import MemoryProvider, Region, Window
from quire.memory.checked import CheckedMemory
from quire.memory.composed import CountedMemory, FailingMemory, LimitedMemory
from quire.memory.host.memory import HostMemory

__all__ = [
    "CheckedMemory",
    "CountedMemory",
    "FailingMemory",
    "HostMemory",
    "LimitedMemory",
    "MemoryProvider",
    "Region",
    "Window",
]
