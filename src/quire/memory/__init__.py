"""Where the bytes come from: reserved once, committed page by page. Importing it loads no torch.

``PROVIDERS`` has the names that the option ``memory_provider`` takes. A provider of another package
gets one as docs/guides/write-a-memory-provider.md shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from quire.memory.host.memory import HostMemory
from quire.memory.provider import MemoryProvider, Region, Window
from quire.memory.provider_wrappers import (
    CheckedMemory,
    CountedMemory,
    FailingMemory,
    LimitedMemory,
)
from quire.plugins import Registry

if TYPE_CHECKING:
    import torch

    from quire.memory.residency import Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What a provider is asked for by name. How much of it, the cache says when it reserves."""

    device: "torch.device"  # where the model runs: cpu, or cuda with a number
    residency: "Residency" = "on-demand"


MakeMemory: TypeAlias = Callable[[MemoryRequest], MemoryProvider]


def _auto(request: MemoryRequest) -> MemoryProvider:
    from quire.memory.by_device import memory_for  # a GPU's modules: 15 ms

    return memory_for(request.device, request.residency)


PROVIDERS: Registry[MakeMemory] = Registry(
    "memory provider",
    "quire.memory_providers",
    {"auto": _auto},
    lambda found: None if callable(found) else f"{found!r} takes no quire.memory.MemoryRequest",
)

__all__ = [
    "PROVIDERS",
    "CheckedMemory",
    "CountedMemory",
    "FailingMemory",
    "HostMemory",
    "LimitedMemory",
    "MakeMemory",
    "MemoryProvider",
    "MemoryRequest",
    "Region",
    "Window",
]
