"""Memory of the CPU: private pages, and heaps whose pages are seen at several addresses."""

from quire.memory.host.heaps import HeapRegion, HeapWindow
from quire.memory.host.memory import HostMemory, HostRegion

__all__ = ["HeapRegion", "HeapWindow", "HostMemory", "HostRegion"]
