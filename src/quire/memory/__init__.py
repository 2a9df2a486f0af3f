"""Where the bytes come from: reserved once, committed page by page. Importing it loads no torch."""

from quire.memory.checked import CheckedMemory
from quire.memory.host.memory import HostMemory
from quire.memory.provider import MemoryProvider, Region, Window
from quire.memory.provider_wrappers import CountedMemory, FailingMemory, LimitedMemory

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
