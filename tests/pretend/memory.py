"""Memory of the host, seen as memory of the device that is not there."""

from __future__ import annotations

from typing import Any

import torch

from pretend.runtime import Gpu
from pretend.tensor import PretendTensor
from quire.memory import HostMemory, MemoryProvider, Region, Window


class PretendMemory:
    """A ``MemoryProvider``."""

    def __init__(self, gpu: Gpu, upstream: MemoryProvider | None = None, *, index: int = 0) -> None:
        self._gpu, self._device = gpu, torch.device("cuda", index)
        self._upstream = HostMemory() if upstream is None else upstream

    @property
    def page_bytes(self) -> int:
        return self._upstream.page_bytes

    @property
    def cannot_share(self) -> str | None:
        return self._upstream.cannot_share

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        self._upstream.used_on(stream, ends=ends)

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> Region:
        region = self._upstream.reserve(nbytes, heap_bytes=heap_bytes)
        made: Region = _Seen(region, self)  # type: ignore[assignment]
        return made

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        return PretendTensor(tensor, self._gpu, self._device)


class _Seen:
    """A region or a window, but for its tensors."""

    def __init__(self, upstream: Region | Window, memory: PretendMemory) -> None:
        self._upstream, self._memory = upstream, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)

    def window(self, nbytes: int) -> Window:
        assert not isinstance(self._upstream, _Seen)
        made: Window = _Seen(self._upstream.window(nbytes), self._memory)  # type: ignore
        return made

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self._memory.seen(self._upstream.tensor(dtype))
